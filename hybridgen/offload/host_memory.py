"""Host memory for the KV cache: slabs, on huge pages where the system allows it, on the memory nodes asked for.

On a machine with a GPU a slab is registered with CUDA once, so that copies run at full speed and
kernels can read rows straight out of it (zero copy). PyTorch's pinned allocator would round
each tensor up to a power of two and take three times as long.

The order is mapping, binding to nodes, touching, registering: pages that exist stay where they are,
and registered ones for good. What the system calls do is in cpp_ext/host_memory.h, and a guest with
three memory nodes proves it (scripts/guest_test.sh).
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import re
import resource
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridgen.errors import ConfigError, InsufficientMemoryError, UnknownNameError

try:
    from hybridgen import _C
except ImportError as error:
    raise ImportError(
        "the C++ extension is not built: run `python3 setup.py build_ext --inplace` in the checkout, "
        f"or `bash scripts/quickstart.sh` ({error})"
    ) from None

ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
MEMORY_POLICIES = ("local", "semantic", "interleave", "inverse")
CAP_IPC_LOCK = 14  # a process with this capability may lock as much as it likes
PAGE_SAMPLES = 4096  # of a slab's pages, to see where they lie

# A slab is one of many: each limit of the machine is told once.
_warn_once = functools.cache(logging.getLogger(__name__).warning)


class MemoryNode(NamedTuple):
    """A memory node; one without CPUs is far memory (CXL, HBM, ...)."""

    id: int
    cpus: list[int]
    memory_bytes: int  # 0: none that this process may use
    available_bytes: int  # free, or held by the page cache alone
    distances: dict[int, int]  # to each node; may be empty


@dataclass(frozen=True)
class KVPlacement:
    """On which memory nodes keys and values lie; where there are several, their pages take turns."""

    policy: str
    keys: tuple[int, ...]
    values: tuple[int, ...]
    reason: str | None  # why they lie together although the policy would part them


@dataclass
class SlabGrant:
    """What the system granted of what a slab asked for; for the report."""

    nodes: tuple[int, ...] | None  # asked for; None: wherever the system puts it
    bound: bool  # to these nodes
    huge_pages: bool  # the system has them for this memory
    huge_page_bytes: int | None = None  # how much lies on them; None: not touched yet
    touched_from: int | None = None  # node whose CPUs touched it; -1: several; None: not touched
    sampled_pages: dict[int, int] | None = None  # how many of up to PAGE_SAMPLES pages lie on which node
    registered_bytes: int = 0  # with CUDA
    limits: tuple[str, ...] = ()  # what was refused, or may be


@dataclass(frozen=True)
class HostBuffer:
    """One tensor of host memory, and the same bytes as the device sees them.

    device_view is `tensor` itself where the CPU plays the GPU's part.
    """

    tensor: Tensor
    device_view: Tensor


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What `HostSlab.take` uses up for a tensor of this shape."""
    return _round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)


def memory_nodes() -> tuple[MemoryNode, ...]:
    """The memory nodes of this machine, by id."""
    return tuple(MemoryNode(*node) for node in _C.memory_nodes())


def resolve_placement(
    policy: str,
    nodes: Sequence[MemoryNode],
    cpus: Sequence[int],
    near: int | None = None,
    far: int | None = None,
) -> KVPlacement:
    """Where keys and values lie on a machine with these nodes, for a process that may use these CPUs.

    local: both on the near node. semantic: keys near, values far. inverse: the other way round, the
    paper's bad case. interleave: both over all nodes with memory.
    near: None for the node with most of `cpus`. far: None for a memory-only node, else another than the near one.
    """
    if policy not in MEMORY_POLICIES:
        raise UnknownNameError("memory policy", policy, MEMORY_POLICIES)
    try:
        keys, values, reason = _C.place_kv(policy, [tuple(node) for node in nodes], list(cpus), near, far)
    except ValueError as error:
        raise ConfigError(f"memory policy {policy!r}: {error}") from None
    return KVPlacement(policy, tuple(keys), tuple(values), reason or None)


