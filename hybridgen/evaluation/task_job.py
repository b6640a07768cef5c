"""The job `--tasks piqa,...`: questions, batches, results item by item, the report that grows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from hybridgen.config import Settings, with_settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.llm import LLM
from hybridgen.engine.prefill import LOGITS_AT_ONCE
from hybridgen.engine.report import describe_machine, write_report
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.errors import ConfigError
from hybridgen.evaluation.conditions import (
    Condition,
    admit_conditions,
    advances,
    identity,
    make_conditions,
    open_conditions,
    report_head,
    strategy_of,
)
from hybridgen.evaluation.item_store import Item, ItemStore
from hybridgen.evaluation.loglikelihood import Request, cut_batches, encode, score
from hybridgen.evaluation.processes import Processes, join
from hybridgen.evaluation.task_results import format_tasks, mean_of_tasks, summarise_task
from hybridgen.evaluation.tasks import TaskData, find_task, load_task
from hybridgen.models.tokenizer import Tokenizer, load_tokenizer
from hybridgen.output import write_whole

CHARACTERS_A_TOKEN = 2  # at least, of English text: where the tokenizer has yet to be downloaded
REPORT = "evaluate.json"


@dataclass
class _Work:
    """A task on its way. batches: of questions, by their index; items: of the finished ones, by their id."""

    data: TaskData
    requests: list[list[Request]]  # by question, one a choice
    batches: list[list[int]]
    store: ItemStore
    items: dict[int, Item]

    def add(self, items: Sequence[Item]) -> None:
        """Of a finished batch."""
        if items:
            self.store.append(items)
            self.items.update({item["id"]: item for item in items})

    def is_done(self, batch: Sequence[int]) -> bool:
        return all(self.data.questions[index].id in self.items for index in batch)

    def steps(self, batch: Sequence[int]) -> int:
        """Tokens that each condition is fed after the prefill, for the progress bar."""
        flat = self.requests_of(batch)
        return len(flat) * max(one.steps for one in flat)

    def requests_of(self, batch: Sequence[int]) -> list[Request]:
        return [request for index in batch for request in self.requests[index]]


def run(arguments: argparse.Namespace, tasks: Sequence[str], settings: Settings, assigned: Settings) -> int:
    """The job, from parsed flags; returns the exit status."""
    with join() as processes:
        return _run(arguments, tasks, settings, assigned, processes)


def _run(
    arguments: argparse.Namespace,
    tasks: Sequence[str],
    settings: Settings,
    assigned: Settings,
    processes: Processes,
) -> int:
    if arguments.data is None:
        raise ConfigError(f"--tasks {arguments.tasks} needs the folder of their JSONL files: --data DIR")
    conditions = make_conditions(settings, arguments.also, assigned)
    config = strategy_of(conditions).config
    if config.model.weights == "random":
        source = settings["model.weights"].source
        raise ConfigError(f"random weights (from {source}): their answers mean nothing; allowed are real and auto")
    seed = config.run.seed
    data = [
        load_task(find_task(task), arguments.data, arguments.limit, arguments.num_fewshot, seed) for task in tasks
    ]
    choice = build.choose_model(config)
    prompt, decode = _longest(choice, data, arguments.decode_from)
    conditions = [
        replace(one, config=build.with_kv_share(with_settings(one.config, {"run.gen": decode}), prompt + decode))
        for one in conditions
    ]
    rows = max(LOGITS_AT_ONCE, config.run.batch)
    plan = admit_conditions(choice, conditions, prompt, decode, "--num-fewshot", rows)
    with open_conditions(conditions, choice, plan) as llms:
        works = [_prepare(llms, conditions, one, arguments, processes) for one in data]
        return _evaluate(llms, conditions, works, arguments, processes)


def _longest(choice: ModelChoice, data: Sequence[TaskData], decode_from: int | None) -> tuple[int, int]:
    """Tokens of the longest prefill, and the most that follow one; guessed where the tokenizer is not here yet."""
    most = choice.spec.max_positions
    if choice.location.needs_download:
        lengths = [
            len(prefix) + len(question.context) + max(map(len, question.continuations))
            for one in data
            for question, prefix in zip(one.questions, one.prefixes, strict=True)
        ]
        whole = min(most, max(lengths) // CHARACTERS_A_TOKEN)
        return whole, whole
    tokenizer = load_tokenizer(choice.location.prepare())
    flat = [
        request
        for one in data
        for group in _encoded(tokenizer, one, decode_from, most)
        for request in group
    ]
    return max(one.prefilled for one in flat), max(max(one.steps for one in flat), 1)


def _encoded(tokenizer: Tokenizer, data: TaskData, decode_from: int | None, most: int) -> list[list[Request]]:
    return [
        [encode(tokenizer, prefix, question.context, text, decode_from, most) for text in question.continuations]
        for question, prefix in zip(data.questions, data.prefixes, strict=True)
    ]


def _prepare(
    llms: Sequence[LLM],
    conditions: Sequence[Condition],
    data: TaskData,
    arguments: argparse.Namespace,
    processes: Processes,
) -> _Work:
    llm = llms[-1]
    requests = _encoded(llm.tokenizer, data, arguments.decode_from, llm.spec.max_positions)
    batches = cut_batches(requests, llm.config.run.batch)
    folder = arguments.out if processes.is_first else None  # the others hand in what they find
    store = ItemStore(folder, data.task.name, _identity(llms, conditions, data, arguments))
    ids = [[data.questions[index].id for index in batch] for batch in batches]
    return _Work(data, requests, batches, store, processes.from_first(store.load(ids)))


def _identity(
    llms: Sequence[LLM], conditions: Sequence[Condition], data: TaskData, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All that an item depends on, but the code; the limit, as batches depend on it."""
    return {
        **identity(llms, conditions),
        "data": data.digest,
        "num_fewshot": arguments.num_fewshot,
        "limit": arguments.limit,
        "decode_from": arguments.decode_from,
    }


