"""Fitted maps that predict queries, in a safetensors file that `hybridgen.calibrate` writes.

For each layer but the first `layers.<i>.query.weight` [Hq * d, hidden] and `layers.<i>.query.bias` [Hq * d]: what
replaces Wq where the layer's query is predicted from the input of the layer before, or of the one that lies
`lookahead_layers` before. Metadata: `checkpoint`, the weights that they were fitted to (`checkpoint_key`),
`exact_layers`, a JSON list, and `lookahead_layers` (1 where it is not said).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hybridgen.errors import ConfigError
from hybridgen.models.base import QueryMap
from hybridgen.models.spec import LayerSpec
from hybridgen.output import write_whole

_SETTING = "attention.predictor"


def query_map_elements(layer: LayerSpec, hidden_size: int) -> int:
    """Numbers in one layer's map."""
    return layer.num_heads * layer.head_dim * (hidden_size + 1)


def write_query_maps(
    file: Path,
    maps: Mapping[int, QueryMap],
    exact_layers: Sequence[int],
    checkpoint: str,
    about: Mapping[str, str],
    lookahead_layers: int = 1,
) -> None:
    """about: further metadata, for people."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, fitted in maps.items():
        assert fitted.bias is not None
        tensors |= {_name(layer, "weight"): fitted.weight.cpu(), _name(layer, "bias"): fitted.bias.cpu()}
    metadata = {**about, "checkpoint": checkpoint, "exact_layers": json.dumps(list(exact_layers))}
    metadata["lookahead_layers"] = str(lookahead_layers)
    write_whole("--out", file, save(tensors, metadata))


def read_query_maps(
    file: Path, layers: Mapping[int, LayerSpec], hidden_size: int, device: torch.device, dtype: torch.dtype
) -> dict[int, QueryMap]:
    """The maps of these layers, on the device."""
    maps = {}
    with _opened(file) as found:
        names = set(found.keys())
        for layer, spec in layers.items():
            width = spec.num_heads * spec.head_dim
            parts = []
            for part, shape in (("weight", (width, hidden_size)), ("bias", (width,))):
                name = _name(layer, part)
                if name not in names:
                    raise ConfigError(f"{_SETTING} = {file}: has no {name}: this layer's query is not predicted by it")
                tensor = found.get_tensor(name)
                if tensor.shape != shape:
                    raise ConfigError(f"{_SETTING} = {file}: {name} is {tuple(tensor.shape)}, must be {shape}")
                parts.append(tensor.to(device, dtype))
            maps[layer] = QueryMap(*parts)
    return maps


def read_checkpoint_key(file: Path) -> str:
    """Which weights the file was made for."""
    return _metadata(file)["checkpoint"]


def read_lookahead_layers(file: Path) -> int:
    """How many layers before its own a layer's query is predicted by the maps."""
    return int(_metadata(file).get("lookahead_layers", "1"))


def read_exact_layers(file: Path) -> tuple[int, ...]:
    """The layers that the file says are predicted too badly."""
    return tuple(json.loads(_metadata(file)["exact_layers"]))


def _metadata(file: Path) -> dict[str, str]:
    try:
        state = file.stat()
    except OSError as error:
        raise ConfigError(f"{_SETTING} = {file}: {error.strerror or error}") from None
    return _metadata_of(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _metadata_of(file: Path, changed_ns: int, size: int) -> dict[str, str]:
    """A memory budget asks a hundred times."""
    with _opened(file) as found:
        metadata: dict[str, str] = found.metadata() or {}
    try:
        layers = json.loads(metadata["exact_layers"])
        if "checkpoint" not in metadata or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise ValueError
        int(metadata.get("lookahead_layers", "1"))
    except (KeyError, ValueError, TypeError):
        raise ConfigError(f"{_SETTING} = {file}: no file that hybridgen.calibrate wrote") from None
    return metadata


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as found:
            yield found
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{_SETTING} = {file}: no safetensors file that can be read ({error})") from None


def _name(layer: int, part: str) -> str:
    return f"layers.{layer}.query.{part}"
