"""Running averages of what a schedule observes."""

from __future__ import annotations

from collections.abc import Iterable


class RunningAverages:
    """Exponential averages by name, each the plain mean until it has 1 / weight values."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._counts: dict[str, int] = {}
        self._means: dict[str, float] = {}

    def add(self, **values: float | None) -> None:
        """Unknown values (None) leave their average as it is."""
        for name, value in values.items():
            if value is None:
                continue
            count = self._counts[name] = self._counts.get(name, 0) + 1
            mean = self._means.get(name, 0.0)
            self._means[name] = mean + max(1 / count, self._weight) * (value - mean)

    def __getitem__(self, name: str) -> float:
        return self._means[name]

    def get(self, name: str) -> float | None:
        """None as long as nothing was known."""
        return self._means.get(name)

    def count(self, name: str) -> int:
        """How many values it has seen."""
        return self._counts.get(name, 0)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(names)
        self._counts = {name: count for name, count in self._counts.items() if name in kept}
        self._means = {name: mean for name, mean in self._means.items() if name in kept}
