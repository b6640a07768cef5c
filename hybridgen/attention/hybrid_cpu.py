"""HybridGen's attention where the CPU plays the GPU's part: choice and attention in one C++ call each.

The chosen rows are read where they lie, so nothing is fetched; they are counted as if they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.hybrid import HybridAttention
from hybridgen.attention.native import attend_rows, choose_rows
from hybridgen.selection.budget import KeepLimits
from hybridgen.types import TokenSelection


class CpuHybridAttention(HybridAttention):
    """`HybridAttention` with the kernels of `hybridgen._C`."""

    def _select(
        self, query: Tensor, host_logits: Tensor, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        kv, p = self._kv, None
        if want_p:
            p = torch.empty(query.shape[0], self._spec.num_kv_heads, host_logits.shape[2])
        return choose_rows(query, kv.keys, kv.empty, host_logits, limits, self._spec.scale, p), p

    def _bring(self, chosen: TokenSelection) -> None:
        keys = self._kv.host_keys.tensor
        self._telemetry.count_on_device("h2d", chosen.counts, 2 * keys.shape[3] * keys.element_size())

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        kv = self._kv
        host = (kv.host_keys.tensor, kv.host_values.tensor)
        return attend_rows(query, kv.keys, kv.values, kv.empty, *host, chosen, self._spec.scale, want_log_sum)
