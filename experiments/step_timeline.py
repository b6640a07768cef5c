"""The timeline of one layer-ahead decode step: what GPU, link and CPU do at the same moment, over a few layers.

    python experiments/step_timeline.py [--model opt-13b] [--seq 32k] [--keep 0.1] [--out DIR]

Runs `hybridgen.run --trace` on random weights and keeps the spans of some layers of one step: the one whose length is
the median of those after the first two. The whole trace opens in Perfetto.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import SMOKE_MODEL, Experiment, Point, Result, call, fingerprint, main, new_figure
from read_trace import WARM_UP_STEPS, Span, load, read_spans

LAYERS = 4  # that the picture shows, from the middle of the model
GEN = 12
ROWS = {  # of a trace, top to bottom: what to call them
    "compute": "GPU: layers",
    "choice": "GPU: choice",
    "beside": "GPU: choice, fetch",
    "weights": "link: weights",
    "scan worker": "CPU: scan",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `run` takes beside the common flags."""
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--seq", default="32k")
    parser.add_argument("--keep", default="0.1")
    parser.add_argument("--strategy", default="hybridgen")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of an earlier run; nothing is run then")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One run, or one trace."""
    if arguments.trace is not None:
        return [
            Point("one step", {"trace": fingerprint(arguments.trace), "layers": LAYERS}, {"trace": arguments.trace})
        ]
    flags = {"--model": arguments.model, "--seq": arguments.seq, "--keep": arguments.keep}
    flags |= {"--strategy": arguments.strategy, "--weights": "random", "--schedule": "fixed", "--gen": str(GEN)}
    words = [word for pair in flags.items() for word in pair]
    if arguments.smoke:
        words = [
            *SMOKE_MODEL,
            "--seq",
            "400",
            "--gpu-window",
            "64",
            "--keep",
            "0.1",
            "--schedule",
            "fixed",
            "--gen",
            "6",
        ]
    return [Point("one step", {"flags": words, "layers": LAYERS})]


def measure(point: Point) -> Result:
    """What the trace says of itself, and the spans of the shown layers."""
    if "trace" in point.local:
        trace = load(point.local["trace"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            call("run", *point.settings["flags"], "--trace", file)
            trace = load(file)
    of = trace["otherData"]
    about = {name: of[name] for name in ("model", "weights", "device", "dtype", "strategy", "batch", "commit")}
    return {"about": about, **cut(read_spans(trace), point.settings["layers"])}


def cut(spans: Sequence[Span], layers: int) -> Result:
    """Some layers of the step of median length, in ms from the begin of the first one's first kernel."""
    steps = [span for span in spans if span.row == "step" and span.step >= WARM_UP_STEPS]
    middle = statistics.median_low(span.end - span.start for span in steps)
    chosen = next(span.step for span in steps if span.end - span.start == middle)
    of_step = [span for span in spans if span.step == chosen and span.row in ROWS]
    first = max(span.layer for span in of_step) // 2
    shown = [span for span in of_step if span.row == "compute" and first <= span.layer < first + layers]
    begin, end = min(span.start for span in shown), max(span.end for span in shown)
    return {
        "step_ms": middle / 1e3,
        "shown_ms": (end - begin) / 1e3,
        "spans": [
            {
                "row": span.row,
                "stage": span.stage,
                "layer": span.layer,
                "start_ms": (max(span.start, begin) - begin) / 1e3,
                "end_ms": (min(span.end, end) - begin) / 1e3,
            }
            for span in of_step
            if span.end > begin and span.start < end
        ],
    }


def table(results: Sequence[Result]) -> str:
    """How long each row is at work within what is shown."""
    lines = []
    for one in results:
        result = one["result"]
        lines.append(f"{_title(result)}; shown: {result['shown_ms']:.2f} ms, in which there is at work:")
        for row, name in ROWS.items():
            of_row = [span for span in result["spans"] if span["row"] == row and not _waits(span)]
            busy = sum(span["end_ms"] - span["start_ms"] for span in of_row)
            if busy:
                lines.append(f"  {name:<14} {busy:7.2f} ms  {busy / result['shown_ms']:.0%}")
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Any:
    """A row a resource, a bar a span, a colour a layer; waits are pale."""
    result = results[0]["result"]
    rows = [row for row in ROWS if any(span["row"] == row for span in result["spans"])]
    figure, panels = new_figure(1, 1, width=11.0, height=0.8 + 0.6 * len(rows))
    panel = panels[0, 0]
    layers = sorted({span["layer"] for span in result["spans"]})
    for span in result["spans"]:
        start, end = span["start_ms"], span["end_ms"]
        height = rows.index(span["row"])
        look = {"alpha": 0.18, "hatch": "///"} if _waits(span) else {}
        panel.barh(
            height, end - start, left=start, height=0.8, color=f"C{span['layer'] % 10}", edgecolor="white", **look
        )
        if end - start > 0.05 * result["shown_ms"]:
            panel.text(
                (start + end) / 2,
                height,
                f"{span['stage'].replace('_', ' ')} {span['layer']}",
                ha="center",
                va="center",
                fontsize=7,
            )
    for layer in layers:
        panel.barh(0, 0, color=f"C{layer % 10}", label=f"layer {layer}")
    panel.set_yticks(range(len(rows)), [ROWS[row] for row in rows])
    panel.invert_yaxis()
    panel.set_xlim(0, result["shown_ms"])
    panel.set_xlabel("ms")
    panel.set_title(_title(result), fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(layers), frameon=False, fontsize=8)
    return figure


def _waits(span: Result) -> bool:
    """A stage in which its row has nothing to do."""
    return str(span["stage"]).endswith("_wait")


def _title(result: Result) -> str:
    about = result["about"]
    return (
        f"{about['strategy']}: {about['model']} ({about['weights']} weights), {about['dtype']} on {about['device']}; "
        f"a step takes {result['step_ms']:.1f} ms"
    )


EXPERIMENT = Experiment("step_timeline", __doc__ or "", points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
