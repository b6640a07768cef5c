"""InfiniGen and Quest in the engine keep what their definitions say, and at full budget they are full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.engine.llm import LLM
from hybridgen.offload.pieces import RepeatRecorder
from tests.equivalence.dense_scores import PAGE, DenseScores, Method
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

LOGITS_TOLERANCE = 3e-4
RAGGED = (386, 50, 236)  # the second has no host tier at first
STEPS = 24


def engine(directory: Path, strategy: str, method: Method, **overrides: Any) -> LLM:
    values = {
        "runtime.device": "cpu",
        "runtime.transfer": "lazy",
        "runtime.worker_threads": 0,
        "runtime.mass_probe_interval": 0,  # a probe moves bytes of its own
        "model.dtype": "float32",
        "model.exact_layers": list(method.exact),
        "model.exact_layers_mode": "resident" if method.exact else "select",
        "cache.gpu_window": method.window,
        "cache.sinks": method.sinks,
        "selection.keep": method.keep,
        "attention.lookahead": "select" if method.predicted else "off",
    }
    if strategy == "infinigen":
        values |= {"selection.alpha": method.alpha, "cache.partial_ratio": method.ratio}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return LLM(str(directory), values, strategy)


def compare(
    zoo: ModelZoo,
    name: str,
    strategy: str,
    method: Method,
    lengths: tuple[int, ...] = RAGGED,
    steps: int = STEPS,
    **overrides: Any,
) -> DenseScores:
    """Decode side by side; the method says what the reference does, and the engine is told the same."""
    dense = zoo.dense(name)
    prompts = [random_tokens(dense.vocab_size, length, seed=length) for length in lengths]
    reference = DenseScores(dense, method, len(lengths))
    logits = reference.prefill(prompts)
    generator = torch.Generator().manual_seed(5)
    with engine(zoo.directory(name), strategy, method, **overrides) as llm:
        batch = llm.new_batch([length + steps for length in lengths])
        close(llm.prefill(batch, prompts), logits, "prefill")
        for step in range(steps):
            tokens = torch.multinomial(logits.softmax(1), 1, generator=generator).flatten().tolist()
            llm.telemetry.begin_step()
            ours = llm.decode(batch, tokens)
            moved, before = llm.telemetry.end_step().bytes_moved, len(reference.kept)
            hosts = [sequence.hosts[-1] for sequence in reference.sequences]
            logits = reference.decode(tokens, batch.selections())
            assert not reference.problems, f"step {step}: {reference.problems[:3]}"
            close(ours, logits, f"step {step}")
            # K and V of n' rows of each KV head: 2 * n' * d * e, summed over sequences, KV heads and layers.
            expected = 2 * sum(reference.kept[before:]) * dense.head_dim * 4
            ageing = moved.pop("d2h", 0)  # blocks that leave for the host
            assert moved.pop("h2d", 0) == expected and not moved, f"step {step}"
            assert ageing % (2 * 64 * dense.kv_heads * dense.head_dim * 4) == 0
            assert batch.host_lengths(dense.num_layers - 1) == hosts, f"step {step}"
    return reference


def close(ours: Tensor, theirs: Tensor, where: str) -> None:
    difference = (ours.double() - theirs).abs().amax(1)
    assert (difference < LOGITS_TOLERANCE).all(), f"{where}: logits differ by {difference.tolist()}"


# -- InfiniGen

NATIVE = {"runtime__kernels": "native", "runtime__transfer": "immediate"}
ALPHA = Method("partial", keep=1.0, alpha=3.0, ratio=0.3)


@pytest.mark.parametrize(
    ("name", "method", "overrides"),
    [
        ("opt", ALPHA, {}),
        ("llama-gqa2", ALPHA, {}),
        ("llama-gqa3", Method("partial", 0.5, 6.0, 0.5, window=16), {"runtime__transfer": "immediate"}),
        ("llama-gqa4", Method("partial", 0.05, 8.0, 0.1, predicted=False), {}),
        ("qwen2", ALPHA, NATIVE),
        ("llama-mha", Method("partial", 0.3, 4.0, 1.0), NATIVE),
        ("llama3-rope", Method("partial", 12, None, 0.2), {}),  # no alpha: the cap alone
    ],
    ids=["opt", "gqa2", "gqa3", "gqa4, true query", "qwen2, native", "mha, all columns", "llama3, by count"],
)
def test_what_infinigen_keeps(zoo: ModelZoo, name: str, method: Method, overrides: dict[str, Any]) -> None:
    reference = compare(zoo, name, "infinigen", method, **overrides)
    assert max(reference.kept) > 0
    if method.keep == 1.0:
        assert any(0 < by_alpha < most for by_alpha, most in reference.limits)
    if method.keep == 0.05:
        assert any(by_alpha > most for by_alpha, most in reference.limits), "the cap binds"


def test_all_columns_and_the_true_query_choose_the_true_best(zoo: ModelZoo) -> None:
    """Oracle 4 of algorithms.md: the reference knows of no columns, and scores by the keys themselves."""
    for name in ("opt", "llama-gqa2"):
        method = Method("keys", 0.5, 4.0, 1.0, predicted=False)
        compare(zoo, name, "infinigen", method, steps=8)


def test_one_number_for_a_batch_of_equal_lengths(zoo: ModelZoo) -> None:
    """int(mean over sequences and query heads): the published rule. And one for each micro-batch."""
    for micro_batch in (0, 1):
        with engine(zoo.directory("llama-gqa2"), "infinigen", ALPHA, runtime__micro_batch=micro_batch) as llm:
            batch = llm.new_batch([330] * 3)
            prompts = [random_tokens(113, 320, seed) for seed in (1, 2, 3)]
            llm.prefill(batch, prompts)
            llm.decode(batch, [5, 6, 7])
            for layer, chosen in batch.selections().items():
                counts = [{len(rows) for rows in heads} for heads in chosen]
                assert all(len(count) == 1 for count in counts), layer
                if not micro_batch:
                    assert len(set.union(*counts)) == 1


@pytest.mark.parametrize("lengths", [(207,), (207, 12, 130)], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "llama-gqa3"])
def test_without_limits_both_are_full_attention(
    zoo: ModelZoo, name: str, transfer: str, lengths: tuple[int, ...]
) -> None:
    """Oracle 3: alpha without bound, or every page."""
    settings = Settings(keep=1.0, window=16, exact_layers=(0, 1))
    infinite = {"selection__alpha": float("inf"), "runtime__transfer": transfer}
    assert_greedy_equals_transformers(zoo, name, settings, lengths, "infinigen", **infinite)
    settings = Settings(keep=1.0, window=16, exact_layers=(0, 1), lookahead="off")
    assert_greedy_equals_transformers(zoo, name, settings, lengths, "quest", runtime__transfer=transfer)


# -- Quest


@pytest.mark.parametrize(
    ("name", "method", "overrides"),
    [
        ("opt", Method("pages", 0.3, predicted=False), {}),
        ("llama-gqa2", Method("pages", 40, predicted=False, window=16), {"runtime__transfer": "immediate"}),
        ("llama-gqa3", Method("pages", 0.2), {}),  # a layer ahead
        ("qwen2", Method("pages", 0.1, predicted=False), NATIVE | {"runtime__kernels": "torch"}),
    ],
    ids=["opt", "gqa2, by count", "gqa3, predicted", "qwen2"],
)
def test_what_quest_keeps(zoo: ModelZoo, name: str, method: Method, overrides: dict[str, Any]) -> None:
    reference = compare(zoo, name, "quest", method, **overrides)
    assert all(count % PAGE == 0 for count in reference.kept) and max(reference.kept) > 0


def test_pages_are_whole(zoo: ModelZoo) -> None:
    with engine(zoo.directory("llama-gqa2"), "quest", Method("pages", 0.2, predicted=False)) as llm:
        batch = llm.new_batch([400])
        llm.prefill(batch, [random_tokens(113, 386, 1)])
        for token in (5, 6, 7):
            llm.decode(batch, [token])
            for heads in batch.selections().values():
                for positions in heads[0]:
                    rows = {position - 4 for position in positions}  # of the host
                    assert len(rows) == 64  # 0.2 of 256 or 320 is 51.2 or 64, and pages are whole
                    pages = {row // PAGE for row in rows}
                    assert rows == {PAGE * page + row for page in pages for row in range(PAGE)}


# -- both


@pytest.mark.parametrize("strategy", ["infinigen", "quest"])
def test_whole_steps_are_repeated(zoo: ModelZoo, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lazy engine does again what was recorded: an input that was not named shows in the reference's judgement."""
    recorded: list[object] = []
    capture = RepeatRecorder.capture

    def counted(self: RepeatRecorder, work: Any) -> Any:
        if "decode_step" in work.__qualname__:
            recorded.append(work)
        return capture(self, work)

    monkeypatch.setattr(RepeatRecorder, "capture", counted)
    partial = Method("partial", 0.5, 3.0, 0.5, exact=())  # nothing of a step is the CPU's
    method = partial if strategy == "infinigen" else Method("pages", 0.2, predicted=False, exact=())
    compare(zoo, "llama-gqa2", strategy, method, (250, 180), steps=72)
    assert len(recorded) >= 2  # again when a block has aged


