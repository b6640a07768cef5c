"""Pieces of a decode step: what a step does again and again with the same tensors, launched as one CUDA graph.

At batch 1 a layer is some twenty kernels of a few microseconds, and the host needs longer to launch them than the GPU
to run them. A piece is captured when the same inputs come by for the second time, and replayed until one of them
changes: the host tier grows by a block, say. The caller names everything that a piece reads or is shaped by; a piece
may not wait, mark, count or look at a result.

What a piece makes is copied to memory of its own, the same each time, so that the pieces after it have the same inputs
again. And so all pieces of one stream can share the rest of what they allocate: they run one after the other, and what
lies in there does not outlive the piece that made it.

Where a whole step is captured, the pieces after it are part of the same graph and find its result where it was made: a
copy is needed only of what is read when the step is over. The rule: a result lasts unless the caller says that nobody
but the same step reads it. What does not last dies with its last reference, as tensors within a piece do, and the graph
uses its memory again; another stream that reads it has to be known by then (`TransferEngine.hand_over`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Result = TypeVar("Result")


class Pieces:
    """Pieces where nothing is gained by a graph: they are simply called."""

    def run(self, name: Hashable, inputs: Sequence[Any], work: Callable[[], Result], lasts: bool = True) -> Result:
        """work(), which depends on nothing but `inputs`: tensors, and values that can be compared.

        lasts: False where nobody but the step itself reads the result, on the device.
        """
        return work()

    def hold(self, name: Hashable, tensor: Tensor) -> Tensor:
        """The same numbers, where they lie in the same place each time: what a piece of this step can be given."""
        return tensor


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """What captures, for all pieces of a device."""

    enabled: bool
    capturing: bool = False  # pieces are then part of what is captured
    moved: int = 0  # how often a piece's result came to lie elsewhere: what was captured may not know
    does_all: bool = False  # whether a replay does the host's part, too

    def capture(self, work: Callable[[], object]) -> Graph:
        """The graph of work(), which has yet to be replayed."""
        ...

    def reads(self, inputs: Sequence[Any]) -> None:
        """What is captured reads these, which live as long as the graph; but for those that it makes itself."""
        ...

    def makes(self, result: Any) -> None:
        """What is captured makes this (tensors, in tuples and dataclasses), and nobody reads it afterwards."""
        ...


@contextmanager
def call_by_call(recorder: Recorder) -> Iterator[None]:
    """Inside, nothing is captured or replayed."""
    before, recorder.enabled = recorder.enabled, False
    try:
        yield
    finally:
        recorder.enabled = before


class GraphPieces(Pieces):
    """The pieces of one layer or micro-batch, each a graph as soon as that pays."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pieces: dict[Hashable, _Piece] = {}
        self._held: dict[Hashable, Tensor] = {}

    def run(self, name: Hashable, inputs: Sequence[Any], work: Callable[[], Result], lasts: bool = True) -> Result:
        piece = self._pieces.get(name)
        if piece is None:
            piece = self._pieces[name] = _Piece()
        if self._recorder.capturing:
            self._recorder.reads(inputs)
            if not lasts:
                passing = work()
                self._recorder.makes(passing)
                return passing
            piece.result = self._kept(piece.result, work())
            return cast(Result, piece.result)
        if piece.graph is not None and self._recorder.enabled and _are_the_same(inputs, piece.inputs):
            piece.graph.replay()
            result: Result = piece.result
            return result
        key = [(value.data_ptr(), value.shape) if isinstance(value, Tensor) else value for value in inputs]
        if piece.key != key or not self._recorder.enabled:
            # Kernels are compiled and libraries set up as they are first used: not in a capture.
            piece.key, piece.inputs, piece.graph = None, (), None
            piece.result = self._kept(piece.result, work())
            piece.key = key  # not if that failed
        elif piece.graph is None:
            piece.graph = self._recorder.capture(lambda: self._kept(piece.result, work()))
            piece.inputs = tuple(inputs)
            piece.graph.replay()
        else:  # the same memory in other tensors
            piece.inputs = tuple(inputs)
            piece.graph.replay()
        made: Result = piece.result
        return made

    def hold(self, name: Hashable, tensor: Tensor) -> Tensor:
        if self._recorder.capturing:
            return tensor
        held: Tensor = self._kept(self._held.get(name), tensor)
        self._held[name] = held
        return held

    def _kept(self, place: Any, made: Any) -> Any:
        """What was made, in `place` if that is of its shape, else in new memory: tensors, in tuples and dataclasses."""
        if isinstance(made, Tensor):
            if not isinstance(place, Tensor) or place.shape != made.shape or place.dtype != made.dtype:
                place = torch.empty_like(made, memory_format=torch.contiguous_format)
                self._recorder.moved += 1
            return place.copy_(made)
        if isinstance(made, tuple):
            places = place if isinstance(place, tuple) and len(place) == len(made) else (None,) * len(made)
            return tuple(self._kept(*pair) for pair in zip(places, made, strict=True))
        if is_dataclass(made) and not isinstance(made, type):
            parts = {part.name: getattr(made, part.name) for part in fields(made)}
            kept = {name: self._kept(getattr(place, name, None), part) for name, part in parts.items()}
            return replace(made, **kept)
        return made


