"""Runs the engine and the dense simulation side by side, with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridgen.engine.llm import LLM
from tests.equivalence.dense_simulation import DenseModel, Settings
from tests.equivalence.simulated_batch import SimulatedBatch
from tests.equivalence.zoo import ModelZoo

# Next-token logits, absolute. transformers' own float32 forward of these models is up to 6e-5 away from
# float64 (400 tokens; logits within +-15). The engine sums in another order, and its errors stay in the
# cache from step to step: five times that. A wrong token moves logits by more than 1e-2.
LOGITS_TOLERANCE = 3e-4


def engine(directory: Path, settings: Settings, strategy: str = "hybridgen", **overrides: Any) -> LLM:
    """The engine on the CPU with these settings; `runtime__micro_batch=2` overrides runtime.micro_batch."""
    values = {
        "runtime.device": "cpu",
        "runtime.transfer": "lazy",
        "runtime.worker_threads": 1,
        "model.dtype": "float32",
        "cache.gpu_window": settings.window,
        "cache.sinks": settings.sinks,
        "selection.keep": settings.keep,
        "selection.keep_mass": settings.keep_mass,
        "selection.min_keep": settings.min_keep,
        "attention.lookahead": settings.lookahead,
        "model.exact_layers": list(settings.exact_layers),
        "model.exact_layers_mode": settings.exact_mode,
    }
    # Defaults are left to the engine, so that they are tested too.
    if settings.predictor != "x":
        values["attention.predictor"] = settings.predictor
    if settings.dropped != "share":
        values["attention.dropped"] = settings.dropped
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return LLM(model=str(directory), overrides=values, strategy=strategy)


class SideBySide:
    """One batch in the engine, and the same batch simulated; every call compares the two."""

    def __init__(self, llm: LLM, model: DenseModel, settings: Settings, capacities: Sequence[int], seed: int) -> None:
        self.llm = llm
        self.batch = llm.new_batch(list(capacities))
        self.simulated = SimulatedBatch(model, settings, len(capacities), seed)
        self.worst_difference = 0.0  # of logits

    def prefill(self, lengths: Sequence[int]) -> None:
        """A first prompt or a further turn of each sequence, of these lengths."""
        prompts = self.simulated.prompts(lengths)
        logits = self.llm.prefill(self.batch, prompts)
        self.simulated.prefill(prompts)
        self._compare_logits(logits, "prefill")

    def decode(self, steps: int) -> None:
        """Decode steps with tokens drawn from the simulation's own distribution."""
        for _ in range(steps):
            where = f"decode step {len(self.simulated.steps)}"
            tokens = self.simulated.draw()
            logits = self.llm.decode(self.batch, tokens)
            records = self.simulated.decode(tokens, follow=self.batch.selections())
            problems = [f"sequence {i}: {p}" for i, record in enumerate(records) for p in record.problems]
            assert not problems, f"{where}: " + "; ".join(problems[:4])
            unclear = self.simulated.unclear()
            assert not unclear, f"{where}: within rounding of a tie, find_seeds.py finds another seed: {unclear}"
            for layer, record in enumerate(records[0].layers):
                if record.tiered:
                    expected = [record.layers[layer].host_length for record in records]
                    assert self.batch.host_lengths(layer) == expected, f"{where}: layer {layer}"
            self._compare_logits(logits, where)

    def _compare_logits(self, ours: Tensor, where: str) -> None:
        theirs = self.simulated.logits
        assert ours.shape == theirs.shape and str(ours.dtype) == "torch.float32"
        difference = (ours.double() - theirs).abs().amax(1)
        self.worst_difference = max(self.worst_difference, float(difference.max()))
        assert (difference < LOGITS_TOLERANCE).all(), f"{where}: logits differ by {difference.tolist()}"
        assert self.batch.lengths == [sequence.length for sequence in self.simulated.sequences], where


Turns = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Case:
    """A batch that is compared: turns of prompt lengths and decode steps after them.

    `overrides`: settings of the engine beside those of contracts.md. `seed`: of prompts and tokens, such that
    no choice is within rounding of a tie (`find_seeds.py`).
    """

    model: str
    settings: Settings
    turns: Turns
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def run(self, zoo: ModelZoo) -> SideBySide:
        steps = sum(steps for _, steps in self.turns)
        capacities = [steps + sum(lengths) for lengths in zip(*(lengths for lengths, _ in self.turns), strict=True)]
        with engine(zoo.directory(self.model), self.settings, **self.overrides) as llm:
            run = SideBySide(llm, zoo.dense(self.model), self.settings, capacities, self.seed)
            for lengths, steps in self.turns:
                run.prefill(lengths)
                run.decode(steps)
        return run

    def is_clear(self, zoo: ModelZoo) -> bool:
        """Whether no choice of the simulation is within rounding of a tie."""
        simulated = SimulatedBatch(zoo.dense(self.model), self.settings, len(self.turns[0][0]), self.seed)
        for lengths, steps in self.turns:
            simulated.prefill(simulated.prompts(lengths))
            for _ in range(steps):
                simulated.decode(simulated.draw())
                if simulated.unclear():
                    return False
        return True
