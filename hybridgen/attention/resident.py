"""Attention of a layer whose KV is all on the device: every token is attended, budget 1.0."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hybridgen.attention.base import DecodePlace, LayerAttention, group_by_kv_head
from hybridgen.kv_cache.resident import ResidentKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket
from hybridgen.types import LayerPlan


class ResidentAttention(LayerAttention):
    """Exact layers in mode `resident`, and every layer of strategy `full`."""

    def __init__(self, spec: LayerSpec, kv: ResidentKV) -> None:
        self._spec = spec
        self._kv = kv

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        self.pieces.run("append", (key, value, place.index), lambda: self._kv.write(key, value, place.index))
        self._kv.grow()
        longest = max(place.lengths)
        # The heads of a group are queries of one KV head, so no KV row is copied or read twice.
        context = F.scaled_dot_product_attention(
            group_by_kv_head(query, self._spec.num_kv_heads),
            self._kv.keys[:, :, :longest],
            self._kv.values[:, :, :longest],
            attn_mask=place.resident_mask,
            scale=self._spec.scale,
        )
        return self.pieces.hold("context", context.reshape(query.shape[0], -1))

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self._kv.load_past(sequence, keys, values)

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        self._kv.store(sequence, keys, values)
        return []
