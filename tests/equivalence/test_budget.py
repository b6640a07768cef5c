"""The budget and the covered mass that the engine reports are those of the simulation."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest

from hybridgen.engine.statistics import AttentionStatistics
from tests.equivalence.against_engine import SideBySide, engine
from tests.equivalence.dense_simulation import Plan, Settings
from tests.equivalence.simulated_batch import Plans
from tests.equivalence.zoo import ModelZoo


@pytest.mark.parametrize(
    ("name", "settings", "overrides"),
    [
        ("llama-gqa2", Settings(window=64, keep=0.1), {}),
        ("opt", Settings(window=64, keep=None, keep_mass=0.9, exact_layers=(0, 1), exact_mode="select"), {}),
        ("qwen2", Settings(window=64, keep=0.1, lookahead="off", exact_layers=(0, 3)), {}),
        ("llama-gqa2", Settings(window=64, keep=0.1, lookahead="logits"), {}),
        (
            "qwen2",
            Settings(
                window=64,
                keep=None,
                keep_mass=0.85,
                lookahead="logits",
                predictor="delta",
                exact_layers=(0, 1),
                exact_mode="select",
                dropped="renormalise",
            ),
            {},
        ),
        ("llama-gqa3", Settings(window=64, keep=0.1, predictor="delta"), {}),
        ("llama-gqa2", Settings(window=64, keep=0.1), {"runtime__micro_batch": 2}),
        ("llama-gqa2", Settings(window=64, keep=0.1), {"runtime__micro_batch": 1}),
    ],
    ids=[
        "keep",
        "exact select, mass",
        "off, two resident",
        "logits",
        "logits, select, renormalise",
        "select delta",
        "micro-batches of 2",
        "micro-batches of 1",
    ],
)
def test_budget_and_covered_mass(zoo: ModelZoo, name: str, settings: Settings, overrides: dict[str, Any]) -> None:
    """Means over steps, layers, KV heads and sequences; one sequence has no host tier."""
    lengths, steps = (386, 50, 236), 6
    statistics = AttentionStatistics()
    with engine(zoo.directory(name), settings, **overrides) as llm:
        run = SideBySide(llm, zoo.dense(name), settings, [length + steps for length in lengths], seed=0)
        run.prefill(lengths)
        for _ in range(steps):
            run.decode(1)
            statistics.observe(run.batch)
    records = [record for step in run.simulated.steps for record in step]
    masses = [mass for record in records for layer in record.layers for mass in layer.mass]
    summary = statistics.summary()
    assert summary["budget"] == pytest.approx(sum(record.budget for record in records) / len(records), abs=1e-6)
    assert summary["mass_mean"] == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    assert summary["mass_min"] == pytest.approx(min(masses), abs=1e-5)


def some_unscored(step: int, layer: int) -> Plan:
    return Plan(0.1, scan_tokens=(None, 64, 1)[(step + layer) % 3], extra=1.5)


def never_scored(step: int, layer: int) -> Plan:
    return Plan(0.1, scan_tokens=1)


@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
@pytest.mark.parametrize("plans", [some_unscored, never_scored])
def test_under_plans(zoo: ModelZoo, plans: Plans, lookahead: Any) -> None:
    """The mass is of what was scored; where nothing was it is unknown, and no part of a mean."""
    name, settings, lengths, steps = "llama-gqa2", Settings(window=64, keep=0.1, lookahead=lookahead), (386, 236), 6
    statistics = AttentionStatistics()
    with engine(zoo.directory(name), settings, schedule__mode="feedback") as llm:
        run = SideBySide(llm, zoo.dense(name), settings, [length + steps for length in lengths], 0, plans)
        run.prefill(lengths)
        for _ in range(steps):
            run.decode(1)
            statistics.observe(run.batch)
    records = [record for step in run.simulated.steps for record in step]
    masses = [
        [m for record in step for layer in record.layers for m in layer.mass if not math.isnan(m)]
        for step in run.simulated.steps
    ]
    summary = statistics.summary()
    assert summary["budget"] == pytest.approx(fmean(record.budget for record in records), abs=1e-6)
    if plans is never_scored and lookahead != "logits":
        assert not any(masses) and summary["mass_mean"] is None and summary["mass_min"] is None
    else:
        assert summary["mass_mean"] == pytest.approx(fmean(map(fmean, masses)), abs=1e-5)
        assert summary["mass_min"] == pytest.approx(min(map(min, masses)), abs=1e-5)
