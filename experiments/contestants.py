"""HybridGen and the methods it is compared with, each at its own budget: what the experiments on speed share.

Budgets come from match_budgets.py: what a layer that is not exact attends to, by method, for the quality of a target. A
method that does not reach it gets the largest of its grid, which flatters it. Speeds of one model and length are of one
process of `hybridgen.compare`, or predicted by the machine model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Point, Result, command_run
from comparisons import compare, write_strategy
from match_budgets import METHODS, budget_on, read_matches

from hybridgen.config import Setting, Settings, build_config, load_strategy, merge_settings
from hybridgen.engine.build import choose_model
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.errors import ConfigError
from hybridgen.evaluation.budgets import with_budget

BUDGETS = Path(__file__).parent / "results" / "match_budgets_smollm2_2k.json"
TARGET = "keep 0.1"
GEN, ROUNDS = 12, 2
SMOKE_BUDGETS = {method: {"each": 0.5, "reached": False} for method in METHODS}  # of short contexts
HOST = {"eviction.home": "host"}
LABEL = "random weights and KV, budgets matched on SmolLM2"


@dataclass(frozen=True)
class Contestant:
    """A strategy with changes; method: whose budget it gets (match_budgets.METHODS), None: it attends to everything.

    of: the paper's name of what it stands for; None: ours.
    """

    strategy: str
    method: str | None
    of: str | None
    changes: Mapping[str, Any] = field(default_factory=dict)


INT2 = {"cache.sketch": "int2"}
CONTESTANTS = {
    "full": Contestant("full", None, None),
    "aog": Contestant("aog", None, "FlexGen"),
    "moe-lightning": Contestant("moe-lightning", None, "MoE-Lightning"),
    "h2o-host": Contestant("h2o", "h2o", "H2O", HOST),
    "keyformer-host": Contestant("keyformer", "keyformer", "Keyformer", HOST),
    "streaming-llm-host": Contestant("streaming-llm", "streaming-llm", "StreamingLLM", HOST),
    "infinigen": Contestant("infinigen", "infinigen", "InfiniGen"),
    "h2o": Contestant("h2o", "h2o", "H2O, on the GPU"),
    "keyformer": Contestant("keyformer", "keyformer", "Keyformer, on the GPU"),
    "streaming-llm": Contestant("streaming-llm", "streaming-llm", "StreamingLLM, on the GPU"),
    "hybridgen": Contestant("hybridgen", "hybridgen", None),
    "hybridgen-int8": Contestant("hybridgen", "hybridgen", None, {"cache.key_type": "int8"}),
    "hybridgen-int2": Contestant("hybridgen", "hybridgen-int2", None, {**INT2, "cache.sketch_home": "host"}),
    "hybridgen-int2-gpu": Contestant("hybridgen", "hybridgen-int2", None, {**INT2, "cache.sketch_home": "gpu"}),
}
OURS = tuple(name for name, some in CONTESTANTS.items() if some.of is None and name != "full")
# Average speed-ups over them in the paper (abstract; its budgets and batch sizes are not known).
CLAIMED = {"InfiniGen": 1.41, "Keyformer": 1.86, "FlexGen": 3.2, "MoE-Lightning": 3.2}


def add_contest_flags(parser: argparse.ArgumentParser) -> None:
    """At which budgets, and whether to measure, to predict, or both."""
    parser.add_argument("--budgets", type=Path, default=BUDGETS, metavar="FILE", help=f"default {BUDGETS.name}")
    parser.add_argument("--target", default=TARGET, help=f"of match_budgets.py (default {TARGET!r})")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--predict-only", action="store_true", help="measure nothing: no GPU is needed")
    only.add_argument("--measure-only", action="store_true", help="predict nothing")


def read_budgets(file: Path, target: str) -> dict[str, dict[str, Any]]:
    """By method: each (share of the context), and whether the target's quality is reached with it."""
    found = {}
    matches = read_matches(file, target)
    if not matches:
        raise ConfigError(f"--target {target!r}: {file} has no such target of match_budgets.py (default {TARGET!r})")
    for method, match in matches.items():
        reached = match.each is not None
        found[method] = {"each": match.each if reached else METHODS[method].grid[1], "reached": reached}
    return found


