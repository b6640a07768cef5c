"""As `evicting.py`, with K and V of what is kept in host memory: all of it comes to the device at every step.

A layer's rows come by DMA into one of two slots while the layer before computes with the other, as in `streamed.py`;
the new token's go back by a kernel that writes them where the evicted one's were. Scores stay on the device.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from hybridgen.attention.base import DecodePlace
from hybridgen.attention.evicting import EvictingAttention
from hybridgen.kv_cache.compact import write_rows
from hybridgen.kv_cache.compact_host import HostCompactKV
from hybridgen.kv_cache.staging import Staging
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.selection.eviction import EvictionPolicy
from hybridgen.types import LayerPlan


class HostEvictingAttention(EvictingAttention):
    """Everything that is kept passes through `staging`."""

    #: The next layer, whose rows are sent for when this one begins.
    following: HostEvictingAttention | None = None

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: HostCompactKV,
        policy: EvictionPolicy,
        transfer: TransferEngine,
        capacity: int,
        frequencies: Tensor | None,
        staging: Staging,
    ) -> None:
        super().__init__(layer, spec, kv, policy, transfer, capacity, frequencies)
        self._host, self._transfer, self._staging = kv, transfer, staging
        self._arrival: Ticket | None = None  # of the running step; None before it is issued

    def choose(self) -> None:
        """The layer begins: the layer before the last has left the slot that the next one's rows go to."""
        self.bring()
        if self.following is not None:
            self.following.bring()

    def bring(self) -> None:
        """Send for this step's rows, unless they are on their way."""
        if self._arrival is not None:
            return
        self._host.settle()
        with (
            self._transfer.beside(self._transfer.mark(), "h2d"),
            self._telemetry.span("stream", self._layer, row="h2d"),
        ):
            targets = self._staging.slot(self._layer, self._host.slots)
            self._arrival = self._transfer.stream_rows(self._host.buffers, self._host.lengths(), targets)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        assert self._arrival is not None
        with self._telemetry.span("link_wait", self._layer):
            self._arrival.wait()
        self._arrival = None
        kv = self._host
        keys, values = self._staging.slot(self._layer, kv.slots)
        self.attended = [held + 1 for held in kv.held]

        def work() -> Tensor:
            kv.write(key, value, place.index)
            write_rows(keys, values, kv.free, key, value)
            # Slots that were not sent hold anything, and a weight of zero would not hide it.
            values.masked_fill_((kv.positions < 0).unsqueeze(-1), 0.0)
            return self._attend_and_evict(query, place.index, keys, values)

        with self._telemetry.span("attention", self._layer):
            self._telemetry.count_bytes("d2h", key.nbytes + value.nbytes)
            inputs = (query, key, value, place.index, keys, values, *kv.state())
            context = self.pieces.run("attend", inputs, work, lasts=False)
        kv.grow()
        return context

    def structure(self, place: DecodePlace, plan: LayerPlan) -> Hashable | None:
        return None
