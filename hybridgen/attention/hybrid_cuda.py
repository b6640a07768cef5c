"""HybridGen's attention on a GPU: choice and attention in a few Triton kernels instead of dozens of launches."""

from __future__ import annotations

from torch import Tensor

from hybridgen.attention.decode_kernel import attend_rows
from hybridgen.attention.hybrid import HybridAttention
from hybridgen.selection.budget import KeepLimits
from hybridgen.selection.choose_kernel import choose_rows
from hybridgen.types import TokenSelection


class CudaHybridAttention(HybridAttention):
    """`HybridAttention` with the kernels of `selection/choose_kernel.py` and `attention/decode_kernel.py`."""

    def _select(
        self, query: Tensor, host_logits: Tensor, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        kv = self._kv
        return choose_rows(query, kv.keys, kv.empty, host_logits, limits, self._spec.scale)

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        kv, keys, values = self._kv, None, None
        if self._fetch is not None:
            keys, values = self._fetch.targets
            self._transfer.hand_over(chosen.rows, chosen.counts, chosen.padding, chosen.mass)
            self._fetch = None
        context, log_sum = attend_rows(
            query, kv.keys, kv.values, kv.empty, keys, values, chosen.counts, self._spec.scale
        )
        return context, log_sum if want_log_sum else None
