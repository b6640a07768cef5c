"""Pre-QKT: which host tokens of a layer are scored at all (contracts.md; paper section 4).

Half of the candidates are the most recent host rows, half are those of the others with most attention mass lately:
an exponential average, over the steps in which a row was scored, of its p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridgen.selection.budget import KeepLimits, best_first, keep_limits, per_sequence
from hybridgen.types import LayerPlan, TokenSelection

LATELY_WEIGHT = 0.25  # of a step in the average
_ALWAYS = 0x7F800000  # the bits of infinity: above those of any p


def candidate_sizes(plan: LayerPlan, host_lengths: Sequence[int]) -> list[int] | None:
    """How many rows of each sequence are scored; None: all of them, for every sequence.

    Never fewer than are surely kept.
    """
    if plan.mode != "pre_qkt" or plan.scan_tokens is None or plan.keep is None:
        return None
    wanted = plan.scan_tokens
    limits = keep_limits(plan.keep, host_lengths, extra=plan.extra)
    sizes = [
        min(length, max(wanted, limits.kept(least, length)))
        for length, least in zip(host_lengths, limits.least, strict=True)
    ]
    return None if sizes == list(host_lengths) else sizes


def all_are_kept(limits: KeepLimits) -> bool:
    """Whether there are no more candidates than places, so that nothing needs to be scored."""
    if limits.mass is not None or limits.alpha is not None:
        return False
    return all(limits.kept(most, scored) == scored for most, scored in zip(limits.most, limits.scored, strict=True))


class Candidates:
    """The candidates of one layer and micro-batch: a list that stays until there is reason for a new one."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        """shape: sequences, KV heads, host rows that there may be."""
        self._lately = torch.zeros(shape, dtype=torch.float32, device=device)
        self._list = torch.zeros(self._lately.numel(), dtype=torch.int32, device=device)
        self._named_for: tuple[list[int], list[int]] | None = None  # sizes and host lengths of the list
        #: int32 [B, Hkv, longest size]: ascending host rows of each KV head, then, as padding, row 0.
        self.rows = self._list[:0].view(*shape[:2], 0)

    def name(self, sizes: list[int], host_lengths: list[int]) -> bool:
        """Make `rows` a list of these sizes; false if it is one already.

        It is made anew, too, where the last choice was of a full scan.
        """
        if self._named_for == (sizes, host_lengths):
            return False
        self._named_for = (list(sizes), list(host_lengths))
        batch, heads, _ = self._lately.shape
        self.rows = self._list[: batch * heads * max(sizes)].view(batch, heads, max(sizes))
        self.rows.copy_(self.best(sizes, host_lengths))
        return True

    def best(self, sizes: list[int], host_lengths: list[int]) -> Tensor:
        """The rows that a list of these sizes would hold now: int64 [B, Hkv, longest size], padded with row 0."""
        longest, device = max(host_lengths), self._lately.device
        rows = torch.arange(longest, device=device)
        recent_from = [length - (size + 1) // 2 for size, length in zip(sizes, host_lengths, strict=True)]
        bits = self._lately[..., :longest].contiguous().view(torch.int32)
        bits = bits.masked_fill(rows >= per_sequence(recent_from, device).unsqueeze(1), _ALWAYS)
        bits = bits.masked_fill(rows >= per_sequence(host_lengths, device).unsqueeze(1), -1)
        chosen = best_first(bits, max(sizes))
        outside = torch.arange(max(sizes), device=device) >= per_sequence(sizes, device).unsqueeze(1)
        ascending = chosen.masked_fill(outside, longest).sort(dim=-1).values
        return ascending.masked_fill(outside, 0)

    def learn(self, p: Tensor, listed: bool, sizes: list[int]) -> None:
        """Take in p, float32 [B, Hkv, n], of a choice: of the first n rows, or of the listed ones."""
        if not listed:
            self._named_for = None
            self._lately[..., : p.shape[-1]].lerp_(p, LATELY_WEIGHT)
            return
        rows = self.rows.to(torch.int64)
        change = (p - self._lately.gather(-1, rows)) * LATELY_WEIGHT
        if min(sizes) < p.shape[-1]:  # padding repeats row 0
            padding = torch.arange(p.shape[-1], device=p.device) >= per_sequence(sizes, p.device).unsqueeze(1)
            change = change.masked_fill(padding, 0.0)
        self._lately.scatter_add_(-1, rows, change)


def trial_mass(candidates: Candidates, p: Tensor, chosen: TokenSelection, size: int, host_lengths: list[int]) -> Tensor:
    """What the best of `size` candidates would have covered, as many as were chosen of all rows: [B, Hkv].

    p: float32 [B, Hkv, N] of all host rows, of which `chosen` was chosen. Ask before `learn` is told of p.
    """
    sizes = [min(size, length) for length in host_lengths]
    local_p = chosen.mass - p.gather(-1, chosen.rows).masked_fill(chosen.padding.squeeze(2), 0.0).sum(-1)
    padding = torch.arange(max(sizes), device=p.device) >= per_sequence(sizes, p.device).unsqueeze(1)
    of_candidates = p.gather(-1, candidates.best(sizes, host_lengths)).masked_fill(padding, 0.0)
    held = of_candidates.sort(dim=-1, descending=True).values.cumsum(-1)
    last = (chosen.counts - 1).clamp(min=0, max=max(sizes) - 1).unsqueeze(-1)
    return held.gather(-1, last).squeeze(-1).masked_fill(chosen.counts == 0, 0.0) + local_p
