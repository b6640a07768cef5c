"""Weights of the decoder layers that do not stay on the device: in host memory or on disk, streamed a few layers ahead.

A layer's host part arrives in a staging slot, where a matrix of which only the first rows stay on the device is put
together from both: the model sees ordinary dense tensors. There are `depth` + 1 slots, used round robin: one for
the layer that runs and `depth` for those that are on their way, over the end of a step into the next one. A disk part
comes by way of a ring of host buffers (`disk_weights.py`), into which the layers after those are being read meanwhile.
Packed matrices (`weight_slots.py`) cross the link packed; all of them are unpacked into the slot, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hybridgen.models.base import DecoderModel, LayerWeights
from hybridgen.models.loading import layer_shapes, shared_bytes
from hybridgen.models.spec import ModelSpec
from hybridgen.offload.disk import DiskReader
from hybridgen.offload.disk_weights import DiskStages, DiskWeights, num_stages, stage_bytes
from hybridgen.offload.host_memory import HostBuffer, HostSlab
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.offload.weight_slots import WeightFormat
from hybridgen.placement.weight_split import Shape, WeightSplit


@dataclass(frozen=True)
class WeightFootprint:
    """Bytes of all weights at one split; the shares are the realised ones."""

    share: float  # of the layers' weights on the device
    device_bytes: int
    staging_bytes: int  # of the device: slots, and where packed rows arrive
    host_bytes: int
    disk_share: float = 0.0
    disk_bytes: int = 0
    stages_bytes: int = 0  # of host memory that the disk's part is read into


@lru_cache(maxsize=2**16)
def weight_footprint(
    family: type[DecoderModel],
    spec: ModelSpec,
    dtype: torch.dtype,
    share: float,
    depth: int,
    on_disk: float = 0.0,
    bits: int | None = None,
) -> WeightFootprint:
    """What `HostWeights`, `LayerWeightStore` and loading will allocate; bits: of packed matrices.

    Layers that are alike are looked at once: memory budgets ask for hundreds of splits.
    """
    kinds, form = _kinds(family, spec), WeightFormat(dtype, bits)
    split = WeightSplit([dict(shapes) for shapes, _ in kinds], share, on_disk)
    counts = [len(layers) for _, layers in kinds]
    counted = list(zip(counts, split.layers, strict=True))
    total = sum(count * layer.elements for count, layer in counted)
    host = sum(count * layer.host_elements for count, layer in counted)
    disk = sum(count * layer.disk_elements for count, layer in counted)
    slots = form.num_slots(split, spec.num_layers, depth)
    stages = num_stages(spec.num_layers, bool(disk), slots, depth)
    sources = [family.layer_tensors(spec, layers[0]) for _, layers in kinds] if stages else []
    return WeightFootprint(
        1.0 - (host + disk) / total,
        shared_bytes(family, spec, dtype) + sum(count * form.device_bytes(layer) for count, layer in counted),
        slots * form.slot_bytes(split) + form.arrival_bytes(split.layers),
        sum(count * form.host_bytes(layer) for count, layer in counted),
        disk / total,
        sum(count * form.disk_bytes(layer) for count, layer in counted),
        stages * stage_bytes(sources, split.layers, form) if stages else 0,
    )


@lru_cache(maxsize=64)
def _kinds(family: type[DecoderModel], spec: ModelSpec) -> list[tuple[tuple[tuple[str, Shape], ...], list[int]]]:
    """The different shapes of layers, and which layers have them."""
    found: dict[tuple[tuple[str, Shape], ...], list[int]] = {}
    for number, layer in enumerate(layer_shapes(family, spec)):
        found.setdefault(tuple(layer.items()), []).append(number)
    return list(found.items())


class HostWeights:
    """The rows that live in host memory, in one slab; filled by `models.loading` through `take`."""

    def __init__(self, split: WeightSplit, device: torch.device, dtype: torch.dtype, bits: int | None = None) -> None:
        self.split, self.form = split, WeightFormat(dtype, bits)
        slab = HostSlab(sum(map(self.form.host_bytes, split.layers)), device)
        self.layers: list[dict[str, HostBuffer]] = [
            {name: slab.take(*self.form.stored(shape)) for name, shape in layer.host_shapes().items()}
            for layer in split.layers
        ]

    def take(self, layer: int, name: str) -> Tensor | None:
        buffer = self.layers[layer].get(name)
        return None if buffer is None else buffer.tensor

    def on_disk(self, layer: int, name: str) -> int:
        return self.split.layers[layer].disk_rows.get(name, 0)


def host_weights(
    family: type[DecoderModel],
    spec: ModelSpec,
    share: float,
    device: torch.device,
    dtype: torch.dtype,
    on_disk: float = 0.0,
    bits: int | None = None,
) -> HostWeights | None:
    """Host memory for what stays neither on the device nor on disk; None if all of it is on the device, as it is."""
    split = WeightSplit(layer_shapes(family, spec), share, on_disk)
    return HostWeights(split, device, dtype, bits) if split.away_elements or bits is not None else None


class _StagedLayer(Mapping[str, Tensor]):
    """A layer's tensors. Each one that is on its way is waited for when it is first asked for."""

    def __init__(self, tensors: dict[str, Tensor], tickets: dict[str, list[Ticket]]) -> None:
        self._tensors, self._tickets = tensors, tickets

    def __getitem__(self, name: str) -> Tensor:
        for ticket in self._tickets.pop(name, ()):
            ticket.wait()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class LayerWeightStore:
    """All layers' weights, wherever they are. With everything on the device it hands out the dicts, no more."""

    def __init__(
        self,
        resident: Sequence[dict[str, Tensor]],
        host: HostWeights | None,
        depth: int,
        transfer: TransferEngine,
        device: torch.device,
        disk: DiskWeights | None = None,
        reader: DiskReader | None = None,
    ) -> None:
        """resident: what loading left on the device; depth: layers to be under way beside the running one.

        disk: where the rows lie that `host` says are on disk; reader: what reads them.
        """
        self.share = 1.0 if host is None else host.split.share
        self.disk_share = 0.0 if host is None else host.split.disk_share
        self._depth, self._stages = depth, None
        self._resident, self._host = resident, host
        self._transfer = transfer
        self._last = Ticket()  # of the last copy over the link
        self._ready: dict[int, _StagedLayer] = {}  # the layers in the slots
        self._slots: list[int | None] = []  # the layer in each slot
        self._views: list[list[dict[str, Tensor]]] = []  # [slot][layer]: the matrices that are put together there
        self._next = 0
        if host is None:
            return
        split, form = host.split, host.form
        self._slots = [None] * form.num_slots(split, len(split.layers), depth)
        slots = [torch.empty(form.slot_bytes(split), dtype=torch.uint8, device=device) for _ in self._slots]
        self._views = [[form.slot_views(slot, layer) for layer in split.layers] for slot in slots]
        self._arrival = torch.empty(form.arrival_bytes(split.layers), dtype=torch.uint8, device=device)
        staged_matrices = [
            tensors[name]
            for tensors, layer in zip(resident, split.layers, strict=True)
            for name in form.staged_shapes(layer)
            if name in tensors
        ]
        for stream in ("weights", "assembly"):
            with transfer.beside(transfer.mark(), stream):
                transfer.hand_over(*slots, self._arrival, *staged_matrices)
        if disk is not None and reader is not None:
            self._stages = DiskStages(disk, num_stages(len(split.layers), True, len(slots), depth), reader, device)

    @property
    def pass_through(self) -> bool:
        """Whether layers come and go: what a layer is given then lies elsewhere from step to step."""
        return bool(self._slots)

    def issue(self, layer: int) -> None:
        """`layer` is the next to run: what of it and of the `depth` layers after it is not there yet is sent for.

        Goes round the end: the first layers of the next step are on their way while the last ones of this one run.
        Only slots of layers that have been given to the compute stream before are overwritten, once it is done
        with them.
        """
        if not self._slots:
            return
        layers = len(self._resident)
        wanted = [(layer + ahead) % layers for ahead in range(len(self._slots))]
        missing = [number for number in wanted if number not in self._ready]
        for index, number in enumerate(missing):
            if self._stages is not None:
                self._stages.expect(missing[index:] + self._after(wanted))
            while self._slots[self._next] in wanted:
                self._next = (self._next + 1) % len(self._slots)
            self._send(number, self._next, timed=number >= layer)
            self._next = (self._next + 1) % len(self._slots)
        if self._stages is not None:
            self._stages.expect(self._after(wanted))

    def wait(self, layer: int) -> LayerWeights:
        """The tensors of a layer that was issued; valid until the layer `depth` + 1 after it is issued.

        Each tensor is waited for, by the compute stream, when it is first looked up.
        """
        if not self._slots:
            return self._resident[layer]
        if layer not in self._ready:
            raise RuntimeError(f"the weights of layer {layer} are waited for and were not issued")
        return self._ready[layer]

    def close(self) -> None:
        """Let what is under way arrive, before its memory goes."""
        self._last.wait_host()
        if self._stages is not None:
            self._stages.close()

    def _after(self, wanted: Sequence[int]) -> list[int]:
        """The layers that will be sent for next: those to be read meanwhile."""
        layers = len(self._resident)
        following = [(wanted[-1] + ahead) % layers for ahead in range(1, self._depth + 1)]
        return [number for number in dict.fromkeys(following) if number not in wanted]

    def _send(self, layer: int, slot: int, timed: bool) -> None:
        """timed: False for copies that the running step does not wait for, lest its end wait for theirs."""
        assert self._host is not None
        before = self._slots[slot]
        if before is not None:
            del self._ready[before]
            self._slots[slot] = None  # also if the new layer does not get here
        transfer, resident, views = self._transfer, self._resident[layer], self._views[slot][layer]
        split, host = self._host.split.layers[layer], self._host.layers[layer]
        tickets: dict[str, list[Ticket]] = {name: [] for name in views}
        free = transfer.mark()

        def span() -> AbstractContextManager[object]:
            return transfer.telemetry.span("weights", layer, row="weights") if timed else nullcontext()

        codec = self._host.form.codec

        def bring(name: str, first_row: int, source: Tensor, crosses: bool = True) -> Ticket:
            """crosses: whether the rows come over the link."""
            target = views[name][first_row : first_row + source.shape[0]]
            if codec is None:
                ticket = transfer.bring(target, source, "h2d" if crosses else None)
            else:  # one after the other in this stream: they arrive in the same place
                place = self._arrival[: source.nbytes].view(source.shape) if crosses else None
                ticket = transfer.bring_packed(target, source, codec, place)
            tickets[name].append(ticket)
            self._last = ticket if crosses else self._last
            return ticket

        if host:
            with transfer.beside(free, "weights"), span():
                for name, buffer in host.items():
                    bring(name, split.staying_rows(name), buffer.tensor)
        with transfer.beside(free, "assembly"):  # the link does not stand still meanwhile
            for name in views:
                if split.staying_rows(name):
                    bring(name, 0, resident[name], crosses=False)
        if self._stages is not None:  # last: the host may have to wait for the disk
            read = self._stages.take(layer)
            copies: list[Ticket] = []
            try:
                with transfer.beside(free, "weights"), span():
                    for name, pieces in read.items():
                        row = split.shapes[name][0] - split.disk_rows[name]
                        (_, *width), dtype = self._host.form.stored(split.shapes[name])
                        for piece in pieces:
                            rows = piece.view(dtype).view(-1, *width)
                            copies.append(bring(name, row, rows))
                            row += rows.shape[0]
            finally:
                self._stages.let_go(layer, copies)
        self._slots[slot] = layer
        self._ready[layer] = _StagedLayer({**resident, **views}, tickets)
