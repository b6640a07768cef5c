"""Quest's bounds (ICML'24, arXiv 2406.10774, section 3): of each page of 16 keys the largest and least of each channel.

A token's score is what no token of its page can pass: scale * sum_c max(q_c * largest_c, q_c * least_c), that is
scale * (max(q, 0) . largest + min(q, 0) . least), one product. All tokens of a page score the same, so pages are kept
whole where K is a multiple of 16 (`KeepRule.multiple`). With grouped queries p is the mean over the heads, as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.kv_cache.device_sketch import DeviceSketch, product_to_float32

PAGE = 16  # tokens; a block that ages is whole pages


def bounds_part(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """What bounds of host keys [B, Hkv, N, d] take: [B, Hkv, N / 16, 2 d], the largest of each channel, the least."""
    batch, heads, rows, dim = shape
    return (batch, heads, rows // PAGE, 2 * dim), dtype


class PageBounds(DeviceSketch):
    """Of the host rows of one layer and micro-batch."""

    name = "pages"

    def __init__(self, bounds: Tensor) -> None:
        """bounds: for `bounds_part`."""
        self.bounds = bounds

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bounds,)

    def store(self, sequence: int, row: int, keys: Tensor) -> None:
        pages = keys.unflatten(1, (-1, PAGE))
        first, dim = row // PAGE, keys.shape[2]
        target = self.bounds[sequence, :, first : first + pages.shape[1]]
        target[..., :dim], target[..., dim:] = pages.amax(2), pages.amin(2)

    def score(self, query: Tensor, lengths: list[int], scale: float) -> Tensor:
        grouped = query.unflatten(1, (self.bounds.shape[1], -1))
        signs = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), dim=-1)
        bounds = self.bounds[:, :, : max(lengths) // PAGE].transpose(2, 3)
        return product_to_float32(signs, bounds).mul_(scale).repeat_interleave(PAGE, dim=3).flatten(1, 2)
