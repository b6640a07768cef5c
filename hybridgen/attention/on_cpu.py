"""The CPU attends to all K and V of the host tier where they lie: FlexGen's other way (algorithms.md, AoC).

The query goes to the host and a context comes back, with the log-sum-exp by which it is merged with the device's own
over sinks and window. The layer needs its true query, so of one micro-batch nothing is left to overlap but the window's
attention; with several, the device runs the others' layers meanwhile (MoE-Lightning, ASPLOS'25: algorithms.md 2).
"""

from __future__ import annotations

from torch import Tensor

from hybridgen.attention.base import DecodePlace
from hybridgen.attention.tiered import Kernels, Partial, TieredAttention, attend_device_rows, merge
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.logit_worker import AttentionTicket, LogitWorker
from hybridgen.offload.scanned_keys import AttendedRows, attended_rows
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.types import LayerPlan


class OnCpuAttention(TieredAttention):
    """Sinks, window and new token on the device, everything else on the CPU."""

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: TieredKV,
        transfer: TransferEngine,
        kernels: Kernels,
        worker: LogitWorker,
    ) -> None:
        super().__init__(layer, spec, kv, transfer)
        self._kernels, self._worker = kernels, worker
        self._rows: AttendedRows | None = None  # of the step before
        # Between `begin` and `attend`: attention to the device's rows, and the host's under way.
        self._window: Partial | None = None
        self._on_host: AttentionTicket | None = None

    leaves_to_host = True

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        self._rows = None
        return super().store(sequence, keys, values, queries, first_piece)

    def begin(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> None:
        """The query goes to the host, which attends to its rows; meanwhile the device does to its own."""
        kv, scale = self._kv, self._spec.scale
        lengths = kv.admit()
        if max(lengths):
            if self._rows is None or self._rows.lengths != lengths:
                self._rows = attended_rows(query, kv.host_keys.scanned(), kv.host_values, lengths)
            self._on_host = self._worker.attend(query, self._rows, scale, self._layer)

        def work() -> Partial:
            kv.write(key, value, place.slots)
            return attend_device_rows(self._kernels, query, kv, None, scale)

        with self._telemetry.span("attention", self._layer):
            self._window = self.pieces.run("attend", (query, key, value, place.slots), work, lasts=False)
        kv.grow()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        window, on_host = self._window, self._on_host
        assert window is not None
        self._window = self._on_host = None
        if on_host is None:
            return self.pieces.hold("context", window[0].to(query.dtype).reshape(query.shape[0], -1))
        with self._telemetry.span("link_wait", self._layer):
            partial = on_host.partial()

        def work() -> Tensor:
            return merge(window, partial).to(query.dtype).reshape(query.shape[0], -1)

        with self._telemetry.span("merge", self._layer):
            context = self.pieces.run("merge", (*window, *partial), work, lasts=False)
        on_host.release()
        return context
