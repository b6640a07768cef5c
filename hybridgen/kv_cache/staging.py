"""Device memory for fetched rows: a few slots a micro-batch, taken in turn by its layers.

While a layer attends to the rows of one slot, the next layer's rows arrive in another. They may arrive as soon as their
query is predicted, `lookahead_layers` before their own: one slot more than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_VIEWS = 64  # layers grow at different steps, so a few sizes are in use at a time


class Staging:
    """K and V of up to `rows` tokens for each of `batch` x `heads` KV heads, `turns` times; K as it is stored, too."""

    def __init__(
        self,
        batch: int,
        heads: int,
        rows: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
        turns: int = 2,
    ) -> None:
        """stored: the type of the host's keys where it is not `dtype`; turns: 1 for what the layer makes itself."""
        # Zeroed, so that padding, which is never written, is finite.
        self._slots = torch.zeros((turns, 2, batch * heads * rows * head_dim), dtype=dtype, device=device)
        encoded = rows if stored is not None and stored is not dtype else 0
        self._encoded = torch.zeros((turns, batch * heads * encoded * head_dim), dtype=stored or dtype, device=device)
        scales = rows if stored is torch.int8 else 0
        self._scales = torch.zeros((turns, batch * heads * scales), dtype=torch.float32, device=device)
        self._shape, self._rows = (batch, heads, head_dim), rows
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # of slots, as they were last asked for

    def slot(self, layer: int, rows: int) -> list[Tensor]:
        """K and V, each contiguous [B, Hkv, rows, head_dim], for this layer's turn."""
        batch, heads, head_dim = self._shape
        if rows > self._rows:
            raise ValueError(
                f"{rows} rows of each KV head are to be fetched, there is room for {self._rows}: a plan keeps "
                "more than schedule.mode and schedule.most_extra allow"
            )
        turn = layer % self._slots.shape[0]
        views = self._views.get((turn, rows))
        if views is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            pair = self._slots[turn][:, : batch * heads * rows * head_dim]
            views = [part.view(batch, heads, rows, head_dim) for part in pair]
            self._views[turn, rows] = views
        return views

    def encoded(self, layer: int, rows: int) -> Tensor:
        """K as it is stored, contiguous [B, Hkv, rows, head_dim], for this layer's turn."""
        batch, heads, head_dim = self._shape
        place = self._encoded[layer % len(self._encoded)]
        return place[: batch * heads * rows * head_dim].view(batch, heads, rows, head_dim)

    def scales(self, layer: int, rows: int) -> Tensor:
        """Scales of int8 keys, contiguous float32 [B, Hkv, rows, 1], for this layer's turn."""
        batch, heads, _ = self._shape
        return self._scales[layer % len(self._scales)][: batch * heads * rows].view(batch, heads, rows, 1)
