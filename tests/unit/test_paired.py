"""The paired statistics against closed forms, tables and simulated experiments."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from hybridgen.evaluation.paired import (
    Estimate,
    mean,
    percent_change,
    percentage_points,
    perplexity,
    perplexity_difference,
    share,
    student_t,
)

FULL = [3.0, 2.5, 3.5, 2.75]
OURS = [3.02, 2.5, 3.53, 2.76]  # differences 0.02, 0, 0.03, 0.01


def limits(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None and estimate.high is not None
    return estimate.low, estimate.high


@pytest.mark.parametrize(
    ("degrees", "confidence", "table"),
    [
        (1, 0.95, 12.706205),
        (2, 0.95, 4.302653),
        (3, 0.95, 3.182446),
        (4, 0.99, 4.604095),
        (10, 0.95, 2.228139),
        (39, 0.95, 2.022691),
        (30, 0.90, 1.697261),
        (120, 0.95, 1.979930),
        (100_000, 0.95, 1.959988),
    ],
)
def test_student_t_equals_the_tables(degrees: int, confidence: float, table: float) -> None:
    assert student_t(degrees, confidence) == pytest.approx(table, abs=2e-6)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (5, 1.0), (5, 0.0)])
def test_student_t_refuses_what_has_no_quantile(degrees: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="degrees"):
        student_t(degrees, confidence)


def test_mean_closed_form() -> None:
    estimate = mean([1.0, 2.0, 3.0, 4.0])
    error = math.sqrt(5 / 3) / 2
    assert estimate.value == 2.5
    assert estimate.standard_error == pytest.approx(error)
    assert limits(estimate) == pytest.approx((2.5 - 3.182446 * error, 2.5 + 3.182446 * error), abs=1e-6)


def test_perplexity_is_geometric_and_its_limits_are_transformed() -> None:
    estimate, loss = perplexity(FULL), mean(FULL)
    assert estimate.value == pytest.approx(math.exp(2.9375))
    assert limits(estimate) == pytest.approx(tuple(math.exp(limit) for limit in limits(loss)))


def test_percent_change_closed_form() -> None:
    estimate = percent_change(OURS, FULL)
    difference = mean([a - b for a, b in zip(OURS, FULL, strict=True)])
    assert estimate.value == pytest.approx(100 * (math.exp(0.015) - 1))
    assert limits(estimate) == pytest.approx(tuple(100 * (math.exp(limit) - 1) for limit in limits(difference)))
    ratio = perplexity(OURS).value / perplexity(FULL).value
    assert estimate.value == pytest.approx(100 * (ratio - 1))


def test_a_constant_ratio_leaves_no_uncertainty_in_percent_but_some_in_perplexity() -> None:
    ours = [loss + 0.01 for loss in FULL]
    percent = percent_change(ours, FULL)
    assert limits(percent) == pytest.approx((percent.value, percent.value), abs=1e-9)
    points = perplexity_difference(ours, FULL)
    # The difference is then a fixed share of a perplexity that is itself uncertain.
    assert points.standard_error == pytest.approx(math.expm1(0.01) * perplexity(FULL).standard_error)  # type: ignore[operator]


def test_differences_change_sign_with_their_order() -> None:
    there, back = perplexity_difference(OURS, FULL), perplexity_difference(FULL, OURS)
    assert there.value == -back.value
    assert limits(there) == pytest.approx(tuple(-limit for limit in reversed(limits(back))))
    assert there.standard_error == pytest.approx(back.standard_error)


def test_percentage_points_are_the_difference_of_two_changes() -> None:
    other = [3.01, 2.52, 3.5, 2.8]
    estimate = percentage_points(OURS, other, FULL)
    assert estimate.value == pytest.approx(percent_change(OURS, FULL).value - percent_change(other, FULL).value)
    against_full = percentage_points(OURS, FULL, FULL)
    assert against_full.value == pytest.approx(percent_change(OURS, FULL).value)
    assert against_full.standard_error == pytest.approx(percent_change(OURS, FULL).standard_error)


def test_equal_conditions_differ_by_exactly_nothing() -> None:
    for estimate in (
        percent_change(FULL, FULL),
        perplexity_difference(FULL, FULL),
        percentage_points(FULL, FULL, FULL),
    ):
        assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0)


def test_one_passage_has_a_value_and_no_interval() -> None:
    for estimate in (mean([1.0]), perplexity([1.0]), percent_change([1.1], [1.0])):
        assert estimate.standard_error is None and estimate.low is None and estimate.high is None
    assert percent_change([1.1], [1.0]).value == pytest.approx(100 * math.expm1(0.1))
    assert perplexity_difference([1.1], [1.0]).low is None


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(ValueError, match="2 against 1"):
        percent_change([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="paired"):
        perplexity_difference([], [])


def draw_losses(draw: random.Random, passages: int) -> tuple[list[float], list[float], list[float]]:
    """Full attention and two conditions: passages differ much, conditions little and in common."""
    full = [draw.gauss(2.8, 0.4) for _ in range(passages)]
    shared = [draw.gauss(0.006, 0.02) for _ in range(passages)]
    a = [x + s + draw.gauss(0.002, 0.01) for x, s in zip(full, shared, strict=True)]
    b = [x + s + draw.gauss(0.000, 0.01) for x, s in zip(full, shared, strict=True)]
    return full, a, b


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """3,000 experiments of 40 passages: 95 % within three standard errors (0.4 %) of simulation."""
    draw, runs = random.Random(1), 3000
    level, change_a, change_b = math.exp(2.8), math.exp(0.008), math.exp(0.006)
    truth = {
        "perplexity": level,
        "percent": 100 * (change_a - 1),
        "in perplexity": level * (change_a - 1),
        "points": 100 * (change_a - change_b),
    }
    covered = dict.fromkeys(truth, 0)
    for _ in range(runs):
        full, a, b = draw_losses(draw, 40)
        estimates = {
            "perplexity": perplexity(full),
            "percent": percent_change(a, full),
            "in perplexity": perplexity_difference(a, full),
            "points": percentage_points(a, b, full),
        }
        for name, estimate in estimates.items():
            low, high = limits(estimate)
            covered[name] += low <= truth[name] <= high
    for name, count in covered.items():
        assert count / runs == pytest.approx(0.95, abs=0.012), name


def test_the_delta_method_agrees_with_a_paired_bootstrap() -> None:
    draw = random.Random(2)
    full, a, b = draw_losses(draw, 60)
    samples: dict[str, list[float]] = {"in perplexity": [], "points": []}
    for _ in range(1500):
        picked = draw.choices(range(60), k=60)
        f, x, y = ([values[index] for index in picked] for values in (full, a, b))
        samples["in perplexity"].append(perplexity(x).value - perplexity(f).value)
        samples["points"].append(percent_change(x, f).value - percent_change(y, f).value)
    for name, estimate in (
        ("in perplexity", perplexity_difference(a, full)),
        ("points", percentage_points(a, b, full)),
    ):
        assert estimate.standard_error == pytest.approx(statistics.stdev(samples[name]), rel=0.1)


def test_pairing_removes_what_the_conditions_share() -> None:
    full, a, _ = draw_losses(random.Random(3), 40)
    paired_error = perplexity_difference(a, full).standard_error
    unpaired_error = math.hypot(perplexity(a).standard_error or 0, perplexity(full).standard_error or 0)
    assert paired_error is not None and paired_error < 0.1 * unpaired_error


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_shares_have_wilsons_interval(hits: int, count: int, low: float, high: float) -> None:
    found, other = share(hits, count), share(count - hits, count)
    assert found.value == hits / count
    assert limits(found) == pytest.approx((low, high), abs=5e-5)
    assert limits(other) == pytest.approx((1 - high, 1 - low), abs=5e-5)
    assert found.standard_error == pytest.approx(math.sqrt(hits * (count - hits) / count**3))


@pytest.mark.parametrize(("hits", "count"), [(0, 0), (-1, 3), (4, 3)])
def test_what_is_no_share_is_refused(hits: int, count: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        share(hits, count)
