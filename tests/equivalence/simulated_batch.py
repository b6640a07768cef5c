"""A batch of simulated sequences with seeded prompts, and next tokens drawn from the simulation itself.

Nothing here depends on the engine: prompts, tokens and choices of a seed are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.equivalence.dense_simulation import DenseModel, DenseSimulation, Plan, Scan, Seen, Settings, StepRecord
from tests.equivalence.tiny_models import random_tokens

Selections = Mapping[int, Sequence[Sequence[Sequence[int]]]]  # layer -> sequence -> KV head -> positions
Plans = Callable[[int, int], Plan]  # decode step, layer -> its plan, if the layer has a host tier


class SimulatedBatch:
    """One simulation for each sequence; what `follow` says is judged, see `DenseSimulation.decode`."""

    def __init__(
        self,
        model: DenseModel,
        settings: Settings,
        sequences: int,
        seed: int,
        plans: Plans | None = None,
        micro_batch: int = 0,
    ) -> None:
        """plans: None for what the settings say; micro_batch: sequences that are scanned together, 0 for all."""
        self.model, self.settings, self.seed = model, settings, seed
        self.plans, self.micro_batch = plans, micro_batch or sequences
        self.sequences = [DenseSimulation(model, settings) for _ in range(sequences)]
        self.texts: list[list[int]] = [[] for _ in range(sequences)]  # every token so far
        self.steps: list[list[StepRecord]] = []  # a step: one record a sequence
        self.logits = torch.empty(0)  # of the last call, [sequences, vocabulary]
        self._generator = torch.Generator().manual_seed(seed)

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        seeds = [1000 * self.seed + length + i for i, length in enumerate(lengths)]
        return [random_tokens(self.model.vocab_size, length, seed) for length, seed in zip(lengths, seeds, strict=True)]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        for text, prompt in zip(self.texts, prompts, strict=True):
            text.extend(prompt)
        logits = []
        for i, (sequence, prompt) in enumerate(zip(self.sequences, prompts, strict=True)):
            first = self.sequences[i - i % self.micro_batch]
            if sequence is not first and not sequence.length:
                sequence.keys_as = first.keys_as  # it decides for all that are stored together
            logits.append(sequence.prefill(prompt))
        self.logits = torch.stack(logits)
        return self.logits

    def draw(self) -> list[int]:
        """The next token of each sequence."""
        draws = torch.multinomial(self.logits.softmax(1), 1, generator=self._generator)
        return [int(token) for token in draws]

    def decode(
        self,
        tokens: Sequence[int],
        follow: Selections | None = None,
        seen: Sequence[Mapping[int, Seen]] | None = None,
    ) -> list[StepRecord]:
        """seen: of each sequence, by layer."""
        records = []
        layers = range(self.model.num_layers)
        # Before any of them has aged.
        scans = [[self.scan(i, layer) for layer in layers] for i in range(len(self.sequences))]
        for i, (sequence, token) in enumerate(zip(self.sequences, tokens, strict=True)):
            own = None if follow is None else {layer: chosen[i] for layer, chosen in follow.items()}
            records.append(sequence.decode(token, own, scans[i], None if seen is None else seen[i]))
            self.texts[i].append(token)
        self.steps.append(records)
        self.logits = torch.stack([record.logits for record in records])
        return records

    def scan(self, sequence: int, layer: int) -> Scan:
        """Of a layer in the coming step."""
        first = sequence - sequence % self.micro_batch
        together = self.sequences[first : first + self.micro_batch]
        plan = self.settings.plan if self.plans is None else self.plans(len(self.steps), layer)
        return Scan(plan, tuple(each.host_lengths[layer] for each in together))

    def unclear(self) -> list[str]:
        """Choices of the last step that are within rounding of another one."""
        return [reason for record in self.steps[-1] for reason in record.too_close()]

    def ageings(self) -> dict[int, int]:
        """How often each layer's host tier grew between decode steps, over all sequences."""
        counts: dict[int, int] = {}
        for before, after in pairwise(self.steps):
            for old, new in zip(before, after, strict=True):
                for layer, (a, b) in enumerate(zip(old.layers, new.layers, strict=True)):
                    counts[layer] = counts.get(layer, 0) + (b.host_length > a.host_length)
        return {layer: count for layer, count in counts.items() if count}

    def kept(self) -> list[int]:
        """Every number of host tokens that was kept by any KV head of any layer in any step."""
        layers = [layer for records in self.steps for record in records for layer in record.layers]
        return [len(choice.positions) for layer in layers for choice in layer.choices]
