"""experiments/quality_latency.py: where speed and quality meet."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quality_latency import front, interpolate


def test_the_front() -> None:
    points = [(15.0, 0.3), (30.0, 0.1), (20.0, 0.4), (30.0, 0.05), (40.0, 0.05), (15.0, 0.5)]
    assert front(points) == [0, 3]


def test_nobody_beats_the_front_and_the_front_beats_the_rest() -> None:
    draw = random.Random(1)
    for count in range(1, 30):
        points = [(float(draw.randrange(8)), float(draw.randrange(8))) for _ in range(count)]
        kept = front(points)

        def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
            return one != other and one[0] <= other[0] and one[1] <= other[1]

        for index, point in enumerate(points):
            is_beaten = any(beats(other, point) for other in points)
            assert not (index in kept and is_beaten)
            if index not in kept:
                assert is_beaten or points.index(point) != index or point in [points[some] for some in kept]


@pytest.mark.parametrize(("at", "value"), [(0.1, 5.0), (0.2, 3.0), (0.3, 1.0), (0.6, 0.5), (0.9, 0.0), (1.0, 0.0)])
def test_interpolation(at: float, value: float) -> None:
    assert interpolate(at, [0.1, 0.3, 0.9], [5.0, 1.0, 0.0]) == pytest.approx(value)


def test_nothing_is_known_below_what_was_measured() -> None:
    values: Any = [5.0, 1.0]
    assert interpolate(0.09, [0.1, 0.3], values) is None
