"""The JSON report of a run: contracts.md, "Report". Fields that a run cannot know are null."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridgen import __version__
from hybridgen.engine.batch import Batch
from hybridgen.engine.generation import Generation
from hybridgen.engine.layer_modes import asked_exact_layers
from hybridgen.engine.llm import LLM
from hybridgen.engine.schedule import FeedbackSchedule, encode
from hybridgen.output import write_whole
from hybridgen.telemetry import StepTimings


def build_report(
    llm: LLM,
    batch: Batch,
    generation: Generation,
    prompt_ids: Sequence[Sequence[int]],
    text: list[str] | None,
    prefill_s: float,
    memory_plan: dict[str, Any],
    strategy: str,
    allocations: int | None,
) -> dict[str, Any]:
    """Everything contracts.md asks for, from what was measured. Bytes and times are per decode step.

    memory_plan: `Admission.to_dict`.
    `limit_ms` and `gpu_idle_fraction` are null here: `engine.limits` finds them.
    """
    steps = generation.steps
    milliseconds = [step.step_ms for step in steps]
    attended = generation.statistics.summary()
    generated = [len(ids) for ids in generation.output_ids]
    decode_s = generation.decode_s
    return {
        "model": llm.spec.name,
        "weights": llm.weights.kind,
        "weights_random_because": llm.weights.random_reason,
        "synthetic_kv": llm.config.runtime.synthetic_kv,
        "weights_on_gpu": llm.weights_on_gpu,
        "placement": {**llm.placement, "kv": _kv_shares(batch)},
        "weights_packed": llm.weights_packed,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "strategy": strategy,
        "batch": len(prompt_ids),
        "prompt_tokens": [len(ids) for ids in prompt_ids],
        "prompt_ids": [list(ids) for ids in prompt_ids],
        "generated_tokens": generated,
        "output_ids": generation.output_ids,
        "ended_by": generation.ended_by,
        "text": text,
        "warm_up_s": llm.warm_up_s,
        "prefill_s": prefill_s,
        "decode_ms_per_token": _spread(milliseconds),
        "tokens_per_s": (sum(generated) - len(generated)) / decode_s if decode_s else None,
        "stage_ms_per_layer": _stages(steps),
        "waited_ms_per_token": {stage: _median_ms(steps, stage) for stage in ("scan_wait", "link_wait")},
        "limit_ms": None,
        "gpu_kernels_ms": None,
        "gpu_idle_fraction": None,
        "bytes_per_token": {
            direction: statistics.fmean(step.bytes_moved.get(direction, 0) for step in steps) if steps else None
            for direction in ("h2d", "d2h", "cpu_read", "disk")
        },
        "fetched_bytes_per_token": _moved_in("fetch", steps),
        "streamed_kv_bytes_per_token": _moved_in("stream", steps),
        "budget": attended["budget"],
        "covered_mass": {
            "mean": attended["mass_mean"],
            "min": attended["mass_min"],
            "kind": None if attended["mass_mean"] is None else _kind_of_mass(llm, batch),
            "true_probe": attended["mass_true"],
        },
        "kept_fraction": attended["kept_fraction"],
        "peak_gpu_bytes": _peak_gpu_bytes(llm),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "allocations_in_decode": allocations,
        "memory_plan": memory_plan,
        "scheduler": {
            "mode": llm.config.schedule.mode,
            "target_missed": batch.schedule.target_missed if isinstance(batch.schedule, FeedbackSchedule) else None,
            "steps": encode(batch.plans[: len(steps)]),
        },
        "key_types": _key_types(batch),
        "host_memory": llm.host_memory,
        "disk": llm.disk,
        "exact_layers": {str(i): mode for i, mode in enumerate(llm.modes) if mode != "lookahead"},
        "exact_layers_from": asked_exact_layers(llm.config)[1],
        "config": llm.config.to_dict(),
        "versions": {
            "hybridgen": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": describe_machine(llm),
        "commit": current_commit(),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    write_whole("--report", path, json.dumps(report, indent=1))


def _kind_of_mass(llm: LLM, batch: Batch) -> str:
    """contracts.md, "covered_mass"."""
    by_candidates = any(layer.mode == "pre_qkt" for plan in batch.plans for layer in plan.layers)
    if by_candidates or any("+" in kind for kind in _key_types(batch).values()):
        return "estimated"
    return "exact" if llm.config.attention.lookahead == "off" else "predicted"


def _kv_shares(batch: Batch) -> dict[str, float] | None:
    """Realised shares of the layers' tokens on the device, in host memory and on disk; None where some are evicted."""
    found = [layer.tiers(some.lengths) for some in batch.micro_batches for layer in some.layers]
    if None in found:
        return None
    totals = [sum(tokens) for tokens in zip(*(tiers for tiers in found if tiers is not None), strict=True)]
    return {name: count / sum(totals) for name, count in zip(("gpu", "host", "disk"), totals, strict=True)}


def _key_types(batch: Batch) -> dict[str, str]:
    """How the host keeps each layer's keys, for layers with a host tier."""
    layers = batch.micro_batches[0].layers
    return {str(index): layer.key_kind for index, layer in enumerate(layers) if layer.key_kind is not None}


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p90": None, "mean": None}
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "mean": statistics.fmean(ordered),
    }


def _stages(steps: Sequence[StepTimings]) -> dict[str, float]:
    """Mean milliseconds per layer that has the stage, by stage."""
    totals: dict[str, list[float]] = defaultdict(list)
    for step in filter(_is_timed, steps):
        for stage, layers in step.stage_ms.items():
            totals[stage] += layers.values()
    return {stage: statistics.fmean(values) for stage, values in totals.items()}


def _moved_in(stage: str, steps: Sequence[StepTimings]) -> float | None:
    """Mean bytes of the stage a step."""
    return statistics.fmean(step.stage_bytes.get(stage, 0) for step in steps) if steps else None


def _median_ms(steps: Sequence[StepTimings], stage: str) -> float:
    """Median over the steps of the milliseconds of all layers: a first step that compiles is not of interest."""
    spent = [
        sum(step.stage_ms.get(stage, {}).values()) / (step.sampled.get(stage) or 1.0)
        for step in filter(_is_timed, steps)
    ]
    return statistics.median(spent) if spent else 0.0


def _is_timed(step: StepTimings) -> bool:
    return step.is_timed


def describe_machine(llm: LLM) -> dict[str, Any]:
    """What the numbers were made on."""
    cores = len(os.sched_getaffinity(0))
    gpu = torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": cores,
        "torch_threads": llm.torch_threads.most,
        "steps_with_fewer_torch_threads": llm.torch_threads.lowered_steps,
        "worker_threads": llm.worker_threads,
        "scans_by_isa": llm.scans_by_isa,
        "gpu": gpu,
    }


def _peak_gpu_bytes(llm: LLM) -> int | None:
    """The most that was allocated, and what the process holds beside it (context, kernels, libraries)."""
    if llm.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(llm.device)
    beside = total - free - torch.cuda.memory_reserved(llm.device)
    return torch.cuda.max_memory_allocated(llm.device) + beside


def current_commit() -> str | None:
    """The checkout's commit, if the code runs from one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
