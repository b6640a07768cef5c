"""The link between host and GPU, by the engine's own means: DMA each way and both, zero copy, scan and DMA at once.

Keys of OPT-13B at 32k, float16, a layer after the other, in registered memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hybridgen.benchmarks.rows import Progress, Row, Scanner, Span, rate, rates_together
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes, place_kv
from hybridgen.offload.transfer import make_transfer
from hybridgen.telemetry import Telemetry

HEADS, TOKENS, DIM = 40, 32_768, 128
BLOCK_BYTES = 128 * 2**20
FETCHED_ROWS = 8192  # of each head
SLAB_BYTES = 4 * 2**30


class Link:
    """The memory that all measurements of one device share."""

    def __init__(
        self, device: torch.device, gib: float, rounds: int, tokens: int = TOKENS, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """tokens of a layer and block_bytes of a copy: smaller in tests."""
        self.device, self.rounds, self.tokens, self.block_bytes = device, rounds, tokens, block_bytes
        shape = (1, HEADS, tokens, DIM)
        self.layer_bytes = padded_bytes(shape, torch.float16)
        count = max(2, int(gib * 2**30) // self.layer_bytes)
        # At least a pass over 2 GiB: far more than the caches, and long enough to time.
        self.passes = max(1, -(-min(2 * 2**30, 4 * int(gib * 2**30)) // (count * self.layer_bytes)))
        query, logits = (1, HEADS, DIM), (count, HEADS, tokens)
        small = sum(padded_bytes(size, torch.float32) for size in (query, logits))
        slab = HostSlab(count * self.layer_bytes + small, device)
        self.layers = [slab.take(shape, torch.float16) for _ in range(count)]
        self.query, self.logits = slab.take(query, torch.float32), slab.take(logits, torch.float32)
        row = torch.randn(DIM)
        self.query.tensor.copy_(row)
        for layer in self.layers:
            layer.tensor.copy_(row)  # written: pages that nobody wrote are one page of zeros
        self.shape_name = f"OPT-13B {HEADS}x{tokens}x{DIM}"
        self.block_name = f"blocks of {block_bytes >> 20} MiB"
        self.target = torch.ones(block_bytes // 2, dtype=torch.float16, device=device)
        self.second_target = torch.ones_like(self.target)
        self.transfer = make_transfer("auto", device, Telemetry())
        self.clock = self.transfer.clock

    def scan(self, threads: int) -> Row:
        """Median over the rounds, all layers back to back in each."""
        scanner = Scanner(threads)
        order = [*range(len(self.layers))] * self.passes
        scanner.spans(self._submit(scanner, order[:1]))
        rates = [rate(scanner.spans(self._submit(scanner, order))) for _ in range(self.rounds)]
        scanner.close()
        return self._row("scan", statistics.median(rates), self.layer_bytes, scanner)

    def h2d(self) -> Row:
        """Median over the copies, each of one block."""
        copies = self._copy(self._blocks(self.layers, 8 * self.rounds), self.target, to_host=False)
        return self._row("h2d", self._median_rate(copies), self.block_bytes)

    def d2h(self) -> Row:
        """The same, the other way."""
        copies = self._copy(self._blocks(self.layers, 8 * self.rounds), self.target, to_host=True)
        return self._row("d2h", self._median_rate(copies), self.block_bytes)

    def both(self) -> Row:
        """H2D and D2H in two streams, both rates added up while both ran."""
        half = len(self.layers) // 2
        origin, origin_s = self.clock.origin()
        arriving = self._copy(self._blocks(self.layers[:half], 8 * self.rounds), self.target, to_host=False)
        leaving = self._copy(self._blocks(self.layers[half:], 8 * self.rounds), self.second_target, to_host=True)
        together = rates_together(
            self._spans(arriving, origin, origin_s), self._spans(leaving, origin, origin_s), least_s=0.005
        )
        return self._row("h2d+d2h", sum(together), self.block_bytes)

    def zero_copy(self, fetched: int = FETCHED_ROWS) -> Row:
        """Median over fetches from every layer: one table's random rows in ascending order, as the choice has them."""
        shuffled = torch.rand(1, HEADS, self.tokens, device=self.device).argsort(-1)
        rows = shuffled[..., :fetched].sort(-1).values.contiguous()
        counts = torch.full((1, HEADS), fetched, device=self.device)
        target = torch.empty((1, HEADS, fetched, DIM), dtype=torch.float16, device=self.device)
        self.transfer.fetch_rows([self.layers[0]], rows, counts, [target])  # compiled
        marks = [self.clock.mark()]
        for layer in self.layers * 2:
            self.transfer.fetch_rows([layer], rows, counts, [target])
            marks.append(self.clock.mark())
        times_ms = [self.clock.elapsed_ms(*pair) for pair in pairwise(marks)]
        ms = statistics.median(times_ms)
        shape = f"{HEADS}x{fetched} of {self.tokens} rows of {2 * DIM} bytes"
        return Row("zero_copy", "fp16", shape, None, None, ms, target.numel() * 2 / ms / 1e6)

    def slab(self, size_bytes: int = SLAB_BYTES) -> Row:
        """A slab for keys as the engine makes one: mapped, touched on its node, registered."""
        near = place_kv("local").keys
        start_s = time.perf_counter()
        HostSlab(size_bytes, self.device, placement=near)
        took_s = time.perf_counter() - start_s
        made = f"{size_bytes / 2**30:g} GiB made"
        return Row("slab", None, made, None, None, 1e3 * took_s, size_bytes / took_s / 1e9)

    def scan_with_dma(self, threads: int) -> tuple[Row, Row]:
        """The scan and H2D copies while both ran, of the round with the median sum."""
        # Apart from each other, or one would find in a cache what the other has read.
        cut = max(1, 2 * len(self.layers) // 3)
        scanner = Scanner(threads)
        order = [*range(cut)] * 4 * self.passes
        # As many bytes as are scanned: the link is the slower of the two, and so busy to the end.
        blocks = self._blocks(self.layers[cut:], max(2, len(order) * self.layer_bytes // self.block_bytes))
        rounds = []
        for _ in range(self.rounds):
            origin, origin_s = self.clock.origin()
            jobs = self._submit(scanner, order)
            marks = self._copy(blocks, self.target, to_host=False)
            scans = scanner.spans(jobs)
            rounds.append(rates_together(scans, self._spans(marks, origin, origin_s)))
        scanner.close()
        scan, dma = sorted(rounds, key=sum)[len(rounds) // 2]
        return (
            self._row("scan beside h2d", scan, self.layer_bytes, scanner),
            self._row("h2d beside scan", dma, self.block_bytes),
        )

    def _row(self, kernel: str, bytes_per_s: float, moved: int, scanner: Scanner | None = None) -> Row:
        """moved: bytes of one copy, or of one layer's scan."""
        gbps, ms = bytes_per_s / 1e9, 1e3 * moved / bytes_per_s
        if scanner is None:
            return Row(kernel, None, self.block_name, None, None, ms, gbps)
        return Row(kernel, "fp16", self.shape_name, scanner.threads, scanner.isa, ms, gbps)

    def _submit(self, scanner: Scanner, layers: Sequence[int]) -> list[int]:
        return scanner.submit(
            {
                "query": self.query.tensor.data_ptr(),
                "keys": self.layers[i].tensor.data_ptr(),
                "out": self.logits.tensor[i].data_ptr(),
                "key_type": "float16",
                "num_heads": HEADS,
                "num_kv_heads": HEADS,
                "head_dim": DIM,
                "lengths": [self.tokens],
                "key_strides": tuple(self.layers[i].tensor.stride()[:3]),
                "out_strides": (HEADS * self.tokens, self.tokens),
                "scale": 1.0,
            }
            for i in layers
        )

    def _blocks(self, layers: list[HostBuffer], count: int) -> list[Tensor]:
        """`count` blocks of pinned memory, one after the other through the layers and round again."""
        size = self.block_bytes // 2
        flat = [layer.tensor.view(-1) for layer in layers]
        blocks = [keys[at : at + size] for keys in flat for at in range(0, keys.numel() - size + 1, size)]
        return [blocks[i % len(blocks)] for i in range(count)]

    def _copy(self, blocks: list[Tensor], device_block: Tensor, to_host: bool) -> list[Any]:
        """Issue the copies in a side stream, as weights are; a mark before each and after the last."""
        with self.transfer.beside(self.transfer.mark(), "beside" if to_host else "weights"):
            marks = [self.clock.mark()]
            for block in blocks:
                target, source = (block, device_block) if to_host else (device_block, block)
                target.copy_(source, non_blocking=True)
                marks.append(self.clock.mark())
        return marks

    def _median_rate(self, marks: list[Any]) -> float:
        """Of copies of one block each; the first is left out, it wakes the link."""
        return self.block_bytes / statistics.median(self.clock.elapsed_ms(*pair) for pair in pairwise(marks[1:])) * 1e3

    def _spans(self, marks: list[Any], origin: Any, origin_s: float) -> list[Span]:
        at_s = [origin_s + self.clock.elapsed_ms(origin, mark) / 1e3 for mark in marks]
        return [Span(*times_s, self.block_bytes) for times_s in pairwise(at_s)]


def measure_link(link: Link, cores: int, progress: Progress) -> list[Row]:
    """All of it; `link_steps` steps."""
    rows = []
    # The engine leaves one core free; a core's sibling, or the neighbour's load, can make fewer the best.
    for threads in scan_threads(cores):
        progress(f"scan, {threads} threads")
        rows.append(link.scan(threads))
    for name, measure in (
        ("zero copy", link.zero_copy), ("H2D", link.h2d), ("D2H", link.d2h), ("both", link.both), ("slab", link.slab),
    ):  # fmt: skip
        progress(name)
        rows.append(measure())
    progress("scan and DMA")
    return [*rows, *link.scan_with_dma(max(1, cores - 1))]


def scan_threads(cores: int) -> list[int]:
    """Numbers of threads that the scan is measured with beside the link."""
    return sorted({max(1, 3 * cores // 4), max(1, cores - 1), cores})


def link_steps(cores: int) -> int:
    """How often `measure_link` reports progress."""
    return len(scan_threads(cores)) + 6
