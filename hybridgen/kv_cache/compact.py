"""K and V of the tokens that were not evicted: slots on the device, in which each KV head has tokens of its own.

A slot is empty, or holds one token of one KV head, with its position and score. One slot of each head is `free`: the
next token goes there, and the token that is evicted after that makes the next free one. All of it is done by the
device; the host knows how many slots are in use, as these are as many in all heads of a sequence. Until a head is full,
its tokens fill the slots from the first one on, in order of position; sinks stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import device_shape
from hybridgen.models.spec import LayerSpec

EMPTY = -1  # position of an empty slot


@dataclass(frozen=True)
class Held:
    """Tokens of one sequence, in order of position: keys, values [Hkv, n, d]; positions, scores [Hkv, n]."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor


class CompactKV:
    """State of one layer for the sequences of one micro-batch."""

    def __init__(self, spec: LayerSpec, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        self.held = [0] * batch  # tokens in each KV head
        self.seen = [0] * batch  # tokens of the sequence so far
        self.limits = [0] * batch  # the most that are held between two steps
        # Zeroed, as longer ones will be: a slot without a token is finite, and its weight of zero really is nothing.
        self.keys = torch.zeros(device_shape(spec, batch, 0), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.zeros(self.keys.shape[:3], dtype=torch.int64, device=device)
        self.scores = torch.zeros(self.keys.shape[:3], dtype=torch.float32, device=device)
        self.closed = torch.zeros((batch, 1, 0), dtype=torch.bool, device=device)  # slots beyond a sequence's limit
        self.free = torch.zeros((*self.keys.shape[:2], 1), dtype=torch.int64, device=device)
        self.recent = torch.zeros((batch, 1, 1), dtype=torch.int64, device=device)  # newest tokens, not to be evicted
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)  # since the last prompt

    @property
    def slots(self) -> int:
        """Of each KV head."""
        return self.positions.shape[2]

    def state(self) -> tuple[Tensor, ...]:
        """All that a decode step reads and changes on the device."""
        return (self.keys, self.values, self.positions, self.scores, self.closed, self.free, self.recent, self.steps)

    def fill(self, sequence: int, tokens: Held, seen: int, limit: int, recent: int) -> None:
        """These are the sequence's tokens now, of `seen`; `limit` may stay, the newest `recent` in any case."""
        self._reserve(limit + 1)
        count = tokens.positions.shape[1]
        self.store_rows(sequence, tokens)
        self.positions[sequence].fill_(EMPTY)
        self.positions[sequence, :, :count] = tokens.positions
        self.scores[sequence, :, :count] = tokens.scores
        self.closed[sequence].fill_(True)
        self.closed[sequence, :, : limit + 1].fill_(False)
        self.free[sequence].fill_(count)
        self.recent[sequence].fill_(recent)
        self.steps[sequence].fill_(0)
        self.held[sequence], self.seen[sequence], self.limits[sequence] = count, seen, limit

    def ordered(self, sequence: int) -> Held:
        """What is held of the sequence."""
        # No position is as large: empty slots come last.
        last = self.positions[sequence].masked_fill(self.positions[sequence] < 0, torch.iinfo(torch.int64).max)
        order = last.argsort(dim=-1)[:, : self.held[sequence]]
        keys, values = self.load_rows(sequence, order)
        return Held(keys, values, self.positions[sequence].gather(1, order), self.scores[sequence].gather(1, order))

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """The new token of each sequence, key, value [B, Hkv, d] at positions `index` [B], into its free slots."""
        write_rows(self.keys, self.values, self.free, key, value)
        self.positions.scatter_(2, self.free, index.view(-1, 1, 1).expand_as(self.free))
        self.scores.scatter_(2, self.free, 0.0)

    def evict(self, index: Tensor, sinks: int) -> None:
        """Make the next free slots: an empty one, or that of the lowest score (ties: the highest position).

        index: as in `write`. Sinks and the newest tokens, the new one among them, are not evicted.
        """
        may_go = (self.positions >= sinks) & (self.positions <= index.view(-1, 1, 1) - self.recent)
        rank = self.scores.masked_fill(~may_go, torch.inf)
        rank.masked_fill_((self.positions < 0) & ~self.closed, -torch.inf)
        is_lowest = rank == rank.amin(-1, keepdim=True)
        # Of several, argmax takes the first: empty slots are filled in order.
        self.free.copy_(self.positions.masked_fill(~is_lowest, EMPTY - 1).argmax(-1, keepdim=True))
        self.positions.scatter_(2, self.free, EMPTY)

    def grow(self) -> None:
        """The sequences have had the tokens that were written."""
        self.held = [min(held + 1, limit) for held, limit in zip(self.held, self.limits, strict=True)]
        self.seen = [seen + 1 for seen in self.seen]

    # Where rows lie

    def store_rows(self, sequence: int, tokens: Held) -> None:
        """K and V into the first slots."""
        count = tokens.positions.shape[1]
        self.keys[sequence, :, :count] = tokens.keys
        self.values[sequence, :, :count] = tokens.values

    def load_rows(self, sequence: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, n, d] of the slots int64 [Hkv, n]."""
        index = order.unsqueeze(-1).expand(-1, -1, self.keys.shape[3])
        return self.keys[sequence].gather(1, index), self.values[sequence].gather(1, index)

    def _reserve_rows(self, slots: int) -> None:
        self.keys, self.values = _longer(self.keys, slots), _longer(self.values, slots)

    def _reserve(self, slots: int) -> None:
        """At least so many slots; where they lie changes in a prefill only."""
        if slots <= self.slots:
            return

        before = self.slots
        self._reserve_rows(slots)
        self.positions, self.scores, self.closed = (
            _longer(old, slots) for old in (self.positions, self.scores, self.closed)
        )
        self.positions[:, :, before:].fill_(EMPTY)
        self.closed[:, :, before:].fill_(True)


def _longer(old: Tensor, slots: int) -> Tensor:
    """[B, Hkv, slots, ...], zero beyond the old ones."""
    new = old.new_zeros((*old.shape[:2], slots, *old.shape[3:]))
    new[:, :, : old.shape[2]] = old
    return new


def write_rows(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """key, value [B, Hkv, d] into keys, values [B, Hkv, n, d], each head's at its own slot, int64 [B, Hkv, 1]."""
    index = slots.unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
    keys.scatter_(2, index, key.unsqueeze(2))
    values.scatter_(2, index, value.unsqueeze(2))
