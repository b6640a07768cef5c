"""The ceilings of this machine, by the engine's own means: scan, DMA, zero copy, scan and DMA at once.

    python experiments/measure_ceilings.py [--gib 4] [--out PATH]

Keys of OPT-13B at 32k, float16, a layer after the other, so many that no cache holds them. Prints a table and writes
the machine file (hybridgen/machine.py). Without a GPU the scan alone is measured; the rest is null in the file.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import hybridgen  # noqa: F401  # before torch: it makes OpenMP wait passively

# isort: split
import torch
from torch import Tensor

from hybridgen import _C, info
from hybridgen.machine import MachineCeilings, this_cores, this_gpu, write_ceilings
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import make_transfer
from hybridgen.telemetry import Telemetry

HEADS, TOKENS, DIM = 40, 32_768, 128
SHAPE = (1, HEADS, TOKENS, DIM)
LAYER_BYTES = padded_bytes(SHAPE, torch.float16)
DMA_BLOCK_BYTES = 128 * 2**20
FETCHED_ROWS = 8192  # of each head
ROUNDS = 5


class Span(NamedTuple):
    """Bytes moved from one moment of perf_counter to another."""

    start_s: float
    end_s: float
    moved_bytes: float


def rate(spans: list[Span]) -> float:
    """Bytes a second from the first start to the last end."""
    took_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return sum(span.moved_bytes for span in spans) / took_s


def rate_together(scans: list[Span], copies: list[Span]) -> tuple[float, float]:
    """Bytes a second of each while both ran; a span that began before or ended after counts in part."""
    start_s = max(min(span.start_s for span in spans) for spans in (scans, copies))
    end_s = min(max(span.end_s for span in spans) for spans in (scans, copies))
    if end_s - start_s < 0.02:
        raise SystemExit(f"scan and DMA ran together for {1e3 * (end_s - start_s):.1f} ms only: give a larger --gib")

    def within(span: Span) -> float:
        shared_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        return span.moved_bytes * max(0.0, shared_s) / (span.end_s - span.start_s)

    scan, dma = (sum(map(within, spans)) / (end_s - start_s) for spans in (scans, copies))
    return scan, dma


class Scanner:
    """The engine's scan threads over the keys of some layers, without Python between two scans."""

    def __init__(self, threads: int, layers: list[HostBuffer], query: HostBuffer, logits: HostBuffer) -> None:
        cores = sorted(os.sched_getaffinity(0))
        # As engine/build.py pins them: the first core is for the thread that feeds the GPU.
        self._pool = _C.ScanWorker(threads, cores[1:] if threads < len(cores) else cores)
        self._layers, self._query, self._logits = layers, query, logits

    def submit(self, layers: Iterable[int]) -> list[int]:
        return [self._submit(self._layers[i].tensor, self._logits.tensor[i]) for i in layers]

    def _submit(self, keys: Tensor, logits: Tensor) -> int:
        return int(
            self._pool.submit(
                query=self._query.tensor.data_ptr(),
                keys=keys.data_ptr(),
                out=logits.data_ptr(),
                key_type="float16",
                num_heads=HEADS,
                num_kv_heads=HEADS,
                head_dim=DIM,
                lengths=[TOKENS],
                key_strides=tuple(keys.stride()[:3]),
                out_strides=(HEADS * TOKENS, TOKENS),
                scale=1.0,
                hold=False,
            )
        )

    def spans(self, jobs: list[int]) -> list[Span]:
        """Wait for them."""
        times_s = [self._pool.wait(job, False) for job in jobs]
        return [Span(start_s, end_s, LAYER_BYTES) for start_s, end_s in times_s]

    def close(self) -> None:
        self._pool.close()


