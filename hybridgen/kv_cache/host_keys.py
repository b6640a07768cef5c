"""The keys of a layer's host tier, in the type that `--key-type` and `--sketch` ask for.

What is stored is what counts: the scan scores it, fetched rows are made from it, an appended prompt attends to it
(contracts.md, "Quantised keys"). A sketch is scored in its stead and lies beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import AGEING_BLOCK
from hybridgen.kv_cache.quantize import (
    dequantize_int8,
    head_groups,
    key_mean,
    make_sketch,
    quantize_int8,
    sketch_bytes,
    sketch_logits,
)
from hybridgen.kv_cache.staging import Staging
from hybridgen.offload.host_memory import HostBuffer, HostSlab
from hybridgen.offload.logit_worker import ScannedKeys, ScanTicket
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine
from hybridgen.selection.budget import per_sequence
from hybridgen.selection.host_logits import HostLogits

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class KeyStorage:
    """How the host keeps keys: `--key-type` (torch.int8 for `int8`), `--sketch` (bits, or None), `--sketch-home`."""

    stored: torch.dtype
    sketch_bits: int | None = None
    sketch_on_device: bool = False

    @property
    def on_device(self) -> bool:
        """Whether there is a sketch, and the device scores by it."""
        return self.sketch_bits is not None and self.sketch_on_device


def key_parts(shape: Shape, storage: KeyStorage) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor that keys [B, Hkv, N, d] take in host memory."""
    batch, heads, rows, dim = shape
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [(shape, storage.stored)]
    if storage.stored is torch.int8:
        parts += [((batch, heads, rows, 1), torch.float32), ((batch, heads, dim), torch.float32)]
    if storage.sketch_bits is not None and not storage.on_device:
        parts.append(sketch_part(shape, storage))
    return parts


def sketch_part(shape: Shape, storage: KeyStorage) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of the sketch of keys [B, Hkv, N, d]."""
    batch, heads, rows, dim = shape
    assert storage.sketch_bits is not None
    return (batch, heads, rows // AGEING_BLOCK, sketch_bytes(storage.sketch_bits, dim)), torch.uint8


def make_host_keys(
    shape: Shape,
    storage: KeyStorage,
    dtype: torch.dtype,
    slab: HostSlab,
    transfer: TransferEngine,
    device: torch.device,
) -> HostKeys:
    """Keys of this type, in memory that `slab` has for `key_parts`; dtype: the model's; device: of the computation."""
    keys: HostKeys
    if storage.stored is torch.int8:
        keys = Int8Keys(shape, dtype, slab, transfer)
    else:
        keys = PlainKeys(shape, storage.stored, dtype, slab, transfer)
    if storage.sketch_bits is None:
        return keys
    size, dtype = sketch_part(shape, storage)
    if storage.on_device:
        return DeviceSketchedKeys(keys, storage.sketch_bits, torch.empty(size, dtype=dtype, device=device), transfer)
    return SketchedKeys(keys, storage.sketch_bits, slab.take(size, dtype), transfer)


