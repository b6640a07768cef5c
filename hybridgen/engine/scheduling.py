"""What ties a schedule, which is pure numbers, to the engine: made from a Config, told what a step has measured."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridgen.attention.base import LayerAttention
from hybridgen.config import Config
from hybridgen.config_rules import REPLAY
from hybridgen.engine.batch import Batch
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule import (
    FeedbackSchedule,
    FixedSchedule,
    PaperSchedule,
    ReplaySchedule,
    Schedule,
    StepObservation,
    controlled_layers,
    read_plans,
)
from hybridgen.engine.schedule.paper import MOST_RATIO
from hybridgen.errors import ConfigError
from hybridgen.kv_cache.page_bounds import PAGE
from hybridgen.selection.budget import keep_limits, most_kept
from hybridgen.telemetry import StepTimings
from hybridgen.types import KeepRule, StepPlan

OWN_WORK = ("predict", "qkv", "choose", "attention", "mlp")  # stages of a layer that wait for nothing else


def keep_rule(config: Config) -> KeepRule:
    """What is kept of the host tier."""
    selection, multiple = config.selection, PAGE if config.cache.sketch == "pages" else 1
    return KeepRule(selection.keep, selection.keep_mass, selection.min_keep, selection.alpha, multiple)


def make_schedule(config: Config, modes: Sequence[LayerMode], random_weights: bool) -> Schedule:
    """A fresh schedule, for one request; ConfigError if `replay:` names a report that does not fit."""
    schedule, rule = config.schedule, keep_rule(config)
    # A probe compares logits of the true query; `logits` mixes two.
    probe = 0 if config.attention.lookahead == "logits" else config.runtime.mass_probe_interval
    if schedule.mode == "feedback":
        return FeedbackSchedule(modes, rule, probe, random_weights, schedule.target_ms, schedule.most_extra)
    if schedule.mode == "paper":
        return PaperSchedule(modes, probe, schedule.paper_interval, schedule.paper_both_at_once)
    if schedule.mode.startswith(REPLAY):
        plans = _replayed(schedule.mode)
        modes_asked = {layer.mode for plan in plans for layer in plan.layers}
        if config.cache.sketch_home == "gpu" and "pre_qkt" in modes_asked:
            raise ConfigError(
                f"--schedule {schedule.mode}: it has plans in which the CPU scores candidates (pre_qkt), and with "
                "--sketch-home gpu nothing is there for it to score by: leave out one of the two"
            )
        return ReplaySchedule(plans, modes, f"--schedule {schedule.mode}")
    return FixedSchedule(modes, rule, probe)


def names_candidates(config: Config) -> bool:
    """Whether a plan may be `pre_qkt`, for which each layer remembers what had mass lately."""
    return config.attention.executor == "hybrid" and config.schedule.mode != "fixed"


def most_fetched(config: Config, host_rows: int) -> int:
    """The largest K that a plan may give: what staging must hold."""
    mode, rule = config.schedule.mode, keep_rule(config)
    if mode == "feedback":
        return min(host_rows, math.ceil(config.schedule.most_extra * most_kept(rule, host_rows)))
    if mode == "paper":
        return math.ceil(MOST_RATIO * host_rows)
    if mode.startswith(REPLAY):
        asked = {(layer.keep, layer.extra) for plan in _replayed(mode) for layer in plan.layers}
        return max((keep_limits(keep, [host_rows], extra=extra).widest for keep, extra in asked if keep), default=0)
    return most_kept(rule, host_rows)


@functools.lru_cache(maxsize=4)
def _replayed(mode: str) -> list[StepPlan]:
    return read_plans(Path(mode.removeprefix(REPLAY)))


def observe(batch: Batch, modes: Sequence[LayerMode], timings: StepTimings) -> StepObservation | None:
    """What the step that `batch` did last has measured; None where no layer is controlled.

    Waits for the device: call it when the step is over.
    """
    controlled, plan = controlled_layers(modes), batch.plans[-1].layers
    layers = controlled
    if not layers:
        return None
    tried = next((layer for layer in layers if plan[layer].trial_tokens), None)
    if tried is not None and any(plan[layer].mode == "pre_qkt" for layer in layers):
        layers = [layer for layer in layers if layer != tried] or layers  # its scan is longer than the others'

    def mean_ms(*stages: str) -> float:
        spent = [timings.stage_ms.get(stage, {}) for stage in stages]
        return statistics.fmean(sum(of_stage.get(layer, 0.0) for of_stage in spent) for layer in layers)

    def parts(layer: int) -> list[LayerAttention]:
        return [micro_batch.layers[layer] for micro_batch in batch.micro_batches]

    # One copy to the host for all counts and one for all masses: these are small tensors by the hundred.
    counted = [(layer, part.selection.counts) for layer in controlled for part in parts(layer) if part.selection]
    kept = _by_layer(counted)
    kept_tokens = statistics.fmean(count for layer in layers for count in kept[layer])
    scanned_fully = [layer for layer in controlled if plan[layer].mode == "post_qkt"] or layers
    floor_tokens = statistics.fmean(statistics.fmean(kept[layer]) / plan[layer].extra for layer in scanned_fully)
    tried_parts = [part for part in parts(tried) if part.selection and part.trial_masses] if tried is not None else []
    columns = zip(*[(part.selection.mass, *part.trial_masses) for part in tried_parts if part.selection], strict=True)
    masses = _by_layer([(index, mass) for index, column in enumerate(columns) for mass in column])
    full, covered, trial = (statistics.fmean(masses[i]) for i in range(3)) if masses else (None, None, None)
    hosts = [length for layer in layers for part in parts(layer) for length in part.host_lengths or []]
    scored = [count for layer in layers for part in parts(layer) for count in part.scored]
    return StepObservation(
        scan_ms=mean_ms("scan"),
        scan_wait_ms=mean_ms("scan_wait"),
        link_ms=mean_ms("fetch"),
        link_wait_ms=mean_ms("link_wait"),
        gpu_ms=mean_ms(*OWN_WORK),
        step_ms=timings.step_ms,
        host_tokens=statistics.fmean(hosts) if hosts else 0.0,
        scanned_tokens=statistics.fmean(scored) if scored else 0.0,
        kept_tokens=kept_tokens,
        floor_tokens=floor_tokens,
        covered_mass=covered,
        full_scan_mass=full,
        trial_mass=trial,
    )


def _by_layer(named: Sequence[tuple[int, Tensor]]) -> dict[int, list[float]]:
    """The numbers of all the tensors under one name, from one copy to the host."""
    found: dict[int, list[float]] = {}
    if named:
        numbers = iter(torch.cat([tensor.flatten() for _, tensor in named]).tolist())
        for name, tensor in named:
            found.setdefault(name, []).extend(itertools.islice(numbers, tensor.numel()))
    return found
