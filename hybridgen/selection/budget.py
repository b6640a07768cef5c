"""How many host tokens are kept, and which: contracts.md, "What is kept". Every selector shares this."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from hybridgen.types import KeepRule, TokenSelection


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
    valid = torch.tensor(lengths, device=host_logits.device).view(-1, 1, 1, 1)
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
    device = host_p.device
    most = [most_kept(rule, length) for length in lengths]
    # A non-negative float orders like its bits; the row number below them breaks ties.
    rows = torch.arange(host_p.shape[-1], dtype=torch.int64, device=device)
    keys = (host_p.view(torch.int32).to(torch.int64) << 32) | (0xFFFFFFFF - rows)
    best = torch.topk(keys, max(most), dim=-1).values
    chosen = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    p = torch.gather(host_p, -1, chosen)
    covered = p.cumsum(-1)

    most_each = torch.tensor(most, device=device).view(-1, 1).expand(covered.shape[:2])
    counts = most_each
    if rule.mass is not None and rule.mass < 1.0:  # all of the mass needs all of the tokens, rounding or not
        needed = (local_p.unsqueeze(-1) + covered - p < rule.mass).sum(-1)
        floor = torch.tensor([min(n, rule.min_keep) for n in lengths], device=device).view(-1, 1)
        counts = torch.minimum(torch.maximum(needed, floor), most_each)
    if device.type == "cpu":  # no wait is needed to know how many rows the fetch can leave out
        widest = int(counts.max())
        chosen, covered = chosen[..., :widest], covered[..., :widest]
    # Padding points to row 0, which always holds something finite.
    kept = torch.arange(chosen.shape[-1], device=device) < counts.unsqueeze(-1)
    chosen = chosen.where(kept, 0)
    last = (counts - 1).clamp(min=0).unsqueeze(-1)
    kept_p = torch.gather(covered, -1, last).squeeze(-1) if covered.shape[-1] else torch.zeros_like(local_p)
    mass = local_p + torch.where(counts > 0, kept_p, 0.0)
    return TokenSelection(chosen, counts, ~kept.unsqueeze(2), lengths, mass)


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
