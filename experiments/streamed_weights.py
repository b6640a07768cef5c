"""What streamed weights cost: OPT-13B at 32k with half of the layers' weights in host memory, beside all on the GPU.

    python experiments/streamed_weights.py --out DIR [--model opt-13b] [--seq 32k] [--share 0.5] [--keeps 0.02 0.1]

Needs a GPU and the machine file of `hybridgen.bench link`. The bound of a step with streamed weights is the larger of
the step with all weights resident and the link's time: streamed bytes at the DMA ceiling and fetched rows at the
zero-copy ceiling. Random weights, --schedule fixed. Reports go to DIR.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hybridgen.machine import read_ceilings


def report_of(arguments: argparse.Namespace, keep: str, share: float) -> dict[str, Any]:
    """Run once and read the report."""
    path = arguments.out / f"{arguments.model}-weights-{share:g}-keep-{keep}.json"
    command = [
        sys.executable, "-m", "hybridgen.run", "--model", arguments.model, "--seq", arguments.seq, "--gen", "16",
        "--weights", "random", "--weights-on-gpu", str(share), "--keep", keep, "--schedule", "fixed",
        "--report", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[1:])}\n{done.stderr[-2000:]}")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    """Run all and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--seq", default="32k")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--keeps", nargs="+", default=["0.02", "0.1"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceilings = read_ceilings()
    if ceilings is None or ceilings.dma_h2d_bytes_per_s is None or ceilings.zero_copy_bytes_per_s is None:
        raise SystemExit("no machine file with a GPU: run `python -m hybridgen.bench link` first")
    print(f"{arguments.model}, {arguments.seq}, {arguments.share:g} of the layers' weights on the GPU (random weights)")
    print(f"{'--keep':>7} {'resident ms':>12} {'streamed ms':>12} {'link ms':>9} {'bound ms':>9} {'over bound':>11}")
    for keep in arguments.keeps:
        resident, streamed = (report_of(arguments, keep, share) for share in (1.0, arguments.share))
        resident_ms, streamed_ms = (r["decode_ms_per_token"]["median"] for r in (resident, streamed))
        weights_s = streamed["memory_plan"]["host"]["streamed weights"] / ceilings.dma_h2d_bytes_per_s
        rows_s = streamed["fetched_bytes_per_token"] / ceilings.zero_copy_bytes_per_s
        link_ms = 1e3 * (weights_s + rows_s)
        bound_ms = max(link_ms, resident_ms)
        print(
            f"{keep:>7} {resident_ms:>12.1f} {streamed_ms:>12.1f} {link_ms:>9.1f} {bound_ms:>9.1f} "
            f"{streamed_ms / bound_ms:>11.3f}"
        )


if __name__ == "__main__":
    main()
