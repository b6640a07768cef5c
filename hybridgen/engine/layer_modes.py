"""Which executor each layer gets: contracts.md, "Exact layers" and the three lookahead modes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hybridgen.config import Config
from hybridgen.errors import ConfigError
from hybridgen.models.query_maps import read_exact_layers
from hybridgen.selection.eviction import policy_of

LayerMode = Literal["resident", "streamed", "on_cpu", "evicting", "select", "lookahead"]
"""resident: all KV on the device. streamed: the host's KV comes to the device at every step, whole. on_cpu: the CPU
attends to it. evicting: some tokens are left, of which all are attended to. select: tokens chosen by the true query,
which is waited for. lookahead: tokens chosen by the query predicted from the previous layer's input."""


EXACT_LAYERS = (0, 1, 2)  # where nothing else is said: there `x` predicts badly in every model seen (lookahead.md)


def chooses(mode: LayerMode) -> bool:
    """Whether only some of the host's tokens are attended to."""
    return mode in ("select", "lookahead")


def all_resident(num_layers: int) -> tuple[LayerMode, ...]:
    """Full attention: no host tier at all."""
    return tuple("resident" for _ in range(num_layers))


def layer_modes(config: Config, num_layers: int) -> tuple[LayerMode, ...]:
    """One mode a layer. Layer 0 has no predecessor, so it is always exact where queries are predicted.

    `auto` is resident, until a memory budget has decided (engine/memory_budget.py).
    """
    if config.attention.executor == "full":
        return all_resident(num_layers)
    if config.attention.executor in ("streamed", "on_cpu"):
        return (config.attention.executor,) * num_layers
    asked_layers, source = asked_exact_layers(config)
    unknown = [layer for layer in asked_layers if layer >= num_layers]
    if unknown and source != "default":
        raise ConfigError(f"{source}: exact layers {unknown} are no layers of this model (0 to {num_layers - 1})")
    if config.attention.executor == "evicting":
        policy_of(config.eviction)  # an error comes early
        resident = [layer for layer in asked_layers if layer < num_layers]
        return tuple("resident" if layer in resident else "evicting" for layer in range(num_layers))
    exact, asked = exact_layers(config, num_layers), config.model.exact_layers_mode
    resident = exact[: asked if isinstance(asked, int) else 0 if asked == "select" else len(exact)]
    other: LayerMode = "select" if config.attention.lookahead == "off" else "lookahead"
    modes = {layer: other for layer in range(num_layers)}
    modes |= {layer: "resident" if layer in resident else "select" for layer in exact}
    return tuple(modes.values())


def exact_layers(config: Config, num_layers: int) -> list[int]:
    """The layers of the model that never use a predicted query."""
    return sorted(layer for layer in {0, *asked_exact_layers(config)[0]} if layer < num_layers)


def asked_exact_layers(config: Config) -> tuple[tuple[int, ...], str]:
    """The layers, and who names them: the setting, else the predictor's file, else nobody (the default)."""
    asked, file = config.model.exact_layers, predictor_file(config)
    if asked != "auto":
        return asked, "model.exact_layers"
    return (EXACT_LAYERS, "default") if file is None else (read_exact_layers(file), str(file))


def fits_to_prompts(config: Config) -> bool:
    """Whether queries are predicted by maps that each prefill fits (`engine/prompt_maps.py`)."""
    attention = config.attention
    return attention.executor == "hybrid" and attention.predictor == "prompt" and attention.lookahead != "off"


def predictor_file(config: Config) -> Path | None:
    """The file of fitted maps (`hybridgen.calibrate`), where these predict queries."""
    attention = config.attention
    named = attention.executor == "hybrid" and attention.predictor.endswith(".safetensors")
    return Path(attention.predictor) if named else None
