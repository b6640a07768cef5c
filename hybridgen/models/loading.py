"""Weights of a model as this engine wants them: from a checkpoint, or random with a seed.

A tensor arrives in blocks of rows, and each row goes to where it is to stay: no matrix that stays in host
memory is ever whole on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridgen.errors import CheckpointError
from hybridgen.models.base import DecoderModel
from hybridgen.models.checkpoint import Checkpoint
from hybridgen.models.spec import ModelSpec, TensorSource

Progress = Callable[[int], None]  # called with the bytes of each finished tensor

RANDOM_STD = 0.02
# Of random numbers made at a time, in whole blocks of 64 rows. A fixed number: on a GPU the values depend on it.
RANDOM_BLOCK_ELEMENTS = 2**24

_Blocks = Callable[[str, TensorSource], Iterable[Tensor]]  # a tensor's rows in order, in blocks


@dataclass
class ModelWeights:
    """What lies on the device, by the names of `global_tensors` and, layer by layer, of `layer_tensors`.

    Of a matrix that is partly in host memory these are the first rows; one that is there wholly is left out.
    """

    shared: dict[str, Tensor]
    layers: list[dict[str, Tensor]]


class HostRows(Protocol):
    """Host memory for the rows of the layers' matrices that do not stay on the device."""

    def take(self, layer: int, name: str) -> Tensor | None:
        """Where the last rows of this matrix go; None if all of it stays on the device."""


def layer_shapes(family: type[DecoderModel], spec: ModelSpec) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of each layer's tensors."""
    return [
        {name: source.shape for name, source in family.layer_tensors(spec, layer).items()}
        for layer in range(spec.num_layers)
    ]


def weight_bytes(family: type[DecoderModel], spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all weights, without loading any."""
    return shared_bytes(family, spec, dtype) + dtype.itemsize * sum(
        math.prod(shape) for layer in layer_shapes(family, spec) for shape in layer.values()
    )


def shared_bytes(family: type[DecoderModel], spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of embeddings, final norm and LM head."""
    return sum(math.prod(source.shape) for source in family.global_tensors(spec).values()) * dtype.itemsize


def load_weights(
    family: type[DecoderModel],
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    host: HostRows | None = None,
) -> ModelWeights:
    """Read a checkpoint; CheckpointError names a tensor that is missing or has another shape."""

    def blocks(_: str, source: TensorSource) -> list[Tensor]:
        parts = [checkpoint.tensor(name) for name in source.parts]
        rows = sum(part.shape[0] for part in parts)
        found = (rows, *parts[0].shape[1:])
        if found != source.shape or any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise CheckpointError(
                f"{checkpoint.path}: {' + '.join(source.parts)} has shape {found}, the config asks for "
                f"{source.shape}: config and weights do not belong together"
            )
        return parts

    return _collect(family, spec, device, dtype, host, blocks, progress)


def random_weights(
    family: type[DecoderModel],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Progress | None = None,
    host: HostRows | None = None,
) -> ModelWeights:
    """Normal with a standard deviation of 0.02, norms at one, biases at zero; the same wherever they stay.

    Made on the device, block by block.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def blocks(name: str, source: TensorSource) -> Iterator[Tensor]:
        total, *rest = source.shape
        rows = max(1, RANDOM_BLOCK_ELEMENTS // math.prod(rest) // 64) * 64
        block = torch.empty((min(rows, total), *rest), dtype=dtype, device=device)
        for start in range(0, total, rows):
            block = block[: total - start]
            if name.endswith("bias"):
                block.zero_()
            elif "norm" in name:
                block.fill_(1.0)
            else:
                block.normal_(0.0, RANDOM_STD, generator=generator)
            yield block

    return _collect(family, spec, device, dtype, host, blocks, progress)


def _collect(
    family: type[DecoderModel],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    host: HostRows | None,
    blocks: _Blocks,
    progress: Progress | None,
) -> ModelWeights:
    def tensors(layer: int | None, sources: Mapping[str, TensorSource]) -> dict[str, Tensor]:
        on_device = {}
        for name, source in sources.items():
            arriving = blocks(name, source)
            leaving = None if host is None or layer is None else host.take(layer, name)
            rows = source.shape[0] - (0 if leaving is None else leaving.shape[0])
            staying = torch.empty((rows, *source.shape[1:]), dtype=dtype, device=device)
            _fill([staying] if leaving is None else [staying, leaving], arriving)
            if rows:
                on_device[name] = staying
            if progress is not None:
                progress(math.prod(source.shape) * dtype.itemsize)
        return on_device

    shared = tensors(None, family.global_tensors(spec))
    return ModelWeights(shared, [tensors(i, family.layer_tensors(spec, i)) for i in range(spec.num_layers)])


def _fill(pieces: Sequence[Tensor], blocks: Iterable[Tensor]) -> None:
    """Copy blocks of rows, in order, into pieces that are one tensor when laid end to end."""
    start = 0
    for block in blocks:
        first = 0
        for piece in pieces:
            low, high = max(start, first), min(start + block.shape[0], first + piece.shape[0])
            if low < high:
                piece[low - first : high - first].copy_(block[low - start : high - start])
            first += piece.shape[0]
        start += block.shape[0]
