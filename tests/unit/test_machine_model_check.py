"""experiments/machine_model_check.py: what it says of the machine model."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from machine_model_check import FITTED, SPEED, WITHIN, error_of, measure, points, summary

# experiments/README.md has what is known of the reasons.
MISSED = {
    "overall_speedup: qwen2.5-7b: hybridgen", "overall_speedup: qwen2.5-7b: keyformer-host",
    "length_scaling: llama-3.1-8b: hybridgen-int8", "length_scaling: llama-3.1-8b: hybridgen-int2",
    "length_scaling: qwen2.5-7b: moe-lightning", "length_scaling: qwen2.5-7b: streaming-llm-host",
    "ablations: opt-13b: keys-int8",
}  # fmt: skip
FITTED_WITHIN = 0.16  # one constant for several rows, of several boxes


def _point(measured: float, predicted: float, fitted: str | None) -> dict[str, Any]:
    return {"result": {"measured": measured, "predicted": predicted, "fitted": fitted}}


def test_what_was_fitted_does_not_count() -> None:
    rows = [_point(100, 110, None), _point(100, 80, None), _point(100, 1, "CHOICE_S")]
    assert [error_of(row["result"]) for row in rows] == pytest.approx([0.1, -0.2, -0.99])
    assert summary(rows) == "not fitted: 1 of 2 within 15 %, mean 15.0 %, worst -20.0 %"
    assert summary(rows[2:]) == "all of these rows were fitted"


def test_the_committed_rows() -> None:
    """All that are said to be fitted are there, and the others, but a few, are predicted as well as is asked for."""
    found = points(argparse.Namespace(speed=None, hardware=None))
    named = {(point.settings["file"], point.settings["row"]) for point in found}
    assert set(FITTED) <= named and {file.name for file in SPEED} == {file for file, _ in named}
    results = [(point, measure(point)) for point in found]
    judged = [(point.name, error_of(result)) for point, result in results if result["fitted"] is None]
    assert len(judged) > 60
    assert {name for name, error in judged if abs(error) > WITHIN} == MISSED
    fitted = [abs(error_of(result)) for _, result in results if result["fitted"] is not None]
    assert max(fitted) < FITTED_WITHIN


def test_a_row_of_the_same_settings_is_no_judge() -> None:
    """The comparison's `streaming-llm-original` is its `streaming-llm`, as OPT has no rotary positions."""
    found = points(argparse.Namespace(speed=None, hardware=None))
    same = next(point for point in found if point.settings["row"] == "streaming-llm-original")
    assert same.settings["fitted"] == "(as one for EVICTING_S)"
    assert next(point for point in found if point.settings["row"] == "aoc").settings["fitted"] is None
