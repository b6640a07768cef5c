"""`python -m hybridgen.bench cpu|link|hardware`: what this machine reaches, and what is made of it.

`cpu` measures how fast memory can be read and holds every scan kernel against that; `link` measures copies, zero copy
and the scan beside them, on a machine with a GPU. Both write the machine file, from which `run` takes its limits.
`hardware` prints what the files in configs/hardware say.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from tqdm import tqdm

from hybridgen import info
from hybridgen.benchmarks import cpu
from hybridgen.benchmarks.link import Link, link_steps, measure_link
from hybridgen.benchmarks.rows import Row
from hybridgen.cli import Parser, run_command
from hybridgen.engine.report import current_commit
from hybridgen.errors import ConfigError, InsufficientMemoryError
from hybridgen.machine import (
    hardware_file,
    hardware_files,
    machine_file,
    read_ceilings,
    record_rates,
    this_cores,
    this_gpu,
)
from hybridgen.offload.logit_worker import selected_isa
from hybridgen.output import check_output_path, write_whole

WALK_GIB = 4.0  # many times what caches hold
LEAST_GIB_OF_A_CEILING = 1.0  # shorter walks are of caches, in part
GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a wrong input, 130 after Ctrl-C."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    parser = Parser("hybridgen.bench", description="Measure what this machine can do.")
    commands = parser.add_subparsers(dest="command", metavar="cpu|link|hardware", required=True)
    for name, help_text in (
        ("cpu", "how fast memory is read, and each scan kernel against that"),
        ("link", "copies to and from the GPU, zero copy, scan and copies at once"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument(
            "--gib", type=_parse_gib, metavar="G",
            help=f"keys in host memory: walked before any byte is read again (default {WALK_GIB:g}, or what is there)",
        )  # fmt: skip
        command.add_argument("--quick", action="store_true", help="fewer rounds, thread counts and read loops")
        command.add_argument("--report", type=Path, metavar="F", help="write all rows as JSON")
        command.add_argument("--save", metavar="NAME", help="write the rates into configs/hardware/NAME.json, too")
        if name == "cpu":
            command.add_argument("--isa", default="", metavar="ISA", help="kernels of this instruction set, or all")
            command.add_argument(
                "--logits", choices=("fp16", "fp32"),
                help="what scans write: fp16 below maxima of blocks, as for a GPU (default with one), or fp32",
            )  # fmt: skip
    commands.add_parser("hardware", help="a table of the machines in configs/hardware")
    arguments = parser.parse_args(argv)
    if arguments.command == "hardware":
        print(hardware_table())
        return 0
    check_output_path("--report", arguments.report)
    saved = [machine_file()]
    if arguments.save is not None:
        saved.append(hardware_file(arguments.save))
    return _Bench(arguments, saved).run()


def _parse_gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not (math.isfinite(gib) and gib > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB > 0")
    return gib


class _Bench:
    """One run of `cpu` or `link`."""

    def __init__(self, arguments: argparse.Namespace, saved: list[Path]) -> None:
        self.quick, self.report_path, self.saved = arguments.quick, arguments.report, saved
        self.command: str = arguments.command
        self.cores, self.gpu = this_cores(), this_gpu()
        if self.command == "link" and self.gpu is None:
            raise ConfigError("bench link needs a CUDA device, and there is none here")
        self.isas = _isas(arguments.isa) if self.command == "cpu" else [""]
        self.logits: str | None = None  # what scans write
        if self.command == "cpu":
            self.logits = arguments.logits or ("fp32" if self.gpu is None else "fp16")
        self.gib, self.note = _walk_gib(arguments.gib)
        self.started_s = time.perf_counter()

    def run(self) -> int:
        print(f"{info.cpu_info().model}, {self.cores} cores, {selected_isa()}; GPU: {self.gpu or 'none'}")
        if self.note:
            print(self.note)
        if self.logits is not None:
            print(f"scans write logits in {self.logits}")
        rows = self._cpu() if self.command == "cpu" else self._link()
        ceiling = read_ceiling(rows)
        print(cpu_table(rows) if self.command == "cpu" else link_table(rows))
        warning = _above(rows)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
        seconds = time.perf_counter() - self.started_s
        report = {
            "command": self.command,
            "machine": {"cpu": info.cpu_info().model, "cores": self.cores, "gpu": self.gpu},
            "walked_gib": self.gib,
            "note": self.note,
            "quick": self.quick,
            "logits": self.logits,
            "seconds": round(seconds, 1),
            "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": current_commit(),
            "versions": info.versions(),
            "ceiling": None if ceiling is None else asdict(ceiling),
            "warning": warning,
            "rows": [asdict(row) for row in rows],
        }
        if self.report_path is not None:
            write_whole("--report", self.report_path, json.dumps(report, indent=1) + "\n")
        self._save(rows, ceiling_is_wrong=warning is not None)
        print(f"{seconds:.0f} s")
        return 0

    def _cpu(self) -> list[Row]:
        walk_bytes = int(self.gib * GIB)
        counts = cpu.thread_counts(self.cores, self.quick)
        shapes = [shape.within(walk_bytes) for shape in cpu.SHAPES]
        lists = [cpu.row_lists(shape) for shape in shapes]
        cases = {
            key_type: [cpu.Case(*pair, key_type, walk_bytes) for pair in zip(shapes, lists, strict=True)]
            for key_type in cpu.KEY_TYPES
        }
        every = [case for of_type in cases.values() for case in of_type]
        rounds, torch_s = (1, 0.2) if self.quick else (3, 1.0)
        reads = 2 * len(counts) if not self.quick else len(counts) + 1
        with _bar(1 + reads + len(every) * len(counts) * len(self.isas), "bench cpu") as bar:
            step = _steps(bar)
            step("mapping memory")
            pool = cpu.KeyPool(every, walk_bytes, in_half=self.logits == "fp16")
            pool.fill("fp16")
            loops = cpu.read_loops(self.quick)
            rows = cpu.measure_reads(pool, walk_bytes, counts, counts[-1:] if self.quick else counts, loops, step)
            for key_type, of_type in cases.items():
                pool.fill(key_type)
                # A neighbour may have been busy before.
                rows += cpu.read_again(pool, walk_bytes, rows, loops)
                read = cpu.best_read(pool, walk_bytes, rows, loops)
                for case in of_type:
                    for threads in counts:
                        torch_gbps = None
                        beside = read if threads in counts[-2:] else None  # those that the engine uses
                        for isa in self.isas:
                            step(f"{key_type}, {case.shape.name}, {threads} threads")
                            row = cpu.measure_scan(case, pool, threads, isa, rounds, beside)
                            torch_gbps = torch_gbps or cpu.measure_torch(case, pool, threads, torch_s)
                            rows.append(replace(row, torch_gbps=torch_gbps))
            if _above(rows):
                rows += cpu.measure_reads(pool, walk_bytes, counts, [], cpu.read_loops(quick=False), lambda what: None)
        ceiling = read_ceiling(rows)
        return [replace(row, fraction_of_ceiling=row.gbps / ceiling.gbps if ceiling else None) for row in rows]

    def _link(self) -> list[Row]:
        with _bar(1 + link_steps(self.cores), "bench link") as bar:
            step = _steps(bar)
            step("mapping memory")
            link = Link(torch.device("cuda", 0), self.gib, rounds=3 if self.quick else 5)
            return measure_link(link, self.cores, step)

    def _save(self, rows: list[Row], ceiling_is_wrong: bool) -> None:
        rates, scans = found_rates(rows)
        if ceiling_is_wrong:
            rates["read_bytes_per_s"] = None
        if self.gib < LEAST_GIB_OF_A_CEILING:
            print(f"no machine file written: walks of {self.gib:g} GiB are of caches, in part")
            return
        for path in self.saved:
            record_rates(path, rates, scans)
            print(f"rates written to {path}")


def _isas(given: str) -> list[str]:
    known = list(info.extension_info().isa_variants)
    if given == "all":
        return known
    if given and given not in known:
        raise ConfigError(f"--isa {given!r}: unknown, or this CPU lacks it (allowed: {', '.join(known)}, all)")
    return [given]


def _walk_gib(given: float | None) -> tuple[float, str | None]:
    """How much is walked, and what to say of it."""
    free = psutil.virtual_memory().available
    limit = info.cgroup_memory_limit()
    free = free if limit is None else min(free, limit)
    # Whole layers, the blocks of sketches that row lists leave out, and small pages in their turn.
    most = free / GIB / 2.5
    if given is not None and given > most:
        raise InsufficientMemoryError(f"--gib {given:g}: {free / GIB:.1f} GiB are free, enough for --gib {most:.1f}")
    if given is not None:
        short = given < WALK_GIB
        return given, f"walks of {given:g} GiB, less than {WALK_GIB:g}: --gib" if short else None
    if most < WALK_GIB:
        most = math.floor(10 * most) / 10 or most
        return most, f"walks of {most:.2g} GiB, less than {WALK_GIB:g}: {free / GIB:.1f} GiB are free"
    return WALK_GIB, None


def _bar(total: int, name: str) -> tqdm[NoReturn]:
    return tqdm(total=total, desc=name, unit="step", disable=None)


def _steps(bar: tqdm[NoReturn]) -> Any:
    def step(what: str) -> None:
        bar.set_postfix_str(what, refresh=False)
        bar.update()

    return step


def read_ceiling(rows: Sequence[Row]) -> Row | None:
    """The fastest read loop."""
    return max((row for row in rows if row.kernel == "read"), key=lambda row: row.gbps, default=None)


def _above(rows: Sequence[Row]) -> str | None:
    """What is wrong if a kernel reads faster than the read loops do."""
    ceiling = read_ceiling(rows)
    scans = [row for row in rows if row.kernel in ("scan", "scan_rows")]
    if ceiling is None or not scans:
        return None
    fastest = max(scans, key=lambda row: row.gbps)
    if fastest.gbps <= ceiling.gbps:
        return None
    return (
        f"the read ceiling of {ceiling.gbps:.1f} GB/s is too low: {fastest.key_type} keys of {fastest.shape} are "
        f"scanned at {fastest.gbps:.1f} GB/s with {fastest.threads} threads"
    )


def found_rates(rows: Sequence[Row]) -> tuple[dict[str, float | None], dict[str, float]]:
    """For the machine file, in bytes a second: rates by field, and the best full scan of each key type."""
    best: dict[str, float] = {}
    scans: dict[str, float] = {}
    for row in rows:
        best[row.kernel] = max(best.get(row.kernel, 0.0), 1e9 * row.gbps)
        if row.kernel == "scan" and row.key_type is not None:
            scans[row.key_type] = max(scans.get(row.key_type, 0.0), 1e9 * row.gbps)
    fields = {
        "read_bytes_per_s": "read",
        "dma_h2d_bytes_per_s": "h2d",
        "dma_d2h_bytes_per_s": "d2h",
        "dma_both_bytes_per_s": "h2d+d2h",
        "zero_copy_bytes_per_s": "zero_copy",
    }
    rates: dict[str, float | None] = {field: best[kernel] for field, kernel in fields.items() if kernel in best}
    if "scan beside h2d" in best:
        rates["scan_with_dma_bytes_per_s"] = best["scan beside h2d"] + best["h2d beside scan"]
    return rates, scans


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned, and Markdown."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    ruled = [list(head), ["-" * width for width in widths], *map(list, lines)]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in ruled)


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _beside(row: Row, with_logits: bool = False) -> float:
    """Of the reads between the walks; with_logits: bytes read and written, not those read alone."""
    return (row.fraction_beside or 0.0) * (1.0 + (row.written_per_read or 0.0 if with_logits else 0.0))


def cpu_table(rows: Sequence[Row]) -> str:
    """GB/s by threads: the best read loop, then a line for each kernel, key type and shape."""
    counts = sorted({row.threads for row in rows if row.threads is not None})
    lines = []
    reads = [row for row in rows if row.kernel == "read"]
    by_threads = [max((row.gbps for row in reads if row.threads == n), default=None) for n in counts]
    lines.append(["read, best loop", "", "", *map(_gbps, by_threads), "1.00", "", "", ""])
    scans = [row for row in rows if row.kernel != "read"]
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in scans:
        groups.setdefault((row.kernel, row.isa or "", row.key_type or "", row.shape), []).append(row)
    for (kernel, isa, key_type, shape), same in groups.items():
        by_count = {row.threads: row.gbps for row in same}
        best = max(same, key=lambda row: row.gbps)
        nearest = max((row for row in same if row.fraction_beside is not None), key=_beside, default=None)
        torch_best = max((row.torch_gbps for row in same if row.torch_gbps is not None), default=None)
        lines.append(
            [
                f"{kernel}, {isa}",
                key_type,
                shape,
                *(_gbps(by_count.get(n)) for n in counts),
                f"{best.fraction_of_ceiling or 0:.2f}",
                *(("-", "-") if nearest is None else (f"{_beside(nearest):.2f}", f"{_beside(nearest, True):.2f}")),
                _gbps(torch_best),
            ]
        )
    columns = [f"{n} thread{'s' if n > 1 else ''}" for n in counts]
    head = ["GB/s", "keys", "shape", *columns, "of the ceiling", "of reads beside", "and written", "torch, best"]
    ceiling = read_ceiling(rows)
    said = f"read ceiling: {ceiling.gbps:.1f} GB/s, {ceiling.threads} threads, {ceiling.shape}\n" if ceiling else ""
    return said + _table(head, lines)


def link_table(rows: Sequence[Row]) -> str:
    """A line a measurement."""
    lines = [
        [row.kernel, row.shape, "-" if row.threads is None else str(row.threads), f"{row.ms:.2f}", f"{row.gbps:.1f}"]
        for row in rows
    ]
    return _table(["what", "of", "threads", "ms", "GB/s"], lines)


def hardware_table() -> str:
    """The machines of configs/hardware, for the README."""
    lines = []
    for path in hardware_files():
        c = read_ceilings(path, any_machine=True)
        if c is None:  # removed meanwhile
            continue
        rates = (
            c.read_bytes_per_s, c.scan_bytes_per_s, c.dma_h2d_bytes_per_s, c.dma_d2h_bytes_per_s,
            c.dma_both_bytes_per_s, c.zero_copy_bytes_per_s, c.scan_with_dma_bytes_per_s,
        )  # fmt: skip
        cells = [_gbps(None if value is None else value / 1e9) for value in rates]
        lines.append([f"`{path.stem}`", f"{c.cores} cores, {c.cpu or 'unknown CPU'}", c.gpu or "none", *cells])
    head = ["machine", "CPU", "GPU", "read", "scan", "H2D", "D2H", "both", "zero copy", "scan + H2D"]
    return _table(head, lines) + "\n\nGB/s"


if __name__ == "__main__":
    sys.exit(main())