@pytest.mark.parametrize("key_type", ["int8", "bf16"])
def test_beside_keys_in_fewer_bits(zoo: ModelZoo, key_type: str) -> None:
    """What scores is made of the keys as they were, whatever the host keeps."""
    for strategy, kind in (("infinigen", "partial"), ("quest", "pages")):
        method = Method("partial", 0.5, 3.0) if strategy == "infinigen" else Method("pages", 0.2)
        with engine(zoo.directory("opt"), strategy, method, cache__key_type=key_type) as llm:
            batch = llm.new_batch([400])
            logits = llm.prefill(batch, [random_tokens(101, 386, 1)])
            for _ in range(3):
                logits = llm.decode(batch, logits.argmax(1))
            assert logits.isfinite().all()
            stored = "int8" if key_type == "int8" else "bfloat16"
            assert batch.micro_batches[0].layers[3].key_kind == f"{stored}+{kind}"


def test_a_further_turn_keeps_its_columns(zoo: ModelZoo) -> None:
    """Columns and A are of the first prompt; a block that comes by a later one is scored by the same."""
    with engine(zoo.directory("llama-gqa2"), "infinigen", ALPHA) as llm:
        batch = llm.new_batch([500])
        text = random_tokens(113, 420, 1)
        llm.prefill(batch, [text[:300]])
        sketch: Any = batch.micro_batches[0].layers[3]._kv.host_keys.sketch  # type: ignore[attr-defined]
        before = sketch.projection.clone()
        llm.prefill(batch, [text[300:]])
        assert torch.equal(sketch.projection, before)
        llm.decode(batch, [5])
        (rows,) = batch.host_lengths(3)
        keys = torch.empty(2, 421, 16), torch.empty(2, 421, 16)
        batch.micro_batches[0].layers[3].load_past(0, *keys)
        expected = (keys[0][:, 4 : 4 + rows] @ before[0]).mT
        assert rows >= 320
        torch.testing.assert_close(sketch.columns[0, :, :, :rows], expected, rtol=1e-5, atol=1e-5)