def strategy_file(
    folder: Path, name: str, model: Settings, budgets: Mapping[str, Mapping[str, Any]], tokens: int, gen: int
) -> Path:
    """A contestant as YAML; its name is the contestant's. model: settings that name the model."""
    some = CONTESTANTS[name]
    changes = {path: Setting(value, "contestants.py") for path, value in some.changes.items()}
    if some.method is not None:
        changes |= {
            path: Setting(value, "contestants.py") for path, value in METHODS[some.method].changes.items()
            if path not in changes
        }  # fmt: skip
    resident = {"model.exact_layers_mode": Setting("resident", "contestants.py")}
    settings = merge_settings(resident, load_strategy(some.strategy), changes)
    if some.method is not None:
        config = build_config(merge_settings(settings, model, {"runtime.device": Setting("cpu", "the shape alone")}))
        layers = choose_model(config).spec.num_layers
        modes = layer_modes(config, layers)
        budget = budget_on(budgets[some.method]["each"], modes.count("resident"), layers)
        settings, _ = with_budget(name, settings, modes, budget, tokens, gen - 1)
    return write_strategy(folder, name, {path: setting.value for path, setting in settings.items()})


def measure(point: Point) -> Result:
    """By settings["kind"]: a compare.json, or {"predictions": by contestant}.

    settings: contestants, model, tokens, gen, budgets, flags; and rounds, or hardware. local: folder of a comparison,
    where what is there already is not measured again.
    """
    wanted = point.settings
    model: Settings = {"model.name": Setting(wanted["model"], "--model")}
    words = ["--model", wanted["model"], "--seq", str(wanted["tokens"]), "--gen", str(wanted["gen"]), *wanted["flags"]]
    with tempfile.TemporaryDirectory() as folder:
        files = [
            strategy_file(Path(folder), name, model, wanted["budgets"], wanted["tokens"], wanted["gen"])
            for name in wanted["contestants"]
        ]
        if wanted["kind"] == "predicted":
            return {"predictions": {file.stem: _predicted(file, wanted["hardware"], words) for file in files}}
        # Each keeps what its file says, which a flag on that says to `compare`.
        words += ["--rounds", str(wanted["rounds"]), "--set", "selection.min_keep=0"]
        return compare(point.local["folder"], files, *words)


def _predicted(file: Path, hardware: str, words: Sequence[str]) -> Result:
    """What the machine model says, or why it does not fit there."""
    out = file.with_suffix(".json")
    try:
        command_run("predict", *words, "--strategy", str(file), "--hardware", hardware, "--out", str(out))
    except RuntimeError as error:
        if "does not fit" not in str(error):
            raise
        lines = str(error).replace(f"{file.parent}/", "").splitlines()
        return {"skipped": next((line for line in lines if line.startswith("error:")), lines[0])}
    prediction = json.loads(out.read_text(encoding="utf-8"))["prediction"]
    return {word: prediction[word] for word in ("ms_per_token", "bottleneck", "prefill_s")}


def times_of(point: Mapping[str, Any]) -> dict[str, float]:
    """ms a token by contestant: medians, or predicted."""
    result = point["result"]
    if "strategies" in result:
        return {name: some["decode_ms_per_token"]["median"] for name, some in summaries(point).items()}
    return {name: some["ms_per_token"] for name, some in result["predictions"].items() if "ms_per_token" in some}


def summaries(point: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of what was measured, by contestant."""
    return {some["name"]: some["summary"] for some in point["result"].get("strategies", ()) if some["summary"]}


def ratios(ms: Mapping[str, float], ours: str) -> dict[str, float]:
    """How many times longer each other takes than this one of ours, by the paper's name."""
    return {
        some.of: ms[name] / ms[ours]
        for name, some in CONTESTANTS.items()
        if some.of is not None and name in ms and ours in ms
    }
