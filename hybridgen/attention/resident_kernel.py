# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Decode attention over KV that is all on a GPU, in two Triton kernels whose launch does not change with the length.

The lengths are read on the device: a step of one more token is the same launch, which a graph can repeat. As in
`decode_kernel.py` the rows are cut in splits that run side by side, here one program a KV head and split: it takes the
queries of the head's group as the rows of one matrix product, so that K and V are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.attention.decode_kernel import merge_splits
from hybridgen.attention.resident import SPLIT
from hybridgen.selection.launch_kernel import launch, next_power_of_2

LEAST_SIDE = 16  # of a matrix product
ROWS_A_TURN = 64
BYTES_A_TURN = 16384  # of K or V: some of each are in shared memory, and some GPUs have 100 KB of it
WARPS = 4


@triton.jit(do_not_specialize=["rows", "kv_heads", "splits"])
def _attend_split(
    query, keys, values, index, partial,
    scale, rows, kv_heads, splits,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(index + kv_head // kv_heads).to(tl.int32) + 1
    member, channel = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED)
    head = kv_head * GROUP + member
    wanted = (member < GROUP)[:, None] & (channel < DIM)[None, :]
    q = tl.load(query + head[:, None] * DIM + channel[None, :], mask=wanted, other=0.0)
    top = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    context = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length), TURN):
        row = start + tl.arange(0, TURN)
        there = row < length
        at = (kv_head.to(tl.int64) * rows + row)[:, None] * DIM + channel[None, :]
        inside = there[:, None] & (channel < DIM)[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(there[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))  # a number: the first row of a turn is there
        shrink = tl.exp(top - new_top)
        weights = tl.exp(logits - new_top[:, None])
        v = tl.load(values + at, mask=inside, other=0.0)
        context = context * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    # As `decode_kernel.merge_splits` reads it: parts of the context by head and split, then maxima, then sums.
    place = head * splits + split
    pieces = tl.num_programs(0) * GROUP * splits
    tl.store(partial + place[:, None] * DIM + channel[None, :], context, mask=wanted)
    tl.store(partial + pieces * DIM + place, top, mask=member < GROUP)
    tl.store(partial + pieces * (DIM + 1) + place, total, mask=member < GROUP)


def attend_resident(
    query: Tensor, keys: Tensor, values: Tensor, index: Tensor, splits: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's newest token to all of its tokens.

    query: [B, Hq, d]; keys, values: [B, Hkv, capacity, d]; index: int64 [B], positions of the newest tokens, whose K
    and V are in place; splits: `splits_for` the longest. All contiguous. Returns the context [B, Hq, d], rounded to the
    query's dtype, and its log-sum-exp, float32 [B, Hq].
    """
    batch, heads, dim = query.shape
    kv_heads, rows = keys.shape[1], keys.shape[2]
    group, padded = heads // kv_heads, max(LEAST_SIDE, next_power_of_2(dim))
    turn = max(LEAST_SIDE, min(ROWS_A_TURN, BYTES_A_TURN // (padded * keys.element_size())))
    partial = torch.empty(batch * heads * splits * (dim + 2), dtype=torch.float32, device=query.device)
    launch(
        _attend_split, (batch * kv_heads, splits),
        (query.contiguous(), keys, values, index, partial),
        (scale, rows, kv_heads, splits),
        (group, max(LEAST_SIDE, next_power_of_2(group)), dim, padded, SPLIT, turn),
        WARPS,
    )  # fmt: skip
    return merge_splits(partial, query, splits)
