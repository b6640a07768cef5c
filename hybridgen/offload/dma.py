"""Copies between the tiers by the GPU's copy engines, through the driver.

torch copies what is not contiguous by a kernel, which fills the multiprocessors with threads that wait for the link,
or through a temporary in pageable memory. A cache's heads lie a whole tier apart, but the tokens of each lie together:
one two-dimensional copy takes them all.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

LEAST_BYTES = 1 << 20  # below, a kernel is as good
_UNIFIED = 4  # CUmemorytype: the address says where it is


class _Copy2D(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D: `Height` pieces of `WidthInBytes` each, a pitch from one to the next."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def is_for_dma(target: Tensor, source: Tensor) -> bool:
    """Whether `copy_pieces` takes them, and is worth it: [H, n, d] of one type, each [n, d] contiguous."""
    return (
        target.dtype is source.dtype
        and target.shape == source.shape
        and target.dim() == 3
        and target.nbytes >= LEAST_BYTES
        and target[0].is_contiguous()
        and source[0].is_contiguous()
    )


def copy_pieces(driver: ctypes.CDLL, target: Tensor, source: Tensor, stream: int) -> None:
    """Copy source into target, in the stream of this handle; either may lie in registered host memory."""
    copy = _Copy2D(
        srcMemoryType=_UNIFIED,
        srcDevice=source.data_ptr(),
        srcPitch=source.stride(0) * source.element_size(),
        dstMemoryType=_UNIFIED,
        dstDevice=target.data_ptr(),
        dstPitch=target.stride(0) * target.element_size(),
        WidthInBytes=target[0].nbytes,
        Height=target.shape[0],
    )
    status = driver.cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
    if status != 0:
        raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {status}")
