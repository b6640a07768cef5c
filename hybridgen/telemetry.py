"""Every stage timed, every byte counted, in one place.

Spans are taken by a clock that the offload room provides (host clock or CUDA events); nothing is
resolved, and so nothing waits, until a step is over. The report and the scheduler read the same numbers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal["h2d", "d2h", "cpu_read"]


class Clock(Protocol):
    """Marks on the timeline of whoever does the work."""

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """May wait for the marks to be reached: call it after a step only."""
        ...


class HostClock:
    """The clock of a machine whose CPU plays the GPU's part."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


@dataclass
class StepTimings:
    """One finished step: milliseconds per stage and layer, bytes per direction, and the whole step."""

    step_ms: float
    stage_ms: dict[str, dict[int, float]]
    bytes_moved: dict[str, int]


@dataclass
class Telemetry:
    """Collects the running step; `end_step` closes it."""

    clock: Clock = field(default_factory=HostClock)
    enabled: bool = True
    steps: list[StepTimings] = field(default_factory=list)
    bytes_moved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _marks: list[tuple[str, int, Any, Any]] = field(default_factory=list)
    _host_ms: list[tuple[str, int, float]] = field(default_factory=list)
    _device_units: list[tuple[str, Tensor, int]] = field(default_factory=list)
    _step_start: float = 0.0

    def span(self, stage: str, layer: int) -> _Span:
        """`with telemetry.span("attention", layer):` times what is issued inside, on the device's timeline."""
        return _Span(self, stage, layer)

    def host_time(self, stage: str, layer: int, milliseconds: float) -> None:
        """A duration that the host measured itself (a scan, a wait)."""
        self._host_ms.append((stage, layer, milliseconds))

    def count_bytes(self, direction: Direction, count: int) -> None:
        self.bytes_moved[direction] += count

    def count_on_device(self, direction: Direction, units: Tensor, unit_bytes: int) -> None:
        """As `count_bytes` for a number that only the device knows: sum(units) * unit_bytes."""
        self._device_units.append((direction, units, unit_bytes))

    def begin_step(self) -> None:
        self._marks.clear()
        self._host_ms.clear()
        self._device_units.clear()
        self.bytes_moved.clear()
        self._step_start = time.perf_counter()

    def end_step(self) -> StepTimings:
        """Close the step; the caller has already waited for its result (it has the token)."""
        step_ms = (time.perf_counter() - self._step_start) * 1e3
        stage_ms: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for stage, layer, start, end in self._marks:
            stage_ms[stage][layer] += self.clock.elapsed_ms(start, end)
        for stage, layer, milliseconds in self._host_ms:
            stage_ms[stage][layer] += milliseconds
        for direction, units, unit_bytes in self._device_units:
            self.bytes_moved[direction] += int(units.sum()) * unit_bytes
        step = StepTimings(step_ms, {stage: dict(layers) for stage, layers in stage_ms.items()}, dict(self.bytes_moved))
        self.steps.append(step)
        return step

    def forget(self) -> None:
        """Drop all finished steps (a new request begins)."""
        self.steps.clear()
        self.begin_step()


class _Span:
    """A context manager without a generator: it is entered hundreds of times a step."""

    __slots__ = ("_layer", "_stage", "_start", "_telemetry")

    def __init__(self, telemetry: Telemetry, stage: str, layer: int) -> None:
        self._telemetry, self._stage, self._layer = telemetry, stage, layer

    def __enter__(self) -> None:
        if self._telemetry.enabled:
            self._start = self._telemetry.clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._telemetry.enabled:
            end = self._telemetry.clock.mark()
            self._telemetry._marks.append((self._stage, self._layer, self._start, end))
