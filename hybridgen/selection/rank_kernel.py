# mypy: disable-error-code="no-untyped-def,untyped-decorator,attr-defined"
"""The rows of highest p, so many of them, where a row is long: by many programs a KV head, in a few launches.

One program a KV head (`choose_kernel._choose`) leaves most of a GPU without work, above all where KV heads are few.
Here each takes a piece of the row. `_weigh` makes p of the logits; then p's bits are counted, eight at a time from the
top (a radix selection): how often each value of the first eight occurs says which value the last row that is kept has,
the next launch counts the next eight bits among the rows that have it, and so on. `_tally` counts what each piece
keeps, and `_collect` writes it behind what the pieces before keep: in ascending order, ties to the lower row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.launch_kernel import launch

LEVELS = 4  # of eight bits each
BINS = 256
WARPS = 8


@triton.jit
def softmax_parts(tops, sums, host_splits, splits):
    """Of one head's pieces: the maximum, the sum below it, and how much of that is local."""
    lane = tl.arange(0, 128)
    top = -float("inf")
    for start in range(0, splits, 128):
        piece = start + lane
        top = tl.maximum(top, tl.max(tl.load(tops + piece, mask=piece < splits, other=-float("inf")), 0))
    total = 0.0
    local = 0.0
    for start in range(0, splits, 128):
        piece = start + lane
        its_top = tl.load(tops + piece, mask=piece < splits, other=-float("inf"))
        share = tl.load(sums + piece, mask=piece < splits, other=0.0) * tl.exp(its_top - top)
        total += tl.sum(share, 0)
        local += tl.sum(tl.where(piece >= host_splits, share, 0.0), 0)
    return top, total, local


