"""Quality against latency: what each method at each budget costs in quality, over milliseconds a token.

    python experiments/quality_latency.py                                     # of the results that are committed
    python experiments/quality_latency.py --quality FILE --speed FILE [--speed FILE ...]

Speed is measured on a large model with random weights, quality on SmolLM2 (match_budgets.py), and both meet where a
layer that is not exact attends to the same share of the context: "random weights, budgets matched on SmolLM2". Between
the budgets whose quality was measured, log KL and the change of perplexity are interpolated; below the smallest of them
nothing is known, and such rows are listed, not drawn. Exact methods lose nothing. There are two Pareto fronts: of
methods whose K and V lie in host memory, and with caches that evict and have room for what is left on the GPU. Full
attention, all of it on the GPU, is drawn beside them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Experiment, Point, Result, align, fingerprint, load, main, new_figure
from match_budgets import LEAST_KL, curves_of, falling, shares_of
from speed_rows import EXACT, SpeedRow, read_rows

from hybridgen.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent / "results"
QUALITY = HERE / "match_budgets_smollm2_2k.json"
SPEED = tuple(HERE / name for name in ("compare_opt13b_32k_h200.json", "decode_rows_h200.txt", "overall_speedup.json"))
MODEL, TOKENS = "opt-13b", 32768
COLOURS = {
    EXACT: "black", "hybridgen": "#3182bd", "hybridgen-int2": "#08519c", "hybridgen-paper": "#9ecae1",
    "infinigen": "#e6550d", "quest": "#fdae6b", "h2o": "#31a354",
    "keyformer": "#74c476", "snapkv": "#756bb1", "streaming-llm": "#bcbddc",
}  # fmt: skip
FLOOR = 1e-5  # drawn for what is exact
ALIKE = 1e-3  # budgets that were matched to one KL differ in it by rounding


def interpolate(at: float, positions: Sequence[float], values: Sequence[float]) -> float | None:
    """Linear between rising positions; beyond the last one its value; None before the first."""
    if at < positions[0]:
        return None
    for index in range(1, len(positions)):
        if at <= positions[index]:
            share = (at - positions[index - 1]) / (positions[index] - positions[index - 1])
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Those that none other beats in one coordinate and equals or beats in the other, least first coordinate first.

    Second coordinates that differ by a thousandth are equal.
    """
    order = sorted(range(len(points)), key=lambda index: points[index])
    kept: list[int] = []
    for index in order:
        if not kept or points[index][1] < points[kept[-1]][1] * (1 - ALIKE):
            kept.append(index)
    return kept


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--quality", type=Path, metavar="FILE", help=f"match_budgets.json (default {QUALITY.name})")
    parser.add_argument("--speed", type=Path, action="append", metavar="FILE", help="measured speeds; repeatable")
    parser.add_argument("--model", default=MODEL, help=f"of the speed rows (default {MODEL})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"likewise, of the prompt (default {TOKENS})")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a speed row."""
    quality, found = arguments.quality or QUALITY, []
    for file in arguments.speed or SPEED:
        for row in read_rows(file):
            if arguments.speed is None and row.label.startswith(f"{arguments.model}: ") and row.method == EXACT:
                continue  # of overall_speedup.json: the comparison has them
            if (row.config.model.name, row.tokens, row.config.run.batch) == (arguments.model, arguments.tokens, 1):
                settings = {"row": row.label, "model": arguments.model, "tokens": row.tokens}
                settings |= {"speed": file.name, "speed_sha256": fingerprint(file)}
                settings |= {"quality": quality.name, "quality_sha256": fingerprint(quality)}
                found.append(Point(row.label, settings, {"row": row, "quality": quality}))
    if not found:
        raise ConfigError(f"no row of {arguments.model} with {arguments.tokens} tokens in a batch of 1")
    return found


def measure(point: Point) -> Result:
    """A row's speed beside the quality at its budget."""
    row: SpeedRow = point.local["row"]
    quality = load(point.local["quality"])
    curves = curves_of(quality)
    kl, percent = quality_at(row, curves)
    return {
        "method": row.method,
        "on_device": row.on_device,
        "all_resident": row.exact == row.layers,
        "ms": {"median": row.ms, "p10": row.p10, "p90": row.p90},
        "budget": row.budget,
        "each": row.each,
        "kl": kl,
        "percent": percent,
        "kl_limits": _limits_at(row, curves),
        "measured_on": {name: quality[0]["settings"][name] for name in ("model", "context", "window", "passages")},
    }


def quality_at(row: SpeedRow, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[float | None, float | None]:
    """KL and change of perplexity (percent); None: not known."""
    if row.method == EXACT:
        return 0.0, 0.0
    rows = curves.get(row.method, ())
    if not rows:
        return None, None
    at, shares = math.log(row.each), [math.log(share) for share in shares_of(rows)]
    log_kl = interpolate(at, shares, falling([math.log(max(LEAST_KL, some["kl"]["value"])) for some in rows]))
    percent = interpolate(at, shares, [some["percent"]["value"] for some in rows])
    return (None if log_kl is None else math.exp(log_kl)), percent


def _limits_at(row: SpeedRow, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[float] | None:
    """95 % of KL, likewise interpolated; what reaches below a tenth of the value is cut there."""
    rows = curves.get(row.method, ())
    if not rows or any(some["kl"]["low"] is None for some in rows):
        return None
    at, shares = math.log(row.each), [math.log(share) for share in shares_of(rows)]
    ends = (
        [math.log(max(LEAST_KL, some["kl"]["low"], some["kl"]["value"] / 10)) for some in rows],
        [math.log(max(LEAST_KL, some["kl"]["high"])) for some in rows],
    )
    found = [interpolate(at, shares, values) for values in ends]
    return [math.exp(value) for value in found if value is not None] or None


def table(points: Sequence[Result]) -> str:
    """A line a row, by KL; front: `*` of those in host memory, `+` with those on the GPU."""
    known, unknown = _known(points), [point for point in points if point["result"]["kl"] is None]
    in_host, of_all = _on_front(known, on_device=False), _on_front(known, on_device=True)
    rows = [["strategy", "ms/token", "budget", "each layer", "KL", "perplexity, %", "front"]]
    for point in sorted(known, key=lambda point: (point["result"]["kl"], point["result"]["ms"]["median"])):
        found = point["result"]
        cells = [f"{found['budget']:.3f}", f"{found['each']:.3f}", f"{found['kl']:.4f}", f"{found['percent']:+.2f}"]
        cells.append("*" * (point in in_host) + "+" * (point in of_all))
        rows.append([point["name"], f"{found['ms']['median']:.1f}", *cells])
    lines = [f"{_title(points)}\n", align(rows)]
    if unknown:
        names = ", ".join(f"{point['name']} ({point['result']['each']:.3f})" for point in unknown)
        lines.append(f"\nno quality was measured at the budget of: {names}")
    return "\n".join(lines)


def _known(points: Sequence[Result]) -> list[Result]:
    return [point for point in points if point["result"]["kl"] is not None]


def _on_front(points: Sequence[Result], on_device: bool) -> list[Result]:
    """Of those whose K and V lie in host memory, or of all but full attention."""
    some = [point for point in points if on_device or not point["result"]["on_device"]]
    some = [point for point in some if not point["result"]["all_resident"]]
    return [some[index] for index in front([(p["result"]["ms"]["median"], p["result"]["kl"]) for p in some])]


def _title(points: Sequence[Result]) -> str:
    settings, on = points[0]["settings"], points[0]["result"]["measured_on"]
    return (
        f"Speed: {settings['model']}, {settings['tokens']} tokens, random weights, budgets matched on SmolLM2. "
        f"Quality: {on['model']}, context {on['context']}, {on['passages']} passages"
    )


def draw(points: Sequence[Result]) -> Figure:
    """KL, and change of perplexity, over ms/token; the front as a line."""
    figure, panels = new_figure(1, 2, width=7.5, height=5.6)
    known = _known(points)
    in_host, of_all = _on_front(known, on_device=False), _on_front(known, on_device=True)
    for panel, name in zip(panels.flat, ("kl", "percent"), strict=True):
        placed: list[tuple[float, float, str]] = []
        for point in known:
            found = point["result"]
            x, y = found["ms"]["median"], max(FLOOR, found["kl"]) if name == "kl" else found["percent"]
            low, high = found["ms"]["p10"] or x, found["ms"]["p90"] or x
            marker = "s" if found["method"] == EXACT else "o" if found["on_device"] else "D"
            is_on_front = point in in_host or point in of_all
            bars = None
            if name == "kl" and found["kl_limits"] is not None:
                bars = [[max(0.0, y - max(FLOOR, found["kl_limits"][0]))], [max(0.0, found["kl_limits"][1] - y)]]
            panel.errorbar(
                x, y, yerr=bars, xerr=[[max(0.0, x - low)], [max(0.0, high - x)]], fmt=marker,
                color=COLOURS.get(found["method"]), markeredgecolor="black" if is_on_front else "none",
                elinewidth=0.5, markersize=7 if is_on_front else 5,
            )  # fmt: skip
            model = point["settings"]["model"]
            placed.append((x, y, point["name"].removeprefix(f"{model} 32k ").removeprefix(f"{model}: ")))
        panel.set_xscale("log")
        if name == "kl":
            panel.set_yscale("log")
            for some, style, label in (
                (in_host, "-", "Pareto front, KV in host memory"), (of_all, ":", "with what is left on the GPU"),
            ):  # fmt: skip
                line = [(point["result"]["ms"]["median"], max(FLOOR, point["result"]["kl"])) for point in some]
                if not line:
                    continue
                panel.step(*zip(*line, strict=True), style, where="post", color="grey", zorder=0, label=label)
            panel.axhline(FLOOR, color="grey", linewidth=0.5, linestyle=":")
            panel.legend(fontsize=8, frameon=False)
        else:
            panel.set_yscale("symlog", linthresh=1.0)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.margins(x=0.12, y=0.08)
        panel.set_xlabel("ms a token: median, 10th to 90th percentile")
        _label(panel, placed)
    panels[0, 0].set_ylabel("KL from full attention, nats a token (dotted line: exact)")
    panels[0, 1].set_ylabel("change of perplexity, %")
    figure.suptitle(
        f"{_title(points)}\nsquares: exact; circles: what is left lies on the GPU; diamonds: KV in host memory",
        fontsize=9,
    )
    return figure


def _label(panel: Any, placed: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, where no other one is yet; in points (1/72 inch) from the panel's corner."""
    figure = panel.figure
    figure.draw_without_rendering()
    to_points, size = 72 / figure.dpi, 6.5
    edge = panel.bbox.x0 * to_points
    taken: list[tuple[float, float, float]] = []  # left, right, height
    for x, y, name in sorted(placed, key=lambda place: (-place[1], -place[0])):
        at_x, at_y = (float(value) * to_points for value in panel.transData.transform((x, y)))
        width = 0.55 * size * len(name)
        places = [(side, up) for up in (3, -9, 12, -18, 21, -27, 30, -36) for side in (6, -6 - width)]
        for right, up in places:
            left, height = at_x + right, at_y + up
            if left > edge and all(
                left > other[1] or left + width < other[0] or abs(height - other[2]) > 7.5 for other in taken
            ):
                break
        taken.append((left, left + width, height))
        panel.annotate(name, (x, y), textcoords="offset points", xytext=(right, up), fontsize=size)


EXPERIMENT = Experiment("quality_latency", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
