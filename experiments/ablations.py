"""What each part of the engine's way is worth, in speed and in quality, one changed at a time.

    python experiments/ablations.py                    # a GPU: speed, OPT-13B with 32k tokens; with --text quality, too
    python experiments/ablations.py --quality-only --text wikitext2_raw_test.txt --predictor smollm2.safetensors

The base is `select` with 10 % of the host tier, model's keys, layers 0-2 resident, a fixed schedule. Speed: random
weights, all rows in one process of `hybridgen.compare`, in one round; the schedule `feedback` is still at finding its
plan in the first of its few steps (feedback_steps.py shows that). Quality: SmolLM2 (match_budgets.py says how), all
conditions from one prefill; the file of `hybridgen.calibrate` adds calibrated ones, beside others with the same exact
layer, 0. `all tokens` holds the log-sum-exp merge of what the CPU attends to where it lies (aoc) against rows that are
shipped (aog).

Left out, as no setting has it: another reduction over a group's heads than the mean of their probabilities (maximum
logit, or a choice of each query head's own: measured before the engine was written, lookahead.md), a log-sum-exp merge
of a CPU partial over chosen rows alone, and calibrated queries in speed (a map replaces a matrix of the same shape).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import SMOKE_MODEL, Experiment, Point, Result, align, fingerprint, main, new_figure
from comparisons import SPEED_ONLY, compare, comparison_point, write_strategy
from quality import add_quality_flags, measure_conditions, quality_settings

from hybridgen.config import load_strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE: dict[str, Any] = {"selection.keep": 0.1, "selection.keep_mass": None, "selection.min_keep": 0}
INT4, INT2 = {"cache.sketch": "int4"}, {"cache.sketch": "int2"}
CPU, GPU = {"cache.sketch_home": "host"}, {"cache.sketch_home": "gpu"}
OFF, TWO_AHEAD = {"attention.lookahead": "off"}, {"attention.lookahead_layers": 2}
# Group -> row -> settings beside BASE, or the name of another strategy. The base stands in the first group alone.
SPEED: dict[str, dict[str, dict[str, Any] | str]] = {
    "lookahead": {
        "select": {},
        "logits": {"attention.lookahead": "logits"},
        "off": OFF,
        "two layers ahead": TWO_AHEAD,
        "int8, two ahead": {"cache.key_type": "int8"} | TWO_AHEAD,
        "int2, CPU, two ahead": INT2 | CPU | TWO_AHEAD,
    },
    "keys": {
        "int8": {"cache.key_type": "int8"},
        "int4, CPU": INT4 | CPU,
        "int2, CPU": INT2 | CPU,
        "int4, GPU": INT4 | GPU,
        "int2, GPU": INT2 | GPU,
        "int2, GPU, off": INT2 | GPU | OFF,
    },
    "kept": {
        "2 %": {"selection.keep": 0.02},
        "28 %": {"selection.keep": 0.28},
        "2 %, int2, GPU": {"selection.keep": 0.02} | INT2 | GPU,
        "5 %, int2, GPU": {"selection.keep": 0.05} | INT2 | GPU,
    },
    "exact layers": {"select, too": {"model.exact_layers_mode": "select"}},
    "schedule": {"feedback": {"schedule.mode": "feedback"}},
    "all tokens": {"aoc: merged": "aoc", "aog: shipped": "aog"},
}
FITTED = "fitted.safetensors"  # in settings; where it lies is local
# Group -> condition -> settings beside BASE.
QUALITY: dict[str, dict[str, dict[str, Any]]] = {
    "lookahead": {
        "select": {},
        "logits": {"attention.lookahead": "logits"},
        "logits, renormalised": {"attention.lookahead": "logits", "attention.dropped": "renormalise"},
        "off": {"attention.lookahead": "off"},
    },
    "keys": {"int8": {"cache.key_type": "int8"}, "int4": {"cache.sketch": "int4"}, "int2": {"cache.sketch": "int2"}},
    "predicted from": {
        f"{name}, {lookahead}": {
            "attention.predictor": predictor, "attention.lookahead": lookahead, "model.exact_layers": [0],
        }
        for name, predictor in (("x", "x"), ("delta", "delta"), ("fitted", FITTED))
        for lookahead in ("select", "logits")
    },
    "kept": {"2 %": {"selection.keep": 0.02}, "28 %": {"selection.keep": 0.28}},
}  # fmt: skip
GEN = 16  # tokens: 15 decode steps, of which `compare` times all but the first two
SMOKE_ROWS = ("select", "int8", "feedback", "aoc: merged")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment: --model and what follows is of the quality's side."""
    add_quality_flags(parser)
    parser.add_argument("--predictor", type=Path, metavar="FILE", help="of hybridgen.calibrate, for --model")
    parser.add_argument("--speed-model", default="opt-13b", help="default opt-13b")
    parser.add_argument("--seq", default="32k", help="of the speed's side (default 32k)")
    parser.add_argument("--quality-only", action="store_true", help="measure no speed")


