"""HybridGen against the paper's six methods at equal quality: measured, and for eleven models by the machine model.

    python experiments/overall_speedup.py                                  # a GPU; --predict-only: none
    python experiments/overall_speedup.py --predict-only --hardware platform-a --hardware platform-b

Random weights, budgets matched on SmolLM2 (match_budgets.py): a layer that is not exact attends to the share of the
context that gives each method the quality of hybridgen at --target. A method that never gets there (`+` in the table)
has the largest budget of its grid, and is worse and faster than it ought to be. Caches that evict keep K and V in host
memory, from where they come at every step, as in the paper, and, as further ones, on the GPU. FlexGen is `aog`, KV all
over the link; MoE-Lightning is `moe-lightning`, attention on the CPU. All four of ours choose by `select`; they differ
in what is scored: whole keys or int8 ones by the CPU, 2 bits by the CPU, 2 bits by the GPU. All rows of one model are
of one process; error bars of measured ones are the 10th to the 90th percentile of a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from common import SMOKE_MODEL, Experiment, Point, Result, align, main, new_figure
from comparisons import SPEED_ONLY, comparison_point
from contestants import (
    CLAIMED,
    CONTESTANTS,
    GEN,
    LABEL,
    OURS,
    ROUNDS,
    SMOKE_BUDGETS,
    add_contest_flags,
    measure,
    ratios,
    read_budgets,
    summaries,
    times_of,
)

from hybridgen.placement.hardware import load_hardware
from hybridgen.quantities import parse_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = (
    "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-1.5b",
    "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b",
)  # fmt: skip
MEASURED = ("opt-13b", "llama-3.1-8b", "qwen2.5-7b", "opt-6.7b")
HARDWARE = "h200-16-cores"
TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20)
SMOKE = ("aog", "infinigen", "hybridgen")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    add_contest_flags(parser)
    parser.add_argument("--seq", type=parse_tokens, default=32768, help="prompt tokens (default 32k)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--hardware", action="append", help=f"of the machine model; repeatable (default {HARDWARE})")
    parser.add_argument("--measure", action="append", metavar="MODEL", help=f"repeatable (default {MEASURED})")


def points(arguments: argparse.Namespace) -> list[Point]:
    """A measured point a model, then a predicted one for each of the eleven."""
    models, to_measure, names = MODELS, tuple(arguments.measure or MEASURED), list(CONTESTANTS)
    tokens, gen, flags = arguments.seq, GEN, ["--batch", str(arguments.batch)]
    on_cpu: list[str] = []
    rounds = 1 if arguments.smoke else ROUNDS
    if arguments.smoke:
        models, to_measure, names, tokens, gen = ("opt-1.3b",), ("smollm2-135m",), list(SMOKE), 384, 5
        on_cpu = list(SMOKE_MODEL)
    common = {"contestants": names, "tokens": tokens, "gen": gen, "batch": arguments.batch}
    budgets = SMOKE_BUDGETS if arguments.smoke else read_budgets(arguments.budgets, arguments.target)
    common |= {"target": arguments.target, "budgets": budgets}
    found = []
    for model in () if arguments.predict_only else to_measure:
        settings = {"kind": "measured", "model": model, **common, "rounds": rounds}
        settings["flags"] = [*flags, *on_cpu, *SPEED_ONLY]
        found.append(comparison_point(f"measured {model}", settings, arguments.out))
    for hardware in () if arguments.measure_only else arguments.hardware or [HARDWARE]:
        load_hardware(hardware)  # an error comes early
        for model in models:
            settings = {"kind": "predicted", "model": model, **common, "flags": flags, "hardware": hardware}
            found.append(Point(f"predicted {model}, {hardware}", settings))
    return found


def table(points: Sequence[Result]) -> str:
    """ms by contestant and model; then how much longer others take than each of ours, beside the paper."""
    blocks = [_title(points)]
    for some in _groups(points):
        blocks += [_times(some), _ratios(some)]
    return "\n\n".join(blocks)


def _groups(points: Sequence[Result]) -> list[list[Result]]:
    """What was measured, then what is modelled, machine by machine."""
    found: dict[str, list[Result]] = {}
    for point in sorted(points, key=lambda point: point["settings"]["kind"] != "measured"):
        found.setdefault(point["settings"].get("hardware", "measured"), []).append(point)
    return list(found.values())


def _title(points: Sequence[Result]) -> str:
    about = points[0]["settings"]
    shares = ", ".join(
        f"{method} {some['each']:.3f}{'' if some['reached'] else '+'}" for method, some in about["budgets"].items()
    )
    return (
        f"{about['batch']} x {about['tokens']} tokens, {LABEL}: quality of hybridgen with {about['target']}\n"
        f"share of the context in each layer that is not exact (+: does not reach that quality): {shares}"
    )


def _times(points: Sequence[Result]) -> str:
    about = points[0]["settings"]
    where = points[0]["provenance"]["machine"]["gpu"] or "CPU"
    head = f"measured on {where}" if about["kind"] == "measured" else f"modelled, {about['hardware']}"
    rows = [[f"ms a token, {head}", *(point["settings"]["model"] for point in points)]]
    for name in about["contestants"]:
        cells = (times_of(point).get(name) for point in points)
        rows.append([_marked(name, about["budgets"]), *("-" if ms is None else f"{ms:.1f}" for ms in cells)])
    if about["kind"] == "measured":
        rows.append(["kept of the host tier:", *("" for _ in points)])
        for name in about["contestants"]:
            kept = [summaries(point).get(name, {}).get("kept_fraction") for point in points]
            if any(some is not None for some in kept):
                rows.append([f"  {name}", *("-" if some is None else f"{some:.3f}" for some in kept)])
    return align(rows)


def _marked(name: str, budgets: Mapping[str, Any]) -> str:
    method = CONTESTANTS[name].method
    return name if method is None or budgets[method]["reached"] else f"{name}+"


def mean_ratios(points: Sequence[Mapping[str, Any]], ours: str) -> dict[str, float]:
    """Geometric means over models, by the paper's names."""
    of_models = [ratios(times_of(point), ours) for point in points]
    names = dict.fromkeys(name for some in of_models for name in some)
    return {name: geometric_mean([some[name] for some in of_models if name in some]) for name in names}


