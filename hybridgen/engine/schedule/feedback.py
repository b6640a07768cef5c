"""`--schedule feedback`: control by cause (contracts.md, "Feedback").

Two quantities are controlled, the same for all controlled layers. `level`: 0 is a full scan, and each
level further scans SCAN_STEP times as many host tokens as the one before. `extra`: K over the floor.

  1. The mass rule comes first: where fewer than all tokens are scanned and their choice covers less
     than it asks for, one level is given back, and none is taken for the next HOLD steps,
     twice as many after each further time.
  2. CPU the bottleneck (layers wait for the scan more than WAIT_HIGH of their time): scan fewer tokens,
     as many levels fewer as remove the wait, one at a time where the mass rule has to be asked.
  3. The same, but fewer are not allowed: link and GPU have slack, so raise K into half of the wait.
     (This is also how a full scan can be left under --keep-mass: a larger K covers more than asked.)
  4. Link the bottleneck (its wait is more than WAIT_HIGH and than the scan's), or the GPU (nothing waits
     for the scan): lower K towards the floor. Where --keep-mass lives on the larger K (less than a full
     scan), the GPU is no cause, and the link only while the mass covered has a margin.
  5. CPU slack (no wait, and the next larger scan would still end in time): scan more, up to all. Stages slow each
     other down, so that what should end in time may not: then the larger scan is given back and not tried for HOLD
     steps, twice as many after each further time, unless the machine has become faster.

Between the thresholds nothing moves. Averages begin anew with each change, so that they tell of the
present plan only, and a decision needs PATIENCE steps of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule.average import RunningAverages
from hybridgen.engine.schedule.base import StepObservation, controlled_layers, settled_plan, tiered_layers
from hybridgen.engine.schedule.fixed import with_probe
from hybridgen.types import KeepRule, LayerPlan, StepPlan

SCAN_STEP = 0.65  # tokens scanned at a level, as a share of the level before
MOST_LEVELS_AT_ONCE = 4
LEAST_SCAN = 256  # host tokens; also never fewer than twice K, or there would be nothing to choose
WAIT_HIGH, WAIT_LOW = 0.12, 0.03  # shares of a layer's time
FITS = 0.8  # of a layer's time: above it a scan makes the layer wait, although it is not the longest stage
LINK_FILL = 0.8  # K is not raised beyond this share of the scan's time on the link
LOWER_KEPT = 0.7
SMALL_CHANGE = 1.1  # a raise of K below this factor is not worth a change
TARGET_SLACK = 0.8  # with --target-ms: from this share of it downwards there is time to spare

WARM_UP = 1  # steps that are not counted: the first one of a request allocates and compiles
OUTLIER = 3.0  # a step that takes so many times the last one says nothing of its plan: a kernel was compiled, say
MOST_OUTLIERS = 2  # on end; then it is how things are
PATIENCE = 2
HOLD = 32
GROWTH_SHOWS = 16  # steps: a larger scan that has to be given back within them was too large
LIGHTER = 0.9  # a scan that was too large is tried again, at once, where it would be this much shorter in the layer
MASS_OF_FULL_SCAN = 0.98  # with --keep alone: share of what a full scan's top K covers
MARGIN = 0.2  # of what the mass rule leaves uncovered, before fewer tokens are scanned or kept

TIME_WEIGHT, MASS_WEIGHT, FLOOR_WEIGHT = 0.2, 0.1, 0.1


class FeedbackSchedule:
    """Balances CPU, link and GPU within the floor; state of one request.

    The floor is `rule`, K as `fixed` would choose it: `extra` is never below 1. The full scan is left
    only while the mass covered stays above what `rule` asks for, as measured on one layer a step, in
    rotation, that is fully scanned. With random weights mass means nothing: the floor is K alone, no
    layer is tried, and the scan may shrink down to max(LEAST_SCAN, 2 K) tokens.

    Under a mass, a rule applied to candidates would stop early, for it cannot see the rest: there the
    plan asks for at least the K that full scans have given lately (mean over layers, as `min_keep`).

    target_ms: the step time asked for. Scan and K shrink while it is exceeded (with the same limits:
    the floor wins, and `target_missed` says so), and grow while the step takes less than TARGET_SLACK of
    it; a bottleneck that meets the target is left alone.
    """

    def __init__(
        self,
        modes: Sequence[LayerMode],
        rule: KeepRule,
        probe_interval: int,
        random_weights: bool = False,
        target_ms: float | None = None,
        most_extra: float = 4.0,
    ) -> None:
        """most_extra: the largest `extra`, for which the fetched rows have room."""
        self.target_missed = False
        self._modes = modes
        self._rule = rule
        self._probe_interval = probe_interval
        self._guarded = not random_weights
        self._target_ms = target_ms
        self._most_extra = max(1.0, most_extra)
        self._tiered = tiered_layers(modes)
        self._controlled = controlled_layers(modes)

        self._level = 0
        self._extra = 1.0
        self._host_tokens = 0.0
        self._floor_share = RunningAverages(FLOOR_WEIGHT)  # of the host: a property of the text, not of the plan
        self._warm_up = WARM_UP
        self._last_ms, self._outliers = 0.0, 0
        self._hold, self._next_hold = 0, HOLD
        self._grown, self._grown_to = 0, 0.0  # steps left in which the last growth may show as too much; its `_load`,
        self._too_heavy: float | None = None  # as foretold; that of a growth which was too much
        self._growth_hold, self._next_growth_hold = 0, HOLD
        self._times = RunningAverages(TIME_WEIGHT)
        self._coverage = RunningAverages(MASS_WEIGHT)  # by level, this one and the next

    def plan(self, step: int) -> StepPlan:
        """The plan of the next decode step."""
        full = LayerPlan("post_qkt", self._rule)
        layers = [settled_plan(mode) or full for mode in self._modes]
        for layer in self._controlled:
            layers[layer] = self._controlled_plan()
        if self._guarded and self._host_tokens and self._controlled:
            tried = self._controlled[step % len(self._controlled)]
            trials = (self._scan_tokens(self._level), self._scan_tokens(self._level + 1))
            layers[tried] = replace(full, extra=self._extra, trial_tokens=trials)
        return with_probe(layers, step, self._tiered, self._probe_interval)

    def observe(self, observation: StepObservation) -> None:
        """Take in a step, and change the plan where a cause is found."""
        self._host_tokens = observation.host_tokens
        if observation.host_tokens <= 0:
            return
        self._floor_share.add(floor=observation.floor_tokens / observation.host_tokens)
        if self._warm_up:
            self._warm_up -= 1
            return
        if self._last_ms and observation.step_ms > OUTLIER * self._last_ms and self._outliers < MOST_OUTLIERS:
            self._outliers += 1
            return
        self._last_ms, self._outliers = observation.step_ms, 0
        self._times.add(
            scan=observation.scan_ms,
            scan_wait=observation.scan_wait_ms,
            link=observation.link_ms,
            link_wait=observation.link_wait_ms,
            layer=observation.gpu_ms + observation.scan_wait_ms + observation.link_wait_ms,
            step=observation.step_ms,
        )
        self._coverage.add(
            **{
                str(self._level): self._covered_share(observation.covered_mass, observation.full_scan_mass),
                str(self._level + 1): self._covered_share(observation.trial_mass, observation.full_scan_mass),
            }
        )
        self._hold = max(0, self._hold - 1)
        self._grown = max(0, self._grown - 1)
        self._growth_hold = max(0, self._growth_hold - 1)
        if self._times.count("scan") < PATIENCE:
            return
        level, extra = self._level, self._extra
        self._decide()
        if (level, extra) != (self._level, self._extra):
            self._times = RunningAverages(TIME_WEIGHT)
            # What was found by trial for the level that is now taken stays known. With another K it
            # stays where it is a ratio (--keep alone), which K hardly moves.
            known = {level, level + 1} if extra == self._extra or self._rule.mass is None else set()
            self._coverage.keep(str(one) for one in known & {self._level, self._level + 1})

    def _decide(self) -> None:
        step_ms, target = self._times["step"], self._target_ms
        exceeded = target is not None and step_ms > target
        moved = False
        if self._covers_too_little():
            self._level -= 1
            self._hold, self._next_hold = self._next_hold, 2 * self._next_hold
            moved = True
        elif target is None or exceeded:
            moved = self._relieve(exceeded)
        elif step_ms < TARGET_SLACK * target:
            moved = self._spend(target)
        self.target_missed = exceeded and not moved

    def _relieve(self, exceeded: bool) -> bool:
        """Act on the bottleneck; with a target that is exceeded, on any wait."""
        scan_wait, link_wait, layer = (self._times[name] for name in ("scan_wait", "link_wait", "layer"))
        if scan_wait > (WAIT_LOW if exceeded else WAIT_HIGH) * layer:
            if self._shrink_scan():
                return True
            # Where a target is exceeded, more K helps only if the mass rule then lets fewer tokens be scanned.
            return self._lower_kept() if exceeded and not self._by_mass else self._raise_kept()
        link_bound = link_wait > WAIT_HIGH * layer and link_wait > scan_wait
        gpu_bound = scan_wait < WAIT_LOW * layer
        if (link_bound or exceeded or (gpu_bound and not self._lives_on_extra)) and self._lower_kept():
            return True
        return not exceeded and scan_wait < WAIT_LOW * layer and self._grow_scan()

    def _spend(self, target: float) -> bool:
        """Time to spare before the target: scan more, then keep more, as far as it surely fits."""
        spare = (FITS * target - self._times["step"]) / max(1, len(self._controlled))
        growth = 1 / SCAN_STEP
        if self._level and (growth - 1) * self._times["scan"] <= spare:
            self._level -= 1
            return True
        if (growth - 1) * self._times["link"] <= spare:
            return self._set_extra(self._extra * growth)
        return False

    def _shrink_scan(self) -> bool:
        """As many levels as remove the wait; one, and only if its trial covers enough, under the mass rule."""
        if self._guarded and (self._hold or not self._covers(self._level + 1)):
            return False
        scan, without_wait = self._times["scan"], self._times["scan"] - self._times["scan_wait"]
        most = self._level + (1 if self._guarded else MOST_LEVELS_AT_ONCE)
        before = self._level
        while self._level < most and self._level_allowed(self._level + 1):
            self._level += 1
            scan *= SCAN_STEP
            if scan <= without_wait:
                break
        if self._level > before and self._grown:
            self._too_heavy = self._grown_to
            self._growth_hold, self._next_growth_hold = self._next_growth_hold, 2 * self._next_growth_hold
        return self._level > before

    def _grow_scan(self) -> bool:
        """As many levels as still end in time."""
        most = FITS
        if self._growth_hold and self._too_heavy is not None:
            most = min(most, LIGHTER * self._too_heavy)
        load, before = self._load, self._level
        while self._level and before - self._level < MOST_LEVELS_AT_ONCE and load / SCAN_STEP <= most:
            load /= SCAN_STEP
            self._level -= 1
        if self._level < before:
            self._grown, self._grown_to = GROWTH_SHOWS, load
        return self._level < before

    @property
    def _load(self) -> float:
        """The scan's time as a share of what a layer takes without waiting for it."""
        return self._times["scan"] / max(1e-9, self._times["layer"] - self._times["scan_wait"])

    def _raise_kept(self) -> bool:
        """K into half of the time that scan's wait leaves, without making the link the next bottleneck."""
        scan, link = self._times["scan"], self._times["link"]
        factor = 1 / SCAN_STEP
        if link > 0:
            free = (self._times["scan_wait"] - self._times["link_wait"]) / (2 * link)
            factor = min(2.0, 1 + free, LINK_FILL * scan / link)
        return factor > SMALL_CHANGE and self._set_extra(self._extra * factor)

    def _lower_kept(self) -> bool:
        if self._lives_on_extra and not self._covers(self._level):
            return False
        return self._set_extra(self._extra * LOWER_KEPT)

    def _set_extra(self, wanted: float) -> bool:
        """Within [1, most_extra], and of a scanned part no more than half; true if that changes anything."""
        most = self._most_extra
        if self._level and wanted > self._extra:
            most = min(most, self._scan_tokens(self._level) / max(1.0, 2 * self._floor_tokens))
            if most < self._extra * SMALL_CHANGE:
                return False
        before = self._extra
        self._extra = 1.0 if wanted < SMALL_CHANGE else math.floor(1000 * min(wanted, most)) / 1000
        return self._extra != before

    @property
    def _by_mass(self) -> bool:
        return self._guarded and self._rule.mass is not None

    @property
    def _lives_on_extra(self) -> bool:
        """Fewer than all tokens are scanned, which --keep-mass allows because K is above the floor."""
        return self._by_mass and self._level > 0

    @property
    def _asked(self) -> float:
        """The share that must be covered: of all mass, or with --keep alone of what a full scan covers."""
        return MASS_OF_FULL_SCAN if self._rule.mass is None else self._rule.mass

    def _covered_share(self, mass: float | None, full_scan_mass: float | None) -> float | None:
        """In the unit of `_asked`."""
        if self._rule.mass is not None:
            return mass
        return mass / full_scan_mass if mass is not None and full_scan_mass else None

    def _covers_too_little(self) -> bool:
        share = self._coverage.get(str(self._level))
        return self._guarded and self._level > 0 and share is not None and share < self._asked

    def _covers(self, level: int) -> bool:
        """Known to cover what is asked for, and a margin."""
        share = self._coverage.get(str(level))
        return share is not None and share >= self._asked + MARGIN * (1 - self._asked)

    @property
    def _floor_tokens(self) -> float:
        return self._host_tokens * (self._floor_share.get("floor") or 0.0)

    def _level_allowed(self, level: int) -> bool:
        least = max(LEAST_SCAN, 2 * self._extra * self._floor_tokens)
        return SCAN_STEP**level * self._host_tokens >= least

    def _scan_tokens(self, level: int) -> int:
        """Candidates at a level, in whole blocks of 64."""
        return max(LEAST_SCAN, math.ceil(SCAN_STEP**level * self._host_tokens / 64) * 64)

    def _controlled_plan(self) -> LayerPlan:
        if not self._level:
            return LayerPlan("post_qkt", self._rule, extra=self._extra)
        rule = self._rule
        if rule.mass is not None:
            rule = replace(rule, min_keep=max(rule.min_keep, math.ceil(self._floor_tokens / 64) * 64))
        return LayerPlan("pre_qkt", rule, self._scan_tokens(self._level), extra=self._extra)
