# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""LayerNorm and RMSNorm of the few rows of a decode step on a GPU: a Triton kernel.

torch's are made for many rows; for one of 5,120 channels its LayerNorm takes 13 us, a tenth of a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8


@triton.jit
def _norm(
    x, weight, bias, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    channel = tl.arange(0, PADDED)
    inside = channel < WIDTH
    values = tl.load(x + row + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    values *= scale
    if CENTRED:
        values += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + channel, values, mask=inside)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [T, width], or without a bias RMSNorm; computed in float32, returned in x's dtype."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[1]
    _norm[(x.shape[0],)](
        x, weight, weight if bias is None else bias, out, eps, width, triton.next_power_of_2(width), bias is not None,
        num_warps=WARPS,
    )  # fmt: skip
    return out
