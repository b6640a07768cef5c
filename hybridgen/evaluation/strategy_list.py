"""What a strategy does, in words and bytes, for a model and a length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridgen.config import Config
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.evaluation.byte_formulas import kept_by_eviction, step_bytes
from hybridgen.kv_cache.page_bounds import PAGE
from hybridgen.models.spec import ModelSpec
from hybridgen.offload.groupwise import GROUP

_RUNS = {
    "full": "device",
    "streamed": "device",
    "on_cpu": "CPU; device for the window",
    "hybrid": "device, over chosen rows",
    "evicting": "device",
}


def describe_strategy(
    name: str,
    config: Config,
    modes: Sequence[LayerMode],
    spec: ModelSpec,
    dtype: torch.dtype,
    tokens: int,
    on_cuda: bool,
) -> list[str]:
    """A row of the table: name, where attention runs, what is kept where, megabytes of a decode step.

    `<=`: by what of the host's tokens is fetched at most.
    """
    moved = step_bytes(spec, config, modes, dtype, tokens, on_cuda)
    is_bound = any(mode in ("select", "lookahead") for mode in modes) and _is_bound(config)
    numbers = [moved.d2h, moved.h2d, moved.dram_read]
    cells = [f"{number / 1e6:.2f}" for number in numbers]
    if is_bound:
        cells[1:] = [f"<= {cell}" for cell in cells[1:]]
    executor: str = config.attention.executor
    return [name, _RUNS.get(executor, executor), _kept(config, modes, tokens), *cells]


def _kept(config: Config, modes: Sequence[str], tokens: int) -> str:
    executor: str = config.attention.executor
    cache = config.cache
    if executor == "full":
        return "all on the device"
    if executor == "evicting":
        kept = kept_by_eviction(config, tokens)
        return f"{kept} tokens of each layer on the {config.eviction.home}, the rest is dropped"
    words = [f"{cache.sinks} + {cache.gpu_window} tokens on the device, the rest on the host"]
    resident = modes.count("resident")
    if resident:
        words.append(f"{resident} of {len(modes)} layers on the device")
    if cache.sketch != "none":
        home = "device" if cache.sketch_home == "gpu" else "host" if cache.sketch.startswith("int") else "device"
        words.append(f"{_sketch(config)} on the {home}")
    if cache.pool_capacity < 1.0:
        words.append(f"{100 * cache.pool_capacity:g} % of the prompt's host rows may be chosen ({cache.pool_policy})")
    if executor == "hybrid":
        what = "V" if config.attention.lookahead == "logits" else "K and V"
        words.append(f"{what} fetched {_chosen(config)}")
    elif executor == "streamed":
        packed = "" if cache.compress == "none" else f", {cache.compress} in groups of {GROUP} channels"
        words.append(f"all of which comes at every step{packed}")
        if config.placement.kv_on_disk:
            words.append(f"the oldest {100 * config.placement.kv_on_disk:g} % of them in a file")
    return "; ".join(words)


def _sketch(config: Config) -> str:
    cache = config.cache
    if cache.sketch == "partial":
        return f"{100 * cache.partial_ratio:g} % of the columns of skewed keys"
    return f"bounds of pages of {PAGE} tokens" if cache.sketch == "pages" else f"{cache.sketch} of the keys"


def _chosen(config: Config) -> str:
    """By which rule."""
    selection = config.selection
    rules = {"mass": selection.keep_mass, "keep": selection.keep}
    if selection.alpha is None:
        return "by " + ", ".join(f"{word} {value:g}" for word, value in rules.items() if value is not None)
    words = [f"within {selection.alpha:g} of the largest logit"]
    if selection.keep_mass is not None:
        words.append(f"by mass {selection.keep_mass:g}")
    if selection.keep is not None:
        words.append(f"at most {selection.keep:g} of them")
    return ", ".join(words)


def _is_bound(config: Config) -> bool:
    return config.selection.keep_mass is not None or config.selection.alpha is not None
