"""Where a decode step's time goes in AoG, AoC and hybridgen, against context length (paper, figures 4-6).

    python experiments/stage_times.py                       # a GPU: OPT-13B, random weights, KV in host memory
    python experiments/stage_times.py --model llama-3.1-8b --seq 16k --seq 64k

Three bars a length: the device's timeline, whose parts are the step (stages, what it waited for, and the rest: choice
of tokens, launches); beside it, how long the CPU and the link were busy. A mark across them: `limit_ms`, the least that
the step could take on this machine (it needs the file of `hybridgen.bench link`). The step is the median of those that
are timed, with a whisker up to the 90th percentile; stages are means over every fourth step on a GPU, over all of them
elsewhere. A length is one process of `hybridgen.compare`, where all have the same share of the weights on the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import SMOKE_MODEL, Experiment, Point, Result, align, main, new_figure, shared_legend
from comparisons import SPEED_ONLY, compare, comparison_point

from hybridgen.config import Setting, build_config
from hybridgen.engine.build import choose_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRATEGIES = ("aog", "aoc", "hybridgen")
KEEP = "0.1"  # of the host tier, by the one of them that chooses
# Tokens. A multiple of engine.generation.SAMPLE_EVERY: the steps timed by stage are then the 4th, 8th, ... of each
# strategy, and never a first one, in which kernels and graphs are made.
GEN = 16
LENGTHS = ("4k", "8k", "16k", "32k")
DEVICE = {
    "QKV and predicted query": ("qkv", "predict"),
    "attention": ("attention", "merge"),
    "MLP and LM head": ("mlp", "lm_head"),
}
BESIDE = {"CPU": ("scan", "cpu_attention"), "link": ("stream", "fetch")}
COLOURS = {
    "QKV and predicted query": "#9ecae1", "attention": "#3182bd", "MLP and LM head": "#08519c",
    "waits for the CPU": "#e6550d", "waits for the link": "#fdae6b", "the rest": "#d9d9d9",
    "CPU busy": "#31a354", "link busy": "#756bb1",
}  # fmt: skip
KEPT = (
    "model", "weights", "device", "dtype", "weights_on_gpu", "decode_ms_per_token", "stage_ms_per_layer",
    "waited_ms_per_token", "bytes_per_token", "limit_ms", "gpu_kernels_ms", "gpu_idle_fraction", "budget",
    "kept_fraction", "prefill_s", "peak_gpu_bytes",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--seq", action="append", metavar="N", help=f"repeatable (default {', '.join(LENGTHS)})")
    parser.add_argument("--gpu-memory", default="32GiB", help="so much of the GPU is used (default 32GiB)")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a length."""
    lengths = arguments.seq or (["192", "384"] if arguments.smoke else LENGTHS)
    flags = ["--model", arguments.model, "--gpu-memory", arguments.gpu_memory, "--gpu-window", "512"]
    flags += ["--gen", str(GEN)]
    if arguments.smoke:
        flags = [*SMOKE_MODEL, "--gpu-window", "64", "--gen", "5"]
    flags += [*SPEED_ONLY, "--keep", KEEP, "--rounds", "1"]
    common = {"strategies": list(STRATEGIES), "flags": flags}
    return [comparison_point(seq, {"seq": seq, **common}, arguments.out) for seq in lengths]


def measure(point: Point) -> Result:
    """By strategy: what its report says of time and bytes, and stages of all layers together; skipped: why, if not."""
    settings, folder = point.settings, point.local["folder"]
    comparison = compare(folder, settings["strategies"], "--seq", settings["seq"], *settings["flags"])
    model = {"model.name": Setting(comparison["model"], "report"), "runtime.device": Setting("cpu", "report")}
    layers = choose_model(build_config(model)).spec.num_layers
    skipped = {some["name"]: some["skipped"] for some in comparison["strategies"] if some["summary"] is None}
    found = {}
    for strategy in settings["strategies"]:
        if strategy not in skipped:
            report = _report(folder, strategy, comparison)
            found[strategy] = {name: report[name] for name in KEPT}
            found[strategy]["prompt_tokens"] = comparison["prompt_tokens"]
            found[strategy]["stage_ms_per_token"] = _of_all_layers(report, layers)
    return {"reports": found, "skipped": skipped}


def _report(folder: Path, strategy: str, comparison: Mapping[str, Any]) -> Result:
    """That of the comparison's round, among those of other settings and machines that the folder may have."""

    def of_machine(content: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in content["machine"].items() if name != "scans_by_isa"}  # a count

    config = next(some["config"] for some in comparison["strategies"] if some["name"] == strategy)
    for file in folder.glob(f"{strategy}-r0-*.json"):
        report: Result = json.loads(file.read_text(encoding="utf-8"))
        if report["config"] == config and of_machine(report) == of_machine(comparison):
            return report
    raise ValueError(f"{folder}: no report of {strategy} that belongs to its compare.json")


