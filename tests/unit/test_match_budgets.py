"""experiments/match_budgets.py: what it makes of measured curves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from match_budgets import (
    budget_on,
    each_layers,
    falling,
    log_spaced,
    matches,
    smallest_share,
)


def test_log_spaced() -> None:
    assert log_spaced(0.05, 0.8, 5) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8])


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]),
        ([3.0, 1.0, 2.0], [3.0, 1.5, 1.5]),
        ([1.0, 2.0, 6.0], [3.0, 3.0, 3.0]),
        ([5.0, 1.0, 2.0, 3.0, 0.0], [5.0, 2.0, 2.0, 2.0, 0.0]),
        ([2.0, 4.0, 1.0, 3.0], [3.0, 3.0, 2.0, 2.0]),
    ],
)
def test_the_nearest_sequence_that_never_rises(values: list[float], nearest: list[float]) -> None:
    assert falling(values) == pytest.approx(nearest)


def test_a_power_law_is_met_exactly() -> None:
    budgets, divergences = [0.1, 0.2, 0.8], [0.01 / budget**2 for budget in (0.1, 0.2, 0.8)]
    for wanted in (0.13, 0.2, 0.4, 0.79):
        assert smallest_share(budgets, divergences, 0.01 / wanted**2) == pytest.approx(wanted)


def test_the_ends_of_a_grid() -> None:
    budgets, divergences = [0.1, 0.3, 0.5], [math.exp(-1), math.exp(-3), math.exp(-4)]
    assert smallest_share(budgets, divergences, 0.9) == 0.1, "the smallest that was measured is good enough"
    assert smallest_share(budgets, divergences, math.exp(-4.01)) is None


def test_noise_does_not_count_as_better() -> None:
    """A dip below the target that a larger budget does not confirm is averaged away."""
    logs = [-1.0, -3.0, -1.0, -3.5]
    found = smallest_share([0.1, 0.2, 0.3, 0.4], [math.exp(log) for log in logs], math.exp(-2.5))
    assert found == pytest.approx(0.3 * (4 / 3) ** (0.5 / 1.5))


def test_what_goes_to_another_model() -> None:
    """3 of 30 layers exact and 0.28 in all: 0.2 in each other one; 3 of 40 exact there."""
    assert each_layers(0.28, 3, 30) == pytest.approx(0.2)
    assert budget_on(0.2, 3, 40) == pytest.approx((3 + 37 * 0.2) / 40)
    assert each_layers(0.3, 0, 30) == pytest.approx(0.3) == budget_on(0.3, 0, 40)


def _row(budget: float, divergences: list[float], exact: int) -> dict[str, Any]:
    value = sum(divergences) / len(divergences)
    return {"budget": budget, "kl": {"value": value}, "kl_of_passages": divergences, "exact": exact}


def _points() -> list[dict[str, Any]]:
    """One target of KL 0.1 at budget 0.28; a method that meets it at 0.4, and one that never does."""
    grid = [0.2, 0.4, 0.8]

    def point(method: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        conditions = [{"method": method} for _ in rows]
        return {"settings": {"conditions": conditions}, "result": {"layers": 30, "conditions": rows}}

    targets = {
        "settings": {"conditions": [{"target": "keep 0.1"}]},
        "result": {"layers": 30, "conditions": [_row(0.28, [0.08, 0.12], 3)]},
    }
    good = [_row(budget, [0.8 * kl, 1.2 * kl], 0) for budget, kl in zip(grid, (0.3, 0.1, 0.01), strict=True)]
    bad = [_row(budget, [kl, kl], 3) for budget, kl in zip(grid, (0.9, 0.5, 0.2), strict=True)]
    return [point("bad", bad), targets, point("good", good[::-1])]


def test_matches_of_a_result() -> None:
    good, bad = sorted(matches(_points()), key=lambda match: match.budget is None)
    assert (good.method, good.target, good.kl) == ("good", "keep 0.1", pytest.approx(0.1))
    assert good.budget == pytest.approx(0.4) == good.each and good.of_ours == 0.28
    # Passages differ from each other by the same factor in target and method: whichever are drawn, it is met there.
    assert good.low == pytest.approx(0.4) == good.high
    assert (bad.method, bad.budget, bad.each, bad.high, bad.largest) == ("bad", None, None, None, 0.8)
