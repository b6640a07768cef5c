"""How a decoder layer's matrices are kept, and the slots on the device that they are put together in.

As they are, in the dtype of the run; or packed in groups of 64 along a row (`groupwise.py`; FlexGen's compress_weight,
arXiv 2303.06865, section 5), in whatever tier. Then every matrix passes through a slot, also one that lies on the
device, and is unpacked there before its layer runs. Tensors with one dimension (norms, biases) are never packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import padded_bytes
from hybridgen.placement.weight_split import LayerSplit, Shape, WeightSplit

SLOT_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class WeightFormat:
    """How the layers' tensors are kept in every tier. dtype: of the run; bits: of packed matrices, 4 or 8."""

    dtype: torch.dtype
    bits: int | None = None

    @cached_property
    def codec(self) -> GroupCodec | None:
        return None if self.bits is None else GroupCodec(self.bits, self.dtype)

    @property
    def name(self) -> str | None:
        """None: matrices are kept as they are."""
        return None if self.codec is None else self.codec.name

    def stored(self, shape: Shape) -> tuple[Shape, torch.dtype]:
        """Of the rows of a tensor, as they are kept."""
        if self.codec is None or len(shape) < 2:
            return shape, self.dtype
        return (*shape[:-1], self.codec.row_bytes(shape[-1])), torch.uint8

    def nbytes(self, shape: Shape) -> int:
        """Of rows as they are kept."""
        stored, dtype = self.stored(shape)
        return math.prod(stored) * dtype.itemsize

    def device_bytes(self, layer: LayerSplit) -> int:
        """Of a layer's tensors and rows that stay on the device."""
        return sum(self.nbytes((layer.staying_rows(name), *shape[1:])) for name, shape in layer.shapes.items())

    def host_bytes(self, layer: LayerSplit) -> int:
        """Of a layer's rows in host memory, as `HostSlab.take` lays them out."""
        return sum(padded_bytes(*self.stored(shape)) for shape in layer.host_shapes().values())

    def disk_bytes(self, layer: LayerSplit) -> int:
        return sum(self.nbytes(shape) for shape in layer.disk_shapes().values())

    def staged_shapes(self, layer: LayerSplit) -> dict[str, Shape]:
        """The matrices that are put together on the device before the layer runs: whole."""
        if self.codec is None:
            return layer.staged_shapes()
        return {name: shape for name, shape in layer.shapes.items() if len(shape) > 1}

    def slot_bytes(self, split: WeightSplit) -> int:
        """Of a slot: enough for any layer."""
        return max(sum(_aligned(shape, self.dtype) for shape in self.staged_shapes(at).values()) for at in split.layers)

    def slot_views(self, slot: Tensor, layer: LayerSplit) -> dict[str, Tensor]:
        """The layer's matrices in a slot, uint8 [slot_bytes]."""
        views, start = {}, 0
        for name, shape in self.staged_shapes(layer).items():
            end = start + math.prod(shape) * self.dtype.itemsize
            views[name] = slot[start:end].view(self.dtype).view(shape)
            start += _aligned(shape, self.dtype)
        return views

    def arrival_bytes(self, layers: Sequence[LayerSplit]) -> int:
        """Where packed rows arrive on the device, those of a matrix at a time; 0: all that comes is as it is used."""
        if self.codec is None:
            return 0
        parts = (shape for at in layers for shapes in (at.host_shapes(), at.disk_shapes()) for shape in shapes.values())
        return max((self.nbytes(shape) for shape in parts), default=0)

    def num_slots(self, split: WeightSplit, layers: int, depth: int) -> int:
        """One for the layer that runs, `depth` for those on their way; layers: of the model, split: of some of them."""
        return min(depth + 1, layers) if split.away_elements or self.codec is not None else 0


def _aligned(shape: Shape, dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
