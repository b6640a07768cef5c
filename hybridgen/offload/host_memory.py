"""Host memory for the KV cache: mapped in one slab, on huge pages where the system allows it.

On a machine with a GPU the slab is registered with CUDA once, so that copies run at full speed and
kernels can read rows straight out of it (zero copy). PyTorch's pinned allocator would round
each tensor up to a power of two and take three times as long.
"""

from __future__ import annotations

import math
import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridgen.errors import InsufficientMemoryError

ALIGNMENT_BYTES = 4096
REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


@dataclass(frozen=True)
class HostBuffer:
    """One tensor of host memory, and the same bytes as the device sees them.

    device_view is `tensor` itself where the CPU plays the GPU's part.
    """

    tensor: Tensor
    device_view: Tensor


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What `HostSlab.take` uses up for a tensor of this shape."""
    size = math.prod(shape) * dtype.itemsize
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostSlab:
    """A mapping of `size_bytes` from which tensors are cut one after the other; freed as a whole."""

    def __init__(self, size_bytes: int, device: torch.device, poison: bool = False) -> None:
        """poison: fill with NaN (tests), so that a row nobody wrote shows up in the result."""
        self._used = 0
        self._device = device
        # Private: shared anonymous memory gets no huge pages from madvise.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, max(size_bytes, ALIGNMENT_BYTES), flags=flags)
        except OSError as error:
            raise InsufficientMemoryError(f"the system gave no {size_bytes} bytes of host memory: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if poison:
            self._bytes.fill_(0xFF)  # all bits set is a NaN in every floating type
        self._device_bytes = self._bytes
        if device.type == "cuda":
            self._device_bytes = _register(self._bytes, device)
            # Bound to the mapping, which lives as long as any tensor cut from it.
            weakref.finalize(self._map, _unregister, self._bytes.data_ptr())

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        size = math.prod(shape) * dtype.itemsize
        end = self._used + size
        if end > self._bytes.numel():
            raise ValueError(f"the slab has {self._bytes.numel() - self._used} bytes left, {size} are asked for")
        piece = slice(self._used, end)
        self._used += padded_bytes(shape, dtype)
        return HostBuffer(self._bytes[piece].view(dtype).view(shape), self._device_bytes[piece].view(dtype).view(shape))


class _DevicePointer:
    """Host memory that CUDA knows, presented as a CUDA array (unified addressing: same pointer)."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _register(memory: Tensor, device: torch.device) -> Tensor:
    cudart: Any = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), REGISTER_FLAGS))
    if status != 0:
        raise InsufficientMemoryError(
            f"CUDA refused to register {memory.numel()} bytes of host memory (error {status}); "
            "the locked-memory limit may be too low: see `ulimit -l`"
        )
    return torch.as_tensor(_DevicePointer(memory.data_ptr(), memory.numel()), device=device)


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # a block that ages may still be on its way here
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)
