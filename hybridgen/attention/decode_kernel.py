# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Decode attention on a GPU: one softmax over the device window and the fetched rows, in two Triton kernels.

The rows are cut in splits that run side by side (one program a query head and split); a second kernel
merges their partial results by their log-sum-exps, which is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2

SPLIT = 256  # rows of one program
ROWS_A_TURN = 32
SPLITS_A_TURN = 16
WARPS = 4


# Numbers that change as the run goes on must not have a kernel compiled anew: none is specialised on.
@triton.jit(do_not_specialize=["local_rows", "fetched_rows", "kv_heads", "splits"])
def _attend_split(
    query, keys, values, empty, fetched_keys, fetched_values, counts, partial,
    scale, local_rows, fetched_rows, kv_heads, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLIT: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    channel = tl.arange(0, DIM_PADDED)
    inside = channel < DIM
    q = tl.load(query + head * DIM + channel, mask=inside, other=0.0).to(tl.float32) * scale
    kept = tl.load(counts + kv_head).to(tl.int32)
    top = -float("inf")
    total = 0.0
    context = tl.zeros([DIM_PADDED], tl.float32)
    for turn in range(0, SPLIT, TURN):
        row = split * SPLIT + turn + tl.arange(0, TURN)
        is_local = row < local_rows
        slot_empty = tl.load(empty + (kv_head // kv_heads) * local_rows + row, mask=is_local, other=1)
        local = is_local & (slot_empty == 0)
        fetched = (row >= local_rows) & (row - local_rows < kept)
        here = (kv_head.to(tl.int64) * local_rows + row)[:, None] * DIM + channel[None, :]
        there = (kv_head.to(tl.int64) * fetched_rows + row - local_rows)[:, None] * DIM + channel[None, :]
        from_local, from_fetched = local[:, None] & inside[None, :], fetched[:, None] & inside[None, :]
        k = tl.load(keys + here, mask=from_local, other=0.0).to(tl.float32)
        k += tl.load(fetched_keys + there, mask=from_fetched, other=0.0).to(tl.float32)
        logits = tl.where(local | fetched, tl.sum(k * q[None, :], 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        # Before the first valid row both are -inf, and their difference is no number.
        shrink = tl.where(new_top == -float("inf"), 1.0, tl.exp(top - new_top))
        weights = tl.where(local | fetched, tl.exp(logits - new_top), 0.0)
        v = tl.load(values + here, mask=from_local, other=0.0).to(tl.float32)
        v += tl.load(fetched_values + there, mask=from_fetched, other=0.0).to(tl.float32)
        context = context * shrink + tl.sum(v * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    at = head * splits + split
    pieces = tl.num_programs(0) * splits
    tl.store(partial + at * DIM + channel, context, mask=inside)
    tl.store(partial + pieces * DIM + at, top)
    tl.store(partial + pieces * (DIM + 1) + at, total)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial, context, log_sum, splits,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    pieces = tl.num_programs(0) * splits
    tops, sums = partial + pieces * DIM + head * splits, partial + pieces * (DIM + 1) + head * splits
    channel = tl.arange(0, DIM_PADDED)
    highest = -float("inf")
    for start in range(0, splits, TURN):
        split = start + tl.arange(0, TURN)
        highest = tl.maximum(highest, tl.max(tl.load(tops + split, mask=split < splits, other=-float("inf")), 0))
    total = 0.0
    merged = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, splits, TURN):
        split = start + tl.arange(0, TURN)
        there = split < splits
        weight = tl.exp(tl.load(tops + split, mask=there, other=-float("inf")) - highest)
        total += tl.sum(weight * tl.load(sums + split, mask=there, other=0.0), 0)
        at = (head * splits + split)[:, None] * DIM + channel[None, :]
        piece = tl.load(partial + at, mask=there[:, None] & (channel < DIM)[None, :], other=0.0)
        merged += tl.sum(piece * weight[:, None], 0)
    tl.store(context + head * DIM + channel, merged / total, mask=channel < DIM)
    tl.store(log_sum + head, highest + tl.log(total))


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    empty: Tensor,
    fetched_keys: Tensor | None,
    fetched_values: Tensor | None,
    counts: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Context [B, Hq, d], rounded to the query's dtype, and log-sum-exp, float32 [B, Hq].

    query: [B, Hq, d]; keys, values: [B, Hkv, R, d]; empty: bool [B, 1, 1, R], slots without a token (not
    read); fetched_*: [B, Hkv, K, d], of which each head's first `counts` [B, Hkv] are read. All contiguous.
    """
    batch, heads, dim = query.shape
    kv_heads, local_rows = keys.shape[1], keys.shape[2]
    fetched_rows = 0
    if fetched_keys is None or fetched_values is None:
        fetched_keys, fetched_values = keys, values
    else:
        fetched_rows = fetched_keys.shape[2]
    splits = cdiv(local_rows + fetched_rows, SPLIT)
    # Of each split: its part of the context, then its maximum, then its sum.
    partial = torch.empty(batch * heads * splits * (dim + 2), dtype=torch.float32, device=query.device)
    launch(
        _attend_split, (batch * heads, splits),
        (query.contiguous(), keys, values, empty, fetched_keys, fetched_values, counts, partial),
        (scale, local_rows, fetched_rows, kv_heads, splits),
        (heads // kv_heads, dim, next_power_of_2(dim), SPLIT, ROWS_A_TURN),
        WARPS,
    )  # fmt: skip
    return merge_splits(partial, query, splits)


def merge_splits(partial: Tensor, query: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Context, as `query` [B, Hq, d], and log-sum-exp [B, Hq] of splits that lie in `partial`.

    partial: float32, for each head and split the sum of exp(logit - maximum) * v [d]; then all their maxima; then the
    sums of exp(logit - maximum). A split without rows has -inf and 0.
    """
    batch, heads, dim = query.shape
    context = torch.empty((batch, heads, dim), dtype=query.dtype, device=query.device)
    log_sum = torch.empty((batch, heads), dtype=torch.float32, device=query.device)
    constants = (dim, next_power_of_2(dim), SPLITS_A_TURN)
    launch(_merge, (batch * heads, 1), (partial, context, log_sum), (splits,), constants, WARPS)
    return context, log_sum
