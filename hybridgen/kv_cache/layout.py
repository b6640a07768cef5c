"""Sizes and shapes of every KV tensor: the one place that knows them.

The cache allocates by these functions and the memory plan adds them up, so the two cannot differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridgen.models.spec import LayerSpec

AGEING_BLOCK = 64  # tokens that move to the host tier at a time


@dataclass(frozen=True)
class WindowLayout:
    """What a tiered layer keeps on the device: sinks first, then a ring of the most recent tokens."""

    sinks: int
    window: int

    @property
    def ring(self) -> int:
        """Slots of the ring: the window and two blocks of slack."""
        return self.window + 2 * AGEING_BLOCK

    @property
    def rows(self) -> int:
        return self.sinks + self.ring

    def slot(self, position: int) -> int:
        """Where the token at this position lies (or would lie) on the device."""
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.ring

    def host_rows(self, tokens: int) -> int:
        """Rows of the host tier after a prefill of `tokens`: a multiple of 64."""
        return AGEING_BLOCK * (max(0, tokens - self.sinks - self.window) // AGEING_BLOCK)

    def ageing_threshold(self, layer: int, num_layers: int) -> int:
        """Window rows at which this layer's oldest block ages; staggered over the layers."""
        return self.window + AGEING_BLOCK + AGEING_BLOCK * layer // num_layers


def device_shape(spec: LayerSpec, batch: int, rows: int) -> tuple[int, int, int, int]:
    """K or V on the device: [B, Hkv, rows, head_dim]."""
    return (batch, spec.num_kv_heads, rows, spec.head_dim)


def host_shape(spec: LayerSpec, batch: int, layout: WindowLayout, capacity: int) -> tuple[int, int, int, int]:
    """K or V in the host tier, for sequences of up to `capacity` tokens; never empty.

    Head by head, so that the scan of one KV head reads one unbroken range.
    """
    return (batch, spec.num_kv_heads, max(AGEING_BLOCK, layout.host_rows(capacity)), spec.head_dim)


def disk_rows(rows: int, share: float) -> int:
    """Of a host tier with `rows` rows a sequence, how many of the oldest lie in a file: whole blocks, not all of them.

    share: the one asked for, in [0, 1]. The rows are those that there is room for: a shorter sequence fills the file's
    part first.
    """
    blocks = rows // AGEING_BLOCK
    return AGEING_BLOCK * min(math.floor(share * blocks + 1e-9), blocks - 1)


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return size
