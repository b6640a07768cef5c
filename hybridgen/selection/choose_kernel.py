# mypy: disable-error-code="no-untyped-def,untyped-decorator,attr-defined"
"""The choice on a GPU: a few Triton kernels for the dozens of launches of the torch twin in `budget.py`.

`_score`: logits of sinks and window, and those of the host, which cross the link here, once, by many programs: one
program alone would be slow to read a long row. Each leaves the maximum of its piece and the sum of exponentials below
it, and the host's logits on the device.
`_choose`: one program a sequence and KV head puts the pieces together to p, averaged over the heads of the KV head,
and finds the rows of highest p by bisection on the bits of p; no sort. A row that is short enough stays in registers
from the first look to the last; a longer one is read again from the L2 cache. Rows come out in ascending order.
Where the number of rows is given and they are many, `rank_kernel.py` does it in pieces, by more programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.budget import KeepLimits
from hybridgen.selection.host_logits import LINK_TOKENS, HostLogits
from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2
from hybridgen.selection.rank_kernel import BINS, LEVELS, choose_by_count, softmax_parts
from hybridgen.types import TokenSelection

SPLIT = 4096  # host rows of one program of `_score`, and rows of one look where they are not held
LOCAL_SPLIT = 64  # local rows of one program
LEAST_BLOCK = 1024  # few block sizes: each is a compilation, while the host tier grows
MOST_HELD = 32768  # rows that stay in registers
PIECE = 4096  # rows that are written at a time
STRIDE_UNIT = 32  # logits: 128 bytes
WARPS = 8
WARPS_HELD = 16  # of more than SPLIT rows: 64 numbers a thread at most
BITS = 30  # of a float from 0 to less than 2
COUNT_BITS = 21  # of a number of rows, three of which are counted in 64 bits
FEW_PROGRAMS = 32  # KV heads of all sequences: too few programs for a GPU


# Whatever number changes as the run goes on must not have a kernel compiled anew: none is specialised on.
@triton.jit(do_not_specialize=["host_units", "maxima_stride", "local_rows", "host_splits", "splits", "kv_heads"])
def _score(
    query, keys, empty, host, maxima, limits, scratch, tallies,
    scale, host_units, maxima_stride, local_rows, host_splits, splits, kv_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLIT: tl.constexpr, LOCAL_SPLIT: tl.constexpr,
    UNIT: tl.constexpr, HALF: tl.constexpr, LINK: tl.constexpr, TALLIES: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    sequence = kv_head // kv_heads
    logits = scratch + head.to(tl.int64) * host_splits * SPLIT
    if split < host_splits:
        # In blocks of rows that have a maximum, where there are such.
        block = tl.arange(0, SPLIT // LINK)
        row = split * SPLIT + block[:, None] * LINK + tl.arange(0, LINK)[None, :]
        scored = tl.load(limits + sequence).to(tl.int32)
        # The unit tells the compiler how the row is aligned; with it, eights of logits are read or left out as one.
        wanted = row < scored
        if UNIT % 8 == 0:
            wanted = row // 8 < (scored + 7) // 8
        x = tl.load(host + head.to(tl.int64) * host_units * UNIT + row, mask=wanted, other=-float("inf"))
        x = tl.where(row < scored, x, -float("inf"))
        if HALF:
            block += split * (SPLIT // LINK)
            above = tl.load(maxima + head * maxima_stride + block, mask=block * LINK < scored, other=0.0)
            x = x.to(tl.float32) + above[:, None]
        tl.store(logits + row, x)
        top = tl.max(tl.max(x, 1), 0)
        # Where there is no row, top is -inf, and the difference no number.
        total = tl.sum(tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - top)), 1), 0)
    else:
        local = (split - host_splits) * LOCAL_SPLIT + tl.arange(0, LOCAL_SPLIT)
        channel = tl.arange(0, DIM_PADDED)
        inside = channel < DIM
        there = local < local_rows
        there = there & (tl.load(empty + sequence * local_rows + local, mask=there, other=1) == 0)
        q = tl.load(query + head * DIM + channel, mask=inside, other=0.0).to(tl.float32)
        at = (kv_head.to(tl.int64) * local_rows + local)[:, None] * DIM + channel[None, :]
        k = tl.load(keys + at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        y = tl.where(there, tl.sum(k * q[None, :], 1) * scale, -float("inf"))
        top = tl.max(y, 0)
        total = tl.sum(tl.where(there, tl.exp(y - top), 0.0), 0)
    heads = tl.num_programs(0)
    # Behind the logits lies p, a row for each KV head; then come the maxima, then the sums.
    tops = scratch + (heads + heads // GROUP).to(tl.int64) * host_splits * SPLIT
    at_piece = head * splits + split
    tl.store(tops + at_piece, top)
    tl.store(tops + heads * splits + at_piece, total)
    if TALLIES > 0:  # zeros for who counts next, once a KV head
        tally = tl.arange(0, TALLIES)
        first = tally < tl.where(split + head % GROUP == 0, TALLIES, 0)
        tl.store(tallies + kv_head * TALLIES + tally, tl.zeros([TALLIES], tl.int32), mask=first)


@triton.jit
def _above(held, row, stride, bits, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Of the rows whose p has more than these bits: how many they are, and their p in all."""
    if HELD:
        higher = held.to(tl.int32, bitcast=True) > bits
        count = tl.sum(higher.to(tl.int32), 0)
        mass = tl.sum(tl.where(higher, held, 0.0), 0)
    else:
        count = 0
        mass = 0.0
        for start in range(0, stride, BLOCK):
            x = tl.load(row + start + tl.arange(0, BLOCK))
            higher = x.to(tl.int32, bitcast=True) > bits
            count += tl.sum(higher.to(tl.int32), 0)
            mass += tl.sum(tl.where(higher, x, 0.0), 0)
    return count, mass