class _Piece:
    """One piece: its graph, if it has one, and what that was captured for."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.key: list[Any] | None = None
        self.inputs: tuple[Any, ...] = ()  # alive as long as the graph reads them
        self.result: Any = None  # where it is kept


def _are_the_same(inputs: Sequence[Any], before: Sequence[Any]) -> bool:
    """A quick look: the very tensors, and equal values."""
    if len(inputs) != len(before):
        return False
    return all(a is b or not (isinstance(a, Tensor) or a != b) for a, b in zip(inputs, before, strict=True))


def _tensors_in(made: Any) -> Iterator[Tensor]:
    """The tensors in a result: in tuples and dataclasses."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple):
        for part in made:
            yield from _tensors_in(part)
    elif is_dataclass(made) and not isinstance(made, type):
        for field in fields(made):
            yield from _tensors_in(getattr(made, field.name))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RunningStream:
    """The stream that work is issued to. Asking torch takes 10 us, hundreds of times a step."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream


class CudaRecorder:
    """CUDA graphs."""

    does_all = False

    def __init__(self, device: torch.device, running: RunningStream, beside: Sequence[torch.cuda.Stream]) -> None:
        """running: where graphs will be launched; while one is captured, the stream that does it.

        beside: the streams that work may go to.
        """
        self.enabled, self.capturing, self.moved = True, False, 0
        self._read: list[Tensor] = []
        self._made: set[int] = set()  # where the memory begins of what does not last
        self._device, self._running, self._beside = device, running, beside
        self._pool: Any = None
        self._first: Graph | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}

    def capture(self, work: Callable[[], object]) -> Graph:
        # In a stream of its own for each one that graphs run in: memory belongs to a stream, and what belongs to one
        # is not used beside another. The default stream, besides, cannot be captured.
        running = self._running.stream.cuda_stream
        if running not in self._streams:
            self._streams[running] = torch.cuda.Stream(self._device)
        stream = self._streams[running]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # One graph stays for good: torch gives up a pool with the last of its graphs, and takes no more for it.
            self._first = self._capture(stream, lambda: torch.zeros(1, device=self._device))
        return self._capture(stream, work)

    def _capture(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> Graph:
        graph, before = torch.cuda.CUDAGraph(), self._running.stream
        with torch.cuda.stream(stream), _no_collection():
            # relaxed: a kernel may have to be compiled and loaded.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            self._running.stream, self.capturing = stream, True
            self._read, self._made = [], set()
            try:
                work()
            except BaseException:
                self._give_up(graph, stream)
                raise
            finally:
                self._running.stream, self.capturing = before, False
            self._join(stream)
            graph.capture_end()
        return _Captured(graph, self._read)

    def reads(self, inputs: Sequence[Any]) -> None:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self._read += [tensor for tensor in tensors if _memory(tensor) not in self._made]

    def makes(self, result: Any) -> None:
        self._made.update(_memory(tensor) for tensor in _tensors_in(result))

    def _give_up(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """End a capture that broke off; the next one has other streams and another pool."""
        with suppress(RuntimeError):
            self._join(stream)
        try:
            graph.capture_end()
        except RuntimeError:  # torch then leaves the pool open
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = self._first = None
        self._streams.clear()

    def _join(self, stream: torch.cuda.Stream) -> None:
        """What goes on beside it ends within the graph, too, though nobody waits for it: a mark, say."""
        for other in self._beside:
            with torch.cuda.stream(other):
                is_part = torch.cuda.is_current_stream_capturing()
            if is_part:
                stream.wait_stream(other)


class _Captured:
    """A graph, and what it reads, which lives as long."""

    def __init__(self, graph: torch.cuda.CUDAGraph, read: list[Tensor]) -> None:
        self._graph, self._read = graph, read

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python would collect may be another engine's memory and graphs: not while one is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class RepeatRecorder:
    """Tests: does again what was recorded, whatever is asked for by now; what does not last then holds NaN.

    So an input that was not named shows in the result, and a result that is read too late, as they would on a GPU.
    """

    does_all = True

    def __init__(self) -> None:
        self.enabled, self.capturing, self.moved = True, False, 0
        self._made: list[Tensor] = []

    def capture(self, work: Callable[[], object]) -> Graph:
        return _Repeat(self, work)

    def repeat(self, work: Callable[[], object]) -> None:
        self.capturing = True
        try:
            work()
        finally:
            self.capturing = False
            for tensor in self._made:
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            self._made.clear()

    def reads(self, inputs: Sequence[Any]) -> None:
        pass

    def makes(self, result: Any) -> None:
        self._made += _tensors_in(result)


class _Repeat:
    def __init__(self, recorder: RepeatRecorder, work: Callable[[], object]) -> None:
        self._recorder, self._work = recorder, work

    def replay(self) -> None:
        self._recorder.repeat(self._work)
