"""Does the job fit? Decided from the plan alone, before anything is fetched or allocated."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from hybridgen.config import Config, with_settings
from hybridgen.engine import build, memory_plan
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode, all_resident, asked_exact_layers, fits_to_prompts, predictor_file
from hybridgen.engine.memory_budget import Chosen, settle
from hybridgen.engine.prompt_maps import FIT_TOKENS
from hybridgen.errors import HybridGenError, InsufficientMemoryError
from hybridgen.models.checkpoint import aliases
from hybridgen.models.loading import weight_bytes
from hybridgen.offload.disk import disk_folder, require_space, sweep
from hybridgen.placement.plan import GIB, MemoryPlan, format_bytes

SEQ_STEP = 256  # a suggested --seq is a multiple of this
# What stands where a setting was left open, by the dotted path: those that a memory budget may choose.
_OPEN = {
    "runtime.prefill_chunk": 0,
    "schedule.most_extra": None,
    "model.exact_layers_mode": "auto",
    "cache.gpu_window": None,
    "cache.sketch_home": "auto",
    "placement.weights_on_gpu": "auto",
    "placement.weights_on_disk": "auto",
}


@dataclass(frozen=True)
class Admission:
    """A plan that fits, each layer's mode, and what the user should be told."""

    plan: MemoryPlan
    modes: tuple[LayerMode, ...]
    notes: list[str]
    limits: tuple[int | None, int]
    check_fits: bool  # room for full attention's own cache, to check the answer
    config: Config  # as given, and what was left open settled
    chosen: tuple[Chosen, ...]  # what was left open

    def describe(self) -> str:
        runs = [(mode, [layer for layer, _ in run]) for mode, run in groupby(enumerate(self.modes), lambda m: m[1])]
        modes = ", ".join(f"{_span(layers)} {mode}" for mode, layers in runs)
        lines = [self.plan.describe(*self.limits), f"layers: {modes}"]
        lines += ["chosen, as nothing was asked for:"] if self.chosen else []
        lines += [f"    {choice.describe()}" for choice in self.chosen]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """For the report: the plan, what it had to fit into, and what was chosen so that it does."""
        device, host = self.limits
        chosen = {choice.path: choice.value for choice in self.chosen}
        return {**self.plan.to_dict(), "device_limit_bytes": device, "host_limit_bytes": host, "chosen": chosen}


def admit(
    choice: ModelChoice,
    config: Config,
    prompt_tokens: int,
    gen: int,
    batch: int,
    wants_check: bool = False,
    free: Collection[str] = (),
    limits: tuple[int | None, int] | None = None,
) -> Admission:
    """Plan the job; InsufficientMemoryError holds the plan and what would fit.

    free: settings without an `auto` that nobody gave, see `memory_budget.WITHOUT_AUTO`.
    limits: those of an earlier admission, where the weights, which the plan counts, have been loaded since; None: by
    what is free now.
    """
    capacity = prompt_tokens + gen
    if config.placement.kv_on_gpu is not None:
        config, free = build.with_kv_share(config, capacity), set(free) - {"cache.gpu_window"}
    notes = [note for note in (build.check_positions(choice, capacity, config.model.extend_positions),) if note]
    limits = limits or memory_plan.memory_limits(config, choice.device)
    asked = config.placement.gpu_memory_bytes
    if asked is not None and choice.device.type != "cuda":
        notes.append("there is no GPU: --gpu-memory has no effect")
    elif asked is not None and limits[0] is not None:
        notes.append(f"planned with {memory_plan.PLANNED_SHARE:.0%} of --gpu-memory: a plan may be a little off")
        if limits[0] < int(memory_plan.PLANNED_SHARE * asked):
            free_bytes = format_bytes(round(limits[0] / memory_plan.PLANNED_SHARE))
            notes.append(f"--gpu-memory {format_bytes(asked)} is more than is free: {free_bytes}")
    settled = settle(choice, config, batch, capacity, limits, free)
    plan, modes = settled.plan, settled.modes
    if not plan.fits(*limits):
        raise InsufficientMemoryError(
            f"{choice.spec.name} with {batch} x {capacity} tokens in {_name(choice.dtype)} does not fit\n"
            f"{plan.describe(*limits)}\n{_more_room(choice, config, batch, capacity, free, plan)}"
            f"what would fit: {_suggestion(choice, config, prompt_tokens, gen, batch, free)}"
        )
    config = settled.config
    notes += _files(choice, config, plan, batch, capacity)
    if config.attention.executor == "evicting":
        notes.append("tokens are evicted for good: what chooses (--keep, --lookahead, --schedule, ...) has no effect")
        if any(build.reindexes(config, layer) for layer in choice.spec.layers):
            notes.append("positions are those in the cache: eviction.positions = reindexed")
    elif config.attention.executor != "hybrid":
        notes.append("every token is attended to: what chooses (--keep, --lookahead, --schedule, ...) has no effect")
    if (file := predictor_file(config)) is not None:
        layers, source = asked_exact_layers(config)
        notes.append(f"queries are predicted by {file}; exact layers {list(layers)}, from {source}")
    if fits_to_prompts(config) and "lookahead" in modes:
        notes.append(f"queries are predicted by maps fitted to a batch's prompts together, up to {FIT_TOKENS} tokens")
    full = memory_plan.plan_memory(choice, config, all_resident(len(modes)), batch, capacity)
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
    return Admission(plan, modes, notes, limits, check_fits, config, settled.chosen)


