"""Paired comparison of conditions that were measured on the same passages.

A loss is a passage's mean log-loss in nats a token; passages are equally long, so the mean over
passages is the mean over tokens, and its exponential is the (geometric) perplexity. All intervals are
two-sided Student t intervals over passages, which count as independent draws:
  * a perplexity, and a relative change of perplexity, transform the limits of a mean (of losses, of
    loss differences) by the exponential, so that they are asymmetric and never below 0 or -100 %;
  * differences in perplexity or in percentage points are smooth functions of several means, and get
    the delta method: the interval of the mean of their linearisation, passage by passage. Noise that
    two conditions share cancels there as well.
Pooled over several texts, the spread between texts is part of the standard error: it errs on the wide side.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure, its standard error and its 95 % limits (None where one passage is all there is)."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence for that many degrees of freedom (>= 1)."""
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"degrees of freedom {degrees} must be >= 1, confidence {confidence} in (0, 1)")
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        angle = (low + high) / 2
        if _central_probability(angle, degrees) < confidence:
            low = angle
        else:
            high = angle
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def mean(values: Sequence[float]) -> Estimate:
    """The mean with its t interval."""
    return _around(statistics.fmean(values), values)


def share(hits: int, count: int) -> Estimate:
    """hits of count independent draws, with Wilson's score interval (Brown, Cai and DasGupta 2001, section 3.1.1).

    Unlike a t interval it has a width where all are hits, and stays within [0, 1].
    """
    if not 0 <= hits <= count or count == 0:
        raise ValueError(f"{hits} of {count} is no share")
    value, z = hits / count, statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (hits + z * z / 2) / (count + z * z)
    reach = z / (count + z * z) * math.sqrt(count * value * (1 - value) + z * z / 4)
    return Estimate(value, math.sqrt(value * (1 - value) / count), max(0.0, middle - reach), min(1.0, middle + reach))


def perplexity(losses: Sequence[float]) -> Estimate:
    """exp of the mean loss."""
    loss = mean(losses)
    value = math.exp(loss.value)
    if loss.standard_error is None or loss.low is None or loss.high is None:
        return Estimate(value, None, None, None)
    return Estimate(value, value * loss.standard_error, math.exp(loss.low), math.exp(loss.high))


def percent_change(losses: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Relative change of perplexity against the reference, in percent."""
    loss = mean(_differences(losses, reference))
    value = 100 * math.expm1(loss.value)
    if loss.standard_error is None or loss.low is None or loss.high is None:
        return Estimate(value, None, None, None)
    error = 100 * math.exp(loss.value) * loss.standard_error
    return Estimate(value, error, 100 * math.expm1(loss.low), 100 * math.expm1(loss.high))


def perplexity_difference(losses: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Perplexity minus the reference's, in points of perplexity."""
    _check_paired(losses, reference)
    ours, theirs = (math.exp(statistics.fmean(values)) for values in (losses, reference))
    linear = [ours * a - theirs * b for a, b in zip(losses, reference, strict=True)]
    return _around(ours - theirs, linear)


def percentage_points(losses: Sequence[float], other: Sequence[float], full: Sequence[float]) -> Estimate:
    """Our change of perplexity against `full` minus the other's, in percentage points."""
    a, b = _differences(losses, full), _differences(other, full)
    ours, theirs = (100 * math.exp(statistics.fmean(values)) for values in (a, b))
    linear = [ours * x - theirs * y for x, y in zip(a, b, strict=True)]
    return _around(ours - theirs, linear)


def _around(value: float, linear: Sequence[float]) -> Estimate:
    """An estimate that varies like the mean of `linear`."""
    if len(linear) < 2:
        return Estimate(value, None, None, None)
    error = statistics.stdev(linear) / math.sqrt(len(linear))
    reach = student_t(len(linear) - 1) * error
    return Estimate(value, error, value - reach, value + reach)


def _differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    _check_paired(values, reference)
    return [a - b for a, b in zip(values, reference, strict=True)]


def _check_paired(values: Sequence[float], reference: Sequence[float]) -> None:
    if len(values) != len(reference) or not values:
        raise ValueError(f"paired values needed: {len(values)} against {len(reference)}")


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| <= t) with tan(angle) = t / sqrt(degrees): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
