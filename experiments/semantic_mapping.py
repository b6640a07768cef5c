"""Which memory K and V lie in: K near and V far (`semantic`) beside the other ways (paper, figure 18).

    python experiments/semantic_mapping.py                              # measured where there are two memory nodes
    python experiments/semantic_mapping.py --modelled --far-gb-per-s 26 --far-gb-per-s 52

On a machine with one memory node nothing can be measured, and the points are MODELLED, which table and picture say: the
machine model (hybridgen/evaluation/machine_model.py) on the paper's platform C, with the rates that follow from where
K and V lie. The bytes are those of byte_formulas.py: what the CPU scans of K, what the GPU fetches of K and V. A part
of either that is far comes at the far memory's rate (`--far-gb-per-s`, assumed), and no node gives more than it has to
CPU and link together; interleaved halves are read at the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from common import SMOKE_MODEL, Experiment, Point, Result, align, call, main, new_figure, shared_legend

from hybridgen.config import Config, Setting, build_config, load_strategy, merge_settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode, chooses
from hybridgen.engine.memory_budget import WITHOUT_AUTO, settle
from hybridgen.engine.scheduling import keep_rule
from hybridgen.evaluation.byte_formulas import StepBytes, chosen, layer_bytes, sizes_of
from hybridgen.evaluation.machine_model import predict
from hybridgen.offload.host_memory import MEMORY_POLICIES, memory_nodes
from hybridgen.placement.hardware import GB, Hardware, load_hardware
from hybridgen.predict import limits_there, planned_choice
from hybridgen.quantities import parse_tokens
from hybridgen.selection.budget import most_kept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLATFORM_C = load_hardware("platform-c")  # of the paper, which names its parts; the rates are assumed
FAR_GB_PER_S = 26.0  # a CXL expander on eight lanes of PCIe 5.0: 32 on paper
SWEEP = (13.0, 26.0, 52.0, 104.0)
FAR_SHARES = {"local": (0.0, 0.0), "semantic": (0.0, 1.0), "interleave": (0.5, 0.5), "inverse": (1.0, 0.0)}  # of K, V
WHERE = {
    "local": "local: all near", "semantic": "semantic: K near, V far", "interleave": "interleave: by halves",
    "inverse": "inverse: K far, V near",
}  # fmt: skip
STRATEGIES = ("hybridgen-paper", "hybridgen")
JOBS = (("llama-3.1-8b", "131000", 4), ("qwen2.5-7b", "131000", 4), ("opt-6.7b", "32k", 4))
KEEP = "0.1"
COLOURS = {"local": "#9e9e9e", "semantic": "#2c7fb8", "interleave": "#7fcdbb", "inverse": "#d95f0e"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--modelled", action="store_true", help="model platform C, whatever this machine has")
    parser.add_argument(
        "--far-gb-per-s", type=float, action="append", metavar="X", help=f"modelled (default {FAR_GB_PER_S:g}; sweep)"
    )


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a job, strategy, memory policy and, modelled, rate of the far memory."""
    measured = not arguments.modelled and sum(node.memory_bytes > 0 for node in memory_nodes()) > 1
    found = []
    for model, seq, batch in JOBS[:1] if arguments.smoke else JOBS:
        for strategy in STRATEGIES:
            job: dict[str, Any] = {"strategy": strategy, "keep": KEEP, "kind": "measured" if measured else "modelled"}
            if measured and arguments.smoke:
                job |= {"flags": [*SMOKE_MODEL, "--seq", "512", "--gpu-window", "64", "--gen", "4"]}
            elif measured:
                job |= {"flags": ["--model", model, "--seq", seq, "--batch", batch, "--weights", "random"]}
            else:
                hardware = asdict(replace(PLATFORM_C, source="platform-c"))  # not the path of this machine
                job |= {"model": model, "seq": seq, "batch": batch, "hardware": hardware}
            rates = [None] if measured else arguments.far_gb_per_s or (SWEEP if model == JOBS[0][0] else [FAR_GB_PER_S])
            for memory in MEMORY_POLICIES:
                for far in rates:
                    settings = job | {"memory": memory} | ({} if far is None else {"far_gb_per_s": far})
                    name = f"{model} {strategy} {memory}" + ("" if far is None else f" {far:g}")
                    found.append(Point(name, settings))
    return found


