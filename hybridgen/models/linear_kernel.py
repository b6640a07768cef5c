# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""x @ weight.T of the few rows of a decode step on a GPU: a Triton kernel that reads the weight as fast as it can.

torch's reads large matrices at 2.6 to 3.0 TB/s of an H200's 4.8, one of 5,120 x 5,120 at 1.6. Bias, ReLU and residual
are part of the launch: each one alone is a kernel of 3 to 5 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.models.layers import VECTOR_BYTES
from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2

# (rows of the weight that a program takes, its warps), by tokens, these rounded up to a power of two: what a thread
# holds of two tiles fills some 100 of its registers, and five programs are on a multiprocessor at a time.
SHAPES = {1: (8, 4), 2: (8, 4), 4: (4, 4), 8: (2, 4)}


@triton.jit
def _sums(w, v):
    """Products of [1, rows, BLOCK_K / WIDTH, WIDTH] and [tokens, 1, ...], summed up within each thread."""
    return tl.sum(w.to(tl.float32) * v.to(tl.float32), 3)


# K is a constant, or the compiler would not know that rows begin at multiples of 16 bytes. Nothing but the last tile
# has a mask: one load with a mask waits for the one before.
@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, residual, out,
    rows,
    K: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    # Padding is the last token once more, and the last program's rows are in part those of the one before: the same
    # numbers are written twice.
    token = tl.minimum(tl.arange(0, PADDED), TOKENS - 1)
    first = tl.minimum(tl.program_id(0) * BLOCK_N, rows - BLOCK_N)
    row = tl.arange(0, BLOCK_N)
    # A thread's WIDTH channels side by side: one load, and their sum needs no other thread.
    channel = tl.arange(0, BLOCK_K // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    here = x + (token[:, None, None, None] * K + channel[None, None])
    there = weight + first.to(tl.int64) * K + (row[None, :, None, None] * K + channel[None, None])
    sums = tl.zeros([PADDED, BLOCK_N, BLOCK_K // WIDTH], tl.float32)
    WHOLE: tl.constexpr = K // BLOCK_K * BLOCK_K
    if WHOLE > 0:
        w = tl.load(there, eviction_policy="evict_first")
        v = tl.load(here)
        for start in range(BLOCK_K, WHOLE, BLOCK_K):
            # The next tile is on its way before this one is made use of.
            next_w = tl.load(there + start, eviction_policy="evict_first")
            next_v = tl.load(here + start)
            sums += _sums(w, v)
            w, v = next_w, next_v
        sums += _sums(w, v)
    if WHOLE < K:
        inside = (WHOLE + channel < K)[None, None]
        w = tl.load(there + WHOLE, mask=inside, other=0.0, eviction_policy="evict_first")
        sums += _sums(w, tl.load(here + WHOLE, mask=inside, other=0.0))
    y = tl.sum(sums, 2)
    row += first
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)[None, :]
    if RELU:
        y = tl.where(y < 0.0, 0.0, y)  # NaN stays
    y = y.to(out.dtype.element_ty)
    at = token[:, None] * rows + row[None, :]
    if HAS_RESIDUAL:
        y = y.to(tl.float32) + tl.load(residual + at).to(tl.float32)
    tl.store(out + at, y)


def linear_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """relu(x @ weight.T + bias) + residual: [T, N], in x's dtype.

    x: [T, K], T at most 8; weight: [N, K], contiguous; bias: [N]; residual: [T, N]; all of one dtype. Products and sums
    are float32. It is rounded where torch rounds, before the residual and after: results are as close as those of two
    orders of summation, a unit in the last place of what is rounded.
    """
    tokens, channels = x.shape
    rows = weight.shape[0]
    padded, width = next_power_of_2(tokens), VECTOR_BYTES // x.element_size()
    block, warps = SHAPES[padded]
    while block > rows:
        block //= 2
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    launch(
        _linear, (cdiv(rows, block), 1),
        (
            x.contiguous(), weight, weight if bias is None else bias,
            weight if residual is None else residual.contiguous(), out,
        ),
        (rows,),
        # A warp's threads side by side, and the warps: then x lies in the same threads as the weight.
        (channels, tokens, padded, block, 32 * warps * width, width, bias is not None, relu, residual is not None),
        warps,
    )  # fmt: skip
    return out
