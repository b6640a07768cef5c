"""Byte truth: what the engine counts in a decode step is what the formulas say; and budgets as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybridgen.config import Setting, build_config, load_strategy, strategy_names, with_settings
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.evaluation.budgets import with_budget, with_keep
from hybridgen.evaluation.byte_formulas import layer_bytes, sizes_of, step_bytes
from hybridgen.models import spec_of
from hybridgen.models.checkpoint import fetch_config, locate
from hybridgen.models.spec import ModelSpec
from hybridgen.telemetry import StepTimings
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

GQA, MHA = "llama-gqa2", "opt"
BLOCK = 64
EVICTING = ("h2o", "keyformer", "snapkv", "streaming-llm", "streaming-llm-original")
ALL_WITHIN: dict[str, Any] = {"selection__alpha": 1e9}  # of the largest logit: K is the cap
EXACTLY: dict[str, dict[str, Any]] = {  # known to the byte
    **{name: {} for name in ("full", "aog", "aoc", "offload-dense", "moe-lightning")},
    **{name: {} for name in ("hybridgen", "hybridgen-paper", "quest")},
    "infinigen": ALL_WITHIN,
}


@contextmanager
def started(
    zoo: ModelZoo, name: str, strategy: str, lengths: Sequence[int], room: int, keep: Any = 0.2, **overrides: Any
) -> Iterator[tuple[LLM, Any]]:
    """The engine after a prefill. keep: None for what the strategy's file says."""
    settings = load_strategy(strategy)
    if keep is not None:
        settings = with_keep(settings, keep, min(lengths))
    values = {path: setting.value for path, setting in settings.items()}
    values |= {
        "runtime.device": "cpu",
        "runtime.mass_probe_interval": 0,
        "model.exact_layers": [0],
        "model.exact_layers_mode": "resident",
        "cache.gpu_window": 32,
    }
    values |= {path.replace("__", "."): value for path, value in overrides.items()}
    with LLM(str(zoo.directory(name)), values, strategy) as llm:
        batch = llm.new_batch([length + room for length in lengths])
        llm.prefill(batch, [random_tokens(llm.spec.vocab_size, length, seed=length) for length in lengths])
        yield llm, batch


def step(llm: LLM, batch: Any) -> StepTimings:
    llm.telemetry.begin_step()
    llm.decode(batch, [5 + len(batch.plans) % 80] * len(batch.capacities))
    return llm.telemetry.end_step()


@pytest.mark.parametrize("strategy", strategy_names())
@pytest.mark.parametrize("name", [GQA, MHA])
def test_every_step_within_padding_and_ageing_blocks(zoo: ModelZoo, name: str, strategy: str) -> None:
    """70 steps: every layer sends a block to the host, which may be there a block later than the length alone says."""
    sequences = 2
    with started(zoo, name, strategy, (731,) * sequences, 72) as (llm, batch):
        config = with_settings(llm.config, {"run.batch": sequences})
        row = sum(layer.kv_bytes_per_token(4) for layer in llm.spec.layers)  # K and V
        logits = sum(4 * layer.num_heads for layer in llm.spec.layers)
        block, left = sequences * BLOCK, 0.0
        for _ in range(70):
            moved = step(llm, batch).bytes_moved
            expected = step_bytes(llm.spec, config, llm.modes, torch.float32, batch.lengths[0], False, 731)
            more = moved.get("h2d", 0) - expected.h2d
            assert more <= block * (row + logits)
            if getattr(config.selection, "alpha", None) is None:  # else K is an outcome, and the formula its bound
                assert more >= -block * (row + logits)
            assert abs(moved.get("cpu_read", 0) - expected.cpu_read) <= block * row
            left += moved.get("d2h", 0) - expected.d2h
            assert abs(left) <= block * row, "a row's share in every step is a block in one of them"


