"""How near the CPU's attention over all host rows (strategy `aoc`) comes to the read ceiling of this machine.

Layers of K and V in host memory, one after the other, more than any cache holds; the ceiling is the fastest of some
loops that only read the same memory, measured before and after.

    python experiments/attend_on_cpu.py [--types fp16,bf16,fp32] [--threads 15,16] [--gib 4] [--isa avx2]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridgen import info
from hybridgen.benchmarks.cpu import DIM, KEY_TYPES, SHAPES, Case, KeyPool, Shape, read_loops, read_memory
from hybridgen.benchmarks.rows import Scanner, rate
from hybridgen.machine import this_cores

ROUNDS = 5


def jobs(case: Case, pool: KeyPool, layers: int, results: tuple[Tensor, Tensor]) -> Iterator[dict[str, Any]]:
    """Attention of each layer; its V lies behind its K in the pool."""
    shape, kind = case.shape, KEY_TYPES[case.key_type]
    strides = (0, shape.tokens * DIM, DIM)
    for layer in range(layers):
        yield {
            "query": pool.query.data_ptr(),
            "keys": case.keys(pool, 2 * layer).data_ptr(),
            "values": case.keys(pool, 2 * layer + 1).data_ptr(),
            "context": results[0][layer % 2].data_ptr(),
            "log_sum": results[1][layer % 2].data_ptr(),
            "key_type": kind,
            "value_type": kind,
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim": DIM,
            "lengths": [shape.tokens],
            "key_strides": strides,
            "value_strides": strides,
            "scale": DIM**-0.5,
        }


def attend_gbps(case: Case, pool: KeyPool, threads: int, isa: str) -> float:
    """The median of some walks over all layers."""
    results = torch.zeros(2, case.shape.heads, DIM), torch.zeros(2, case.shape.heads)
    scanner = Scanner(threads, isa)

    def walk(layers: int) -> float:
        submitted = [scanner._pool.submit_attention(**job) for job in jobs(case, pool, layers, results)]
        return rate(scanner.spans(submitted)) / 1e9

    walk(1)  # pages, threads and code are there
    found = statistics.median(walk(case.layers // 2) for _ in range(ROUNDS))
    scanner.close()
    return found


def ceiling_gbps(pool: KeyPool, threads: int, walk_bytes: int) -> float:
    """The fastest way to read the pool."""
    return max(read_memory(pool.keys, "huge", threads, loop, walk_bytes).gbps for loop in read_loops(quick=True))


def main() -> None:
    """A line for each type, shape and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="fp16,bf16,fp32")
    parser.add_argument("--threads", default="", help="default: 1, all cores but one, all")
    parser.add_argument("--gib", type=float, default=4.0, help="of K and V, walked before any byte is read again")
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    cores, walk_bytes = this_cores(), int(arguments.gib * 2**30)
    asked = [int(text) for text in arguments.threads.split(",") if text]
    counts = asked or sorted({1, max(1, cores - 1), cores})
    qwen = Shape("Qwen2.5-7B", 28, 4, 131_072)
    shapes = [shape.within(walk_bytes // 4) for shape in (*SHAPES[:2], qwen)]
    cases = [Case(shape, None, kind, walk_bytes) for kind in arguments.types.split(",") for shape in shapes]
    for case in cases:
        case.layers += case.layers % 2
    pool = KeyPool(cases, walk_bytes)
    print(f"{info.cpu_info().model}, {cores} cores; {arguments.gib:g} GiB walked, median of {ROUNDS}")
    for case in cases:
        pool.fill(case.key_type)
        for threads in counts:
            before = ceiling_gbps(pool, threads, walk_bytes)
            found = attend_gbps(case, pool, threads, arguments.isa)
            ceiling = max(before, ceiling_gbps(pool, threads, walk_bytes))
            print(
                f"{case.key_type} {case.shape.name:34} {threads:3} threads {found:6.1f} GB/s of {ceiling:6.1f}: "
                f"{found / ceiling:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
