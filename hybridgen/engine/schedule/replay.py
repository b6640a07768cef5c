"""`--schedule replay:report.json`: the plans of a former run, and how a report writes them down.

A report's `scheduler.steps` is coded by run length: equal neighbours among layers, then among steps,
are written once with a count (`count` layers, `steps` steps).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule.base import StepObservation, settled_plan
from hybridgen.errors import ConfigError
from hybridgen.types import KeepRule, LayerPlan, StepPlan


class ReplaySchedule:
    """Step by step what another run did; beyond its end, its last step again."""

    def __init__(self, steps: Sequence[StepPlan], modes: Sequence[LayerMode], source: str = "replay") -> None:
        """source: what an error names. ConfigError if the plans are not for layers of these modes."""
        if not steps:
            raise ConfigError(f"{source}: it holds no decode step")
        for number, step in enumerate(steps):
            if len(step.layers) != len(modes):
                raise ConfigError(
                    f"{source}: step {number} plans {len(step.layers)} layers, but the model has {len(modes)}"
                )
            for layer, (plan, mode) in enumerate(zip(step.layers, modes, strict=True)):
                settled = settled_plan(mode)
                asked = plan.mode if plan.mode in ("resident", "all") else None
                if asked != (None if settled is None else settled.mode):
                    raise ConfigError(
                        f"{source}: step {number} plans layer {layer} as {plan.mode}, but here it is {mode} "
                        "(give the same strategy and model.exact_layers_mode)"
                    )
        self._steps = steps

    def plan(self, step: int) -> StepPlan:
        """What the other run planned for decode step `step`."""
        return self._steps[min(step, len(self._steps) - 1)]

    def observe(self, observation: StepObservation) -> None:
        """Nothing that happens changes the plan."""


def read_plans(report: Path) -> list[StepPlan]:
    """The plans that a report holds; ConfigError if it cannot be read or holds none."""
    try:
        return decode(json.loads(report.read_text(encoding="utf-8"))["scheduler"]["steps"])
    except OSError as error:
        raise ConfigError(f"--schedule replay:{report}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--schedule replay:{report}: not a report with scheduler.steps ({type(error).__name__}: {error})"
        ) from None


def encode(steps: Iterable[StepPlan]) -> list[dict[str, Any]]:
    """A report's `scheduler.steps`."""
    coded: list[dict[str, Any]] = []
    for _, equal_steps in groupby(steps, repr):  # by repr: --keep 1 (a token) is not --keep 1.0 (all)
        step, *more = equal_steps
        layers: list[dict[str, Any]] = []
        for _, equal_layers in groupby(step.layers, repr):
            plan, *others = equal_layers
            layers.append({**_layer_entry(plan), "count": 1 + len(others)})
        coded.append({"steps": 1 + len(more), "layers": layers})
    return coded


def decode(coded: Iterable[dict[str, Any]]) -> list[StepPlan]:
    """The inverse of `encode`; what an older report leaves out has its default."""
    steps: list[StepPlan] = []
    for entry in coded:
        layers: list[LayerPlan] = []
        for layer in entry["layers"]:
            layers += [_layer_plan(layer)] * layer["count"]
        steps += [StepPlan(tuple(layers))] * entry["steps"]
    return steps


def _layer_entry(plan: LayerPlan) -> dict[str, Any]:
    return {**asdict(plan), "full_scan": plan.mode == "post_qkt" and plan.scan_tokens is None}


def _layer_plan(entry: dict[str, Any]) -> LayerPlan:
    if entry["mode"] not in ("resident", "all", "post_qkt", "pre_qkt"):
        raise ValueError(f"unknown mode {entry['mode']!r}")
    return LayerPlan(
        mode=entry["mode"],
        keep=None if entry["keep"] is None else KeepRule(**entry["keep"]),
        scan_tokens=entry["scan_tokens"],
        probe_mass=entry.get("probe_mass", False),
        extra=entry.get("extra", 1.0),
        trial_tokens=tuple(entry.get("trial_tokens", ())),
    )
