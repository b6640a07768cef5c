"""Attention of a layer whose KV is all on the device: every token is attended, budget 1.0."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch.nn.functional as F
from torch import Tensor

from hybridgen.attention.base import DecodePlace, LayerAttention, group_by_kv_head
from hybridgen.attention.tiered import Kernels
from hybridgen.kv_cache.resident import ResidentKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket
from hybridgen.types import LayerPlan

SPLIT = 512  # rows of one program of the GPU's kernel
SPLITS_A_LAUNCH = 16  # their number grows by so many at a time: a launch stays the same for long


def splits_for(length: int) -> int:
    """Programs for each KV head, enough for sequences of this length; the same for many lengths."""
    return -(-length // (SPLIT * SPLITS_A_LAUNCH)) * SPLITS_A_LAUNCH


class ResidentAttention(LayerAttention):
    """Exact layers in mode `resident`, and every layer of strategy `full`."""

    def __init__(self, spec: LayerSpec, kv: ResidentKV, kernels: Kernels) -> None:
        self._spec, self._kv, self._kernels = spec, kv, kernels

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        kv, scale = self._kv, self._spec.scale
        kv.grow()
        if self._kernels == "triton":
            from hybridgen.attention.resident_kernel import attend_resident  # Triton: only where there is a GPU

            splits = splits_for(max(place.lengths))

            def work() -> Tensor:
                kv.write(key, value, place.index)
                context, _ = attend_resident(query, kv.keys, kv.values, place.index, splits, scale)
                return context

            inputs = (query, key, value, place.index, splits)
            return self.pieces.run("attend", inputs, work, lasts=False).flatten(1)
        kv.write(key, value, place.index)
        longest = max(place.lengths)
        # The heads of a group are queries of one KV head, so no KV row is copied or read twice.
        context = F.scaled_dot_product_attention(
            group_by_kv_head(query, self._spec.num_kv_heads),
            kv.keys[:, :, :longest],
            kv.values[:, :, :longest],
            attn_mask=place.resident_mask,
            scale=scale,
        )
        return self.pieces.hold("context", context.reshape(query.shape[0], -1))

    def tiers(self, lengths: Sequence[int]) -> tuple[int, int, int] | None:
        return sum(lengths), 0, 0

    def structure(self, place: DecodePlace, plan: LayerPlan) -> Hashable | None:
        return splits_for(max(place.lengths)) if self._kernels == "triton" else None

    def repeated(self) -> None:
        self._kv.grow()

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self._kv.load_past(sequence, keys, values)

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        self._kv.store(sequence, keys, values)
        return []
