"""Where the weights lie changes nothing: not a token, not a bit of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.offload.transfer import LazyTransfer, Ticket
from tests.equivalence.against_engine import engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.tiny_models import TINY_MODELS, random_tokens
from tests.equivalence.zoo import ModelZoo

SHARES = [0.0, 0.1, 0.37, 0.5, 0.9]
SETTINGS = Settings(keep=0.3, window=16, exact_layers=(0,))
LENGTHS, STEPS, TURN = (150, 90), 6, (20, 33)


def run(zoo: ModelZoo, name: str, settings: Settings = SETTINGS, **overrides: Any) -> tuple[list[Tensor], float]:
    """Logits of a prompt, decode steps, a further turn and more steps; and the realised share of the weights."""
    vocab_size = zoo.dense(name).vocab_size
    with engine(zoo.directory(name), settings, **overrides) as llm:
        batch = llm.new_batch([length + turn + 2 * STEPS for length, turn in zip(LENGTHS, TURN, strict=True)])
        found: list[Tensor] = []
        for lengths in (LENGTHS, TURN):
            found.append(llm.prefill(batch, [random_tokens(vocab_size, length, seed=length) for length in lengths]))
            for _ in range(STEPS):
                found.append(llm.decode(batch, found[-1].argmax(1)))
        return found, llm.weights_on_gpu


def assert_same(zoo: ModelZoo, name: str, share: float, settings: Settings = SETTINGS, **overrides: Any) -> None:
    expected, everything = run(zoo, name, settings, placement__weights_on_gpu=1.0, **overrides)
    found, realised = run(zoo, name, settings, placement__weights_on_gpu=share, **overrides)
    assert everything == 1.0 and 0 <= realised < 1.0
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        # The same operations on the same numbers.
        assert torch.equal(ours, theirs), f"step {step}: {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_and_share(zoo: ModelZoo, name: str, share: float) -> None:
    assert_same(zoo, name, share)


@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
def test_depth_transfer_and_lookahead(zoo: ModelZoo, lookahead: Any, depth: int, transfer: str) -> None:
    for share in (0.0, 0.5):
        settings = Settings(keep=0.3, window=16, exact_layers=(0,), lookahead=lookahead)
        overrides = {"placement__prefetch_depth": depth, "runtime__transfer": transfer}
        assert_same(zoo, "llama-gqa2", share, settings, **overrides)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    "overrides",
    [
        {"runtime__prefill_chunk": 37},
        {"runtime__micro_batch": 1},
        {"placement__prefetch_depth": 9},
        {"runtime__prefill_chunk": 50, "runtime__micro_batch": 1, "placement__prefetch_depth": 1},
    ],
    ids=["pieces", "micro-batches", "more slots than layers", "all of it"],
)
def test_pieces_and_micro_batches(zoo: ModelZoo, overrides: dict[str, Any], share: float) -> None:
    assert_same(zoo, "opt", share, **overrides)


def test_strategies_that_share_the_weights(zoo: ModelZoo) -> None:
    """Two strategies in turn, over one set of slots."""
    name = "qwen2"
    prompt = random_tokens(zoo.dense(name).vocab_size, 150, seed=1)
    results = []
    for share in (1.0, 0.3):
        with engine(zoo.directory(name), SETTINGS, placement__weights_on_gpu=share) as llm:
            other = llm.sharing(llm.config, ("resident",) * llm.spec.num_layers)
            batches = [llm.new_batch([200]), other.new_batch([200])]
            logits = llm.prefill(batches[0], [prompt], mirrors=batches[1:])
            tokens = [[logits.argmax(1)] for _ in batches]
            for _ in range(STEPS):
                for one, batch, found in zip((llm, other), batches, tokens, strict=True):
                    found.append(one.decode(batch, found[-1]).argmax(1))
            results.append(torch.tensor(tokens))
    assert torch.equal(*results)


@pytest.mark.parametrize("lookahead", ["select", "off"])
def test_a_forgotten_wait_is_caught(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, lookahead: Any) -> None:
    """Of any one copy of a step, forgotten from then on."""
    settings = Settings(keep=1.0, window=16, exact_layers=(0,), lookahead=lookahead)
    bring = LazyTransfer.bring
    copies = 0

    def careless(self: LazyTransfer, *args: Any) -> Ticket:
        nonlocal copies
        ticket, copies = bring(self, *args), copies + 1
        return Ticket() if copies == forgotten else ticket

    for forgotten in (0, 3, 10, 17, 30, 44):
        with engine(zoo.directory("opt"), settings, placement__weights_on_gpu=0.3) as llm:
            batch = llm.new_batch([200])
            prompt = random_tokens(llm.spec.vocab_size, 150, seed=1)
            llm.prefill(batch, [prompt])
            copies = 0
            with monkeypatch.context() as patch:
                patch.setattr(LazyTransfer, "bring", careless)
                logits = [llm.decode(batch, [3 + step]) for step in range(4)]
            assert copies > 44
            assert bool(logits[-1].isnan().any()) == (forgotten > 0)
