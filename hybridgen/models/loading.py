"""Weights of a model as this engine wants them: from a checkpoint, or random with a seed.

A tensor arrives in blocks of rows, and each row goes to where it is to stay: no matrix that stays in host
memory is ever whole on the device. Where rows lie on disk, what is loaded leaves nothing in memory beside it.
Matrices that are to be packed are so block by block, on the device, before their rows part.
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
from hybridgen.models.stored_rows import read_blocks
from hybridgen.types import DTYPES

Progress = Callable[[int], None]  # called with the bytes of each finished tensor

RANDOM_STD = 0.02
# Of random numbers made at a time, in whole blocks of 64 rows. A fixed number: on a GPU the values depend on it.
RANDOM_BLOCK_ELEMENTS = 2**24
PACKED_AT_ONCE = 2**22  # numbers: packing takes 24 bytes of the device's memory for each

# A tensor's rows in order, in blocks; layer None: a tensor of no layer
_Blocks = Callable[[int | None, str, TensorSource], Iterable[Tensor]]


@dataclass
class ModelWeights:
    """What lies on the device, by the names of `global_tensors` and, layer by layer, of `layer_tensors`.

    Of a matrix that is partly in host memory these are the first rows; one that is there wholly is left out.
    """

    shared: dict[str, Tensor]
    layers: list[dict[str, Tensor]]


class Packing(Protocol):
    """How a row is packed into bytes (an `offload.groupwise.GroupCodec`)."""

    def row_bytes(self, width: int) -> int: ...

    def encode(self, values: Tensor) -> Tensor:
        """Rows [n, width] as uint8 [n, row_bytes(width)]."""


class HostRows(Protocol):
    """Host memory for the rows of the layers' matrices that do not stay on the device."""

    def take(self, layer: int, name: str) -> Tensor | None:
        """Where the rows of this matrix go that follow on those of the device; None if none lie on the host."""

    def on_disk(self, layer: int, name: str) -> int:
        """How many of its last rows lie on disk."""


class LayerFile(Protocol):
    """A file of ours that holds all layers' tensors as the run keeps them: in its dtype, or packed."""

    @property
    def is_written(self) -> bool:
        """By an earlier start: then the layers are read from it."""

    def blocks(self, layer: int, name: str) -> Iterable[Tensor]:
        """A tensor's rows in order, in blocks that are valid until the next one."""

    def write(self, layer: int, name: str, rows: Tensor) -> None:
        """The next rows of a tensor; all tensors in the order of `layer_tensors`, layer by layer."""


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
    file: LayerFile | None = None,
    sparing: bool = False,
    packing: Packing | None = None,
) -> ModelWeights:
    """Read a checkpoint; CheckpointError names a tensor that is missing or has another shape.

    file: the layers are written to it, or read from it if an earlier start did. sparing: of the checkpoint's files
    nothing is mapped that need not be. packing: of the layers' matrices; None: they stay as they are.
    """

    def blocks(_: int | None, __: str, source: TensorSource) -> Iterable[Tensor]:
        shapes = [checkpoint.shape(name) for name in source.parts]
        rows = sum(shape[0] for shape in shapes)
        found = (rows, *shapes[0][1:])
        if found != source.shape or any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise CheckpointError(
                f"{checkpoint.path}: {' + '.join(source.parts)} has shape {found}, the config asks for "
                f"{source.shape}: config and weights do not belong together"
            )
        stored = [checkpoint.stored(name) for name in source.parts]
        if sparing and all(part.offset is not None and part.dtype in DTYPES for part in stored):
            return read_blocks(stored)
        return [checkpoint.tensor(name) for name in source.parts]

    return _collect(family, spec, device, dtype, host, file, blocks, progress, packing)