@pytest.mark.parametrize("strategy", EXACTLY)
@pytest.mark.parametrize("name", [GQA, MHA])
@pytest.mark.parametrize("transfer", ["immediate", "lazy"])
def test_every_step_to_the_byte(zoo: ModelZoo, name: str, strategy: str, transfer: str) -> None:
    """With the host rows that each layer has in the step, and the blocks that leave it."""
    with started(zoo, name, strategy, (300,), 72, runtime__transfer=transfer, **EXACTLY[strategy]) as (llm, batch):
        sizes, layers = sizes_of(llm.config, torch.float32, False), batch.micro_batches[0].layers
        seen_blocks = 0
        for _ in range(70):
            moved = step(llm, batch).bytes_moved
            expected = {"d2h": 0.0, "h2d": 0.0, "cpu_read": 0.0}
            for spec, mode, attention in zip(llm.spec.layers, llm.modes, layers, strict=True):
                kv = getattr(attention, "_kv", None)
                rows = kv.host_lengths[0] if mode != "resident" else 0
                layer = layer_bytes(spec, llm.config, mode, sizes, rows, batch.lengths[0])
                aged = 0.0 if mode == "resident" else 2 * spec.num_kv_heads * spec.head_dim * 4
                blocks = len(kv._ageing) if mode != "resident" else 0
                seen_blocks += blocks
                expected["d2h"] += layer.d2h - aged + blocks * BLOCK * aged
                expected["h2d"] += layer.h2d
                expected["cpu_read"] += layer.cpu_read
            assert {path: moved.get(path, 0) for path in expected} == pytest.approx(expected)
        assert (seen_blocks > 0) == (strategy != "full")


@pytest.mark.parametrize("shares", [{}, {"heavy": 0.05, "recent": 0.07}, {"heavy": 200, "recent": 130}], ids=str)
@pytest.mark.parametrize("strategy", EVICTING)
@pytest.mark.parametrize("name", [GQA, MHA])
def test_every_step_of_an_evicting_cache_on_the_host_to_the_byte(
    zoo: ModelZoo, name: str, strategy: str, shares: dict[str, Any]
) -> None:
    """All layers but the first; 40 steps after 300 tokens: what is kept does not grow, but SnapKV's.

    Independent of the formulas: the slots that hold tokens, and the free one once a head is full.
    """
    prompt, streaming = 300, strategy.startswith("streaming")
    more = {f"eviction__{key}": value for key, value in shares.items() if not (streaming and key == "heavy")}
    keep = None if shares else 0.2
    with started(zoo, name, strategy, (prompt,), 72, keep, eviction__home="host", **more) as (llm, batch):
        sizes, eviction = sizes_of(llm.config, torch.float32, False), llm.config.eviction
        parts = [math.ceil(round(part * prompt, 6)) if isinstance(part, float) else part
                 for part in (eviction.heavy, eviction.recent)]  # fmt: skip
        most = eviction.sinks + sum(parts) - streaming
        held = min(prompt, most)
        for _ in range(40):
            length = batch.lengths[0]
            moved = step(llm, batch).bytes_moved
            slots = held + (held == most and strategy != "snapkv")
            rows = [layer.kv_bytes_per_token(4) for layer in llm.spec.layers[1:]]
            found = [
                layer_bytes(layer, llm.config, mode, sizes, 0, length, prompt)
                for layer, mode in zip(llm.spec.layers, llm.modes, strict=True)
            ]
            assert moved["h2d"] == slots * sum(rows) == sum(layer.h2d for layer in found)
            assert moved["d2h"] == sum(rows) == sum(layer.d2h for layer in found)
            held = held + 1 if strategy == "snapkv" else min(held + 1, most)


@pytest.mark.parametrize(
    "stored",
    [
        {"cache__key_type": "int8"},
        {"cache__key_type": "bf16"},
        {"cache__sketch": "int4"},
        {"cache__sketch": "int2", "cache__key_type": "int8"},
        {"cache__sketch": "int2", "cache__sketch_home": "gpu"},
    ],
    ids=lambda stored: "+".join(map(str, stored.values())),
)
def test_keys_in_fewer_bits(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any]) -> None:
    """A step in which nothing ages, whatever the keys' recall is."""
    monkeypatch.setattr("hybridgen.kv_cache.tiered.adequate_storage", lambda storage, *_: (storage, []))
    with started(zoo, GQA, "hybridgen", (300,), 8, **stored) as (llm, batch):
        moved, spec = step(llm, batch).bytes_moved, llm.spec
        found = step_bytes(spec, llm.config, llm.modes, torch.float32, 300, False)
    assert moved.get("h2d", 0) == found.h2d and moved.get("cpu_read", 0) == found.cpu_read
    layer, others, rows = spec.layers[0], spec.num_layers - 1, 256
    row = {"int8": layer.head_dim + 4, "bf16": 2 * layer.head_dim}.get(stored.get("cache__key_type", ""), 64)
    bits = {"int4": 4.5, "int2": 2.5}.get(stored.get("cache__sketch", ""))
    scanned = row if bits is None else bits * layer.head_dim / 8
    on_device = stored.get("cache__sketch_home") == "gpu"
    assert moved.get("cpu_read", 0) == (0 if on_device else others * rows * layer.num_kv_heads * scanned)
    assert moved.get("d2h", 0) == (0 if on_device else others * layer.num_heads * layer.head_dim * 4)


