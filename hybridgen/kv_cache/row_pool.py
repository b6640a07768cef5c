"""InfiniGen's host pool (OSDI'24, arXiv 2406.19707, section 4.4; algorithms.md 6): how many host rows may be alive.

The capacity of a sequence is a share of the host rows that there are when a prompt has been taken in. Whenever rows
join the host tier and more than the capacity are alive then, as many of each KV head die: the scores of a dead row are
-inf, so it is chosen no more. As in the published system, which has this in its accuracy code alone, rows are masked
and their memory is not used again: this shows what a smaller pool would cost in quality, and saves no byte. Exact
layers that are resident have no pool, and the prompt of a further turn attends to dead rows, too.

Who dies: of the older half of the alive rows (rounded down) those of lowest rank, ties to the older one:
  counter: rank = how often the row was fetched;
  lru:     rank = the step at which it was fetched last, or else joined;
  fifo:    rank = its age alone.
Where more must go than the half has, all of it goes, and then half of those left is looked at, and so on. Rows join in
blocks of 64, so 64 are chosen at once, where the published code takes one for each token. At the end of a prompt none
has been fetched yet, so that a capacity below 1 takes the oldest, whatever the policy.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import AGEING_BLOCK
from hybridgen.types import TokenSelection

Shape = tuple[int, ...]

_ROW_RANGE = 1 << 32  # rows are numbered below this


def pool_parts(shape: Shape) -> list[tuple[Shape, torch.dtype]]:
    """What the pool of host keys [B, Hkv, N, d] takes on the device: dead rows, ranks, and a clock."""
    return [(shape[:3], torch.bool), (shape[:3], torch.int32), ((1,), torch.int32)]


def pool_rows(capacity: float, rows: int) -> int:
    """How many may be alive where a prompt has left so many host rows: the share as written, a block at least."""
    return max(AGEING_BLOCK, math.floor(Fraction(str(capacity)) * rows))


class RowPool:
    """Which host rows of one layer and micro-batch are alive."""

    def __init__(self, capacity: float, policy: str, dead: Tensor, rank: Tensor, clock: Tensor) -> None:
        """capacity: a share in (0, 1]; policy: counter, lru or fifo; the tensors: for `pool_parts`, zeroed."""
        self.dead, self._rank, self._clock = dead, rank, clock
        self._share, self._policy = capacity, policy
        # The same for all KV heads of a sequence, so the host knows them without asking the device.
        self.capacity = [AGEING_BLOCK] * dead.shape[0]
        self.alive = [0] * dead.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is read and written on the device; they lie in the same place for good."""
        return self.dead, self._rank, self._clock

    def prompted(self, sequence: int, rows: int) -> None:
        """A prompt has been taken in, with which the sequence has so many host rows."""
        self.capacity[sequence] = pool_rows(self._share, rows)

    def join(self, sequence: int, row: int, count: int) -> None:
        """Rows from `row` on, which are the youngest, are alive from now on; what is too much dies."""
        if self._policy == "lru":
            self._rank[sequence, :, row : row + count] = self._clock
        self.alive[sequence] += count
        while (surplus := self.alive[sequence] - self.capacity[sequence]) > 0:
            half = self.alive[sequence] // 2
            dying = min(half, surplus)
            self._kill(sequence, row + count, half, dying)
            self.alive[sequence] -= dying

    def mask(self, scores: Tensor) -> Tensor:
        """-inf for dead rows, in place: scores float32 [B, Hkv, G, n]."""
        return scores.masked_fill_(self.dead[:, :, None, : scores.shape[3]], -torch.inf)

    def fetched(self, chosen: TokenSelection) -> None:
        """A step fetches these rows, [B, Hkv, K]."""
        is_row = ~chosen.padding.squeeze(2)
        if self._policy == "counter":
            self._rank.scatter_add_(2, chosen.rows, is_row.to(torch.int32))
        elif self._policy == "lru":
            self._clock.add_(1)
            now = torch.where(is_row, self._clock, 0)  # padding points to row 0
            self._rank.scatter_reduce_(2, chosen.rows, now, "amax")

    def _kill(self, sequence: int, rows: int, half: int, count: int) -> None:
        """Of the first `rows` rows, `count` of the oldest `half` that are alive."""
        dead, rank = self.dead[sequence, :, :rows], self._rank[sequence, :, :rows]
        is_candidate = ((~dead).cumsum(1) <= half).logical_and_(~dead)
        row = torch.arange(rows, device=dead.device)
        order = (rank.to(torch.int64) * _ROW_RANGE).add_(row)
        order.masked_fill_(~is_candidate, torch.iinfo(torch.int64).max)
        dying = torch.topk(order, count, dim=1, largest=False, sorted=False).indices
        dead.scatter_(1, dying, True)
