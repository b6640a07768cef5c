"""How many host tokens are kept, and which: contracts.md, "What is kept". Every selector shares this."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    return min(host_length, _whole(max(rule.min_keep, cap(rule, host_length)), rule.multiple))


def _whole(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class KeepLimits:
    """A KeepRule in numbers, for one layer and step: one entry a sequence.

    scored: how many rows were scored, which are all there is to choose from. least, most: what the rule allows by
    the host's length, whatever was scored. With `mass` (below 1) the rule's own number is
    min(max(n, least), most), n the fewest scored rows, best first, that together with sinks and window hold it;
    without, it is `most`. K = min(scored, ceil(that number x extra_thousandths / 1000)). With `alpha`, what stands for
    `most` is known when the logits are: `most_by_alpha`, never more than `most`. alive: how many of the scored rows
    there are to choose from, where the logits of the others are -inf.
    """

    scored: list[int]
    least: list[int]
    most: list[int]
    mass: float | None = None
    extra_thousandths: int = 1000
    alpha: float | None = None
    alive: list[int] | None = None

    def kept(self, count: int, scored: int) -> int:
        """K, where the rule's own number is `count`."""
        return min(scored, -(-count * self.extra_thousandths // 1000))

    def on(self, device: torch.device) -> Tensor:
        """int64 [3 B, 1]: scored, least and most."""
        return per_sequence([*self.scored, *self.least, *self.most], device)

    @property
    def widest(self) -> int:
        """The largest K there can be."""
        return max((self.kept(*pair) for pair in zip(self.most, self.scored, strict=True)), default=0)


def keep_limits(
    rule: KeepRule,
    host_lengths: Sequence[int],
    scored: Sequence[int] | None = None,
    extra: float = 1.0,
    alive: list[int] | None = None,
) -> KeepLimits:
    """What `rule` means where the host tiers are this long.

    scored: None for all of it; extra: as in LayerPlan; alive: as in KeepLimits, with an `extra` of 1 alone.
    """
    most = [most_kept(rule, length) for length in host_lengths]
    # All of the mass needs all of the tokens, rounding or not.
    mass = rule.mass if rule.mass is not None and rule.mass < 1.0 else None
    least, thousandths = most, round(1000 * extra)
    if mass is not None or rule.alpha is not None:
        least = [min(length, rule.min_keep) for length in host_lengths]
    if rule.multiple > 1:  # of what is kept in the end
        more = [_whole(-(-count * thousandths // 1000), rule.multiple) for count in most]
        least = most = [min(*pair) for pair in zip(more, host_lengths, strict=True)]
        thousandths = 1000
    if alive is not None:
        assert thousandths == 1000
        least, most = ([min(*pair) for pair in zip(counts, alive, strict=True)] for counts in (least, most))
    lengths = list(host_lengths if scored is None else scored)
    return KeepLimits(lengths, least, most, mass, thousandths, rule.alpha, alive)


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


def most_by_alpha(limits: KeepLimits, local_logits: Tensor, host_logits: Tensor) -> Tensor:
    """InfiniGen's number of rows (OSDI'24, section 4.3): int64 [B, 1] for `choose`, on the device of the logits.

    Of a query head those host rows count whose logit is above the head's largest less alpha, the largest being that of
    sinks, window and host; as many are kept of every head as the mean over sequences and heads says, rounded down, but
    no more than `most`, and no fewer than `least`. (The published Llama code takes the largest of head 0 for all heads;
    here each has its own.) Where sequences differ in length the mean is one of shares: each keeps the part of its rows
    (that are alive) that counts of all such rows, so that an infinite alpha keeps them all. With equal lengths that is
    the same number.
    local_logits: [B, Hkv, G, local rows], -inf where there is no token; host_logits: [B, Hkv, G, N].
    """
    assert limits.alpha is not None
    host = mask_beyond(host_logits, limits.scored)
    largest = torch.maximum(host.amax(-1), local_logits.amax(-1))
    count = (host > (largest - limits.alpha).unsqueeze(-1)).sum()
    scored, least, most = limits.on(host.device).chunk(3)
    rows = scored if limits.alive is None else per_sequence(limits.alive, host.device)
    heads = host.shape[1] * host.shape[2]
    share = torch.div(count * rows, rows.sum().clamp(min=1) * heads, rounding_mode="floor")
    return torch.minimum(torch.maximum(share, least), most)


def choose(limits: KeepLimits, host_p: Tensor, local_p: Tensor, most: Tensor | None = None) -> TokenSelection:
    """Keep the rows of highest p; ties go to the lower row.

    host_p: float32 [B, Hkv, N] >= 0, of the scored rows; local_p: [B, Hkv] (see `group_probabilities`).
    most: int64 [B, 1] in place of `limits.most`, and no more than that. The selection's rows are places among the N.
    """
    device = host_p.device
    chosen = best_first(host_p.view(torch.int32), limits.widest)
    p = torch.gather(host_p, -1, chosen)

    is_known = limits.mass is None and most is None
    if most is None:
        most = per_sequence(limits.most, device)
    if limits.mass is None:
        counts = torch.zeros_like(local_p, dtype=torch.int64) + most
    else:
        before = p.cumsum(-1).sub_(p)  # what the better rows hold
        needed = (before < (limits.mass - local_p).unsqueeze(-1)).sum(-1)
        counts = torch.minimum(needed.clamp_(min=per_sequence(limits.least, device)), most)
    if limits.extra_thousandths != 1000:
        counts = (counts * limits.extra_thousandths + 999) // 1000
    counts = torch.minimum(counts, per_sequence(limits.scored, device))
    if not is_known and device.type == "cpu":  # no wait is needed to know what the fetch can leave out
        used = int(counts.max())
        chosen, p = chosen[..., :used], p[..., :used]

    padding = torch.arange(chosen.shape[-1], device=device) >= counts.unsqueeze(-1)
    mass = p.masked_fill(padding, 0.0).sum(-1) + local_p
    # Padding points to row 0, which always holds something finite.
    return TokenSelection(chosen.masked_fill(padding, 0), counts, padding.unsqueeze(2), limits.scored, mass)


def best_first(bits: Tensor, count: int) -> Tensor:
    """The `count` rows with the largest of int32 [..., N], ties to the lower row: int64 [..., count].

    A non-negative float orders like its bits.
    """
    rows = torch.arange(bits.shape[-1], device=bits.device)
    keys = torch.sub(bits.to(torch.int64).mul_(_ROW_RANGE), rows)  # the row number below the bits breaks ties
    return torch.remainder(-torch.topk(keys, count, dim=-1).values, _ROW_RANGE)


def per_sequence(values: list[int], device: torch.device) -> Tensor:
    """int64 [B, 1]. Host lengths change once in 64 steps: in between nothing is sent to the device."""
    return _cached_column(tuple(values), device)


@functools.lru_cache(maxsize=256)
def _cached_column(values: tuple[int, ...], device: torch.device) -> Tensor:
    column = torch.tensor(values).view(-1, 1)
    # From pinned memory, because a copy from pageable memory waits for the stream.
    return column.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else column


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


def keep_all(rows: Tensor, sizes: list[int], host_lengths: list[int]) -> TokenSelection:
    """The choice where all candidates are kept unscored: rows int64 [B, Hkv, n], of sequence b the first sizes[b].

    What they cover is unknown: mass is NaN.
    """
    shape, device = rows.shape[:2], rows.device
    counts = torch.zeros(shape, dtype=torch.int64, device=device) + per_sequence(sizes, device)
    padding = torch.arange(rows.shape[2], device=device) >= counts.unsqueeze(-1)
    return TokenSelection(rows, counts, padding.unsqueeze(2), host_lengths, torch.full(shape, torch.nan, device=device))