class HostKeys(ABC):
    """Keys [B, Hkv, N, d] of the host tier, encoded on the device before they leave it."""

    #: What the report says: the dtype, `int8`, with `+int2` or `+int4` for a sketch.
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
    def begin(self, sequence: int, keys: Tensor) -> None:
        """The sequence's first tokens, [Hkv, n, d] without sinks: what is to be known of it before `store`."""

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

    def begin(self, sequence: int, keys: Tensor) -> None:
        pass

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        target = self.in_place.device_view[sequence, :, row : row + keys.shape[1]]
        return [self._transfer.copy(target, keys.to(target.dtype), "d2h")]

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

    def begin(self, sequence: int, keys: Tensor) -> None:
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

    def __init__(self, keys: HostKeys, bits: int, sketch: HostBuffer, transfer: TransferEngine) -> None:
        """sketch: for `sketch_part`."""
        self.kind, self.in_place = f"{keys.kind}+int{bits}", keys.in_place
        self.plain, self.sketch, self._bits, self._transfer = keys, sketch, bits, transfer

    def scanned(self) -> ScannedKeys:
        return ScannedKeys(f"int{self._bits}", self.sketch, None, None)

    def exact(self) -> HostBuffer | ScannedKeys:
        return self.plain.scanned()

    def buffers(self) -> list[HostBuffer]:
        return [*self.plain.buffers(), self.sketch]

    def begin(self, sequence: int, keys: Tensor) -> None:
        self.plain.begin(sequence, keys)

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        first = row // AGEING_BLOCK
        target = self.sketch.device_view[sequence, :, first : first + keys.shape[1] // AGEING_BLOCK]
        copies = [
            self._transfer.copy(target[heads], make_sketch(keys[heads].unsqueeze(0), self._bits)[0], "d2h")
            for heads in head_groups(keys)
        ]
        return copies + self.plain.store(sequence, row, keys)

    def load(self, sequence: int, rows: int, out: Tensor) -> None:
        self.plain.load(sequence, rows, out)

    def fetch(self, values: HostBuffer, rows: Tensor, counts: Tensor, staging: Staging, layer: int) -> FetchTicket:
        return self.plain.fetch(values, rows, counts, staging, layer)


class DeviceSketchedKeys(SketchedKeys):
    """The sketch lies on the device, which scores by it: the CPU has nothing to scan."""

    on_device = True

    def __init__(self, keys: HostKeys, bits: int, sketch: Tensor, transfer: TransferEngine) -> None:
        super().__init__(keys, bits, HostBuffer(sketch, sketch), transfer)

    def scanned(self) -> ScannedKeys:
        raise RuntimeError(f"{self.kind}: the sketch lies on the device, and the CPU cannot score by it")

    def device_scan(self, query: Tensor, lengths: list[int], scale: float) -> DeviceScan | None:
        return DeviceScan(query, self.sketch.tensor, self._bits, lengths, scale)

    def buffers(self) -> list[HostBuffer]:
        return self.plain.buffers()

    def store(self, sequence: int, row: int, keys: Tensor) -> list[Ticket]:
        first, blocks = row // AGEING_BLOCK, keys.shape[1] // AGEING_BLOCK
        for heads in head_groups(keys):
            made = make_sketch(keys[heads].unsqueeze(0), self._bits)[0]
            self.sketch.tensor[sequence, heads, first : first + blocks] = made
        return self.plain.store(sequence, row, keys)


class DeviceScan(ScanTicket):
    """A scan by the device: it runs in the stream of whoever asks for the logits."""

    def __init__(self, query: Tensor, sketch: Tensor, bits: int, lengths: list[int], scale: float) -> None:
        self._query, self._sketch, self._bits, self._lengths, self._scale = query, sketch, bits, lengths, scale

    def inputs(self) -> tuple[object, ...]:
        """All that the logits depend on beside the query, on the device already."""
        return self._sketch, per_sequence(self._lengths, self._query.device), max(self._lengths)

    def logits(self) -> HostLogits:
        return HostLogits(self.device_logits())

    def device_logits(self) -> Tensor:
        """float32 [B, Hq, n]."""
        if self._query.is_cuda:
            from hybridgen.kv_cache.sketch_kernel import score_sketch  # Triton: only where there is a GPU

            return score_sketch(self._query, self._sketch, self._bits, self._lengths, self._scale)
        return sketch_logits(self._query, self._sketch, self._bits, max(self._lengths), self._scale)

    def release(self, after: Ticket) -> None:
        pass


class _Decoding(FetchTicket):
    """A fetch whose rows are made into the model's dtype when they are waited for."""

    def __init__(self, fetched: FetchTicket, targets: list[Tensor], decode: Callable[[], object]) -> None:
        super().__init__(Ticket(), targets)
        self._fetched, self._decode = fetched, decode

    def wait(self) -> None:
        self._fetched.wait()
        self._decode()
