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
from tests.equivalence.dense_keys import BLOCK, Encoded, KeyStorage
from tests.equivalence.dense_simulation import DenseModel, Seen, Settings
from tests.equivalence.simulated_batch import Plans, SimulatedBatch
from tests.equivalence.zoo import ModelZoo

# Next-token logits, absolute. transformers' own float32 forward of these models is up to 6e-5 away from
# float64 (400 tokens; logits within +-15). The engine sums in another order, and its errors stay in the
# cache from step to step: five times that. A wrong token moves logits by more than 1e-2.
LOGITS_TOLERANCE = 3e-4

TRIAL_TOLERANCE = 1e-5  # of mass
PROBE_TOLERANCE = 2e-5


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
        "attention.lookahead_layers": settings.lookahead_layers,
        "model.exact_layers": list(settings.exact_layers),
        "model.exact_layers_mode": settings.exact_mode,
    }
    # Defaults are left to the engine, so that they are tested too.
    if settings.predictor not in ("x", "fitted"):  # `fitted` comes with its file, in overrides
        values["attention.predictor"] = settings.predictor
    if settings.dropped != "share":
        values["attention.dropped"] = settings.dropped
    if settings.key_type != "fp32":
        values["cache.key_type"] = settings.key_type
    if settings.sketch != "none":
        values["cache.sketch"] = settings.sketch
        values["cache.sketch_home"] = settings.sketch_home
    if settings.prefill_chunk != Settings.prefill_chunk:
        values["runtime.prefill_chunk"] = settings.prefill_chunk
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
        self.trials = self.probes = 0  # that were compared
        self.kinds: list[list[str | None]] = []  # of a micro-batch and layer: how its host keeps keys
        self._quantised = not settings.keys_as.plain
        self._queries: dict[tuple[int, int], Tensor] = {}  # micro-batch, layer -> what chooses in the running step
        for index, some in enumerate(self.batch.micro_batches if self._quantised else []):
            for layer, attention in enumerate(some.layers):
                self._listen(attention, (index, layer))

    def prefill(self, lengths: Sequence[int]) -> None:
        """A first prompt or a further turn of each sequence, of these lengths."""
        prompts = self.simulated.prompts(lengths)
        logits = self.llm.prefill(self.batch, prompts)
        self._follow_keys("prefill")  # those before it: they are its past
        self.simulated.prefill(prompts)
        self._compare_kinds()
        self._compare_logits(logits, "prefill")

    def decode(self, steps: int) -> None:
        """Decode steps with tokens drawn from the simulation's own distribution."""
        for _ in range(steps):
            where = f"decode step {len(self.simulated.steps)}"
            tokens = self.simulated.draw()
            logits = self.llm.decode(self.batch, tokens)
            self._follow_keys(where)
            records = self.simulated.decode(tokens, follow=self.batch.selections(), seen=self._seen())
            problems = [f"sequence {i}: {p}" for i, record in enumerate(records) for p in record.problems]
            assert not problems, f"{where}: " + "; ".join(problems[:4])
            unclear = [] if self._quantised else self.simulated.unclear()
            assert not unclear, f"{where}: within rounding of a tie, find_seeds.py finds another seed: {unclear}"
            for layer, record in enumerate(records[0].layers):
                if record.tiered:
                    expected = [record.layers[layer].host_length for record in records]
                    assert self.batch.host_lengths(layer) == expected, f"{where}: layer {layer}"
            self._compare_trials(where)
            self._compare_probes(where)
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

    def _compare_probes(self, where: str) -> None:
        """The true mass, wherever the engine has measured it."""
        for micro_batch in self.batch.micro_batches:
            for layer, attention in enumerate(micro_batch.layers):
                if attention.host_lengths is None or attention.probed_mass is None:
                    continue
                for row, member in enumerate(micro_batch.members):
                    record = self.simulated.steps[-1][member].layers[layer]
                    masses = zip(
                        attention.probed_mass[row].tolist(), record.true_mass, record.mass_rounding, strict=True
                    )
                    for mine, theirs, moved in masses:
                        assert abs(mine - theirs) < PROBE_TOLERANCE + moved, f"{where}: layer {layer}: true mass"
                        self.probes += 1

    # -- quantised keys

    def _listen(self, attention: Any, where: tuple[int, int]) -> None:
        """Remember the query that a layer chooses by: a sketch's scan rounds it, and rounding is followed."""
        submit = attention.submit

        def heard(query: Tensor, plan: LayerPlan) -> None:
            self._queries[where] = query.clone()
            submit(query, plan)

        attention.submit = heard

    def _seen(self) -> list[dict[int, Seen]] | None:
        """What the last step scanned in each sequence."""
        if not self._quantised:
            return None
        seen: list[dict[int, Seen]] = [{} for _ in self.simulated.sequences]
        for index, micro_batch in enumerate(self.batch.micro_batches):
            for layer, attention in enumerate(micro_batch.layers):
                if attention.host_lengths is None:
                    continue
                plan, candidates = self.batch.plans[-1].layers[layer], getattr(attention, "_candidates", None)
                for row, member in enumerate(micro_batch.members):
                    sequence, listed = self.simulated.sequences[member], None
                    if plan.mode == "pre_qkt" and candidates is not None:
                        size = self.simulated.scan(member, layer).sizes[row]
                        rows = candidates.rows[row, :, :size] + sequence.settings.sinks
                        listed = rows.tolist()
                    seen[member][layer] = Seen(self._queries[index, layer][row], listed)
        return seen

    def _follow_keys(self, where: str) -> None:
        """Judge the host's keys that have come since, and have the simulation use them."""
        problems = []
        for micro_batch in self.batch.micro_batches:
            for layer, attention in enumerate(micro_batch.layers):
                for row, member in enumerate(micro_batch.members):
                    sequence = self.simulated.sequences[member]
                    stored = sequence.stored[layer]
                    if stored is None or stored.followed == stored.rows.shape[1]:
                        continue
                    new = slice(stored.followed, stored.rows.shape[1])
                    theirs = encoded(attention, row, new, stored.storage.key_type == "int8", bool(stored.bits))
                    problems += [f"sequence {member}: {each}" for each in sequence.follow_keys(layer, theirs)]
        assert not problems, f"{where}: " + "; ".join(problems[:4])

    def _compare_kinds(self) -> None:
        self.kinds = [[layer.key_kind for layer in each.layers] for each in self.batch.micro_batches]
        for micro_batch, kinds in zip(self.batch.micro_batches, self.kinds, strict=True):
            sequence = self.simulated.sequences[micro_batch.members[0]]
            assert not sequence.close_recalls, f"another seed is needed: {sequence.close_recalls}"
            for layer, kind in enumerate(kinds):
                storage = KeyStorage() if sequence.keys_as is None else sequence.keys_as[layer]
                assert kind == (storage.kind if sequence.tiered(layer) else None), f"layer {layer}"

    def _compare_logits(self, ours: Tensor, where: str) -> None:
        theirs = self.simulated.logits
        assert ours.shape == theirs.shape and str(ours.dtype) == "torch.float32"
        difference = (ours.double() - theirs).abs().amax(1)
        self.worst_difference = max(self.worst_difference, float(difference.max()))
        assert (difference < LOGITS_TOLERANCE).all(), f"{where}: logits differ by {difference.tolist()}"
        assert self.batch.lengths == [sequence.length for sequence in self.simulated.sequences], where


def encoded(attention: Any, row: int, rows: slice, int8: bool, sketched: bool) -> Encoded:
    """Host keys of one sequence as the engine keeps them: `host_keys.key_parts` says in which order."""
    keys = attention._kv.host_keys
    parts = [buffer.tensor[row] for buffer in keys.buffers()]
    if sketched and len(parts) == 1 + 2 * int8:
        parts.append(keys.sketch.tensor[row])  # on the device
    assert len(parts) == 1 + 2 * int8 + sketched
    return Encoded(
        parts[0][:, rows].clone(),
        parts[1][:, rows, 0].clone() if int8 else None,
        parts[2].clone() if int8 else None,
        parts[-1][:, rows.start // BLOCK : rows.stop // BLOCK].clone() if sketched else None,
    )


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
