"""The oldest rows of a host tier in a file (`placement.kv_on_disk`): FlexGen's third tier, split by tokens.

Of each sequence and layer the first `rows` host rows lie in the file, in a part of their own, as the host's memory
would have them:

    K of each KV head, rows x bytes of a row | V likewise | padding up to a multiple of 4096 bytes

and so they lie in the staging memory that they are read into, a few layers ahead of the one that attends to them. Rows
that were written never change: what was read ahead stays right over the end of a step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridgen.errors import DiskError
from hybridgen.kv_cache.host_keys import HostKeys, PackedRows, PlainKeys
from hybridgen.kv_cache.staging import Staging
from hybridgen.offload.disk import BORDER_BYTES, DiskFile, DiskReader, FileRange, ReadTicket, room_for
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine

DROP_EVERY_BYTES = 256 << 20  # written, they leave the page cache
_SLACK_BYTES = 2 * BORDER_BYTES  # ranges are widened to borders

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class DiskLayout:
    """Where rows lie in the file and in staging memory: pure numbers.

    shapes: of each layer's K (or V) in the file, as stored: [B, Hkv, rows, width]; dtype: of an element there; depth:
    layers that are read ahead.
    """

    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    depth: int

    @property
    def rows(self) -> int:
        return self.shapes[0][2]

    @property
    def turns(self) -> int:
        """Places in staging memory: for the layers ahead, one whose rows are leaving, one that is done with."""
        return self.depth + 2

    def head_bytes(self, layer: int) -> int:
        """Of one KV head of one sequence."""
        _, _, rows, width = self.shapes[layer]
        return rows * width * self.dtype.itemsize

    def sequence_bytes(self, layer: int) -> int:
        """K and V of one sequence, padded."""
        used = 2 * self.shapes[layer][1] * self.head_bytes(layer)
        return -(-used // BORDER_BYTES) * BORDER_BYTES

    def start(self, layer: int) -> int:
        """Of a layer in the file."""
        return sum(self.shapes[before][0] * self.sequence_bytes(before) for before in range(layer))

    @property
    def file_bytes(self) -> int:
        return self.start(len(self.shapes))

    @property
    def memory_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Staging memory, and room for one KV head's rows on their way from or to the file."""
        layers = range(len(self.shapes))
        place = max(self.shapes[layer][0] * self.sequence_bytes(layer) for layer in layers) + _SLACK_BYTES
        single = room_for(max(self.head_bytes(layer) for layer in layers))
        return [((self.turns, place), torch.uint8), ((single,), torch.uint8)]

    @property
    def memory_bytes(self) -> int:
        return sum(padded_bytes(*part) for part in self.memory_parts)


@dataclass
class _Flight:
    """A layer's rows on their way into a place of staging memory, or there."""

    turn: int
    lengths: list[int]  # rows of each sequence
    reads: list[ReadTicket]

    def wait(self) -> None:
        """All of them, also after one that failed: none may still be writing when the caller goes on."""
        failed: DiskError | None = None
        for read in self.reads:
            try:
                read.wait_host()
            except DiskError as error:
                failed = error
        if failed is not None:
            raise failed


