"""Decode at the limits of the machine: every offloaded way beside its limit, one row a run, on random weights.

    python experiments/decode_table.py run --out DIR [--part 1/2] [--rows NAME ...]
    python experiments/decode_table.py table DIR

Needs a GPU and the machine file of `hybridgen.bench link` (scripts/gpu_bench.sh makes it). A row that has its report
in DIR already is not run again. Offloaded rows get `--gpu-memory 32GiB`, a window of 512 and --schedule fixed; `kept`
is `--keep`. The limit is the report's `limit_ms`: contracts.md.

What the host's memory gives changes by the minute on a lent box, as neighbours take their part. So its two rates are
measured right before and after each row, and the limit is by their means: `scan`, how fast keys are read, and `beside`,
what a scan and DMA move together, both in GB/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridgen.bench import found_rates
from hybridgen.benchmarks.link import Link
from hybridgen.machine import machine_file, record_rates, this_cores

OPT = ("--model", "opt-13b", "--seq", "32k")
LLAMA = ("--model", "llama-3.1-8b", "--seq", "131000")
OPT4K = ("--model", "opt-13b", "--seq", "4k", "--batch", "8", "--gpu-memory", "32GiB")
OPT512 = ("--model", "opt-13b", "--seq", "512", "--batch", "8")
OPT768 = ("--model", "opt-13b", "--seq", "768", "--batch", "8")
OPT1K = ("--model", "opt-13b", "--seq", "1k", "--batch", "8")
ONE = ("--set", "runtime.micro_batch=8")
TWO = ("--set", "runtime.micro_batch=4")
BUDGET = ("--gpu-memory", "32GiB", "--gpu-window", "512")
TENTH = ("--keep", "0.1")
INT8 = ("--key-type", "int8")
HOST_INT2 = ("--sketch", "int2", "--sketch-home", "host")
GPU_INT2 = ("--sketch", "int2", "--sketch-home", "gpu")
AHEAD = ("--set", "attention.lookahead_layers=2")
BATCH4 = ("--model", "opt-13b", "--seq", "16k", "--batch", "4")


@dataclass(frozen=True)
class Row:
    """One run: its name in the table, and flags of `hybridgen.run`."""

    name: str
    flags: tuple[str, ...]


ROWS = (
    Row("opt-13b 32k full, all resident", (*OPT, "--strategy", "full")),
    Row("opt-13b 32k fp16 10%", (*OPT, *BUDGET, *TENTH)),
    Row("opt-13b 32k fp16 28%", (*OPT, *BUDGET, "--keep", "0.28")),
    Row("opt-13b 32k int8 10%", (*OPT, *BUDGET, *INT8, *TENTH)),
    Row("opt-13b 32k host int2 2%", (*OPT, *BUDGET, *HOST_INT2, "--keep", "0.02")),
    Row("opt-13b 32k host int2 10%", (*OPT, *BUDGET, *HOST_INT2, *TENTH)),
    Row("opt-13b 32k gpu int2 2%", (*OPT, *BUDGET, *GPU_INT2, "--keep", "0.02")),
    Row("opt-13b 32k gpu int2 5%", (*OPT, *BUDGET, *GPU_INT2, "--keep", "0.05")),
    Row("opt-13b 32k aog", (*OPT, *BUDGET, "--strategy", "aog")),
    Row("opt-13b 32k aoc", (*OPT, *BUDGET, "--strategy", "aoc")),
    Row("llama-3.1-8b 131000 full, all resident", (*LLAMA, "--strategy", "full")),
    Row("llama-3.1-8b 131000 int8 10%", (*LLAMA, *BUDGET, *INT8, *TENTH)),
    Row("llama-3.1-8b 131000 host int2 2%", (*LLAMA, *BUDGET, *HOST_INT2, "--keep", "0.02")),
    Row("llama-3.1-8b 131000 gpu int2 2%", (*LLAMA, *BUDGET, *GPU_INT2, "--keep", "0.02")),
    Row("opt-13b 16k x 4 int8 10%", (*BATCH4, *BUDGET, *INT8, *TENTH)),
    Row("opt-13b 32k fp16 10%, two ahead", (*OPT, *BUDGET, *TENTH, *AHEAD)),
    Row("opt-13b 32k fp16 28%, two ahead", (*OPT, *BUDGET, "--keep", "0.28", *AHEAD)),
    Row("opt-13b 32k int8 10%, two ahead", (*OPT, *BUDGET, *INT8, *TENTH, *AHEAD)),
    Row("opt-13b 32k host int2 2%, two ahead", (*OPT, *BUDGET, *HOST_INT2, "--keep", "0.02", *AHEAD)),
    Row("opt-13b 32k host int2 10%, two ahead", (*OPT, *BUDGET, *HOST_INT2, *TENTH, *AHEAD)),
    Row("opt-13b 32k gpu int2 5%, two ahead", (*OPT, *BUDGET, *GPU_INT2, "--keep", "0.05", *AHEAD)),
    Row("llama-3.1-8b 131000 int8 10%, two ahead", (*LLAMA, *BUDGET, *INT8, *TENTH, *AHEAD)),
    Row("llama-3.1-8b 131000 host int2 2%, two ahead", (*LLAMA, *BUDGET, *HOST_INT2, "--keep", "0.02", *AHEAD)),
    Row("opt-13b 16k x 4 int8 10%, two ahead", (*BATCH4, *BUDGET, *INT8, *TENTH, *AHEAD)),
    Row("opt-13b 4k x 8 aoc", (*OPT4K, "--strategy", "aoc", "--gpu-window", "64")),
    Row("opt-13b 4k x 8 moe-lightning", (*OPT4K, "--strategy", "moe-lightning")),
    Row("opt-13b 4k x 8 moe-lightning, two", (*OPT4K, "--strategy", "moe-lightning", *TWO)),
    Row("opt-13b 512 x 8 aoc", (*OPT512, "--strategy", "aoc", "--gpu-window", "64")),
    Row("opt-13b 512 x 8 moe-lightning, one", (*OPT512, "--strategy", "moe-lightning", *ONE)),
    Row("opt-13b 512 x 8 moe-lightning, two", (*OPT512, "--strategy", "moe-lightning", *TWO)),
    Row("opt-13b 768 x 8 aoc", (*OPT768, "--strategy", "aoc", "--gpu-window", "64")),
    Row("opt-13b 768 x 8 moe-lightning, one", (*OPT768, "--strategy", "moe-lightning", *ONE)),
    Row("opt-13b 768 x 8 moe-lightning, two", (*OPT768, "--strategy", "moe-lightning", *TWO)),
    Row("opt-13b 1k x 8 aoc", (*OPT1K, "--strategy", "aoc", "--gpu-window", "64")),
    Row("opt-13b 1k x 8 moe-lightning, two", (*OPT1K, "--strategy", "moe-lightning", *TWO)),
    Row("opt-13b 512 x 8, weights on the host", (*OPT512, "--strategy", "full", "--weights-on-gpu", "0")),
    Row("llama-3.1-8b 64k in 24 GiB", ("--model", "llama-3.1-8b", "--seq", "64k", "--gpu-memory", "24GiB", *TENTH)),
)  # fmt: skip


def path_of(row: Row, out: Path) -> Path:
    """Where its report lies."""
    return out / f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in row.name)}.json"


class HostMemory:
    """The rates of the host's memory, now; also written to the machine file, from which the next run has its limits."""

    def __init__(self, gib: float = 4.0, rounds: int = 2) -> None:
        self._link = Link(torch.device("cuda"), gib, rounds)

    def rates(self) -> dict[str, float]:
        """Bytes a second: `scan`, and `together`, a scan beside DMA."""
        threads = max(1, this_cores() - 1)
        rates, scans = found_rates([self._link.scan(threads), *self._link.scan_with_dma(threads)])
        record_rates(machine_file(), rates, scans)
        return {"scan": max(scans.values()), "together": float(rates["scan_with_dma_bytes_per_s"] or 0.0)}


