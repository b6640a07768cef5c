"""Settings that were left open, chosen so that a job fits into the memory there is.

What was given is never changed. What was left open is given up in this order, cheapest in speed first:

1. the prefill's pieces, 4096 tokens down to 512: their activations are small then, and the prefill a little longer;
2. room for more fetched rows than the floor has (`schedule.most_extra`): feedback keeps the floor;
3. exact layers on the device, one by one: such a layer waits for its scan in every step;
4. the window, down to 256 tokens: those beyond it can still be chosen from the host;
5. a sketch on the GPU: the CPU scores by it then;
6. weights on the device: each byte that is streamed crosses the link in every step.

So of all combinations the first that fits is taken, in lexicographic order with the dearest setting first. The order
does not depend on the memory there is, hence more memory never gives a worse choice, and if anything fits, it is found.
A cheap setting gets back what room a dear one leaves: where a layer had to go, the pieces may be large again.

Pure: memory is not looked at here but given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hybridgen.config import ON_GPU_ALONE, Config, with_settings
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
    settings = _open_settings(choice, config, free)
    combinations = [_merged(options) for options in product(*settings)]
    configs = [with_settings(config, option) for option in combinations]
    modes = [layer_modes(some, layers) for some in configs]
    plans = [memory_plan.plan_memory(choice, *pair, batch, capacity) for pair in zip(configs, modes, strict=True)]
    index, plan = fit_weights(choice, config, plans, limits)
    best, taken = _merged(options[0] for options in settings), combinations[index]
    config = memory_plan.settled(configs[index], plan)
    chosen = [Chosen(_WEIGHTS, plan.weights_on_gpu, 1.0)] if weights_open else []
    if config.schedule.mode != "feedback":
        taken.pop("schedule.most_extra", None)  # it means nothing
    chosen += [Chosen(path, value, best[path]) for path, value in taken.items()]
    return Settled(config, modes[index], plan, tuple(chosen))


def fit_weights(
    choice: ModelChoice, config: Config, plans: Sequence[MemoryPlan], limits: Limits
) -> tuple[int, MemoryPlan]:
    """The largest share of the weights with which one of the plans fits, and the first plan that does; its index.

    Plans for the same config but for where the weights lie. If none fits with any share, the nearest miss.
    """
    asked = config.placement.weights_on_gpu
    shares = [1.0 if asked == "auto" else asked]
    if asked == "auto" and choice.device.type != "cpu":
        shares = possible_shares(layer_shapes(choice.family, choice.spec))
    bare = [memory_plan.without_weights(plan) for plan in plans]
    device_limit, host_limit = limits
    missing: list[tuple[int, float, int]] = []  # bytes, share, plan
    for share in shares:
        weights = memory_plan.footprint(choice, config, share)
        for index, (plan, (device, host)) in enumerate(zip(plans, bare, strict=True)):
            device += weights.device_bytes + weights.staging_bytes
            host += weights.host_bytes + (device if plan.device_is_host else 0)
            over = 0 if device_limit is None else max(0, device - device_limit)
            over += max(0, host - host_limit)
            if not over:
                return index, memory_plan.place_weights(choice, memory_plan.with_share(config, share), plan)
            missing.append((over, share, index))
    _, share, index = min(missing, key=lambda miss: miss[0])
    return index, memory_plan.place_weights(choice, memory_plan.with_share(config, share), plans[index])


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
