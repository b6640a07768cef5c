"""All K and V of the host tier to the device at every step, exact attention there: FlexGen's way with a KV cache in
host memory (algorithms.md, AoG).

A layer's rows come by DMA into one of two slots while the layer before computes with the other, so the link never
stands still as long as a layer computes for less time than its rows take. Packed rows (`cache.compress`) come packed,
and the layer unpacks them before it attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.attention.base import DecodePlace
from hybridgen.attention.tiered import HostRows, Kernels, TieredAttention, attend_device_rows
from hybridgen.kv_cache.staging import Staging
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.transfer import Ticket, Tickets, TransferEngine
from hybridgen.types import LayerPlan


@dataclass(frozen=True)
class Unpacking:
    """How packed rows become K and V, and where: a place of one turn, for the layer that runs."""

    codec: GroupCodec
    unpacked: Staging


class StreamedAttention(TieredAttention):
    """Sinks and window stay on the device; everything else passes through `staging`."""

    #: The next layer, whose rows are sent for when this one begins.
    following: StreamedAttention | None = None
    #: Whether a layer's rows come ahead of it; if not, it waits for them before it does anything else.
    ahead = True

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: TieredKV,
        transfer: TransferEngine,
        kernels: Kernels,
        staging: Staging,
        unpacking: Unpacking | None = None,
    ) -> None:
        """staging: where rows arrive, as the host keeps them; unpacking: where they are packed."""
        super().__init__(layer, spec, kv, transfer)
        self._kernels, self._staging, self._unpacking = kernels, staging, unpacking
        self._counts = torch.zeros(kv.keys.shape[:2], dtype=torch.int64, device=kv.keys.device)
        self._lengths = [0] * len(kv.lengths)  # what the counts say
        self._rows: HostRows | None = None  # on their way, or there
        self._arrival: Ticket | None = None  # of the running step; None before it is issued

    def choose(self) -> None:
        """The layer begins: the layer before the last has left the slot that the next one's rows go to."""
        self.bring()
        if not self.ahead:
            self._wait_for_rows()
        elif self.following is not None:
            self.following.bring()

    def bring(self) -> None:
        """Send for this step's rows, unless they are on their way."""
        if self._arrival is not None:
            return
        lengths = self._kv.admit()
        for sequence, length in enumerate(lengths):
            if length != self._lengths[sequence]:
                self._counts[sequence].fill_(length)
        self._lengths = lengths
        if max(lengths) == 0:
            self._rows, self._arrival = None, Ticket()
            return
        keys = self._kv.host_keys.in_place
        assert keys is not None
        targets = self._staging.slot(self._layer, max(lengths))
        self._rows = HostRows(targets[0], targets[1], lengths, self._counts)
        disk, free = self._kv.disk, self._transfer.mark()
        on_disk = [0 if disk is None else min(length, disk.rows) for length in lengths]
        in_memory = [length - there for length, there in zip(lengths, on_disk, strict=True)]
        parts: list[Ticket] = []
        if max(in_memory):  # first: the link does not wait for the disk
            first = max(on_disk)
            rest = [target.narrow(2, first, max(lengths) - first) for target in targets]
            parts.append(self._stream(free, [keys, self._kv.host_values], in_memory, rest))
        if disk is not None:
            arrived = disk.tier.bring(disk.layer, on_disk)
            parts.append(self._stream(free, arrived, on_disk, targets))
            disk.tier.leave(disk.layer, parts[-1])
        self._arrival = parts[0] if len(parts) == 1 else Tickets(parts)

    def _stream(self, free: Ticket, sources: list[HostBuffer], lengths: list[int], targets: list[Tensor]) -> Ticket:
        """free: from when on the targets may be written to."""
        with self._transfer.beside(free, "h2d"), self._telemetry.span("stream", self._layer, row="h2d"):
            return self._transfer.stream_rows(sources, lengths, targets)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        if self.ahead:
            self._wait_for_rows()
        self._arrival = None
        kv, rows = self._kv, self._rows

        def work() -> Tensor:
            kv.write(key, value, place.slots)
            there = None if rows is None else self._unpacked(rows)
            return attend_device_rows(self._kernels, query, kv, there, self._spec.scale)[0]

        inputs: tuple[object, ...] = (query, key, value, place.slots)
        if rows is not None:
            inputs += (rows.keys, rows.values, rows.counts, *rows.lengths)
        with self._telemetry.span("attention", self._layer):
            context = self.pieces.run("attend", inputs, work, lasts=False)
        kv.grow()
        return self.pieces.hold("context", context.to(query.dtype).reshape(query.shape[0], -1))

    def _unpacked(self, rows: HostRows) -> HostRows:
        if self._unpacking is None:
            return rows
        keys, values = self._unpacking.unpacked.slot(0, rows.keys.shape[2])
        for packed, out in ((rows.keys, keys), (rows.values, values)):
            self._unpacking.codec.decode(packed, out)
        return HostRows(keys, values, rows.lengths, rows.counts)

    def _wait_for_rows(self) -> None:
        assert self._arrival is not None
        with self._telemetry.span("link_wait", self._layer):
            self._arrival.wait()
