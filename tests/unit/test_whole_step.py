"""When the layers of a step are issued one by one, captured and repeated, with a recorder that counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from torch import Tensor

from hybridgen.engine.whole_step import WholeStep
from hybridgen.offload.pieces import Graph, GraphPieces, Recorder
from hybridgen.telemetry import HostClock, Telemetry


class Marks(HostClock):
    """As a GPU's clock: what is captured makes its marks again."""

    def repeat(self, marks: int) -> None:
        pass


class DeviceOnly:
    """As a GPU's: what is captured is not done, and a replay does the device's part alone."""

    does_all = False

    def __init__(self) -> None:
        self.enabled, self.capturing, self.moved = True, False, 0
        self.device_part: list[Callable[[], object]] = []
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], object]) -> Graph:
        self.captures += 1
        self.device_part, self.capturing = [], True
        work()
        self.capturing = False
        parts = list(self.device_part)
        recorder = self

        class Replay:
            def replay(self) -> None:
                recorder.replays += 1
                for part in parts:
                    part()

        return Replay()

    def reads(self, inputs: Sequence[object]) -> None:
        pass

    def makes(self, result: object) -> None:
        pass

    def issue(self, part: Callable[[], object]) -> None:
        if self.capturing:
            self.device_part.append(part)
        else:
            part()


class Engine:
    """A step adds one on the device, and counts on the host."""

    def __init__(self) -> None:
        self.recorder, self.telemetry = DeviceOnly(), Telemetry(clock=Marks())
        self.step: WholeStep[Tensor] = WholeStep(self.recorder, self.telemetry)
        self.x, self.host, self.structure = torch.zeros(1), 0, (1,)
        self.next_structure: Hashable | None = (1,)
        self.counts = torch.tensor([3])

    def work(self) -> Tensor:
        self.recorder.issue(lambda: self.x.add_(1))
        self.host += 1
        with self.telemetry.span("fetch", 0):
            self.telemetry.count_bytes("d2h", 10)
            self.telemetry.count_on_device("h2d", self.counts, 100)
        return self.x

    def host_part(self) -> None:
        self.host += 1

    def run(self, structure: Hashable | None, then: Hashable | None = None) -> Tensor:
        asked = iter((structure, then or structure))
        self.telemetry.begin_step()
        x = self.step.run(lambda: next(asked), self.work, self.host_part)
        step = self.telemetry.end_step()
        self.is_timed, self.stages = step.is_timed, step.stage_ms
        assert step.bytes_moved == {"d2h": 10, "h2d": 300} and step.stage_bytes == {"fetch": 310}
        return x


def test_a_step_is_issued_captured_and_repeated() -> None:
    engine = Engine()
    for number in range(1, 7):
        assert float(engine.run("same")) == number == engine.host
    assert (engine.recorder.captures, engine.recorder.replays) == (1, 5)


def test_another_structure_is_captured_anew() -> None:
    engine = Engine()
    for number, structure in enumerate("a" * 12 + "bbb", 1):
        assert float(engine.run(structure)) == number == engine.host
    assert (engine.recorder.captures, engine.recorder.replays) == (2, 13)


def test_after_three_that_did_not_last_structures_have_to_last_first() -> None:
    engine = Engine()
    for number, structure in enumerate("aabbbcc" + "d" * 12 + "ee", 1):
        assert float(engine.run(structure)) == number == engine.host
    assert (engine.recorder.captures, engine.recorder.replays) == (5, 1 + 2 + 1 + 4 + 1)


def test_a_step_with_the_host_in_it_forgets_nothing() -> None:
    engine = Engine()
    for number, structure in enumerate(["a", "a", None, "a", None, "a"], 1):
        assert float(engine.run(structure)) == number == engine.host
    assert (engine.recorder.captures, engine.recorder.replays) == (1, 3)


def test_what_a_step_settles_is_captured_in_the_next() -> None:
    engine = Engine()
    for structure, then in (*[("a", "a")] * 10, (None, "b"), ("b", "b")):
        engine.run(structure, then)
    assert (engine.recorder.captures, engine.recorder.replays) == (2, 9 + 1)


def test_not_if_a_piece_has_moved() -> None:
    engine = Engine()
    for number in range(1, 15):
        if number == 11:
            pieces = GraphPieces(engine.recorder)
            pieces.run("new", (), lambda: torch.zeros(2))
        assert float(engine.run("same")) == number
    assert (engine.recorder.captures, engine.recorder.replays) == (2, 9 + 3)


def test_a_capture_moves_only_what_lasts() -> None:
    """A piece that is new in a capture has no place yet; were it given one, the graph would be out of date."""
    engine = Engine()
    pieces, work = GraphPieces(engine.recorder), engine.work

    def with_a_piece() -> Tensor:
        if engine.recorder.capturing:
            pieces.run("new", (), lambda: torch.zeros(2), lasts=False)
        return work()

    engine.work = with_a_piece  # type: ignore[method-assign]
    for number in range(1, 7):
        assert float(engine.run("same")) == number
    assert (engine.recorder.captures, engine.recorder.replays, engine.recorder.moved) == (1, 5, 0)


def test_timed_and_untimed_steps_are_one_graph() -> None:
    """Its marks are there in all of them, and asked for in those that are timed."""
    engine = Engine()
    engine.telemetry.sample_every = 2
    for number in range(1, 9):
        assert float(engine.run("same")) == number
        assert engine.is_timed == (number % 2 == 0) == ("fetch" in engine.stages)
    assert (engine.recorder.captures, engine.recorder.replays) == (1, 7)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_graphs_every_step_is_issued(enabled: bool) -> None:
    engine = Engine()
    engine.recorder.enabled = False
    recorder: Recorder | None = None if enabled else engine.recorder
    engine.step = WholeStep(recorder, engine.telemetry)
    for number in range(1, 4):
        assert float(engine.run("same")) == number == engine.host
    assert engine.recorder.captures == 0
