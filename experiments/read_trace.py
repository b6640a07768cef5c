"""What a trace of `hybridgen.run --trace` says about overlap, over its steady decode steps.

    python experiments/read_trace.py FILE [FILE ...]        # .json or .json.gz

The first two steps are left out. Of each file it prints ms/token; the share of the step in which a scan runs; the share
of fetch time, and of GPU kernel time (all of it, and by stage), during which the scan of a later layer of the same step
runs; and the spans and gaps of each row. Kernel time is that of the spans: launch gaps and waits inside them count.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 2
KERNELS = ("predict", "qkv", "choose", "attention", "mlp")
GPU_ROWS = ("compute", "choice", "beside")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """A complete event, times in microseconds."""

    stage: str
    row: str
    layer: int
    step: int
    start: float
    end: float

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class RowUse:
    """One row: spans and milliseconds a step, and the mean gap from a span to the next one of the step."""

    spans_per_step: float
    busy_ms_per_step: float
    mean_gap_ms: float | None


@dataclass(frozen=True)
class Summary:
    """Shares are None where there is nothing to take a share of."""

    about: dict[str, Any]
    steps: int
    ms_per_token: float
    scan_share: float
    fetch_share: float | None
    kernel_share: float | None
    stage_shares: dict[str, float | None]
    outside_gpu_spans: float
    earliest_scan_us: float | None
    rows: dict[str, RowUse]


def load(path: Path) -> dict[str, Any]:
    """The JSON of a trace, compressed or not."""
    content = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    return trace


def read_spans(trace: dict[str, Any]) -> list[Span]:
    """Complete events; their row is the name that the metadata gives to their thread."""
    events = trace["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X":
            layer, step = event["args"].get("layer", 0), event["args"]["step"]
            end = event["ts"] + event["dur"]
            spans.append(Span(event["name"], rows[event["tid"]], layer, step, event["ts"], end))
    return spans


def union(intervals: list[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def within(interval: Interval, intervals: list[Interval]) -> float:
    """How much of the interval disjoint intervals cover."""
    start, end = interval
    return sum(max(0.0, min(end, e) - max(start, s)) for s, e in intervals)


def summarize(trace: dict[str, Any]) -> Summary:
    """ValueError if there is no step beyond the first two."""
    spans = read_spans(trace)
    steady = sorted({span.step for span in spans if span.stage == "step"})[WARM_UP_STEPS:]
    if not steady:
        raise ValueError(f"the trace has no decode step beyond the first {WARM_UP_STEPS}")
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)

    step_us: list[float] = []
    scanning = on_gpu = 0.0
    total: dict[str, float] = defaultdict(float)  # time of a stage
    covered: dict[str, float] = defaultdict(float)  # that much of it beside the scan of a later layer
    busy: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    gaps: dict[str, list[float]] = defaultdict(list)
    leads: list[float] = []
    for step in steady:
        here = by_step[step]
        whole = next(span.interval for span in here if span.stage == "step")
        scans = [span for span in here if span.stage == "scan"]
        step_us.append(whole[1] - whole[0])
        scanning += within(whole, union([scan.interval for scan in scans]))
        on_gpu += within(whole, union([span.interval for span in here if span.row in GPU_ROWS]))
        later = {
            layer: union([scan.interval for scan in scans if scan.layer > layer]) for layer in {s.layer for s in here}
        }
        for span in here:
            total[span.stage] += span.end - span.start
            covered[span.stage] += within(span.interval, later[span.layer])
        for row in {span.row for span in here}:
            occupied = sorted(span.interval for span in here if span.row == row)
            busy[row] += length(union(occupied))
            count[row] += len(occupied)
            gaps[row] += [max(0.0, after[0] - before[1]) for before, after in pairwise(occupied)]
        leads += _leads(here, scans)

    def share(*stages: str) -> float | None:
        time = sum(total[stage] for stage in stages)
        return sum(covered[stage] for stage in stages) / time if time else None

    steps = len(steady)
    return Summary(
        about=trace.get("otherData", {}),
        steps=steps,
        ms_per_token=statistics.median(step_us) / 1e3,
        scan_share=scanning / sum(step_us),
        fetch_share=share("fetch"),
        kernel_share=share(*KERNELS),
        stage_shares={stage: share(stage) for stage in KERNELS},
        outside_gpu_spans=1 - on_gpu / sum(step_us),
        earliest_scan_us=min(leads, default=None),
        rows={
            row: RowUse(
                count[row] / steps, busy[row] / steps / 1e3, statistics.fmean(gaps[row]) / 1e3 if gaps[row] else None
            )
            for row in dict.fromkeys(span.row for span in spans)
            if row in busy
        },
    )


def _leads(spans: list[Span], scans: list[Span]) -> list[float]:
    """From the end of a layer's prediction to the start of its scan; below zero only if the clocks disagree."""
    ready: dict[int, float] = {}
    for span in spans:
        if span.stage == "predict":
            ready[span.layer] = min(span.end, ready.get(span.layer, span.end))
    return [scan.start - ready[scan.layer] for scan in scans if scan.layer in ready]


def describe(summary: Summary) -> str:
    """A line a figure, then a line a row."""
    known = [name for name in ("model", "dtype", "device", "strategy") if name in summary.about]
    named = ", ".join(str(summary.about[name]) for name in known)
    stages = ", ".join(f"{stage} {_share(value)}" for stage, value in summary.stage_shares.items())
    lines = [
        f"{named or 'trace'}: {summary.steps} decode steps after the first {WARM_UP_STEPS}",
        f"ms/token (median)                                   {summary.ms_per_token:.2f}",
        f"share of the step in which a scan runs              {_share(summary.scan_share)}",
        f"share of fetch time beside a later layer's scan     {_share(summary.fetch_share)}",
        f"share of kernel time beside a later layer's scan    {_share(summary.kernel_share)}  ({stages})",
        f"share of the step in no compute or beside span      {_share(summary.outside_gpu_spans)}",
    ]
    if summary.earliest_scan_us is not None:
        lines.append(f"scan after the end of its predict, least (us)       {summary.earliest_scan_us:.1f}")
    lines.append(f"{'row':<12} {'spans/step':>10} {'busy ms/step':>13} {'mean gap ms':>12}")
    for row, use in summary.rows.items():
        gap = "-" if use.mean_gap_ms is None else f"{use.mean_gap_ms:.4f}"
        lines.append(f"{row:<12} {use.spans_per_step:>10.1f} {use.busy_ms_per_step:>13.3f} {gap:>12}")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> int:
    """Print a summary of each file; 2 if one cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for path in parser.parse_args().files:
        try:
            print(describe(summarize(load(path))))
        except (OSError, ValueError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 2
        except (KeyError, TypeError):
            print(f"error: {path}: not a trace of hybridgen.run", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
