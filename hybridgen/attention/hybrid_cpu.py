"""HybridGen's attention where the CPU plays the GPU's part: choice and attention in one C++ call each.

The chosen rows are read where they lie, so nothing is fetched; they are counted as if they were.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridgen.attention.hybrid import HybridAttention
from hybridgen.attention.native import attend_rows, choose_rows
from hybridgen.selection.budget import KeepLimits
from hybridgen.selection.host_logits import HostLogits
from hybridgen.types import TokenSelection


class CpuHybridAttention(HybridAttention):
    """`HybridAttention` with the kernels of `hybridgen._C`."""

    def _select(
        self, query: Tensor, host_logits: HostLogits, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        kv, p, numbers = self._kv, None, self._most_by_alpha(query, host_logits, limits)
        if numbers is not None:
            most = numbers.flatten().tolist()
            limits = replace(limits, least=most, most=most, alpha=None)
        if want_p:
            p = torch.empty(query.shape[0], self._spec.num_kv_heads, host_logits.values.shape[2])
        return choose_rows(query, kv.keys, kv.empty, host_logits.float(), limits, self._spec.scale, p), p

    def _bring(self, chosen: TokenSelection) -> None:
        keys = self._kv.host_keys.in_place
        if keys is None:  # they have to be decoded first
            super()._bring(chosen)
            return
        row_bytes = keys.tensor.shape[3] * (keys.tensor.element_size() + self._kv.host_values.tensor.element_size())
        self._telemetry.count_on_device("h2d", chosen.counts, row_bytes)

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        kv, in_place = self._kv, self._kv.host_keys.in_place
        keys, values = None if in_place is None else in_place.tensor, kv.host_values.tensor
        if self._fetch is not None:
            keys, values = self._fetch.targets
            self._fetch = None
            places = torch.arange(chosen.rows.shape[2]).expand(chosen.rows.shape)
            chosen = replace(chosen, rows=places.masked_fill(chosen.padding.squeeze(2), 0))
        scale = self._spec.scale
        return attend_rows(query, kv.keys, kv.values, kv.empty, keys, values, chosen, scale, want_log_sum)
