"""Does the job fit? Decided from the plan alone, before anything is fetched or allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from hybridgen.config import Config
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode, all_resident
from hybridgen.errors import HybridGenError, InsufficientMemoryError
from hybridgen.models.checkpoint import aliases
from hybridgen.models.loading import weight_bytes
from hybridgen.placement.plan import MemoryPlan

SEQ_STEP = 256  # a suggested --seq is a multiple of this


@dataclass(frozen=True)
class Admission:
    """A plan that fits, each layer's mode, and what the user should be told."""

    plan: MemoryPlan
    modes: tuple[LayerMode, ...]
    notes: list[str]
    limits: tuple[int | None, int]
    check_fits: bool  # room for full attention's own cache, to check the answer
    config: Config  # as given, `--weights-on-gpu auto` settled

    def describe(self) -> str:
        runs = [(mode, [layer for layer, _ in run]) for mode, run in groupby(enumerate(self.modes), lambda m: m[1])]
        modes = ", ".join(f"{_span(layers)} {mode}" for mode, layers in runs)
        lines = [self.plan.describe(*self.limits), f"layers: {modes}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def admit(
    choice: ModelChoice, config: Config, prompt_tokens: int, gen: int, batch: int, wants_check: bool = False
) -> Admission:
    """Plan the job; InsufficientMemoryError holds the plan and the first change that would fit."""
    capacity = prompt_tokens + gen
    notes = [note for note in (build.check_positions(choice, capacity, config.model.extend_positions),) if note]
    limits = build.memory_limits(config, choice.device)
    if config.placement.gpu_memory_bytes is not None and choice.device.type != "cuda":
        notes.append("there is no GPU: --gpu-memory has no effect")
    modes = build.resolve_modes(choice, config, batch, capacity)
    plan = build.plan_memory(choice, config, modes, batch, capacity)
    if config.schedule.mode == "feedback" and config.schedule.most_extra > 1 and not plan.fits(*limits):
        config = replace(config, schedule=replace(config.schedule, most_extra=1.0))
        modes = build.resolve_modes(choice, config, batch, capacity)
        plan = build.plan_memory(choice, config, modes, batch, capacity)
        notes.append("no memory for more fetched rows than --schedule fixed has: feedback leaves K at its floor")
    if not plan.fits(*limits):
        raise InsufficientMemoryError(
            f"{choice.spec.name} with {batch} x {capacity} tokens in {_name(choice.dtype)} does not fit\n"
            f"{plan.describe(*limits)}\nwhat would fit: {_suggestion(choice, config, prompt_tokens, gen, batch)}"
        )
    config = build.settled(config, plan)
    full = build.plan_memory(choice, config, all_resident(len(modes)), batch, capacity)
    if set(modes) != {"resident"} and full.fits(*limits):
        where = "on this device" if choice.device.type == "cuda" else "in memory, which is the device here"
        notes.append(f"all KV would fit {where}: --strategy full needs no host tier")
    check_fits = False
    if wants_check:
        kv = {"full attention's KV (answer check)": full.device["KV of resident layers"]}
        checked = replace(plan, device=plan.device | kv)
        check_fits = checked.fits(*limits)
        if check_fits:
            plan = checked
        else:
            notes.append("no memory for full attention's own cache: the answer is not checked against it")
    return Admission(plan, modes, notes, limits, check_fits, config)


def _suggestion(choice: ModelChoice, config: Config, prompt_tokens: int, gen: int, batch: int) -> str:
    """The first of: a smaller --seq, a smaller --dtype, another --weights-on-gpu, a smaller model."""

    def planned(candidate: ModelChoice, tokens: int, asked: Config = config) -> MemoryPlan:
        modes = build.resolve_modes(candidate, asked, batch, tokens + gen)
        return build.plan_memory(candidate, asked, modes, batch, tokens + gen)

    def fits(candidate: ModelChoice, tokens: int, asked: Config = config) -> bool:
        return planned(candidate, tokens, asked).fits(*build.memory_limits(asked, candidate.device))

    low, high = 0, prompt_tokens // SEQ_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(choice, middle * SEQ_STEP) else (low, middle - 1)
    if low:
        return f"--seq {low * SEQ_STEP}"
    if choice.dtype == torch.float32 and fits(choice.with_dtype(torch.bfloat16), prompt_tokens):
        return "--dtype bfloat16"
    automatic = replace(config, placement=replace(config.placement, weights_on_gpu="auto"))
    if fits(choice, prompt_tokens, automatic):
        share = planned(choice, prompt_tokens, automatic).weights_on_gpu
        assert share is not None
        rounded = (math.floor(share * 10**digits) / 10**digits for digits in (2, 3, 4))
        shares = (some for some in rounded if fits(choice, prompt_tokens, build.with_share(config, some)))
        return f"--weights-on-gpu {next(shares, share)}"
    sizes: list[tuple[int, str]] = []
    for alias in aliases():
        named = replace(config, model=replace(config.model, name=alias))
        try:
            other = build.choose_model(named)
        except HybridGenError:
            continue
        if other.spec.name != choice.spec.name and fits(other, min(prompt_tokens, other.spec.max_positions - gen)):
            sizes.append((weight_bytes(other.family, other.spec, other.dtype), alias))
    if sizes:
        return f"a smaller model: --model {max(sizes)[1]}"
    return "nothing on this machine"


def _span(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
