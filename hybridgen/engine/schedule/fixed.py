"""`--schedule fixed`: the same plan at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule.base import StepObservation, settled_plan, tiered_layers
from hybridgen.types import KeepRule, LayerPlan, StepPlan


class FixedSchedule:
    """Post-QKT: every host token is scored, `rule` says what is kept.

    Every `probe_interval` steps one layer, in rotation, also measures the true mass it covers.
    """

    def __init__(self, modes: Sequence[LayerMode], rule: KeepRule, probe_interval: int) -> None:
        self._plain = [settled_plan(mode) or LayerPlan("post_qkt", rule) for mode in modes]
        self._tiered = tiered_layers(modes)
        self._probe_interval = probe_interval

    def plan(self, step: int) -> StepPlan:
        """The plan of decode step `step` (from 0) of a request."""
        return with_probe(self._plain, step, self._tiered, self._probe_interval)

    def observe(self, observation: StepObservation) -> None:
        """Nothing that happens changes the plan."""


def with_probe(layers: Sequence[LayerPlan], step: int, tiered: Sequence[int], interval: int) -> StepPlan:
    """The step's plan; every `interval` steps (0: never) one layer, in rotation, measures its true mass."""
    planned = list(layers)
    if interval and tiered and step % interval == 0:
        probed = tiered[step // interval % len(tiered)]
        planned[probed] = replace(planned[probed], probe_mass=True)
    return StepPlan(tuple(planned))
