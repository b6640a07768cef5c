"""When a piece is called, captured and replayed, with a recorder that counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybridgen.offload.pieces import Graph, GraphPieces, Pieces, RepeatRecorder, Result


class Counting(RepeatRecorder):
    def __init__(self) -> None:
        self.captures = 0

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        self.captures += 1
        return super().capture(work)


@pytest.fixture
def recorder() -> Counting:
    return Counting()


@pytest.fixture
def pieces(recorder: Counting) -> GraphPieces:
    return GraphPieces(recorder)


def test_a_piece_is_called_captured_and_replayed(pieces: GraphPieces, recorder: Counting) -> None:
    x, calls = torch.zeros(3), []

    def work() -> torch.Tensor:
        calls.append(1)
        return x + 1

    found = [pieces.run("add", (x,), work)]
    assert recorder.captures == 0
    for value in (5.0, 6.0, 7.0):
        x.fill_(value)
        found.append(pieces.run("add", (x,), work))
        assert torch.equal(found[-1], x + 1)
    assert recorder.captures == 1 and len(calls) == 4
    assert found[1] is found[2] is found[3], "a replay leaves its result in the same place"


def test_an_input_that_is_not_named_shows(pieces: GraphPieces) -> None:
    x = torch.ones(2)
    for factor in (1, 1, 1):
        pieces.run("scale", (x,), lambda factor=factor: x * factor)
    assert torch.equal(pieces.run("scale", (x,), lambda: x * 9), x), "what was captured is done again"
    assert torch.equal(pieces.run("named", (x, 1), lambda: x * 1), x)
    assert torch.equal(pieces.run("named", (x, 9), lambda: x * 9), x * 9)


def test_the_same_memory_in_another_tensor_is_the_same_input(pieces: GraphPieces, recorder: Counting) -> None:
    x = torch.ones(4, 4)
    for _ in range(5):
        pieces.run("sum", (x[:2],), lambda: x[:2].sum())
    assert recorder.captures == 1
    pieces.run("sum", (x[:3],), lambda: x[:3].sum())
    assert recorder.captures == 2, "another shape is another input"


def test_what_changes_now_and_then_is_captured_again_at_once(pieces: GraphPieces, recorder: Counting) -> None:
    for size in (4, 4, 4, 4, 5, 5, 5, 6, 6, 6):
        assert pieces.run("size", (size,), lambda size=size: torch.full((size,), 1.0)).numel() == size
    assert recorder.captures == 3


def test_what_changes_all_the_time_is_called_until_it_rests(pieces: GraphPieces, recorder: Counting) -> None:
    for size in range(1, 20):
        assert pieces.run("size", (size,), lambda size=size: torch.full((size,), 1.0)).numel() == size
    assert recorder.captures == 1
    for _ in range(3):
        pieces.run("size", (19,), lambda: torch.ones(19))
    assert recorder.captures == 2


def test_call_by_call(pieces: GraphPieces, recorder: Counting) -> None:
    x = torch.ones(1)
    recorder.enabled = False
    for factor in range(4):
        assert pieces.run("scale", (x,), lambda factor=factor: x * factor).item() == factor
    assert recorder.captures == 0


def test_what_is_held_stays_in_its_place(pieces: GraphPieces) -> None:
    first = pieces.hold("x", torch.arange(3))
    assert pieces.hold("x", torch.arange(3) + 5) is first and first.tolist() == [5, 6, 7]
    assert pieces.hold("y", torch.arange(3)) is not first
    assert pieces.hold("x", torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_without_graphs_pieces_are_calls() -> None:
    tensor = torch.ones(2)
    assert Pieces().hold("x", tensor) is tensor
    assert [Pieces().run("n", (), lambda n=n: n) for n in range(3)] == [0, 1, 2]
