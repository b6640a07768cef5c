"""What a policy that evicts tokens for good decides: how many are kept, and how they are scored.

Pure tensor functions: no device, no stream, no cache. `attention/evicting.py` does the rest, alike for all of them: of
a sequence stay the first `sinks` tokens, the last `recent` ones, and of those between the `heavy` ones of highest
score (ties: lower position), after a prompt as after every decode step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from hybridgen.config import EvictionConfig
from hybridgen.errors import ConfigError
from hybridgen.selection.budget import best_first

SCORED_AT_ONCE = 1 << 24  # logits of a prompt (float32) that exist at a time


@dataclass(frozen=True)
class Budget:
    """Tokens of one sequence that stay between two decode steps."""

    sinks: int
    heavy: int
    recent: int

    @property
    def total(self) -> int:
        return self.sinks + self.heavy + self.recent


@dataclass(frozen=True)
class Prompt:
    """What the newest m of n rows of one sequence and layer look at.

    queries: [m, Hq, d]; keys: [Hkv, n, d], in order of position, the m newest rows last; positions: int64 [Hkv, n],
    true ones, which are the same in all heads for the newest m; tokens: of the sequence, those evicted among them.
    """

    queries: Tensor
    keys: Tensor
    positions: Tensor
    scale: float
    tokens: int

    def of_last(self, queries: int) -> Prompt:
        """The same with the last queries alone."""
        return replace(self, queries=self.queries[-queries:])


@dataclass(frozen=True)
class Step:
    """One decode step of a layer over its slots, the new token's among them.

    logits: float32 [B, Hkv, G, n], scaled, -inf where a slot is empty; probabilities: their softmax; positions: int64
    [B, Hkv, n], below 0 where empty; scores: float32 [B, Hkv, n], before this step; index: int64 [B], of the new token;
    steps: int64 [B], decode steps since the last prompt, before this one.
    """

    logits: Tensor
    probabilities: Tensor
    positions: Tensor
    scores: Tensor
    index: Tensor
    steps: Tensor


class EvictionPolicy(ABC):
    """One layer's. `check` comes first."""

    #: Whether tokens have scores; where not, `heavy` must be 0.
    has_scores: ClassVar[bool] = True
    #: Scores grow with every query; if not, each prompt judges afresh.
    accumulates: ClassVar[bool] = True
    #: Whether decode steps evict. If not, all that is new stays.
    evicts_in_decode: ClassVar[bool] = True
    #: Whether `recent` counts the new token that attends: its place is made before it comes.
    window_counts_new: ClassVar[bool] = False
    #: Whether positions may be those in the cache (`eviction.positions`), and a prefill windowed.
    reindexes: ClassVar[bool] = False
    #: float32 copies of a block of logits that `score_prompt` has at a time: for the memory plan.
    prompt_copies: ClassVar[int] = 3
    #: Whether a GPU scores a prompt without any (`prompt_scores_kernel.py`).
    prompt_kernel: ClassVar[bool] = False

    def __init__(self, config: EvictionConfig, layer: int, seed: int, gen: int) -> None:
        """layer, seed, gen (decode steps of a request): for policies that draw noise."""
        self.config = config

    @classmethod
    def check(cls, config: EvictionConfig) -> None:
        """ConfigError for settings that this policy has no use for."""
        if not cls.has_scores and config.heavy:
            raise ConfigError(
                f"eviction.heavy = {config.heavy!r} with eviction.policy = {config.policy!r}: it scores nothing "
                "(allowed: 0)"
            )
        for name, value, allowed in (("positions", config.positions, "auto or original"),
                                     ("prefill", config.prefill, "dense")):  # fmt: skip
            if not cls.reindexes and value in ("reindexed", "windowed"):
                raise ConfigError(
                    f"eviction.{name} = {value!r} with eviction.policy = {config.policy!r}: that is StreamingLLM's "
                    f"(allowed: {allowed})"
                )

    def budget(self, tokens: int) -> Budget:
        """Of a sequence with so many tokens at the end of a prompt. A share is rounded up, as that of --keep is."""
        recent = _count(self.config.recent, tokens) - self.window_counts_new
        return Budget(self.config.sinks, _count(self.config.heavy, tokens), recent)

    @abstractmethod
    def score_prompt(self, prompt: Prompt) -> Tensor | None:
        """What the prompt's queries give each key: float32 [Hkv, n], no less than 0; None without scores."""

    @abstractmethod
    def gain(self, step: Step) -> Tensor | None:
        """What a decode step adds to the scores: float32 [B, Hkv, n]; None if nothing."""


def _count(share: float | int, tokens: int) -> int:
    # As the decimal that was written.
    return share if isinstance(share, int) else math.ceil(Fraction(str(share)) * tokens)


def blocks_of_logits(prompt: Prompt) -> Iterator[tuple[slice, Tensor]]:
    """Block by block of queries: their rows among the n, and logits float32 [Hkv, G, block, keys up to the last row].

    -inf where a key comes after the query. A block has all keys of its queries, so its softmax is exact.
    """
    heads, rows, dim = prompt.keys.shape
    new, query_heads = prompt.queries.shape[:2]
    grouped = prompt.queries.view(new, heads, query_heads // heads, dim).permute(1, 2, 0, 3)
    at_once = max(1, SCORED_AT_ONCE // (query_heads * rows))
    row_numbers = torch.arange(rows, device=prompt.keys.device)
    for first in range(0, new, at_once):
        last = min(first + at_once, new)
        queries = slice(rows - new + first, rows - new + last)
        some = grouped[:, :, first:last].reshape(heads, -1, dim)
        logits = _product(some, prompt.keys[:, : queries.stop].transpose(1, 2)).mul_(prompt.scale)
        logits = logits.view(heads, -1, last - first, queries.stop)
        later = row_numbers[: queries.stop] > row_numbers[queries].unsqueeze(1)
        yield queries, logits.masked_fill_(later, -torch.inf)


def kept_rows(scores: Tensor, budget: Budget) -> Tensor:
    """Which of n rows, in order of position, stay: int64 [Hkv, k], ascending; scores float32 [Hkv, n], >= 0."""
    heads, rows = scores.shape
    if rows <= budget.total:
        return torch.arange(rows, device=scores.device).expand(heads, rows)
    first, last = budget.sinks, rows - budget.recent
    heavy = first + best_first(scores[:, first:last].contiguous().view(torch.int32), budget.heavy)
    ends = [torch.arange(*end, device=scores.device).expand(heads, -1) for end in ((0, first), (last, rows))]
    return torch.cat((ends[0], heavy.sort(dim=-1).values, ends[1]), dim=-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, [H, m, k] and [H, k, n]."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