class DiskTier:
    """The file of one micro-batch. `close` or the last reference to it removes the file."""

    def __init__(
        self, folder: Path, layout: DiskLayout, reader: DiskReader, transfer: TransferEngine, slab: HostSlab
    ) -> None:
        """The slab has room for `layout.memory_bytes`. DiskError if the disk has no room for the file."""
        self.layout, self._reader, self._transfer = layout, reader, transfer
        self._file = DiskFile(folder, "kv", layout.file_bytes, "the KV cache's share on disk")
        places, single = (slab.take(*part) for part in layout.memory_parts)
        self._places = [HostBuffer(*pair) for pair in zip(places.tensor, places.device_view, strict=True)]
        self._single = single
        self._flights: dict[int, _Flight] = {}  # by layer
        self._leaving: list[Ticket] = [Ticket()] * layout.turns  # copies to the device that read a place
        self._order = list(range(layout.turns))  # places, the one that was used longest ago first
        # Not alive by this: a batch is freed with its last reference, and its file with it.
        self._lengths: dict[int, weakref.WeakMethod[Callable[[], list[int]]]] = {}
        self._undropped_bytes = 0
        self._end = weakref.finalize(self, _remove, self._file, self._flights, reader)

    def close(self) -> None:
        """Wait for what is being read, and remove the file."""
        self._end()

    @property
    def path(self) -> Path:
        return self._file.path

    def attach(self, layer: int, lengths: Callable[[], list[int]]) -> None:
        """lengths: a method; how many rows each sequence of the layer will have here when it is next asked for."""
        self._lengths[layer] = weakref.WeakMethod(lengths)

    def write(self, layer: int, part: int, sequence: int, row: int, stored: Tensor) -> None:
        """Rows [Hkv, n, width] of K (part 0) or V (1), as they are stored, from `row` on. Waits for the device."""
        for head, rows in enumerate(stored):
            passing = HostBuffer(*(_typed(one, rows) for one in (self._single.tensor, self._single.device_view)))
            self._transfer.copy(passing.device_view[None], rows[None], "d2h").wait_host()
            self._file.write(self._offset(layer, part, sequence, head, row), passing.tensor)
        self._undropped_bytes += stored.nbytes
        if self._undropped_bytes >= DROP_EVERY_BYTES:
            self._file.drop_cached()
            self._undropped_bytes = 0

    def read(self, layer: int, part: int, sequence: int, out: Tensor) -> None:
        """The first rows into out [Hkv, n, width], on the device; waits for both."""
        for head, rows in enumerate(out):
            wanted = FileRange(self._file.path, self._offset(layer, part, sequence, head, 0), rows.nbytes)
            self._reader.read(wanted, self._single.tensor).wait_host()
            inset = wanted.offset % BORDER_BYTES
            source = _typed(self._single.device_view[inset:], rows)
            self._transfer.copy(rows[None], source[None], "h2d").wait_host()

    def bring(self, layer: int, lengths: list[int]) -> list[HostBuffer]:
        """K and V [B, Hkv, rows, width] in host memory, of which each sequence's first lengths[b] rows are there now.

        They stay until the copies are over that `leave` is told of; it has to be called before the next `bring`.
        """
        flight = self._flights.get(layer)
        if flight is None or flight.lengths != lengths:
            if flight is not None:
                flight.wait()
                del self._flights[layer]
            flight = self._flights[layer] = self._send(layer, lengths)
        before = time.perf_counter()
        flight.wait()
        del self._flights[layer]
        self._transfer.telemetry.host_time("disk_wait", layer, before, time.perf_counter())
        self._order.remove(flight.turn)
        self._order.append(flight.turn)
        return self._views(layer, flight.turn)

    def leave(self, layer: int, copied: Ticket) -> None:
        """What `bring` gave is in use until `copied` is over; what the next layers need is sent for."""
        self._leaving[self._order[-1]] = copied
        layers = len(self.layout.shapes)
        for ahead in range(1, min(self.layout.depth, layers - 1) + 1):
            following = (layer + ahead) % layers
            if following not in self._flights:
                lengths = self._lengths[following]()
                assert lengths is not None
                self._flights[following] = self._send(following, lengths())

    def _send(self, layer: int, lengths: list[int]) -> _Flight:
        taken = {flight.turn for flight in self._flights.values()} | {self._order[-1]}
        turn = next(turn for turn in self._order if turn not in taken)
        self._leaving[turn].wait_host()
        self._order.remove(turn)
        self._order.insert(0, turn)  # in use; `bring` will say when that was
        memory, reads, layout = self._places[turn].tensor, [], self.layout
        heads, row_bytes = layout.shapes[layer][1], layout.head_bytes(layer) // layout.rows
        for sequence, length in enumerate(lengths):
            # Whole sequences lie in one range, others in one a head.
            whole = length == layout.rows
            for part, head in [(0, 0)] if whole else [(part, head) for part in range(2) for head in range(heads)]:
                offset = self._offset(layer, part, sequence, head, 0)
                nbytes = 2 * heads * layout.head_bytes(layer) if whole else length * row_bytes
                if nbytes:
                    start = (offset - layout.start(layer)) // BORDER_BYTES * BORDER_BYTES
                    reads.append(self._reader.read(FileRange(self._file.path, offset, nbytes), memory[start:]))
        return _Flight(turn, list(lengths), reads)

    def _offset(self, layer: int, part: int, sequence: int, head: int, row: int) -> int:
        """Of a row in the file."""
        layout = self.layout
        _, heads, rows, _ = layout.shapes[layer]
        start = layout.start(layer) + sequence * layout.sequence_bytes(layer)
        return start + ((part * heads + head) * rows + row) * layout.head_bytes(layer) // rows

    def _views(self, layer: int, turn: int) -> list[HostBuffer]:
        place, layout = self._places[turn], self.layout
        batch, heads, rows, width = layout.shapes[layer]
        nbytes = layout.sequence_bytes(layer)
        per_sequence = (2, heads, rows, width)
        used = 2 * heads * layout.head_bytes(layer)
        both = [
            one[: batch * nbytes].view(batch, nbytes)[:, :used].view(layout.dtype).unflatten(1, per_sequence)
            for one in (place.tensor, place.device_view)
        ]
        return [HostBuffer(*(one[:, part] for one in both)) for part in range(2)]


