"""Weights on disk: in which files the rows of each layer lie, and the host buffers that they are read into.

A checkpoint whose files hold plain rows of the run's dtype is read where it is. Anything else (random weights, another
dtype, torch's .bin, matrices that are to be packed) is written once to a safetensors file of ours, with all tensors of
the decoder layers as this engine has them, and later starts read that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hybridgen.errors import CheckpointError, DiskError
from hybridgen.models.base import DecoderModel
from hybridgen.models.hf_directory import StoredTensor, safetensors_entries
from hybridgen.models.loading import RANDOM_BLOCK_ELEMENTS, RANDOM_STD
from hybridgen.models.spec import ModelSpec, TensorSource
from hybridgen.models.stored_rows import LayerParts, last_rows, read_blocks, safetensors_header
from hybridgen.offload.disk import BORDER_BYTES, DiskFile, DiskReader, FileRange, room_for
from hybridgen.offload.host_memory import HostSlab
from hybridgen.offload.transfer import Ticket
from hybridgen.offload.weight_slots import WeightFormat
from hybridgen.placement.weight_split import LayerSplit, WeightSplit

_PURPOSE = "weights of the decoder layers"
_WRITER = 1  # raised whenever a file would come out differently: old ones are then not found


class LayerFile:
    """All tensors of the decoder layers in a file of ours (a `models.loading.LayerFile`)."""

    def __init__(
        self, family: type[DecoderModel], spec: ModelSpec, form: WeightFormat, folder: Path, identity: str
    ) -> None:
        """identity: what the values depend on, beside shapes and format. Nothing is written yet."""
        tensors = {
            _key(layer, name): source.shape
            for layer in range(spec.num_layers)
            for name, source in family.layer_tensors(spec, layer).items()
        }
        self._stored = {key: form.stored(shape) for key, shape in tensors.items()}
        self.nbytes = sum(map(form.nbytes, tensors.values()))
        dtype = str(form.dtype).removeprefix("torch.") + ("" if form.bits is None else f"-int{form.bits}")
        facts = repr((_WRITER, identity, dtype, list(tensors.items())))
        key = hashlib.sha256(facts.encode()).hexdigest()[:16]
        self.path = folder / f"{Path(spec.name).name}-{dtype}-{key}.safetensors"
        self._writing: DiskFile | None = None
        self._place: dict[str, int] = {}  # where the next rows of each tensor go
        self.is_written = self._entries() is not None

    def blocks(self, layer: int, name: str) -> Iterator[Tensor]:
        return read_blocks(self.layers()[layer][name])

    def write(self, layer: int, name: str, rows: Tensor) -> None:
        if self._writing is None:
            head, self._place = safetensors_header(self._stored, BORDER_BYTES)
            self._writing = DiskFile(self.path.parent, "weights", len(head) + self.nbytes, _PURPOSE)
            self._writing.write(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        self._writing.write(self._place[_key(layer, name)], rows)
        self._writing.drop_cached()
        self._place[_key(layer, name)] += rows.nbytes

    def __enter__(self) -> LayerFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What was written stays for good if it is all there."""
        if self._writing is not None and kind is None:
            self._writing.keep_as(self.path)
            self.is_written = True
        elif self._writing is not None:
            self._writing.close()

    def layers(self) -> list[LayerParts]:
        """Where each layer's tensors lie."""
        entries = self._entries()
        if entries is None:
            raise DiskError(f"{self.path} is gone or damaged")
        layers: dict[int, dict[str, list[StoredTensor]]] = {}
        for key in self._stored:
            layer, name = key.split(".", 1)
            layers.setdefault(int(layer), {})[name] = [entries[key]]
        return list(layers.values())

    def _entries(self) -> dict[str, StoredTensor] | None:
        """By name, if the file is there, and whole."""
        try:
            return {entry.stored_name: entry for entry in safetensors_entries(self.path)}
        except (OSError, CheckpointError):
            return None


def _key(layer: int, name: str) -> str:
    return f"{layer}.{name}"


def random_identity(seed: int, device: torch.device) -> str:
    """What random values depend on."""
    return repr(("random", seed, device.type, RANDOM_STD, RANDOM_BLOCK_ELEMENTS))