class Machine:
    """The memory that all measurements share."""

    def __init__(self, gib: float) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        count = max(1, int(gib * 2**30) // LAYER_BYTES)
        # At least a pass over 2 GiB: far more than the caches, and long enough to time.
        self.passes = max(1, -(-(2 * 2**30) // (count * LAYER_BYTES)))
        query, logits = (1, HEADS, DIM), (count, HEADS, TOKENS)
        small = sum(padded_bytes(shape, torch.float32) for shape in (query, logits))
        slab = HostSlab(count * LAYER_BYTES + small, self.device)
        self.layers = [slab.take(SHAPE, torch.float16) for _ in range(count)]
        self.query, self.logits = slab.take(query, torch.float32), slab.take(logits, torch.float32)
        row = torch.randn(DIM)
        self.query.tensor.copy_(row)
        for layer in self.layers:
            layer.tensor.copy_(row)  # written: pages that nobody wrote are one page of zeros
        self.transfer = make_transfer("auto", self.device, Telemetry())
        self.clock = self.transfer.clock

    def scanner(self, threads: int) -> Scanner:
        return Scanner(threads, self.layers, self.query, self.logits)

    def scan(self, threads: int) -> float:
        """Median over the rounds, all layers back to back in each."""
        scanner = self.scanner(threads)
        order = [*range(len(self.layers))] * self.passes
        scanner.spans(scanner.submit(order[:1]))
        rates = [rate(scanner.spans(scanner.submit(order))) for _ in range(ROUNDS)]
        scanner.close()
        return statistics.median(rates)

    def _blocks(self, layers: list[HostBuffer], count: int) -> list[Tensor]:
        """`count` blocks of pinned memory, one after the other through the layers and round again."""
        size = DMA_BLOCK_BYTES // 2
        flat = [layer.tensor.view(-1) for layer in layers]
        blocks = [keys[at : at + size] for keys in flat for at in range(0, keys.numel() - size + 1, size)]
        return [blocks[i % len(blocks)] for i in range(count)]

    def _copy(self, blocks: list[Tensor], target: Tensor) -> list[object]:
        """Issue the copies in a side stream, as weights are; a mark before each and after the last."""
        with self.transfer.beside(self.transfer.mark(), "weights"):
            marks = [self.clock.mark()]
            for block in blocks:
                target.copy_(block, non_blocking=True)
                marks.append(self.clock.mark())
        return marks

    def dma(self, target: Tensor) -> float:
        """Median over the copies, each of one block."""
        blocks = self._blocks(self.layers, 8 * ROUNDS)
        self.transfer.mark().wait_host()
        marks = self._copy(blocks, target)
        times_ms = [self.clock.elapsed_ms(*pair) for pair in pairwise(marks[1:])]  # not the first: it wakes the link
        return DMA_BLOCK_BYTES / statistics.median(times_ms) * 1e3

    def zero_copy(self) -> float:
        """Median over fetches from every layer: one table's random rows in ascending order, as the choice has them."""
        from hybridgen.offload.fetch_kernel import fetch_rows  # Triton: only where there is a GPU

        shuffled = torch.rand(1, HEADS, TOKENS, device=self.device).argsort(-1)
        rows = shuffled[..., :FETCHED_ROWS].sort(-1).values.contiguous()
        counts = torch.full((1, HEADS), FETCHED_ROWS, device=self.device)
        target = torch.empty((1, HEADS, FETCHED_ROWS, DIM), dtype=torch.float16, device=self.device)
        fetch_rows([self.layers[0].device_view], rows, counts, [target])  # compiled
        marks = [self.clock.mark()]
        for layer in self.layers * 2:
            fetch_rows([layer.device_view], rows, counts, [target])
            marks.append(self.clock.mark())
        times_ms = [self.clock.elapsed_ms(*pair) for pair in pairwise(marks)]
        return target.numel() * 2 / statistics.median(times_ms) * 1e3

    def scan_with_dma(self, threads: int, target: Tensor) -> tuple[float, float]:
        """Rates of the scan and of the copies while both ran, of the round with the median sum."""
        # Apart from each other, or one would find in a cache what the other has read.
        cut = max(1, 2 * len(self.layers) // 3)
        scanner = self.scanner(threads)
        order = [*range(cut)] * 4 * self.passes
        # As many bytes as are scanned: the link is the slower of the two, and so busy to the end.
        blocks = self._blocks(self.layers[cut:] or self.layers, len(order) * LAYER_BYTES // DMA_BLOCK_BYTES)
        rounds = []
        for _ in range(ROUNDS):
            origin, origin_s = self.clock.origin()
            marks = self._copy(blocks, target)
            scans = scanner.spans(scanner.submit(order))
            at_s = [origin_s + self.clock.elapsed_ms(origin, mark) / 1e3 for mark in marks]
            copies = [Span(*times_s, DMA_BLOCK_BYTES) for times_s in pairwise(at_s)]
            rounds.append(rate_together(scans, copies))
        scanner.close()
        return sorted(rounds, key=sum)[ROUNDS // 2]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="keys in host memory (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the machine file (default: where hybridgen looks for it)")
    arguments = parser.parse_args()

    cores, gpu = this_cores(), this_gpu()
    machine = Machine(arguments.gib)
    print(f"{info.cpu_info().model}, {cores} cores, {_C.selected_isa()}; GPU: {gpu or 'none'}")
    # With a GPU the engine leaves one core free; a core's sibling, or the neighbour's load, can make fewer the best.
    by_threads = {n: machine.scan(n) for n in sorted({max(1, 3 * cores // 4), max(1, cores - 1), cores})}
    for threads, found in by_threads.items():
        _print(f"scan, {threads} threads", found)
    scan = max(by_threads.values())
    dma = zero_copy = together = None
    if machine.device.type == "cuda":
        target = torch.empty(DMA_BLOCK_BYTES // 2, dtype=torch.float16, device=machine.device)
        dma, zero_copy = machine.dma(target), machine.zero_copy()
        threads = max(1, cores - 1)
        shares = machine.scan_with_dma(threads, target)
        together = sum(shares)
        _print(f"DMA, blocks of {DMA_BLOCK_BYTES >> 20} MiB", dma)
        _print(f"zero copy, rows of {2 * DIM} bytes", zero_copy)
        _print(f"scan, {threads} threads, beside DMA", shares[0])
        _print("DMA beside the scan", shares[1])
        _print("both together", together)
    else:
        print("no CUDA device: DMA, zero copy and both together are not measured (null in the file)")

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    ceilings = MachineCeilings(scan, together, dma, zero_copy, gpu, cores, now, info.versions())
    print(f"written to {write_ceilings(arguments.out, ceilings)}")


def _print(what: str, bytes_per_s: float) -> None:
    print(f"{what:<32} {bytes_per_s / 1e9:>8.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
