"""Host memory: which nodes, what was granted, slabs that come back. Where pages really lie: tests/guest."""

from __future__ import annotations

import ctypes
import errno
import gc
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError, InsufficientMemoryError, UnknownNameError
from hybridgen.offload import host_memory
from hybridgen.offload.host_memory import (
    ALIGNMENT_BYTES,
    HUGE_PAGE_BYTES,
    MEMORY_POLICIES,
    HostSlab,
    MemoryNode,
    SlabPool,
    class_bytes,
    memory_nodes,
    place_kv,
    resolve_placement,
)
from tests.equivalence.tiny_models import save_tiny_model

CPU = torch.device("cpu")
GIB = 1 << 30
HERE = (memory_nodes()[0].id,)


@pytest.fixture(autouse=True)
def warnings_again() -> Iterator[None]:
    host_memory._warn_once.cache_clear()
    yield
    host_memory._warn_once.cache_clear()


def node(number: int, cpus: list[int], gib: int = 64, **distances: int) -> MemoryNode:
    near = {int(name[1:]): distance for name, distance in distances.items()}
    return MemoryNode(number, cpus, gib * GIB, gib * GIB, near)


# Policies

ONE = [node(0, [0, 1])]
SOCKETS = [node(0, [0, 1], n0=10, n1=21), node(1, [2, 3], n0=21, n1=10)]
CXL = [*SOCKETS, node(2, [], n0=24, n1=14, n2=10)]
TWO_CXL = [
    node(0, [0, 1], n0=10, n1=21, n2=34, n3=14),
    node(1, [2, 3], n0=21, n1=10, n2=14, n3=34),
    node(2, [], n0=34, n1=14, n2=10, n3=44),
    node(3, [], n0=14, n1=34, n2=44, n3=10),
]
WITHOUT_MEMORY = [node(0, [0, 1], 0, n0=10, n1=20, n2=12), *[node(1, [2], n0=20), node(2, [], n0=12)]]
ALL, FIRST, SECOND = [0, 1, 2, 3], [0, 1], [2, 3]


@pytest.mark.parametrize(
    ("nodes", "cpus", "near", "far", "expected"),
    [
        (SOCKETS, FIRST, None, None, (0, 1)),
        (SOCKETS, SECOND, None, None, (1, 0)),
        (SOCKETS, ALL, None, None, (0, 1)),  # as many CPUs on both: the first
        (SOCKETS, [1, 2, 3], None, None, (1, 0)),
        (CXL, FIRST, None, None, (0, 2)),  # memory alone is far, also where a socket is closer
        (CXL, SECOND, None, None, (1, 2)),
        (CXL, FIRST, None, 1, (0, 1)),
        (CXL, FIRST, 1, None, (1, 2)),
        (CXL, FIRST, 2, None, (2, 1)),  # no other has memory alone: the closest
        (CXL, FIRST, 2, 0, (2, 0)),
        (TWO_CXL, FIRST, None, None, (0, 3)),
        (TWO_CXL, SECOND, None, None, (1, 2)),
        (WITHOUT_MEMORY, FIRST, None, None, (2, 1)),  # node 0 cannot be near, 2 is closest to it
        ([node(0, [0]), node(3, []), node(7, [])], [0], None, None, (0, 3)),  # distances unknown
    ],
)
def test_near_and_far(
    nodes: list[MemoryNode], cpus: list[int], near: int | None, far: int | None, expected: tuple[int, int]
) -> None:
    k, v = expected
    semantic = resolve_placement("semantic", nodes, cpus, near, far)
    assert (semantic.keys, semantic.values, semantic.reason) == ((k,), (v,), None)
    inverse = resolve_placement("inverse", nodes, cpus, near, far)
    assert (inverse.keys, inverse.values, inverse.reason) == ((v,), (k,), None)
    local = resolve_placement("local", nodes, cpus, near, far)
    assert (local.keys, local.values, local.reason) == ((k,), (k,), None)
    interleave = resolve_placement("interleave", nodes, cpus, near, far)
    with_memory = tuple(node.id for node in nodes if node.memory_bytes)
    assert (interleave.keys, interleave.values, interleave.reason) == (with_memory, with_memory, None)


