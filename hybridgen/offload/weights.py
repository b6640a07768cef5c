"""Weights of the decoder layers that do not stay on the device: kept in host memory, streamed a few layers ahead.

A layer's host part arrives in a staging slot, where a matrix of which only the first rows stay on the device is put
together from both: the model sees ordinary dense tensors. There are `depth` + 1 slots, used round robin: one for
the layer that runs and `depth` for those that are on their way, over the end of a step into the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hybridgen.models.base import DecoderModel, LayerWeights
from hybridgen.models.loading import layer_shapes, shared_bytes
from hybridgen.models.spec import ModelSpec
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import Ticket, TransferEngine
from hybridgen.placement.weight_split import LayerSplit, WeightSplit

SLOT_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class WeightFootprint:
    """Bytes of all weights at one share; `share` is the realised one."""

    share: float
    device_bytes: int
    staging_bytes: int
    host_bytes: int


@lru_cache(maxsize=8192)
def weight_footprint(
    family: type[DecoderModel], spec: ModelSpec, dtype: torch.dtype, share: float, depth: int
) -> WeightFootprint:
    """What `HostWeights`, `LayerWeightStore` and loading will allocate."""
    split = WeightSplit(layer_shapes(family, spec), share)
    resident = (split.elements - split.host_elements) * dtype.itemsize
    return WeightFootprint(
        split.share,
        shared_bytes(family, spec, dtype) + resident,
        _num_slots(split, depth) * _slot_bytes(split, dtype),
        _host_bytes(split, dtype),
    )


class HostWeights:
    """The rows that live in host memory, in one slab; filled by `models.loading` through `take`."""

    def __init__(self, split: WeightSplit, device: torch.device, dtype: torch.dtype) -> None:
        self.split = split
        slab = HostSlab(_host_bytes(split, dtype), device)
        self.layers: list[dict[str, HostBuffer]] = [
            {name: slab.take(shape, dtype) for name, shape in layer.host_shapes().items()} for layer in split.layers
        ]

    def take(self, layer: int, name: str) -> Tensor | None:
        buffer = self.layers[layer].get(name)
        return None if buffer is None else buffer.tensor


def host_weights(
    family: type[DecoderModel], spec: ModelSpec, share: float, device: torch.device, dtype: torch.dtype
) -> HostWeights | None:
    """Host memory for what does not stay on the device; None if everything does."""
    split = WeightSplit(layer_shapes(family, spec), share)
    return HostWeights(split, device, dtype) if split.host_elements else None


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
        dtype: torch.dtype,
    ) -> None:
        """resident: what loading left on the device; depth: layers to be under way beside the running one."""
        self.share = 1.0 if host is None else host.split.share
        self._resident, self._host = resident, host
        self._transfer = transfer
        self._last = Ticket()  # of the last copy
        self._ready: dict[int, _StagedLayer] = {}  # the layers in the slots
        self._slots: list[int | None] = []  # the layer in each slot
        self._views: list[list[dict[str, Tensor]]] = []  # [slot][layer]: the matrices that are put together there
        self._next = 0
        if host is None:
            return
        split = host.split
        self._slots = [None] * _num_slots(split, depth)
        slots = [torch.empty(_slot_bytes(split, dtype), dtype=torch.uint8, device=device) for _ in self._slots]
        self._views = [[_slot_views(slot, layer, dtype) for layer in split.layers] for slot in slots]
        split_matrices = [
            tensors[name] for tensors, layer in zip(resident, split.layers, strict=True) for name in layer.host_rows
            if name in tensors
        ]  # fmt: skip
        for stream in ("weights", "assembly"):
            with transfer.beside(transfer.mark(), stream):
                transfer.hand_over(*slots, *split_matrices)

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
        for number in wanted:
            if number not in self._ready:
                while self._slots[self._next] in wanted:
                    self._next = (self._next + 1) % len(self._slots)
                self._send(number, self._next, timed=number >= layer)
                self._next = (self._next + 1) % len(self._slots)

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

    def _send(self, layer: int, slot: int, timed: bool) -> None:
        """timed: False for copies that the running step does not wait for, lest its end wait for theirs."""
        assert self._host is not None
        before = self._slots[slot]
        if before is not None:
            del self._ready[before]
        transfer, resident, views = self._transfer, self._resident[layer], self._views[slot][layer]
        tickets: dict[str, list[Ticket]] = {}
        span = transfer.telemetry.span("weights", layer, row="weights") if timed else nullcontext()
        free = transfer.mark()
        with transfer.beside(free, "weights"), span:
            for name, buffer in self._host.layers[layer].items():
                arriving = views[name][-buffer.tensor.shape[0] :]
                self._last = transfer.bring(arriving, buffer.tensor, "h2d")
                tickets[name] = [self._last]
        with transfer.beside(free, "assembly"):  # the link does not stand still meanwhile
            for name, buffer in self._host.layers[layer].items():
                staying = views[name].shape[0] - buffer.tensor.shape[0]
                if staying:
                    tickets[name].append(transfer.bring(views[name][:staying], resident[name], None))
        self._slots[slot] = layer
        self._ready[layer] = _StagedLayer({**resident, **views}, tickets)


def _num_slots(split: WeightSplit, depth: int) -> int:
    return min(depth + 1, len(split.layers)) if split.host_elements else 0


def _slot_bytes(split: WeightSplit, dtype: torch.dtype) -> int:
    """Enough for any layer."""
    return max(sum(_aligned(shape, dtype) for shape in layer.staged_shapes().values()) for layer in split.layers)


def _host_bytes(split: WeightSplit, dtype: torch.dtype) -> int:
    return sum(padded_bytes(shape, dtype) for layer in split.layers for shape in layer.host_shapes().values())


def _slot_views(slot: Tensor, layer: LayerSplit, dtype: torch.dtype) -> dict[str, Tensor]:
    views, start = {}, 0
    for name, shape in layer.staged_shapes().items():
        end = start + math.prod(shape) * dtype.itemsize
        views[name] = slot[start:end].view(dtype).view(shape)
        start += _aligned(shape, dtype)
    return views


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
