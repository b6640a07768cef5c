"""A prefill that computes nothing: K and V of the prompt are drawn at random (`--synthetic-kv`).

A decode step with random weights takes as long over these as over keys and values that a prompt has made, and they are
there at the speed of the link: 27 GB in a second where the prefill takes two, and a prefill of 128k tokens much longer.
What is stored, quantised, sketched and evicted goes the way of every prefill (`Prefill.store`); outputs mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.engine.batch import MicroBatch
from hybridgen.engine.prefill import KVPlaces, Prefill, PrefillState
from hybridgen.models.base import DecoderModel
from hybridgen.offload.weights import LayerWeightStore

SYNTHETIC_KV_NOTE = "synthetic KV: drawn at random, no prompt was computed; prefill is the time it took to fill"


class SyntheticPrefill(Prefill):
    """In place of `Prefill`: K and V depend on nothing but seed, layer, sequence and length."""

    def __init__(self, model: DecoderModel, weights: LayerWeightStore, chunk: int, seed: int) -> None:
        super().__init__(model, weights, chunk)
        self._seed = seed
        self._draw = torch.Generator(model.device)

    def layer(self, layer: int, state: PrefillState, mirrors: list[MicroBatch], places: KVPlaces) -> None:
        """Random queries, keys and values of all prompts; what leaves the layer is what came in."""
        tuple(self._weights.wait(layer).values())  # they come in turn: each is waited for as it is looked up
        spec = self.model.spec.layers[layer]
        for prompt in (prompt for group in state.groups for prompt in group):
            new, member = prompt.end - prompt.start, state.micro_batch.members[prompt.sequences[0]]
            # As a generator takes it; a further turn has numbers of its own.
            self._draw.manual_seed(hash((self._seed, layer, member, prompt.past)) % (1 << 63))
            keys, values = self.place_of(layer, state, mirrors, places, prompt)
            self._normal(keys[:, -new:])
            self._normal(values[:, -new:])
            queries = self._normal(state.x.new_empty(new, spec.num_heads, spec.head_dim))
            self.store(layer, state, mirrors, places, prompt, queries, keys, values)
        for micro_batch in (state.micro_batch, *mirrors):
            if micro_batch.changes is not None:
                micro_batch.changes[layer].zero_()

    def _normal(self, out: Tensor) -> Tensor:
        """Standard normal numbers, drawn in place."""
        return out.normal_(generator=self._draw)