def points(arguments: argparse.Namespace) -> list[Point]:
    """A point for all of the speed, and, where there is a text, one for all of the quality."""
    found = [] if arguments.quality_only else [_speed_point(arguments)]
    if arguments.smoke or arguments.quality_only or arguments.text is not None:
        found.append(_quality_point(arguments))
    return found


def _speed_point(arguments: argparse.Namespace) -> Point:
    flags = ["--model", arguments.speed_model, "--seq", arguments.seq, "--gpu-window", "512", "--gen", str(GEN)]
    rows = [
        {"group": group, "row": name, **_strategy_of(changes)}
        for group, of_group in SPEED.items()
        for name, changes in of_group.items()
    ]
    if arguments.smoke:
        flags = [*SMOKE_MODEL, "--seq", "320", "--gpu-window", "64", "--gen", "5"]
        rows = [row for row in rows if row["row"] in SMOKE_ROWS]
    # Were nothing said of what is kept, `compare` would have all rows keep the same of random weights.
    flags += [*SPEED_ONLY, "--rounds", "1", "--set", "selection.min_keep=0"]
    return comparison_point("speed", {"kind": "speed", "rows": rows, "flags": flags}, arguments.out)


def _strategy_of(changes: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(changes, str):
        return {"strategy": changes, "settings": {}}
    return {"strategy": "hybridgen", "settings": {**BASE, **changes}}


def _quality_point(arguments: argparse.Namespace) -> Point:
    settings, local = quality_settings(arguments)
    conditions = [
        {"group": group, "row": name, "strategy": "hybridgen", "settings": {**BASE, **changes}}
        for group, of_group in QUALITY.items()
        for name, changes in of_group.items()
        if arguments.predictor is not None or FITTED not in changes.values()
    ]
    if arguments.smoke:
        conditions = conditions[:2]
    elif arguments.predictor is not None:
        settings["predictor_sha256"] = fingerprint(arguments.predictor)
        local["files"] = {FITTED: str(arguments.predictor)}
    return Point("quality", {"kind": "quality", **settings, "conditions": conditions}, local)


def measure(point: Point) -> Result:
    """A compare.json whose strategies are the rows of the settings, or what is known of all conditions."""
    settings = point.settings
    if settings["kind"] == "quality":
        return measure_conditions(point)
    with tempfile.TemporaryDirectory() as folder:
        files = [_write_row(Path(folder), row) for row in settings["rows"]]
        return compare(point.local["folder"], files, *settings["flags"])


def _write_row(folder: Path, row: Mapping[str, Any]) -> Path:
    """A strategy file, whose name `compare` takes for the strategy's: letters, digits and `-` of group and row."""
    of_strategy = {path: setting.value for path, setting in load_strategy(row["strategy"]).items()}
    name = re.sub(r"[^a-z0-9]+", "-", f"{row['group']} {row['row']}".lower()).strip("-")
    return write_strategy(folder, name, {**of_strategy, **row["settings"]})


def _parts(points: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Speed rows, with their comparison as `about`, and quality rows, all with their group and name."""
    speed = [
        {**row, **entry, "about": point}
        for point in points
        if point["settings"]["kind"] == "speed"
        for row, entry in zip(point["settings"]["rows"], point["result"]["strategies"], strict=True)
    ]
    rows = [
        {**condition, **row}
        for point in points
        if point["settings"]["kind"] == "quality"
        for condition, row in zip(point["settings"]["conditions"], point["result"]["conditions"], strict=True)
    ]
    return speed, rows


def table(points: Sequence[Result]) -> str:
    """Two tables; times beside the base's."""
    speed, rows = _parts(points)
    blocks = []
    if speed:
        measured = [row for row in speed if row["summary"] is not None]
        base = next((row["summary"] for row in measured if row["row"] == "select"), None)
        lines = [["speed", "", "ms/token", "p90", "of select", "limit", "kept", "budget", "GPU GiB"]]
        for row in measured:
            found = row["summary"]
            spent = found["decode_ms_per_token"]
            limit, kept, peak = found["limit_ms"], found["kept_fraction"], found["peak_gpu_bytes"]
            share = "-" if base is None else f"{spent['median'] / base['decode_ms_per_token']['median']:.2f}"
            cells = [f"{spent['median']:.1f}", f"{spent['p90']:.1f}", share]
            cells.append("-" if limit is None else f"{limit:.1f}")
            cells += ["-" if kept is None else f"{kept:.3f}", f"{found['budget']:.3f}"]
            cells.append("-" if peak is None else f"{peak / 2**30:.1f}")
            lines.append([row["group"], row["row"], *cells])
        about = speed[0]["about"]["result"]
        what = f"{about['model']}, {about['prompt_tokens']} tokens"
        left_out = [f"{row['group']}, {row['row']}: {row['skipped']}" for row in speed if row["summary"] is None]
        title = f"{what}, {about['dtype']} on {about['device']}, random weights"
        blocks.append("\n".join([title, align(lines), *left_out]))
    if rows:
        lines = [["quality", "", "KL", "95 %", "perplexity, %", "95 %", "kept", "budget"]]
        for row in rows:
            kl, percent = row["kl"], row["percent"]
            limits = ["-" if kl["low"] is None else f"{kl['low']:.4f}-{kl['high']:.4f}"]
            limits.append("-" if percent["low"] is None else f"[{percent['low']:+.2f}, {percent['high']:+.2f}]")
            cells = [f"{kl['value']:.4f}", limits[0], f"{percent['value']:+.2f}", limits[1]]
            lines.append([row["group"], row["row"], *cells, f"{row['kept_fraction']:.3f}", f"{row['budget']:.3f}"])
        blocks.append(f"{_of_quality(points)}\n{align(lines)}")
    return "\n\n".join(blocks)


def _of_quality(points: Sequence[Mapping[str, Any]]) -> str:
    about = next(point["settings"] for point in points if point["settings"]["kind"] == "quality")
    warning = "RANDOM WEIGHTS, means nothing: " if about["weights"] == "random" else ""
    return f"{warning}{about['model']}, {about['passages']} x {about['decode']} tokens after {about['context']}"


def draw(points: Sequence[Result]) -> Figure:
    """Bars by group: ms a token, and KL."""
    speed, rows = _parts(points)
    figure, panels = new_figure(1, bool(speed) + bool(rows), width=6.5, height=5.5)
    left = list(panels.flat)
    if speed:
        panel, about = left.pop(0), speed[0]["about"]
        measured = [row for row in speed if row["summary"] is not None]
        found = [row["summary"] for row in measured]
        medians = [some["decode_ms_per_token"]["median"] for some in found]
        upwards = [max(0.0, some["decode_ms_per_token"]["p90"] - ms) for some, ms in zip(found, medians, strict=True)]
        names = [(row["group"], row["row"]) for row in measured]
        _bars(panel, names, medians, ([0.0] * len(found), upwards))
        for at, some in enumerate(found):
            if some["limit_ms"] is not None:
                panel.vlines(some["limit_ms"], at - 0.4, at + 0.4, color="black", linewidth=1.2)
        panel.set_xlabel("ms a token: median, whisker to the 90th percentile, line: limit_ms")
        where = about["provenance"]["machine"]["gpu"] or "CPU"
        panel.set_title(f"{about['result']['model']}, random weights, {where}", fontsize=9)
    if rows:
        panel = left.pop(0)
        values = [row["kl"]["value"] for row in rows]
        low = [value - max(row["kl"]["low"] or value, value / 20) for row, value in zip(rows, values, strict=True)]
        high = [(row["kl"]["high"] or value) - value for row, value in zip(rows, values, strict=True)]
        _bars(panel, [(row["group"], row["row"]) for row in rows], values, ([max(0.0, x) for x in low], high))
        panel.set_xscale("log")
        panel.set_xlabel("KL from full attention, nats a token (95 %)")
        panel.set_title(_of_quality(points), fontsize=9)
    return figure


def _bars(
    panel: Any, names: Sequence[tuple[str, str]], values: Sequence[float], errors: tuple[list[float], list[float]]
) -> None:
    groups = list(dict.fromkeys(group for group, _ in names))
    colours = [f"C{groups.index(group)}" for group, _ in names]
    style = {"error_kw": {"elinewidth": 0.8}, "capsize": 2}
    panel.barh(range(len(values)), values, xerr=errors, color=colours, **style)
    panel.set_yticks(range(len(values)), [f"{group}: {name}" for group, name in names], fontsize=7)
    panel.invert_yaxis()


EXPERIMENT = Experiment("ablations", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