def place_kv(policy: str, near: int | None = None, far: int | None = None) -> KVPlacement:
    """`resolve_placement` for this machine; says once if there is nothing to separate."""
    placed = resolve_placement(policy, memory_nodes(), _C.allowed_cpus(), near, far)
    if placed.reason is not None:
        _warn_once(f"memory policy {policy!r}: {placed.reason}")
    return placed


class HostSlab:
    """Memory of `size_bytes` from which tensors are cut one after the other; freed as a whole."""

    def __init__(
        self,
        size_bytes: int,
        device: torch.device,
        poison: bool = False,
        placement: tuple[int, ...] | None = None,
        reserve_bytes: int = 0,
    ) -> None:
        """poison: fill with NaN (tests), so that a row nobody wrote shows up in the result.

        placement: memory nodes on which the pages lie, several in turn; they are made to exist at once.
        None: pages come into being where and when they are first written.
        reserve_bytes: how large `grow` may make the slab; costs addresses, no memory.
        """
        region = _Region(size_bytes, device, placement, reserve_bytes)
        self._lease(region, size_bytes, poison, when_free=_let_go)

    def _lease(self, region: _Region, size_bytes: int, poison: bool, when_free: Callable[[_Region], None]) -> HostSlab:
        """Cut tensors from the region; when the last one is gone, so that nobody can see it, `when_free` gets it."""
        self._region, self._poison = region, poison
        # Every tensor keeps its storage alive, the storage this view, on the host as on the device.
        self._view = memoryview(region.mapping)
        weakref.finalize(self._view, when_free, region).atexit = False
        self._bytes = torch.frombuffer(self._view, dtype=torch.uint8)
        self._open(0, max(size_bytes, ALIGNMENT_BYTES))
        return self

    def _open(self, start: int, size_bytes: int) -> None:
        self._end = start + size_bytes
        self._block = self._device_block = self._bytes[start : self._end]
        self._used = 0
        if self._poison:
            self._block.fill_(0xFF)  # all bits set is a NaN in every floating type
        if self._region.device.type == "cuda":
            self._device_block = _seen_by_device(self._block.data_ptr(), size_bytes, self._view, self._region.device)

    @property
    def granted(self) -> SlabGrant:
        return self._region.granted

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostBuffer:
        size = math.prod(shape) * dtype.itemsize
        end = self._used + size
        if end > self._block.numel():
            raise ValueError(f"the slab has {self._block.numel() - self._used} bytes left, {size} are asked for")
        piece = slice(self._used, end)
        self._used += padded_bytes(shape, dtype)
        return HostBuffer(self._block[piece].view(dtype).view(shape), self._device_block[piece].view(dtype).view(shape))

    def grow(self, more_bytes: int) -> None:
        """Open `more_bytes` of the reserve; what was cut before stays where it is.

        What was left is given up: a copy must not cross from one registered block into the next. Grow in large steps.
        """
        start = _round_up(self._end, ALIGNMENT_BYTES)
        left = self._region.size_bytes - start
        if more_bytes > left:
            raise ValueError(f"the slab can grow by {max(left, 0)} bytes, {more_bytes} are asked for")
        self._region.open(start, more_bytes)
        self._open(start, more_bytes)


