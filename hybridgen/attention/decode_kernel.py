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

SPLIT = 256  # rows of one program
ROWS_A_TURN = 32


@triton.jit
def _attend_split(
    query, keys, values, empty, fetched_keys, fetched_values, counts, partial, tops, sums,
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
    tl.store(partial + at * DIM + channel, context, mask=inside)
    tl.store(tops + at, top)
    tl.store(sums + at, total)


@triton.jit
def _merge(
    partial, tops, sums, context, log_sum, splits,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    channel, split = tl.arange(0, DIM_PADDED), tl.arange(0, SPLITS_PADDED)
    there = split < splits
    top = tl.load(tops + head * splits + split, mask=there, other=-float("inf"))
    highest = tl.max(top, 0)
    weight = tl.exp(top - highest)
    total = tl.sum(weight * tl.load(sums + head * splits + split, mask=there, other=0.0), 0)
    at = (head * splits + split)[:, None] * DIM + channel[None, :]
    piece = tl.load(partial + at, mask=there[:, None] & (channel < DIM)[None, :], other=0.0)
    tl.store(context + head * DIM + channel, tl.sum(piece * weight[:, None], 0) / total, mask=channel < DIM)
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
    """Context, float32 [B, Hq, d], and log-sum-exp, float32 [B, Hq].

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
    splits = triton.cdiv(local_rows + fetched_rows, SPLIT)
    partial = torch.empty((batch * heads, splits, dim), dtype=torch.float32, device=query.device)
    tops, sums = torch.empty((2, batch * heads, splits), dtype=torch.float32, device=query.device)
    context = torch.empty((batch, heads, dim), dtype=torch.float32, device=query.device)
    log_sum = torch.empty((batch, heads), dtype=torch.float32, device=query.device)
    padded = triton.next_power_of_2(dim)
    _attend_split[(batch * heads, splits)](
        query.contiguous(), keys, values, empty, fetched_keys, fetched_values, counts, partial, tops, sums,
        scale, local_rows, fetched_rows, kv_heads, splits,
        GROUP=heads // kv_heads, DIM=dim, DIM_PADDED=padded, SPLIT=SPLIT, TURN=ROWS_A_TURN, num_warps=4,
    )  # fmt: skip
    _merge[(batch * heads,)](
        partial, tops, sums, context, log_sum, splits,
        DIM=dim, DIM_PADDED=padded, SPLITS_PADDED=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return context, log_sum
