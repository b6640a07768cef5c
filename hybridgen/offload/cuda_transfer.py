"""The transfer engine of a GPU: a side stream a direction, events as tickets, words that CPU and GPU both see."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridgen.offload.dma import copy_pieces, is_for_dma
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.pieces import CudaRecorder, RunningStream
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine, row_bytes
from hybridgen.telemetry import Direction, Telemetry

STREAMS = ("h2d", "d2h", "choice", "beside", "weights", "assembly")  # beside the one that computes


class _CudaTicket(Ticket):
    def __init__(self, event: torch.cuda.Event, tensors: list[Tensor], running: RunningStream) -> None:
        self.event = event
        self._tensors = tensors  # alive until waited for
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
        self.telemetry.count_on_device("h2d", counts, row_bytes([*sources, scales]))
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
        for tensor in (*targets, *sources):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # memory of torch's stays until the copy is over, whoever lets go of it
        # That knows nothing of the host's memory, whether or not the device sees it.
        kept = targets if direction == "d2h" else [*targets, *sources]
        return _CudaTicket(event, kept, self._running)

    def call_after(self, ticket: Ticket, function_address: int, data_address: int) -> None:
        # Only copies to the host are followed by a call, and they all lie on this stream.
        status = self._driver.cuLaunchHostFunc(
            ctypes.c_void_p(self._streams["d2h"].cuda_stream),
            ctypes.c_void_p(function_address),
            ctypes.c_void_p(data_address),
        )
        self._check("cuLaunchHostFunc", status)
