"""The job `--tasks perplexity`: texts, passages, batches, the report that grows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hybridgen.config import Setting, Settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import describe_machine, write_report
from hybridgen.errors import ConfigError
from hybridgen.evaluation.conditions import (
    Condition,
    admit_conditions,
    advances,
    make_conditions,
    open_conditions,
    report_head,
    strategy_of,
)
from hybridgen.evaluation.perplexity import Measurement, Passage, cut_passages, measure, summarise
from hybridgen.evaluation.quality_table import format_table
from hybridgen.models.tokenizer import Tokenizer


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


def run(arguments: argparse.Namespace, settings: Settings, assigned: Settings) -> int:
    """The job, from parsed flags; returns the exit status."""
    settings["run.gen"] = Setting(arguments.decode, "--decode")
    conditions = make_conditions(settings, arguments.also, assigned)
    config = strategy_of(conditions).config
    if config.model.weights == "random":
        source = settings["model.weights"].source
        raise ConfigError(f"random weights (from {source}): their perplexity means nothing; allowed are real and auto")
    contents = _read_texts(arguments.text)

    context, decode = arguments.context, arguments.decode
    conditions = [replace(some, config=build.with_kv_share(some.config, context + decode)) for some in conditions]
    choice = build.choose_model(config)
    _check_positions(choice, context, decode)
    plan = admit_conditions(choice, conditions, context, decode, "--context")
    with open_conditions(conditions, choice, plan) as llms:
        texts = _cut(llms[0].tokenizer, contents, arguments)
        return _evaluate(llms, conditions, texts, arguments)


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
                measured = measure(llms, passages, arguments.decode, advances(bar))
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


def _report_head(llms: Sequence[LLM], conditions: Sequence[Condition], arguments: argparse.Namespace) -> dict[str, Any]:
    head = report_head(llms, conditions, arguments.strategy)
    return {"task": "perplexity", **head, "context": arguments.context, "decode": arguments.decode}


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
