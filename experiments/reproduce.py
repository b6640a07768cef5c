"""What a GPU box can do of the experiments, in parts of a few minutes each: `scripts/reproduce.sh` starts it.

    python experiments/reproduce.py --part 2/8 --out DIR [--text FILE] [--minutes 6] [--only stage_times ablations]

One process a part. Each experiment's points lie in DIR/NAME, and those that are there are not measured again: a part
that was ended, by its minutes or by the box, goes on when it is started again with what DIR held.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import declared_in, parse_part
from common import main as run_experiment

MOST_PARTS = 8
MINUTES = 6.0  # no point begins later; one takes up to two and a half, building and measuring the machine one


@dataclass(frozen=True)
class Run:
    """An experiment and its flags; reads_text: it is about quality, on the real model, and needs `--text`."""

    name: str
    flags: tuple[str, ...] = ()
    reads_text: bool = False


RUNS = (
    Run("stage_times"),
    Run("overall_speedup", ("--measure-only",)),
    Run("length_scaling", ("--measure-only",)),
    Run("ablations"),
    Run("feedback_steps", ("--model", "opt-13b", "--weights", "random", "--seq", "32k", "--keep", "0.1")),
    Run("semantic_mapping"),
    Run("match_budgets", reads_text=True),
    Run("step_timeline"),
    Run("scan_beside_fetch"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a point failed or a flag was wrong, of whichever experiment; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=parse_part, default=(1, 1), metavar="n/N", help=f"N is at most {MOST_PARTS}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, metavar="FILE", help="of the experiments on quality; without: left out")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"no point begins later (default {MINUTES:g})")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(run.name for run in RUNS)}")
    arguments = parser.parse_args(argv)
    number, count = arguments.part
    if count > MOST_PARTS:
        parser.error(f"--part {number}/{count}: at most {MOST_PARTS} parts")
    unknown = set(arguments.only or ()) - {run.name for run in RUNS}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: allowed are {', '.join(run.name for run in RUNS)}")
    failed, start = [], time.monotonic()
    for index, run in enumerate(RUNS):
        if arguments.only is not None and run.name not in arguments.only:
            continue
        if run.reads_text and arguments.text is None:
            print(f"--- {run.name}: left out, it needs --text", flush=True)
            continue
        if not (Path(__file__).parent / f"{run.name}.py").exists():
            print(f"--- {run.name}: left out, experiments/{run.name}.py is not there", flush=True)
            continue
        # Experiments with few points do not all leave them to the first part.
        part = f"{(number - 1 + index) % count + 1}/{count}"
        left = arguments.minutes - (time.monotonic() - start) / 60
        print(f"--- {run.name}, part {part}", flush=True)
        flags = ["--out", str(arguments.out / run.name), "--part", part, "--minutes", f"{left:.2f}", *run.flags]
        if run.reads_text:
            flags += ["--text", str(arguments.text)]
        if run_experiment(declared_in(importlib.import_module(run.name)), ["run", *flags]) != 0:
            failed.append(run.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
