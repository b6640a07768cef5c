"""`python -m hybridgen.calibrate`: fit the maps that predict the next layer's query, and choose the exact layers.

The file that it writes is a value of `attention.predictor`. A text of any kind will do; none ships with the project.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from hybridgen import __version__
from hybridgen.cli import Parser, add_engine_flags, assigned_settings, run_command
from hybridgen.config import Config, Setting, build_config
from hybridgen.engine import build, memory_plan
from hybridgen.engine.build import ModelChoice, ObtainedWeights
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_budget import fit_weights
from hybridgen.engine.report import current_commit, describe_machine, write_report
from hybridgen.errors import ConfigError, InsufficientMemoryError
from hybridgen.evaluation.calibration import STRENGTHS, LayerFit, Texts, fit_query_maps
from hybridgen.models.checkpoint import checkpoint_key
from hybridgen.models.loading import weight_bytes
from hybridgen.models.query_maps import query_map_elements, write_query_maps
from hybridgen.output import check_output_path
from hybridgen.placement.plan import MemoryPlan
from hybridgen.quantities import parse_tokens

CONTEXT = 2048  # tokens of a sequence
TOKENS = 24 * CONTEXT  # of all sequences
THRESHOLD = 0.95  # query cosine: what lookahead.md finds in layers that `x` predicts well
HELD_OUT = 8  # of so many sequences two are held out: one to choose the ridge by, one to judge by
_LEFT_OUT = (
    "--strategy", "--seq", "--gen", "--batch", "--seed", "--weights", "--gpu-window", "--keep", "--keep-mass",
    "--min-keep", "--lookahead", "--key-type", "--sketch", "--sketch-home", "--schedule", "--target-ms",
    "--synthetic-kv",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if not arguments.text:
        raise ConfigError("a calibration needs a text, and none ships with the project: --text FILE")
    contents = [Content("--text", file) for file in arguments.text]
    judged = None if arguments.judge_text is None else Content("--judge-text", arguments.judge_text)
    settings = {**assigned_settings(arguments), "attention.executor": Setting("full", "hybridgen.calibrate")}
    settings.setdefault("model.weights", Setting("real", "hybridgen.calibrate"))
    config = build_config(settings)
    choice = build.choose_model(config)
    _check(choice, config, arguments)
    out = arguments.out or Path(f"{Path(choice.spec.name).name}.calibrated.safetensors")
    check_output_path("--out", out)
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: the file's name must end in .safetensors (attention.predictor asks for it)")
    check_output_path("--report", arguments.report)

    started = time.perf_counter()
    plan = _admit(choice, config, arguments.tokens, arguments.context)
    config = memory_plan.settled(config, plan)
    weights = _load(choice, config)
    with LLM.from_parts(config, choice, weights) as llm:
        texts = _texts(llm, contents, judged, arguments)
        total = len(texts.all) * llm.spec.num_layers
        with tqdm(total=total, desc="calibrating", unit="sequence of a layer", disable=None) as bar:
            fits = fit_query_maps(llm, texts, _advances(bar))
        exact = [0, *(fit.layer for fit in fits if fit.after.cosine < arguments.threshold)]
        seconds = time.perf_counter() - started
        report = _report(llm, fits, texts, exact, seconds, arguments)
    assert weights.directory is not None
    about = {"model": choice.spec.name, "hybridgen": __version__, "text": " ".join(map(str, arguments.text))}
    about["query_cosine"] = json.dumps([round(fit.after.cosine, 4) for fit in fits])
    maps, ahead = {fit.layer: fit.map for fit in fits}, config.attention.lookahead_layers
    write_query_maps(out, maps, exact, checkpoint_key(weights.directory), about, ahead)
    print(format_fits(fits, exact))
    means = report["query_cosine"]
    print(f"mean query cosine {means['before']:.4f} before, {means['after']:.4f} after, in {seconds / 60:.1f} minutes")
    print(f"exact layers: {exact} (layer 0, and those with a cosine below {arguments.threshold:g})")
    also = "" if ahead == 1 else f" --set attention.lookahead_layers={ahead}"
    print(f'written: {out}; use it with --set "attention.predictor={out}"{also}')
    if arguments.report is not None:
        write_report(report, arguments.report)
        print(f"report: {arguments.report}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "hybridgen.calibrate", description="Fit the maps that predict the next layer's query, and choose exact layers."
    )
    parser.add_argument(
        "--text", type=Path, action="append", default=[], metavar="F", help="a UTF-8 text to fit to; repeatable"
    )
    parser.add_argument("--judge-text", type=Path, metavar="F", help="another to judge by (default: parts of --text)")
    parser.add_argument(
        "--tokens", type=parse_tokens, default=TOKENS, metavar="N", help=f"of all sequences (default {TOKENS})"
    )
    parser.add_argument(
        "--context", type=parse_tokens, default=CONTEXT, metavar="N", help=f"of one sequence (default {CONTEXT})"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        metavar="C",
        help=f"layers with a lower query cosine are exact (default {THRESHOLD})",
    )
    add_engine_flags(parser, leave_out=_LEFT_OUT)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write (default MODEL.calibrated.safetensors)"
    )
    parser.add_argument("--report", type=Path, metavar="F", help="write a JSON report")
    return parser


class Content:
    """A text, and how errors name it."""

    def __init__(self, flag: str, file: Path) -> None:
        self.name = f"{flag} {file}"
        try:
            self.text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.name}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.name} is not UTF-8 text: {error}") from None


def _check(choice: ModelChoice, config: Config, arguments: argparse.Namespace) -> None:
    """What is wrong without a look at weights or tokens."""
    spec, context, tokens = choice.spec, arguments.context, arguments.tokens
    if config.model.weights != "real":
        raise ConfigError(f"model.weights = {config.model.weights!r}: there is nothing to fit to (allowed: 'real')")
    if spec.num_layers < 2:
        raise ConfigError(f"{spec.name} has {spec.num_layers} layer: none has one before it, to be predicted from")
    if not 2 <= context <= spec.max_positions:
        raise ConfigError(f"--context {context}: allowed are 2 to {spec.max_positions}, the positions of {spec.name}")
    if tokens < 3 * context:
        raise ConfigError(f"--tokens {tokens}: at least three sequences of --context {context} are needed")
    if not -1 <= arguments.threshold <= 1:
        raise ConfigError(f"--threshold {arguments.threshold}: a cosine lies in [-1, 1]")


def _admit(choice: ModelChoice, config: Config, tokens: int, context: int) -> MemoryPlan:
    """The memory plan, if it fits."""
    spec, element, ahead = choice.spec, choice.dtype.itemsize, config.attention.lookahead_layers
    hidden, width = spec.hidden_size, max(layer.num_heads * layer.head_dim for layer in spec.layers)
    groups = max(layer.group_size for layer in spec.layers)
    maps = sum(query_map_elements(layer, hidden) for layer in spec.layers[1:]) * element
    one = context * (choice.family.mlp_tensors * spec.intermediate_size + 4 * hidden + (3 + groups) * width)
    plan = MemoryPlan(
        device_is_host=choice.device.type == "cpu",
        device={
            "weights": 0,
            "slots for streamed weights": 0,
            "inputs of two layers or three": (1 + ahead) * tokens * hidden * element,
            "one sequence in one layer": one * max(element, 4),
            "normal equations": 8 * (4 * hidden * hidden + 3 * hidden * width),
            "maps of one layer": len(STRENGTHS) * hidden * width * element,
        },
        host={"maps of all layers": 2 * maps},  # and once more on their way into the file
    )
    if choice.device.type == "cuda":
        plan.device["CUDA context and libraries"] = memory_plan.CUDA_RESERVE_BYTES
    limits = memory_plan.memory_limits(config, choice.device)
    plan = fit_weights(choice, config, [plan], limits)[1]
    if not plan.fits(*limits):
        raise InsufficientMemoryError(
            f"the calibration of {spec.name} with {tokens} tokens does not fit\n{plan.describe(*limits)}\n"
            "what may help: a smaller --tokens or --context, --dtype bfloat16"
        )
    print(plan.describe(*limits))
    return plan


def _load(choice: ModelChoice, config: Config) -> ObtainedWeights:
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:
        advance = _advances(bar)
        return build.obtain_weights(choice, config, needs_text=True, progress=advance)


def _advances(bar: tqdm[NoReturn]) -> Callable[..., None]:
    def advance(count: int = 1) -> None:
        bar.update(count)

    return advance


def _texts(llm: LLM, contents: Sequence[Content], judged: Content | None, arguments: argparse.Namespace) -> Texts:
    """As many sequences from each text, from all over it; those held out come from all over, too."""
    count, context = arguments.tokens // arguments.context, arguments.context
    held = max(1, count // HELD_OUT)
    wanted = count if judged is None else count - held
    sequences = []
    for index, content in enumerate(contents):
        share = (index + 1) * wanted // len(contents) - index * wanted // len(contents)
        sequences += cut(llm, content, share, context)
    judge = [] if judged is None else cut(llm, judged, held, context)
    if judged is None:
        sequences, judge = take_out(sequences, held)
    fit, tune = take_out(sequences, held)
    return Texts(fit, tune, judge)


def cut(llm: LLM, content: Content, count: int, context: int) -> list[list[int]]:
    """`count` sequences of `context` tokens, each in the middle of its share of the text, BOS first where there is one.

    ConfigError if the text is too short.
    """
    start = llm.tokenizer.encode("")
    ids, length = llm.tokenizer.encode(content.text)[len(start) :], context - len(start)
    if count * length > len(ids):
        raise ConfigError(
            f"{content.name}: it has {len(ids)} tokens, and {count} sequences of {context} are to be cut from it: give "
            "a longer text, or smaller --tokens or --context"
        )
    firsts = [((2 * index + 1) * len(ids) // count - length) // 2 for index in range(count)]
    return [[*start, *ids[first : first + length]] for first in firsts]


def take_out(sequences: list[list[int]], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """The others, and `count` of them, evenly spread."""
    taken = {(2 * index + 1) * len(sequences) // (2 * count) for index in range(count)}
    return (
        [sequence for index, sequence in enumerate(sequences) if index not in taken],
        [sequences[index] for index in sorted(taken)],
    )


def _report(
    llm: LLM, fits: Sequence[LayerFit], texts: Texts, exact: list[int], seconds: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    return {
        "task": "calibration",
        "model": llm.spec.name,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "texts": [str(file) for file in arguments.text],
        "judge_text": None if arguments.judge_text is None else str(arguments.judge_text),
        "context": arguments.context,
        "sequences": {"fit": len(texts.fit), "tune": len(texts.tune), "judge": len(texts.judge)},
        "threshold": arguments.threshold,
        "exact_layers": exact,
        "query_cosine": {
            "before": fmean(fit.before.cosine for fit in fits),
            "after": fmean(fit.after.cosine for fit in fits),
        },
        "layers": [
            {
                "layer": fit.layer,
                "strength": fit.strength,
                "before": asdict(fit.before),
                "after": asdict(fit.after),
                "true_mass": fit.true_mass,
            }
            for fit in fits
        ],
        "seconds": seconds,
        "machine": describe_machine(llm),
        "versions": {"hybridgen": __version__, "torch": torch.__version__},
        "commit": current_commit(),
    }


def format_fits(fits: Sequence[LayerFit], exact: Sequence[int]) -> str:
    """A line a layer, and their mean: before (`x`) and after."""
    lines = [
        "        query cosine       recall of top 10 %   covered host mass",
        "layer   x       fitted     x       fitted       true    x       fitted   ridge",
    ]
    rows = [
        (fit.before.cosine, fit.after.cosine, fit.before.recall, fit.after.recall, fit.true_mass, fit.before.mass,
         fit.after.mass)
        for fit in fits
    ]  # fmt: skip
    for fit, row in zip(fits, rows, strict=True):
        note = "   exact" if fit.layer in exact else ""
        lines.append(f"{fit.layer:<5}   {_numbers(row)}   {fit.strength:g}{note}")
    means = [
        None if any(value is None for value in column) else fmean(value for value in column if value is not None)
        for column in zip(*rows, strict=True)
    ]
    return "\n".join([*lines, f"mean    {_numbers(means)}"])


def _numbers(values: Sequence[float | None]) -> str:
    widths = (6, 9, 6, 11, 6, 6, 7)
    shown = ("-" if value is None else f"{value:.3f}" for value in values)
    return "  ".join(f"{value:<{width}}" for value, width in zip(shown, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
