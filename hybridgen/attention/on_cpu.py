"""The CPU attends to all K and V of the host tier where they lie: FlexGen's other way (algorithms.md, AoC).

The query goes to the host and a context comes back, with the log-sum-exp by which it is merged with the device's own
over sinks and window. The layer needs its true query, so the device waits for the CPU: nothing is left to overlap but
the window's attention.
"""

from __future__ import annotations

from torch import Tensor

from hybridgen.attention.base import DecodePlace
from hybridgen.attention.tiered import Kernels, Partial, TieredAttention, attend_device_rows, merge
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.transfer import TransferEngine
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        kv, scale = self._kv, self._spec.scale
        lengths, host = kv.admit(), None
        if max(lengths):
            host = self._worker.attend(query, kv.host_keys.scanned(), kv.host_values, lengths, scale, self._layer)

        def work() -> Partial:
            kv.write(key, value, place.slots)
            return attend_device_rows(self._kernels, query, kv, None, scale)

        with self._telemetry.span("attention", self._layer):
            window = self.pieces.run("attend", (query, key, value, place.slots), work, lasts=False)
        kv.grow()
        context = window[0]
        if host is not None:
            partial = host.partial()
            with self._telemetry.span("merge", self._layer):
                context = merge(window, partial)
            host.release(self._transfer.mark())
        return self.pieces.hold("context", context.to(query.dtype).reshape(query.shape[0], -1))
