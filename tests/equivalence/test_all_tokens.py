"""Strategies `aog` and `aoc`: attention to every host token, streamed to the device or done by the CPU.

Their tokens are those of full attention (`test_full_budget.py` has every family); here is what else they promise.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hybridgen.attention.streamed import StreamedAttention
from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.models.llama import LlamaModel
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import Settings, prefill_host_length
from tests.equivalence.test_forgotten_wait import forget, is_host_rows, is_query
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

NAME = "llama-gqa2"
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 6
SETTINGS = Settings(keep=0.1, window=16)
LENGTHS = (207, 12, 130)
STRATEGIES = ("aog", "aoc", "offload-dense")


def start(zoo: ModelZoo, llm: LLM, lengths: tuple[int, ...] = LENGTHS, room: int = 100) -> Any:
    batch = llm.new_batch([length + room for length in lengths])
    prompts = [random_tokens(zoo.dense(NAME).vocab_size, length, seed=length) for length in lengths]
    llm.prefill(batch, prompts)
    return batch


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_and_budget(zoo: ModelZoo, strategy: str) -> None:
    """algorithms.md, section 0. The host holds blocks of 64; nothing ages in the first step."""
    statistics = AttentionStatistics()
    with engine(zoo.directory(NAME), SETTINGS, strategy) as llm:
        batch = start(zoo, llm)
        llm.telemetry.begin_step()
        llm.decode(batch, [3, 4, 5])
        statistics.observe(batch)
        timings = llm.telemetry.end_step()
        assert set(llm.modes) == {"on_cpu" if strategy == "aoc" else "streamed"}
        assert {plan.mode for plan in batch.plans[0].layers} == {"all"}
    host = sum(prefill_host_length(length, 4, 16) for length in LENGTHS)
    kv = LAYERS * 2 * host * KV_HEADS * HEAD_DIM * 4
    if strategy != "aoc":
        assert timings.bytes_moved == {"h2d": kv} and timings.stage_bytes["stream"] == kv
    else:
        query, context = LAYERS * 3 * HEADS * HEAD_DIM * 4, LAYERS * 3 * HEADS * (HEAD_DIM + 1) * 4
        assert timings.bytes_moved == {"cpu_read": kv, "d2h": query, "h2d": context}
    summary = statistics.summary()
    assert summary["budget"] == 1.0
    assert summary["kept_fraction"] is None and summary["mass_mean"] is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_aged_rows_are_attended_to(zoo: ModelZoo, strategy: str) -> None:
    """150 steps: every layer of each sequence ages once at least."""
    with engine(zoo.directory(NAME), SETTINGS, strategy) as llm, engine(zoo.directory(NAME), SETTINGS, "full") as full:
        batches = [start(zoo, one, room=160) for one in (llm, full)]
        layers: list[Any] = batches[0].micro_batches[0].layers
        before = [list(layer._kv.host_lengths) for layer in layers]
        generator = torch.Generator().manual_seed(0)
        for _ in range(150):
            tokens = torch.randint(3, 90, (3,), generator=generator)
            logits, expected = (one.decode(batch, tokens) for one, batch in zip((llm, full), batches, strict=True))
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE
        for layer, lengths in zip(layers, before, strict=True):
            assert all(now >= then + 64 for now, then in zip(layer._kv.host_lengths, lengths, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_host_tier_yet(zoo: ModelZoo, strategy: str) -> None:
    """One short sequence: the window holds it until the first block ages."""
    with engine(zoo.directory(NAME), SETTINGS, strategy) as llm, engine(zoo.directory(NAME), SETTINGS, "full") as full:
        batches = [start(zoo, one, (5,), room=120) for one in (llm, full)]
        for step in range(110):
            token = [3 + step % 80]
            logits, expected = (one.decode(batch, token) for one, batch in zip((llm, full), batches, strict=True))
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE
        assert max(batches[0].micro_batches[0].layers[0]._kv.host_lengths) == 64


@pytest.mark.parametrize("ahead", [True, False])
def test_rows_are_sent_for_while_the_layer_before_computes(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Or, without `attention.stream_ahead`, when the layer begins, which then waits before it does anything else."""
    events: list[tuple[str, int]] = []
    bring, attend, wait = StreamedAttention.bring, StreamedAttention.attend, StreamedAttention._wait_for_rows
    qkv = LlamaModel.qkv

    def noted_bring(self: Any) -> None:
        if self._arrival is None:
            events.append(("bring", self._layer))
        bring(self)

    def noted_attend(self: Any, *arguments: Any) -> Any:
        events.append(("attend", self._layer))
        return attend(self, *arguments)

    def noted_wait(self: Any) -> None:
        events.append(("wait", self._layer))
        wait(self)

    def noted_qkv(self: Any, layer: int, *arguments: Any) -> Any:
        events.append(("qkv", layer))
        return qkv(self, layer, *arguments)

    strategy = "aog" if ahead else "offload-dense"
    with engine(zoo.directory(NAME), SETTINGS, strategy, runtime__transfer="immediate") as llm:
        batch = start(zoo, llm)
        monkeypatch.setattr(StreamedAttention, "bring", noted_bring)
        monkeypatch.setattr(StreamedAttention, "attend", noted_attend)
        monkeypatch.setattr(StreamedAttention, "_wait_for_rows", noted_wait)
        monkeypatch.setattr(LlamaModel, "qkv", noted_qkv)
        for _ in range(2):
            llm.decode(batch, [3, 4, 5])
    step = [("bring", 0)] if ahead else []
    for layer in range(LAYERS):
        if ahead:
            step += [("bring", layer + 1)] if layer + 1 < LAYERS else []
            step += [("qkv", layer), ("attend", layer), ("wait", layer)]
        else:
            step += [("bring", layer), ("wait", layer), ("qkv", layer), ("attend", layer)]
    assert events == step * 2


