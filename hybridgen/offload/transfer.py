"""The one seam for asynchrony: `issue -> Ticket`, `ticket.wait()`.

Everybody else computes on "the device" and moves bytes through a TransferEngine. Three engines:
  * `CudaTransfer` (cuda_transfer.py) copies on side streams and reads rows of registered host memory by a kernel;
  * `ImmediateTransfer` copies at once, on a machine whose CPU plays the GPU's part;
  * `LazyTransfer` (tests) fills the target with NaN at issue and copies at `wait`, so that a forgotten
    wait shows up in the result instead of hiding.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.pieces import (
    GraphPieces,
    Pieces,
    Recorder,
    RepeatRecorder,
    call_by_call,
)
from hybridgen.telemetry import Clock, Direction, HostClock, Telemetry

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
        self.telemetry.count_on_device("h2d", counts, row_bytes(sources))
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


def row_bytes(sources: list[HostBuffer]) -> int:
    """What a row of each of these takes together."""
    return sum(source.tensor.shape[3] * source.tensor.element_size() for source in sources)


def make_transfer(kind: str, device: torch.device, telemetry: Telemetry, cuda_graphs: bool = True) -> TransferEngine:
    """kind: `auto`, `immediate`, `lazy` or `cuda` (RuntimeConfig.transfer, as cuda_graphs)."""
    if kind == "auto":
        kind = "cuda" if device.type == "cuda" else "immediate"
    if (kind == "cuda") != (device.type == "cuda"):
        raise ConfigError(f"runtime.transfer = {kind!r} does not go with device {device} (allowed: 'auto')")
    if kind == "cuda":
        from hybridgen.offload.cuda_transfer import CudaTransfer  # only where there is a GPU

        return CudaTransfer(telemetry, device, cuda_graphs)
    return LazyTransfer(telemetry) if kind == "lazy" else ImmediateTransfer(telemetry)