def test_the_stand_in_for_a_near_node_without_memory_has_cpus_if_any_may_be_used() -> None:
    assert resolve_placement("semantic", WITHOUT_MEMORY, [0, 1, 2]).keys == (1,)


@pytest.mark.parametrize("policy", MEMORY_POLICIES)
@pytest.mark.parametrize("nodes", [ONE, [node(0, [0, 1]), node(1, [2, 3], 0)]], ids=["one", "other without memory"])
def test_one_node_leaves_nothing_to_separate(policy: str, nodes: list[MemoryNode]) -> None:
    placed = resolve_placement(policy, nodes, FIRST)
    assert placed.keys == placed.values == (0,)
    if policy == "local":
        assert placed.reason is None
    else:
        assert placed.reason is not None and "node 0 alone has memory: there is nothing to" in placed.reason


def test_one_node_named_twice_leaves_nothing_to_separate() -> None:
    placed = resolve_placement("semantic", CXL, FIRST, near=1, far=1)
    assert placed.keys == placed.values == (1,)
    assert placed.reason is not None and "node 1 is both near and far" in placed.reason


def test_wrong_names_and_nodes() -> None:
    with pytest.raises(UnknownNameError, match="memory policy 'semantik'; did you mean 'semantic'"):
        resolve_placement("semantik", CXL, FIRST)
    with pytest.raises(ConfigError, match=r"far node 7 is not there \(nodes with memory: 0,1,2\)"):
        resolve_placement("semantic", CXL, FIRST, far=7)
    with pytest.raises(ConfigError, match=r"near node 0 has no memory .*\(nodes with memory: 1,2\)"):
        resolve_placement("local", WITHOUT_MEMORY, FIRST, near=0)


def test_this_machine_says_once_that_there_is_nothing_to_separate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "memory_nodes", lambda: tuple(ONE))
    for _ in range(3):
        assert place_kv("semantic").keys == (0,)
    assert [record.message for record in caplog.records] == [
        "memory policy 'semantic': node 0 alone has memory: there is nothing to separate"
    ]


def test_nodes_of_this_machine() -> None:
    nodes = memory_nodes()
    assert sum(node.memory_bytes for node in nodes) > 0
    assert all(0 <= node.available_bytes <= node.memory_bytes for node in nodes)
    assert any(node.cpus for node in nodes)


# Slabs


def test_a_placed_slab_is_there_at_once() -> None:
    slab = HostSlab(2 * HUGE_PAGE_BYTES, CPU, placement=HERE)
    granted = slab.granted
    assert granted.nodes == HERE and granted.registered_bytes == 0
    assert granted.huge_page_bytes is not None and granted.touched_from is not None
    if granted.sampled_pages is not None:  # move_pages may be refused
        assert sum(granted.sampled_pages.values()) == 1024, "every page is there"
        assert not granted.bound or set(granted.sampled_pages) == set(HERE)
    assert (slab.take((4, 5), torch.float32).tensor == 0).all()


def test_several_threads_touch_every_page() -> None:
    size = 3 * (64 << 20) + 5 * ALIGNMENT_BYTES  # enough for three, and no multiple of anything
    mapping = host_memory._C.HostMapping(size)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    tensor[-1] = 7
    assert mapping.touch(0, size, HERE[0]) >= -1
    try:
        nodes = mapping.page_nodes(0, size, ALIGNMENT_BYTES)
    except PermissionError as refused:
        pytest.skip(f"no permission to look: {refused}")
    assert len(nodes) == size // ALIGNMENT_BYTES and min(nodes) >= 0
    assert tensor[-1] == 7 and int(tensor.sum(dtype=torch.int64)) == 7


def test_a_slab_without_placement_asks_for_nothing() -> None:
    granted = HostSlab(HUGE_PAGE_BYTES, CPU).granted
    assert (granted.nodes, granted.bound, granted.touched_from, granted.limits) == (None, False, None, ())


def test_poison_and_placement() -> None:
    slab = HostSlab(ALIGNMENT_BYTES, CPU, poison=True, placement=HERE)
    assert slab.take((1024,), torch.float32).tensor.isnan().all()


