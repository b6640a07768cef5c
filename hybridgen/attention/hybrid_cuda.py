"""HybridGen's attention on a GPU: choice and attention in a few Triton kernels instead of dozens of launches."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.base import group_by_kv_head
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
        # The logits lie in host memory: they cross the link once, here.
        logits = torch.empty(host_logits.shape, dtype=torch.float32, device=query.device).copy_(host_logits)
        return choose_rows(self._local_scores(query), group_by_kv_head(logits, self._spec.num_kv_heads), limits)

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
