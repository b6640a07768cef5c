"""KV memory against context length and batch beside the weights, for the paper's eleven models (figure 1).

    python experiments/kv_memory.py

Nothing is run: the bytes are those that the engine's memory plan has for `--strategy full`, where K and V of every
token lie on the device, and for all weights there. Lengths beyond a model's positions are shaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common import Experiment, Point, Result, align, main, new_figure, shared_legend

from hybridgen.config import Setting, build_config, load_strategy, merge_settings
from hybridgen.engine.layer_modes import all_resident
from hybridgen.engine.memory_plan import plan_memory
from hybridgen.placement.plan import GIB
from hybridgen.predict import planned_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = (
    "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b",
    "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b",
)  # fmt: skip
LENGTHS = tuple(1024 * 2**power for power in range(8))  # 1k to 128k tokens
BATCHES = (1, 4, 16, 64)
COLUMNS = 4  # panels in a row


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a model."""
    models = ("opt-13b", "llama-3.1-8b") if arguments.smoke else MODELS
    lengths = LENGTHS[::3] if arguments.smoke else LENGTHS
    return [Point(model, {"model": model, "tokens": lengths, "batches": BATCHES}) for model in models]


def measure(point: Point) -> Result:
    """kv_bytes: a row a batch, a column a length."""
    settings = point.settings
    config = build_config(
        merge_settings(load_strategy("full"), {"model.name": Setting(settings["model"], "experiments/kv_memory.py")})
    )
    choice = planned_choice(config)
    plans = [
        [
            plan_memory(choice, config, all_resident(choice.spec.num_layers), batch, tokens).device
            for tokens in settings["tokens"]
        ]
        for batch in settings["batches"]
    ]
    return {
        "weights_bytes": plans[0][0]["weights"],
        "kv_bytes": [[plan["KV of resident layers"] for plan in row] for row in plans],
        "positions": choice.spec.max_positions,
        "dtype": str(choice.dtype).removeprefix("torch."),
    }


def table(points: Sequence[Result]) -> str:
    """A line a model; the last columns: at which context KV is as large as the weights."""
    batches = points[0]["settings"]["batches"]
    longest = points[0]["settings"]["tokens"][-1]
    rows = [
        ["model", "dtype", "weights GiB", "KV KiB/token", f"GiB at {longest // 1024}k"]
        + [f"tokens, batch {batch}" for batch in batches]
    ]
    for point in points:
        found = point["result"]
        weights, kv = found["weights_bytes"], found["kv_bytes"][0][-1]
        a_token = kv / longest
        equal = [f"{weights / (a_token * batch):,.0f}" for batch in batches]
        rows.append(
            [point["name"], found["dtype"], f"{weights / GIB:.2f}", f"{a_token / 1024:.0f}", f"{kv / GIB:.1f}", *equal]
        )
    return align(rows) + "\ntokens, batch N: the context at which KV of N sequences is as large as the weights"


def draw(points: Sequence[Result]) -> Figure:
    """A panel a model, all on one scale."""
    rows = -(-len(points) // COLUMNS)
    figure, panels = new_figure(rows, min(len(points), COLUMNS), width=3.4, height=2.7)
    for panel, point in zip(panels.flat, points, strict=False):
        found, tokens = point["result"], point["settings"]["tokens"]
        for batch, row in zip(point["settings"]["batches"], found["kv_bytes"], strict=True):
            panel.plot(tokens, [size / GIB for size in row], marker="o", markersize=3, label=f"KV, batch {batch}")
        panel.axhline(found["weights_bytes"] / GIB, color="black", linestyle="--", label="weights")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(tokens, [f"{count // 1024}k" for count in tokens], fontsize=8)
        panel.minorticks_off()
        panel.set_xlim(tokens[0] / 1.2, tokens[-1] * 1.2)
        panel.set_ylim(0.01, 10_000)
        if found["positions"] < tokens[-1]:
            panel.axvspan(found["positions"], tokens[-1] * 1.2, color="0.92", zorder=0, label="beyond its positions")
        panel.set_title(f"{point['name']}, {found['dtype']}", fontsize=9)
    for panel in panels.flat[len(points) :]:
        panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("GiB")
    for panel in panels[-1]:
        panel.set_xlabel("tokens of a sequence")
    shared_legend(figure, panels, columns=6)
    figure.suptitle("KV cache beside the weights, by the engine's memory plan")
    return figure


EXPERIMENT = Experiment("kv_memory", __doc__, points, measure, table, draw)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
