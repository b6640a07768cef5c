"""Reading Hugging Face configs: the fields that all families share, with errors that name the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridgen.errors import CheckpointError, ConfigError
from hybridgen.models.spec import RopeScaling, RopeSpec


def require(name: str, config: Mapping[str, Any], key: str) -> Any:
    """A field without which a model has no shape; CheckpointError if it is missing."""
    if config.get(key) is None:
        raise CheckpointError(f"model {name}: its config has no {key!r}")
    return config[key]


def common_fields(name: str, config: Mapping[str, Any], tied_by_default: bool = False) -> dict[str, Any]:
    """Keyword arguments of ModelSpec that every family reads the same way."""
    eos = config.get("eos_token_id")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return {
        "name": name,
        "architecture": config["architectures"][0],
        "hidden_size": require(name, config, "hidden_size"),
        "vocab_size": require(name, config, "vocab_size"),
        "max_positions": require(name, config, "max_position_embeddings"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", tied_by_default)),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        "bos_token_id": config.get("bos_token_id"),
        "torch_dtype": dtype,
    }


def rope_from_config(name: str, config: Mapping[str, Any]) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older configs)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    factors = config.get("rope_factors")  # from a GGUF file's rope_freqs tensor
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=float(require(name, parameters, "factor")),
            low_freq_factor=float(require(name, parameters, "low_freq_factor")),
            high_freq_factor=float(require(name, parameters, "high_freq_factor")),
            original_max_positions=int(require(name, parameters, "original_max_position_embeddings")),
        )
    elif kind != "default":
        raise ConfigError(f"model {name}: rope type {kind!r} is not supported (allowed: 'default', 'llama3')")
    return RopeSpec(theta, scaling, tuple(float(f) for f in factors) if factors else None)
