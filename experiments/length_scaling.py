"""How the methods scale with the context, at equal quality (paper, Qwen2.5-7B and Llama-3.1-8B): measured and modelled.

    python experiments/length_scaling.py                     # a GPU: 8k to 128k, in parts of minutes with --minutes
    python experiments/length_scaling.py --predict-only --hardware rtx-4090

As overall_speedup.py: random weights, budgets matched on SmolLM2 at one length and used at all of them, caches that
evict in host memory. All rows of one model and length are of one process. Lines: measured, with the 10th to the 90th
percentile of a step; dashed: the machine model. The paper's averages over longer sequences are over methods that score
all tokens, then choose (Post-QKT: H2O, Keyformer) and that choose first (Pre-QKT: StreamingLLM, InfiniGen).
H2O and Keyformer are measured up to 64k.
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
    CONTESTANTS,
    GEN,
    LABEL,
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

MODELS = ("qwen2.5-7b", "llama-3.1-8b")
LENGTHS = (8192, 16384, 32768, 65536, 131_000)  # the last leaves room for what is generated
NAMES = (
    "aog", "moe-lightning", "h2o-host", "keyformer-host", "streaming-llm-host", "infinigen", "hybridgen",
    "hybridgen-int8", "hybridgen-int2", "hybridgen-int2-gpu",
)  # fmt: skip
PRE, POST = ("StreamingLLM", "InfiniGen"), ("H2O", "Keyformer")
CLAIMED = {"qwen2.5-7b": (1.82, 2.66), "llama-3.1-8b": (2.34, 3.18)}  # over Pre-QKT, over Post-QKT methods
ROUNDS = 1
SCORING_PROMPTS, MOST_SCORED = ("h2o-host", "keyformer-host"), 65536  # a prompt of 128k takes them a minute and more


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    add_contest_flags(parser)
    parser.add_argument("--model", action="append", help=f"repeatable (default {', '.join(MODELS)})")
    parser.add_argument("--seq", type=parse_tokens, action="append", help=f"repeatable (default {LENGTHS})")
    parser.add_argument("--hardware", default="h200-16-cores", help="of the machine model: as hybridgen.predict has it")


def points(arguments: argparse.Namespace) -> list[Point]:
    """For each model and length a measured and a predicted point."""
    models, lengths, names, gen = arguments.model or MODELS, arguments.seq or LENGTHS, NAMES, GEN
    flags: list[str] = []
    if arguments.smoke:
        models, lengths, gen = ("smollm2-135m",), (320,), 5
        names, flags = ("h2o-host", "hybridgen"), list(SMOKE_MODEL)
    budgets = SMOKE_BUDGETS if arguments.smoke else read_budgets(arguments.budgets, arguments.target)
    load_hardware(arguments.hardware)  # an error comes early
    found = []
    for model in models:
        for tokens in lengths:
            settings = {"model": model, "tokens": tokens, "target": arguments.target, "budgets": budgets, "gen": gen}
            if not arguments.predict_only:
                measured = [name for name in names if tokens <= MOST_SCORED or name not in SCORING_PROMPTS]
                own = {**settings, "contestants": measured, "kind": "measured"}
                own |= {"flags": [*flags, *SPEED_ONLY], "rounds": ROUNDS}
                found.append(comparison_point(f"measured {model} {tokens}", own, arguments.out))
            if not arguments.measure_only:
                own = {**settings, "contestants": list(names), "kind": "predicted", "flags": []}
                own["hardware"] = arguments.hardware
                found.append(Point(f"predicted {model} {tokens}, {arguments.hardware}", own))
    return found


def over_groups(points: Sequence[Mapping[str, Any]], ours: str) -> tuple[float | None, float | None]:
    """Geometric means, over lengths and methods, of how many times longer Pre-QKT and Post-QKT methods take."""
    found = [ratios(times_of(point), ours) for point in points]
    pre, post = ([some[name] for some in found for name in names if name in some] for names in (PRE, POST))
    return geometric_mean(pre) if pre else None, geometric_mean(post) if post else None


def _groups(points: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """By kind and model, in the order of lengths."""
    found: dict[tuple[str, str], list[Result]] = {}
    for point in sorted(points, key=lambda point: int(point["settings"]["tokens"])):
        found.setdefault((point["settings"]["kind"], point["settings"]["model"]), []).append(point)
    return found


def table(points: Sequence[Result]) -> str:
    """ms by contestant and length, and the two averages beside the paper's."""
    blocks = [f"{LABEL}; ms a token"]
    for (kind, model), some in sorted(_groups(points).items()):
        names = some[0]["settings"]["contestants"]
        where = some[0]["settings"].get("hardware") or some[0]["provenance"]["machine"]["gpu"] or "CPU"
        rows = [[f"{model}, {kind}, {where}", *(str(point["settings"]["tokens"]) for point in some)]]
        for name in names:
            cells = (times_of(point).get(name) for point in some)
            rows.append([name, *("-" if ms is None else f"{ms:.1f}" for ms in cells)])
        means = [["times as long as", "Pre-QKT methods", "Post-QKT methods"]]
        for name in names:
            if CONTESTANTS[name].of is None:
                means.append([name, *("-" if x is None else f"{x:.2f}" for x in over_groups(some, name))])
        if model in CLAIMED:
            means.append(["the paper's average", *(f"{value:.2f}" for value in CLAIMED[model])])
        blocks += [align(rows), align(means)]
    return "\n\n".join(blocks)


def draw(points: Sequence[Result]) -> Figure:
    """ms a token over the context, a panel a model."""
    groups = _groups(points)
    models = list(dict.fromkeys(model for _, model in groups))
    figure, panels = new_figure(1, len(models), width=6.5, height=5.0)
    for panel, model in zip(panels.flat, models, strict=True):
        names = next(iter(groups.values()))[0]["settings"]["contestants"]
        for index, name in enumerate(names):
            for kind, style in (("measured", "-"), ("predicted", "--")):
                some = [point for point in groups.get((kind, model), []) if name in times_of(point)]
                if not some:
                    continue
                lengths = [point["settings"]["tokens"] for point in some]
                label = name if kind == "measured" or ("measured", model) not in groups else None
                panel.plot(
                    lengths, [times_of(point)[name] for point in some], style, color=f"C{index}", label=label,
                    marker="o" if kind == "measured" else None, markersize=4, linewidth=1.0,
                )  # fmt: skip
                for point in some:
                    _bar(panel, point, name, f"C{index}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        lengths = sorted({point["settings"]["tokens"] for point in points})
        panel.set_xticks(lengths, [f"{round(n / 1024)}k" if n >= 1024 else str(n) for n in lengths])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("context, tokens")
        panel.set_title(model, fontsize=10)
        panel.legend(fontsize=7, frameon=False)
    panels[0, 0].set_ylabel("ms a token")
    target = points[0]["settings"]["target"]
    figure.suptitle(f"{LABEL} (quality of hybridgen with {target}); dashed: the machine model", fontsize=9)
    return figure


def _bar(panel: Any, point: Mapping[str, Any], name: str, colour: str) -> None:
    """10th to 90th percentile of a measured step."""
    if name in summaries(point):
        spent = summaries(point)[name]["decode_ms_per_token"]
        panel.vlines(point["settings"]["tokens"], spent["p10"], spent["p90"], color=colour, linewidth=0.8)


EXPERIMENT = Experiment("length_scaling", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
