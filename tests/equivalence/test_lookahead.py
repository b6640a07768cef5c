"""The engine's `lookahead: logits`, with both denominators, and its predictor `delta`, against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.equivalence.against_engine import LOGITS_TOLERANCE, Case, SideBySide, Turns, engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.tiny_models import TINY_MODELS
from tests.equivalence.zoo import ModelZoo

# Windows of W + 62, less than W (no host tier) and W + 40 or W + 32 rows: the first layers age within the steps.
RAGGED_64: Turns = (((386, 50, 236), 24),)
RAGGED_16: Turns = (((210, 12, 180), 24),)
# Appends after decode steps, after another append, of a single token, and with nothing decoded after them.
TURNS: Turns = (((150, 20, 260), 20), ((70, 60, 1), 0), ((1, 30, 65), 9), ((1, 1, 1), 4), ((20, 1, 3), 7))

KEEP = Settings(window=64, keep=0.1, lookahead="logits")
MASS = Settings(window=64, keep=None, keep_mass=0.9, lookahead="logits")
PAIR = Settings(window=16, keep=0.1, keep_mass=0.9, min_keep=8, lookahead="logits")
DELTA = Settings(window=64, keep=0.1, predictor="delta")


def like(settings: Settings, **changes: Any) -> Settings:
    return dataclasses.replace(settings, **changes)


IMMEDIATE = {"runtime__transfer": "immediate"}
CASES = {
    # `logits`: dropped rows keep their share
    "opt keep": Case("opt", KEEP, RAGGED_64, seed=3),
    "mha mass": Case("llama-mha", MASS, RAGGED_64),
    "gqa2 pair": Case("llama-gqa2", PAIR, RAGGED_16, seed=1),
    "gqa3 keep": Case("llama-gqa3", like(KEEP, window=16), RAGGED_16, seed=2),
    "qwen2 mass": Case("qwen2", like(MASS, window=16), RAGGED_16),
    "llama3 pair": Case("llama3-rope", like(PAIR, window=64), RAGGED_64, seed=2),
    "gqa4 count 1": Case("llama-gqa4", like(KEEP, keep=1), RAGGED_64),
    # ... or do not
    "opt pair, renormalise": Case("opt", like(PAIR, dropped="renormalise"), RAGGED_16),
    "gqa3 mass, renormalise": Case("llama-gqa3", like(MASS, dropped="renormalise"), RAGGED_64),
    "qwen2 keep, renormalise": Case("qwen2", like(KEEP, dropped="renormalise"), RAGGED_64),
    # `delta`
    "select delta, opt keep": Case("opt", DELTA, RAGGED_64),
    "select delta, gqa2 pair": Case("llama-gqa2", like(DELTA, window=16, keep_mass=0.9), RAGGED_16, seed=3),
    "select delta, gqa3 mass": Case("llama-gqa3", like(DELTA, keep=None, keep_mass=0.9), RAGGED_64, seed=2),
    "select delta, qwen2 keep": Case("qwen2", like(DELTA, window=16), RAGGED_16, seed=1),
    "logits delta, mha keep": Case("llama-mha", like(KEEP, predictor="delta", window=16), RAGGED_16),
    "logits delta, llama3 mass": Case("llama3-rope", like(MASS, predictor="delta"), RAGGED_64),
    "logits delta, gqa2 pair, renormalise": Case(
        "llama-gqa2", like(PAIR, predictor="delta", dropped="renormalise"), RAGGED_16
    ),
    # Exact layers, before, between and after the predicted ones
    "opt resident 0 1": Case("opt", like(KEEP, exact_layers=(0, 1)), (((386, 50, 236), 36),), seed=3),
    "gqa2 resident 0 2 5, delta": Case(
        "llama-gqa2", like(MASS, window=16, exact_layers=(0, 2, 5), predictor="delta"), RAGGED_16
    ),
    "qwen2 select 0 2": Case("qwen2", like(KEEP, exact_layers=(0, 2), exact_mode="select"), RAGGED_64),
    "gqa2 select 0 1 4, mass, delta": Case(
        "llama-gqa2",
        like(MASS, window=16, exact_layers=(0, 1, 4), exact_mode="select", predictor="delta"),
        RAGGED_16,
        seed=2,
    ),
    "opt select, renormalise": Case("opt", like(PAIR, exact_mode="select", dropped="renormalise"), RAGGED_16, seed=3),
    "select delta, qwen2 select 0 3": Case(
        "qwen2", like(DELTA, exact_layers=(0, 3), exact_mode="select"), RAGGED_64, seed=2
    ),
    # How the engine goes about it
    "micro-batches of 2": Case("opt", PAIR, RAGGED_16, {"runtime__micro_batch": 2}),
    "micro-batches of 1, delta": Case("qwen2", like(MASS, predictor="delta"), RAGGED_64, {"runtime__micro_batch": 1}),
    "micro-batches of 2, select delta": Case("llama-gqa3", DELTA, RAGGED_64, {"runtime__micro_batch": 2}, seed=1),
    "prefill in chunks, delta": Case(
        "llama-mha", like(KEEP, predictor="delta"), RAGGED_64, {"runtime__prefill_chunk": 35}
    ),
    "immediate, opt": Case("opt", like(KEEP, window=16), RAGGED_16, IMMEDIATE),
    "immediate, gqa2 mass, delta": Case("llama-gqa2", like(MASS, predictor="delta"), RAGGED_64, IMMEDIATE),
    "immediate, gqa3 pair, renormalise": Case("llama-gqa3", like(PAIR, dropped="renormalise"), RAGGED_16, IMMEDIATE),
    "immediate, qwen2 select 0 2, micro-batches of 2": Case(
        "qwen2",
        like(KEEP, exact_layers=(0, 2), exact_mode="select"),
        RAGGED_64,
        {"runtime__micro_batch": 2, **IMMEDIATE},
    ),
    "immediate, select delta": Case("llama3-rope", like(DELTA, window=16), RAGGED_16, IMMEDIATE),
    "no scan thread": Case("llama-gqa2", KEEP, RAGGED_64, {"runtime__worker_threads": 0}),
    # Shapes
    "no sinks, window 1": Case(
        "opt", Settings(window=1, sinks=0, keep=0.1, lookahead="logits"), (((190, 1, 127), 36),)
    ),
    "20 sinks": Case("llama-mha", like(KEEP, window=30, sinks=20), (((240, 10, 112), 36),), seed=1),
    "filling": Case("llama-gqa4", like(KEEP, window=16, exact_mode="select"), (((130, 10), 100),), seed=2),
    "one sequence": Case("qwen2", like(PAIR, predictor="delta"), (((210,), 36),)),
    # Further turns
    "append": Case("opt", like(KEEP, window=16), TURNS, seed=1),
    "append, delta": Case("llama-gqa2", like(MASS, predictor="delta", window=16), TURNS),
    "append, delta in chunks": Case(
        "qwen2", like(KEEP, predictor="delta", window=16), TURNS, {"runtime__prefill_chunk": 29}
    ),
    "append, select delta, micro-batches of 2": Case(
        "llama-gqa3", like(DELTA, window=16), TURNS, {"runtime__micro_batch": 2}
    ),
    "append, select delta, immediate": Case("opt", like(DELTA, window=16), TURNS, IMMEDIATE),
    "append, renormalise": Case("llama3-rope", like(PAIR, dropped="renormalise"), TURNS),
}
TWO_SEEDS = (0, 1)
FULL_BUDGET = {
    "opt": Case("opt", like(KEEP, keep=1.0), RAGGED_64),
    "gqa3 delta": Case("llama-gqa3", like(KEEP, keep=1.0, window=16, predictor="delta"), RAGGED_16),
    "qwen2 mass, renormalise": Case(
        "qwen2", like(MASS, keep_mass=1.0, window=16, dropped="renormalise"), RAGGED_16, {"runtime__micro_batch": 2}
    ),
    "llama3 count, immediate": Case("llama3-rope", like(KEEP, keep=9999), RAGGED_64, IMMEDIATE),
    "gqa2 min_keep, delta, renormalise": Case(
        "llama-gqa2", like(PAIR, min_keep=1000, predictor="delta", dropped="renormalise"), RAGGED_16
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_kept_sets_and_logits(zoo: ModelZoo, case: str) -> None:
    run = CASES[case].run(zoo).simulated
    assert run.ageings()  # the steps do cross ageing blocks
    assert min(record.budget for records in run.steps for record in records) < 0.9


@pytest.mark.parametrize("case", FULL_BUDGET)
def test_full_budget_of_logits(zoo: ModelZoo, case: str) -> None:
    """Equal to the oracle, which at full budget is `mixed_attention` of test_simulation_lookahead.py; and not
    to full attention of the same tokens."""
    run = FULL_BUDGET[case].run(zoo)
    assert {record.budget for records in run.simulated.steps for record in records} == {1.0}
    longest = max(run.simulated.texts, key=len)
    with torch.inference_mode():
        full = zoo.hf(FULL_BUDGET[case].model, torch.float64)(torch.tensor([longest])).logits[0, -1]
    assert (run.simulated.logits[run.simulated.texts.index(longest)] - full).abs().max() > 30 * LOGITS_TOLERANCE


@pytest.mark.parametrize("name", TINY_MODELS)
def test_full_budget_of_select_with_delta(zoo: ModelZoo, name: str) -> None:
    """Whatever chooses, everything is kept."""
    assert_greedy_equals_transformers(zoo, name, Settings(keep=1.0, window=16, predictor="delta"))


@pytest.mark.parametrize("lookahead", ["select", "logits"])
def test_delta_of_two_live_batches_does_not_mix(zoo: ModelZoo, lookahead: Any) -> None:
    """Batches of equal shapes in one engine, their steps interleaved with an append of one of them."""
    name, settings = "llama-gqa2", Settings(window=16, keep=0.1, predictor="delta", lookahead=lookahead)
    with engine(zoo.directory(name), settings) as llm:
        runs = [SideBySide(llm, zoo.dense(name), settings, [250, 250], seed) for seed in TWO_SEEDS]
        for run in runs:
            run.prefill((200, 140))
        for step in range(6):
            for run in runs:
                run.decode(1)
            if step == 2:
                runs[0].prefill((1, 30))
