"""`--synthetic-kv`: K and V that no prompt has made, which go the way of every prefill and are decoded over as any."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.config import Setting, build_config
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from tests.equivalence.against_engine import LOGITS_TOLERANCE
from tests.equivalence.zoo import ModelZoo

NAME, LENGTHS = "llama-gqa2", (207, 12, 130)
LAYERS, KV_HEADS, HEAD_DIM = 6, 2, 16


def opened(directory: Path, strategy: str, **settings: Any) -> LLM:
    given = {
        "model.weights": "random", "runtime.synthetic_kv": True, "cache.gpu_window": 16, "model.exact_layers": [0],
    }  # fmt: skip
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    if strategy == "hybridgen":
        given |= {"selection.keep": 1.0, "selection.keep_mass": None}
    return LLM(str(directory), given, strategy)


def filled(llm: LLM, prompts: tuple[int, ...] = LENGTHS) -> Any:
    """A batch whose prompts' tokens are all 5: what they say has no part in it."""
    batch = llm.new_batch([length + 40 for length in prompts])
    llm.prefill(batch, [[5] * length for length in prompts])
    return batch


def past(batch: Any, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
    keys, values = (torch.empty(KV_HEADS, batch.lengths[sequence], HEAD_DIM) for _ in range(2))
    batch.micro_batches[0].layers[layer].load_past(sequence, keys, values)
    return keys, values


def test_same_numbers_whatever_the_strategy(zoo: ModelZoo) -> None:
    """And others in other layers, of other sequences, with another seed."""
    with ExitStack() as stack:
        one, other, seeded = (
            filled(stack.enter_context(opened(zoo.directory(NAME), strategy, run__seed=seed)))
            for strategy, seed in (("full", 1), ("hybridgen", 1), ("full", 2))
        )
        seen: list[Tensor] = []
        for layer in range(LAYERS):
            for sequence, length in enumerate(LENGTHS):
                ours, theirs = past(one, layer, sequence), past(other, layer, sequence)
                assert ours[0].shape[1] == length
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
                assert abs(float(ours[0].std()) - 1) < 0.2 and abs(float(ours[1].std()) - 1) < 0.2
                seen += [part[:, :12] for part in (*ours, *past(seeded, layer, sequence))]
    assert len({tuple(part.flatten().tolist()) for part in seen}) == len(seen)


@pytest.mark.parametrize("strategy", ["hybridgen", "aog", "aoc", "moe-lightning", "h2o", "streaming-llm"])
def test_decode_attends_to_them(zoo: ModelZoo, strategy: str) -> None:
    """With room for all tokens: the logits of full attention over the same K and V."""
    room: dict[str, Any] = {"eviction__heavy": 0.5, "eviction__recent": 500} if strategy == "h2o" else {}
    if strategy == "streaming-llm":
        strategy, room = "streaming-llm-original", {"eviction__recent": 500}
    generator = torch.Generator().manual_seed(0)
    with opened(zoo.directory(NAME), "full") as full, opened(zoo.directory(NAME), strategy, **room) as llm:
        batches = filled(full), filled(llm)
        for _ in range(8):
            tokens = torch.randint(3, 90, (3,), generator=generator)
            expected, logits = (one.decode(batch, tokens) for one, batch in zip((full, llm), batches, strict=True))
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE


def test_a_further_turn(zoo: ModelZoo) -> None:
    """What was there stays, and no turn has another's numbers. With the largest seed there is."""
    with opened(zoo.directory(NAME), "hybridgen", run__seed=2**63 - 1) as llm:
        batch = llm.new_batch([400])
        llm.prefill(batch, [[5] * 150])
        before = past(batch, 3, 0)
        llm.prefill(batch, [[5] * 100])
        llm.prefill(batch, [[5] * 100])
        after = past(batch, 3, 0)
    assert batch.lengths == [350]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new[:, :150])
        assert not any(torch.equal(new[:, a : a + 100], new[:, b : b + 100]) for a, b in ((0, 150), (150, 250)))


@pytest.mark.parametrize("transfer", ["immediate", "lazy"])
def test_beside_weights_that_stream(zoo: ModelZoo, transfer: str) -> None:
    """And in micro-batches: the same logits as with all weights on the device."""
    streamed = {"placement__weights_on_gpu": 0.3, "runtime__micro_batch": 2, "runtime__transfer": transfer}
    with opened(zoo.directory(NAME), "full") as full, opened(zoo.directory(NAME), "aog", **streamed) as llm:
        batches = filled(full), filled(llm)
        for token in (3, 4, 5):
            expected, logits = (one.decode(batch, [token] * 3) for one, batch in zip((full, llm), batches, strict=True))
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE


def test_real_weights_are_refused() -> None:
    settings = {"runtime.synthetic_kv": Setting(True, "--synthetic-kv"), "model.weights": Setting("real", "--weights")}
    with pytest.raises(ConfigError, match=r"--synthetic-kv with model.weights = 'real'.*allowed: --weights random"):
        build_config(settings)
