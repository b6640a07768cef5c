"""What the decode loop asks of a layer's attention, whatever executor does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.offload.transfer import Ticket
from hybridgen.types import LayerPlan, TokenSelection


@dataclass(frozen=True)
class DecodePlace:
    """Where this step's new tokens go; shared by all layers of a micro-batch.

    index: int64 [B], their positions. slots: int64 [B], their slots in a device window.
    lengths: tokens of each sequence, the new one included. resident_mask: bool [B, 1, 1, longest],
    true where a resident row holds a token, or None when all sequences are equally long.
    """

    index: Tensor
    slots: Tensor
    lengths: list[int]
    resident_mask: Tensor | None


class LayerAttention(ABC):
    """One layer's KV and decode attention, for the sequences of one micro-batch."""

    #: The loop hands in a predicted query (`submit`) one layer ahead.
    predicts: bool = False
    #: Rows of each sequence in the host tier as the last scan saw them; None without a host tier.
    host_lengths: list[int] | None = None
    #: What was chosen in the running step, for layers that choose.
    selection: TokenSelection | None = None
    #: float32 [B, Hkv]: the true mass covered, where the plan asked for a probe.
    probed_mass: Tensor | None = None

    def submit(self, query: Tensor, plan: LayerPlan) -> None:
        """Start scoring the host's keys by query [B, Hq, d]; only called where `predicts`."""
        raise NotImplementedError

    def choose(self) -> None:  # noqa: B027 - not abstract: most executors have nothing to choose
        """Choose from the scores of `submit` and start the fetch; nothing to do elsewhere."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        """Add the new token's key, value [B, Hkv, d]; context of query [B, Hq, d] as [B, Hq * d]."""

    def age(self) -> None:  # noqa: B027 - not abstract: without a host tier nothing ages
        """After attention: let the oldest window rows start for the host."""

    @abstractmethod
    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Copy a sequence's tokens so far, in order, into the first rows of keys, values [Hkv, n, d]."""

    @abstractmethod
    def store(self, sequence: int, keys: Tensor, values: Tensor) -> list[Ticket]:
        """Take over a prefilled sequence [Hkv, n, d]; the tickets of copies that still read it."""


def group_by_kv_head(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, d] -> [B, Hkv, G, d]: the query heads that share a KV head side by side."""
    batch, heads, dim = query.shape
    return query.view(batch, num_kv_heads, heads // num_kv_heads, dim)


def joint_attention(
    query: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor | None]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One softmax over several pieces of the cache: equal to attention over their concatenation.

    query: [B, Hkv, G, d]. Each part: keys [B, Hkv, n, d], values [B, Hkv, n, d] and a mask that adds
    to the logits, [B, 1 or Hkv, 1, n] float32 (0 or -inf), or None. Values under -inf must be finite.
    Returns the context [B, Hkv, G, d] in the query's dtype and the log-sum-exp [B, Hkv, G], float32.
    Logits and softmax are float32 for every dtype.
    """
    q = query.float()
    logits = []
    for keys, _, bias in parts:
        part = torch.matmul(q, keys.float().transpose(-1, -2)).mul_(scale)
        # A masked key may hold anything, so its logit is replaced, not added to.
        logits.append(part if bias is None else part.masked_fill_(bias == -torch.inf, -torch.inf))
    joined = torch.cat(logits, dim=-1)
    log_sum = torch.logsumexp(joined, dim=-1, keepdim=True)
    weights = torch.exp(joined - log_sum)
    context = torch.zeros_like(q)
    start = 0
    for keys, values, _ in parts:
        context += torch.matmul(weights[..., start : start + keys.shape[2]], values.float())
        start += keys.shape[2]
    return context.to(query.dtype), log_sum.squeeze(-1)