class SlabPool:
    """Slabs that are used again: mapping, touching and registering gigabytes takes seconds.

    `take` gives a slab as `HostSlab` makes one; it comes back by itself when no tensor that was cut
    from it is left. What the earlier user wrote is still there, or NaN if the pool poisons. Thread-safe.
    """

    def __init__(self, device: torch.device, poison: bool = False) -> None:
        self._device, self._poison = device, poison
        self._lock = threading.Lock()
        self._idle: list[_Region] = []
        # A finalizer may run in the middle of anything, also of `take`: it only appends here, without a lock.
        self._returned: deque[_Region] = deque()
        self.allocated_slabs = 0
        self.reused_slabs = 0

    @property
    def idle_bytes(self) -> int:
        """Held for the next `take`, and to be had for other things by `release_idle`."""
        with self._lock:
            self._collect()
            return sum(region.size_bytes for region in self._idle)

    def take(self, size_bytes: int, placement: tuple[int, ...] | None = None) -> HostSlab:
        """A slab of `size_bytes`; it occupies `class_bytes(size_bytes)`, or what a larger one did that was free."""
        with self._lock:
            self._collect()
            fitting = [region for region in self._idle if region.fits(size_bytes, placement)]
            if fitting:
                region = min(fitting, key=lambda region: region.size_bytes)
                self._idle.remove(region)
                self.reused_slabs += 1
                if self._device.type == "cuda":
                    torch.cuda.synchronize()  # the last copies into it may still be under way
            else:
                # Those too small make way, or requests that get longer would pile up slabs.
                self._idle = [region for region in self._idle if region.placement != placement]
                region = self._new_region(class_bytes(size_bytes), placement)
                self.allocated_slabs += 1
        slab = HostSlab.__new__(HostSlab)
        return slab._lease(region, size_bytes, self._poison, when_free=self._returned.append)

    def release_idle(self) -> None:
        """Give the memory of all slabs that are free back to the system."""
        with self._lock:
            self._collect()
            self._idle.clear()

    def _new_region(self, size_bytes: int, placement: tuple[int, ...] | None) -> _Region:
        try:
            return _Region(size_bytes, self._device, placement)
        except InsufficientMemoryError:
            if not self._idle:
                raise
        self._idle.clear()
        return _Region(size_bytes, self._device, placement)

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())