def measure(point: Point) -> Result:
    """Milliseconds a step, and where the time or the bytes go."""
    settings = point.settings
    if settings["kind"] == "modelled":
        return _model(settings)
    report = call(
        "run", *settings["flags"], "--strategy", settings["strategy"], "--keep", settings["keep"], "--schedule",
        "fixed", "--set", f"placement.memory={settings['memory']}",
    )  # fmt: skip
    return {
        "ms_per_token": report["decode_ms_per_token"]["median"],
        "p90_ms": report["decode_ms_per_token"]["p90"],
        "model": report["model"],
        "tokens": report["prompt_tokens"][0],
        "batch": report["batch"],
        "scanned_bytes": report["bytes_per_token"]["cpu_read"],
        "fetched_bytes": report["fetched_bytes_per_token"],
        "host_memory": report["host_memory"],
    }


@dataclass(frozen=True)
class Traffic:
    """Of a step, from host memory: bytes of K that the CPU scans, of K and of V that the link fetches, and others."""

    scanned: float
    keys: float
    values: float
    others: float  # logits, new rows: these lie near


def traffic(choice: ModelChoice, config: Config, modes: Sequence[LayerMode], tokens: int) -> Traffic:
    """By the engine's byte formulas."""
    sizes, rows = sizes_of(config, choice.dtype, on_cuda=True), build.window_layout(config).host_rows(tokens)
    moved, values = StepBytes(), 0.0
    for layer, mode in zip(choice.spec.layers, modes, strict=True):
        moved += layer_bytes(layer, config, mode, sizes, rows, tokens)
        if chooses(mode):
            values += chosen(layer, sizes, rows, most_kept(keep_rule(config), rows), values_only=True).link_read
    others = 2 * (moved.h2d - moved.link_read) + moved.d2h
    return Traffic(moved.cpu_read, moved.link_read - values, values, others)


def with_far_memory(hardware: Hardware, moved: Traffic, memory: str, far_gb_per_s: float) -> Hardware:
    """The machine with the rates at which K and V come from where they lie.

    hardware: of a machine whose memory is all near. Parts that lie near and far are read at the same time.
    """
    far, (of_keys, of_values) = GB * far_gb_per_s, FAR_SHARES[memory]
    fetched, fetched_far = moved.keys + moved.values, of_keys * moved.keys + of_values * moved.values
    from_far = of_keys * moved.scanned + fetched_far
    total = moved.scanned + fetched + moved.others
    near_scan = hardware.cpu_scan("")
    scan_s = max((1 - of_keys) * moved.scanned / near_scan, of_keys * moved.scanned / min(near_scan, far))
    fetch_s = max(fetched / hardware.zero_copy, fetched_far / far)
    memory_s = max((total - from_far) / hardware.host_dram, from_far / far)
    return replace(
        hardware,
        cpu_scan_gb_per_s=moved.scanned / scan_s / GB,
        zero_copy_gb_per_s=fetched / fetch_s / GB,
        host_dram_gb_per_s=total / memory_s / GB,
    )


