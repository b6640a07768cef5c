"""The keys of a layer's host tier, in the type that `--key-type` and `--sketch` ask for; and its values.

What is stored is what counts: the scan scores it, fetched rows are made from it, an appended prompt attends to it
(contracts.md, "Quantised keys"). A sketch is scored in its stead and lies beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.kv_cache.device_sketch import DeviceScan, DeviceSketch, IntSketch
from hybridgen.kv_cache.layout import AGEING_BLOCK
from hybridgen.kv_cache.page_bounds import PageBounds, bounds_part
from hybridgen.kv_cache.partial_keys import PartialKeys, Skewing, partial_parts
from hybridgen.kv_cache.quantize import (
    dequantize_int8,
    head_groups,
    key_mean,
    make_sketch,
    quantize_int8,
    sketch_bytes,
)
from hybridgen.kv_cache.row_pool import RowPool, pool_parts
from hybridgen.kv_cache.staging import Staging
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostBuffer, HostSlab
from hybridgen.offload.scanned_keys import ScannedKeys
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine

Shape = tuple[int, int, int, int]
Part = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class KeyStorage:
    """How the host keeps keys: `--key-type` (torch.int8 for `int8`), `--sketch`, `--sketch-home`.

    sketch: int4, int2, partial, pages or None; the last two lie on the device whatever `sketch_on_device` says.
    """

    stored: torch.dtype
    sketch: str | None = None
    sketch_on_device: bool = False
    partial_ratio: float = 0.2  # of `partial`: columns of its keys
    pool_capacity: float = 1.0  # of `partial`: the share of a prompt's host rows that may be alive; 1: rows never die
    pool_policy: str = "counter"
    packed_bits: int | None = None  # `cache.compress`: of keys and values in groups of channels; None: `stored`

    @property
    def on_device(self) -> bool:
        """Whether there is a sketch, and the device scores by it."""
        return self.sketch is not None and (self.sketch_on_device or self.bits is None)

    @property
    def bits(self) -> int | None:
        """Of a sketch of codes."""
        return {"int4": 4, "int2": 2}.get(self.sketch or "")


def key_parts(shape: Shape, storage: KeyStorage) -> list[Part]:
    """Shape and type of every tensor that keys [B, Hkv, N, d] take in host memory."""
    batch, heads, rows, dim = shape
    if storage.packed_bits is not None:
        return [value_part(shape, storage, storage.stored)]
    parts: list[Part] = [(shape, storage.stored)]
    if storage.stored is torch.int8:
        parts += [((batch, heads, rows, 1), torch.float32), ((batch, heads, dim), torch.float32)]
    if storage.sketch is not None and not storage.on_device:
        parts += sketch_parts(shape, storage, storage.stored)
    return parts


def value_part(shape: Shape, storage: KeyStorage, dtype: torch.dtype) -> Part:
    """Shape and type of the tensor that values [B, Hkv, N, d] take in host memory; dtype: the model's."""
    if storage.packed_bits is None:
        return shape, dtype
    return (*shape[:3], GroupCodec(storage.packed_bits, dtype).row_bytes(shape[3])), torch.uint8