@dataclass(frozen=True)
class LayerOnDisk:
    """One layer of a tier."""

    tier: DiskTier
    layer: int

    @property
    def rows(self) -> int:
        return self.tier.layout.rows


class RowsOnDisk(HostKeys):
    """Keys or values of which the first rows lie in the file and the others in host memory."""

    def __init__(self, rest: PlainKeys | PackedRows, disk: LayerOnDisk, part: int) -> None:
        """rest: of the other rows; part: 0 for keys, 1 for values."""
        self.kind, self.in_place = rest.kind, rest.in_place
        self._rest, self._disk, self._part = rest, disk, part

    def scanned(self) -> HostBuffer:
        raise RuntimeError("rows in a file are not scored")

    def buffers(self) -> list[HostBuffer]:
        return self._rest.buffers()

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        pass

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        here = min(max(0, self._disk.rows - row), keys.shape[1])
        if here:
            stored = self._rest.encoded(keys[:, :here])
            self._disk.tier.write(self._disk.layer, self._part, sequence, row, stored)
        if here == keys.shape[1]:
            return []
        return self._rest.store(sequence, row + here - self._disk.rows, keys[:, here:])

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        here = min(self._disk.rows, rows)
        arrived = self._rest.encoded_like(out[:, :here])
        self._disk.tier.read(self._disk.layer, self._part, sequence, arrived)
        self._rest.decoded(arrived, out[:, :here])
        if rows > here:
            self._rest.load(sequence, rows - here, out[:, here:])

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        raise RuntimeError("rows in a file are not fetched one by one")


def disk_layout(parts: Sequence[tuple[tuple[int, ...], torch.dtype]], rows: int, depth: int) -> DiskLayout:
    """Of layers whose values (`host_keys.value_part`) take these parts, of which `rows` rows lie on disk."""
    shapes = tuple((batch, heads, rows, width) for (batch, heads, _, width), _ in parts)
    return DiskLayout(shapes, parts[0][1], depth)


def _typed(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of memory as a tensor of this shape and type."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def _remove(file: DiskFile, flights: dict[int, _Flight], reader: DiskReader) -> None:
    for flight in flights.values():
        for read in flight.reads:
            try:
                read.wait_host()
            except Exception:  # whoever waited for the rows would have to know; here nobody does
                continue
    flights.clear()
    reader.forget(file.path)
    file.close()
