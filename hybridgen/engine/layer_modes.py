"""Which executor each layer gets: contracts.md, "Exact layers" and the three lookahead modes."""

from __future__ import annotations

from typing import Literal

from hybridgen.config import Config, ModelConfig
from hybridgen.errors import ConfigError
from hybridgen.types import ExactMode

LayerMode = Literal["resident", "select", "lookahead"]
"""resident: all KV on the device. select: tokens chosen by the true query, which is waited for.
lookahead: tokens chosen by the query predicted from the previous layer's input."""


def all_resident(num_layers: int) -> tuple[LayerMode, ...]:
    """Full attention: no host tier at all."""
    return tuple("resident" for _ in range(num_layers))


def layer_modes(config: Config, num_layers: int, exact: ExactMode) -> tuple[LayerMode, ...]:
    """One mode a layer. Layer 0 has no predecessor, so it is always exact."""
    if config.attention.executor == "full":
        return all_resident(num_layers)
    unknown = [layer for layer in config.model.exact_layers if layer >= num_layers]
    if unknown and config.model.exact_layers != ModelConfig().exact_layers:
        raise ConfigError(f"model.exact_layers: {unknown} are no layers of this model (0 to {num_layers - 1})")
    exact_layers = {0, *config.model.exact_layers}
    other: LayerMode = "select" if config.attention.lookahead == "off" else "lookahead"
    return tuple(exact if layer in exact_layers else other for layer in range(num_layers))