def random_weights(
    family: type[DecoderModel],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Progress | None = None,
    host: HostRows | None = None,
    file: LayerFile | None = None,
    packing: Packing | None = None,
) -> ModelWeights:
    """Normal with a standard deviation of 0.02, norms at one, biases at zero; the same wherever they stay.

    Made on the device, block by block. file, packing: as of `load_weights`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    # One for all: made anew for each tensor, blocks would leave holes between the tensors that stay.
    memory = torch.empty(0, dtype=dtype, device=device)

    def blocks(_: int | None, name: str, source: TensorSource) -> Iterator[Tensor]:
        nonlocal memory
        total, *rest = source.shape
        rows = min(total, max(1, RANDOM_BLOCK_ELEMENTS // math.prod(rest) // 64) * 64)
        if memory.numel() < rows * math.prod(rest):
            memory = torch.empty(max(rows * math.prod(rest), RANDOM_BLOCK_ELEMENTS), dtype=dtype, device=device)
        block = memory[: rows * math.prod(rest)].view(rows, *rest)
        for start in range(0, total, rows):
            block = block[: total - start]
            if name.endswith("bias"):
                block.zero_()
            elif "norm" in name:
                block.fill_(1.0)
            else:
                block.normal_(0.0, RANDOM_STD, generator=generator)
            yield block

    return _collect(family, spec, device, dtype, host, file, blocks, progress, packing)


def _collect(
    family: type[DecoderModel],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    host: HostRows | None,
    file: LayerFile | None,
    blocks: _Blocks,
    progress: Progress | None,
    packing: Packing | None,
) -> ModelWeights:
    def tensors(layer: int | None, sources: Mapping[str, TensorSource]) -> dict[str, Tensor]:
        on_device = {}
        for name, source in sources.items():
            arriving, (rows, *width), kept_as, leaving = blocks(layer, name, source), source.shape, dtype, None
            if packing is not None and layer is not None and len(width) == 1:
                arriving, width, kept_as = _packed(packing, arriving, device), [packing.row_bytes(*width)], torch.uint8
            if layer is not None and file is not None:
                made = arriving
                arriving = file.blocks(layer, name) if file.is_written else _copied(file, layer, name, made, kept_as)
            if layer is not None and host is not None:
                leaving = host.take(layer, name)
                rows -= host.on_disk(layer, name) + (0 if leaving is None else leaving.shape[0])
            staying = torch.empty((rows, *width), dtype=kept_as, device=device)
            to_the_end = layer is not None and file is not None and not file.is_written
            _fill([staying] if leaving is None else [staying, leaving], arriving, to_the_end)
            if rows:
                on_device[name] = staying
            if progress is not None:
                progress(math.prod(source.shape) * dtype.itemsize)
        return on_device

    shared = tensors(None, family.global_tensors(spec))
    return ModelWeights(shared, [tensors(i, family.layer_tensors(spec, i)) for i in range(spec.num_layers)])


def _packed(packing: Packing, blocks: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The rows of the blocks, packed. Always on the device: a GPU's steps may differ from a CPU's in the last bit."""
    for block in blocks:
        for rows in block.split(max(1, PACKED_AT_ONCE // block.shape[1])):
            yield packing.encode(rows.to(device))


def _copied(file: LayerFile, layer: int, name: str, blocks: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """The blocks, each written to the file as it goes by."""
    for block in blocks:
        converted = block.to(dtype)
        file.write(layer, name, converted.cpu())
        yield converted


def _fill(pieces: Sequence[Tensor], blocks: Iterable[Tensor], to_the_end: bool) -> None:
    """Copy blocks of rows, in order, into pieces that are one tensor when laid end to end.

    to_the_end: take blocks that belong to none of them as well: they are made or written on their way.
    """
    start, wanted = 0, sum(piece.shape[0] for piece in pieces)
    if not wanted and not to_the_end:
        return
    for block in blocks:
        first = 0
        for piece in pieces:
            low, high = max(start, first), min(start + block.shape[0], first + piece.shape[0])
            if low < high:
                piece[low - first : high - first].copy_(block[low - start : high - start])
            first += piece.shape[0]
        start += block.shape[0]
        if start >= wanted and not to_the_end:
            return