def _ratios(points: Sequence[Result]) -> str:
    ours = [name for name in OURS if name in points[0]["settings"]["contestants"]]
    by_ours = {name: mean_ratios(points, name) for name in ours}
    rows = [["times as long as", *ours, "paper"]]
    for of in dict.fromkeys(name for some in by_ours.values() for name in some):
        cells = (by_ours[name].get(of) for name in ours)
        paper = f"{CLAIMED[of]:.2f}" if of in CLAIMED else ""
        rows.append([of, *("-" if value is None else f"{value:.2f}" for value in cells), paper])
    return align(rows)


def draw(points: Sequence[Result]) -> Figure:
    """How many times longer each takes than ours with 2 bits on the GPU: a panel measured, a panel modelled."""
    from matplotlib import colormaps

    colours, groups = colormaps["tab20"], _groups(points)
    columns = min(2, len(groups))
    figure, panels = new_figure(-(-len(groups) // columns), columns, width=7.0, height=5.2)
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, some in zip(panels.flat, groups, strict=False):
        kind = some[0]["settings"]["kind"]
        ours = [name for name in OURS if name in some[0]["settings"]["contestants"]][-1]
        others = list(mean_ratios(some, ours))
        for index, point in enumerate(some):
            found = ratios(times_of(point), ours)
            at = [others.index(name) + 0.8 * ((index + 0.5) / len(some) - 0.5) for name in found]
            beyond = [ratio - 1.0 for ratio in found.values()]
            colour, model = colours(index), point["settings"]["model"]
            panel.barh(at, beyond, 0.8 / len(some), left=1.0, color=colour, label=model)
            if kind == "measured":
                _bars(panel, point, ours, dict(zip(found, at, strict=True)))
        label: str | None = "the paper's average"
        for at, name in enumerate(others):
            if name in CLAIMED:
                panel.vlines(CLAIMED[name], at - 0.4, at + 0.4, color="black", linewidth=1.5, label=label)
                label = None
        panel.axvline(1.0, color="grey", linewidth=0.8)
        panel.set_xscale("log")
        ends = panel.get_xlim()
        panel.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        panel.minorticks_off()
        panel.set_xlim(ends)
        panel.set_yticks(range(len(others)), others, fontsize=8)
        panel.invert_yaxis()
        panel.set_xlabel(f"times as long as {ours}")
        where = some[0]["provenance"]["machine"]["gpu"] or "CPU"
        panel.set_title(f"measured, {where}" if kind == "measured" else f"modelled, {some[0]['settings']['hardware']}",
                        fontsize=9)  # fmt: skip
        panel.legend(fontsize=6.5, frameon=False)
    about = points[0]["settings"]
    figure.suptitle(
        f"{about['batch']} x {about['tokens']} tokens, {LABEL} (quality of hybridgen with {about['target']})",
        fontsize=9,
    )
    return figure


def _bars(panel: Any, point: Mapping[str, Any], ours: str, places: Mapping[str, float]) -> None:
    """10th to 90th percentile of the others' steps."""
    median = times_of(point)[ours]
    for name, found in summaries(point).items():
        of, spent = CONTESTANTS[name].of, found["decode_ms_per_token"]
        if of in places:
            panel.hlines(places[of], spent["p10"] / median, spent["p90"] / median, color="black", linewidth=0.6)


EXPERIMENT = Experiment("overall_speedup", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
