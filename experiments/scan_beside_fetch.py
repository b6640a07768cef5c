"""What the host's memory gives while the CPU scans keys and the GPU fetches rows by zero copy, as in a decode step.

    python experiments/scan_beside_fetch.py --out DIR [--threads 15 12]

`hybridgen.bench link` measures a scan beside DMA copies; a step's fetch reads rows of 256 bytes that lie apart. Rates
are those while both ran, in GB/s; `alone` is the same without the other, in the same call, before and after.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
from common import Experiment, Point, Result, align, main

from hybridgen.benchmarks.link import DIM, HEADS, Link
from hybridgen.benchmarks.rows import Scanner, Span, rate, rates_together
from hybridgen.errors import ConfigError
from hybridgen.machine import this_cores

GIB, ROUNDS = 8.0, 5
LONGEST = 256  # a round is doubled up to this: a busy machine may stop either side for longer than the other takes
SHARES = (0.02, 0.1, 0.28)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `run` takes beside the common flags."""
    parser.add_argument("--threads", type=int, nargs="+", default=[max(1, this_cores() - 1)], help="of the scan")


def points(arguments: argparse.Namespace) -> list[Point]:
    """A share of rows fetched from each scanned layer, for each number of threads."""
    shares = SHARES[:1] if arguments.smoke else SHARES
    size = {"tokens": 32_768, "gib": GIB, "passes": 0}  # as many passes over the layers as make it long enough
    if arguments.smoke:
        size = {"tokens": 1024, "gib": 0.05, "passes": 2}
    return [
        Point(f"{threads} threads, {share:.0%}", {"threads": threads, "share": share, **size})
        for threads in arguments.threads
        for share in shares
    ]


def measure(point: Point) -> Result:
    """The round with the median sum; and each alone, before and after."""
    asked = point.settings
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    link = Link(device, asked["gib"], ROUNDS, asked["tokens"])
    link.passes = asked["passes"] or link.passes
    cut = max(1, 2 * len(link.layers) // 3)  # apart, or one would find in a cache what the other has read
    fetched = max(1, int(asked["share"] * link.tokens))
    rows = torch.rand(1, HEADS, link.tokens, device=device).argsort(-1)[..., :fetched].sort(-1).values.contiguous()
    counts = torch.full((1, HEADS), fetched, device=device)
    target = torch.empty((1, HEADS, fetched, DIM), dtype=torch.float16, device=device)
    moved = target.numel() * target.element_size()
    scanner = Scanner(asked["threads"])
    order = [*range(cut)] * 2 * link.passes
    count = max(2, len(order) * link.layer_bytes // (3 * moved))  # the link gives a third of what the memory does

    def fetch(times: int = 1) -> list[Span]:
        origin, origin_s = link.clock.origin()
        marks = [link.clock.mark()]
        for number in range(times * count):
            link.transfer.fetch_rows([link.layers[cut + number % (len(link.layers) - cut)]], rows, counts, [target])
            marks.append(link.clock.mark())
        at_s = [origin_s + link.clock.elapsed_ms(origin, mark) / 1e3 for mark in marks]
        return [Span(*times_s, moved) for times_s in pairwise(at_s)]

    def scan_alone() -> float:
        return rate(scanner.spans(link._submit(scanner, order)))

    def together(times: int = 1) -> tuple[float, float]:
        jobs = link._submit(scanner, order * times)
        fetches = fetch(times)
        try:
            return rates_together(scanner.spans(jobs), fetches, least_s=0.0)
        except ConfigError:
            if times >= LONGEST:
                raise
            return together(2 * times)

    fetch()  # compiled
    before, alone = scan_alone(), rate(fetch())
    rounds = [together() for _ in range(ROUNDS)]
    after = scan_alone()
    scanner.close()
    scan, copy = sorted(rounds, key=sum)[len(rounds) // 2]
    return {
        "scan_gbps": scan / 1e9,
        "fetch_gbps": copy / 1e9,
        "scan_alone_gbps": statistics.mean((before, after)) / 1e9,
        "fetch_alone_gbps": alone / 1e9,
    }


def table(results: Sequence[Result]) -> str:
    """A row a point."""
    names = ("scan_gbps", "fetch_gbps", "scan_alone_gbps", "fetch_alone_gbps")
    rows = [["GB/s", "scan", "fetch", "together", "scan alone", "fetch alone"]]
    for one in results:
        scan, fetch, *alone = (one["result"][name] for name in names)
        rows.append([one["name"], *(f"{value:.1f}" for value in (scan, fetch, scan + fetch, *alone))])
    return align(rows)


EXPERIMENT = Experiment("scan_beside_fetch", __doc__ or "", points, measure, table, add_flags=add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
