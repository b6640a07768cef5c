# mypy: disable-error-code="no-untyped-def,untyped-decorator,attr-defined"
"""The choice on a GPU: two Triton kernels for the dozens of launches of the torch twin in `budget.py`.

`probabilities`: p of every scored row by the choosing query, averaged over the heads of a KV head.
`choose`: the rows of highest p, by bisection on the bits of p; no sort. Rows come out in ascending order.
One program a sequence and KV head; what they read lies in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.budget import KeepLimits, per_sequence
from hybridgen.types import TokenSelection

BLOCK = 4096
LEAST_BLOCK = 32
WARPS = 8
ALL_BITS = 31  # of a non-negative float


@triton.jit
def _probabilities(
    host, local, lengths, p, local_p, host_stride, rows, local_rows, kv_heads,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    length = tl.load(lengths + program // kv_heads)
    index = tl.arange(0, BLOCK)
    local_share = 0.0
    for member in range(GROUP):
        head = program * GROUP + member
        host_row, local_row = host + head.to(tl.int64) * host_stride, local + head * local_rows
        # Online softmax: a running maximum and the sum under it.
        top = -float("inf")
        for start in range(0, local_rows, BLOCK):
            x = tl.load(local_row + start + index, mask=start + index < local_rows, other=-float("inf"))
            top = tl.maximum(top, tl.max(x, 0))
        for start in range(0, length, BLOCK):
            x = tl.load(host_row + start + index, mask=start + index < length, other=-float("inf"))
            top = tl.maximum(top, tl.max(x, 0))
        local_sum = 0.0
        for start in range(0, local_rows, BLOCK):
            x = tl.load(local_row + start + index, mask=start + index < local_rows, other=-float("inf"))
            local_sum += tl.sum(tl.exp(x - top), 0)
        total = local_sum
        for start in range(0, length, BLOCK):
            x = tl.load(host_row + start + index, mask=start + index < length, other=-float("inf"))
            total += tl.sum(tl.exp(x - top), 0)
        local_share += local_sum / total / GROUP
        for start in range(0, rows, BLOCK):
            here = start + index
            x = tl.load(host_row + here, mask=here < length, other=-float("inf"))
            share = tl.exp(x - top) / total / GROUP
            target = p + program.to(tl.int64) * rows + here
            if member > 0:
                share += tl.load(target, mask=here < rows, other=0.0)
            tl.store(target, share, mask=here < rows)
    tl.store(local_p + program, local_share)


# The width and the extra change as the run goes on: neither may have the kernel compiled anew.
@triton.jit(do_not_specialize=["width", "extra_thousandths"])
def _choose(
    p, local_p, scored, least, most, chosen, counts, padding, covered, rows, width, kv_heads, mass, extra_thousandths,
    BY_MASS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = p + program.to(tl.int64) * rows
    index = tl.arange(0, BLOCK)
    local = tl.load(local_p + program)
    sequence = program // kv_heads
    there_are = tl.load(scored + sequence)
    keep = tl.load(most + sequence).to(tl.int32)

    # The largest threshold (as bits) above or at which enough rows lie: enough by count, or by mass.
    if BY_MASS:
        threshold = 0
        for step in range(BITS):
            candidate = threshold | (1 << (BITS - 1 - step))
            held = local
            for start in range(0, rows, BLOCK):
                x = tl.load(row + start + index, mask=start + index < rows, other=0.0)
                held += tl.sum(tl.where(x.to(tl.int32, bitcast=True) >= candidate, x, 0.0), 0)
            threshold = tl.where(held >= mass, candidate, threshold)
        above = 0
        held_above = local
        for start in range(0, rows, BLOCK):
            x = tl.load(row + start + index, mask=start + index < rows, other=0.0)
            higher = x.to(tl.int32, bitcast=True) > threshold
            above += tl.sum(higher.to(tl.int32), 0)
            held_above += tl.sum(tl.where(higher, x, 0.0), 0)
        # Of the rows at the threshold, as many as the mass still needs.
        value = threshold.to(tl.float32, bitcast=True)
        equal = tl.where(value > 0.0, tl.ceil((mass - held_above) / tl.maximum(value, 1e-45)), 0.0)
        needed = tl.where(held_above >= mass, 0, tl.minimum(above + equal, 2.0e9).to(tl.int32))
        # All that was scored may hold less than the mass, by rounding or for want of the rest: then all is needed.
        needed = tl.where(threshold == 0, keep, needed)
        keep = tl.minimum(tl.maximum(needed, tl.load(least + sequence).to(tl.int32)), keep)
    # In 64 bits: a million rows times thousands pass 2^31.
    keep = tl.minimum((keep.to(tl.int64) * extra_thousandths + 999) // 1000, there_are).to(tl.int32)

    threshold = 0
    for step in range(BITS):
        candidate = threshold | (1 << (BITS - 1 - step))
        enough = 0
        for start in range(0, rows, BLOCK):
            x = tl.load(row + start + index, mask=start + index < rows, other=0.0)
            enough += tl.sum((x.to(tl.int32, bitcast=True) >= candidate).to(tl.int32), 0)
        threshold = tl.where(enough >= keep, candidate, threshold)
    above = 0
    for start in range(0, rows, BLOCK):
        x = tl.load(row + start + index, mask=start + index < rows, other=0.0)
        above += tl.sum((x.to(tl.int32, bitcast=True) > threshold).to(tl.int32), 0)

    # Rows above the threshold, and the first of those at it, in ascending order.
    ties = keep - above
    ties_seen, written, held = 0, 0, local
    for start in range(0, rows, BLOCK):
        here = start + index
        x = tl.load(row + here, mask=here < rows, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        tie = (bits == threshold) & (here < rows)
        order = ties_seen + tl.cumsum(tie.to(tl.int32), 0)
        kept = ((bits > threshold) | (tie & (order <= ties))) & (here < rows)
        place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(chosen + program.to(tl.int64) * width + place, here.to(tl.int64), mask=kept)
        held += tl.sum(tl.where(kept, x, 0.0), 0)
        ties_seen += tl.sum(tie.to(tl.int32), 0)
        written += tl.sum(kept.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        here = start + index
        outside = here >= keep
        at = program.to(tl.int64) * width + here
        tl.store(chosen + at, tl.zeros([BLOCK], tl.int64), mask=outside & (here < width))
        tl.store(padding + at, outside, mask=here < width)
    tl.store(counts + program, keep.to(tl.int64))
    tl.store(covered + program, held)


def choose_rows(local_logits: Tensor, host_logits: Tensor, limits: KeepLimits) -> tuple[TokenSelection, Tensor]:
    """`group_probabilities` and `choose` of budget.py; the rows come in ascending order. Second: p of the scored rows.

    local_logits: float32 [B, Hkv, G, local rows], -inf where there is no token; host_logits: float32
    [B, Hkv, G, N] with contiguous tokens, in memory that is quick to read several times, of which the first
    limits.scored[b] are read. p: float32 [B, Hkv, N], 0 beyond what was scored; the rows are places among the N.
    """
    batch, kv_heads, group, rows = host_logits.shape
    device, programs, width = host_logits.device, batch * kv_heads, limits.widest
    p = torch.empty((batch, kv_heads, rows), dtype=torch.float32, device=device)
    local_p, covered = torch.empty((2, batch, kv_heads), dtype=torch.float32, device=device)
    chosen = torch.empty((batch, kv_heads, width), dtype=torch.int64, device=device)
    padding = torch.empty((batch, kv_heads, 1, width), dtype=torch.bool, device=device)
    scored = per_sequence(limits.scored, device)
    block = min(BLOCK, triton.next_power_of_2(max(rows, LEAST_BLOCK)))
    _probabilities[(programs,)](
        host_logits, local_logits.contiguous(), scored, p, local_p,
        host_logits.stride(2), rows, local_logits.shape[3], kv_heads,
        GROUP=group, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    if width == 0:
        none = torch.zeros((batch, kv_heads), dtype=torch.int64, device=device)
        return TokenSelection(chosen, none, padding, limits.scored, local_p), p
    counts = torch.empty((batch, kv_heads), dtype=torch.int64, device=device)
    by_mass = limits.mass is not None
    _choose[(programs,)](
        p, local_p, scored, per_sequence(limits.least, device), per_sequence(limits.most, device),
        chosen, counts, padding, covered, rows, width, kv_heads,
        limits.mass if by_mass else 1.0, limits.extra_thousandths,
        BY_MASS=by_mass, BITS=ALL_BITS, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return TokenSelection(chosen, counts, padding, limits.scored, covered), p
