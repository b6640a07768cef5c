"""How alike consecutive layers' inputs are, and predicted and true queries, layer by layer (paper, figure 11).

    python experiments/layer_similarity.py --text FILE [--text FILE ...] [--predictor MAPS.safetensors]

Predicted from the input of the layer before: by the layer's own norm and Wq (`x`, the paper), by the same of that input
plus what the layer before changed at the previous token (`delta`), and by fitted maps (`fitted`, where a file of
`hybridgen.calibrate` is given; fit it to another text). Cosines are means over tokens (and heads), of queries after
rotary positions; errors are standard errors over the sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from common import Experiment, Point, Result, align, fingerprint, main, new_figure

from hybridgen.calibrate import Content, cut
from hybridgen.config import Setting, build_config, load_strategy, merge_settings
from hybridgen.engine import build
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from hybridgen.evaluation.calibration import Layer, query_cosines, through_layers
from hybridgen.models.base import QueryMap
from hybridgen.models.query_maps import read_query_maps
from hybridgen.quantities import parse_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"inputs": "inputs of a layer and the one before", "x": "x (the paper)", "delta": "delta", "fitted": "fitted"}
CLAIMED = 0.99  # of consecutive inputs, in the paper


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE", help="UTF-8; repeatable")
    parser.add_argument("--predictor", type=Path, metavar="FILE", help="fitted maps of hybridgen.calibrate")
    parser.add_argument("--tokens", type=parse_tokens, default=8192, help="of all sequences of a text (default 8k)")
    parser.add_argument("--context", type=parse_tokens, default=1024, help="of one sequence (default 1k)")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a text. --smoke: random weights on random tokens."""
    if arguments.smoke:
        return [Point("random", {"model": "smollm2-135m", "weights": "random", "sequences": 2, "context": 96})]
    if not arguments.text:
        raise ConfigError("nothing to measure on: --text FILE (none ships with the project), or --smoke")
    found = []
    for file in arguments.text:
        settings = {
            "model": Path(arguments.model).name,
            "weights": "real",
            "sequences": arguments.tokens // arguments.context,
            "context": arguments.context,
            "text": file.name,
            "text_sha256": fingerprint(file),
        }
        local = {"model": arguments.model, "text": file}
        if arguments.predictor is not None:
            settings["predictor_sha256"] = fingerprint(arguments.predictor)
            local["predictor"] = arguments.predictor
        found.append(Point(file.stem, settings, local))
    return found


@torch.inference_mode()
def measure(point: Point) -> Result:
    """Cosines by name of LABELS: a row a layer from 1 on, a column a sequence."""
    settings, local = point.settings, point.local
    values = {"model.name": local.get("model", settings["model"]), "model.weights": settings["weights"]}
    given = {name: Setting(value, "experiments/layer_similarity.py") for name, value in values.items()}
    config = build_config(merge_settings(load_strategy("full"), given))
    choice = build.choose_model(config)
    weights = build.obtain_weights(choice, config, needs_text=settings["weights"] == "real")
    count, context = settings["sequences"], settings["context"]
    with LLM.from_parts(config, choice, weights) as llm:
        if "text" in local:
            sequences = cut(llm, Content("--text", local["text"]), count, context)
        else:
            ids = random.Random(0)
            sequences = [[ids.randrange(llm.spec.vocab_size) for _ in range(context)] for _ in range(count)]
        predicted = dict(enumerate(llm.spec.layers[1:], start=1))
        maps = {}
        if "predictor" in local:
            maps = read_query_maps(local["predictor"], predicted, llm.spec.hidden_size, llm.device, llm.dtype)
        cosines: Result = {name: [] for name in LABELS if name != "fitted" or maps}
        for layer, earlier, inputs in through_layers(llm, sequences):
            if layer.number == 0:
                continue
            of_sequences = [_cosines(layer, *pair, maps) for pair in zip(earlier, inputs, strict=True)]
            for name, rows in cosines.items():
                rows.append([each[name] for each in of_sequences])
        return {"cosines": cosines, "dtype": str(llm.dtype).removeprefix("torch."), "device": llm.device.type}


def _cosines(layer: Layer, before: torch.Tensor, x: torch.Tensor, maps: Mapping[int, QueryMap]) -> dict[str, float]:
    """Of one sequence; before, x: [T, hidden], what the layer before and this one are given."""
    changed = before.clone()
    changed[1:] += x[:-1] - before[:-1]  # the first token has none before it
    predicted = {"x": layer.query(before), "delta": layer.query(changed)}
    if maps:
        predicted["fitted"] = layer.query(before, maps[layer.number])
    of_queries = query_cosines(layer.query(x), list(predicted.values()))
    inputs = float(F.cosine_similarity(before.float(), x.float(), dim=-1).mean())
    return {"inputs": inputs, **dict(zip(predicted, of_queries, strict=True))}


def table(points: Sequence[Result]) -> str:
    """Of each text a line a layer, and the means over the layers."""
    parts = []
    for point in points:
        cosines = point["result"]["cosines"]
        rows = [["layer", "inputs", *(f"query, {name}" for name in cosines if name != "inputs")]]
        means = {name: [statistics.fmean(row) for row in rows_of] for name, rows_of in cosines.items()}
        for index in range(len(means["inputs"])):
            rows.append([str(index + 1), *(f"{of_layers[index]:.3f}" for of_layers in means.values())])
        rows.append(["mean", *(f"{statistics.fmean(of_layers):.3f}" for of_layers in means.values())])
        parts.append(f"{_title(point)}\n{align(rows)}")
    return "\n\n".join(parts)


def draw(points: Sequence[Result]) -> Figure:
    """A row of panels a text: inputs, and queries."""
    figure, panels = new_figure(len(points), 2, width=5.5, height=3.6)
    for (left, right), point in zip(panels, points, strict=True):
        cosines = point["result"]["cosines"]
        for name, rows in cosines.items():
            panel = left if name == "inputs" else right
            errors = [statistics.stdev(row) / len(row) ** 0.5 if len(row) > 1 else 0.0 for row in rows]
            layers, means = range(1, len(rows) + 1), [statistics.fmean(row) for row in rows]
            panel.errorbar(layers, means, errors, marker="o", markersize=3, capsize=2, label=LABELS[name])
        left.axhline(CLAIMED, color="black", linestyle="--", linewidth=0.8, label="above this in the paper: 0.99")
        left.set_ylabel("cosine")
        left.set_title(f"layer inputs: {_title(point)}", fontsize=9)
        right.set_title("predicted and true queries", fontsize=9)
        for panel in (left, right):
            panel.set_ylim(min(0.0, *(min(row) for rows in cosines.values() for row in rows)), 1.02)
            panel.set_xlabel("layer")
            panel.legend(fontsize=8, loc="lower right")
    return figure


def _title(point: Result) -> str:
    settings = point["settings"]
    what = settings.get("text", "random weights and tokens")
    return f"{settings['model']}, {what}, {settings['sequences']} x {settings['context']} tokens"


EXPERIMENT = Experiment("layer_similarity", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
