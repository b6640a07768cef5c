"""A machine for the schedules: costs linear in tokens and rows, stages side by side as the engine runs them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridgen.engine.schedule import Schedule, StepObservation
from hybridgen.selection.budget import most_kept
from hybridgen.types import KeepRule, LayerPlan, StepPlan


@dataclass
class SimulatedMachine:
    """Times in ms, as for OPT-13B at 32k by default (measurements.md): the CPU is far behind.

    The best K of N host tokens hold (K/N)^concentration of the host's mass; of that, a scan of a share s
    finds s^missed. `layer_spread` makes layers differ in it.
    """

    layers: int = 37
    host_tokens: int = 32_256
    scan_us_per_token: float = 0.108  # 3.5 ms a layer
    link_us_per_row: float = 0.2  # K and V of 40 heads at 50 GB/s are 0.4 a row; half of that here
    gpu_ms: float = 0.25
    gpu_us_per_row: float = 0.005
    local_mass: float = 0.4
    concentration: float = 0.15
    missed: float = 0.02
    layer_spread: float = 0.0
    noise: float = 0.0
    contention: float = 0.0  # share of a long scan that it takes longer than its tokens say, and the layer waits
    cores: float = 1.0
    link: float = 1.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def floor_tokens(self, rule: KeepRule) -> int:
        """The K of `fixed`."""
        return self._rule_gives(rule, 1.0)

    def kept_tokens(self, plan: LayerPlan) -> int:
        """Under a mass, the rule sees candidates only, takes their mass for all there is, and stops early."""
        assert plan.keep is not None
        share = 1.0 if plan.scan_tokens is None else min(1.0, plan.scan_tokens / self.host_tokens)
        return min(self.host_tokens, math.ceil(plan.extra * self._rule_gives(plan.keep, share**self.missed)))

    def _rule_gives(self, rule: KeepRule, seen: float) -> int:
        most = most_kept(rule, self.host_tokens)
        if rule.mass is None:
            return most
        host_mass = (1 - self.local_mass) * seen
        needed_mass = max(0.0, rule.mass * (self.local_mass + host_mass) - self.local_mass)
        needed = math.ceil((needed_mass / host_mass) ** (1 / self.concentration) * self.host_tokens)
        return min(self.host_tokens, max(rule.min_keep, min(most, needed)))

    def scanned_tokens(self, plan: LayerPlan) -> int:
        if plan.scan_tokens is None:
            return self.host_tokens
        return min(self.host_tokens, max(plan.scan_tokens, self.kept_tokens(plan)))

    def mass(self, kept: int, scanned: int, layer: int = 0) -> float:
        kept_share, scan_share = kept / self.host_tokens, min(1.0, scanned / self.host_tokens)
        missed = self.missed * (1 + self.layer_spread * math.sin(layer))
        return self.local_mass + (1 - self.local_mass) * kept_share**self.concentration * scan_share**missed

    def run(self, plan: StepPlan, rule: KeepRule) -> StepObservation:
        """One decode step: a layer takes as long as its longest stage."""
        tiered = [(number, layer) for number, layer in enumerate(plan.layers) if layer.mode != "resident"]
        timed = [layer for _, layer in tiered if layer.mode == "pre_qkt"] or [layer for _, layer in tiered]
        layer = timed[0]
        kept, scanned = self.kept_tokens(layer), self.scanned_tokens(layer)
        scan = self._noisy(scanned * self.scan_us_per_token / 1e3 / self.cores)
        link = self._noisy(kept * self.link_us_per_row / 1e3 / self.link)
        gpu = self._noisy(self.gpu_ms + kept * self.gpu_us_per_row / 1e3)
        link_wait = max(0.0, link - gpu)
        scan_wait = max(0.0, scan - max(gpu, link))
        if scan > 0.75 * max(gpu, link):
            scan_wait += self.contention * scan
            scan *= 1 + self.contention
        masses: tuple[float | None, ...] = (None, None, None)
        for number, tried in tiered:
            if tried.trial_tokens:
                k = self.kept_tokens(tried)
                sizes = (self.host_tokens, *tried.trial_tokens)
                full, covered, trial = (self.mass(k, size, number) for size in sizes)
                masses = (covered, full, trial)
        return StepObservation(
            scan_ms=scan,
            scan_wait_ms=scan_wait,
            link_ms=link,
            link_wait_ms=link_wait,
            gpu_ms=gpu,
            step_ms=len(plan.layers) * (gpu + link_wait + scan_wait),
            host_tokens=self.host_tokens,
            scanned_tokens=scanned,
            kept_tokens=kept,
            floor_tokens=self.floor_tokens(rule),
            covered_mass=masses[0],
            full_scan_mass=masses[1],
            trial_mass=masses[2],
        )

    def _noisy(self, milliseconds: float) -> float:
        return milliseconds * max(0.2, self.random.gauss(1.0, self.noise))


@dataclass(frozen=True)
class Step:
    """What a step was: the plan of a layer that is not tried, and what came of it."""

    layer: LayerPlan
    seen: StepObservation

    @property
    def scanned_share(self) -> float:
        return self.seen.scanned_tokens / self.seen.host_tokens

    @property
    def state(self) -> tuple[float, float]:
        """What the schedule controls (scan_tokens / host is the same all along a growing context)."""
        scan = 1.0 if self.layer.scan_tokens is None else self.layer.scan_tokens / self.seen.host_tokens
        return round(scan, 2), self.layer.extra


def drive(
    schedule: Schedule,
    machine: SimulatedMachine,
    rule: KeepRule,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    first: int = 0,
) -> list[Step]:
    """Steps first, first + 1, ... of a request; before(step) may disturb the machine."""
    history: list[Step] = []
    for step in range(first, first + steps):
        before(step)
        plan = schedule.plan(step)
        tiered = [layer for layer in plan.layers if layer.mode != "resident"]
        seen = machine.run(plan, rule)
        schedule.observe(seen)
        plain = [layer for layer in tiered if layer.mode == "pre_qkt"] or tiered
        history.append(Step(plain[0], seen))
    return history


def last_change(history: list[Step]) -> int:
    """Index of the step from which on the plan stays as it is."""
    changes = [index for index in range(1, len(history)) if history[index].state != history[index - 1].state]
    return changes[-1] if changes else 0
