"""`python -m hybridgen.evaluate`: what a strategy costs in quality, measured against full attention.

`--tasks perplexity` so far. Every condition (the strategy, and each `--also`) continues from the same
exact prefill as full attention, on the same passages, so that differences are paired.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from hybridgen import __version__
from hybridgen.cli import Parser, add_engine_flags, assigned_settings, given_settings, parse_keep, run_command
from hybridgen.config import (
    Config,
    Setting,
    Settings,
    build_config,
    load_strategy,
    merge_settings,
    parse_assignment,
)
from hybridgen.engine import build, memory_plan
from hybridgen.engine.admission import admit
from hybridgen.engine.build import ModelChoice, ObtainedWeights
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_budget import fit_weights
from hybridgen.engine.report import current_commit, describe_machine, write_report
from hybridgen.errors import ConfigError, InsufficientMemoryError, UnknownNameError
from hybridgen.evaluation.paired import CONFIDENCE
from hybridgen.evaluation.perplexity import Measurement, Passage, cut_passages, measure, summarise
from hybridgen.evaluation.quality_table import format_table
from hybridgen.models.loading import weight_bytes
from hybridgen.models.tokenizer import Tokenizer
from hybridgen.placement.plan import MemoryPlan
from hybridgen.quantities import parse_tokens

TASKS = ("perplexity",)
BATCH = 8  # passages at a time, unless --batch or --set says otherwise
MASS_PROBE_INTERVAL = 2  # decode steps: 64 of them then probe each layer of most models
_DEFAULTS = {
    "run.batch": BATCH,
    "runtime.mass_probe_interval": MASS_PROBE_INTERVAL,
    "model.exact_layers_mode": "resident",
}
_KV_ITEMS = (
    "KV of resident layers", "KV of sinks and windows", "KV that is not evicted", "KV host tier"
)  # of a memory plan
_STRATEGY = "strategy"  # word of --also: another one, under the same flags
# word of --also -> dotted setting, how its text is read
_VARIANT_WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "keep": ("selection.keep", parse_keep),
    "keep-mass": ("selection.keep_mass", float),
    "min-keep": ("selection.min_keep", int),
    "lookahead": ("attention.lookahead", str),
    "predictor": ("attention.predictor", str),
    "dropped": ("attention.dropped", str),
    "gpu-window": ("cache.gpu_window", parse_tokens),
    "key-type": ("cache.key_type", str),
    "sketch": ("cache.sketch", str),
}


@dataclass(frozen=True)
class Condition:
    """One way to attend; the first of all is full attention."""

    name: str
    config: Config


@dataclass
class TextResult:
    """A text, its passages, and what was measured on the first `done` of them."""

    file: Path
    tokens: int
    passages: list[Passage]
    measurements: list[Measurement] = field(default_factory=list)  # one a condition, from the first batch on

    @property
    def done(self) -> int:
        """Passages measured so far: the first ones."""
        return len(self.measurements[0].losses) if self.measurements else 0

    def add(self, measured: Sequence[Measurement]) -> None:
        """The next batch of passages."""
        if not self.measurements:
            self.measurements = [Measurement() for _ in measured]
        for total, more in zip(self.measurements, measured, strict=True):
            total.extend(more)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    for task in arguments.tasks.split(","):
        if task not in TASKS:
            raise UnknownNameError("task", task, TASKS)
    settings = given_settings(arguments)
    settings = {path: Setting(value, "the default") for path, value in _DEFAULTS.items()} | settings
    settings["run.gen"] = Setting(arguments.decode, "--decode")
    conditions = make_conditions(settings, arguments.also, assigned_settings(arguments))
    config = _strategy(conditions).config
    if config.model.weights == "random":
        source = settings["model.weights"].source
        raise ConfigError(f"random weights (from {source}): their perplexity means nothing; allowed are real and auto")
    contents = _read_texts(arguments.text)
    if arguments.report is not None and not arguments.report.resolve().parent.is_dir():
        raise ConfigError(f"--report {arguments.report}: the folder does not exist")

    context, decode = arguments.context, arguments.decode
    conditions = [replace(some, config=build.with_kv_share(some.config, context + decode)) for some in conditions]
    choice = build.choose_model(config)
    _check_positions(choice, context, decode)
    plan = _admit(choice, conditions, context, decode)
    weights = _load(choice, memory_plan.settled(config, plan))
    with ExitStack() as stack:
        llms: list[LLM] = []
        for condition in conditions:
            if llms:
                llms.append(stack.enter_context(llms[0].sharing(condition.config)))
            else:
                llms.append(stack.enter_context(LLM.from_parts(condition.config, choice, weights)))
            llms[-1].telemetry.enabled = False
        texts = _cut(llms[0].tokenizer, contents, arguments)
        return _evaluate(llms, conditions, texts, arguments)


def _parser() -> Parser:
    parser = Parser(
        "hybridgen.evaluate", description="Quality against full attention, from the same prefill and paired."
    )
    parser.add_argument("--tasks", default="perplexity", metavar="T,...", help=f"of: {', '.join(TASKS)}")
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="F", help="a UTF-8 text; repeatable")
    parser.add_argument("--context", type=_count, default=2048, metavar="N", help="tokens prefilled (default 2048)")
    parser.add_argument("--decode", type=_count, default=64, metavar="N", help="tokens scored a passage (default 64)")
    parser.add_argument("--passages", type=_count, default=40, metavar="N", help="passages a text (default 40)")
    parser.add_argument(
        "--batch", dest="run.batch", type=int, metavar="N", help=f"passages at a time (default {BATCH})"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="WORD=VALUE,...",
        help=f"a further condition from the same prefill; words: {_STRATEGY}, {', '.join(_VARIANT_WORDS)}, and "
        "settings by their dotted names; repeatable",
    )
    add_engine_flags(parser, leave_out=("--seq", "--gen", "--batch", "--seed"))
    parser.add_argument("--report", type=Path, metavar="F", help="write a JSON report, anew after each batch")
    return parser


def _count(text: str) -> int:
    number = parse_tokens(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 1")
    return number


def make_conditions(settings: Settings, also: Sequence[str], assigned: Settings | None = None) -> list[Condition]:
    """Full attention, then the strategy of `settings`, then one condition an `--also`.

    assigned: the flags among the settings, which hold for another strategy of an `--also`, too. Strategy full is
    compared with nothing and stands alone.
    """
    base = build_config(settings)
    executor = base.attention.executor
    if executor == "full":
        if also:
            raise ConfigError(f"--also {also[0]}: strategy full is what all others are compared with, give another")
        return [Condition("full attention", base)]
    configs, names = [base], [""]
    for text in also:
        variant = parse_variant(text)
        strategy = variant.pop(_STRATEGY, None)
        given = settings
        if strategy is not None:
            given = merge_settings(load_strategy(str(strategy.value)), assigned or {})
            given = {path: Setting(value, "the default") for path, value in _DEFAULTS.items()} | given
            given["run.gen"] = settings.get("run.gen", Setting(base.run.gen, "the default"))
        configs.append(build_config(merge_settings(given, variant)))
        _check_variant(text, variant, configs[-1].attention.executor)
        names.append("" if strategy is None else f"{strategy.value}: ")
    if any(config.attention.executor == "evicting" and config.eviction.prefill == "windowed" for config in configs):
        raise ConfigError(
            "eviction.prefill = 'windowed': all conditions continue from full attention's prefill "
            "(allowed here: 'dense')"
        )
    full = replace(base, attention=replace(base.attention, executor="full"))
    conditions = [Condition("full attention", full)]
    for name, config, text in zip(names, configs, ["", *also], strict=True):
        name += _name(config, configs)
        is_new = name not in [condition.name for condition in conditions]
        conditions.append(Condition(name if is_new else f"{name} ({text})", config))
    return conditions


def _check_variant(text: str, variant: Settings, executor: str) -> None:
    """ConfigError for what would have no effect, or one on more than the condition."""
    if executor == "full":
        raise ConfigError(f"--also {text}: strategy full is what all others are compared with, give another")
    for path in variant:
        section = path.split(".")[0]
        if path != "model.exact_layers_mode" and section not in ("selection", "attention", "cache", "eviction"):
            raise ConfigError(
                f"--also {text}: {path} is the same for all conditions (allowed are settings of selection, attention, "
                "cache and eviction, and model.exact_layers_mode)"
            )
        if (section == "eviction") != (executor == "evicting") or (section == "selection" and executor != "hybrid"):
            why = {"evicting": "evicts", "hybrid": "evicts nothing"}.get(executor, "chooses nothing")
            raise ConfigError(f"--also {text}: {path} has no effect, as attention.executor = {executor!r} {why}")


def _strategy(conditions: Sequence[Condition]) -> Condition:
    """The condition that the flags describe: the first after full attention, or full attention itself."""
    return conditions[:2][-1]


def parse_variant(text: str) -> Settings:
    """`keep=0.1,lookahead=off`: the words are those of the flags, `strategy`, or settings by their dotted names."""
    source, variant = f"--also {text}", Settings()
    for part in text.split(","):
        word, _, value = (piece.strip() for piece in part.partition("="))
        if word == _STRATEGY:
            variant[_STRATEGY] = Setting(value, source)
            continue
        if "." in word:
            variant |= {path: Setting(setting.value, source) for path, setting in parse_assignment(part).items()}
            continue
        if word not in _VARIANT_WORDS:
            raise UnknownNameError(f"word in {source}:", word, [_STRATEGY, *_VARIANT_WORDS], "each as WORD=VALUE")
        path, read = _VARIANT_WORDS[word]
        try:
            variant[path] = Setting(read(value), source)
        except (ValueError, argparse.ArgumentTypeError):
            raise ConfigError(f"{source}: {value!r} is no value for {word}") from None
    return variant


def _name(config: Config, all_configs: Sequence[Config]) -> str:
    """What is chosen and by which query; window and min-keep where the conditions differ in them."""
    selection = config.selection
    if config.attention.executor == "evicting":
        eviction = config.eviction
        return f"{eviction.policy}, sinks {eviction.sinks}, heavy {eviction.heavy}, recent {eviction.recent}"
    if config.attention.executor != "hybrid":
        packed = "" if config.cache.compress == "none" else f", {config.cache.compress} in groups"
        return f"all tokens, {config.attention.executor}{packed}"
    words = [
        f"{word} {value}"
        for word, value in (("keep", selection.keep), ("keep-mass", selection.keep_mass))
        if value is not None
    ]
    words.append(f"lookahead {config.attention.lookahead}")
    if len({other.attention.predictor for other in all_configs}) > 1:
        words.append(f"predictor {config.attention.predictor}")
    if len({other.selection.min_keep for other in all_configs}) > 1:
        words.append(f"min-keep {selection.min_keep}")
    if len({other.cache.gpu_window for other in all_configs}) > 1:
        words.append(f"gpu-window {config.cache.gpu_window}")
    if len({other.cache.key_type for other in all_configs}) > 1:
        words.append(f"key-type {config.cache.key_type}")
    if len({other.cache.sketch for other in all_configs}) > 1:
        words.append(f"sketch {config.cache.sketch}")
    return ", ".join(words)


def _read_texts(files: Sequence[Path]) -> list[tuple[Path, str]]:
    if not files:
        raise ConfigError("--tasks perplexity needs a text: --text FILE")
    texts = []
    for file in files:
        try:
            texts.append((file, file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {file}: {getattr(error, 'strerror', None) or error}") from None
    return texts


def _check_positions(choice: ModelChoice, context: int, decode: int) -> None:
    """Beyond a learned position table there is only speed; rotary models are checked by `admit`."""
    limit = choice.spec.max_positions
    if choice.spec.family == "opt" and context + decode > limit:
        raise ConfigError(
            f"--context {context} and --decode {decode} exceed {choice.spec.name}'s {limit} learned "
            "positions: perplexity there means nothing; give a smaller --context"
        )


def _admit(choice: ModelChoice, conditions: Sequence[Condition], context: int, decode: int) -> MemoryPlan:
    """Print the plan of all conditions together, and return it; refuse it with what to change."""
    config = _strategy(conditions).config
    batch, capacity = config.run.batch, context + decode
    limits = memory_plan.memory_limits(config, choice.device)
    plan = plan_conditions(choice, conditions, batch, capacity)
    if not plan.fits(*limits):
        compact = choice.with_dtype(torch.bfloat16)
        changes: list[tuple[str, ModelChoice, Sequence[Condition], int]] = [
            (f"--batch {size}", choice, conditions, size) for size in range(batch - 1, 0, -1)
        ]
        changes += [
            ("--batch 1 without --also", choice, conditions[:2], 1),
            ("--batch 1 --dtype bfloat16 without --also", compact, conditions[:2], 1),
        ]
        fitting = (
            change
            for change, candidate, some, size in changes
            if plan_conditions(candidate, some, size, capacity).fits(*limits)
        )
        raise InsufficientMemoryError(
            f"{choice.spec.name} with {len(conditions)} conditions of {batch} x {capacity} tokens "
            f"does not fit\n{plan.describe(*limits)}\n"
            f"what would fit: {next(fitting, 'a smaller model or --context')}"
        )
    admission = admit(choice, config, context, decode, batch)
    print(replace(admission, plan=plan, chosen=()).describe())  # what was chosen holds for one condition alone
    return plan


def plan_conditions(choice: ModelChoice, conditions: Sequence[Condition], batch: int, capacity: int) -> MemoryPlan:
    """What all conditions need together: each has its own KV, everything else is used in turn."""
    total = MemoryPlan(device_is_host=choice.device.type == "cpu")
    for condition in conditions:
        modes = layer_modes(condition.config, choice.spec.num_layers)
        plan = memory_plan.plan_memory(choice, condition.config, modes, batch, capacity)
        for items, more in ((total.device, plan.device), (total.host, plan.host)):
            for name, size in more.items():
                items[name] = items.get(name, 0) + size if name in _KV_ITEMS else max(items.get(name, 0), size)
    config = _strategy(conditions).config
    return fit_weights(choice, config, [total], memory_plan.memory_limits(config, choice.device))[1]


def _load(choice: ModelChoice, config: Config) -> ObtainedWeights:
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:
        return build.obtain_weights(choice, config, needs_text=True, progress=_advances(bar))


def _cut(tokenizer: Tokenizer, texts: Sequence[tuple[Path, str]], arguments: argparse.Namespace) -> list[TextResult]:
    start = tokenizer.encode("")  # BOS, where the model wants one
    results = []
    for file, text in texts:
        ids = tokenizer.encode(text)[len(start) :]
        try:
            passages = cut_passages(ids, start, arguments.context, arguments.decode, arguments.passages)
        except ConfigError as error:
            raise ConfigError(f"--text {file}: {error}") from None
        results.append(TextResult(file, len(ids), passages))
    return results


def _evaluate(
    llms: Sequence[LLM],
    conditions: Sequence[Condition],
    texts: Sequence[TextResult],
    arguments: argparse.Namespace,
) -> int:
    """Measure batch by batch; what is finished is always in the report. Returns the exit status."""
    size, head = llms[-1].config.run.batch, _report_head(llms, conditions, arguments)
    batches = [
        (text, text.passages[first : first + size]) for text in texts for first in range(0, len(text.passages), size)
    ]
    tokens = sum(len(passages) for _, passages in batches) * arguments.decode * len(llms)
    report, status = {**head, **_results(conditions, texts)}, 0
    with tqdm(total=tokens, desc="perplexity", unit="token", disable=None) as bar:
        try:
            for text, passages in batches:
                measured = measure(llms, passages, arguments.decode, _advances(bar))
                text.add(measured)
                report = {**head, "machine": describe_machine(llms[-1]), **_results(conditions, texts)}
                bar.set_postfix_str(_running(report))
                if arguments.report is not None:
                    write_report(report, arguments.report)
        except KeyboardInterrupt:
            status = 130
    print(format_table(report))
    if arguments.report is not None and any(text.done for text in texts):
        print(f"report: {arguments.report}")
    return status


def _advances(bar: tqdm[NoReturn]) -> Callable[[int], None]:
    def advance(count: int) -> None:
        bar.update(count)

    return advance


def _report_head(llms: Sequence[LLM], conditions: Sequence[Condition], arguments: argparse.Namespace) -> dict[str, Any]:
    llm = llms[-1]
    return {
        "task": "perplexity",
        "model": llm.spec.name,
        "weights": llm.weights.kind,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "strategy": arguments.strategy,
        "context": arguments.context,
        "decode": arguments.decode,
        "batch": llm.config.run.batch,
        "confidence": CONFIDENCE,
        "conditions": [
            {
                "name": condition.name,
                "covered_mass_kind": _mass_kind(condition.config),
                "exact_layers": {str(i): mode for i, mode in enumerate(llm.modes) if mode != "lookahead"},
                "config": condition.config.to_dict(),
            }
            for llm, condition in zip(llms, conditions, strict=True)
        ],
        "versions": {
            "hybridgen": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": current_commit(),
    }


def _mass_kind(config: Config) -> str | None:
    """By which query the choice judged itself."""
    if config.attention.executor != "hybrid":
        return None
    return "predicted" if config.attention.lookahead == "select" else "exact"


def _results(conditions: Sequence[Condition], texts: Sequence[TextResult]) -> dict[str, Any]:
    """The part of the report that grows. `pooled` treats the passages of all texts alike."""
    started = [text for text in texts if text.done]
    pooled = None
    if len(started) > 1:
        everything = [Measurement() for _ in conditions]
        for text in started:
            for total, measured in zip(everything, text.measurements, strict=True):
                total.extend(measured)
        pooled = summarise(everything)
    return {
        "complete": all(text.done == len(text.passages) for text in texts),
        "texts": [
            {
                "file": str(text.file),
                "tokens": text.tokens,
                "passages": len(text.passages),
                "first_tokens": [passage.first for passage in text.passages[: text.done]],
                "measured": [asdict(measured) for measured in text.measurements],
                "results": summarise(text.measurements) if text.done else [],
            }
            for text in texts
        ],
        "pooled": pooled,
    }


def _running(report: dict[str, Any]) -> str:
    """The estimate so far, over all texts, for the progress bar."""
    rows = report["pooled"] or report["texts"][0]["results"]
    words = [f"full {rows[0]['perplexity']['value']:.3f}"]
    words += [f"{row['against_full']['percent']['value']:+.2f} %" for row in rows[1:]]
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
