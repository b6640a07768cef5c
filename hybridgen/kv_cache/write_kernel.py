# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A step's K and V into their slots on a GPU: one launch where torch's assignments are three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.launch_kernel import launch, next_power_of_2

WARPS = 1


@triton.jit(do_not_specialize=["kv_heads", "rows", "key_stride", "value_stride"])
def _write(
    key, value, slots, keys, values, empty,
    kv_heads, rows, key_stride, value_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, HAS_EMPTY: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, PADDED)
    inside = channel < DIM
    slot = tl.load(slots + sequence)
    to = ((sequence * kv_heads + head).to(tl.int64) * rows + slot) * DIM + channel
    tl.store(keys + to, tl.load(key + sequence * key_stride + head * DIM + channel, mask=inside), mask=inside)
    tl.store(values + to, tl.load(value + sequence * value_stride + head * DIM + channel, mask=inside), mask=inside)
    if HAS_EMPTY:
        tl.store(empty + sequence * rows + slot, 0)  # by each head the same


def write_token(
    key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor, empty: Tensor | None = None
) -> None:
    """key, value [B, Hkv, d] into rows slots [B] of keys, values [B, Hkv, R, d]; these of empty [B, 1, 1, R] to False.

    keys, values, empty are contiguous; slots int64; empty bool.
    """
    batch, heads, rows, dim = keys.shape
    key, value = (part if part.stride()[1:] == (dim, 1) else part.contiguous() for part in (key, value))
    marks = slots if empty is None else empty.view(torch.int8)
    launch(
        _write, (batch, heads),
        (key, value, slots, keys, values, marks),
        (heads, rows, key.stride(0), value.stride(0)),
        (dim, next_power_of_2(dim), empty is not None),
        WARPS,
    )  # fmt: skip