def sketch_parts(shape: Shape, storage: KeyStorage, dtype: torch.dtype) -> list[Part]:
    """Shape and type of every tensor that the sketch of keys [B, Hkv, N, d] takes; dtype: the model's."""
    if storage.sketch == "partial":
        parts = partial_parts(shape, storage.partial_ratio, dtype)
        return parts if storage.pool_capacity >= 1.0 else parts + pool_parts(shape)
    if storage.sketch == "pages":
        return [bounds_part(shape, dtype)]
    batch, heads, rows, dim = shape
    assert storage.bits is not None
    return [((batch, heads, rows // AGEING_BLOCK, sketch_bytes(storage.bits, dim)), torch.uint8)]


def make_host_keys(
    shape: Shape,
    storage: KeyStorage,
    dtype: torch.dtype,
    slab: HostSlab,
    transfer: TransferEngine,
    device: torch.device,
    skewing: Skewing | None = None,
) -> HostKeys:
    """Keys of this type, in memory that `slab` has for `key_parts`; dtype: the model's; device: of the computation.

    skewing: of this layer, where the sketch is `partial`.
    """
    keys: HostKeys
    if storage.packed_bits is not None:
        return PackedRows(shape, GroupCodec(storage.packed_bits, dtype), slab, transfer)
    if storage.stored is torch.int8:
        keys = Int8Keys(shape, dtype, slab, transfer)
    else:
        keys = PlainKeys(shape, storage.stored, dtype, slab, transfer)
    if storage.sketch is None:
        return keys
    parts = sketch_parts(shape, storage, dtype)
    if not storage.on_device:
        assert storage.bits is not None
        return HostSketchedKeys(keys, storage.bits, slab.take(*parts[0]), transfer)
    # Zeroed: rows that are not there yet are scored with the others, and left out afterwards.
    tensors = [torch.zeros(size, dtype=kind, device=device) for size, kind in parts]
    if storage.sketch == "partial":
        assert skewing is not None
        columns, projection, *of_pool = tensors
        pool = RowPool(storage.pool_capacity, storage.pool_policy, *of_pool) if of_pool else None
        return DeviceSketchedKeys(keys, PartialKeys(skewing, columns, projection, pool))
    if storage.sketch == "pages":
        return DeviceSketchedKeys(keys, PageBounds(*tensors))
    assert storage.bits is not None
    return DeviceSketchedKeys(keys, IntSketch(storage.bits, *tensors))


def make_host_values(
    shape: Shape, storage: KeyStorage, dtype: torch.dtype, slab: HostSlab, transfer: TransferEngine
) -> PlainKeys | PackedRows:
    """Values, in memory that `slab` has for `value_part`; dtype: the model's."""
    if storage.packed_bits is not None:
        return PackedRows(shape, GroupCodec(storage.packed_bits, dtype), slab, transfer)
    return PlainKeys(shape, dtype, dtype, slab, transfer)


class HostKeys(ABC):
    """Keys [B, Hkv, N, d] of the host tier, encoded on the device before they leave it."""

    #: What the report says: the dtype, `int8`, with `+int2`, say, for a sketch.
    kind: str
    #: The rows themselves, where kernels may read them in place: any floating type.
    in_place: HostBuffer | None = None
    #: Whether a sketch is scored in their stead, which takes a small part of the time.
    sketched = False
    #: Whether it lies on the device: `device_scan`.
    on_device = False

    @abstractmethod
    def scanned(self) -> HostBuffer | ScannedKeys:
        """What the CPU scores."""

    def exact(self) -> HostBuffer | ScannedKeys:
        """What the CPU scores where the mass is measured that was really covered."""
        return self.scanned()

    def device_scan(self, query: Tensor, lengths: list[int], scale: float) -> DeviceScan | None:
        """The device's scan of each sequence's first lengths[b] keys by query [B, Hq, d]; None: the CPU scans."""
        return None

    @abstractmethod
    def buffers(self) -> list[HostBuffer]:
        """All that it takes of the slab: `key_parts`."""

    @abstractmethod
    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        """What is to be known of a sequence before `store`.

        keys: its first tokens', [Hkv, n, d] without sinks; queries: [m, Hq, d], of its first prompt, all of them.
        """

    def prompted(self, sequence: int, rows: int) -> None:  # noqa: B027 - only a sketch may ask
        """Before `store`: with the prompt that is taken in, the sequence has so many host rows."""

    def alive(self) -> list[int] | None:
        """How many rows of each sequence may be chosen; None: all."""
        return None

    @abstractmethod
    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        """Whole blocks of keys [Hkv, 64 * m, d] into the rows from `row` on; the copies that still read them."""

    @abstractmethod
    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        """The first rows into out [Hkv, rows, d], on the device."""

    @abstractmethod
    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        """K and V of the chosen rows [B, Hkv, K] to the device, in the model's dtype."""


class PlainKeys(HostKeys):
    """Rows of a floating type."""

    def __init__(
        self, shape: Shape, stored: torch.dtype, dtype: torch.dtype, slab: HostSlab, transfer: TransferEngine
    ) -> None:
        """stored: the type in host memory; dtype: the model's."""
        self.kind = str(stored).removeprefix("torch.")
        self.in_place: HostBuffer = slab.take(shape, stored)
        self._dtype, self._transfer = dtype, transfer
        self.in_place.tensor[:, :, 0] = 0  # what padding points to (selection/budget.py) is finite

    def scanned(self) -> HostBuffer:
        return self.in_place

    def buffers(self) -> list[HostBuffer]:
        return [self.in_place]

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        pass

    def encoded(self, keys: Tensor) -> Tensor:
        """Rows [Hkv, n, d] as they are stored."""
        return keys.to(self.in_place.tensor.dtype)

    def encoded_like(self, keys: Tensor) -> Tensor:
        """Room for them on the device."""
        return torch.empty_like(keys, dtype=self.in_place.tensor.dtype, memory_format=torch.contiguous_format)

    def decoded(self, stored: Tensor, out: Tensor) -> None:
        """Rows as they are stored into out [Hkv, n, d]."""
        out.copy_(stored)

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        target = self.in_place.device_view[sequence, :, row : row + keys.shape[1]]
        return [self._transfer.copy(target, self.encoded(keys), "d2h")]

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        source = self.in_place.device_view[sequence, :, :rows]
        if source.dtype == out.dtype:
            self._transfer.copy(out, source, "h2d").wait()
            return
        arrived = torch.empty_like(out, dtype=source.dtype)
        self._transfer.copy(arrived, source, "h2d").wait()
        out.copy_(arrived)

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        keys, fetched = staging.slot(layer, rows.shape[2])
        stored = self.in_place.tensor.dtype
        if stored == self._dtype:
            return self._transfer.fetch_rows([self.in_place, values], rows, counts, [keys, fetched])
        arrived = staging.encoded(layer, rows.shape[2])
        ticket = self._transfer.fetch_rows([self.in_place, values], rows, counts, [arrived, fetched])
        return _Decoding(ticket, [keys, fetched], lambda: keys.copy_(arrived))


class PackedRows(HostKeys):
    """Keys or values in groups of channels, each row packed by itself: FlexGen's compressed cache.

    `in_place` has the packed rows, uint8 [B, Hkv, N, bytes]: they are copied whole, and not chosen from.
    """

    def __init__(self, shape: Shape, codec: GroupCodec, slab: HostSlab, transfer: TransferEngine) -> None:
        self.kind, self.codec = codec.name, codec
        self.in_place: HostBuffer = slab.take((*shape[:3], codec.row_bytes(shape[3])), torch.uint8)
        self._transfer = transfer

    def scanned(self) -> HostBuffer:
        raise RuntimeError(f"{self.kind}: nothing scores packed rows")

    def buffers(self) -> list[HostBuffer]:
        return [self.in_place]

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        pass

    def encoded(self, keys: Tensor) -> Tensor:
        """Rows [Hkv, n, d] as they are stored."""
        return self.codec.encode(keys)

    def encoded_like(self, keys: Tensor) -> Tensor:
        """Room for them on the device."""
        return keys.new_empty((*keys.shape[:2], self.in_place.tensor.shape[3]), dtype=torch.uint8)

    def decoded(self, stored: Tensor, out: Tensor) -> None:
        """Rows as they are stored into out [Hkv, n, d]."""
        for packed, head in zip(stored, out, strict=True):
            self.codec.decode(packed, head)

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        target = self.in_place.device_view[sequence, :, row : row + keys.shape[1]]
        return [self._transfer.copy(target, self.encoded(keys), "d2h")]

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        arrived = self.encoded_like(out)
        self._transfer.copy(arrived, self.in_place.device_view[sequence, :, :rows], "h2d").wait()
        self.decoded(arrived, out)

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        raise RuntimeError(f"{self.kind}: packed rows are not fetched one by one")


class Int8Keys(HostKeys):
    """One code a channel and one scale a token and KV head, about a mean that the first prompt piece fixes."""

    kind = "int8"

    def __init__(self, shape: Shape, dtype: torch.dtype, slab: HostSlab, transfer: TransferEngine) -> None:
        batch, heads, rows, dim = shape
        self._codes, self._scales = slab.take(shape, torch.int8), slab.take((batch, heads, rows, 1), torch.float32)
        self._host_mean = slab.take((batch, heads, dim), torch.float32)
        self._mean = torch.zeros(batch, heads, dim, dtype=torch.float32, device=self._codes.device_view.device)
        self._dtype, self._transfer = dtype, transfer
        self._scales.tensor[:, :, 0] = 0
        self._mean_copied = Ticket()

    def scanned(self) -> ScannedKeys:
        scales = HostBuffer(self._scales.tensor.squeeze(3), self._scales.device_view.squeeze(3))
        return ScannedKeys("int8", self._codes, scales, self._host_mean)

    def buffers(self) -> list[HostBuffer]:
        return [self._codes, self._scales, self._host_mean]

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        self._mean[sequence] = key_mean(keys.unsqueeze(0)).squeeze(0)
        target = self._host_mean.device_view[sequence]
        self._transfer.copy(target, self._mean[sequence], "d2h").wait_host()

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        rows, copies = slice(row, row + keys.shape[1]), []
        for heads in head_groups(keys):
            codes, scales = quantize_int8(keys[heads].unsqueeze(0), self._mean[sequence : sequence + 1, heads])
            target, scale_target = (part.device_view[sequence, heads, rows] for part in (self._codes, self._scales))
            copies.append(self._transfer.copy(target, codes[0], "d2h"))
            copies.append(self._transfer.copy(scale_target[..., 0], scales[0], "d2h"))
        return copies

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        device = out.device
        codes = torch.empty(out.shape, dtype=torch.int8, device=device)
        scales = torch.empty(out.shape[:2], dtype=torch.float32, device=device)
        self._transfer.copy(codes, self._codes.device_view[sequence, :, :rows], "h2d").wait()
        self._transfer.copy(scales, self._scales.device_view[sequence, :, :rows, 0], "h2d").wait()
        mean = self._mean[sequence : sequence + 1]
        out.copy_(dequantize_int8(codes.unsqueeze(0), scales.unsqueeze(0), mean, self._dtype)[0])

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        keys, fetched = targets = staging.slot(layer, rows.shape[2])
        decoded = self._transfer.fetch_decoded([self._codes, values], (self._scales, self._mean), rows, counts, targets)
        if decoded is not None:
            return decoded
        codes, scales = staging.encoded(layer, rows.shape[2]), staging.scales(layer, rows.shape[2])
        first = self._transfer.fetch_rows([self._codes, values], rows, counts, [codes, fetched])
        second = self._transfer.fetch_rows([self._scales], rows, counts, [scales])

        def decode() -> None:
            second.wait()
            keys.copy_(dequantize_int8(codes, scales.squeeze(3), self._mean, self._dtype))

        return _Decoding(first, [keys, fetched], decode)


class SketchedKeys(HostKeys):
    """Any of the others, with a sketch beside it that is scored in its stead."""

    sketched = True

    def __init__(self, keys: HostKeys, name: str) -> None:
        self.kind, self.in_place, self.plain = f"{keys.kind}+{name}", keys.in_place, keys

    def exact(self) -> HostBuffer | ScannedKeys:
        return self.plain.scanned()

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        self.plain.begin(sequence, keys, queries)

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        self.plain.load(sequence, rows, out)

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        return self.plain.fetch(values, rows, counts, staging, layer)


class HostSketchedKeys(SketchedKeys):
    """The sketch lies beside the keys, and the CPU scores by it."""

    def __init__(self, keys: HostKeys, bits: int, sketch: HostBuffer, transfer: TransferEngine) -> None:
        """sketch: for `sketch_parts`."""
        super().__init__(keys, f"int{bits}")
        self.sketch, self._bits, self._transfer = sketch, bits, transfer

    def scanned(self) -> ScannedKeys:
        return ScannedKeys(f"int{self._bits}", self.sketch, None, None)

    def buffers(self) -> list[HostBuffer]:
        return [*self.plain.buffers(), self.sketch]

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        first = row // AGEING_BLOCK
        target = self.sketch.device_view[sequence, :, first : first + keys.shape[1] // AGEING_BLOCK]
        copies = [
            self._transfer.copy(target[heads], make_sketch(keys[heads].unsqueeze(0), self._bits)[0], "d2h")
            for heads in head_groups(keys)
        ]
        return copies + self.plain.store(sequence, row, keys)


class DeviceSketchedKeys(SketchedKeys):
    """The sketch lies on the device, which scores by it: the CPU has nothing to scan."""

    on_device = True

    def __init__(self, keys: HostKeys, sketch: DeviceSketch) -> None:
        super().__init__(keys, sketch.name)
        self.sketch = sketch

    def scanned(self) -> ScannedKeys:
        raise RuntimeError(f"{self.kind}: the sketch lies on the device, and the CPU cannot score by it")

    def device_scan(self, query: Tensor, lengths: list[int], scale: float) -> DeviceScan | None:
        return DeviceScan(query, self.sketch, lengths, scale)

    def buffers(self) -> list[HostBuffer]:
        return self.plain.buffers()

    def begin(self, sequence: int, keys: Tensor, queries: Tensor) -> None:
        super().begin(sequence, keys, queries)
        self.sketch.begin(sequence, queries)

    def prompted(self, sequence: int, rows: int) -> None:
        self.sketch.prompted(sequence, rows)

    def alive(self) -> list[int] | None:
        return self.sketch.alive()

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        self.sketch.store(sequence, row, keys)
        return self.plain.store(sequence, row, keys)


class _Decoding(FetchTicket):
    """A fetch whose rows are made into the model's dtype when they are waited for."""

    def __init__(self, fetched: FetchTicket, targets: list[Tensor], decode: Callable[[], object]) -> None:
        super().__init__(Ticket(), targets)
        self._fetched, self._decode = fetched, decode

    def wait(self) -> None:
        self._fetched.wait()
        self._decode()
