"""All K and V of the host tier to the device at every step, exact attention there: FlexGen's way with a KV cache in
host memory (algorithms.md, AoG).

A layer's rows come by DMA into one of two slots while the layer before computes with the other, so the link never
stands still as long as a layer computes for less time than its rows take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.base import DecodePlace
from hybridgen.attention.tiered import HostRows, Kernels, TieredAttention, attend_device_rows
from hybridgen.kv_cache.staging import Staging
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.types import LayerPlan


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
    ) -> None:
        super().__init__(layer, spec, kv, transfer)
        self._kernels, self._staging = kernels, staging
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
        with (
            self._transfer.beside(self._transfer.mark(), "h2d"),
            self._telemetry.span("stream", self._layer, row="h2d"),
        ):
            self._arrival = self._transfer.stream_rows([keys, self._kv.host_values], lengths, targets)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        if self.ahead:
            self._wait_for_rows()
        self._arrival = None
        kv, rows = self._kv, self._rows

        def work() -> Tensor:
            kv.write(key, value, place.slots)
            return attend_device_rows(self._kernels, query, kv, rows, self._spec.scale)[0]

        inputs: tuple[object, ...] = (query, key, value, place.slots)
        if rows is not None:
            inputs += (rows.keys, rows.values, rows.counts, *rows.lengths)
        with self._telemetry.span("attention", self._layer):
            context = self.pieces.run("attend", inputs, work, lasts=False)
        kv.grow()
        return self.pieces.hold("context", context.to(query.dtype).reshape(query.shape[0], -1))

    def _wait_for_rows(self) -> None:
        assert self._arrival is not None
        with self._telemetry.span("link_wait", self._layer):
            self._arrival.wait()