def checkpoint_identity(files: Sequence[Path]) -> str:
    """Tells a checkpoint from another one, and from itself after a change: its files, their sizes and times."""
    return repr([(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def stage_bytes(
    sources: Sequence[Mapping[str, TensorSource]], layers: Sequence[LayerSplit], form: WeightFormat
) -> int:
    """Of a buffer that the disk rows of any of the layers fit into, wherever in their files they begin."""
    largest = 0
    for tensors, layer in zip(sources, layers, strict=True):
        needed = 0
        for name, shape in layer.disk_shapes().items():
            # Each part that the tensor is stacked from is widened to borders at either end.
            needed += form.nbytes(shape) + len(tensors[name].parts) * 2 * BORDER_BYTES
        largest = max(largest, room_for(needed) if needed else 0)
    return largest


def num_stages(layers: int, has_disk: bool, slots: int, depth: int) -> int:
    """Buffers: one whose layer is being copied to a slot, and those of the layers to be sent next, `depth` at most."""
    return min(depth, layers - slots) + 1 if has_disk else 0


class DiskWeights:
    """In which ranges of files the disk rows of each layer's matrices lie, in order."""

    def __init__(self, split: WeightSplit, layers: Sequence[LayerParts], stage_bytes: int) -> None:
        self.stage_bytes = stage_bytes
        self.layers: list[dict[str, list[FileRange]]] = [
            {name: [FileRange(*place) for place in last_rows(parts[name], rows)] for name, rows in at.disk_rows.items()}
            for at, parts in zip(split.layers, layers, strict=True)
        ]


@dataclass
class _Stage:
    """A buffer: of which layer it holds the rows or will, and what still reads them."""

    memory: Tensor  # uint8
    layer: int | None = None
    arriving: dict[str, list[Tensor]] = field(default_factory=dict)  # uint8, by matrix, in the order of its rows
    reads: list[Ticket] = field(default_factory=list)
    copies: list[Ticket] = field(default_factory=list)  # out of it, to the device


class DiskStages:
    """The ring of buffers: layers are read ahead into them, then copied out of them."""

    def __init__(self, weights: DiskWeights, count: int, reader: DiskReader, device: torch.device) -> None:
        self._weights, self._reader, self._device = weights, reader, device
        slab = HostSlab(count * weights.stage_bytes, device)
        self._stages = [_Stage(slab.take((weights.stage_bytes,), torch.uint8).tensor) for _ in range(count)]

    def expect(self, layers: Sequence[int]) -> None:
        """Layers that will be taken next, in this order: as many as there are buffers for are sent for."""
        there = {stage.layer for stage in self._stages}
        for layer in layers:
            if layer in there:
                continue
            # Free ones come first, the one that was let go of first at the front; then what nobody wants any more.
            unwanted = [s for s in self._stages if s.layer is not None and s.layer not in layers]
            usable = [s for s in self._stages if s.layer is None] + unwanted
            if not usable:
                return
            self._read(usable[0], layer)
            there.add(layer)

    def take(self, layer: int) -> Mapping[str, list[Tensor]]:
        """The layer's disk rows, which were expected: of each matrix uint8 pieces in order. Waits until they are read.

        To be copied from until `let_go` says by which tickets.
        """
        stage = self._of(layer)
        try:
            for read in stage.reads:
                read.wait_host()
        except BaseException:
            stage.layer = None  # it is not there: whoever tries again has it read again
            raise
        stage.reads = []
        return stage.arriving

    def let_go(self, layer: int, copies: Sequence[Ticket]) -> None:
        """These copies are the last that read the layer's buffer."""
        stage = self._of(layer)
        stage.layer, stage.copies = None, list(copies)
        self._stages.remove(stage)
        self._stages.append(stage)

    def close(self) -> None:
        """Let what is under way arrive, before its memory goes."""
        for stage in self._stages:
            _settle(stage.reads)
            for ticket in stage.copies:
                ticket.wait_host()

    def _of(self, layer: int) -> _Stage:
        return next(stage for stage in self._stages if stage.layer == layer)

    def _read(self, stage: _Stage, layer: int) -> None:
        _settle(stage.reads)  # of a step that was broken off
        # The threads wait for the device's copies, lest the host do; a lazy engine's are done by whoever waits.
        after = stage.copies if self._device.type == "cuda" else []
        for copy in stage.copies if not after else ():
            copy.wait_host()
        stage.layer, stage.arriving, stage.reads, stage.copies = layer, {}, [], []
        start = 0
        for name, ranges in self._weights.layers[layer].items():
            stage.arriving[name] = []
            for wanted in ranges:
                end = start + room_for(wanted.nbytes)
                read = self._reader.read(wanted, stage.memory[start:end], after)
                stage.reads.append(read)
                stage.arriving[name].append(read.data)
                start = end


def _settle(reads: Sequence[Ticket]) -> None:
    """They are over; nobody wants what they read, so a failure is nobody's."""
    for read in reads:
        with suppress(DiskError):
            read.wait_host()
