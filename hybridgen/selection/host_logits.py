"""Logits of a scan as they cross the link to the device: contracts.md, "Logits over the link"."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LINK_TOKENS = 256  # that have one maximum, as in cpp_ext/kernels/scan.h


@dataclass(frozen=True)
class HostLogits:
    """Logits of n tokens of each query head, in host memory that the device reads: read them once.

    values: [B, Hq, n], tokens contiguous, float32; or float16, each below the maximum of its 256 tokens, by no more
    than 60,000. maxima: float32 [B, Hq, ceil(n / 256)] or wider, contiguous; None where `values` are the logits.
    """

    values: Tensor
    maxima: Tensor | None = None

    def on(self, device: torch.device) -> HostLogits:
        """The same as float32, on the device to be read again and again."""
        whole = self.float()
        return HostLogits(whole.clone() if device.type == "cuda" and self.maxima is None else whole)

    def float(self) -> Tensor:
        """float32 [B, Hq, n]; from float16 on the device of the tensors, off by 2^-11 of the distance at most."""
        if self.maxima is None:
            return self.values
        length = self.values.shape[2]
        blocks = -(-length // LINK_TOKENS)
        tops: Tensor = self.maxima[:, :, :blocks].repeat_interleave(LINK_TOKENS, dim=2)[:, :, :length]
        return tops + self.values
