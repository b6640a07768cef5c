"""Reading Hugging Face configs: the fields that all families share, with errors that name the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridgen.errors import CheckpointError, ConfigError
from hybridgen.models.spec import LayerSpec, RopeScaling, RopeSpec


def require(name: str, config: Mapping[str, Any], key: str) -> Any:
    """A field without which a model has no shape; CheckpointError if it is missing."""
    if config.get(key) is None:
        raise CheckpointError(f"model {name}: its config has no {key!r}")
    return config[key]


def require_size(name: str, config: Mapping[str, Any], key: str) -> int:
    """A field that counts something: an integer >= 1."""
    value = require(name, config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"model {name}: its config says {key} = {value!r} (allowed: an integer >= 1)")
    return value


def number(name: str, config: Mapping[str, Any], key: str, default: float) -> float:
    """A field that is a positive number."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"model {name}: its config says {key} = {value!r} (allowed: a number > 0)")
    return float(value)


def layers_from_config(
    name: str, config: Mapping[str, Any], hidden: int, kv_heads_key: str | None, rope: RopeSpec | None
) -> tuple[LayerSpec, ...]:
    """Equal layers of full attention; CheckpointError where the head counts do not go together."""
    heads = require_size(name, config, "num_attention_heads")
    grouped = kv_heads_key is not None and config.get(kv_heads_key) is not None
    kv_heads = require_size(name, config, kv_heads_key) if grouped and kv_heads_key is not None else heads
    head_dim = require_size(name, config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if heads % kv_heads:
        raise CheckpointError(
            f"model {name}: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    if head_dim < 1 or head_dim % 8:
        raise CheckpointError(f"model {name}: head_dim = {head_dim} is not supported (allowed: multiples of 8)")
    layer = LayerSpec(heads, kv_heads, head_dim, rope)
    return (layer,) * require_size(name, config, "num_hidden_layers")


def common_fields(name: str, config: Mapping[str, Any], tied_by_default: bool = False) -> dict[str, Any]:
    """Keyword arguments of ModelSpec that every family reads the same way."""
    eos = config.get("eos_token_id")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return {
        "name": name,
        "architecture": config["architectures"][0],
        "hidden_size": require_size(name, config, "hidden_size"),
        "vocab_size": require_size(name, config, "vocab_size"),
        "max_positions": require_size(name, config, "max_position_embeddings"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", tied_by_default)),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        "bos_token_id": config.get("bos_token_id"),
        "torch_dtype": dtype,
    }


def rope_from_config(name: str, config: Mapping[str, Any]) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older configs)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"model {name}: its config says rope parameters = {given!r} (allowed: a mapping)")
    theta = number(name, given, "rope_theta", number(name, config, "rope_theta", 10_000.0))
    factors = config.get("rope_factors")  # from a GGUF file's rope_freqs tensor
    kind = given.get("rope_type") or given.get("type") or "default"
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=float(require(name, given, "factor")),
            low_freq_factor=float(require(name, given, "low_freq_factor")),
            high_freq_factor=float(require(name, given, "high_freq_factor")),
            original_max_positions=require_size(name, given, "original_max_position_embeddings"),
        )
    elif kind != "default":
        raise ConfigError(f"model {name}: rope type {kind!r} is not supported (allowed: 'default', 'llama3')")
    return RopeSpec(theta, scaling, tuple(float(f) for f in factors) if factors else None)
