# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Packed rows (`groupwise.py`) back to values on a GPU: a Triton kernel.

A thread reads the byte of each of its values: neighbours share it, so it comes from the cache. That is ten times
faster than any link brings packed rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2

VALUES_A_BLOCK = 4096
WIDEST = 512  # values of a row in a block
WARPS = 8


@triton.jit(do_not_specialize=["rows", "row_bytes"])
def _decode(
    packed, pairs, out, rows, row_bytes,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (row < rows) & (channel < WIDTH)
    pair = pairs + row * (row_bytes // 2) + channel // 64 * 2
    step = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    minimum = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
    byte = tl.load(packed + row * row_bytes + 4 * GROUPS + channel * BITS // 8, mask=inside, other=0).to(tl.int32)
    code = (byte >> (channel * BITS % 8)) & ((1 << BITS) - 1)
    value = code.to(tl.float32) * step + minimum
    if HALF:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    tl.store(out + row * WIDTH + channel, value.to(out.dtype.element_ty), mask=inside)


def decode_rows(packed: Tensor, bits: int, pair_dtype: torch.dtype, out: Tensor) -> None:
    """Rows packed uint8 [..., row_bytes] into out [..., width]; both contiguous, as many rows."""
    width, row_bytes = out.shape[-1], packed.shape[-1]
    assert packed.is_contiguous() and out.is_contiguous() and packed.shape[:-1] == out.shape[:-1]
    rows = out.numel() // width
    if not rows:
        return
    channels = min(next_power_of_2(width), WIDEST)
    at_once = max(1, VALUES_A_BLOCK // channels)
    launch(
        _decode, (cdiv(rows, at_once), cdiv(width, channels)),
        (packed, packed.view(pair_dtype), out),
        (rows, row_bytes),
        (width, cdiv(width, 64), bits, out.dtype is torch.float16, at_once, channels),
        WARPS,
    )  # fmt: skip
