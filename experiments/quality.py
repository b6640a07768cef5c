"""Conditions beside full attention, in quality: what the experiments on a text's passages share.

As `hybridgen.evaluate --tasks perplexity`, from Python: all conditions of a point continue from one exact prefill,
token by token through the decode path. --smoke has random weights and random tokens: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import Point, Result, fingerprint

from hybridgen.config import Config, Setting, Settings, build_config, load_strategy, merge_settings
from hybridgen.engine import build
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from hybridgen.evaluation.conditions import DEFAULTS
from hybridgen.evaluation.perplexity import Measurement, Passage, cut_passages, measure, summarise
from hybridgen.quantities import parse_tokens

SMOKE = {
    "model": "smollm2-135m", "weights": "random", "dtype": "float32", "context": 256, "decode": 2, "passages": 2,
    "window": 64,
}  # fmt: skip


def add_quality_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured on."""
    parser.add_argument("--model", default="smollm2-135m", help="alias or directory")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a UTF-8 text, such as WikiText-2's test part")
    parser.add_argument("--context", type=parse_tokens, default=8192, help="tokens prefilled (default 8k)")
    parser.add_argument("--decode", type=parse_tokens, default=64, help="tokens scored a passage (default 64)")
    parser.add_argument("--passages", type=int, default=16, help="of the text (default 16)")
    parser.add_argument("--window", type=parse_tokens, default=512, help="recent tokens on the device (default 512)")
    parser.add_argument("--dtype", default="float32", help="default float32: rounding is a divergence, too")
    parser.add_argument("--batch", type=int, default=4, help="passages at a time (default 4)")


def quality_settings(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a point, but its conditions: what its result depends on, and where things lie."""
    if arguments.smoke:
        return dict(SMOKE), {"batch": 2}
    if arguments.text is None:
        raise ConfigError("nothing to measure on: --text FILE (none ships with the project), or --smoke")
    given = {name: getattr(arguments, name) for name in ("context", "decode", "passages", "window")}
    settings = {"model": Path(arguments.model).name, "weights": "real", "dtype": arguments.dtype, **given}
    settings |= {"text": arguments.text.name, "text_sha256": fingerprint(arguments.text)}
    return settings, {"model": arguments.model, "text": arguments.text, "batch": arguments.batch}


def strategy_settings(strategy: str, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """A strategy's under a point's settings: the window that all have, then these changes."""
    default = {**DEFAULTS, "model.weights": settings["weights"], "model.dtype": settings["dtype"]}
    default["run.gen"] = settings["decode"]
    if settings["weights"] == "random":  # --smoke: one thread, as other tests run beside it
        default |= {"runtime.device": "cpu", "runtime.torch_threads": 1}
    layers = (default, {"cache.gpu_window": settings["window"]}, changes)
    first, *others = ({path: Setting(value, "experiment") for path, value in layer.items()} for layer in layers)
    return merge_settings(first, load_strategy(strategy), *others)


def measure_conditions(point: Point) -> Result:
    """One row a condition of settings["conditions"] (strategy, settings), in their order.

    A row: budget, kept_fraction (of the host tier), exact (how many layers are resident), kl (nats a token) and percent
    (change of perplexity), both with 95 % limits, and kl of each passage.
    """
    settings, local = point.settings, point.local
    files = local.get("files", {})  # a name in the settings -> where it lies
    model = {"model.name": str(local.get("model", settings["model"]))}

    def config(strategy: str, changes: Mapping[str, Any]) -> Config:
        placed = {path: files.get(str(value), value) for path, value in changes.items()}
        return build_config(strategy_settings(strategy, settings, {**model, **placed}))

    with ExitStack() as stack:
        full = stack.enter_context(_open(config("full", {})))
        llms = [full]
        for condition in settings["conditions"]:
            llms.append(stack.enter_context(full.sharing(config(condition["strategy"], condition["settings"]))))
        for llm in llms:
            llm.telemetry.enabled = False
        passages, total = _passages(full, point), [Measurement() for _ in llms]
        for first in range(0, len(passages), local["batch"]):
            measured = measure(llms, passages[first : first + local["batch"]], settings["decode"])
            for sofar, more in zip(total, measured, strict=True):
                sofar.extend(more)
        modes = [llm.modes for llm in llms]
    rows = summarise(total)
    return {
        "perplexity_of_full": rows[0]["perplexity"],
        "layers": len(modes[0]),
        "device": str(full.device),
        "dtype": str(full.dtype).removeprefix("torch."),
        "conditions": [
            {
                "budget": row["budget"],
                "kept_fraction": row["kept_fraction"],
                "exact": of_layers.count("resident"),
                "kl": row["kl_nats_per_token"],
                "percent": row["against_full"]["percent"],
                "kl_of_passages": measured.divergences,
            }
            for row, of_layers, measured in zip(rows[1:], modes[1:], total[1:], strict=True)
        ],
    }


def _open(config: Config) -> LLM:
    choice, has_text = build.choose_model(config), config.model.weights == "real"
    return LLM.from_parts(config, choice, build.obtain_weights(choice, config, needs_text=has_text))


def _passages(llm: LLM, point: Point) -> Sequence[Passage]:
    settings = point.settings
    context, decode, count = (settings[name] for name in ("context", "decode", "passages"))
    if settings["weights"] == "random":
        draw = random.Random(0)
        ids = [[draw.randrange(llm.spec.vocab_size) for _ in range(context + decode + 1)] for _ in range(count)]
        return [Passage(0, some) for some in ids]
    start = llm.tokenizer.encode("")
    ids = llm.tokenizer.encode(point.local["text"].read_text(encoding="utf-8"))[len(start) :]
    return cut_passages(ids, start, context, decode, count)
