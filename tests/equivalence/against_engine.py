"""Runs the engine and the dense simulation side by side, with the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.llm import LLM
from hybridgen.engine.schedule import ReplaySchedule
from hybridgen.types import KeepRule, LayerPlan, StepPlan
from tests.equivalence.dense_simulation import DenseModel, Settings
from tests.equivalence.simulated_batch import Plans, SimulatedBatch
from tests.equivalence.zoo import ModelZoo

# Next-token logits, absolute. transformers' own float32 forward of these models is up to 6e-5 away from
# float64 (400 tokens; logits within +-15). The engine sums in another order, and its errors stay in the
# cache from step to step: five times that. A wrong token moves logits by more than 1e-2.
LOGITS_TOLERANCE = 3e-4

TRIAL_TOLERANCE = 1e-5  # of mass


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


def step_plans(plans: Plans, steps: int, modes: Sequence[LayerMode], probe: bool = False) -> list[StepPlan]:
    """The same in the engine's words. probe: it also measures the true mass of some layers, which changes nothing."""

    def layer_plan(step: int, layer: int, mode: LayerMode) -> LayerPlan:
        if mode == "resident":
            return LayerPlan("resident", None)
        plan = plans(step, layer)
        return LayerPlan(
            "post_qkt" if plan.scan_tokens is None else "pre_qkt",
            KeepRule(plan.keep, plan.keep_mass, plan.min_keep),
            plan.scan_tokens,
            probe_mass=probe and (step + layer) % 5 == 0,
            extra=plan.extra,
            trial_tokens=plan.trial_tokens,
        )

    return [StepPlan(tuple(layer_plan(step, *layer) for layer in enumerate(modes))) for step in range(steps)]


class SideBySide:
    """One batch in the engine, and the same batch simulated; every call compares the two."""

    def __init__(
        self,
        llm: LLM,
        model: DenseModel,
        settings: Settings,
        capacities: Sequence[int],
        seed: int,
        plans: Plans | None = None,
    ) -> None:
        """plans: other ones than the settings'; `llm` then is one that keeps what Pre-QKT needs."""
        self.llm = llm
        if plans is None:
            self.batch = llm.new_batch(list(capacities))
        else:
            # No sequence can be decoded more often than it has room for.
            steps = step_plans(plans, max(capacities), llm.modes, probe=settings.lookahead != "logits")
            self.batch = llm.new_batch(list(capacities), schedule=ReplaySchedule(steps, llm.modes))
        micro_batch = llm.config.runtime.micro_batch
        self.simulated = SimulatedBatch(model, settings, len(capacities), seed, plans, micro_batch)
        self.worst_difference = 0.0  # of logits
        self.trials = 0  # that were compared

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
            self._compare_trials(where)
            self._compare_logits(logits, where)

    def _compare_trials(self, where: str) -> None:
        for micro_batch in self.batch.micro_batches:
            for layer, attention in enumerate(micro_batch.layers):
                for row, member in enumerate(micro_batch.members):
                    record = self.simulated.steps[-1][member].layers[layer]
                    if not record.host_length:
                        continue
                    for kv_head, expected in enumerate(record.trials):
                        ours = [float(mass[row, kv_head]) for mass in attention.trial_masses]
                        assert len(ours) == len(expected), f"{where}: layer {layer}: {len(ours)} trials"
                        for mine, theirs in zip(ours, expected, strict=True):
                            known = not math.isnan(theirs)
                            assert not known or abs(mine - theirs) < TRIAL_TOLERANCE, f"{where}: layer {layer}: trials"
                            self.trials += known

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
    no choice is within rounding of a tie (`find_seeds.py`). `plans`: replayed by the engine instead of the settings'.
    """

    model: str
    settings: Settings
    turns: Turns
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    plans: Plans | None = None

    def run(self, zoo: ModelZoo) -> SideBySide:
        steps = sum(steps for _, steps in self.turns)
        capacities = [steps + sum(lengths) for lengths in zip(*(lengths for lengths, _ in self.turns), strict=True)]
        # A fixed schedule scans all of the host: the engine then keeps nothing of what Pre-QKT needs.
        overrides = self.overrides if self.plans is None else {"schedule__mode": "feedback", **self.overrides}
        with engine(zoo.directory(self.model), self.settings, **overrides) as llm:
            run = SideBySide(llm, zoo.dense(self.model), self.settings, capacities, self.seed, self.plans)
            for lengths, steps in self.turns:
                run.prefill(lengths)
                run.decode(steps)
        return run

    def is_clear(self, zoo: ModelZoo) -> bool:
        """Whether no choice of the simulation is within rounding of a tie."""
        return not any(simulated.unclear() for simulated in self.simulate(zoo))

    def simulate(self, zoo: ModelZoo) -> Iterator[SimulatedBatch]:
        """The simulation alone, after each of its steps."""
        micro_batch = self.overrides.get("runtime__micro_batch", 0)
        sequences = len(self.turns[0][0])
        model = zoo.dense(self.model)
        simulated = SimulatedBatch(model, self.settings, sequences, self.seed, self.plans, micro_batch)
        for lengths, steps in self.turns:
            simulated.prefill(simulated.prompts(lengths))
            for _ in range(steps):
                simulated.decode(simulated.draw())
                yield simulated
