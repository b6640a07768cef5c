"""`--schedule paper`: Algorithm 1 of the paper as it is reconstructed in algorithms.md 7.4."""

from __future__ import annotations

from collections.abc import Sequence

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule.base import StepObservation, settled_plan, tiered_layers
from hybridgen.engine.schedule.fixed import with_probe
from hybridgen.types import KeepRule, LayerPlan, StepPlan

FIRST_RATIO = 0.05
LEAST_RATIO, MOST_RATIO = 0.01, 0.5
RAISE, LOWER = 1.2, 0.8
LEAST_SCAN = 32


class PaperSchedule:
    """One ratio of kept tokens and one cap on scanned tokens, for all layers with a host tier.

    Every `interval` steps (0: never) the host's latency H (CPU logits and link) is compared with the
    device's latency G (attention and FFN), each averaged over these steps:
      H <= G: ratio x 1.2 up to 0.5; a cap on the scan is widened x 1.2 and dropped when it reaches the host.
      H > G:  ratio x 0.8 down to 0.01; once it is there, the scan is capped to half of what it was.
    `both_at_once` tightens ratio and cap together, as the published port does. There is no floor but
    the ratio's: neither mass nor --keep is looked at. K is rounded up where the port rounds down.
    """

    def __init__(
        self, modes: Sequence[LayerMode], probe_interval: int, interval: int = 4, both_at_once: bool = False
    ) -> None:
        self._modes = modes
        self._tiered = tiered_layers(modes)
        self._probe_interval = probe_interval
        self._interval = interval
        self._both_at_once = both_at_once
        self._ratio = FIRST_RATIO
        self._cap: int | None = None
        self._observed: list[StepObservation] = []

    def plan(self, step: int) -> StepPlan:
        """The plan of the next decode step."""
        rule = KeepRule(round(self._ratio, 6), None, min_keep=1)
        tiered = LayerPlan("post_qkt" if self._cap is None else "pre_qkt", rule, self._cap)
        layers = [settled_plan(mode) or tiered for mode in self._modes]
        return with_probe(layers, step, self._tiered, self._probe_interval)

    def observe(self, observation: StepObservation) -> None:
        """Follow the latencies, at the end of each interval."""
        if not self._interval:
            return
        self._observed.append(observation)
        if len(self._observed) < self._interval:
            return
        host_ms = sum(one.scan_ms + one.link_ms for one in self._observed)
        device_ms = sum(one.gpu_ms for one in self._observed)
        self._observed.clear()
        host_tokens = int(observation.host_tokens)
        if host_ms <= device_ms:
            self._relax(host_tokens)
        else:
            self._tighten(host_tokens)

    def _relax(self, host_tokens: int) -> None:
        self._ratio = min(self._ratio * RAISE, MOST_RATIO)
        if self._cap is not None:
            cap = max(self._cap + 1, int(self._cap * RAISE))
            self._cap = None if cap >= host_tokens else cap

    def _tighten(self, host_tokens: int) -> None:
        if self._both_at_once or self._ratio <= LEAST_RATIO:
            self._cap = max((host_tokens if self._cap is None else self._cap) // 2, LEAST_SCAN)
        self._ratio = max(self._ratio * LOWER, LEAST_RATIO)
