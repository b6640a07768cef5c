"""Prefill: prompts through the model layer by layer, exactly; K and V then move to where each strategy keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch, MicroBatch
from hybridgen.errors import ConfigError
from hybridgen.models.base import DecoderModel
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket
from hybridgen.offload.weights import LayerWeightStore
from hybridgen.types import Positions

LOGITS_AT_ONCE = 256  # rows of [rows, vocab] where many tokens are scored


class Prefill:
    """Drives a model over prompts. Holds no state of a request."""

    def __init__(self, model: DecoderModel, weights: LayerWeightStore, chunk: int) -> None:
        """chunk: tokens that pass a layer's products at a time."""
        self.model, self._weights, self._chunk = model, weights, chunk

    @torch.inference_mode()
    def run(
        self,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        mirrors: Sequence[Batch] = (),
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Append prompt tokens to every sequence, exactly: logits of each one's last token, float32 [B, vocab].

        Sequences of a micro-batch that hold the same tokens so far and get the same ones pass the model once.

        mirrors: batches of the same shape (another strategy's, say) that take over the same KV, so that
        several strategies continue from one prefill. progress: called with each finished layer.
        """
        states = self._through_layers(batch, prompts, mirrors, progress)
        return torch.cat([self.model.logits(state.x[state.last]) for state in states])

    @torch.inference_mode()
    def scored(
        self, batch: Batch, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """As `run`; of the tokens targets[b], which follow the last ones of prompts[b] one by one, end to end:

        their log-probabilities, float32 [n], and whether each is the likeliest, bool [n].
        """
        for index, (prompt, some) in enumerate(zip(prompts, targets, strict=True)):
            if len(some) > len(prompt):
                raise ValueError(f"targets[{index}]: {len(some)} tokens cannot follow those of {len(prompt)}")
        states = self._through_layers(batch, prompts, (), None)
        log_p, likeliest = [torch.empty(0, device=self.model.device)], []
        for state in states:
            rows = state.last_rows_of([len(targets[member]) for member in state.micro_batch.members])
            tokens = [token for member in state.micro_batch.members for token in targets[member]]
            wanted = torch.tensor(tokens, dtype=torch.int64, device=rows.device)
            for some, follows in zip(rows.split(LOGITS_AT_ONCE), wanted.split(LOGITS_AT_ONCE), strict=True):
                logits = self.model.logits(state.x[some])
                likeliest.append(logits.argmax(-1) == follows)
                log_p.append(torch.log_softmax(logits, dim=-1).gather(1, follows.unsqueeze(1)).squeeze(1))
        return torch.cat(log_p), torch.cat(likeliest)

    def _through_layers(
        self,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        mirrors: Sequence[Batch],
        progress: Callable[[int], None] | None,
    ) -> list[PrefillState]:
        """What `run` does, up to the last layer's output."""
        self._check_room([batch, *mirrors], prompts)
        if mirrors and not all(layer.prefills_densely for one in (batch, *mirrors) for layer in one.all_layers()):
            raise ConfigError(
                "eviction.prefill = 'windowed' beside other strategies that continue from the same prefill: what a "
                "prompt's tokens attend to differs (allowed: 'dense')"
            )
        states = [
            PrefillState(
                self.model, micro_batch, [prompts[member] for member in micro_batch.members], self._chunk
            )
            for micro_batch in batch.micro_batches
        ]
        places = KVPlaces(self.model, max(max(state.lengths) for state in states))
        maps = [one.prompt_maps for one in (batch, *mirrors) if one.prompt_maps is not None]
        fits = [fit for some in maps if (fit := some.fit([len(state.x) for state in states])) is not None]
        for layer in range(self.model.spec.num_layers):
            self._weights.issue(layer)
            for fit in fits:
                fit.before_layer(layer, self._weights.wait(layer), [state.x for state in states])
            for index, state in enumerate(states):
                same = [mirror.micro_batches[index] for mirror in mirrors]
                self.layer(layer, state, same, places)
            if progress is not None:
                progress(layer)
        places.wait()
        for index, state in enumerate(states):
            for micro_batch in (state.micro_batch, *(mirror.micro_batches[index] for mirror in mirrors)):
                micro_batch.grow(state.lengths, state.texts)
        return states

    def layer(
        self, layer: int, state: PrefillState, mirrors: list[MicroBatch], places: KVPlaces
    ) -> None:
        """All tokens of all sequences through one layer; K and V then move to where they are kept."""
        model, weights, chunk = self.model, self._weights.wait(layer), self._chunk
        before = state.x[state.last]
        for group in state.groups:
            start, end = group[0].start, group[-1].end
            together = None  # of several prompts: query, key and value of all
            if len(group) > 1:
                together = model.qkv(layer, weights, state.x[start:end], state.positions_of(slice(start, end)))
            contexts = []
            for prompt in group:
                rows = slice(prompt.start - start, prompt.end - start)
                projected = None if together is None else tuple(part[rows] for part in together)
                contexts.append(self._attend_prompt(layer, state, mirrors, places, prompt, projected))
            context, together = contexts[0] if len(group) == 1 else torch.cat(contexts), None
            for piece in _pieces(start, end, chunk):
                of_piece = context[piece.start - start : piece.stop - start]
                state.x[piece] = model.finish(layer, weights, state.x[piece], of_piece)
        for micro_batch in (state.micro_batch, *mirrors):
            if micro_batch.changes is not None:
                torch.sub(state.x[state.last], before, out=micro_batch.changes[layer])

    def _attend_prompt(
        self,
        layer: int,
        state: PrefillState,
        mirrors: list[MicroBatch],
        places: KVPlaces,
        prompt: PromptTokens,
        projected: tuple[Tensor, ...] | None,
    ) -> Tensor:
        """Attention of one prompt's tokens, [T, Hq * d]; K and V move to all sequences that the prompt goes to.

        projected: their query, key and value, where these have been computed already.
        """
        model, weights, spec = self.model, self._weights.wait(layer), self.model.spec.layers[layer]
        attention, chunk, start, end = state.micro_batch.layers[layer], self._chunk, prompt.start, prompt.end
        keys, values = self.place_of(layer, state, mirrors, places, prompt)
        past = keys.shape[1] - (end - start)
        if projected is not None:
            query, key, value = projected
            queries = query.contiguous()
            keys[:, past:], values[:, past:] = key.transpose(0, 1), value.transpose(0, 1)
        else:
            queries = state.x.new_empty(end - start, spec.num_heads, spec.head_dim)
            for piece in _pieces(start, end, chunk):
                query, key, value = model.qkv(layer, weights, state.x[piece], state.positions_of(piece))
                rows = slice(past + piece.start - start, past + piece.stop - start)
                keys[:, rows], values[:, rows] = key.transpose(0, 1), value.transpose(0, 1)
                queries[piece.start - start : piece.stop - start] = query
        context = attention.prompt_context(prompt.sequences[0], queries, keys, values, spec, chunk)
        self.store(layer, state, mirrors, places, prompt, queries, keys, values)
        return context

    def place_of(
        self, layer: int, state: PrefillState, mirrors: list[MicroBatch], places: KVPlaces, prompt: PromptTokens
    ) -> tuple[Tensor, Tensor]:
        """Room for keys, values [Hkv, n, d] of a prompt in one layer; those of the tokens before it are there."""
        attention = state.micro_batch.layers[layer]
        past = attention.past_rows(prompt.sequences[0], prompt.past)
        if mirrors and past != prompt.past:
            raise ValueError("mirrors of a batch that has evicted tokens: they would miss these")
        keys, values = places.next(self.model.spec.layers[layer], past + prompt.end - prompt.start)
        if past:
            attention.load_past(prompt.sequences[0], keys, values)
        return keys, values

    def store(
        self,
        layer: int,
        state: PrefillState,
        mirrors: list[MicroBatch],
        places: KVPlaces,
        prompt: PromptTokens,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Keys, values of `place_of`, filled, move to all sequences that the prompt goes to; queries: its own."""
        new = queries.shape[0]
        first_piece = keys.shape[1] - new + min(new, self._chunk)
        tickets: list[Ticket] = []
        for sequence in prompt.sequences:
            for micro_batch in (state.micro_batch, *mirrors):
                tickets += micro_batch.layers[layer].store(sequence, keys, values, queries, first_piece)
        places.leave(tickets)

    def _check_room(self, batches: Sequence[Batch], prompts: Sequence[Sequence[int]]) -> None:
        for batch in batches:
            if len(prompts) != len(batch.capacities):
                raise ValueError(f"prompts: {len(prompts)} given for {len(batch.capacities)} sequences")
            for index, (prompt, length, capacity) in enumerate(
                zip(prompts, batch.lengths, batch.capacities, strict=True)
            ):
                if not prompt:
                    raise ValueError(f"prompts[{index}] is empty")
                if length + len(prompt) > capacity:
                    raise ValueError(
                        f"prompts[{index}]: {length} + {len(prompt)} tokens exceed its capacity of {capacity}"
                    )


@dataclass(frozen=True)
class PromptTokens:
    """Tokens start to end of a micro-batch, which follow `past` others in each of `sequences`."""

    sequences: list[int]
    past: int
    start: int
    end: int


class PrefillState:
    """The prompt tokens of one micro-batch, laid end to end: no padding, whatever their lengths.

    What several sequences get after the same tokens is there once. Prompts that are short go through the layers in
    groups of up to `chunk` tokens.
    """

    def __init__(
        self, model: DecoderModel, micro_batch: MicroBatch, prompts: list[Sequence[int]], chunk: int
    ) -> None:
        self.micro_batch = micro_batch
        self.lengths = [past + len(prompt) for past, prompt in zip(micro_batch.lengths, prompts, strict=True)]
        numbers: dict[Hashable, int] = {}
        distinct: list[PromptTokens] = []
        tokens: list[int] = []
        for sequence, ids in enumerate(prompts):
            number = numbers.setdefault((self._held(sequence), tuple(ids)), len(distinct))
            if number == len(distinct):
                past, start = micro_batch.lengths[sequence], len(tokens)
                distinct.append(PromptTokens([], past, start, start + len(ids)))
                tokens += ids
            distinct[number].sequences.append(sequence)
        self.groups: list[list[PromptTokens]] = []
        for prompt in distinct:
            if not self.groups or prompt.end - self.groups[-1][0].start > chunk:
                self.groups.append([])
            self.groups[-1].append(prompt)
        self.texts = [0] * len(prompts)
        for number, prompt in enumerate(distinct):
            for sequence in prompt.sequences:
                self.texts[sequence] = number
        self._ends = [distinct[number].end for number in self.texts]
        self._model = model
        self.last = torch.tensor(self._ends).sub_(1).to(model.device)
        index = [torch.arange(prompt.past, prompt.past + prompt.end - prompt.start) for prompt in distinct]
        self._index = torch.cat(index).to(model.device)
        self.x = model.embed(torch.tensor(tokens, device=model.device), Positions(self._index))

    def positions_of(self, piece: slice) -> Positions:
        return self._model.positions(self._index[piece])

    def last_rows_of(self, counts: Sequence[int]) -> Tensor:
        """Rows of x: of each sequence the last counts[b], int64 [sum of counts] on the device."""
        rows = [torch.arange(end - count, end) for end, count in zip(self._ends, counts, strict=True)]
        return torch.cat(rows).to(self._model.device)

    def _held(self, sequence: int) -> Hashable:
        """Equal for sequences that hold the same. Where tokens are evicted, one may have kept others."""
        evicts = any(layer.kept_positions is not None for layer in self.micro_batch.layers)
        if evicts and self.micro_batch.lengths[sequence]:
            return "its own", sequence
        return self.micro_batch.texts[sequence]


def _pieces(start: int, end: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, end)) for first in range(start, end, chunk)]


class KVPlaces:
    """Two places for K and V of a sequence in one layer: while those of one leave, the next ones are made."""

    def __init__(self, model: DecoderModel, longest: int) -> None:
        elements = max(2 * spec.num_kv_heads * spec.head_dim for spec in model.spec.layers) * longest
        self._memory = [torch.empty(elements, dtype=model.dtype, device=model.device) for _ in range(2)]
        self._leaving: list[list[Ticket]] = [[], []]
        self._turn = 0

    def next(self, spec: LayerSpec, length: int) -> tuple[Tensor, Tensor]:
        """keys, values [Hkv, length, d], once what was there before has left."""
        self._turn = 1 - self._turn
        self._wait(self._turn)
        shape = (2, spec.num_kv_heads, length, spec.head_dim)
        keys, values = self._memory[self._turn][: math.prod(shape)].view(shape)
        return keys, values

    def leave(self, tickets: list[Ticket]) -> None:
        """These copies still read what `next` gave last."""
        self._leaving[self._turn] = tickets

    def wait(self) -> None:
        for turn in range(2):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        for ticket in self._leaving[turn]:
            ticket.wait_host()
        self._leaving[turn] = []
