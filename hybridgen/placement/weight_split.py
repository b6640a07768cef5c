"""Which rows of the decoder layers' weights lie on the device, on the host and on disk: pure numbers, by shapes.

Every layer gives up the same share, so that the link is used evenly. A layer's matrices are walked in the order
in which they are used: those that fit into its share stay on the device, one is split between two blocks of rows,
the rest lies on the host; and of that, what goes beyond the shares of device and host, cut in the same way, on disk.
So the query projection, which lookahead needs a layer early, is the last to leave. 1-D tensors (biases, norms) always
stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

Shape = tuple[int, ...]
ROW_BLOCK = 64  # a matrix is split between blocks of this many rows
ROUNDING = 1e-4  # rows; so that a realised share is realised again, to the row


@dataclass(frozen=True)
class LayerSplit:
    """One layer: its tensors, and how many rows of each matrix are away: the last ones on disk, before them the host's.

    Matrices without such rows are left out; the others come in the order of use.
    """

    shapes: Mapping[str, Shape]
    host_rows: Mapping[str, int]
    disk_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def host_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.host_shapes().values())

    @property
    def disk_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.disk_shapes().values())

    def host_shapes(self) -> dict[str, Shape]:
        """What lies on the host."""
        return {name: (rows, *self.shapes[name][1:]) for name, rows in self.host_rows.items()}

    def disk_shapes(self) -> dict[str, Shape]:
        """What lies on disk."""
        return {name: (rows, *self.shapes[name][1:]) for name, rows in self.disk_rows.items()}

    def staying_rows(self, name: str) -> int:
        """The first rows of a tensor, those on the device."""
        return self.shapes[name][0] - self.host_rows.get(name, 0) - self.disk_rows.get(name, 0)

    def staged_shapes(self) -> dict[str, Shape]:
        """The matrices that are put together on the device before the layer runs: whole."""
        return {name: shape for name, shape in self.shapes.items() if self.staying_rows(name) < shape[0]}


class WeightSplit:
    """The split of all layers for asked shares of their bytes."""

    def __init__(self, shapes: Sequence[Mapping[str, Shape]], share: float, on_disk: float = 0.0) -> None:
        """shapes: of each layer's tensors by name; share, on_disk: in [0, 1], of the layers' bytes on the device and on
        disk; the rest is the host's.
        """
        self.layers = [split_layer(tuple(layer.items()), share, on_disk) for layer in shapes]
        self.elements = sum(layer.elements for layer in self.layers)
        self.host_elements = sum(layer.host_elements for layer in self.layers)
        self.disk_elements = sum(layer.disk_elements for layer in self.layers)

    @property
    def away_elements(self) -> int:
        """What does not stay on the device."""
        return self.host_elements + self.disk_elements

    @property
    def share(self) -> float:
        """What is realised of the asked share on the device."""
        return 1.0 - self.away_elements / self.elements

    @property
    def disk_share(self) -> float:
        """What is realised of the asked share on disk."""
        return self.disk_elements / self.elements


@lru_cache(maxsize=4096)
def split_layer(shapes: tuple[tuple[str, Shape], ...], share: float, on_disk: float = 0.0) -> LayerSplit:
    """Never more on the device than the share (but for 1-D tensors), and less than a block of rows below it.

    Nor on device and host together more than what is not asked for on disk.
    """
    away = _rows_beyond(shapes, share)
    disk = _rows_beyond(shapes, 1.0 - on_disk) if on_disk else {}
    disk = {name: min(rows, away[name]) for name, rows in disk.items() if name in away}
    host = {name: rows - disk.get(name, 0) for name, rows in away.items() if rows > disk.get(name, 0)}
    return LayerSplit(dict(shapes), host, disk)


@lru_cache(maxsize=4096)
def _rows_beyond(shapes: tuple[tuple[str, Shape], ...], share: float) -> dict[str, int]:
    """How many rows of each matrix have no place within this share of the layer."""
    layer = LayerSplit(dict(shapes), {})
    small = sum(math.prod(shape) for _, shape in shapes if len(shape) < 2)
    left = share * layer.elements - small  # elements of matrices that may still stay
    beyond: dict[str, int] = {}
    for name, shape in shapes:
        if len(shape) < 2:
            continue
        rows, width = shape[0], math.prod(shape[1:])
        room = left / width + ROUNDING  # rows
        staying = rows if room >= rows else max(0, math.floor(room / ROW_BLOCK)) * ROW_BLOCK
        if beyond:
            staying = 0  # one matrix is split; those after it lie beyond
        if staying < rows:
            beyond[name] = rows - staying
        left -= staying * width
    return beyond


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