def test_growing_moves_nothing() -> None:
    slab = HostSlab(100, CPU, poison=True, placement=HERE, reserve_bytes=1 << 36)
    first = slab.take((10,), torch.float32).tensor
    first.fill_(1.0)
    address = first.data_ptr()
    with pytest.raises(ValueError, match="bytes left"):
        slab.take((1 << 20,), torch.float32)
    slab.grow(1 << 22)
    second = slab.take((1 << 20,), torch.float32).tensor
    assert second.isnan().all() and second.data_ptr() % ALIGNMENT_BYTES == 0
    assert first.data_ptr() == address and (first == 1.0).all()
    with pytest.raises(ValueError, match="can grow by"):
        slab.grow(1 << 36)
    with pytest.raises(ValueError, match="can grow by 0 bytes"):
        HostSlab(ALIGNMENT_BYTES, CPU).grow(1)


def test_too_much_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"no 1152921504606846976 bytes of host memory: .*mmap\("):
        HostSlab(1 << 60, CPU)


def refuse(monkeypatch: pytest.MonkeyPatch, **calls: int) -> None:
    """Methods of the mapping fail with these errno's, as in a container."""

    class Refusing(host_memory._C.HostMapping):  # type: ignore[misc]
        pass

    for call, number in calls.items():

        def fail(self: Refusing, *arguments: object, name: str = call, number: int = number) -> None:
            raise OSError(number, f"{name}: refused")

        setattr(Refusing, call, fail)
    monkeypatch.setattr(host_memory._C, "HostMapping", Refusing)


@pytest.mark.parametrize(("number", "hint"), [(errno.EPERM, True), (errno.ENOSYS, True), (errno.EINVAL, False)])
def test_no_permission_to_bind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, hint: bool
) -> None:
    monkeypatch.setattr(host_memory, "memory_nodes", lambda: tuple(CXL))
    refuse(monkeypatch, bind=number, page_nodes=number)
    for _ in range(2):
        slab = HostSlab(HUGE_PAGE_BYTES, CPU, placement=HERE)
        assert not slab.granted.bound and slab.granted.touched_from is not None
        assert slab.granted.sampled_pages is None
        assert any("bind: refused" in limit for limit in slab.granted.limits)
        assert any("page_nodes: refused" in limit for limit in slab.granted.limits)
    told = [record.message for record in caplog.records if "mbind" in record.message]
    assert len(told) == 1 and ("--cap-add SYS_NICE" in told[0]) == hint


def test_one_node_needs_no_permission(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_memory, "memory_nodes", lambda: (node(HERE[0], [0]),))
    refuse(monkeypatch, bind=errno.EPERM)
    assert HostSlab(ALIGNMENT_BYTES, CPU, placement=HERE).granted.bound
    assert "mbind" not in caplog.text


def test_a_node_that_is_not_there_is_refused_by_the_kernel() -> None:
    granted = HostSlab(ALIGNMENT_BYTES, CPU, placement=(900,)).granted
    assert not granted.bound and any(limit.startswith("[Errno") and "mbind(" in limit for limit in granted.limits)


