"""Pieces of a decode step: what a step does again and again with the same tensors, launched as one CUDA graph.

At batch 1 a layer is some twenty kernels of a few microseconds, and the host needs longer to launch them than the GPU
to run them. A piece is captured when it comes by for the second time and replayed from then on, until what it works on
changes: the host tier grows by a block, say. The caller names everything that a piece reads or is shaped by; a piece
may not wait, mark, count or look at a result.

A replayed piece leaves its result in the same memory each time. All pieces of one stream share their scratch memory,
which is right because they run one after the other, each leaving behind only its result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Pieces:
    """Pieces where nothing is gained by a graph: they are simply called."""

    def run(self, name: Hashable, inputs: Sequence[Any], work: Callable[[], Result]) -> Result:
        """work(), which depends on nothing but `inputs`: tensors, and values that can be compared."""
        return work()

    def hold(self, name: Hashable, tensor: Tensor) -> Tensor:
        """The same numbers, where they lie in the same place each time: what a piece can be given."""
        return tensor


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """What captures, for all pieces of a device."""

    enabled: bool

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """The graph of work(), which has yet to be replayed, and the memory that will hold its result."""
        ...


class GraphPieces(Pieces):
    """The pieces of one layer or micro-batch, each a graph as soon as that pays."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pieces: dict[Hashable, _Piece] = {}
        self._held: dict[Hashable, Tensor] = {}

    def run(self, name: Hashable, inputs: Sequence[Any], work: Callable[[], Result]) -> Result:
        if not self._recorder.enabled:
            return work()
        piece = self._pieces.get(name)
        if piece is not None and piece.graph is not None and _are_the_same(inputs, piece.inputs):
            piece.graph.replay()
            piece.replays += 1
            again: Result = piece.result
            return again
        key = [(value.data_ptr(), value.shape) if isinstance(value, Tensor) else value for value in inputs]
        if piece is None:  # kernels are compiled and libraries set up as they are first used: not in a capture
            self._pieces[name] = _Piece()
            return work()
        if piece.graph is None or piece.key != key:
            if not piece.is_worth_capturing(key):
                return work()
            piece.graph, piece.result = self._recorder.capture(work)
            piece.inputs = tuple(inputs)
        piece.graph.replay()
        piece.replays += 1
        result: Result = piece.result
        return result

    def hold(self, name: Hashable, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            self._held[name] = held = torch.empty_like(tensor)
        return held.copy_(tensor)


def _are_the_same(inputs: Sequence[Any], before: Sequence[Any]) -> bool:
    """A quick look: the very tensors, and equal values."""
    if len(inputs) != len(before):
        return False
    return all(a is b or not (isinstance(a, Tensor) or a != b) for a, b in zip(inputs, before, strict=True))


class _Piece:
    """One piece: its graph, if it has one, and what that was captured for."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.key: list[Any] | None = None
        self.inputs: tuple[Any, ...] = ()  # alive as long as the graph reads them
        self.result: Any = None
        self.replays = 0
        self._restless = False

    def is_worth_capturing(self, key: list[Any]) -> bool:
        """Whether to capture for this key. What has changed right after a capture first has to stay as it is."""
        if self.graph is not None:
            self._restless = self.replays < 2
        worth = not self._restless or self.key == key
        self.graph, self.result, self.inputs = None, None, ()
        self.key, self.replays = key, 0
        return worth


class CudaRecorder:
    """CUDA graphs."""

    def __init__(self, device: torch.device, running: Callable[[], torch.cuda.Stream]) -> None:
        """running: tells the stream that graphs will be launched in."""
        self.enabled = True
        self._device, self._running = device, running
        self._pool: Any = None
        self._first: Graph | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        # In a stream of its own for each one that graphs run in: memory belongs to a stream, and what belongs to one
        # is not used beside another. The default stream, besides, cannot be captured.
        running = self._running().cuda_stream
        if running not in self._streams:
            self._streams[running] = torch.cuda.Stream(self._device)
        stream = self._streams[running]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # One graph stays for good: torch gives up a pool with the last of its graphs, and takes no more for it.
            self._first, _ = self._capture(stream, lambda: torch.zeros(1, device=self._device))
        return self._capture(stream, work)

    def _capture(self, stream: torch.cuda.Stream, work: Callable[[], Result]) -> tuple[Graph, Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _no_collection():
            # relaxed: a kernel may have to be compiled and loaded, as its constants change with what it works on.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph, result


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
    """Tests: does again what was recorded, whatever is asked for by now, and leaves the result in the same memory.

    So an input that was not named shows in the result, as it would on a GPU.
    """

    enabled = True

    def capture(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        result = work()
        return _Repeat(work, result), result


class _Repeat:
    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work, self._result = work, result
        self._is_done = True  # by the capture

    def replay(self) -> None:
        if not self._is_done:
            _copy(self._result, self._work())
        self._is_done = False


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(source)
    elif isinstance(target, tuple):
        for one, other in zip(target, source, strict=True):
            _copy(one, other)