@triton.jit
def _kept(limits, program, sequences, kv_heads, extra_thousandths):
    """K of a program's rows, where no mass decides."""
    sequence = program // kv_heads
    keep = tl.load(limits + 2 * sequences + sequence)
    return tl.minimum((keep * extra_thousandths + 999) // 1000, tl.load(limits + sequence)).to(tl.int32)


@triton.jit
def _narrowed(counts, keep, LEVEL: tl.constexpr, BINS: tl.constexpr):
    """The first 8 * LEVEL bits of the last row that is kept, and how many of the rows that have them are."""
    bits, value = 0, tl.arange(0, BINS)
    for level in tl.static_range(LEVEL):
        count = tl.load(counts + level * BINS + value)
        at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        here = tl.max(tl.where(at_least >= keep, value, 0), 0)
        keep -= tl.sum(tl.where(value > here, count, 0), 0)
        bits = bits * BINS + here
    return bits, keep


@triton.jit
def _count(counts, bits, wanted, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr):
    """Add how often each value of the level's bits occurs among the wanted rows."""
    value = (bits >> (8 * (LEVELS - 1 - LEVEL))) & (BINS - 1)
    # The others are counted as zeros, and taken off again.
    found = tl.histogram(tl.where(wanted, value, 0), BINS)
    bins = tl.arange(0, BINS)
    found -= tl.where(bins == 0, tl.sum((~wanted).to(tl.int32), 0), 0)
    tl.atomic_add(counts + LEVEL * BINS + bins, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["host_splits", "splits"])
def _weigh(
    scratch, counts,
    host_splits, splits,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    stride = host_splits * SPLIT
    at = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    tops = scratch + (programs * GROUP + programs).to(tl.int64) * stride
    sums = tops + programs * GROUP * splits
    p = tl.zeros([SPLIT], tl.float32)
    for member in range(GROUP):
        head = program * GROUP + member
        top, total, _ = softmax_parts(tops + head * splits, sums + head * splits, host_splits, splits)
        p += tl.exp(tl.load(scratch + head.to(tl.int64) * stride + at) - top) * (1.0 / (total * GROUP))
    tl.store(scratch + (programs * GROUP + program).to(tl.int64) * stride + at, p)
    bits = p.to(tl.int32, bitcast=True)
    _count(counts + program * LEVELS * BINS, bits, bits >= 0, 0, LEVELS, BINS)


@triton.jit(do_not_specialize=["extra_thousandths", "host_splits", "sequences", "kv_heads"])
def _narrow(
    row, limits, counts,
    extra_thousandths, host_splits, sequences, kv_heads,
    SPLIT: tl.constexpr, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    counts += program * LEVELS * BINS
    first, _ = _narrowed(counts, _kept(limits, program, sequences, kv_heads, extra_thousandths), LEVEL, BINS)
    at = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    bits = tl.load(row + program.to(tl.int64) * host_splits * SPLIT + at).to(tl.int32, bitcast=True)
    _count(counts, bits, (bits >> (8 * (LEVELS - LEVEL))) == first, LEVEL, LEVELS, BINS)


@triton.jit(do_not_specialize=["extra_thousandths", "rows", "host_splits", "sequences", "kv_heads"])
def _tally(
    row, limits, counts, tallies, masses,
    extra_thousandths, rows, host_splits, sequences, kv_heads,
    SPLIT: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program, piece = tl.program_id(0), tl.program_id(1)
    keep = _kept(limits, program, sequences, kv_heads, extra_thousandths)
    threshold, _ = _narrowed(counts + program * LEVELS * BINS, keep, LEVELS, BINS)
    at = piece * SPLIT + tl.arange(0, SPLIT)
    p = tl.load(row + program.to(tl.int64) * host_splits * SPLIT + at)
    bits = p.to(tl.int32, bitcast=True)
    above = bits > threshold
    here = program * host_splits + piece
    tl.store(tallies + 2 * here, tl.sum(above.to(tl.int32), 0))
    tl.store(tallies + 2 * here + 1, tl.sum(((bits == threshold) & (at < rows)).to(tl.int32), 0))
    tl.store(masses + here, tl.sum(tl.where(above, p, 0.0), 0))


@triton.jit(do_not_specialize=["extra_thousandths", "rows", "width", "host_splits", "splits", "sequences", "kv_heads"])
def _collect(
    scratch, limits, counts, tallies, masses, chosen, padding, covered,
    extra_thousandths, rows, width, host_splits, splits, sequences, kv_heads,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program, programs, piece = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    keep = _kept(limits, program, sequences, kv_heads, extra_thousandths)
    threshold, ties = _narrowed(counts + program * LEVELS * BINS, keep, LEVELS, BINS)
    lane = tl.arange(0, 128)
    above_before, ties_before, mass = 0, 0, 0.0
    for start in range(0, host_splits, 128):
        other = start + lane
        its = program * host_splits + other
        above_before += tl.sum(tl.load(tallies + 2 * its, mask=other < piece, other=0), 0)
        ties_before += tl.sum(tl.load(tallies + 2 * its + 1, mask=other < piece, other=0), 0)
        mass += tl.sum(tl.load(masses + its, mask=other < host_splits, other=0.0), 0)

    stride = host_splits * SPLIT
    at = piece * SPLIT + tl.arange(0, SPLIT)
    bits = tl.load(scratch + (programs * GROUP + program).to(tl.int64) * stride + at).to(tl.int32, bitcast=True)
    higher = bits > threshold
    tie = (bits == threshold) & (at < rows)
    # One scan counts both, 16 bits each.
    seen = tl.cumsum(tl.where(tie, 65536, higher.to(tl.int32)), 0)
    tie_order = ties_before + (seen >> 16)
    kept = higher | (tie & (tie_order <= ties))
    place = above_before + (seen & 65535) + tl.minimum(tie_order, ties) - 1
    tl.store(chosen + program.to(tl.int64) * width + place, at.to(tl.int64), mask=kept)

    # What belongs to no piece is shared by them: padding, which points to row 0.
    for start in range(piece * SPLIT, width, host_splits * SPLIT):
        here = start + tl.arange(0, SPLIT)
        outside = here >= keep
        where = program.to(tl.int64) * width + here
        tl.store(chosen + where, tl.zeros([SPLIT], tl.int64), mask=outside & (here < width))
        tl.store(padding + where, outside, mask=here < width)
    if piece == 0:
        tops = scratch + (programs * GROUP + programs).to(tl.int64) * stride
        sums = tops + programs * GROUP * splits
        for member in range(GROUP):
            head = program * GROUP + member
            _, total, local = softmax_parts(tops + head * splits, sums + head * splits, host_splits, splits)
            mass += local / (total * GROUP)
        tl.store(covered + program, mass + ties * threshold.to(tl.float32, bitcast=True))
        # The counts lie behind the rows of all heads.
        tl.store(chosen + programs.to(tl.int64) * width + program, keep.to(tl.int64))


def choose_by_count(
    scratch: Tensor,
    limits: Tensor,
    counts: Tensor,
    result: tuple[Tensor, Tensor, Tensor],
    extra_thousandths: int,
    rows: int,
    splits: tuple[int, int],
    shape: tuple[int, int, int],
    split: int,
) -> None:
    """The best rows of each KV head into result: chosen, padding, covered as `choose_kernel.choose_rows` lays them out.

    scratch: what `choose_kernel._score` has left; limits: `KeepLimits.on`; counts: int32 [B * Hkv, LEVELS, BINS], zero;
    rows: of the host; splits: pieces of `split` host rows, and of all rows; shape: B, Hkv and the heads of a group.
    """
    batch, kv_heads, group = shape
    programs, (host_splits, all_splits) = batch * kv_heads, splits
    chosen, padding, covered = result
    width, grid = padding.shape[-1], (programs, host_splits)
    p = scratch[programs * group * host_splits * split :]
    tallies = torch.empty(2 * programs * host_splits, dtype=torch.int32, device=scratch.device)
    masses = torch.empty(programs * host_splits, dtype=torch.float32, device=scratch.device)
    launch(_weigh, grid, (scratch, counts), (host_splits, all_splits), (group, split, LEVELS, BINS), WARPS)
    for level in range(1, LEVELS):
        launch(
            _narrow, grid, (p, limits, counts),
            (extra_thousandths, host_splits, batch, kv_heads), (split, level, LEVELS, BINS), WARPS,
        )  # fmt: skip
    launch(
        _tally, grid, (p, limits, counts, tallies, masses),
        (extra_thousandths, rows, host_splits, batch, kv_heads), (split, LEVELS, BINS), WARPS,
    )  # fmt: skip
    launch(
        _collect, grid,
        (scratch, limits, counts, tallies, masses, chosen, padding, covered),
        (extra_thousandths, rows, width, host_splits, all_splits, batch, kv_heads),
        (group, split, LEVELS, BINS),
        WARPS,
    )  # fmt: skip