def _files(choice: ModelChoice, config: Config, plan: MemoryPlan, batch: int, capacity: int) -> list[str]:
    """What will be written to disk, in words; DiskError if there is no room for all of it together."""
    notes, needed = [], 0
    folder = disk_folder(config.placement.disk_dir)
    kv = build.kv_disk_layout(config, choice.spec, batch, capacity, choice.dtype)
    copy = build.file_to_write(choice, config) if plan.disk_bytes else None
    if kv is not None or copy is not None:
        sweep(folder)
    if copy is not None:
        needed += copy.nbytes
        require_space(copy.path.parent, needed, "a copy of the decoder layers, to be read from disk,")
        size = f"{copy.nbytes / 1e9:.1f} GB"
        notes.append(f"{size} of weights are written once to {copy.path.parent}, for later runs as well")
    if kv is not None:
        require_space(folder, needed + kv.file_bytes, "the KV cache's share on disk" + (" and weights" if copy else ""))
        notes.append(f"{format_bytes(kv.file_bytes)} of the KV cache lie in a file")
    return notes


def _more_room(
    choice: ModelChoice, config: Config, batch: int, capacity: int, free: Collection[str], plan: MemoryPlan
) -> str:
    """Lines that name each thing asked for without which the same job fits; `plan` is the one that does not."""
    lines = []
    for path, value in _OPEN.items():
        section, name = path.split(".")
        given = getattr(getattr(config, section), name)
        if given == value or path in free or (value is None and given == getattr(getattr(Config(), section), name)):
            continue
        opened = config if value is None else with_settings(config, {path: value})
        limits = memory_plan.memory_limits(opened, choice.device)
        if settle(choice, opened, batch, capacity, limits, {*free, path}).plan.fits(*limits):
            lines.append(f"it fits without {path} = {given}, which was asked for and so is not changed\n")
    if config.placement.gpu_memory_bytes is not None and choice.device.type == "cuda":
        without = replace(config, placement=replace(config.placement, gpu_memory_bytes=None))
        if plan.fits(*memory_plan.memory_limits(without, choice.device)):
            least = math.ceil(100 * plan.device_bytes / memory_plan.PLANNED_SHARE / GIB) / 100
            lines.append(f"it fits with --gpu-memory {least:.2f}GiB\n")
    return "".join(lines)


def _suggestion(
    choice: ModelChoice, config: Config, prompt_tokens: int, gen: int, batch: int, free: Collection[str]
) -> str:
    """The first of: a smaller --seq, a smaller --dtype, another --weights-on-gpu, a smaller model."""

    def planned(candidate: ModelChoice, tokens: int, asked: Config = config) -> MemoryPlan:
        limits = memory_plan.memory_limits(asked, candidate.device)
        return settle(candidate, asked, batch, tokens + gen, limits, free).plan

    def fits(candidate: ModelChoice, tokens: int, asked: Config = config) -> bool:
        return planned(candidate, tokens, asked).fits(*memory_plan.memory_limits(asked, candidate.device))

    low, high = 0, prompt_tokens // SEQ_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(choice, middle * SEQ_STEP) else (low, middle - 1)
    if low:
        return f"--seq {low * SEQ_STEP}"
    if choice.dtype == torch.float32 and fits(choice.with_dtype(torch.bfloat16), prompt_tokens):
        return "--dtype bfloat16"
    automatic = with_settings(config, {"placement.weights_on_gpu": "auto"})
    if fits(choice, prompt_tokens, automatic):
        share = planned(choice, prompt_tokens, automatic).weights_on_gpu
        assert share is not None
        rounded = (math.floor(share * 10**digits) / 10**digits for digits in (2, 3, 4))
        shares = (some for some in rounded if fits(choice, prompt_tokens, memory_plan.with_share(config, some)))
        return f"--weights-on-gpu {next(shares, share)}"
    sizes: list[tuple[int, str]] = []
    for alias in aliases():
        named = with_settings(config, {"model.name": alias})
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
