"""Which rows of the decoder layers' weights stay on the device: pure numbers, by shapes.

Every layer gives up the same share, so that the link is used evenly. A layer's matrices are walked in the order
in which they are used: those that fit into its share stay on the device, one is split between two blocks of rows,
the rest lies on the host. So the query projection, which lookahead needs a layer early, is the last to leave.
1-D tensors (biases, norms) always stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Shape = tuple[int, ...]
ROW_BLOCK = 64  # a matrix is split between blocks of this many rows
ROUNDING = 1e-4  # rows; so that a realised share is realised again, to the row


@dataclass(frozen=True)
class LayerSplit:
    """One layer: its tensors, and the rows (always the last ones) of each matrix that lie on the host."""

    shapes: Mapping[str, Shape]
    host_rows: Mapping[str, int]  # matrices with at least one row on the host, in the order of use

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def host_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.host_shapes().values())

    def host_shapes(self) -> dict[str, Shape]:
        """What lies on the host."""
        return {name: (rows, *self.shapes[name][1:]) for name, rows in self.host_rows.items()}

    def staged_shapes(self) -> dict[str, Shape]:
        """The matrices that are put together on the device before the layer runs: whole."""
        return {name: self.shapes[name] for name in self.host_rows}


class WeightSplit:
    """The split of all layers for an asked share of their bytes."""

    def __init__(self, shapes: Sequence[Mapping[str, Shape]], share: float) -> None:
        """shapes: of each layer's tensors by name; share: in [0, 1], of the layers' bytes on the device."""
        self.layers = [split_layer(tuple(layer.items()), share) for layer in shapes]
        self.elements = sum(layer.elements for layer in self.layers)
        self.host_elements = sum(layer.host_elements for layer in self.layers)

    @property
    def share(self) -> float:
        """What is realised of the asked share."""
        return 1.0 - self.host_elements / self.elements


@lru_cache(maxsize=4096)
def split_layer(shapes: tuple[tuple[str, Shape], ...], share: float) -> LayerSplit:
    """Never more than the share (but for 1-D tensors), and less than a block of rows below it."""
    layer = LayerSplit(dict(shapes), {})
    small = sum(math.prod(shape) for _, shape in shapes if len(shape) < 2)
    left = share * layer.elements - small  # elements of matrices that may still stay
    host: dict[str, int] = {}
    for name, shape in shapes:
        if len(shape) < 2:
            continue
        rows, width = shape[0], math.prod(shape[1:])
        room = left / width + ROUNDING  # rows
        staying = rows if room >= rows else max(0, math.floor(room / ROW_BLOCK)) * ROW_BLOCK
        if host:
            staying = 0  # one matrix is split; those after it lie on the host
        if staying < rows:
            host[name] = rows - staying
        left -= staying * width
    return LayerSplit(layer.shapes, host)


def possible_shares(shapes: Sequence[Mapping[str, Shape]]) -> list[float]:
    """All shares that differ by a block of rows in the largest layer, from 1.0 downwards."""
    largest = max(shapes, key=lambda layer: sum(math.prod(shape) for shape in layer.values()))
    elements = sum(math.prod(shape) for shape in largest.values())
    held, shares = elements, [1.0]
    for shape in reversed([shape for shape in largest.values() if len(shape) > 1]):
        rows, width = shape[0], math.prod(shape[1:])
        for start in range((rows - 1) // ROW_BLOCK * ROW_BLOCK, -1, -ROW_BLOCK):
            shares.append((held - (rows - start) * width) / elements)
        held -= rows * width
    return shares
