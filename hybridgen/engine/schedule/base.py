"""What the decode loop asks of a schedule, and what it tells it. Pure numbers: no tensor, no device, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridgen.engine.layer_modes import LayerMode, chooses
from hybridgen.types import LayerPlan, StepPlan


@dataclass(frozen=True)
class StepObservation:
    """What was measured in one decode step. Averaging over steps is the schedule's job.

    Times are milliseconds a layer, means over the layers of `controlled_layers`; where those are
    planned as pre_qkt, the one that was fully scanned in rotation is left out. Counts are means over
    sequences and KV heads too.

    scan_ms: the CPU scores. scan_wait_ms: the layer stood still for the scores.
    link_ms: logits and kept rows cross the link. link_wait_ms: the layer stood still for them.
    gpu_ms: the layer's own work (choice, attention, MLP), without waiting.
    step_ms: the whole step.
    host_tokens: rows in the host tier. scanned_tokens: how many were scored. kept_tokens: K.
    floor_tokens: the K that the floor's rule alone (`keep` without `extra`) gave on fully scanned layers.
    full_scan_mass, covered_mass, trial_mass: on the layer with `trial_tokens`, by the choosing query:
        what sinks, window and the best K of all host tokens, of trial_tokens[0] and of
        trial_tokens[1] candidates hold. None where no layer was tried.
    """

    scan_ms: float
    scan_wait_ms: float
    link_ms: float
    link_wait_ms: float
    gpu_ms: float
    step_ms: float
    host_tokens: float
    scanned_tokens: float
    kept_tokens: float
    floor_tokens: float
    covered_mass: float | None = None
    full_scan_mass: float | None = None
    trial_mass: float | None = None


class Schedule(Protocol):
    """Plans the decode steps of one request: a fresh object for each.

    The loop calls `plan(0)`, `observe`, `plan(1)`, ...; `plan` changes nothing, so it may be asked again.
    """

    def plan(self, step: int) -> StepPlan:
        """The plan of decode step `step` (from 0)."""
        ...

    def observe(self, observation: StepObservation) -> None:
        """What the step that was planned last has measured."""
        ...


def settled_plan(mode: LayerMode) -> LayerPlan | None:
    """The plan of a layer that chooses nothing; None for a layer that a schedule plans."""
    if mode == "resident":
        return LayerPlan("resident", None)
    return None if chooses(mode) else LayerPlan("all", None)


def tiered_layers(modes: Sequence[LayerMode]) -> list[int]:
    """The layers that choose from a host tier."""
    return [layer for layer, mode in enumerate(modes) if chooses(mode)]


def controlled_layers(modes: Sequence[LayerMode]) -> list[int]:
    """The layers whose plan a feedback schedule may change, and whose times it wants to know.

    Exact layers are left as they are, unless no other layer has a host tier (lookahead off).
    """
    return [layer for layer, mode in enumerate(modes) if mode == "lookahead"] or tiered_layers(modes)
