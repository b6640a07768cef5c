"""`python -m hybridgen.evaluate`: what a strategy costs in quality, measured against full attention.

`--tasks perplexity`: on texts. `--tasks needle`: is a hidden fact found? `--tasks piqa,rte,...`: the choices of
questions. Every condition (the strategy, and each `--also`) continues from the same exact prefill as full attention, so
that differences are paired.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridgen.cli import Parser, add_engine_flags, assigned_settings, given_settings, run_command
from hybridgen.config import Setting
from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.evaluation import needle_job, perplexity_job, task_job
from hybridgen.evaluation.conditions import DEFAULTS, VARIANT_HELP
from hybridgen.evaluation.processes import started, take_own_share
from hybridgen.evaluation.tasks import TASKS
from hybridgen.output import check_output_path
from hybridgen.quantities import parse_tokens

PERPLEXITY, NEEDLE, QUESTIONS = "perplexity", "needle", "questions"  # the jobs; the last one has several tasks
BATCH = {PERPLEXITY: 8, NEEDLE: 5, QUESTIONS: 64}  # sequences at a time, unless --batch or --set says otherwise
# Flags of each job, and their defaults.
_FLAGS: dict[str, dict[str, Any]] = {
    PERPLEXITY: {"text": [], "context": 2048, "decode": 64, "passages": 40},
    NEEDLE: {"lengths": needle_job.LENGTHS, "depths": needle_job.DEPTHS, "documents": 1, "out": None},
    QUESTIONS: {"data": None, "num_fewshot": 0, "limit": None, "decode_from": None, "out": None},
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    take_own_share()
    arguments = _parser().parse_args(argv)
    tasks = [task.strip() for task in arguments.tasks.split(",")]
    for task in tasks:
        if task not in (PERPLEXITY, NEEDLE, *TASKS):
            raise UnknownNameError("task", task, (PERPLEXITY, NEEDLE, *TASKS))
    if len(set(tasks)) < len(tasks):
        raise ConfigError(f"--tasks {arguments.tasks}: a task is named twice")
    job = next((task for task in tasks if task in (PERPLEXITY, NEEDLE)), QUESTIONS)
    if job != QUESTIONS and len(tasks) > 1:
        raise ConfigError(f"--tasks {arguments.tasks}: {job} goes by itself, as its flags are others")
    if job != QUESTIONS and started() > 1:
        raise ConfigError(f"--tasks {job} is the job of one process, the launcher started {started()}")
    _settle(arguments, job)
    check_output_path("--report", arguments.report)

    defaults = {**DEFAULTS, "run.batch": BATCH[job]}
    settings = {path: Setting(value, "the default") for path, value in defaults.items()} | given_settings(arguments)
    assigned = assigned_settings(arguments)
    if job == QUESTIONS:
        return task_job.run(arguments, tasks, settings, assigned)
    if job == NEEDLE:
        return needle_job.run(arguments, settings, assigned)
    return perplexity_job.run(arguments, settings, assigned)


def _settle(arguments: argparse.Namespace, job: str) -> None:
    """Flags that were not given get their defaults; ConfigError for one that was given and has no effect."""
    for name in [name for flags in _FLAGS.values() for name in flags]:
        if getattr(arguments, name) is None:
            setattr(arguments, name, _FLAGS[job].get(name))
        elif name not in _FLAGS[job]:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect on --tasks {arguments.tasks}")


def _parser() -> Parser:
    parser = Parser(
        "hybridgen.evaluate", description="Quality against full attention, from the same prefill and paired."
    )
    known = ", ".join((PERPLEXITY, NEEDLE, *TASKS))
    parser.add_argument("--tasks", default=PERPLEXITY, metavar="T,...", help=f"of: {known} (default {PERPLEXITY})")
    parser.add_argument("--text", type=Path, action="append", metavar="F", help="perplexity: a UTF-8 text; repeatable")
    parser.add_argument("--context", type=_count, metavar="N", help="perplexity: tokens prefilled (default 2048)")
    parser.add_argument("--decode", type=_count, metavar="N", help="perplexity: tokens scored a passage (default 64)")
    parser.add_argument("--passages", type=_count, metavar="N", help="perplexity: passages a text (default 40)")
    parser.add_argument(
        "--lengths",
        type=needle_job.parse_lengths,
        metavar="N,...",
        help="needle: tokens of the documents, the question included (default eight, 512 to 4k)",
    )
    parser.add_argument(
        "--depths", type=_count, metavar="N", help="needle: places of the fact, evenly from start to end (default 10)"
    )
    parser.add_argument(
        "--documents", type=_count, metavar="N", help="needle: documents of each length and depth (default 1)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="questions: the folder of the tasks' JSONL files")
    parser.add_argument(
        "--num-fewshot", type=_shots, metavar="N", help="questions: examples before each question (default 0)"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="questions: the first N of each task (default all)")
    parser.add_argument(
        "--decode-from",
        type=_count,
        metavar="N",
        help="questions: tokens of the context, its last ones, that go through decode (default: the whole question "
        "after examples, else 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="needle, questions: results, item by item; what is there is not done again",
    )
    parser.add_argument(
        "--batch",
        dest="run.batch",
        type=int,
        metavar="N",
        help=f"sequences at a time (default {BATCH[PERPLEXITY]} passages, {BATCH[NEEDLE]} documents, "
        f"{BATCH[QUESTIONS]} choices)",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="WORD=VALUE,...",
        help=f"a further condition from the same prefill; words: {VARIANT_HELP}, and "
        "settings by their dotted names; repeatable",
    )
    add_engine_flags(parser, leave_out=("--seq", "--gen", "--batch", "--seed", "--synthetic-kv"))
    parser.add_argument("--report", type=Path, metavar="F", help="write a JSON report, anew after each batch")
    return parser


def _count(text: str) -> int:
    number = parse_tokens(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 1")
    return number


def _shots(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
