"""Plans each decode step, in pure numbers: no tensor, no device, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.types import KeepRule, LayerPlan, StepPlan


class FixedSchedule:
    """The same plan at every step: Post-QKT, every host token is scored, `rule` says what is kept.

    Every `probe_interval` steps one layer, in rotation, also measures the true mass it covers.
    """

    def __init__(self, modes: Sequence[LayerMode], rule: KeepRule, probe_interval: int) -> None:
        self._plain = StepPlan(
            tuple(LayerPlan("resident", None) if mode == "resident" else LayerPlan("post_qkt", rule) for mode in modes)
        )
        self._tiered = [layer for layer, mode in enumerate(modes) if mode != "resident"]
        self._probe_interval = probe_interval

    def plan(self, step: int) -> StepPlan:
        """The plan of decode step `step` (from 0) of a request."""
        if not self._probe_interval or not self._tiered or step % self._probe_interval:
            return self._plain
        probed = self._tiered[step // self._probe_interval % len(self._tiered)]
        layers = list(self._plain.layers)
        layers[probed] = LayerPlan("post_qkt", layers[probed].keep, probe_mass=True)
        return StepPlan(tuple(layers))