@triton.jit
def _three_counts(held, row, stride, first, second, third, HELD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """How many rows have a p of at least these bits, each: the sums over a program's threads are what takes long."""
    if HELD:
        bits = held.to(tl.int32, bitcast=True)
        seen = (bits >= first).to(tl.int64) + ((bits >= second).to(tl.int64) << BITS)
        counts = tl.sum(seen + ((bits >= third).to(tl.int64) << (2 * BITS)), 0)
    else:
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, stride, BLOCK):
            bits = tl.load(row + start + tl.arange(0, BLOCK)).to(tl.int32, bitcast=True)
            sums += (bits >= first).to(tl.int64) + ((bits >= second).to(tl.int64) << BITS)
            sums += (bits >= third).to(tl.int64) << (2 * BITS)
        counts = tl.sum(sums, 0)
    MOST: tl.constexpr = (1 << BITS) - 1
    return (counts & MOST).to(tl.int32), ((counts >> BITS) & MOST).to(tl.int32), (counts >> (2 * BITS)).to(tl.int32)


@triton.jit(do_not_specialize=["extra_thousandths", "rows", "width", "host_splits", "splits", "sequences", "kv_heads"])
def _choose(
    scratch, limits, chosen, padding, covered,
    mass, extra_thousandths, rows, width, host_splits, splits, sequences, kv_heads,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, BY_MASS: tl.constexpr, HELD: tl.constexpr, BITS: tl.constexpr,
    COUNT_BITS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, BLOCK)
    stride = host_splits * SPLIT
    row = scratch + (programs * GROUP + program).to(tl.int64) * stride  # of p
    tops = scratch + (programs * GROUP + programs).to(tl.int64) * stride
    sums = tops + programs * GROUP * splits

    local = 0.0
    held = tl.zeros([BLOCK], tl.float32)  # p, where a block takes all rows
    for member in range(GROUP):
        head = program * GROUP + member
        top, total, local_sum = softmax_parts(tops + head * splits, sums + head * splits, host_splits, splits)
        weight = 1.0 / (total * GROUP)
        local += local_sum * weight
        logits = scratch + head.to(tl.int64) * stride
        # Up to the stride; beyond what was scored the logits are -inf, and p is 0.
        if HELD:
            x = tl.load(logits + index, mask=index < stride, other=-float("inf"))
            held += tl.exp(x - top) * weight
        else:
            for start in range(0, stride, BLOCK):
                here = start + index
                share = tl.exp(tl.load(logits + here) - top) * weight
                if member > 0:
                    share += tl.load(row + here)
                tl.store(row + here, share)
            tl.debug_barrier()  # other threads of the program read it
    if HELD:
        tl.store(row + index, held, mask=index < stride)
        tl.debug_barrier()

    sequence = program // kv_heads
    there_are = tl.load(limits + sequence)
    keep = tl.load(limits + 2 * sequences + sequence).to(tl.int32)
    # The largest threshold (as bits) above or at which enough rows lie: enough by count, or by mass.
    if BY_MASS:
        threshold = 0
        for step in range(BITS):
            candidate = threshold | (1 << (BITS - 1 - step))
            _, at_least = _above(held, row, stride, candidate - 1, HELD, BLOCK)
            threshold = tl.where(local + at_least >= mass, candidate, threshold)
        above, held_above = _above(held, row, stride, threshold, HELD, BLOCK)
        held_above += local
        # Of the rows at the threshold, as many as the mass still needs.
        value = threshold.to(tl.float32, bitcast=True)
        equal = tl.where(value > 0.0, tl.ceil((mass - held_above) / tl.maximum(value, 1e-45)), 0.0)
        needed = tl.where(held_above >= mass, 0, tl.minimum(above + equal, 2.0e9).to(tl.int32))
        # All that was scored may hold less than the mass, by rounding or for want of the rest: then all is needed.
        needed = tl.where(threshold == 0, keep, needed)
        keep = tl.minimum(tl.maximum(needed, tl.load(limits + sequences + sequence).to(tl.int32)), keep)
    # In 64 bits: a million rows times thousands pass 2^31.
    keep = tl.minimum((keep.to(tl.int64) * extra_thousandths + 999) // 1000, there_are).to(tl.int32)

    threshold = 0
    for step in range(BITS // 2):  # two bits at a time
        bit = 1 << (BITS - 2 - 2 * step)
        first, second, third = threshold + bit, threshold + 2 * bit, threshold + 3 * bit
        of_first, of_second, of_third = _three_counts(held, row, stride, first, second, third, HELD, BLOCK, COUNT_BITS)
        threshold = tl.where(of_first >= keep, first, threshold)
        threshold = tl.where(of_second >= keep, second, threshold)
        threshold = tl.where(of_third >= keep, third, threshold)
    above, _ = _above(held, row, stride, threshold, HELD, BLOCK)

    # Rows above the threshold, and the first of those at it, in ascending order: one scan counts both, 16 bits each.
    ties = keep - above
    ties_seen, above_seen = 0, 0
    mass_kept = tl.zeros([PIECE], tl.float32)
    for start in range(0, rows, PIECE):
        here = start + tl.arange(0, PIECE)
        x = tl.load(row + here, mask=here < stride, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        higher = bits > threshold
        tie = (bits == threshold) & (here < rows)
        ones = tl.where(tie, 65536, higher.to(tl.int32))
        seen = tl.cumsum(ones, 0)
        tie_order = ties_seen + (seen >> 16)
        kept = higher | (tie & (tie_order <= ties))
        place = above_seen + (seen & 65535) + tl.minimum(tie_order, ties) - 1
        tl.store(chosen + program.to(tl.int64) * width + place, here.to(tl.int64), mask=kept)
        mass_kept += tl.where(kept, x, 0.0)
        seen_here = tl.sum(ones, 0)
        ties_seen += seen_here >> 16
        above_seen += seen_here & 65535
    for start in range(0, width, PIECE):
        here = start + tl.arange(0, PIECE)
        outside = here >= keep
        at = program.to(tl.int64) * width + here
        tl.store(chosen + at, tl.zeros([PIECE], tl.int64), mask=outside & (here < width))
        tl.store(padding + at, outside, mask=here < width)
    # The counts lie behind the rows of all heads.
    tl.store(chosen + programs.to(tl.int64) * width + program, keep.to(tl.int64))
    tl.store(covered + program, local + tl.sum(mass_kept, 0))


def choose_rows(
    query: Tensor,
    keys: Tensor,
    empty: Tensor,
    logits: Tensor | HostLogits,
    limits: KeepLimits,
    scale: float,
    most: Tensor | None = None,
) -> tuple[TokenSelection, Tensor]:
    """`group_probabilities` and `choose` of budget.py; the rows come in ascending order. Second: p of the scored rows.

    query: [B, Hq, d]; keys: [B, Hkv, R, d], contiguous; empty: bool [B, 1, 1, R], slots without a token (not read).
    logits: [B, Hq, N], float32 or as they cross the link, with contiguous tokens and evenly spaced heads, of which the
    first limits.scored[b] are read, once: they may lie in host memory. most: int64 [B, 1] in place of `limits.most`, no
    more than that. p: float32 [B, Hkv, N], 0 beyond what was scored, not contiguous; the rows are places among the N.
    """
    batch, heads, dim = query.shape
    whole = logits if isinstance(logits, HostLogits) else HostLogits(logits)
    host_logits, in_half = whole.values, whole.maxima is not None
    maxima = host_logits if whole.maxima is None else whole.maxima
    kv_heads, local_rows, rows = keys.shape[1], keys.shape[2], host_logits.shape[2]
    device, programs, width = query.device, batch * kv_heads, limits.widest
    block = max(LEAST_BLOCK, next_power_of_2(rows))
    split = min(SPLIT, block)
    held = block <= MOST_HELD
    if not held:
        block = split
    host_splits = cdiv(rows, split)
    splits = host_splits + cdiv(local_rows, LOCAL_SPLIT)
    stride, unit = host_logits.stride(1), STRIDE_UNIT
    if stride % unit != 0:
        unit = 1
    assert batch == 1 or host_logits.stride(0) == heads * stride
    numbers = limits.on(device)
    if most is not None:
        numbers = torch.cat((numbers[: 2 * batch], most))
    # The rows of logits, those of p, then each piece's maximum and sum, in one piece of memory, as an allocation costs
    # the host about what a launch does. So with rows and counts of the result.
    padded = host_splits * split
    scratch = torch.empty(
        (batch * heads + programs) * padded + 2 * batch * heads * splits, dtype=torch.float32, device=device
    )
    chosen = torch.empty(programs * (width + 1), dtype=torch.int64, device=device)
    by_mass = limits.mass is not None
    in_pieces = not by_mass and host_splits > 1 and programs < FEW_PROGRAMS
    counts = torch.empty(programs * LEVELS * BINS if in_pieces else 1, dtype=torch.int32, device=device)
    launch(
        _score, (batch * heads, splits),
        (query.contiguous(), keys, empty, host_logits, maxima, numbers, scratch, counts),
        (scale, stride // unit, maxima.shape[2], local_rows, host_splits, splits, kv_heads),
        (
            heads // kv_heads, dim, next_power_of_2(dim), split, LOCAL_SPLIT, unit, in_half, LINK_TOKENS,
            LEVELS * BINS if in_pieces else 0,
        ),
        WARPS,
    )  # fmt: skip
    padding = torch.empty((batch, kv_heads, 1, width), dtype=torch.bool, device=device)
    covered = torch.empty((batch, kv_heads), dtype=torch.float32, device=device)
    result = chosen, padding, covered
    if in_pieces:
        shape = batch, kv_heads, heads // kv_heads
        choose_by_count(
            scratch, numbers, counts, result, limits.extra_thousandths, rows, (host_splits, splits), shape, split
        )
    else:
        launch(
            _choose, (programs, 1),
            (scratch, numbers, *result),
            (
                limits.mass if limits.mass is not None else 1.0, limits.extra_thousandths,
                rows, width, host_splits, splits, batch, kv_heads,
            ),
            (heads // kv_heads, split, by_mass, held, BITS, COUNT_BITS, block, min(block, PIECE)),
            WARPS_HELD if block > SPLIT else WARPS,
        )  # fmt: skip
    selection = TokenSelection(
        chosen.as_strided((batch, kv_heads, width), (kv_heads * width, width, 1)),
        chosen.as_strided((batch, kv_heads), (kv_heads, 1), programs * width),
        padding,
        limits.scored,
        covered,
    )
    p = scratch.as_strided((batch, kv_heads, rows), (kv_heads * padded, padded, 1), batch * heads * padded)
    return selection, p