def is_streamed(targets: list[torch.Tensor], direction: str) -> bool:
    return direction == "h2d" and len(targets) == 2


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("aog", is_streamed),
        ("aog", is_host_rows),
        ("offload-dense", is_streamed),
        ("aoc", is_query),
        ("aoc", is_host_rows),
    ],
    ids=["aog, streamed rows", "aog, aged rows", "offload-dense, streamed rows", "aoc, query", "aoc, aged rows"],
)
def test_a_forgotten_wait_shows(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: Any) -> None:
    with engine(zoo.directory(NAME), SETTINGS, strategy) as llm:
        batch = start(zoo, llm, (140, 146))
        assert llm.decode(batch, [3, 4]).isfinite().all()
        forgotten = forget(monkeypatch, kind)
        logits = [llm.decode(batch, [3, 4]) for _ in range(25)]
    assert forgotten and logits[-1].isnan().any()


@pytest.mark.parametrize("key_type", ["int8", "bf16"])
def test_the_cpu_attends_to_the_keys_that_are_stored(zoo: ModelZoo, key_type: Any) -> None:
    """As hybrid attention that keeps everything and waits for its true query."""
    settings = Settings(keep=1.0, window=16, lookahead="off", exact_layers=(0,), exact_mode="select", key_type=key_type)
    with engine(zoo.directory(NAME), settings, "aoc") as llm, engine(zoo.directory(NAME), settings) as hybrid:
        batches = [start(zoo, one) for one in (llm, hybrid)]
        kinds = {layer.key_kind for layer in batches[0].micro_batches[0].layers}
        assert kinds == {layer.key_kind for layer in batches[1].micro_batches[0].layers}
        for step in range(30):
            logits, expected = (
                one.decode(batch, [3 + step, 4, 5]) for one, batch in zip((llm, hybrid), batches, strict=True)
            )
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_memory_is_used_again(zoo: ModelZoo, strategy: str) -> None:
    """What a batch had of it goes to the next one, and nobody keeps it alive."""
    with engine(zoo.directory(NAME), SETTINGS, strategy) as llm:
        allocated = []
        for _ in range(4):
            batch = start(zoo, llm)
            llm.decode(batch, [3, 4, 5])
            del batch
            gc.collect()
            allocated.append(llm.host_memory["slabs_allocated"])
        assert len(set(allocated)) == 1 and llm.host_memory["slabs_reused"] > 0