def class_bytes(size_bytes: int) -> int:
    """What a pool allocates for a slab of this size: at most a sixteenth more, so that similar requests share."""
    step = max(ALIGNMENT_BYTES, (1 << max(size_bytes, 1).bit_length()) // 32)
    return _round_up(max(size_bytes, 1), step)


class _Region:
    """A mapping on its nodes, and what CUDA knows of it: what outlives a slab in a pool."""

    def __init__(
        self, size_bytes: int, device: torch.device, placement: tuple[int, ...] | None, reserve_bytes: int = 0
    ) -> None:
        opened = max(size_bytes, ALIGNMENT_BYTES)
        self.size_bytes = max(opened, reserve_bytes)
        self.device, self.placement = device, placement
        try:
            self.mapping = _C.HostMapping(self.size_bytes, reserve=self.size_bytes > opened)
        except OSError as error:
            raise InsufficientMemoryError(f"the system gave no {size_bytes} bytes of host memory: {error}") from None
        self._address = torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()
        self.granted = SlabGrant(placement, bound=False, huge_pages=self.mapping.huge_pages)
        if placement is not None:
            self._bind(placement)
        self.open(0, opened)

    def fits(self, size_bytes: int, placement: tuple[int, ...] | None) -> bool:
        return self.placement == placement and self.size_bytes >= size_bytes

    def open(self, start: int, size_bytes: int) -> None:
        """Touch the bytes, if they were given nodes, and register them."""
        if self.placement is not None:
            self._touch(start, size_bytes, self.placement)
        if self.device.type == "cuda":
            self._check_locked_limit(size_bytes)
            _register(self._address + start, size_bytes)
            weakref.finalize(self, _unregister, self._address + start)
            self.granted.registered_bytes += size_bytes

    def _bind(self, nodes: tuple[int, ...]) -> None:
        with_memory = [node.id for node in memory_nodes() if node.memory_bytes]
        if len(nodes) == 1 and list(nodes) == with_memory:  # where else could it lie: no permission is needed
            self.granted.bound = True
            return
        try:
            self.mapping.bind(list(nodes))
            self.granted.bound = True
        except OSError as error:
            # What is left is to touch it from there, which does the same for nodes with CPUs.
            hint = " (in a container: --cap-add SYS_NICE)" if error.errno in (errno.EPERM, errno.ENOSYS) else ""
            self._limit(
                f"mbind is refused here, {os.strerror(error.errno or 0)}: host memory is not bound to memory nodes, "
                f"only touched from there first{hint}",
                str(error),
            )

    def _touch(self, start: int, size_bytes: int, nodes: tuple[int, ...]) -> None:
        granted = self.granted
        self._check_room(size_bytes, nodes)
        granted.touched_from = self.mapping.touch(start, size_bytes, nodes[0] if len(nodes) == 1 else None)
        granted.huge_page_bytes = self.mapping.huge_page_bytes()
        if not granted.huge_pages:
            self._limit(
                "there are no transparent huge pages here: host memory lies on small pages, which the CPU reads about "
                "a tenth slower (see /sys/kernel/mm/transparent_hugepage/enabled)"
            )
        elif size_bytes >= HUGE_PAGE_BYTES and granted.huge_page_bytes < (start + size_bytes) // 2:
            share = granted.huge_page_bytes / (start + size_bytes)
            self._limit(
                "most of the host memory lies on small pages, which the CPU reads about a tenth slower: the system "
                "found too few huge ones",
                f"huge pages: {share:.0%}",
            )
        try:
            stride = _round_up(max(1, (start + size_bytes) // PAGE_SAMPLES), ALIGNMENT_BYTES)
            where = Counter(self.mapping.page_nodes(0, start + size_bytes, stride))
            granted.sampled_pages = {node: count for node, count in sorted(where.items()) if node >= 0}
        except OSError as error:  # containers mostly refuse it together with mbind; nothing depends on it
            granted.limits += (str(error),)

    def _check_room(self, size_bytes: int, nodes: tuple[int, ...]) -> None:
        """The kernel ends processes that touch more than the nodes that they are bound to have left."""
        known = [node for node in memory_nodes() if node.memory_bytes]
        if not self.granted.bound or len(known) == 1:  # memory of a single node may grow on demand
            return
        available = sum(node.available_bytes for node in known if node.id in nodes)
        if size_bytes > available:
            names = ", ".join(map(str, nodes))
            raise InsufficientMemoryError(
                f"{size_bytes} bytes of host memory are asked for on memory node {names}, which has {available} "
                "available; give a smaller --seq, another node, or the policy interleave"
            )

    def _check_locked_limit(self, size_bytes: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY and limit < self.granted.registered_bytes + size_bytes and not _may_lock():
            self._limit(
                f"the locked-memory limit (ulimit -l) is {limit} bytes, less than the host memory to register with "
                "CUDA: if that fails, raise the limit (in a container: --ulimit memlock=-1)"
            )

    def _limit(self, warning: str, record: str | None = None) -> None:
        _warn_once(warning)
        self.granted.limits += (record or warning,)


class _DevicePointer:
    """Host memory that CUDA knows, presented as a CUDA array (unified addressing: same pointer).

    torch keeps this object as long as the tensor made from it, and this object keeps `owner`.
    """

    def __init__(self, address: int, size_bytes: int, owner: memoryview) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _seen_by_device(address: int, size_bytes: int, owner: memoryview, device: torch.device) -> Tensor:
    return torch.as_tensor(_DevicePointer(address, size_bytes, owner), device=device)


def _let_go(region: _Region) -> None:
    """The last reference to a region goes with this call's argument: unregistered first, then unmapped."""


def _register(address: int, size_bytes: int) -> None:
    cudart: Any = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, size_bytes, REGISTER_FLAGS))
    if status != 0:
        raise InsufficientMemoryError(
            f"CUDA refused to register {size_bytes} bytes of host memory (error {status}); "
            "the locked-memory limit may be too low: see `ulimit -l`"
        )


def _unregister(address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    try:
        torch.cuda.synchronize()  # a block that ages may still be on its way here
    finally:  # also after an error: pages that stay registered would be taken for a later slab's
        cudart.cudaHostUnregister(address)


def _may_lock() -> bool:
    """Whether the locked-memory limit does not count for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> CAP_IPC_LOCK & 1)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