def _evaluate(
    llms: Sequence[LLM],
    conditions: Sequence[Condition],
    works: Sequence[_Work],
    arguments: argparse.Namespace,
    processes: Processes,
) -> int:
    """Batch by batch; what is finished is always in the report. Returns the exit status.

    Batches are the same however many processes there are, and go round them.
    """
    head, status = _report_head(llms, conditions, arguments, processes), 0
    steps = [(work.steps(batch), work.is_done(batch)) for work in works for batch in work.batches]
    total, done = (len(llms) * sum(count for count, is_done in steps if is_done or all_) for all_ in (True, False))
    if done:
        print(f"{sum(len(work.items) for work in works)} questions are in {arguments.out} already")
    hidden = None if processes.is_first else True
    with tqdm(total=total, initial=done, desc="questions", unit="token", disable=hidden) as bar:
        try:
            for work in works:
                bar.set_description_str(work.data.task.name)
                left = [batch for batch in work.batches if not work.is_done(batch)]
                for first in range(0, len(left), processes.count):
                    batches = left[first : first + processes.count]
                    mine = batches[processes.rank] if processes.rank < len(batches) else []
                    measured = processes.gather(_measure(llms, work, mine, advances(bar)))
                    bar.update(len(llms) * sum(work.steps(batch) for batch in batches if batch is not mine))
                    for items in measured:
                        work.add(items)
                    if processes.is_first:
                        bar.set_postfix_str(_running(work))
                if processes.is_first:
                    _write(_report(head, llms, works), arguments)
        except KeyboardInterrupt:
            status = 130
    if not processes.is_first:
        return status
    report = _report(head, llms, works)
    _write(report, arguments)
    print(format_tasks(report))
    for note in _notes(report):
        print(f"note: {note}")
    for path in (arguments.report, arguments.out):
        if path is not None:
            print(f"report: {path if path is arguments.report else path / REPORT}")
    return status


def _measure(
    llms: Sequence[LLM], work: _Work, batch: Sequence[int], on_step: Callable[[int], None]
) -> list[Item]:
    """The items of a batch of questions, if there is one. What was attended to is known of the batch alone."""
    if not batch:
        return []
    statistics = [AttentionStatistics() for _ in llms]
    scores = score(llms, work.requests_of(batch), statistics, on_step)
    attended = [some.summary() if some.steps else None for some in statistics]
    items: list[Item] = []
    first = 0
    for index in batch:
        last = first + len(work.requests[index])
        results = [[[one.log_likelihood, one.is_greedy] for one in some[first:last]] for some in scores]
        items.append({"id": work.data.questions[index].id, "results": results, "attended": attended})
        first = last
    return items


def _report_head(
    llms: Sequence[LLM], conditions: Sequence[Condition], arguments: argparse.Namespace, processes: Processes
) -> dict[str, Any]:
    return {
        "task": "questions",
        **report_head(llms, conditions, arguments.strategy),
        "processes": processes.count,
        "num_fewshot": arguments.num_fewshot,
        "limit": arguments.limit,
        "decode_from": arguments.decode_from,
        "seed": llms[-1].config.run.seed,
    }


def _report(head: Mapping[str, Any], llms: Sequence[LLM], works: Sequence[_Work]) -> dict[str, Any]:
    results = [summarise_task(work.data.task, work.data.questions, work.items) for work in works]
    return {
        **head,
        "machine": describe_machine(llms[-1]),
        "complete": all(len(work.items) == len(work.data.questions) for work in works),
        "tasks": [
            {
                "name": work.data.task.name,
                "metrics": list(work.data.task.metrics),
                "main_metric": work.data.task.main,
                "file": str(work.data.file),
                "examples_file": None if work.data.examples_file is None else str(work.data.examples_file),
                "sha256": work.data.digest,
                "items": None if work.store.path is None else work.store.path.name,
                "questions": len(work.data.questions),
                "cut_requests": sum(request.cut > 0 for group in work.requests for request in group),
                "results": found,
            }
            for work, found in zip(works, results, strict=True)
        ],
        "mean": mean_of_tasks([(work.data.task, found) for work, found in zip(works, results, strict=True)]),
    }


def _write(report: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.report is not None:
        write_report(dict(report), arguments.report)
    if arguments.out is not None:
        write_whole("--out", arguments.out / REPORT, json.dumps(report, indent=1))


def _notes(report: Mapping[str, Any]) -> list[str]:
    """What the figures do not say by themselves."""
    notes = []
    for index, condition in enumerate(report["conditions"][1:], start=1):
        budgets = [task["results"][index]["budget"] for task in report["tasks"] if task["results"]]
        if budgets and min(budgets) == 1.0:
            notes.append(
                f"{condition['name']}: everything was attended to. Rows leave the device in blocks of 64, after sinks "
                "and window: longer questions (--num-fewshot), a smaller --gpu-window and --min-keep 0 leave a choice; "
                "what evicts goes by eviction.recent and eviction.heavy"
            )
    for task in report["tasks"]:
        if task["cut_requests"]:
            notes.append(f"{task['name']}: {task['cut_requests']} texts were too long for the model: their ends count")
    return notes


def _running(work: _Work) -> str:
    """The main metric so far, for the progress bar."""
    results = summarise_task(work.data.task, work.data.questions, work.items)
    return ", ".join(f"{100 * result['metrics'][work.data.task.main]['value']:.1f}" for result in results)
