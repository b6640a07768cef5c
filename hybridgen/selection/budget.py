"""How many host tokens are kept, and which: contracts.md, "What is kept". Every selector shares this."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from hybridgen.types import KeepRule, TokenSelection

_ROW_RANGE = 1 << 32  # rows are numbered below this


def cap(rule: KeepRule, host_length: int) -> int:
    """C: ceil(F x host length) for a fraction, N for a count, no cap without `keep`."""
    if rule.keep is None:
        return host_length
    if isinstance(rule.keep, int):
        return rule.keep
    return _share(rule.keep, host_length)


@functools.lru_cache(maxsize=4096)
def _share(fraction: float, host_length: int) -> int:
    # As the decimal that was written: 0.07 x 6400 is 448, where floats would make it 449.
    return math.ceil(Fraction(str(fraction)) * host_length)


def most_kept(rule: KeepRule, host_length: int) -> int:
    """The largest K that the rule can give: what staging must hold."""
    return min(host_length, max(rule.min_keep, cap(rule, host_length)))


def mask_beyond(host_logits: Tensor, lengths: list[int]) -> Tensor:
    """-inf beyond each sequence's host length: host_logits [B, Hkv, G, N]."""
    longest = host_logits.shape[-1]
    if min(lengths) == longest:
        return host_logits
    valid = per_sequence(lengths, host_logits.device).view(-1, 1, 1, 1)
    return host_logits.masked_fill(torch.arange(longest, device=host_logits.device) >= valid, -torch.inf)


def group_probabilities(local_logits: Tensor, host_logits: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """p over sinks, window and host by the choosing query, averaged over the heads of each KV head.

    local_logits: [B, Hkv, G, local rows], -inf where there is no token.
    host_logits: [B, Hkv, G, N]; of sequence b the first lengths[b] are valid.
    Returns p of the host rows [B, Hkv, N] (0 beyond the length) and the sum of p over the local rows
    [B, Hkv], float32.
    """
    logits = torch.cat((local_logits, mask_beyond(host_logits, lengths)), dim=-1)
    p = torch.softmax(logits, dim=-1).mean(dim=2)
    local_rows = local_logits.shape[-1]
    return p[..., local_rows:].contiguous(), p[..., :local_rows].sum(-1)


def choose(rule: KeepRule, host_p: Tensor, local_p: Tensor, lengths: list[int]) -> TokenSelection:
    """Keep the rows of highest p; ties go to the lower position.

    host_p: float32 [B, Hkv, N] >= 0, local_p: [B, Hkv] (see `group_probabilities`).
    """
    most = [most_kept(rule, length) for length in lengths]
    rows = torch.arange(host_p.shape[-1], device=host_p.device)
    # A non-negative float orders like its bits; the row number below them breaks ties.
    keys = torch.sub(host_p.view(torch.int32).to(torch.int64).mul_(_ROW_RANGE), rows)
    best = torch.topk(keys, max(most), dim=-1).values
    chosen = torch.remainder(-best, _ROW_RANGE)
    p = torch.gather(host_p, -1, chosen)

    limit = per_sequence(most, host_p.device)
    if rule.mass is None or rule.mass >= 1.0:  # all of the mass needs all of the tokens, rounding or not
        counts = torch.zeros_like(local_p, dtype=torch.int64) + limit
    else:
        before = p.cumsum(-1).sub_(p)  # what the better rows hold
        needed = (before < (rule.mass - local_p).unsqueeze_(-1)).sum(-1)
        floor = per_sequence([min(n, rule.min_keep) for n in lengths], host_p.device)
        counts = torch.minimum(needed.clamp_(min=floor), limit)
        if host_p.device.type == "cpu":  # no wait is needed to know how many rows the fetch can leave out
            widest = int(counts.max())
            chosen, p = chosen[..., :widest], p[..., :widest]

    padding = rows[: chosen.shape[-1]] >= counts.unsqueeze(-1)
    mass = p.masked_fill(padding, 0.0).sum(-1) + local_p
    # Padding points to row 0, which always holds something finite.
    return TokenSelection(chosen.masked_fill(padding, 0), counts, padding.unsqueeze(2), lengths, mass)


def per_sequence(values: list[int], device: torch.device) -> Tensor:
    """int64 [B, 1]. Host lengths change once in 64 steps: in between nothing is sent to the device."""
    return _cached_column(tuple(values), device)


@functools.lru_cache(maxsize=256)
def _cached_column(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1)


def nothing_to_choose(batch: int, num_kv_heads: int, device: torch.device) -> TokenSelection:
    """The choice where no sequence has a host tier yet: sinks and window hold all there is."""
    shape = (batch, num_kv_heads)
    return TokenSelection(
        rows=torch.zeros((*shape, 0), dtype=torch.int64, device=device),
        counts=torch.zeros(shape, dtype=torch.int64, device=device),
        padding=torch.zeros((*shape, 1, 0), dtype=torch.bool, device=device),
        host_lengths=[0] * batch,
        mass=torch.ones(shape, device=device),
    )