def _model(settings: Mapping[str, Any]) -> Result:
    values = {
        "model.name": settings["model"], "run.seq": parse_tokens(settings["seq"]), "run.batch": settings["batch"],
        "selection.keep": float(settings["keep"]), "selection.keep_mass": None,
    }  # fmt: skip
    given = {path: Setting(value, "experiments/semantic_mapping.py") for path, value in values.items()}
    config = build_config(merge_settings(load_strategy(settings["strategy"]), given))
    hardware = Hardware(**settings["hardware"])
    choice, prompt, gen = planned_choice(config), config.run.seq, config.run.gen
    assert prompt is not None
    free = [path for path in WITHOUT_AUTO if path not in given]
    settled = settle(choice, config, config.run.batch, prompt + gen, limits_there(config, hardware), free)
    config, modes = settled.config, settled.modes
    moved = traffic(choice, config, modes, prompt + gen // 2)
    placed = with_far_memory(hardware, moved, settings["memory"], settings["far_gb_per_s"])
    found = predict(choice, config, modes, prompt, gen, placed)
    return {
        "ms_per_token": 1e3 * found.step_s,
        "p90_ms": None,
        "model": choice.spec.name,
        "tokens": prompt,
        "batch": config.run.batch,
        "bottleneck": found.bottleneck,
        "busy_ms": found.to_dict()["busy_ms_per_step"],
        "scanned_bytes": moved.scanned,
        "fetched_bytes": moved.keys + moved.values,
        "fetched_value_bytes": moved.values,
        "fits": settled.plan.fits(*limits_there(config, hardware)),
    }


def table(points: Sequence[Result]) -> str:
    """A line a point; gigabytes of a step."""
    rows = [
        [
            "model",
            "tokens",
            "strategy",
            "K and V lie",
            "kind",
            "far GB/s",
            "ms",
            "longest",
            "K scanned GB",
            "fetched GB",
        ]
    ]
    for point in points:
        settings, found = point["settings"], point["result"]
        far, longest = settings.get("far_gb_per_s"), found.get("bottleneck", "-")
        rows.append([
            found["model"], f"{found['batch']} x {found['tokens']}", settings["strategy"], settings["memory"],
            settings["kind"], "-" if far is None else f"{far:g}", f"{found['ms_per_token']:.1f}", longest,
            f"{found['scanned_bytes'] / GB:.2f}", f"{found['fetched_bytes'] / GB:.2f}",
        ])  # fmt: skip
    if any(point["settings"]["kind"] == "modelled" for point in points):
        return f"{align(rows)}\n\nMODELLED, not measured: {points[0]['settings']['hardware']['name']}, CXL as given"
    return align(rows)


def draw(points: Sequence[Result]) -> Figure:
    """A row a strategy: bars of the four ways for every job; modelled, the first job over the far memory's rate."""
    kind = points[0]["settings"]["kind"]
    strategies = list(dict.fromkeys(point["settings"]["strategy"] for point in points))
    rates = sorted({point["settings"].get("far_gb_per_s", 0.0) for point in points})
    usual = FAR_GB_PER_S if FAR_GB_PER_S in rates else rates[0]
    figure, panels = new_figure(len(strategies), 2 if len(rates) > 1 else 1, width=5.5, height=3.4)
    for row, strategy in zip(panels, strategies, strict=True):
        mine = [point for point in points if point["settings"]["strategy"] == strategy]
        jobs = list(dict.fromkeys(_job(point) for point in mine))
        for at, memory in enumerate(MEMORY_POLICIES):
            of_memory = [point for point in mine if point["settings"]["memory"] == memory]
            bars = [point for point in of_memory if point["settings"].get("far_gb_per_s", 0.0) == usual]
            spent = [point["result"]["ms_per_token"] for point in bars]
            places = [jobs.index(_job(point)) + 0.2 * (at - 1.5) for point in bars]
            ends = [max(0.0, (point["result"]["p90_ms"] or ms) - ms) for point, ms in zip(bars, spent, strict=True)]
            errors = [[0.0] * len(ends), ends] if any(ends) else None
            hatch = "//" if kind == "modelled" else None
            row[0].bar(
                places, spent, 0.18, yerr=errors, capsize=2, color=COLOURS[memory], hatch=hatch, edgecolor="white",
                label=WHERE[memory],
            )  # fmt: skip
            if len(row) > 1:
                swept = sorted(
                    (point["settings"]["far_gb_per_s"], point["result"]["ms_per_token"])
                    for point in of_memory
                    if _job(point) == jobs[0]
                )
                row[1].plot(*zip(*swept, strict=True), color=COLOURS[memory], marker="o", markersize=4, linestyle="--")
        far = f", far memory {usual:g} GB/s" if kind == "modelled" else ""
        row[0].set_title(f"{kind.upper()}: {strategy}, 10 % kept{far}", fontsize=9)
        row[0].set_xticks(range(len(jobs)), jobs, fontsize=8)
        row[0].set_ylabel("ms a step")
        if len(row) > 1:
            row[1].set_title(f"{kind.upper()}: {strategy}, {jobs[0].splitlines()[0]}", fontsize=9)
            row[1].set_xscale("log", base=2)
            row[1].set_xticks(rates, [f"{rate:g}" for rate in rates])
            row[1].set_xlabel("rate of the far memory, GB/s")
            row[1].set_ylim(bottom=0)
    shared_legend(figure, panels, columns=4)
    if kind == "modelled":
        name = points[0]["settings"]["hardware"]["name"]
        figure.suptitle(f"MODELLED, not measured: {name}", fontsize=11)
    return figure


def _job(point: Result) -> str:
    found = point["result"]
    return f"{found['model']}\n{found['batch']} x {found['tokens']:,} tokens"


EXPERIMENT = Experiment("semantic_mapping", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
