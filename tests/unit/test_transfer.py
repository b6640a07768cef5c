"""The asynchrony seam on the CPU: what is copied, when it is seen, and what is counted."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridgen.offload.cuda_transfer import CudaTransfer
from hybridgen.offload.host_memory import ALIGNMENT_BYTES, HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import (
    ImmediateTransfer,
    LazyTransfer,
    Ticket,
    TransferEngine,
    make_transfer,
)
from hybridgen.telemetry import Telemetry

CPU = torch.device("cpu")
BOTH = [ImmediateTransfer, LazyTransfer]


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def host(values: torch.Tensor) -> HostBuffer:
    slab = HostSlab(padded_bytes(tuple(values.shape), values.dtype), CPU)
    buffer = slab.take(tuple(values.shape), values.dtype)
    buffer.tensor.copy_(values)
    return buffer


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("waits_on_host", [False, True])
def test_a_copy_is_there_after_the_wait(telemetry: Telemetry, kind: type[TransferEngine], waits_on_host: bool) -> None:
    source, target = torch.arange(6.0).view(2, 3), torch.full((2, 3), -1.0)
    ticket = kind(telemetry).copy(target, source, "d2h")
    if kind is LazyTransfer:
        assert target.isnan().all(), "a forgotten wait must show"
    (ticket.wait_host if waits_on_host else ticket.wait)()
    assert torch.equal(target, source)
    assert dict(telemetry.bytes_moved) == {"d2h": 24}


@pytest.mark.parametrize("kind", BOTH)
def test_a_copy_into_a_strided_view_of_another_type(telemetry: Telemetry, kind: type[TransferEngine]) -> None:
    """As the query goes to the host: from bfloat16 into float32; bytes are counted where they land."""
    target = torch.zeros(2, 4, 3)
    source = torch.arange(6).to(torch.bfloat16).view(2, 3)
    kind(telemetry).copy(target[:, 1], source, "d2h").wait()
    assert torch.equal(target[:, 1], source.float())
    assert target[:, [0, 2, 3]].abs().sum() == 0
    assert dict(telemetry.bytes_moved) == {"d2h": 24}


def test_a_lazy_ticket_copies_once(telemetry: Telemetry) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    ticket = LazyTransfer(telemetry).copy(target, source, "h2d")
    ticket.wait()
    target.fill_(5.0)
    ticket.wait()
    ticket.wait_host()
    assert (target == 5.0).all(), "whoever waits late must not undo what came after"


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_fetched_by_head(telemetry: Telemetry, kind: type[TransferEngine], dtype: torch.dtype) -> None:
    batch, heads, length, dim = 2, 3, 10, 4
    values = torch.randn(batch, heads, length, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys_host, values_host = host(values), host(values + 1)
    rows = torch.tensor([[[0, 9, 9], [5, 0, 1], [2, 3, 4]], [[9, 8, 7], [0, 0, 0], [1, 5, 1]]])
    counts = torch.tensor([[3, 3, 2], [0, 1, 3]])
    targets = [torch.zeros(batch, heads, 3, dim, dtype=dtype) for _ in range(2)]
    ticket = kind(telemetry).fetch_rows([keys_host, values_host], rows, counts, targets)
    ticket.wait()
    keys, fetched = ticket.targets
    assert keys.shape == (batch, heads, 3, dim) and keys.dtype == dtype
    for b in range(batch):
        for h in range(heads):
            wanted = rows[b, h, : counts[b, h]]
            assert torch.equal(keys[b, h, : len(wanted)], values[b, h, wanted])
            assert torch.equal(fetched[b, h, : len(wanted)], (values + 1)[b, h, wanted])
    moved = telemetry.end_step().bytes_moved
    assert moved == {"h2d": 2 * int(counts.sum()) * dim * dtype.itemsize}, "padding is not counted"


def test_fetching_no_rows(telemetry: Telemetry) -> None:
    rows, counts = torch.zeros(1, 2, 0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    targets = [torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 4)]
    table = host(torch.ones(1, 2, 5, 4))
    keys, values = ImmediateTransfer(telemetry).fetch_rows([table, table], rows, counts, targets).targets
    assert keys.shape == values.shape == (1, 2, 0, 4)


@pytest.mark.parametrize("kind", BOTH)
def test_call_after(telemetry: Telemetry, kind: type[TransferEngine]) -> None:
    calls: list[int | None] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
    address = ctypes.cast(function, ctypes.c_void_p).value
    engine = kind(telemetry)
    assert address is not None
    engine.call_after(engine.copy(torch.zeros(1), torch.ones(1), "d2h"), address, 4242)
    assert calls == [4242]


def test_kinds(telemetry: Telemetry) -> None:
    assert type(make_transfer("auto", CPU, telemetry)) is ImmediateTransfer
    assert type(make_transfer("immediate", CPU, telemetry)) is ImmediateTransfer
    assert type(make_transfer("lazy", CPU, telemetry)) is LazyTransfer
    assert telemetry.clock is LazyTransfer.clock


# Host memory


def test_tensors_of_a_slab_do_not_overlap() -> None:
    shapes = [(3, 5), (1,), (2, 2, 700), (4, 4)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    total = sum(padded_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    slab = HostSlab(total, CPU)
    buffers = [slab.take(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for number, buffer in enumerate(buffers):
        assert buffer.tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert buffer.device_view.data_ptr() == buffer.tensor.data_ptr()
        buffer.tensor.fill_(number + 1)
    for number, (buffer, shape) in enumerate(zip(buffers, shapes, strict=True)):
        assert buffer.tensor.shape == shape and (buffer.tensor == number + 1).all()
    with pytest.raises(ValueError, match="0 bytes left"):
        slab.take((1,), torch.float32)


def test_a_tensor_outlives_its_slab() -> None:
    tensor = HostSlab(1 << 20, CPU).take((1 << 18,), torch.float32).tensor
    tensor.fill_(3.0)
    others = [HostSlab(1 << 20, CPU, poison=True) for _ in range(4)]
    assert others and (tensor == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_poison_is_nan_in_every_type(dtype: torch.dtype) -> None:
    assert HostSlab(4096, CPU, poison=True).take((16,), dtype).tensor.isnan().all()
    assert (HostSlab(4096, CPU).take((16,), dtype).tensor == 0).all()


class MemoryCopies:
    """Stands in for the CUDA driver: 2-D copies, of memory that the CPU sees."""

    def __init__(self) -> None:
        self.calls = 0

    def cuMemcpy2DAsync_v2(self, about: Any, stream: ctypes.c_void_p) -> int:  # noqa: N802 - the driver's name
        copy = about._obj
        assert ctypes.sizeof(copy) == 128, "as in cuda.h"
        assert (copy.srcMemoryType, copy.dstMemoryType, stream.value) == (4, 4, 77)
        assert copy.srcPitch >= copy.WidthInBytes <= copy.dstPitch
        for row in range(copy.Height):
            to, source = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
            ctypes.memmove(to, source, copy.WidthInBytes)
        self.calls += 1
        return 0


class CudaCopies(CudaTransfer):
    """What `CudaTransfer` tells the driver, without a GPU."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry, self._driver = telemetry, MemoryCopies()  # type: ignore[assignment]
        self._running = SimpleNamespace(stream=SimpleNamespace(cuda_stream=77))  # type: ignore[assignment]

    def mark(self) -> Ticket:
        return Ticket()

    def hand_over(self, *tensors: torch.Tensor) -> None:
        """On the CPU there is no stream to use them in."""


@pytest.mark.parametrize("kind", [*BOTH, CudaCopies])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_use_are_streamed(telemetry: Telemetry, kind: type[TransferEngine], dtype: torch.dtype) -> None:
    """Ragged, from a tier with room to spare into slots of the longest."""
    sources = [host(torch.randn(3, 2, 40, 8).to(dtype)) for _ in range(2)]
    lengths = [33, 0, 16]
    targets = [torch.zeros(3, 2, 33, 8, dtype=dtype) for _ in range(2)]
    transfer = kind(telemetry)
    transfer.stream_rows(sources, lengths, targets).wait()
    for source, target in zip(sources, targets, strict=True):
        for b, length in enumerate(lengths):
            assert torch.equal(target[b, :, :length], source.tensor[b, :, :length])
            rest = target[b, :, length:]
            assert rest.isnan().all() if kind is LazyTransfer else (rest == 0).all()
    assert dict(telemetry.bytes_moved) == {"h2d": 2 * 49 * 2 * 8 * dtype.itemsize}
    if isinstance(transfer, CudaCopies):
        assert transfer._driver.calls == 4, "one a sequence with rows, of K and of V"