def test_a_full_node_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end the process."""
    full = MemoryNode(HERE[0], [0], GIB, 1000, {})
    monkeypatch.setattr(host_memory, "memory_nodes", lambda: (full, node(HERE[0] + 1, [1])))
    with pytest.raises(InsufficientMemoryError, match="has 1000 available"):
        HostSlab(HUGE_PAGE_BYTES, CPU, placement=HERE)


def test_small_pages_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Small(host_memory._C.HostMapping):  # type: ignore[misc]
        huge_pages = False

    monkeypatch.setattr(host_memory._C, "HostMapping", Small)
    slabs = [HostSlab(HUGE_PAGE_BYTES, CPU, placement=HERE) for _ in range(2)]
    assert all("no transparent huge pages" in slab.granted.limits[0] for slab in slabs)
    assert caplog.text.count("no transparent huge pages") == 1


# What CUDA knows of a slab, with its part played by a record of calls


class Cuda:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = torch.device("cuda")
        self.registered: dict[int, int] = {}
        self.waits = 0
        monkeypatch.setattr(host_memory, "_register", self.register)
        monkeypatch.setattr(host_memory, "_unregister", self.unregister)
        monkeypatch.setattr(host_memory, "_seen_by_device", self.seen)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def register(self, address: int, size_bytes: int) -> None:
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        size = self.registered.pop(address)
        ctypes.memset(address, 0, size)  # still mapped, or this ends the process

    def seen(self, address: int, size_bytes: int, owner: memoryview, device: torch.device) -> torch.Tensor:
        array = type("Seen", (ctypes.c_ubyte * size_bytes,), {}).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize("kept", ["tensor", "device_view"])
def test_registered_once_and_until_the_last_tensor_is_gone(cuda: Cuda, kept: str) -> None:
    slab = HostSlab(1 << 20, cuda.device)
    buffer = slab.take((100,), torch.float32)
    assert cuda.registered == {buffer.tensor.data_ptr(): 1 << 20} and slab.granted.registered_bytes == 1 << 20
    assert buffer.device_view.data_ptr() == buffer.tensor.data_ptr()
    last = getattr(buffer, kept)[3:7]
    del slab, buffer
    gc.collect()
    assert len(cuda.registered) == 1 and (last == 0).all()
    del last
    gc.collect()
    assert not cuda.registered


def test_what_grows_is_registered_block_by_block(cuda: Cuda) -> None:
    slab = HostSlab(ALIGNMENT_BYTES, cuda.device, reserve_bytes=1 << 30)
    first = slab.take((1,), torch.float32).tensor.data_ptr()
    slab.grow(1 << 20)
    assert cuda.registered == {first: ALIGNMENT_BYTES, first + ALIGNMENT_BYTES: 1 << 20}
    assert slab.take((1 << 18,), torch.float32).device_view.data_ptr() == first + ALIGNMENT_BYTES
    assert slab.granted.registered_bytes == ALIGNMENT_BYTES + (1 << 20)
    del slab
    gc.collect()
    assert not cuda.registered


@pytest.mark.parametrize(
    ("limit", "may_lock", "told"), [(65536, False, True), (65536, True, False), (-1, False, False)]
)
def test_locked_memory_limit(
    cuda: Cuda,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int,
    may_lock: bool,
    told: bool,
) -> None:
    assert resource.RLIM_INFINITY == -1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(host_memory, "_may_lock", lambda: may_lock)
    slabs = [HostSlab(1 << 20, cuda.device) for _ in range(2)]
    assert caplog.text.count("locked-memory limit (ulimit -l) is 65536 bytes") == told
    assert all(len(slab.granted.limits) == told for slab in slabs)


def test_a_pool_keeps_slabs_registered_and_waits_for_the_device(cuda: Cuda) -> None:
    pool = SlabPool(cuda.device)
    address = pool.take(1 << 20).take((1,), torch.float32).tensor.data_ptr()
    assert cuda.waits == 0
    tensor = pool.take(1 << 20).take((1,), torch.float32).device_view
    assert tensor.data_ptr() == address and cuda.waits == 1, "copies of the last user may be under way"
    del pool
    assert cuda.registered == {address: 1 << 20}, "the tensor outlives the pool"
    del tensor
    gc.collect()
    assert not cuda.registered


# The pool


def test_a_slab_comes_back_when_its_last_tensor_is_gone() -> None:
    pool = SlabPool(CPU)
    slab = pool.take(1 << 20)
    tensor = slab.take((100,), torch.float32).tensor.view(10, 10)[2:4]
    address = tensor.data_ptr() - 20 * 4
    del slab
    other = pool.take(1 << 20)
    assert (pool.allocated_slabs, pool.reused_slabs) == (2, 0), "a view of the first is alive"
    del tensor
    again = pool.take(1 << 20).take((100,), torch.float32).tensor
    assert again.data_ptr() == address
    assert (pool.allocated_slabs, pool.reused_slabs) == (2, 1)
    assert other.take((1,), torch.float32).tensor.data_ptr() != address


def test_a_slab_that_is_held_does_not_come_back() -> None:
    pool = SlabPool(CPU)
    slab = pool.take(1 << 20)
    slab.take((100,), torch.float32)
    other = pool.take(1 << 20)
    assert pool.reused_slabs == 0 and pool.idle_bytes == 0
    del slab, other
    assert pool.idle_bytes == 2 << 20
    pool.release_idle()
    assert pool.idle_bytes == 0


def test_a_poisoned_slab_is_poisoned_again() -> None:
    pool = SlabPool(CPU, poison=True)
    for number in range(3):
        tensor = pool.take(8 * ALIGNMENT_BYTES).take((8192,), torch.float32).tensor
        assert tensor.isnan().all()
        tensor.fill_(float(number))
        del tensor
    assert (pool.allocated_slabs, pool.reused_slabs) == (1, 2)


def test_what_the_earlier_user_asked_for_does_not_show() -> None:
    pool = SlabPool(CPU)
    pool.take(1 << 20)
    slab = pool.take(1 << 19)
    assert pool.reused_slabs == 1
    slab.take((1 << 17,), torch.float32)
    with pytest.raises(ValueError, match="0 bytes left"):
        slab.take((1,), torch.float32)


def test_longer_requests_replace_shorter_ones() -> None:
    pool = SlabPool(CPU)
    for size in (1 << 20, 1 << 21, 1 << 22):
        pool.take(size)
        assert pool.idle_bytes == size
    assert pool.allocated_slabs == 3


def test_the_smallest_that_fits_is_taken() -> None:
    pool = SlabPool(CPU)
    large, small = pool.take(1 << 21), pool.take(1 << 20)
    del large, small
    kept = pool.take(1 << 20)
    assert kept and pool.idle_bytes == 1 << 21


def test_slabs_stay_on_their_nodes() -> None:
    pool = SlabPool(CPU)
    pool.take(1 << 20, HERE)
    assert pool.take(1 << 20).granted.nodes is None
    slab = pool.take(1 << 20, HERE)
    assert slab.granted.nodes == HERE
    assert (pool.allocated_slabs, pool.reused_slabs) == (2, 1)


def test_idle_slabs_make_way_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool(CPU)
    pool.take(1 << 20, HERE)
    mapping = host_memory._C.HostMapping
    idle: list[int] = []

    def scarce(size: int, reserve: bool) -> object:
        idle.append(len(pool._idle))
        if pool._idle:
            raise OSError(errno.ENOMEM, "mmap")
        return mapping(size, reserve)

    monkeypatch.setattr(host_memory._C, "HostMapping", scarce)
    pool.take(1 << 20)
    assert idle == [1, 0]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10**6, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 27 * GIB + 12345])
def test_classes_waste_little(size: int) -> None:
    rounded = class_bytes(size)
    assert size <= rounded <= max(size + ALIGNMENT_BYTES, size * 17 / 16) and rounded % ALIGNMENT_BYTES == 0
    assert class_bytes(rounded) == rounded
    assert class_bytes(size + 1) >= rounded


def test_many_threads_share_a_pool() -> None:
    pool = SlabPool(CPU, poison=True)
    faults: list[str] = []

    def work(number: int) -> None:
        for turn in range(50):
            tensor = pool.take(64 * 1024).take((16 * 1024,), torch.float32).tensor
            if not tensor.isnan().all():
                faults.append("not fresh")
            tensor.fill_(float(number * 100 + turn))
            if not (tensor == float(number * 100 + turn)).all():
                faults.append("shared")
            del tensor

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.allocated_slabs + pool.reused_slabs == 400 and pool.allocated_slabs <= 8


def test_memory_goes_back_to_the_system() -> None:
    def mapped_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    before = mapped_bytes()
    for _ in range(20):
        HostSlab(1 << 30, CPU).take((10,), torch.float32)
    assert mapped_bytes() - before < 4 << 30


def test_a_second_request_allocates_no_host_memory(tmp_path: Path) -> None:
    settings = {"cache.gpu_window": 64, "selection.keep": 0.2}
    with LLM(str(save_tiny_model("llama-mha", tmp_path)), settings) as llm:
        llm.generate([list(range(90)) * 3], 4, ignore_eos=True)
        first = llm.host_memory["slabs_allocated"]
        for reused in (first, 2 * first):
            llm.generate([list(range(90)) * 2, [5] * 70], 3, ignore_eos=True)
            assert (llm.host_memory["slabs_allocated"], llm.host_memory["slabs_reused"]) == (first, reused)
