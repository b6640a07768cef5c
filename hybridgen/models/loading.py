"""Weights of a model as this engine wants them: from a checkpoint, or random with a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.errors import CheckpointError
from hybridgen.models.base import DecoderModel
from hybridgen.models.checkpoint import Checkpoint
from hybridgen.models.spec import ModelSpec, TensorSource

Progress = Callable[[int], None]  # called with the bytes of each finished tensor

RANDOM_STD = 0.02


@dataclass
class ModelWeights:
    """Tensors by the names of `global_tensors` and, layer by layer, of `layer_tensors`."""

    shared: dict[str, Tensor]
    layers: list[dict[str, Tensor]]


def weight_bytes(family: type[DecoderModel], spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all weights, without loading any."""
    sources = list(family.global_tensors(spec).values())
    for layer in range(spec.num_layers):
        sources += family.layer_tensors(spec, layer).values()
    return sum(torch.Size(source.shape).numel() for source in sources) * dtype.itemsize


def load_weights(
    family: type[DecoderModel],
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read a checkpoint; CheckpointError names a tensor that is missing or has another shape."""

    def load(source: TensorSource) -> Tensor:
        parts = [checkpoint.tensor(name) for name in source.parts]
        rows = sum(part.shape[0] for part in parts)
        found = (rows, *parts[0].shape[1:])
        if found != source.shape or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise CheckpointError(
                f"{checkpoint.path}: {' + '.join(source.parts)} has shape {found}, the config asks for "
                f"{source.shape}: config and weights do not belong together"
            )
        tensor = torch.empty(source.shape, dtype=dtype, device=device)
        start = 0
        for part in parts:
            tensor[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        if progress is not None:
            progress(tensor.numel() * tensor.element_size())
        return tensor

    return _collect(family, spec, lambda _, source: load(source))


def random_weights(
    family: type[DecoderModel], spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int
) -> ModelWeights:
    """Normal with a standard deviation of 0.02, norms at one, biases at zero; made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(name: str, source: TensorSource) -> Tensor:
        tensor = torch.empty(source.shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            return tensor.zero_()
        if "norm" in name:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, RANDOM_STD, generator=generator)

    return _collect(family, spec, make)


def _collect(family: type[DecoderModel], spec: ModelSpec, make: Callable[[str, TensorSource], Tensor]) -> ModelWeights:
    def tensors(sources: Mapping[str, TensorSource]) -> dict[str, Tensor]:
        return {name: make(name, source) for name, source in sources.items()}

    shared = tensors(family.global_tensors(spec))
    return ModelWeights(shared, [tensors(family.layer_tensors(spec, i)) for i in range(spec.num_layers)])
