"""Decode, layer by layer: the algorithm of the paper for every device, strategy and batch size (prompts: `prefill.py`).

While layer i runs, the CPU scores the host's keys for layer i + 1 by the query predicted from layer
i's input; the rows it finds are fetched beside the scan for layer i + 2 (HybridGen, arXiv 2604.18529, section 4).
With `attention.lookahead_layers` = 2 all of this begins a layer earlier: a layer's rows arrive while the layer before
it computes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch, MicroBatch
from hybridgen.models.base import DecoderModel
from hybridgen.models.layers import causal_attention
from hybridgen.offload.pieces import Pieces
from hybridgen.offload.weights import LayerWeightStore
from hybridgen.telemetry import Telemetry
from hybridgen.types import StepPlan


class Runner:
    """Drives a model over batches. Holds no state of a request."""

    def __init__(
        self,
        model: DecoderModel,
        weights: LayerWeightStore,
        telemetry: Telemetry,
        prefill_chunk: int,
        layers_ahead: int = 1,
    ) -> None:
        """layers_ahead: how many layers before its own a layer's query is predicted, or as many as there are."""
        self.model = model
        self._weights = weights
        self._telemetry = telemetry
        self._prefill_chunk = prefill_chunk
        self._layers_ahead = layers_ahead

    @torch.inference_mode()
    def warm_up(self, tokens: int) -> float:
        """Seconds that libraries take to load their kernels, as they do when these are first used; of no request.

        Two pieces of a prefill of up to `tokens` tokens and a decode step's row go through layer 0.
        """
        start, model, spec = time.perf_counter(), self.model, self.model.spec.layers[0]
        self._weights.issue(0)
        weights, piece = self._weights.wait(0), min(tokens, self._prefill_chunk)
        for past, rows in ((0, piece), (piece, piece), (0, 1)):
            x = torch.zeros(rows, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            query, key, _ = model.qkv(0, weights, x, model.positions(torch.arange(rows, device=model.device)))
            keys = key.new_zeros(spec.num_kv_heads, past + rows, spec.head_dim)
            x = model.finish(0, weights, x, causal_attention(query, keys, keys, spec, rows))
            model.logits(x[-1:])[0, 0].item()
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode_step(self, batch: Batch, tokens: Tensor) -> Tensor:
        """One more token of every sequence: ids [B] on the device -> next-token logits, float32 [B, vocab]."""
        self._check_step(batch, tokens)
        self._telemetry.enter_step()
        plan = batch.next_plan()
        # Weights that arrive in turn in one place are waited for as they are looked up: nothing for a piece.
        streamed = self._weights.pass_through
        states = [_DecodeState(self.model, micro_batch, tokens, streamed) for micro_batch in batch.micro_batches]

        def structure() -> Hashable | None:
            parts = [None if streamed else state.structure(plan) for state in states]
            return None if None in parts else tuple(parts)

        def host_part() -> None:
            for state in states:
                for attention in state.layers:
                    attention.repeated()

        xs = batch.whole_step.run(structure, lambda: self._decode_layers(states, plan), host_part)
        with self._telemetry.span("lm_head", 0):
            return torch.cat([self.model.logits(x) for x in xs])

    def _decode_layers(self, states: list[_DecodeState], plan: StepPlan) -> list[Tensor]:
        """What comes out of the last layer, for each micro-batch [B, hidden]."""
        # Where the host attends, each micro-batch is half a layer ahead of the others in turn, so that the host always
        # has one to attend to while the device is at work for another (MoE-Lightning, ASPLOS'25: CGOPipe).
        staggered = len(states) > 1 and any(attention.leaves_to_host for attention in states[0].layers)
        for state in states:
            state.x = state.embedded
        if staggered:
            self._weights.issue(0)
            for state in states:
                self._begin_layer(0, state, plan)
        for layer in range(self.model.spec.num_layers):
            self._weights.issue(layer)
            for state in states:
                if not staggered:
                    self._begin_layer(layer, state, plan)
                self._finish_layer(layer, state, plan)
                if staggered and layer + 1 < self.model.spec.num_layers:
                    self._begin_layer(layer + 1, state, plan)
        return [state.x for state in states]

    def _begin_layer(self, layer: int, state: _DecodeState, plan: StepPlan) -> None:
        """Up to where attention needs what the host and the link bring."""
        model, span, weights = self.model, self._telemetry.span, self._weights.wait(layer)
        attention, last = state.layers[layer], layer + self._layers_ahead
        following = range(layer + 1 if layer == 0 else last, min(last + 1, len(state.layers)))

        # The CPU first, then the link, then the device, which would else keep the other two waiting.
        for later in following:
            if state.layers[later].predicts:
                with span("predict", later):
                    predicted = self._predict(later, layer, state)
                state.layers[later].submit(predicted, plan.layers[later])
        if last - 1 < len(state.layers):
            state.layers[last - 1].choose()  # by the scan that began a layer ago; the next one runs beside this
        with span("qkv", layer):
            inputs = (state.x, *state.positions.tensors())
            project = partial(model.qkv, layer, weights, state.x, state.positions)
            state.projected = state.pieces.run(("qkv", layer), inputs, project, lasts=False)
        attention.begin(*state.projected, state.place, plan.layers[layer])

    def _finish_layer(self, layer: int, state: _DecodeState, plan: StepPlan) -> None:
        """Attention, and what comes after it."""
        model, span, weights = self.model, self._telemetry.span, self._weights.wait(layer)
        attention = state.layers[layer]
        context = attention.attend(*state.projected, state.place, plan.layers[layer])
        with span("mlp", layer):
            before = state.x
            finish = partial(model.finish, layer, weights, before, context)
            is_last = layer + 1 == len(state.layers)
            state.x = state.pieces.run(("mlp", layer), (before, context), finish, lasts=is_last)
            if state.changes is not None:
                torch.sub(state.x, before, out=state.changes[layer])
        attention.age()

    def _predict(self, layer: int, running: int, state: _DecodeState) -> Tensor:
        """The layer's query by what an earlier one, the running layer, is given."""
        x, changes, weights = state.x, state.changes, self._weights.wait(layer)

        def predict() -> Tensor:
            guess = x if changes is None else x + changes[running:layer].sum(0)
            return self.model.query(layer, weights, guess, state.positions, state.query_maps.get(layer))

        return state.pieces.run(("predict", layer), (x, *state.positions.tensors()), predict, lasts=False)

    def _check_step(self, batch: Batch, tokens: Tensor) -> None:
        """Before anything changes: a token for each sequence, and room for it."""
        if tokens.shape != (len(batch.capacities),):
            raise ValueError(f"tokens: shape {tuple(tokens.shape)}, must be ({len(batch.capacities)},): one a sequence")
        for index, (length, capacity) in enumerate(zip(batch.lengths, batch.capacities, strict=True)):
            if length >= capacity:
                raise ValueError(f"sequence {index} has reached its capacity of {capacity} tokens")


class _DecodeState:
    """One micro-batch on its way through the layers of a decode step."""

    def __init__(self, model: DecoderModel, micro_batch: MicroBatch, tokens: Tensor, streamed: bool) -> None:
        """streamed: whether weights come and go."""
        self.layers, self.changes, self.query_maps = micro_batch.layers, micro_batch.changes, micro_batch.query_maps
        self.pieces = Pieces() if streamed else micro_batch.pieces
        self.place = micro_batch.next_place()
        positions, members = model.positions(self.place.index), micro_batch.members
        self.embedded = micro_batch.pieces.hold("x", model.embed(tokens[members.start : members.stop], positions))
        self.x = self.embedded
        self.projected: tuple[Tensor, Tensor, Tensor] = (self.x, self.x, self.x)  # query, key, value of the layer begun
        self.positions = positions.held(micro_batch.pieces.hold)

    def structure(self, plan: StepPlan) -> Hashable | None:
        """Of all layers (`LayerAttention.structure`); None as soon as one has none."""
        parts: list[Hashable] = []
        for attention, layer_plan in zip(self.layers, plan.layers, strict=True):
            part = attention.structure(self.place, layer_plan)
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)
