"""Every stage timed, every byte counted, in one place.

Spans are taken by a clock that the offload room provides (host clock or CUDA events); nothing is
resolved, and so nothing waits, until a step is over. The report, the scheduler and the trace read the same
numbers; only for steps to be traced are the places of spans on the host's timeline kept as well.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Direction = Literal["h2d", "d2h", "cpu_read", "disk"]  # disk: read from files into host memory


class Clock(Protocol):
    """Marks on the timeline of whoever does the work."""

    is_costly: bool  # whether hundreds of marks lengthen a step

    def mark(self) -> Any: ...

    def restart(self) -> None:
        """All marks so far have been made use of."""
        ...

    @property
    def marks(self) -> int:
        """How many there are since; 0 where they are not numbered."""
        ...

    def repeat(self, marks: int) -> None:
        """The next ones are made again, by a graph."""
        ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """May wait for the marks to be reached: call it after a step only."""
        ...

    def origin(self) -> tuple[Any, float]:
        """A mark and the host's perf_counter of the same moment; waits for what was issued before, where marks are."""
        ...


class HostClock:
    """The clock of a machine whose CPU plays the GPU's part."""

    is_costly = False
    marks = 0

    def mark(self) -> float:
        return time.perf_counter()

    def restart(self) -> None:
        pass

    def repeat(self, marks: int) -> None:
        raise NotImplementedError("the host's marks are not made by a graph")

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def origin(self) -> tuple[float, float]:
        now = time.perf_counter()
        return now, now


MARK_EVERY = 4  # layers, where a step is recorded to be repeated on a GPU: a mark takes a kernel's time


class TracedSpan(NamedTuple):
    """A span on the host's timeline (seconds of perf_counter); row: the stream or thread that did the work."""

    stage: str
    layer: int
    row: str
    start_s: float
    end_s: float
    bytes: int  # moved or read in it; 0 where that is not known


@dataclass
class StepTimings:
    """One finished step: milliseconds per stage and layer, bytes per direction and stage, and the whole step."""

    step_ms: float
    stage_ms: dict[str, dict[int, float]]
    bytes_moved: dict[str, int]
    stage_bytes: dict[str, int] = field(default_factory=dict)  # moved within the stage's spans
    start_s: float = 0.0  # perf_counter
    spans: tuple[TracedSpan, ...] = ()  # of a traced step only
    is_timed: bool = True  # whether stage_ms has all stages, or only what the host itself did
    sampled: dict[str, float] = field(default_factory=dict)  # share of a stage's spans that were timed, where not all


@dataclass
class Recorded:
    """What was counted and timed while work was issued that will be issued again."""

    spans: list[tuple[_Span, int]] = field(default_factory=list)  # and their bytes
    device_units: list[tuple[str, Tensor, int, _Span | None]] = field(default_factory=list)
    bytes_moved: dict[str, int] = field(default_factory=dict)
    marks: int = 0


