"""The one seam for asynchrony: `issue -> Ticket`, `ticket.wait()`.

Everybody else computes on "the device" and moves bytes through a TransferEngine. Three engines:
  * `CudaTransfer` copies on side streams and reads rows of registered host memory by a kernel;
  * `ImmediateTransfer` copies at once, on a machine whose CPU plays the GPU's part;
  * `LazyTransfer` (tests) fills the target with NaN at issue and copies at `wait`, so that a forgotten
    wait shows up in the result instead of hiding.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.offload.dma import copy_pieces, is_for_dma
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.pieces import (
    CudaRecorder,
    GraphPieces,
    Pieces,
    Recorder,
    RepeatRecorder,
    RunningStream,
    call_by_call,
)
from hybridgen.telemetry import Clock, Direction, HostClock, Telemetry

STREAMS = ("h2d", "d2h", "choice", "beside", "weights", "assembly")  # of a GPU, beside the one that computes

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Ticket:
    """Something under way, over when waited for. This one is over already."""

    def wait(self) -> None:
        """From now on, work that the caller issues on the device sees the result."""

    def wait_host(self) -> None:
        """From now on, the host sees the result."""
        self.wait()


class Tickets(Ticket):
    """Several, over when all of them are."""

    def __init__(self, tickets: list[Ticket]) -> None:
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def wait_host(self) -> None:
        for ticket in self._tickets:
            ticket.wait_host()


class FetchTicket:
    """Rows under way from the host tier, each target [B, Hkv, rows, head_dim]."""

    def __init__(self, ticket: Ticket, targets: list[Tensor]) -> None:
        self._ticket = ticket
        self.targets = targets  # after `wait`, until the layer after next fetches

    def wait(self) -> None:
        """From now on, work that the caller issues on the device sees the rows."""
        self._ticket.wait()


class TransferEngine(ABC):
    """Moves bytes between the tiers, and counts them."""

    clock: Clock = HostClock()

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        telemetry.clock = self.clock

    def copy(self, target: Tensor, source: Tensor, direction: Direction) -> Ticket:
        """Copy source into target (same shape), counted under `direction`."""
        self.telemetry.count_bytes(direction, target.numel() * target.element_size())
        return self._issue([target], lambda: self._copy(target, source), direction, [source])

    def bring(self, target: Tensor, source: Tensor, direction: Direction | None) -> Ticket:
        """As `copy` to the device, but in the stream of whoever calls; None: not counted, within the device."""
        if direction is not None:
            self.telemetry.count_bytes(direction, target.numel() * target.element_size())
        return self._bring(target, source)

    def bring_packed(self, target: Tensor, source: Tensor, codec: GroupCodec, arrival: Tensor | None) -> Ticket:
        """As `bring`, of rows that come packed, uint8 [n, row bytes], and are unpacked into target [n, width].

        arrival: uint8 of the source's shape, on the device, where they come over the link to, counted as "h2d"; it is
        free again for what this stream is given next. None: the source lies on the device.
        """
        if arrival is not None:
            self.telemetry.count_bytes("h2d", source.nbytes)
        return self._bring_packed(target, source, codec, arrival)

    def fetch_rows(self, sources: list[HostBuffer], rows: Tensor, counts: Tensor, targets: list[Tensor]) -> FetchTicket:
        """Bring rows of the host tier to the device, in the stream of whoever calls.

        sources: K and V, or one of them, each [B, Hkv, N, d]; rows: int64 [B, Hkv, K] on the device, in
        [0, N); counts: int64 [B, Hkv], how many of them are wanted; targets: contiguous [B, Hkv, K, d].
        """
        self.telemetry.count_on_device("h2d", counts, _row_bytes(sources))
        return FetchTicket(self._fetch(sources, rows, counts, targets), targets)

    def fetch_decoded(
        self,
        sources: list[HostBuffer],
        coding: tuple[HostBuffer, Tensor],
        rows: Tensor,
        counts: Tensor,
        targets: list[Tensor],
    ) -> FetchTicket | None:
        """As `fetch_rows`, where the first of the sources is int8 codes: they are decoded on their way.

        coding: scales, float32 [B, Hkv, N, 1], and the mean, float32 [B, Hkv, d] on the device. None: this engine does
        not decode, fetch the parts and do it yourself.
        """
        return None
    def stream_rows(self, sources: list[HostBuffer], lengths: list[int], targets: list[Tensor]) -> Ticket:
        """Copy the first lengths[b] rows of each head to the device, by DMA, in the stream of whoever calls.

        sources: each [B, Hkv, N, d]; targets: of the same types, [B, Hkv, n, d], n no less than the longest length; the
        rows of a head contiguous in all of them. Rows beyond a length are left as they are.
        """
        row_bytes = sum(source.tensor.shape[1] * source.tensor[0, 0, 0].nbytes for source in sources)
        self.telemetry.count_bytes("h2d", sum(lengths) * row_bytes)
        return self._stream(sources, lengths, targets)

    def follow(self) -> None:  # noqa: B027 - not abstract: without streams nothing to do
        """The caller's stream is the one that runs from now on. A prefill or a step begins with it."""

    def mark(self, before: Ticket | None = None) -> Ticket:
        """This point of the running stream; what was issued before it is over when the ticket is.

        before: a mark that nobody will ask for any more; it may become this one.
        """
        return Ticket()

    def beside(self, after: Ticket, stream: str = "beside") -> AbstractContextManager[None]:
        """What is issued inside runs beside the compute stream, once `after` is over.

        stream: one of STREAMS, which do not wait for each other; `h2d` and `d2h` are those of copies.
        """
        return nullcontext()

    def hand_over(self, *tensors: Tensor) -> None:  # noqa: B027 - not abstract: without streams nothing to do
        """These tensors, made in another stream, are used in the running one."""

    def finish(self) -> None:  # noqa: B027 - not abstract: without streams nothing to do
        """Everything that was issued is over, and the host's memory may go."""

    #: What captures work that is repeated; None where nothing is gained by that.
    recorder: Recorder | None = None

    def pieces(self) -> Pieces:
        """For a layer or a micro-batch: what it does again and again on the device."""
        return Pieces() if self.recorder is None else GraphPieces(self.recorder)

    def call_by_call(self) -> AbstractContextManager[None]:
        """Inside, pieces are launched call by call: for those who look at single kernels."""
        return nullcontext() if self.recorder is None else call_by_call(self.recorder)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _bring(self, target: Tensor, source: Tensor) -> Ticket:
        return self._issue([target], lambda: target.copy_(source), "h2d", [source])

    def _bring_packed(self, target: Tensor, source: Tensor, codec: GroupCodec, arrival: Tensor | None) -> Ticket:
        def bring() -> None:
            codec.decode(source if arrival is None else arrival.copy_(source), target)

        return self._issue([target], bring, "h2d", [source])

    def _fetch(self, sources: list[HostBuffer], rows: Tensor, counts: Tensor, targets: list[Tensor]) -> Ticket:
        """The torch twin of `fetch_kernel.fetch_rows` (it fetches the padding, too)."""
        batch, heads, length, dim = sources[0].tensor.shape
        first_row = torch.arange(batch * heads, device=rows.device).view(batch, heads, 1) * length
        flat = (rows + first_row).view(-1)

        def gather() -> None:
            for out, source in zip(targets, sources, strict=True):
                torch.index_select(source.device_view.view(-1, dim), 0, flat, out=out.view(-1, dim))

        return self._issue(targets, gather, "h2d", [flat])

    def _stream(self, sources: list[HostBuffer], lengths: list[int], targets: list[Tensor]) -> Ticket:
        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                for b, length in enumerate(lengths):
                    target[b, :, :length].copy_(source.tensor[b, :, :length])

        return self._issue(targets, copy, "h2d", [])

    @abstractmethod
    def _issue(
        self, targets: list[Tensor], work: Callable[[], Any], direction: Direction, sources: list[Tensor]
    ) -> Ticket: ...

    #: Whether the device itself can tell the host's threads something, and wait for them: `signal`, `await_signal`.
    signals: bool = False

    def copy_and_signal(self, target: Tensor, source: Tensor, after: Ticket, word: HostBuffer, value: int) -> None:
        """Once `after` is over, copy source into target, as in direction "d2h"; then set a word of the host's memory.

        word: int32 [1], seen by the device.
        """
        raise NotImplementedError

    def write_and_signal(self, target: Tensor, source: Tensor, word: HostBuffer, value: int) -> None:
        """As `copy_and_signal`, in the running stream: for a few bytes, and a target that is free by its order."""
        raise NotImplementedError

    def await_signal(self, word: HostBuffer, value: int) -> None:
        """What is issued to the running stream from now on waits until the word has reached the value."""
        raise NotImplementedError

    @abstractmethod
    def call_after(self, ticket: Ticket, function_address: int, data_address: int) -> None:
        """Have some thread call `function(data)` once the ticket's transfer is done."""


