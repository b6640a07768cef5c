"""When a piece is called, captured and replayed, with a recorder that counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridgen.offload.pieces import CudaRecorder, Graph, GraphPieces, Pieces, RepeatRecorder, RunningStream
from hybridgen.types import TokenSelection


class Counting(RepeatRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def capture(self, work: Callable[[], object]) -> Graph:
        self.captures += 1
        return super().capture(work)


@pytest.fixture
def recorder() -> Counting:
    return Counting()


@pytest.fixture
def pieces(recorder: Counting) -> GraphPieces:
    return GraphPieces(recorder)


def test_a_piece_is_called_captured_and_replayed(pieces: GraphPieces, recorder: Counting) -> None:
    x, found = torch.zeros(3), []
    for value in (4.0, 5.0, 6.0, 7.0):
        x.fill_(value)
        found.append(pieces.run("add", (x,), lambda: x + 1))
        assert torch.equal(found[-1], x + 1)
        assert recorder.captures == (len(found) > 1)
    assert len({result.data_ptr() for result in found}) == 1, "the result is in the same place each time"


def test_an_input_that_is_not_named_shows(pieces: GraphPieces) -> None:
    x = torch.ones(2)
    for _ in range(2):
        pieces.run("scale", (x,), lambda: x * 1)
    assert torch.equal(pieces.run("scale", (x,), lambda: x * 9), x), "what was captured is done again"
    assert torch.equal(pieces.run("named", (x, 1), lambda: x * 1), x)
    assert torch.equal(pieces.run("named", (x, 9), lambda: x * 9), x * 9)


def test_the_same_memory_in_another_tensor_is_the_same_input(pieces: GraphPieces, recorder: Counting) -> None:
    x = torch.ones(4, 4)
    for _ in range(5):
        pieces.run("sum", (x[:2],), lambda: x[:2].sum())
    assert recorder.captures == 1
    for _ in range(2):
        assert pieces.run("sum", (x[:3],), lambda: x[:3].sum()) == 12
    assert recorder.captures == 2, "another shape is another input"


def test_what_changes_now_and_then_is_captured_again(pieces: GraphPieces, recorder: Counting) -> None:
    for size in (4, 4, 4, 4, 5, 5, 5, 6, 6, 6):
        assert pieces.run("size", (size,), lambda size=size: torch.full((size,), 1.0)).numel() == size
    assert recorder.captures == 3


def test_what_changes_all_the_time_is_called(pieces: GraphPieces, recorder: Counting) -> None:
    for size in range(1, 20):
        assert pieces.run("size", (size,), lambda size=size: torch.full((size,), 1.0)).numel() == size
    assert recorder.captures == 0


def test_a_piece_that_follows_a_changing_one_has_the_same_inputs(pieces: GraphPieces, recorder: Counting) -> None:
    """As long as the result keeps its shape: what is behind it is not captured again."""
    for step in range(8):
        first = pieces.run("first", (step // 3,), lambda step=step: torch.full((4,), float(step // 3)))
        second = pieces.run("second", (first,), lambda first=first: first + 1)
        assert second.tolist() == [step // 3 + 1] * 4
    assert recorder.captures == 3 + 1


def test_results_in_tuples_and_dataclasses(pieces: GraphPieces) -> None:
    def work(count: int) -> tuple[TokenSelection, None]:
        rows = torch.arange(count).view(1, 1, -1)
        padding, mass = torch.zeros(1, 1, 1, count, dtype=torch.bool), torch.ones(1, 1)
        return TokenSelection(rows, torch.tensor([[count]]), padding, [count], mass), None

    found: list[TokenSelection] = []
    for count in (3, 3, 3, 5, 5):
        chosen, nothing = pieces.run("choose", (count,), lambda count=count: work(count))
        assert chosen.rows.tolist() == [[list(range(count))]] and chosen.host_lengths == [count]
        assert chosen.counts.item() == count and nothing is None
        found.append(chosen)
    assert found[0].rows.data_ptr() == found[2].rows.data_ptr() != found[3].rows.data_ptr()
    assert found[0].counts.data_ptr() == found[3].counts.data_ptr()


def test_what_a_result_is_a_view_of_may_change(pieces: GraphPieces) -> None:
    base = torch.arange(6.0)

    def work() -> Tensor:
        return base.view(2, 3)[:, 1]

    first = pieces.run("view", (base,), work)
    base += 1
    assert first.tolist() == [1.0, 4.0], "a copy"
    assert pieces.run("view", (base,), work).tolist() == [2.0, 5.0]


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


def test_what_does_not_last_is_not_copied_within_a_larger_capture(pieces: GraphPieces, recorder: Counting) -> None:
    """It holds NaN when the whole is over; what lasts and what is held lie where they lay."""
    x = torch.ones(3)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        first = pieces.run("first", (x,), lambda: x + 1, lasts=False)
        pair = pieces.run("pair", (first,), lambda: (first * 2, torch.tensor([5])), lasts=False)
        return first, pair[0], pieces.run("last", pair, lambda: pair[0] + pair[1])

    before, moved = work(), recorder.moved
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    whole = recorder.capture(lambda: found.append(work()))
    for value in (2.0, 3.0):
        x.fill_(value)
        whole.replay()
        first, twice, last = found[-1]
        assert last is before[2] and last.tolist() == [2 * (value + 1) + 5] * 3
        assert first.isnan().all() and twice.isnan().all()
    assert before[0].tolist() == [2.0] * 3, "the place of a piece that is called or replayed alone"
    assert recorder.moved == moved and recorder.captures == 1
    assert [result.tolist() for result in work()] == [[4.0] * 3, [8.0] * 3, [13.0] * 3]


def test_nothing_is_held_within_a_larger_capture(pieces: GraphPieces, recorder: Counting) -> None:
    held, made = pieces.hold("x", torch.zeros(2)), torch.ones(2)
    found: list[Tensor] = []
    recorder.capture(lambda: found.append(pieces.hold("x", made))).replay()
    assert found[0] is made and held.tolist() == [0.0, 0.0]


def test_a_graph_keeps_alive_what_it_has_not_made() -> None:
    recorder = CudaRecorder(torch.device("cpu"), RunningStream(None), ())  # type: ignore[arg-type]
    weights, made = torch.ones(2), torch.ones(2, 3)
    recorder.reads((weights, 7))
    recorder.makes((made, None))
    recorder.reads((made[:, 1], weights))
    assert [tensor is weights for tensor in recorder._read] == [True, True]


def test_without_graphs_pieces_are_calls() -> None:
    tensor = torch.ones(2)
    assert Pieces().hold("x", tensor) is tensor
    assert [Pieces().run("n", (), lambda n=n: n) for n in range(3)] == [0, 1, 2]