def _rows(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Strategy and what was found of it, length by length."""
    for point in points:
        yield from point["result"]["reports"].items()


def _of_all_layers(report: Mapping[str, Any], layers: int) -> dict[str, float]:
    """Milliseconds of each stage in a step: not every layer has each of them."""
    modes = list(report["exact_layers"].values())
    modes += ["lookahead"] * (layers - len(modes))
    having = {
        "predict": modes.count("lookahead"),
        "lm_head": 1,
        **dict.fromkeys(("scan", "choose", "fetch"), modes.count("lookahead") + modes.count("select")),
    }
    return {stage: spent * having.get(stage, layers) for stage, spent in report["stage_ms_per_layer"].items()}


def parts_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The device's timeline in milliseconds of a step, by names of COLOURS; what the others do beside it."""
    stages, waited = found["stage_ms_per_token"], found["waited_ms_per_token"]
    parts = {name: sum(stages.get(stage, 0.0) for stage in of_part) for name, of_part in DEVICE.items()}
    # What the device waits for a scan is part of what it waits for rows; where the CPU plays its part, it is not.
    scan = waited["scan_wait"] if found["device"] == "cpu" else min(waited["scan_wait"], waited["link_wait"])
    parts["waits for the CPU"], parts["waits for the link"] = scan, max(0.0, waited["link_wait"] - scan)
    parts["the rest"] = max(0.0, found["decode_ms_per_token"]["median"] - sum(parts.values()))
    beside = {f"{name} busy": sum(stages.get(stage, 0.0) for stage in of) for name, of in BESIDE.items()}
    return parts | beside


def table(points: Sequence[Result]) -> str:
    """A line a strategy and length; milliseconds and megabytes of a step."""
    rows = [["strategy", "tokens", "ms", "limit", *COLOURS, "MB to device", "MB read by CPU"]]
    for strategy, found in _rows(points):
        limit = "-" if found["limit_ms"] is None else f"{found['limit_ms']['limit']:.1f}"
        moved = (f"{found['bytes_per_token'][name] / 1e6:.1f}" for name in ("h2d", "cpu_read"))
        spent = (f"{value:.1f}" for value in parts_of(found).values())
        total = f"{found['decode_ms_per_token']['median']:.1f}"
        rows.append([strategy, str(found["prompt_tokens"]), total, limit, *spent, *moved])
    skipped = [
        f"{strategy}, {point['settings']['seq']}: {why}"
        for point in points
        for strategy, why in point["result"]["skipped"].items()
    ]
    return "\n".join([align(rows), *skipped])


def draw(points: Sequence[Result]) -> Figure:
    """A panel a strategy, a group of three bars a length."""
    strategies = list(dict.fromkeys(strategy for strategy, _ in _rows(points)))
    figure, panels = new_figure(1, len(strategies), width=4.4, height=4.0)
    for panel, strategy in zip(panels.flat, strategies, strict=True):
        of_strategy = sorted(
            (found for name, found in _rows(points) if name == strategy),
            key=lambda found: int(found["prompt_tokens"]),
        )
        for at, found in enumerate(of_strategy):
            bottom = 0.0
            for name, spent in parts_of(found).items():
                if name.endswith("busy"):
                    place = at + (0.12 if name.startswith("CPU") else 0.32)
                    panel.bar(place, spent, 0.18, color=COLOURS[name], label=name)
                else:
                    panel.bar(at - 0.15, spent, 0.32, bottom=bottom, color=COLOURS[name], label=name)
                    bottom += spent
            step, limit = found["decode_ms_per_token"], found["limit_ms"]
            upwards = [[0.0], [max(0.0, step["p90"] - step["median"])]]
            panel.errorbar(at - 0.15, step["median"], yerr=upwards, color="black", capsize=2, linewidth=0.8)
            if limit is not None:
                panel.hlines(limit["limit"], at - 0.33, at + 0.43, color="black", linewidth=1.2, label="limit_ms")
        panel.set_xticks(range(len(of_strategy)), [_tokens(found["prompt_tokens"]) for found in of_strategy])
        panel.set_xlabel("context, tokens")
        panel.set_title(strategy, fontsize=10)
    for panel in panels.flat[1:]:
        panel.sharey(panels[0, 0])
    panels[0, 0].set_ylabel("ms a token")
    shared_legend(figure, panels, columns=5)
    machine, (_, first) = points[0]["provenance"]["machine"], next(_rows(points))
    where = machine["gpu"] or f"{machine['cores']} CPU cores"
    figure.suptitle(f"{first['model']}, random weights, {where}", fontsize=10)
    return figure


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


EXPERIMENT = Experiment("stage_times", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