@dataclass
class Telemetry:
    """Collects the running step; `end_step` closes it. Of the next `trace_steps` steps spans are kept.

    enabled: whether there are spans at all. sample_every: one step of so many is timed stage by stage, the last of
    them; of the others only the bytes and the host's own times are known, and they cost less.
    """

    clock: Clock = field(default_factory=HostClock)
    enabled: bool = True
    sample_every: int = 1
    trace_steps: int = 0
    #: Called when a step is over: whoever measures beside it hands in what it has.
    settle: Callable[[], None] | None = None
    bytes_moved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _spans: list[_Span] = field(default_factory=list)
    _host_spans: list[TracedSpan] = field(default_factory=list)
    _device_units: list[tuple[str, Tensor, int, _Span | None]] = field(default_factory=list)
    _open: _Span | None = None  # the innermost: bytes counted now are its
    _origin: tuple[Any, float] | None = None  # of a step that is traced
    _step_start: float = 0.0
    _is_fresh: bool = False
    _is_timed: bool = True
    _mark_every: int = 1  # layers, of which one has marks
    _steps: int = 0

    def span(self, stage: str, layer: int, row: str = "compute") -> _Span:
        """`with telemetry.span("attention", layer):` times what is issued inside, on the device's timeline.

        row: the stream that does it, in a trace.
        """
        return _Span(self, stage, layer, row)

    def host_time(
        self, stage: str, layer: int, start_s: float, end_s: float, row: str = "host", moved_bytes: int = 0
    ) -> None:
        """What the host measured itself (a scan, a wait), by perf_counter."""
        self._host_spans.append(TracedSpan(stage, layer, row, start_s, end_s, moved_bytes))

    def count_bytes(self, direction: Direction, count: int) -> None:
        self.bytes_moved[direction] += count
        if self._open is not None:
            self._open.bytes += count

    def count_on_device(self, direction: Direction, units: Tensor, unit_bytes: int) -> None:
        """As `count_bytes` for a number that only the device knows: sum(units) * unit_bytes."""
        self._device_units.append((direction, units, unit_bytes, self._open))

    @property
    def place(self) -> tuple[bool, int]:
        """What decides which marks the work makes that is recorded next."""
        return self.enabled, self.clock.marks

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """What is counted and timed inside is known, in the end, to what this gives.

        There are marks in any case: the next step that does the same may be one that is timed. Where they cost the
        device time, not every layer has them, unless each span is to be seen.
        """
        is_timed, self._is_timed = self._is_timed, True
        self._mark_every = MARK_EVERY if self.clock.is_costly and self._origin is None else 1
        recorded, before = Recorded(), dict(self.bytes_moved)
        spans, units, marks = len(self._spans), len(self._device_units), self.clock.marks
        yield recorded
        recorded.spans = [(span, span.bytes) for span in self._spans[spans:]]
        recorded.device_units = self._device_units[units:]
        recorded.bytes_moved = {name: count - before.get(name, 0) for name, count in self.bytes_moved.items()}
        recorded.marks = self.clock.marks - marks
        self._is_timed, self._mark_every = is_timed, 1

    def repeat(self, recorded: Recorded) -> None:
        """The same work was issued again."""
        for span, moved in recorded.spans:
            span.bytes = moved
            self._spans.append(span)
        self._device_units += recorded.device_units
        for name, count in recorded.bytes_moved.items():
            self.bytes_moved[name] += count
        self.clock.repeat(recorded.marks)

    def begin_step(self) -> None:
        """Waits for the running stream only if the step is to be traced."""
        if self.settle is not None:
            self.settle()  # of a step that nobody ended
        self._spans.clear()
        self._host_spans.clear()
        self._device_units.clear()
        self.bytes_moved.clear()
        self._is_fresh = True
        self.clock.restart()
        self._steps += 1
        self._is_timed = self.trace_steps > 0 or self._steps % self.sample_every == 0
        self._origin = self.clock.origin() if self.trace_steps > 0 else None
        self._step_start = time.perf_counter()

    def enter_step(self) -> None:
        """A decode step begins: one that nobody opened (`LLM.decode` in a loop of its own) opens itself."""
        if not self._is_fresh:
            self.begin_step()
        self._is_fresh = False

    def end_step(self) -> StepTimings:
        """Close the step; the caller has already waited for its result (it has the token)."""
        step_ms = (time.perf_counter() - self._step_start) * 1e3
        if self.settle is not None:
            self.settle()
        stage_ms: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        seen: dict[str, list[bool]] = defaultdict(list)
        for span in self._spans if self._is_timed else ():
            seen[span.stage].append(span.end is not None)
            if span.end is not None:
                stage_ms[span.stage][span.layer] += self.clock.elapsed_ms(span.start, span.end)
        for timed in self._host_spans:
            stage_ms[timed.stage][timed.layer] += (timed.end_s - timed.start_s) * 1e3
        self._count_device_units()
        step = StepTimings(
            step_ms,
            {stage: dict(layers) for stage, layers in stage_ms.items()},
            dict(self.bytes_moved),
            self._stage_bytes(),
            self._step_start,
            is_timed=self._is_timed,
            sampled={stage: sum(timed) / len(timed) for stage, timed in seen.items() if not all(timed)},
        )
        if self._origin is not None:
            step.spans = tuple(self._traced(*self._origin))
            self.trace_steps -= 1
            self._origin = None
        return step

    def _count_device_units(self) -> None:
        """With one copy to the host."""
        if not self._device_units:
            return
        numbers = iter(torch.cat([units.flatten() for _, units, _, _ in self._device_units]).tolist())
        for direction, units, unit_bytes, within in self._device_units:
            count = sum(itertools.islice(numbers, units.numel())) * unit_bytes
            self.bytes_moved[direction] += count
            if within is not None:
                within.bytes += count

    def _stage_bytes(self) -> dict[str, int]:
        moved: dict[str, int] = defaultdict(int)
        for span in self._spans:
            moved[span.stage] += span.bytes
        return dict(moved)

    def _traced(self, origin: Any, origin_s: float) -> list[TracedSpan]:
        """All spans of the step, in the order of their starts."""
        spans = list(self._host_spans)
        for span in self._spans:
            start_s = origin_s + self.clock.elapsed_ms(origin, span.start) / 1e3
            end_s = origin_s + self.clock.elapsed_ms(origin, span.end) / 1e3
            spans.append(TracedSpan(span.stage, span.layer, span.row, start_s, end_s, span.bytes))
        return sorted(spans, key=lambda span: span.start_s)


class _Span:
    """A context manager without a generator: it is entered hundreds of times a step."""

    __slots__ = ("_outer", "_telemetry", "bytes", "end", "layer", "row", "stage", "start")

    def __init__(self, telemetry: Telemetry, stage: str, layer: int, row: str) -> None:
        self._telemetry = telemetry
        self.stage, self.layer, self.row, self.bytes = stage, layer, row, 0
        self.start: Any = None
        self.end: Any = None

    def __enter__(self) -> None:
        telemetry = self._telemetry
        if telemetry.enabled:
            self._outer, telemetry._open = telemetry._open, self
            if telemetry._is_timed and self.layer % telemetry._mark_every == 0:
                self.start = telemetry.clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        telemetry = self._telemetry
        if telemetry.enabled:
            if self.start is not None:
                self.end = telemetry.clock.mark()
            telemetry._open = self._outer
            telemetry._spans.append(self)