class ImmediateTransfer(TransferEngine):
    """Everything is done when `issue` returns."""

    def _issue(
        self, targets: list[Tensor], work: Callable[[], Any], direction: Direction, sources: list[Tensor]
    ) -> Ticket:
        work()
        return Ticket()

    def call_after(self, ticket: Ticket, function_address: int, data_address: int) -> None:
        _CALLBACK(function_address)(data_address)


class _LazyTicket(Ticket):
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def wait(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None


class LazyTransfer(ImmediateTransfer):
    """Nothing is done before `wait`; until then the target holds NaN (bytes: all bits set).

    Pieces do what was first recorded.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__(telemetry)
        self.recorder = RepeatRecorder()

    def _issue(
        self, targets: list[Tensor], work: Callable[[], Any], direction: Direction, sources: list[Tensor]
    ) -> Ticket:
        for target in targets:
            if target.is_floating_point():
                target.fill_(float("nan"))
            elif target.dtype is torch.uint8:  # codes and, in the same bytes, what they are multiplied by
                target.fill_(0xFF)
        return _LazyTicket(work)


class _CudaTicket(Ticket):
    def __init__(self, event: torch.cuda.Event, tensors: list[Tensor], running: RunningStream) -> None:
        self.event = event
        self._tensors = tensors  # of the host: alive until waited for
        self._running = running

    def wait(self) -> None:
        self._running.stream.wait_event(self.event)
        self._tensors.clear()

    def wait_host(self) -> None:
        self.event.synchronize()
        self._tensors.clear()


class CudaClock:
    """Marks are events on the running stream; those of a step are used again in the next: making one takes time."""

    is_costly = True

    def __init__(self, running: RunningStream) -> None:
        self._running = running
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            # external: in a graph, too, it is there to be read.
            self._events.append(torch.cuda.Event(enable_timing=True, external=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._running.stream)
        return event

    def restart(self) -> None:
        self._used = 0

    @property
    def marks(self) -> int:
        return self._used

    def repeat(self, marks: int) -> None:
        self._used += marks

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    def origin(self) -> tuple[torch.cuda.Event, float]:
        """The host's reading lies in the middle of the few microseconds that the event takes in an idle stream.

        Only the running stream is waited for: weights may be on their way in another.
        """
        event = self.mark()  # an event is made when it is first recorded: not in the time that counts
        event.synchronize()
        before = time.perf_counter()
        event.record(self._running.stream)
        event.synchronize()
        return event, (before + time.perf_counter()) / 2


class CudaTransfer(TransferEngine):
    """A side stream a direction; each transfer starts after what the running stream was given before it."""

    signals = True

    def __init__(self, telemetry: Telemetry, device: torch.device, graphs: bool = True) -> None:
        """graphs: whether pieces become CUDA graphs."""
        self._running = RunningStream(torch.cuda.current_stream(device))
        self.clock = CudaClock(self._running)
        super().__init__(telemetry)
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in STREAMS}
        self._driver = ctypes.CDLL("libcuda.so.1")
        self.recorder = CudaRecorder(device, self._running, list(self._streams.values())) if graphs else None

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def follow(self) -> None:
        self._running.stream = torch.cuda.current_stream(self._device)

    def mark(self, before: Ticket | None = None) -> Ticket:
        if isinstance(before, _CudaTicket):
            before.event.record(self._running.stream)
            return before
        event = torch.cuda.Event()
        event.record(self._running.stream)
        return _CudaTicket(event, [], self._running)

    @contextmanager
    def beside(self, after: Ticket, stream: str = "beside") -> Iterator[None]:
        before = self._running.stream
        self._switch_to(self._streams[stream])
        try:
            after.wait()
            yield
        finally:
            self._switch_to(before)

    def _switch_to(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        self._running.stream = stream

    def hand_over(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            tensor.record_stream(self._running.stream)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if is_for_dma(target, source):
            copy_pieces(self._driver, target, source, self._running.stream.cuda_stream)
        else:
            target.copy_(source, non_blocking=True)

    def _bring(self, target: Tensor, source: Tensor) -> Ticket:
        target.copy_(source, non_blocking=True)
        return self.mark()

    def _bring_packed(self, target: Tensor, source: Tensor, codec: GroupCodec, arrival: Tensor | None) -> Ticket:
        codec.decode(source if arrival is None else arrival.copy_(source, non_blocking=True), target)
        return self.mark()

    def _fetch(self, sources: list[HostBuffer], rows: Tensor, counts: Tensor, targets: list[Tensor]) -> Ticket:
        from hybridgen.offload.fetch_kernel import fetch_rows  # Triton: only where there is a GPU

        fetch_rows([source.device_view for source in sources], rows.contiguous(), counts.contiguous(), targets)
        return self.mark()

    def fetch_decoded(
        self,
        sources: list[HostBuffer],
        coding: tuple[HostBuffer, Tensor],
        rows: Tensor,
        counts: Tensor,
        targets: list[Tensor],
    ) -> FetchTicket | None:
        from hybridgen.offload.fetch_kernel import fetch_rows

        scales, mean = coding
        self.telemetry.count_on_device("h2d", counts, _row_bytes([*sources, scales]))
        tables = [source.device_view for source in sources]
        fetch_rows(tables, rows.contiguous(), counts.contiguous(), targets, (scales.device_view, mean))
        return FetchTicket(self.mark(), targets)

    def _stream(self, sources: list[HostBuffer], lengths: list[int], targets: list[Tensor]) -> Ticket:
        stream = self._running.stream.cuda_stream
        for target, source in zip(targets, sources, strict=True):
            for to, rows, length in zip(target, source.device_view, lengths, strict=True):
                if length:
                    copy_pieces(self._driver, to[:, :length], rows[:, :length], stream)
        self.hand_over(*targets)
        return self.mark()

    def copy_and_signal(self, target: Tensor, source: Tensor, after: Ticket, word: HostBuffer, value: int) -> None:
        self.telemetry.count_bytes("d2h", target.numel() * target.element_size())
        stream = self._streams["d2h"]
        with self.beside(self.mark(), "d2h"):
            after.wait()
            self._copy(target, source)
            self._on_word(self._driver.cuStreamWriteValue32_v2, stream, word, value)
        source.record_stream(stream)

    def write_and_signal(self, target: Tensor, source: Tensor, word: HostBuffer, value: int) -> None:
        self.telemetry.count_bytes("d2h", target.numel() * target.element_size())
        target.copy_(source)  # a kernel: the device sees the host's memory
        self._on_word(self._driver.cuStreamWriteValue32_v2, self._running.stream, word, value)

    def await_signal(self, word: HostBuffer, value: int) -> None:
        self._on_word(self._driver.cuStreamWaitValue32_v2, self._running.stream, word, value)

    def _on_word(self, call: Any, stream: torch.cuda.Stream, word: HostBuffer, value: int) -> None:
        """flags 0: a wait is for >= in a number that wraps around; a write comes after what the stream wrote before."""
        address = ctypes.c_uint64(word.device_view.data_ptr())
        status = call(ctypes.c_void_p(stream.cuda_stream), address, ctypes.c_uint32(value), ctypes.c_uint(0))
        self._check(call.__name__, status)

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{call} failed with CUDA error {status}")

    def _issue(
        self, targets: list[Tensor], work: Callable[[], Any], direction: Direction, sources: list[Tensor]
    ) -> Ticket:
        stream = self._streams[direction]
        with self.beside(self.mark(), direction):
            work()
            event = torch.cuda.Event()
            event.record(stream)
        on_host = []
        for tensor in (*targets, *sources):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # its memory stays until the copy is over, whoever lets go of it
            else:
                on_host.append(tensor)
        return _CudaTicket(event, on_host, self._running)

    def call_after(self, ticket: Ticket, function_address: int, data_address: int) -> None:
        # Only copies to the host are followed by a call, and they all lie on this stream.
        status = self._driver.cuLaunchHostFunc(
            ctypes.c_void_p(self._streams["d2h"].cuda_stream),
            ctypes.c_void_p(function_address),
            ctypes.c_void_p(data_address),
        )
        self._check("cuLaunchHostFunc", status)


def _row_bytes(sources: list[HostBuffer]) -> int:
    return sum(source.tensor.shape[3] * source.tensor.element_size() for source in sources)


def make_transfer(
    kind: str, device: torch.device, telemetry: Telemetry, cuda_graphs: bool = True
) -> TransferEngine:
    """kind: `auto`, `immediate`, `lazy` or `cuda` (RuntimeConfig.transfer, as cuda_graphs)."""
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "immediate"
    if (kind == "cuda") != (device.type == "cuda"):
        raise ConfigError(f"runtime.transfer = {kind!r} does not go with device {device} (allowed: 'auto')")
    if kind == "cuda":
        return CudaTransfer(telemetry, device, cuda_graphs)
    return LazyTransfer(telemetry) if kind == "lazy" else ImmediateTransfer(telemetry)
