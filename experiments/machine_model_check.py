"""The machine model beside what was measured: decode times of result files, predicted, and by how much it misses them.

    python experiments/machine_model_check.py                             # of the results that are committed
    python experiments/machine_model_check.py --speed FILE [--speed FILE ...] [--hardware NAME|FILE]

Read are compare.json, the JSON of overall_speedup.py, length_scaling.py and ablations.py, and decode rows as text. The
constants of hybridgen/evaluation/machine_model.py were fitted to the rows of FITTED; a row of the settings of one of
them says how much boxes differ, and the rest is for judging the model (its form was chosen with all rows in view).
Rates: a decode row that has how fast keys were read before and after it is predicted by that, overall_speedup.json by
those of its own box, which `hybridgen.bench link` measured in the same call, other rows, of several boxes, by one file:
boxes of this kind differ by a tenth and more in what their memory gives (aoc of the same code took 206 and 223 ms).
Left out are rows by a schedule that changes plans, and a measurement that stood in a file before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common import Experiment, Point, Result, align, fingerprint, main, new_figure
from speed_rows import SpeedRow, read_rows

from hybridgen.engine.layer_modes import layer_modes
from hybridgen.evaluation.machine_model import RESOURCES, predict
from hybridgen.placement.hardware import Hardware, load_hardware
from hybridgen.predict import planned_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent / "results"
SPEED = (
    HERE / "compare_opt13b_32k_h200.json", HERE / "decode_rows_h200.txt", HERE / "overall_speedup.json",
    HERE / "length_scaling.json", HERE / "ablations.json",
)  # fmt: skip
HARDWARE, OWN_RATES = "h200-16-cores", {"overall_speedup.json": HERE / "overall_speedup_box.json"}
WITHIN = 0.15  # asked for on what was not fitted
# (file, row) -> the constants of machine_model.py that it says something of.
FITTED = {
    ("compare_opt13b_32k_h200.json", "full"): "GPU_MEMORY_REACHED",
    ("compare_opt13b_32k_h200.json", "hybridgen"): "HAND_OVER_S",
    ("compare_opt13b_32k_h200.json", "hybridgen-paper"): "LAUNCHES_S",
    ("compare_opt13b_32k_h200.json", "infinigen"): "FETCH_S, PARTIAL_S_PER_ROW",
    ("compare_opt13b_32k_h200.json", "quest"): "FETCH_S",
    ("compare_opt13b_32k_h200.json", "h2o"): "EVICTING_S",
    ("compare_opt13b_32k_h200.json", "keyformer"): "EVICTING_S",
    ("compare_opt13b_32k_h200.json", "snapkv"): "EVICTING_S",
    ("compare_opt13b_32k_h200.json", "streaming-llm"): "EVICTING_S",
    ("decode_rows_h200.txt", "opt-13b 32k full, all resident"): "GPU_MEMORY_REACHED",
    ("decode_rows_h200.txt", "opt-13b 32k fp16 10%"): "HAND_OVER_S",
    ("decode_rows_h200.txt", "opt-13b 32k host int2 2%"): "HAND_OVER_S",
    ("decode_rows_h200.txt", "opt-13b 32k host int2 10%"): "HAND_OVER_S",
    ("decode_rows_h200.txt", "opt-13b 32k gpu int2 2%"): "CHOICE_S, FETCH_S",
    ("decode_rows_h200.txt", "opt-13b 32k gpu int2 5%"): "FETCH_S",
    ("decode_rows_h200.txt", "llama-3.1-8b 131000 gpu int2 2%"): "CHOICE_S_PER_SCORE",
    ("decode_rows_h200.txt", "opt-13b 512 x 8 aoc"): "ATTEND_HAND_OVER_S",
    ("decode_rows_h200.txt", "opt-13b 512 x 8 moe-lightning, two"): "ATTEND_HAND_OVER_S",
    ("overall_speedup.json", "opt-13b: h2o"): "EVICTING_S_PER_SCORE",
    ("overall_speedup.json", "opt-13b: keyformer"): "EVICTING_S_PER_SCORE",
    ("overall_speedup.json", "opt-13b: streaming-llm"): "EVICTING_S_PER_SCORE",
    ("overall_speedup.json", "llama-3.1-8b: full"): "STEP_S, ROTATED_S",
    ("overall_speedup.json", "llama-3.1-8b: moe-lightning"): "ATTENDS_SLOWER_BY_QUERY",
    ("overall_speedup.json", "llama-3.1-8b: h2o"): "GROUPED_S_PER_SCORE",
    ("overall_speedup.json", "llama-3.1-8b: keyformer"): "GROUPED_S_PER_SCORE",
    ("overall_speedup.json", "llama-3.1-8b: streaming-llm"): "GROUPED_S_PER_SCORE",
    ("overall_speedup.json", "llama-3.1-8b: hybridgen"): "CHAIN_S",
    ("overall_speedup.json", "llama-3.1-8b: hybridgen-int8"): "CHAIN_S",
    ("overall_speedup.json", "llama-3.1-8b: hybridgen-int2"): "CHAIN_S",
    ("length_scaling.json", "qwen2.5-7b: aog"): "STREAM_S",
    ("length_scaling.json", "qwen2.5-7b: hybridgen-int2-gpu"): "FETCH_S: of the link, not beside it",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--speed", type=Path, action="append", metavar="FILE", help="measured speeds; repeatable")
    parser.add_argument("--hardware", help=f"where they were measured (default {HARDWARE}, or what is known of a file)")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a measured row with a fixed schedule."""
    fitted = {
        _identity(row): FITTED[file.name, row.label]
        for file, _, row in _measurements(SPEED)
        if (file.name, row.label) in FITTED
    }
    files = arguments.speed or SPEED
    known = {file: str(arguments.hardware or OWN_RATES.get(file.name, HARDWARE)) for file in files}
    for rates in known.values():
        load_hardware(rates)  # an error comes early
    found = []
    for file, index, row in _measurements(files):
        rates, constants = known[file], fitted.get(_identity(row))
        if constants is not None and (file.name, row.label) not in FITTED:
            constants = f"(as one for {constants})"
        settings = {"file": file.name, "row": row.label, "index": index, "file_sha256": fingerprint(file)}
        settings |= {"hardware": Path(rates).stem, "model": row.config.model.name, "tokens": row.tokens}
        settings["fitted"] = constants
        found.append(Point(f"{file.stem}: {row.label}", settings, {"row": row, "hardware": rates}))
    return found


