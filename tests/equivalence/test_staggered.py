"""Micro-batches in turn, half a layer apart, where the CPU attends (strategy `moe-lightning`): order, and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridgen.attention.on_cpu import OnCpuAttention
from hybridgen.models.llama import LlamaModel
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.test_all_tokens import LAYERS, NAME, SETTINGS, start
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.zoo import ModelZoo


@pytest.mark.parametrize("micro_batch", [1, 2, 0.5])
def test_the_host_always_has_one_to_attend_to(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, micro_batch: float | int
) -> None:
    """After its first layer a micro-batch hands in the next layer's query before another one's result is awaited."""
    events: list[tuple[str, int, int]] = []
    begin, attend = OnCpuAttention.begin, OnCpuAttention.attend

    def note(what: str, original: Any) -> Any:
        def noted(self: Any, query: Any, *rest: Any) -> Any:
            events.append((what, self._layer, number[id(self)]))
            return original(self, query, *rest)

        return noted

    with engine(zoo.directory(NAME), SETTINGS, "aoc", runtime__micro_batch=micro_batch) as llm:
        batch = start(zoo, llm)
        count = len(batch.micro_batches)
        assert count == {1: 3, 2: 2, 0.5: 2}[micro_batch]
        number = {id(layer): m for m, some in enumerate(batch.micro_batches) for layer in some.layers}
        monkeypatch.setattr(OnCpuAttention, "begin", note("begin", begin))
        monkeypatch.setattr(OnCpuAttention, "attend", note("attend", attend))
        llm.decode(batch, [3, 4, 5])
    expected = [("begin", 0, m) for m in range(count)]
    for layer in range(LAYERS):
        for m in range(count):
            expected.append(("attend", layer, m))
            if layer + 1 < LAYERS:
                expected.append(("begin", layer + 1, m))
    assert events == expected


def test_nothing_is_staggered_where_the_device_attends(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams would only wait for each other."""
    order: list[int] = []
    qkv = LlamaModel.qkv

    def noted(self: Any, layer: int, *rest: Any) -> Any:
        order.append(layer)
        return qkv(self, layer, *rest)

    with engine(zoo.directory(NAME), SETTINGS, "aog", runtime__micro_batch=1, runtime__transfer="immediate") as llm:
        batch = start(zoo, llm)
        monkeypatch.setattr(LlamaModel, "qkv", noted)
        llm.decode(batch, [3, 4, 5])
    assert order == [layer for layer in range(LAYERS) for _ in range(3)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("name", "micro_batch"), [("opt", 1), ("llama-gqa2", 2), ("qwen2", 0.25)])
def test_tokens_of_full_attention(zoo: ModelZoo, name: str, micro_batch: float | int, depth: int) -> None:
    """With weights that come and go: the layer that is finished and the one that is begun are both there."""
    assert_greedy_equals_transformers(
        zoo, name, Settings(keep=0.1, window=16), (207, 12, 130, 64), "moe-lightning", runtime__micro_batch=micro_batch,
        placement__weights_on_gpu=0.3, placement__prefetch_depth=depth,
    )  # fmt: skip


@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
def test_aged_rows_are_attended_to(zoo: ModelZoo, transfer: str) -> None:
    with (
        engine(zoo.directory(NAME), SETTINGS, "aoc", runtime__micro_batch=1, runtime__transfer=transfer) as llm,
        engine(zoo.directory(NAME), SETTINGS, "full") as full,
    ):
        batches = [start(zoo, one, room=160) for one in (llm, full)]
        before = [layer._kv.host_lengths[0] for layer in batches[0].all_layers()]
        generator = torch.Generator().manual_seed(0)
        for _ in range(150):
            tokens = torch.randint(3, 90, (3,), generator=generator)
            logits, expected = (one.decode(batch, tokens) for one, batch in zip((llm, full), batches, strict=True))
            assert (logits - expected).abs().max() < LOGITS_TOLERANCE
        now = [layer._kv.host_lengths[0] for layer in batches[0].all_layers()]
        assert all(later >= earlier + 64 for earlier, later in zip(before, now, strict=True))
