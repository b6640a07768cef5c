"""What the decode loop asks of a layer's attention, whatever executor does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.kv_cache.device_sketch import product_to_float32
from hybridgen.models.layers import causal_attention
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.pieces import Pieces
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

    #: Who launches what this layer does in every step.
    pieces: Pieces = Pieces()
    #: The loop hands in a predicted query (`submit`) one layer ahead, or two.
    predicts: bool = False
    #: Rows of each sequence in the host tier as the last scan saw them; None where nothing is chosen from them.
    host_lengths: list[int] | None = None
    #: How the host keeps keys, where there is a host tier: a dtype, `int8`, `...+int2`.
    key_kind: str | None = None
    #: What was chosen in the running step, for layers that choose.
    selection: TokenSelection | None = None
    #: Host rows of each sequence that were scored in the running step (of each KV head).
    scored: Sequence[int] = ()
    #: float32 [B, Hkv]: the true mass covered, where the plan asked for a probe.
    probed_mass: Tensor | None = None
    #: float32 [B, Hkv] each: what the plan's `trial_tokens` would have covered, where it was fully scanned.
    trial_masses: Sequence[Tensor] = ()
    #: Whether a prompt's tokens attend to all before them, so that other strategies can take over their K and V.
    prefills_densely: bool = True
    #: Tokens of each sequence that the running step attended to, each KV head; None but where some are evicted.
    attended: list[int] | None = None

    def submit(self, query: Tensor, plan: LayerPlan) -> None:
        """Start scoring the host's keys by query [B, Hq, d]; only called where `predicts`."""
        raise NotImplementedError

    def choose(self) -> None:  # noqa: B027 - not abstract: most executors have nothing to choose
        """Choose from the scores of `submit` and start the fetch; nothing to do elsewhere."""

    #: The host works between `begin` and `attend`, so other micro-batches' layers had better run meanwhile.
    leaves_to_host: bool = False

    def begin(  # noqa: B027 - not abstract: most executors leave nothing to the host
        self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan
    ) -> None:
        """What can start before `attend`, which gets the same arguments; called just before it, or a while."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        """Add the new token's key, value [B, Hkv, d]; context of query [B, Hq, d] as [B, Hq * d]."""

    def structure(self, place: DecodePlace, plan: LayerPlan) -> Hashable | None:
        """What the device's part of the coming step depends on, beside tensors that lie where they lay.

        None: the host has a part in it, beside `repeated`, or tensors lie elsewhere each time.
        """
        return None

    def repeated(self) -> None:
        """The device has been given the step of the same structure once more: what it does to the host's state."""
        raise NotImplementedError

    def age(self) -> None:  # noqa: B027 - not abstract: without a host tier nothing ages
        """After attention: let the oldest window rows start for the host."""

    @property
    def kept_positions(self) -> Tensor | None:
        """Positions of the tokens that are left, int64 [B, Hkv, n], in no order, below 0 for none; None: all are."""
        return None

    def tiers(self, lengths: Sequence[int]) -> tuple[int, int, int] | None:
        """Tokens of sequences of these lengths on the device, in host memory and on disk; None: not all are kept."""
        return None

    def past_rows(self, sequence: int, length: int) -> int:
        """Rows that `load_past` gives of a sequence of `length` tokens."""
        return length

    @abstractmethod
    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Copy a sequence's tokens so far, in order, into the first rows of keys, values [Hkv, n, d]."""

    def prompt_context(
        self, sequence: int, queries: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec, piece: int
    ) -> Tensor:
        """Attention of a sequence's new tokens; arguments and result as of `causal_attention`."""
        return causal_attention(queries, keys, values, spec, piece)

    @abstractmethod
    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        """Take over a prefilled sequence [Hkv, n, d]; the tickets of copies that still read it.

        queries: [m, Hq, d], of the m last tokens, which are new; first_piece: tokens that the first prefill piece had.
        """


def group_by_kv_head(query: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, d] -> [B, Hkv, G, d]: the query heads that share a KV head side by side."""
    batch, heads, dim = query.shape
    return query.view(batch, num_kv_heads, heads // num_kv_heads, dim)


def attention_logits(query: Tensor, keys: Tensor, invalid: Tensor | None, scale: float) -> Tensor:
    """scale * q . k in float32, -inf where `invalid`: query [B, Hkv, G, d], keys [B, Hkv, n, d] -> [B, Hkv, G, n].

    invalid: bool, broadcast against [B, Hkv, 1, n]. What an invalid key holds does not matter.
    """
    logits = product_to_float32(query, keys.transpose(-1, -2)).mul_(scale)
    return logits if invalid is None else logits.masked_fill_(invalid, -torch.inf)


def joint_attention(logits: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over several pieces of the cache: equal to attention over their concatenation.

    logits: pieces of [B, Hkv, G, n], float32; values: pieces of [B, Hkv, n, d], finite even where the
    logit is -inf. Softmax and sums are float32; on a GPU the weights are rounded to the values' dtype, as
    flash attention does. Returns [B, Hkv, G, d], float32.
    """
    weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1).split([v.shape[2] for v in values], dim=-1)
    context = weighted_sum(weights[0], values[0])
    for weight, value in zip(weights[1:], values[1:], strict=True):
        context += weighted_sum(weight, value)
    return context


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Weights, float32 [B, Hkv, G, n], of values [B, Hkv, n, d]: float32 [B, Hkv, G, d]."""
    return product_to_float32(weights.to(values.dtype) if values.is_cuda else weights, values)