def _measurements(files: Sequence[Path]) -> Iterator[tuple[Path, int, SpeedRow]]:
    """Rows with a fixed schedule, by their number in a file; what stands in several files counts in the first."""
    seen = set()
    for file in files:
        for index, row in enumerate(read_rows(file)):
            measurement = row.label, row.tokens, row.ms
            if row.config.schedule.mode == "fixed" and measurement not in seen:
                seen.add(measurement)
                yield file, index, row


def _identity(row: SpeedRow) -> tuple[object, ...]:
    """What a prediction depends on, nearly."""
    cache, config = row.config.cache, row.config
    keys = cache.key_type, cache.sketch, cache.sketch_home, config.attention.lookahead
    return (
        config.model.name, row.tokens, config.run.batch, row.method, config.attention.executor, *keys, row.on_device,
        config.attention.stream_ahead, round(row.each, 2), config.runtime.micro_batch, config.placement.weights_on_gpu,
        config.attention.lookahead_layers, tuple(layer_modes(config, row.layers)),
    )  # fmt: skip


def measure(point: Point) -> Result:
    """Predicted and measured ms a token; how long each resource is busy, by the model."""
    row: SpeedRow = point.local["row"]
    hardware, config = as_it_was(load_hardware(point.local["hardware"]), row), row.config
    choice = planned_choice(config)
    found = predict(choice, config, layer_modes(config, row.layers), row.tokens, config.run.gen, hardware)
    return {
        "measured": row.ms,
        "predicted": 1e3 * found.step_s,
        "limit": row.limit_ms,
        "busy": {name: 1e3 * float(getattr(found.step, name)) for name in RESOURCES},
        "fitted": point.settings["fitted"],
        "batch": config.run.batch,
    }