def run(row: Row, out: Path, memory: HostMemory) -> str:
    """Run it between two looks at the host's memory, and say how that went."""
    path = path_of(row, out)
    if path.exists():
        return "done before"
    before, (free, total) = memory.rates(), torch.cuda.mem_get_info()
    command = [
        sys.executable, "-m", "hybridgen.run", *row.flags, "--weights", "random", "--gen", "40", "--schedule", "fixed",
        "--report", str(path),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return f"FAILED ({done.returncode}): {done.stderr[-500:]}"
    found = {"before": before, "after": memory.rates(), "held_bytes": total - free}
    beside_of(path).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return f"{time.perf_counter() - start:.0f} s"


def beside_of(path: Path) -> Path:
    """Where the rates of the host's memory beside a report lie."""
    return path.with_suffix(".rates")


def limit_of(report: dict[str, Any], rates: dict[str, Any] | None) -> dict[str, float]:
    """By resource, in ms; those of the host's memory by the means of its rates before and after, if they are known."""
    found = {name: value for name, value in (report["limit_ms"] or {}).items() if name != "limit" and value is not None}
    if rates is not None:
        for resource, name in (("scan", "scan"), ("dram", "together")):
            before, after = rates["before"][name], rates["after"][name]
            if resource in found:
                found[resource] *= 2 * before / (before + after)
    return found


def part_of(text: str) -> list[Row]:
    """`2/3`: the second of three parts of about as many rows."""
    number, parts = (int(word) for word in text.split("/"))
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"{text!r}: the part must lie between 1 and {parts}")
    return [row for index, row in enumerate(ROWS) if index * parts // len(ROWS) == number - 1]


def table(out: Path) -> str:
    """A line for each row that has a report."""
    lines = [
        f"{'row':<44} {'ms':>7} {'p90':>7} {'limit':>7} {'ratio':>6} {'by':>5} {'idle':>5} {'gap':>5} {'kept':>6} "
        f"{'budget':>6} {'GiB':>6} {'prefill s':>9} {'scan':>9} {'beside':>9}"
    ]
    for row in ROWS:
        if (path := path_of(row, out)).exists():
            rates = json.loads(beside_of(path).read_text(encoding="utf-8")) if beside_of(path).exists() else None
            lines.append(_line(row, json.loads(path.read_text(encoding="utf-8")), rates))
    return "\n".join(lines)


def _line(row: Row, report: dict[str, Any], rates: dict[str, Any] | None) -> str:
    spent, resources, idle = report["decode_ms_per_token"], limit_of(report, rates), report["gpu_idle_fraction"]
    # A report counts what others hold on the GPU, too: here, this process, which looks at the host's memory.
    peak = (report["peak_gpu_bytes"] or 0) - (rates or {}).get("held_bytes", 0)
    by = max(resources, key=lambda name: resources[name], default="-")
    limit = resources.get(by)

    def around(name: str) -> str:
        return "-" if rates is None else "/".join(f"{rates[when][name] / 1e9:.0f}" for when in ("before", "after"))

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.name:<44} {spent['median']:>7.1f} {spent['p90']:>7.1f} {number(limit, 1):>7} "
        f"{number(limit and spent['median'] / limit, 2):>6} {by:>5} {number(idle and idle['total'], 2):>5} "
        f"{number(idle and idle['launch_gap'], 2):>5} {number(report['kept_fraction'], 3):>6} "
        f"{number(report['budget'], 3):>6} {number(peak / 2**30, 1):>6} "
        f"{report['prefill_s']:>9.2f} {around('scan'):>9} {around('together'):>9}"
    )


def main() -> int:
    """Run rows or print the table; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run rows that have no report yet, then print the table")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--part", type=part_of, default=list(ROWS), metavar="n/N")
    runs.add_argument("--rows", nargs="+", metavar="NAME", help="only rows whose names contain one of these")
    commands.add_parser("table", help="print the table").add_argument("out", type=Path)
    arguments = parser.parse_args()
    failed = False
    if arguments.command == "run":
        arguments.out.mkdir(parents=True, exist_ok=True)
        memory = HostMemory()
        for row in arguments.part:
            if arguments.rows is None or any(word in row.name for word in arguments.rows):
                result = run(row, arguments.out, memory)
                failed |= result.startswith("FAILED")
                print(f"{row.name}: {result}", flush=True)
    print(table(arguments.out))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
