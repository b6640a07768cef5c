"""Settings that were left open, chosen so that a job fits into the memory there is.

What was given is never changed. What was left open is given up in this order, cheapest in speed first:

1. the prefill's pieces, 4096 tokens down to 512: their activations are small then, and the prefill a little longer;
2. room for more fetched rows than the floor has (`schedule.most_extra`): feedback keeps the floor;
3. exact layers on the device, one by one: such a layer waits for its scan in every step;
4. the window, down to 256 tokens: those beyond it can still be chosen from the host;
5. a sketch on the GPU: the CPU scores by it then;
6. weights on the device: each byte that is streamed crosses the link in every step;
7. weights in memory: what neither device nor host has room for is read from disk in every step, as little as will do.

So of all combinations the first that fits is taken, in lexicographic order with the dearest setting first. The order
does not depend on the memory there is, hence more memory never gives a worse choice, and if anything fits, it is found.
A cheap setting gets back what room a dear one leaves: where a layer had to go, the pieces may be large again.

Pure: memory is not looked at here but given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hybridgen.config import Config, with_settings
from hybridgen.config_rules import ON_GPU_ALONE
from hybridgen.engine import build, memory_plan
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode, exact_layers, layer_modes
from hybridgen.models.loading import layer_shapes
from hybridgen.placement.plan import MemoryPlan
from hybridgen.placement.weight_split import possible_shares

#: Settings without an `auto`: they are open if the caller says that nobody gave them (`free`).
WITHOUT_AUTO = ("cache.gpu_window", "schedule.most_extra", "schedule.mode")
WINDOWS = (384, 256)  # tried below the default
CHUNKS = (2048, 1024, 512)  # likewise, on a GPU
_WEIGHTS = "placement.weights_on_gpu"
_ON_DISK = "placement.weights_on_disk"

Limits = tuple[int | None, int]  # bytes of the device (None: no GPU) and of the host
Option = Mapping[str, Any]  # settings by dotted path


@dataclass(frozen=True)
class Chosen:
    """A setting that was left open: its value, and the one that it has where memory is plenty."""

    path: str
    value: Any
    best: Any

    def describe(self) -> str:
        less = "" if self.value == self.best else f"  instead of {_show(self.best)}, to fit"
        return f"{self.path:<26} {_show(self.value)}{less}"


@dataclass(frozen=True)
class Settled:
    """A config with nothing left open, what it needs, and what was chosen. Check whether `plan` fits."""

    config: Config
    modes: tuple[LayerMode, ...]
    plan: MemoryPlan
    chosen: tuple[Chosen, ...]  # dearest first


def settle(
    choice: ModelChoice, config: Config, batch: int, capacity: int, limits: Limits, free: Collection[str] = ()
) -> Settled:
    """The best settings with which `batch` sequences of up to `capacity` tokens fit; if none do, the nearest miss.

    free: those of WITHOUT_AUTO that nobody gave.
    """
    layers, weights_open = choice.spec.num_layers, config.placement.weights_on_gpu == "auto"
    disk_open = config.placement.weights_on_disk == "auto"
    settings = _open_settings(choice, config, free)
    combinations = [_merged(options) for options in product(*settings)]
    configs = [with_settings(config, option) for option in combinations]
    modes = [layer_modes(some, layers) for some in configs]
    plans = [memory_plan.plan_memory(choice, *pair, batch, capacity) for pair in zip(configs, modes, strict=True)]
    index, plan = fit_weights(choice, config, plans, limits)
    best, taken = _merged(options[0] for options in settings), combinations[index]
    config = memory_plan.settled(configs[index], plan)
    chosen = [Chosen(_WEIGHTS, plan.weights_on_gpu, 1.0)] if weights_open else []
    if disk_open and plan.weights_on_disk:
        chosen.insert(0, Chosen(_ON_DISK, plan.weights_on_disk, 0.0))
    if config.schedule.mode != "feedback":
        taken.pop("schedule.most_extra", None)  # it means nothing
    chosen += [Chosen(path, value, best[path]) for path, value in taken.items()]
    return Settled(config, modes[index], plan, tuple(chosen))


def fit_weights(
    choice: ModelChoice, config: Config, plans: Sequence[MemoryPlan], limits: Limits
) -> tuple[int, MemoryPlan]:
    """The largest share of the weights on the device with which one of the plans fits, and the first that does.

    Plans for the same config but for where the weights lie; returns its index, too. Weights come to lie on disk as
    asked, or else where none of the plans fits without. If nothing does, the nearest miss.
    """
    asked, on_disk = config.placement.weights_on_gpu, config.placement.weights_on_disk
    shares, disk = [asked if asked != "auto" else 1.0], 0.0 if on_disk == "auto" else on_disk
    if asked == "auto":
        shares = [share for share in _possible(choice) if share <= 1.0 - disk + 1e-9] or [0.0]
        if disk:
            shares.insert(0, 1.0 - disk)
        if choice.device.type == "cpu":  # the host's memory is the device's: nothing is gained in its own tier
            del shares[1:]
    bare = [memory_plan.without_weights(plan) for plan in plans]
    device_limit, host_limit = limits
    missing: list[tuple[int, float, int]] = []  # bytes, share, plan
    for share in shares:
        weights = memory_plan.footprint(choice, config, share, disk)
        for index, (plan, (device, host)) in enumerate(zip(plans, bare, strict=True)):
            device += weights.device_bytes + weights.staging_bytes
            host += weights.host_bytes + weights.stages_bytes + (device if plan.device_is_host else 0)
            over = 0 if device_limit is None else max(0, device - device_limit)
            over += max(0, host - host_limit)
            if not over:
                return index, _placed(choice, config, plan, share, disk)
            missing.append((over, share, index))
    found = _fit_with_disk(choice, config, bare, limits) if on_disk == "auto" else None
    if found is not None:
        index, share, disk = found
        return index, _placed(choice, config, plans[index], share, disk)
    _, share, index = min(missing, key=lambda miss: miss[0])
    return index, _placed(choice, config, plans[index], share, disk)


def _fit_with_disk(
    choice: ModelChoice, config: Config, bare: Sequence[tuple[int, int]], limits: Limits
) -> tuple[int, float, float] | None:
    """The smallest share of the weights on disk with which a plan fits: the plan's index, shares on device and disk.

    bare: what each plan needs beside weights, on the device and on the host. A plan has as much on the device as fits
    there; where the device is the host, what is not on disk.
    """
    asked, possible, (device_limit, host_limit) = config.placement.weights_on_gpu, _possible(choice), limits
    one_memory = choice.device.type == "cpu"

    def needs(share: float, disk: float) -> tuple[int, int]:
        """Of weights, on the device and on the host."""
        weights = memory_plan.footprint(choice, config, share, disk)
        on_device = weights.device_bytes + weights.staging_bytes
        return on_device, weights.host_bytes + weights.stages_bytes + (on_device if one_memory else 0)

    best: tuple[float, float, int] | None = None  # disk, -share, plan
    is_together = one_memory and asked == "auto"
    together = [needs(share, 1.0 - share)[1] for share in possible] if is_together else []
    on_device = [needs(share, 0.0)[0] for share in possible] if not is_together and asked == "auto" else []
    for index, (device, host) in enumerate(bare):
        room = host_limit - host - (device if one_memory else 0)
        share: float | None
        if is_together:
            shares = (share for share, needed in zip(possible, together, strict=True) if needed <= room)
            share = next(shares, None)
            disk = None if share is None else 1.0 - share
        else:
            candidates = zip(possible, on_device, strict=True) if asked == "auto" else [(asked, needs(asked, 0.0)[0])]
            fits = (some for some, needed in candidates if device_limit is None or needed <= device_limit - device)
            share = next(fits, None)
            disk = None if share is None else _least_disk(possible, share, room, needs)
        if share is not None and disk is not None and (best is None or (disk, -share) < best[:2]):
            best = (disk, -share, index)
    return None if best is None else (best[2], -best[1], best[0])


def _least_disk(
    possible: Sequence[float], share: float, room: int, needs: Callable[[float, float], tuple[int, int]]
) -> float | None:
    """The smallest share on disk that leaves the host no more than `room`, beside `share` on the device."""
    kept = [*(some for some in possible if some > share), share]  # on device and host, from everything downwards
    if needs(share, 1.0 - share)[1] > room:
        return None
    low, high = 0, len(kept) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(share, 1.0 - kept[middle])[1] <= room else (middle + 1, high)
    return 1.0 - kept[high]


def _possible(choice: ModelChoice) -> list[float]:
    return possible_shares(layer_shapes(choice.family, choice.spec))


def _placed(choice: ModelChoice, config: Config, plan: MemoryPlan, share: float, disk: float) -> MemoryPlan:
    return memory_plan.place_weights(choice, with_settings(config, {_WEIGHTS: share, _ON_DISK: disk}), plan)


def _open_settings(choice: ModelChoice, config: Config, free: Collection[str]) -> list[list[Option]]:
    """For each setting that is open, dearest first, what it may be, best first."""
    cuda, hybrid = choice.device.type == "cuda", config.attention.executor == "hybrid"
    found: list[list[Option]] = []
    two_homes = config.cache.sketch != "none" and config.cache.sketch not in ON_GPU_ALONE
    if hybrid and two_homes and config.cache.sketch_home == "auto":
        # The GPU scores every token, so there is no scan to be shortened: feedback and a sketch there exclude
        # each other. A schedule that was asked for decides.
        homes: list[Option] = [{"cache.sketch_home": "gpu"}, {"cache.sketch_home": "host"}]
        if "schedule.mode" in free:
            homes = [{**homes[0], "schedule.mode": "fixed"}, {**homes[1], "schedule.mode": config.schedule.mode}]
        elif config.schedule.mode != "fixed":
            del homes[0]
        found.append(homes if cuda else homes[-1:])
    if cuda and hybrid and "cache.gpu_window" in free:
        window = config.cache.gpu_window
        sizes = [window, *(size for size in WINDOWS if size < window)]
        found.append([{"cache.gpu_window": size} for size in sizes])
    if hybrid and config.model.exact_layers_mode == "auto":
        exact = len(exact_layers(config, choice.spec.num_layers))
        modes = ["resident", *range(exact - 1, 0, -1), "select"]
        found.append([{"model.exact_layers_mode": mode} for mode in modes])
    if hybrid and config.schedule.mode == "feedback" and "schedule.most_extra" in free:
        extras = sorted({config.schedule.most_extra, 1.0}, reverse=True)
        found.append([{"schedule.most_extra": extra} for extra in extras])
    if config.runtime.prefill_chunk == 0:
        largest = build.prefill_chunk(config, choice.device)
        pieces = [largest, *(size for size in CHUNKS if cuda and size < largest)]
        found.append([{"runtime.prefill_chunk": size} for size in pieces])
    return found


def _merged(options: Iterable[Option]) -> dict[str, Any]:
    return {path: value for option in options for path, value in option.items()}


def _show(value: Any) -> str:
    """Shares are rounded down: what is shown fits, too."""
    return str(math.floor(value * 10_000) / 10_000) if isinstance(value, float) else str(value)
