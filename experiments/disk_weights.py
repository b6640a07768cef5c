"""What weights on disk cost: a step that reads a share of them from a file, beside reading the same file and no more.

    python experiments/disk_weights.py --out DIR --folder DISK [--model opt-13b] [--on-disk 0.5] [--on-gpu 0.5]

Random weights; the decoder layers are written once to a file in DISK (26 GB for OPT-13B in float16), which stays there.
The bound is the larger of what the file's bytes take at the rate at which this script reads them afterwards, with as
many threads and as large pieces, and what the streamed bytes take on the link (the machine file of `hybridgen.bench
link`, where there is a GPU).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from hybridgen.machine import read_ceilings
from hybridgen.offload.disk import DiskReader, FileRange, room_for
from hybridgen.offload.host_memory import HostSlab
from hybridgen.telemetry import Telemetry

THREADS = 4  # placement.disk_threads
PART_BYTES = 256 << 20  # about a layer's share
READ_BYTES = 8 << 30


def read_rate(file: Path) -> tuple[float, list[str]]:
    """Bytes a second of the file's first 8 GiB, two parts under way at a time; and what there is to say of them."""
    reader = DiskReader(THREADS, Telemetry())
    slab = HostSlab(2 * room_for(PART_BYTES), torch.device("cpu"))
    places = [slab.take((room_for(PART_BYTES),), torch.uint8).tensor.zero_() for _ in range(2)]  # pages are there
    parts = min(READ_BYTES, file.stat().st_size) // PART_BYTES
    start, under_way = time.perf_counter(), []
    for part in range(parts):
        if len(under_way) == 2:
            under_way.pop(0).wait_host()
        under_way.append(reader.read(FileRange(file, part * PART_BYTES, PART_BYTES), places[part % 2]))
    for ticket in under_way:
        ticket.wait_host()
    rate, notes = parts * PART_BYTES / (time.perf_counter() - start), reader.notes
    reader.close()
    return rate, notes


def main() -> None:
    """Run, read the file, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--on-disk", type=float, default=0.5)
    parser.add_argument("--on-gpu", type=float, default=0.5)
    parser.add_argument("--seq", default="512")
    parser.add_argument("--gen", default="6")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "report.json"
    command = [
        sys.executable, "-m", "hybridgen.run", "--model", arguments.model, "--weights", "random", "--strategy", "full",
        "--seq", arguments.seq, "--gen", arguments.gen, "--batch", arguments.batch,
        "--weights-on-gpu", str(arguments.on_gpu), "--set", f"placement.weights_on_disk={arguments.on_disk}",
        "--set", f"placement.disk_dir={arguments.folder}", "--set", f"placement.disk_threads={THREADS}",
        "--report", str(path),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[1:])}\n{done.stderr[-2000:]}")
    took_s, report = time.perf_counter() - start, json.loads(path.read_text(encoding="utf-8"))
    file = max(arguments.folder.glob("*.safetensors"), key=lambda some: some.stat().st_mtime)
    rate, notes = read_rate(file)

    moved, ceilings = report["bytes_per_token"], read_ceilings()
    disk_ms, link_ms = 1e3 * moved["disk"] / rate, 0.0
    if ceilings is not None and ceilings.dma_h2d_bytes_per_s is not None:
        link_ms = 1e3 * moved["h2d"] / ceilings.dma_h2d_bytes_per_s
    step_ms = report["decode_ms_per_token"]["median"]
    shares = {tier: round(share, 4) for tier, share in report["placement"]["weights"].items()}
    print(f"{arguments.model}, random weights: {shares}; {took_s:.0f} s with writing and loading")
    print(f"read from disk a step: {moved['disk'] / 1e9:.2f} GB; the file by itself: {rate / 1e9:.2f} GB/s")
    print(f"step {step_ms:.0f} ms; disk {disk_ms:.0f} ms, link {link_ms:.0f} ms: {step_ms / max(disk_ms, link_ms):.3f}")
    device, host = (report["peak_gpu_bytes"] or 0) / 2**30, report["peak_host_bytes"] / 2**30
    print(f"peaks: device {device:.1f} GiB, host {host:.1f} GiB")
    for note in notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