def as_it_was(hardware: Hardware, row: SpeedRow) -> Hardware:
    """With the rates of the host's memory right before and after, where a row has them."""
    if row.scan_gbps is None:
        return hardware
    times = row.scan_gbps / hardware.cpu_scan_gb_per_s
    by_type = {kind: times * rate for kind, rate in hardware.cpu_scan_by_key_type_gb_per_s.items()}
    return replace(
        hardware, cpu_scan_gb_per_s=row.scan_gbps, cpu_scan_by_key_type_gb_per_s=by_type,
        host_dram_gb_per_s=row.beside_gbps,
    )  # fmt: skip


def error_of(result: Result) -> float:
    """Predicted less measured, as a share of measured."""
    return float(result["predicted"] / result["measured"] - 1.0)


def table(points: Sequence[Result]) -> str:
    """A line a row, then how many are met."""
    rows = [["model, tokens", "row", "file", "measured", "predicted", "error", "limit", "fitted"]]
    for point in points:
        settings, found = point["settings"], point["result"]
        batch = "" if found["batch"] == 1 else f"{found['batch']} x "
        missed = "" if abs(error_of(found)) <= WITHIN else " !"
        cells = [f"{found['measured']:.1f}", f"{found['predicted']:.1f}", f"{100 * error_of(found):+.1f} %{missed}"]
        cells.append("-" if found["limit"] is None else f"{found['limit']:.1f}")
        what = f"{settings['model']}, {batch}{settings['tokens']}"
        rows.append([what, settings["row"], settings["file"], *cells, found["fitted"] or ""])
    rates = ", ".join(dict.fromkeys(str(point["settings"]["hardware"]) for point in points))
    return f"ms a token, by the rates of {rates}\n{align(rows)}\n\n{summary(points)}"


def summary(points: Sequence[Result]) -> str:
    """How many of the rows that were not fitted are met, and by how much they are missed."""
    errors = [error_of(point["result"]) for point in points if point["result"]["fitted"] is None]
    if not errors:
        return "all of these rows were fitted"
    met = sum(abs(error) <= WITHIN for error in errors)
    mean = sum(abs(error) for error in errors) / len(errors)
    worst = max(errors, key=abs)
    words = f"mean {100 * mean:.1f} %, worst {100 * worst:+.1f} %"
    return f"not fitted: {met} of {len(errors)} within {100 * WITHIN:g} %, {words}"


def draw(points: Sequence[Result]) -> Figure:
    """Predicted over measured."""
    figure, panels = new_figure(width=6.5, height=6.0)
    panel = panels[0, 0]
    ends = [
        edge([point["result"][which] for point in points for which in ("measured", "predicted")]) for edge in (min, max)
    ]
    line = [ends[0] / 1.3, ends[1] * 1.3]
    panel.plot(line, line, color="grey", linewidth=0.8)
    panel.fill_between(
        line, [x * (1 - WITHIN) for x in line], [x * (1 + WITHIN) for x in line], color="grey", alpha=0.15
    )
    for fitted, colour, label in ((True, "none", "constants were fitted to it"), (False, "C0", "not fitted")):
        some = [point["result"] for point in points if (point["result"]["fitted"] is not None) == fitted]
        panel.plot(
            [found["measured"] for found in some], [found["predicted"] for found in some], "o", markersize=5,
            markerfacecolor=colour, markeredgecolor="C0", label=label,
        )  # fmt: skip
    for point in points:
        found = point["result"]
        if abs(error_of(found)) > WITHIN:
            panel.annotate(point["settings"]["row"], (found["measured"], found["predicted"]), fontsize=7,
                           textcoords="offset points", xytext=(5, -8))  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_aspect("equal")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("measured, ms a token")
    panel.set_ylabel("predicted, ms a token")
    panel.set_title(f"{summary(points)}\ngrey: within {100 * WITHIN:g} %", fontsize=9)
    panel.legend(fontsize=8, frameon=False)
    return figure


EXPERIMENT = Experiment("machine_model_check", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
