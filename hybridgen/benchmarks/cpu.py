"""The CPU: how fast it reads memory, and how near to that the scan kernels come.

A walk goes over so many keys that no cache holds them (`--gib`), a layer after the other, and comes to the same byte
again only after all others. The keys are 1 MiB of random ones again and again: a scan's time depends on their type and
place alone.
"""

from __future__ import annotations

import itertools
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridgen import _C
from hybridgen.benchmarks.rows import Progress, Row, Scanner, cores_for, rate
from hybridgen.kv_cache.quantize import SKETCH_BLOCK, key_mean, make_sketch, quantize_int8, sketch_bytes
from hybridgen.offload.host_memory import HostSlab, padded_bytes
from hybridgen.selection.host_logits import LINK_TOKENS

KEY_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "int4", "int2": "int2"}
_TORCH_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
_SKETCH_BITS = {"int4": 4, "int2": 2}
DIM = 128
_TILE_TOKENS = 2048  # random ones; 1 MiB of float32
_READ_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Shape:
    """One layer's keys and queries; listed: the share of its rows that a list names, None for all."""

    model: str
    heads: int
    kv_heads: int
    tokens: int
    listed: float | None = None

    @property
    def name(self) -> str:
        queries = self.heads // self.kv_heads
        rows = f"{self.rows} of " if self.listed is not None else ""
        return f"{self.model} {self.kv_heads}x{rows}{self.tokens}x{DIM}" + (f" q{queries}" if queries > 1 else "")

    @property
    def rows(self) -> int:
        """Tokens that one scan scores, of each KV head."""
        return self.tokens if self.listed is None else max(1, int(self.listed * self.tokens))

    @property
    def logits(self) -> int:
        """Of a query head: the room that the engine has for so many rows."""
        return -(-self.rows // LINK_TOKENS) * LINK_TOKENS

    def within(self, size_bytes: int) -> Shape:
        """With fewer tokens, if its float32 keys are larger than this (tests)."""
        most = size_bytes // (4 * self.kv_heads * DIM) // SKETCH_BLOCK * SKETCH_BLOCK
        return replace(self, tokens=max(SKETCH_BLOCK, min(self.tokens, most)))


SHAPES = (
    Shape("OPT-13B", 40, 40, 32_768),
    Shape("Llama-3.1-8B", 32, 8, 131_072),
    Shape("OPT-13B", 40, 40, 32_768, listed=0.02),
)


def thread_counts(cores: int, quick: bool) -> list[int]:
    """1 to all: powers of two and what the engine uses; quick: the ends and one less than all."""
    counts = {1, cores - 1, cores}
    if not quick:
        counts |= {3 * cores // 4, *(2**power for power in range(cores.bit_length()))}
    return sorted(count for count in counts if 1 <= count <= cores)


def row_lists(shape: Shape) -> Tensor | None:
    """Disjoint lists that name every row once (but for a remainder): int32 [lists, Hkv, rows], each sorted."""
    if shape.listed is None:
        return None
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(shape.kv_heads, shape.tokens, generator=generator).argsort(-1).to(torch.int32)
    lists = order[:, : shape.tokens // shape.rows * shape.rows].unflatten(1, (-1, shape.rows)).transpose(0, 1)
    in_order: Tensor = lists.sort(-1).values
    return in_order.contiguous()


class Case:
    """One key type in one shape: where its layers lie in a pool, and the scans that walk over them."""

    def __init__(self, shape: Shape, lists: Tensor | None, key_type: str, walk_bytes: int) -> None:
        """walk_bytes: the least that a walk reads."""
        self.shape, self.key_type, self.lists = shape, key_type, lists
        self.bits = _SKETCH_BITS.get(key_type)
        tokens = shape.kv_heads * shape.tokens
        if self.bits is None:
            self.layer_bytes = tokens * DIM * _TORCH_TYPES[key_type].itemsize
        else:
            self.layer_bytes = tokens // SKETCH_BLOCK * sketch_bytes(self.bits, DIM)
        # A row list meets most blocks of a sketch: the next list would read them again.
        self.scans_a_layer = 1 if lists is None or self.bits is not None else len(lists)
        self.layers = math.ceil(walk_bytes / self._read_of_a_layer())

    def written_bytes(self, in_half: bool) -> float:
        """Logits of one scan."""
        return self.shape.heads * self.shape.rows * (2 + 4 / LINK_TOKENS if in_half else 4)

    def _read_of_a_layer(self) -> int:
        """Bytes of one layer that a walk reads, without int8's scales."""
        if self.lists is None:
            return self.layer_bytes
        if self.bits is None:
            return self.layer_bytes * self.scans_a_layer * self.shape.rows // self.shape.tokens
        blocks = sum(len(head.unique()) for head in self.lists[0] // SKETCH_BLOCK)
        return blocks * sketch_bytes(self.bits, DIM)

    def keys(self, pool: KeyPool, layer: int) -> Tensor:
        """[Hkv, N, d], or a sketch's bytes [Hkv, blocks, bytes]."""
        flat = pool.keys[layer * self.layer_bytes : (layer + 1) * self.layer_bytes]
        if self.bits is None:
            return flat.view(_TORCH_TYPES[self.key_type]).view(self.shape.kv_heads, self.shape.tokens, DIM)
        return flat.view(self.shape.kv_heads, -1, sketch_bytes(self.bits, DIM))

    def scales(self, pool: KeyPool, layer: int) -> Tensor:
        """Of int8 keys, [Hkv, N]."""
        tokens = self.shape.kv_heads * self.shape.tokens
        return pool.scales[layer * tokens : (layer + 1) * tokens].view(self.shape.kv_heads, -1)

    def jobs(self, pool: KeyPool, layers: int | None = None) -> Iterator[dict[str, Any]]:
        """A walk: every layer once, or once for each list; layers: how many of them (default all)."""
        shape, out = self.shape, itertools.cycle(zip(pool.logits, pool.maxima, strict=True))
        for turn, layer in itertools.product(range(self.scans_a_layer), range(layers or self.layers)):
            keys, (logits, maxima) = self.keys(pool, layer), next(out)
            job: dict[str, Any] = {
                "query": pool.query.data_ptr(),
                "keys": keys.data_ptr(),
                "out": logits.data_ptr(),
                "key_type": KEY_TYPES[self.key_type],
                "num_heads": shape.heads,
                "num_kv_heads": shape.kv_heads,
                "head_dim": DIM,
                "lengths": [shape.rows],
                "key_strides": (keys.numel(), *keys.stride()[:2]),
                "out_strides": (shape.heads * shape.logits, shape.logits),
                "scale": 1.0,
            }
            if maxima is not None:
                job |= {"maxima": maxima.data_ptr(), "maxima_stride": shape.logits // LINK_TOKENS}
            if self.key_type not in ("fp32", "fp16", "bf16"):
                job["key_mean"] = pool.mean.data_ptr()
            if self.key_type == "int8":
                scales = self.scales(pool, layer)
                job |= {"key_scales": scales.data_ptr(), "scale_strides": (scales.numel(), scales.stride(0))}
            if self.lists is not None:
                job |= {"rows": self.lists[turn].data_ptr(), "rows_stride": shape.rows}
            yield job


class KeyPool:
    """The host memory that every case uses in turn: keys of one type at a time."""

    def __init__(self, cases: Sequence[Case], least_bytes: int = 0, in_half: bool = False) -> None:
        """in_half: logits are written as for a GPU, in fp16 below the maxima of blocks."""
        size = max([least_bytes, *(case.layers * case.layer_bytes for case in cases)])
        size = -(-size // _READ_CHUNK_BYTES) * _READ_CHUNK_BYTES
        int8 = [case for case in cases if case.key_type == "int8"]
        tokens = max((case.layers * case.shape.kv_heads * case.shape.tokens for case in int8), default=1)
        heads = max((case.shape.heads for case in cases), default=1)
        logits = max((case.shape.heads * case.shape.logits for case in cases), default=LINK_TOKENS)
        generator = torch.Generator().manual_seed(0)
        slab = HostSlab(size + padded_bytes((tokens,), torch.float32), torch.device("cpu"))
        self.keys = slab.take((size,), torch.uint8).tensor
        self.scales = slab.take((tokens,), torch.float32).tensor.fill_(0.02)
        self.mean = torch.randn(heads, DIM, generator=generator)
        self.query = torch.randn(heads, DIM, generator=generator)
        # The engine has two scans in flight: logits are written to where the last but one wrote them.
        self.in_half = in_half
        self.logits = [torch.zeros(logits, dtype=torch.float16 if in_half else torch.float32) for _ in range(2)]
        self.maxima = [torch.zeros(logits // LINK_TOKENS) if in_half else None for _ in range(2)]
        self._random = torch.randn(1, 1, _TILE_TOKENS, DIM, generator=generator)

    def fill(self, key_type: str) -> None:
        """Every byte written: pages that nobody wrote are one page of zeros."""
        if key_type in _SKETCH_BITS:
            tile = make_sketch(self._random, _SKETCH_BITS[key_type])
        elif key_type == "int8":
            tile = quantize_int8(self._random, key_mean(self._random))[0]
        else:
            tile = self._random.to(_TORCH_TYPES[key_type])
        _repeat(tile.contiguous().view(-1).view(torch.uint8), self.keys)


def _repeat(tile: Tensor, into: Tensor) -> None:
    whole = into.numel() // tile.numel() * tile.numel()
    into[:whole].view(-1, tile.numel()).copy_(tile)
    into[whole:].copy_(tile[: into.numel() - whole])


# --- The ceiling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadLoop:
    """One way to read memory: see cpp_ext/read_ceiling.h."""

    streams: int
    ahead_bytes: int

    def __str__(self) -> str:
        prefetch = f"prefetch {self.ahead_bytes} B ahead" if self.ahead_bytes else "no prefetch"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}, {prefetch}"


def read_loops(quick: bool) -> list[ReadLoop]:
    """Prefetch on and off; one place at a time and several."""
    if quick:
        return [ReadLoop(1, 0), ReadLoop(1, 6144), ReadLoop(4, 0)]
    return [ReadLoop(streams, ahead) for streams in (1, 4) for ahead in (0, 1024, 6144)]


def read_memory(memory: Tensor, pages: str, threads: int, loop: ReadLoop, walk_bytes: int) -> Row:
    """Read all of it, again and again until `walk_bytes` are walked."""
    passes = max(1, -(-walk_bytes // memory.numel()))
    seconds, walked = _C.read_seconds(
        memory.data_ptr(),
        memory.numel(),
        passes,
        cores_for(threads)[:threads],
        loop.streams,
        loop.ahead_bytes,
        min(_READ_CHUNK_BYTES, memory.numel() // 512 * 512),
    )
    shape = f"{walked / 2**30:.2f} GiB, {pages} pages, {loop}"
    return Row("read", None, shape, threads, None, 1e3 * seconds, walked / seconds / 1e9)


def measure_reads(
    pool: KeyPool,
    walk_bytes: int,
    counts: Sequence[int],
    small_page_counts: Sequence[int],
    loops: Sequence[ReadLoop],
    progress: Progress,
) -> list[Row]:
    """Every loop with these numbers of threads, on huge pages and on small ones; each walks `walk_bytes` twice."""
    rows = []
    memory = pool.keys[: max(_READ_CHUNK_BYTES, walk_bytes // _READ_CHUNK_BYTES * _READ_CHUNK_BYTES)]
    for pages, with_threads in (("huge", counts), ("small", small_page_counts)):
        if pages == "small" and with_threads:
            memory = _small_pages(memory.numel())
        for threads in with_threads:
            progress(f"read, {pages} pages, {threads} threads")
            rows += [read_memory(memory, pages, threads, loop, 2 * walk_bytes) for loop in loops]
    return rows


def read_again(pool: KeyPool, walk_bytes: int, rows: Sequence[Row], loops: Sequence[ReadLoop]) -> list[Row]:
    """The three fastest of these reads once more: a ceiling is measured next to what is held against it."""
    best = sorted((row for row in rows if row.kernel == "read"), key=lambda row: -row.gbps)[:3]
    pairs = {(row.threads, loop) for row in best for loop in loops if row.shape.endswith(str(loop))}
    again = []
    for threads, loop in sorted(pairs, key=str):
        again += measure_reads(pool, walk_bytes, [threads or 1], [], [loop], lambda what: None)
    return again


def _small_pages(size_bytes: int) -> Tensor:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).fill_(1)


# --- The kernels --------------------------------------------------------------------------------------------------


def best_read(pool: KeyPool, walk_bytes: int, rows: Sequence[Row], loops: Sequence[ReadLoop]) -> Callable[[], float]:
    """What reads once more as the fastest of `rows` did: GB/s."""
    best = max((row for row in rows if row.kernel == "read" and "huge" in row.shape), key=lambda row: row.gbps)
    loop = next(loop for loop in loops if best.shape.endswith(str(loop)))
    memory = pool.keys[: max(_READ_CHUNK_BYTES, walk_bytes // _READ_CHUNK_BYTES * _READ_CHUNK_BYTES)]
    return lambda: read_memory(memory, "huge", best.threads or 1, loop, walk_bytes).gbps


def measure_scan(
    case: Case, pool: KeyPool, threads: int, isa: str, rounds: int, read: Callable[[], float] | None = None
) -> Row:
    """The median of some walks; read: what gives the ceiling of now, between them."""
    scanner = Scanner(threads, isa)
    try:
        scanner.spans(scanner.submit(case.jobs(pool, layers=1)))  # pages, threads and code are there
        reads, walks = [read() if read else 0.0], []
        for _ in range(rounds):
            walks.append(scanner.spans(scanner.submit(case.jobs(pool))))
            reads.append(read() if read else 0.0)
    finally:
        scanner.close()
    gbps = statistics.median(map(rate, walks)) / 1e9
    beside = None
    if read:
        around = map(max, itertools.pairwise(reads))
        beside = statistics.median(rate(walk) / 1e9 / most for walk, most in zip(walks, around, strict=True))
    moved = statistics.mean(span.moved_bytes for span in walks[0])
    kernel = "scan" if case.lists is None else "scan_rows"
    return Row(
        kernel, case.key_type, case.shape.name, threads, scanner.isa, moved / gbps / 1e6, gbps, fraction_beside=beside,
        written_per_read=case.written_bytes(pool.in_half) / moved,
    )  # fmt: skip


def torch_ways(case: Case) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """What torch has for queries [Hkv, group, d] and keys [Hkv, n, d]; none for types that it cannot multiply."""
    if case.key_type not in ("fp32", "fp16", "bf16"):
        return {}
    return {
        "matmul": lambda q, K: torch.matmul(q, K.transpose(1, 2)),
        "bmm": lambda q, K: torch.bmm(K, q.transpose(1, 2)).transpose(1, 2),
        "einsum": lambda q, K: torch.einsum("hgd,hnd->hgn", q, K),
    }


def torch_query(case: Case, pool: KeyPool) -> Tensor:
    """The query in the keys' type: torch multiplies no other."""
    return pool.query[: case.shape.heads].view(case.shape.kv_heads, -1, DIM).to(_TORCH_TYPES[case.key_type])


def torch_keys(case: Case, pool: KeyPool, layer: int, turn: int) -> Tensor:
    """The keys to be scored: a layer's, or copies of the listed rows (torch has no other way to them)."""
    keys = case.keys(pool, layer)
    if case.lists is None:
        return keys
    first = torch.arange(case.shape.kv_heads).unsqueeze(1) * case.shape.tokens
    rows = (case.lists[turn] + first).view(-1)
    return keys.view(-1, DIM).index_select(0, rows).view(case.shape.kv_heads, -1, DIM)


def measure_torch(case: Case, pool: KeyPool, threads: int, budget_s: float) -> float | None:
    """GB/s of torch's fastest way, over as many layers as it comes to in `budget_s`; each byte is read once at most."""
    ways = torch_ways(case)
    if not ways:
        return None
    query = torch_query(case, pool)
    scans = list(itertools.product(range(case.scans_a_layer), range(case.layers)))
    scan_bytes = case.shape.kv_heads * case.shape.rows * DIM * _TORCH_TYPES[case.key_type].itemsize

    def timed(way: Callable[[Tensor, Tensor], Tensor], at: int) -> float:
        turn, layer = scans[at % len(scans)]
        start_s = time.perf_counter()
        way(query, torch_keys(case, pool, layer, turn))
        return time.perf_counter() - start_s

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            at = itertools.count()
            first = {name: [timed(way, next(at)) for _ in range(2)][1] for name, way in ways.items()}
            best = ways[min(first, key=lambda name: first[name])]
            times_s = [timed(best, next(at))]
            while sum(times_s) < budget_s and len(times_s) < len(scans):
                times_s.append(timed(best, next(at)))
    finally:
        torch.set_num_threads(before)
    return scan_bytes * len(times_s) / sum(times_s) / 1e9