def test_mass_keeps_no_more_than_the_formula_says(zoo: ModelZoo) -> None:
    with started(zoo, GQA, "hybridgen", (400,), 8, keep=None) as (llm, batch):
        moved = step(llm, batch).bytes_moved
        bound = step_bytes(llm.spec, llm.config, llm.modes, torch.float32, 400, False)
    assert moved["cpu_read"] == bound.cpu_read and 0 < moved["h2d"] <= bound.h2d


def _spec(alias: str) -> ModelSpec:
    config = fetch_config(locate(alias)).config
    assert config is not None
    return spec_of(alias, config)


def test_figures_worked_out_elsewhere() -> None:
    """algorithms.md, section 0: Llama-3.1-8B with 32k tokens in float16, all of them on the host."""
    spec, tokens = _spec("llama-3.1-8b"), 32768

    def found(strategy: str, **more: Any) -> Any:
        values = load_strategy(strategy)
        if more:
            values = with_keep(values, **more, prompt=tokens)
        config = build_config(values)
        config = with_settings(config, {"cache.gpu_window": 64, "cache.sinks": 0})
        modes = layer_modes(config, spec.num_layers)
        modes = tuple("lookahead" if mode == "resident" and strategy != "full" else mode for mode in modes)
        return step_bytes(spec, config, modes, torch.float16, tokens + 64, True)

    assert found("full").h2d == found("full").dram_read == 0
    assert found("aog").h2d == found("aog").dram_read == pytest.approx(4295e6, rel=1e-3)
    assert found("aoc").cpu_read == pytest.approx(4295e6, rel=1e-3)
    context = 32 * 32 * 128 * 4  # our queries and contexts are float32, with a log-sum-exp a head
    assert found("aoc").h2d == context * 129 / 128 and found("aoc").d2h == context + 32 * 2 * 8 * 128 * 2
    paper = found("hybridgen-paper", keep=0.05)
    assert paper.cpu_read == pytest.approx(2.15e9, rel=2e-3)
    logits = 32 * 32 * tokens * 2  # all of them, in float16; the paper's count is of the chosen ones alone
    assert paper.h2d - logits == pytest.approx(111e6 - 32 * 32 * 0.05 * tokens * 2, rel=0.03)
    both = found("hybridgen", keep=0.05)
    assert both.h2d - logits == pytest.approx(2 * (paper.h2d - logits))


@pytest.mark.parametrize("sketch", [{}, {"cache.sketch": "int4", "cache.sketch_home": "gpu"}], ids=["keys", "sketch"])
@pytest.mark.parametrize("strategy", ["hybridgen", "hybridgen-paper"])
@pytest.mark.parametrize("budget", [0.4, 0.6, 0.9])
def test_the_measured_budget_is_what_was_asked_for(
    zoo: ModelZoo, strategy: str, budget: float, sketch: dict[str, Any]
) -> None:
    """One exact layer; 24 steps after 700 tokens."""
    prompt, steps = 700, 24
    given = load_strategy(strategy) | {path: Setting(value, "a test") for path, value in sketch.items()}
    modes = layer_modes(build_config(given | {"model.exact_layers": Setting([0], "a test")}), zoo.dense(GQA).num_layers)
    settings, split = with_budget(strategy, given, modes, budget, prompt, steps)
    values = {path.replace(".", "__"): setting.value for path, setting in settings.items()}
    with started(zoo, GQA, strategy, (prompt,), steps, keep=None, **values) as (llm, batch):
        statistics = AttentionStatistics()
        for _ in range(steps):
            step(llm, batch)
            statistics.observe(batch)
    measured = statistics.summary()["budget"]
    assert measured == pytest.approx(budget, abs=0.005)
    assert measured == pytest.approx(split.budget, abs=0.005)
