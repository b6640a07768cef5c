"""Attention over what is left of a sequence: H2O, Keyformer, StreamingLLM, SnapKV (`selection/eviction`).

Tokens are evicted for good, of each KV head its own. A prefill attends to everything, then evicts. A decode step
attends to what is held and the new token, by one softmax; then the token of the lowest score makes room for the next.
All of it is done by the device and takes the same memory in every step.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from hybridgen.attention.base import (
    DecodePlace,
    LayerAttention,
    attention_logits,
    group_by_kv_head,
    weighted_sum,
)
from hybridgen.attention.reindexed import turned, windowed_attention
from hybridgen.kv_cache.compact import CompactKV, Held
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.selection.eviction import EvictionPolicy, Prompt, Step, kept_rows
from hybridgen.types import LayerPlan


class EvictingAttention(LayerAttention):
    """All that is kept lies on the device."""

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: CompactKV,
        policy: EvictionPolicy,
        transfer: TransferEngine,
        capacity: int,
        frequencies: Tensor | None = None,
    ) -> None:
        """capacity: tokens that a sequence may reach; frequencies: of RoPE, where positions are those in the cache."""
        self._layer, self._spec, self._kv, self._policy = layer, spec, kv, policy
        self._telemetry, self._capacity, self._frequencies = transfer.telemetry, capacity, frequencies
        self._sinks = policy.config.sinks
        self.prefills_densely = policy.config.prefill == "dense"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        kv = self._kv
        self.attended = [held + 1 for held in kv.held]

        def work() -> Tensor:
            kv.write(key, value, place.index)
            return self._attend_and_evict(query, place.index, kv.keys, kv.values)

        with self._telemetry.span("attention", self._layer):
            inputs = (query, key, value, place.index, *kv.state())
            context = self.pieces.run("attend", inputs, work, lasts=False)
        kv.grow()
        return context

    def structure(self, place: DecodePlace, plan: LayerPlan) -> Hashable | None:
        return self._kv.slots, self._kv.keys.data_ptr()

    def repeated(self) -> None:
        self.attended = [held + 1 for held in self._kv.held]
        self._kv.grow()

    def past_rows(self, sequence: int, length: int) -> int:
        return self._kv.held[sequence]

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        past = self._kv.ordered(sequence)
        rows = past.positions.shape[1]
        keys[:, :rows], values[:, :rows] = past.keys, past.values
        if self._frequencies is not None:
            # The queries to come stand nearer to the sinks by as many tokens as were evicted.
            sinks = min(self._sinks, rows)
            evicted = torch.full((sinks,), self._kv.seen[sequence] - rows, device=keys.device)
            keys[:, :sinks] = turned(past.keys[:, :sinks].transpose(0, 1), evicted, self._frequencies).transpose(0, 1)

    def prompt_context(
        self, sequence: int, queries: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec, piece: int
    ) -> Tensor:
        if self.prefills_densely:
            return super().prompt_context(sequence, queries, keys, values, spec, piece)
        tokens = self._kv.seen[sequence] + queries.shape[0]
        window = self._policy.budget(tokens).recent + self._policy.window_counts_new
        return windowed_attention(queries, keys, values, spec, self._sinks, window, self._frequencies)

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        kv, policy, new = self._kv, self._policy, queries.shape[0]
        before = kv.ordered(sequence)
        seen, held = kv.seen[sequence] + new, kv.held[sequence]
        fresh = torch.arange(seen - new, seen, device=keys.device).expand(keys.shape[0], new)
        positions = torch.cat((before.positions, fresh), dim=1)
        # Of what was given before the new rows, this layer holds its own part.
        keys, values = torch.cat((before.keys, keys[:, -new:]), 1), torch.cat((before.values, values[:, -new:]), 1)
        scores = policy.score_prompt(Prompt(queries, keys, positions, self._spec.scale, seen))
        if scores is None:
            scores = torch.zeros(positions.shape, dtype=torch.float32, device=keys.device)
        if policy.accumulates:
            scores[:, :held] += before.scores
        budget = policy.budget(seen)
        rows = kept_rows(scores, budget)
        index = rows.unsqueeze(-1).expand(-1, -1, keys.shape[2])
        kept = Held(keys.gather(1, index), values.gather(1, index), positions.gather(1, rows), scores.gather(1, rows))
        limit = min(budget.total, self._capacity)
        if not policy.evicts_in_decode:
            limit = rows.shape[1] + self._capacity - seen
        kv.fill(sequence, kept, seen, limit, budget.recent)
        return []

    @property
    def kept_positions(self) -> Tensor:
        return self._kv.positions

    def _attend_and_evict(self, query: Tensor, index: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Context [B, Hq * d] of query [B, Hq, d] over all slots; one of each KV head is free afterwards."""
        kv = self._kv
        grouped = group_by_kv_head(query, self._spec.num_kv_heads)
        empty = (kv.positions < 0).unsqueeze(2)
        logits = attention_logits(grouped, keys, empty, self._spec.scale)
        if self._frequencies is not None and self._sinks:
            evicted = index + 1 - (~empty[:, 0, 0]).sum(-1)
            nearer = group_by_kv_head(turned(query, -evicted, self._frequencies), self._spec.num_kv_heads)
            sinks = slice(0, self._sinks)  # these are their slots
            logits[..., sinks] = attention_logits(nearer, keys[:, :, sinks], empty[..., sinks], self._spec.scale)
        probabilities = torch.softmax(logits, dim=-1)
        gain = self._policy.gain(Step(logits, probabilities, kv.positions, kv.scores, index, kv.steps))
        if gain is not None:
            kv.scores += gain
        kv.steps += 1
        kv.evict(index, self._sinks)
        return weighted_sum(probabilities, values).to(query.dtype).flatten(1)
