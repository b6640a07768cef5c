"""The sequences that are decoded together, and the state of each layer's attention for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hybridgen.attention.base import DecodePlace, LayerAttention
from hybridgen.engine.prompt_maps import PromptMaps
from hybridgen.engine.schedule import Schedule
from hybridgen.engine.whole_step import WholeStep
from hybridgen.kv_cache.layout import WindowLayout
from hybridgen.models.base import QueryMap
from hybridgen.offload.pieces import Pieces
from hybridgen.offload.transfer import TransferEngine
from hybridgen.types import StepPlan

MakeLayers = Callable[[int, int], list[LayerAttention]]
"""(sequences, capacity in tokens) -> the attention of every layer; `engine.build` knows how."""


class MicroBatch:
    """Sequences that pass each layer together."""

    def __init__(
        self,
        members: range,
        capacity: int,
        layout: WindowLayout,
        layers: list[LayerAttention],
        device: torch.device,
        pieces: Pieces,
    ) -> None:
        """members: which sequences of the batch these are; pieces: of what is not attention's."""
        self.members = members
        self.capacity = capacity
        self.layers = layers
        self.lengths = [0] * len(members)
        #: Sequences with the same number hold the same tokens; what a decode step feeds is not looked at.
        self.texts = [0] * len(members)
        self.device, self.pieces = device, pieces
        #: [layers, B, hidden]: what the last token's residual stream changed by in each layer (predictor `delta`).
        self.changes: Tensor | None = None
        #: What takes the place of Wq where these layers' queries are predicted.
        self.query_maps: Mapping[int, QueryMap] = {}
        self._layout = layout
        self._index = torch.zeros(len(members), dtype=torch.int64, device=device)

    def grow(self, lengths: Sequence[int], texts: Sequence[int]) -> None:
        """The sequences have these lengths now, and these numbers for what they hold (after a prefill)."""
        self.lengths, self.texts = list(lengths), list(texts)
        self._index.copy_(torch.tensor(self.lengths))

    def next_place(self) -> DecodePlace:
        """Where one more token of each sequence goes; their lengths grow by one."""
        index = self._index.clone()
        sinks, ring = self._layout.sinks, self._layout.ring
        slots = torch.where(index < sinks, index, sinks + (index - sinks) % ring)
        self._index += 1
        self.lengths = [length + 1 for length in self.lengths]
        self.texts = list(range(len(self.lengths)))
        longest, mask = max(self.lengths), None
        if min(self.lengths) < longest:
            rows = torch.arange(longest, device=index.device)
            mask = (rows <= index.unsqueeze(1)).view(len(self.members), 1, 1, longest)
        hold = self.pieces.hold
        return DecodePlace(hold("index", index), hold("slots", slots), self.lengths, mask)


class Batch:
    """A live batch: prompts may be appended to it, tokens decoded, in any order."""

    def __init__(
        self,
        capacities: Sequence[int],
        micro_batch: int,
        layout: WindowLayout,
        make_layers: MakeLayers,
        device: torch.device,
        schedule: Schedule,
        transfer: TransferEngine,
    ) -> None:
        """capacities: tokens that each sequence may reach; micro_batch: sequences of one, 0 for all."""
        if not capacities or min(capacities) < 1:
            raise ValueError(f"capacities: every sequence needs room for at least 1 token, got {list(capacities)}")
        size = micro_batch or len(capacities)
        self.capacities = list(capacities)
        self.sinks = layout.sinks
        self.schedule = schedule
        self.plans: list[StepPlan] = []  # of the decode steps so far
        #: The query maps of the micro-batches, where a prefill fits them (predictor `prompt`).
        self.prompt_maps: PromptMaps | None = None
        self.micro_batches: list[MicroBatch] = []
        for start in range(0, len(capacities), size):
            members = range(start, min(start + size, len(capacities)))
            capacity = max(capacities[member] for member in members)
            layers = make_layers(len(members), capacity)
            self.micro_batches.append(MicroBatch(members, capacity, layout, layers, device, transfer.pieces()))
        self.whole_step: WholeStep[list[Tensor]] = WholeStep(transfer.recorder, transfer.telemetry)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [length for micro_batch in self.micro_batches for length in micro_batch.lengths]

    def all_layers(self) -> list[LayerAttention]:
        """Of all micro-batches."""
        return [layer for micro_batch in self.micro_batches for layer in micro_batch.layers]

    def next_plan(self) -> StepPlan:
        """Plan one more decode step; its plan is remembered."""
        self.plans.append(self.schedule.plan(len(self.plans)))
        return self.plans[-1]

    def remember_changes(self, layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Make room for what the predictor `delta` needs of the previous token."""
        for micro_batch in self.micro_batches:
            shape = (layers, len(micro_batch.members), hidden_size)
            micro_batch.changes = torch.zeros(shape, dtype=dtype, device=micro_batch.device)

    def predict_by(self, maps: Mapping[int, QueryMap], fitted: PromptMaps | None = None) -> None:
        """Maps in place of Wq for predicted queries. fitted: whose they are, where a prefill fits them."""
        self.prompt_maps = fitted
        for micro_batch in self.micro_batches:
            micro_batch.query_maps = maps

    def host_lengths(self, layer: int) -> list[int]:
        """Rows of each sequence in the host tier of a layer, as its last scan saw them."""
        lengths: list[int] = []
        for micro_batch in self.micro_batches:
            lengths += micro_batch.layers[layer].host_lengths or [0] * len(micro_batch.members)
        return lengths

    def selections(self) -> dict[int, list[list[list[int]]]]:
        """Token positions that the last step chose from the host, best first.

        By layer (those with a host tier), sequence and KV head.
        """
        chosen: dict[int, list[list[list[int]]]] = {}
        for micro_batch in self.micro_batches:
            for layer, attention in enumerate(micro_batch.layers):
                if attention.host_lengths is not None:
                    chosen.setdefault(layer, []).extend(self._positions(attention, len(micro_batch.members)))
        return chosen

    def kept_positions(self) -> dict[int, list[list[list[int]]]]:
        """Positions of the tokens that are left, ascending, by layer (those that evict), sequence and KV head."""
        kept: dict[int, list[list[list[int]]]] = {}
        for micro_batch in self.micro_batches:
            for layer, attention in enumerate(micro_batch.layers):
                if attention.kept_positions is not None:
                    kept.setdefault(layer, []).extend(
                        [sorted(position for position in head if position >= 0) for head in sequence]
                        for sequence in attention.kept_positions.tolist()
                    )
        return kept

    def _positions(self, attention: LayerAttention, sequences: int) -> list[list[list[int]]]:
        selection = attention.selection
        if selection is None:  # no step yet
            return [[] for _ in range(sequences)]
        positions, counts = (selection.rows + self.sinks).tolist(), selection.counts.tolist()
        return [
            [rows[:count] for rows, count in zip(*per_sequence, strict=True)]
            for per_sequence in zip(positions, counts, strict=True)
        ]
