"""Device memory for fetched rows: two slots a micro-batch, taken in turn by its layers.

While a layer attends to the rows of one slot, the next layer's rows arrive in the other.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """K and V of up to `rows` tokens for each of `batch` x `heads` KV heads, twice."""

    def __init__(
        self, batch: int, heads: int, rows: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Zeroed, so that padding, which is never written, is finite.
        self._slots = torch.zeros((2, 2, batch * heads * rows * head_dim), dtype=dtype, device=device)
        self._shape = (batch, heads, head_dim)

    def slot(self, layer: int, rows: int) -> list[Tensor]:
        """K and V, each contiguous [B, Hkv, rows, head_dim], for this layer's turn."""
        batch, heads, head_dim = self._shape
        room = self._slots.shape[2] // (batch * heads * head_dim)
        if rows > room:
            raise ValueError(
                f"{rows} rows of each KV head are to be fetched, there is room for {room}: a plan keeps more "
                "than schedule.mode and schedule.most_extra allow"
            )
        keys, values = self._slots[layer % 2][:, : batch * heads * rows * head_dim]
        return [keys.view(batch, heads, rows, head_dim), values.view(batch, heads, rows, head_dim)]
