"""Spans, host times and bytes of a step, by a clock that the test turns."""

from __future__ import annotations

import pytest
import torch

from hybridgen.engine.report import _median_ms
from hybridgen.telemetry import MARK_EVERY, HostClock, Telemetry


class FakeClock:
    """Marks are numbers; `resolved` tells when somebody asked for a duration."""

    is_costly = False

    def __init__(self) -> None:
        self.now, self.resolved = 0.0, 0

    def mark(self) -> float:
        return self.now

    def restart(self) -> None:
        pass

    def elapsed_ms(self, start: float, end: float) -> float:
        self.resolved += 1
        return end - start

    def origin(self) -> tuple[float, float]:
        return self.now, self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def telemetry(clock: FakeClock) -> Telemetry:
    return Telemetry(clock=clock)


def work(telemetry: Telemetry, clock: FakeClock, stage: str, layer: int, milliseconds: float) -> None:
    with telemetry.span(stage, layer):
        clock.now += milliseconds


def test_spans_add_up_by_stage_and_layer(telemetry: Telemetry, clock: FakeClock) -> None:
    telemetry.begin_step()
    work(telemetry, clock, "qkv", 0, 1.0)
    work(telemetry, clock, "qkv", 1, 2.0)
    work(telemetry, clock, "qkv", 1, 3.0)
    telemetry.host_time("scan", 1, 2.0, 2.0078125)
    telemetry.host_time("qkv", 1, 3.0, 3.0009765625)
    assert clock.resolved == 0, "nothing is resolved, and so nothing waits, before the step is over"
    step = telemetry.end_step()
    assert step.stage_ms == {"qkv": {0: 1.0, 1: 5.9765625}, "scan": {1: 7.8125}}
    assert step.step_ms >= 0.0


def test_spans_may_nest(telemetry: Telemetry, clock: FakeClock) -> None:
    telemetry.begin_step()
    with telemetry.span("outer", 0):
        clock.now += 1.0
        work(telemetry, clock, "inner", 0, 2.0)
    assert telemetry.end_step().stage_ms == {"inner": {0: 2.0}, "outer": {0: 3.0}}


def test_a_span_ends_with_an_exception(telemetry: Telemetry, clock: FakeClock) -> None:
    telemetry.begin_step()
    with pytest.raises(KeyError), telemetry.span("mlp", 0):
        clock.now += 4.0
        raise KeyError
    assert telemetry.end_step().stage_ms == {"mlp": {0: 4.0}}


def test_steps_do_not_mix(telemetry: Telemetry, clock: FakeClock) -> None:
    telemetry.begin_step()
    work(telemetry, clock, "qkv", 0, 1.0)
    telemetry.count_bytes("h2d", 10)
    telemetry.count_bytes("h2d", 5)
    telemetry.count_bytes("cpu_read", 7)
    first = telemetry.end_step()
    telemetry.begin_step()
    telemetry.count_bytes("d2h", 3)
    second = telemetry.end_step()
    assert first.bytes_moved == {"h2d": 15, "cpu_read": 7} and first.stage_ms == {"qkv": {0: 1.0}}
    assert second.bytes_moved == {"d2h": 3} and second.stage_ms == {}


def test_a_step_that_nobody_opened_opens_itself(telemetry: Telemetry, clock: FakeClock) -> None:
    """A loop that only decodes must not pile up spans for ever."""
    for _ in range(3):
        telemetry.enter_step()
        work(telemetry, clock, "qkv", 0, 1.0)
        telemetry.count_bytes("h2d", 10)
    step = telemetry.end_step()
    assert step.stage_ms == {"qkv": {0: 1.0}} and step.bytes_moved == {"h2d": 10}
    telemetry.begin_step()
    telemetry.count_bytes("h2d", 5)
    telemetry.enter_step()
    assert telemetry.end_step().bytes_moved == {"h2d": 5}, "an opened step is entered, not opened again"


def test_switched_off_it_marks_nothing(telemetry: Telemetry, clock: FakeClock) -> None:
    telemetry.enabled = False
    telemetry.begin_step()
    work(telemetry, clock, "qkv", 0, 1.0)
    telemetry.count_bytes("h2d", 10)
    step = telemetry.end_step()
    assert step.stage_ms == {} and step.bytes_moved == {"h2d": 10}


def test_one_step_in_some_is_timed(telemetry: Telemetry, clock: FakeClock) -> None:
    """Bytes, also by stage, and what the host measured itself are known of every step."""
    telemetry.sample_every = 3
    steps = []
    for _ in range(6):
        telemetry.begin_step()
        with telemetry.span("fetch", 0):
            clock.now += 2.0
            telemetry.count_on_device("h2d", torch.tensor([[1, 2], [3, 4]]), 8)
        telemetry.host_time("scan", 0, 1.0, 1.5)
        steps.append(telemetry.end_step())
    assert [step.is_timed for step in steps] == [False, False, True] * 2
    assert clock.resolved == 2
    for step in steps:
        assert step.stage_bytes == {"fetch": 80} and step.bytes_moved == {"h2d": 80}
        assert step.stage_ms == {"scan": {0: 500.0}} | ({"fetch": {0: 2.0}} if step.is_timed else {})


class CostlyClock(FakeClock):
    """As a GPU's: marks take time on the device, and work that is repeated makes them again."""

    is_costly = True
    marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def repeat(self, marks: int) -> None:
        self.marks += marks


@pytest.mark.parametrize("is_traced", [False, True])
def test_recorded_work_is_timed_in_some_layers(is_traced: bool) -> None:
    """Where a mark is dear, unless each span is to be seen; bytes are known of all. What is waited for scales up."""
    clock, layers = CostlyClock(), 2 * MARK_EVERY
    telemetry = Telemetry(clock=clock, trace_steps=int(is_traced))
    telemetry.begin_step()
    with telemetry.recording() as recorded:
        for layer in range(layers):
            with telemetry.span("link_wait", layer):
                clock.now += layer + 1
                telemetry.count_bytes("h2d", 10)
    assert clock.marks == recorded.marks == (2 * layers if is_traced else 4)
    step = telemetry.end_step()
    assert step.bytes_moved == {"h2d": 10 * layers} and step.stage_bytes == {"link_wait": 10 * layers}
    timed = range(layers) if is_traced else (0, MARK_EVERY)
    assert step.stage_ms == {"link_wait": {layer: layer + 1 for layer in timed}}
    assert step.sampled == ({} if is_traced else {"link_wait": 1 / MARK_EVERY})
    every = sum(layer + 1 for layer in range(layers)) if is_traced else MARK_EVERY * (1 + MARK_EVERY + 1)
    assert _median_ms([step], "link_wait") == every and _median_ms([step], "scan_wait") == 0

    telemetry.begin_step()
    work(telemetry, clock, "mlp", 1, 2.0)  # what is not recorded is timed as before
    telemetry.repeat(recorded)
    again = telemetry.end_step()
    assert again.stage_ms == {"mlp": {1: 2.0}} | step.stage_ms and again.bytes_moved == step.bytes_moved


def test_a_traced_step_is_timed(telemetry: Telemetry) -> None:
    telemetry.sample_every, telemetry.trace_steps = 4, 1
    timed = []
    for _ in range(4):
        telemetry.begin_step()
        timed.append(telemetry.end_step().is_timed)
    assert timed == [True, False, False, True]


def test_the_host_clock_counts_milliseconds() -> None:
    assert HostClock().elapsed_ms(1.0, 1.25) == 250.0
    first = HostClock().mark()
    assert HostClock().mark() >= first
