"""The job `--tasks needle`: is a fact found again that stands at some depth of a document of some length?

A document (`document.py`) is prefilled up to where its question begins, once for all conditions. The question then goes
token by token through decode steps, so that the strategy is at work on all of it, and each condition goes on with what
it finds likeliest itself. Every cell (length, depth, which document of these) has a document of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm

from hybridgen.config import Config, Settings, with_settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.llm import LLM
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
from hybridgen.evaluation.document import Document, hidden_fact_document
from hybridgen.evaluation.item_store import Item, ItemStore
from hybridgen.evaluation.needle_results import format_needle, summarise_needle, write_heat_map
from hybridgen.models.tokenizer import Tokenizer, load_tokenizer
from hybridgen.output import write_whole
from hybridgen.quantities import parse_tokens

LENGTHS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
DEPTHS = 10
REPORT, HEAT_MAP = "needle.json", "needle.png"
QUESTION_TOKENS, ANSWER_TOKENS = 48, 8  # where the tokenizer has yet to be downloaded


@dataclass(frozen=True)
class Cell:
    """A length in tokens, the question included, a depth in [0, 1], and the seed of the document's words."""

    id: int
    length: int
    depth: float
    seed: int


@dataclass
class _Work:
    """The job on its way. batches: of equally long documents, by their cell; items: of finished cells, by their id."""

    cells: list[Cell]
    documents: list[Document]
    answer_tokens: int  # that each condition generates
    batches: list[list[int]]
    store: ItemStore
    items: dict[int, Item]

    def is_done(self, batch: Sequence[int]) -> bool:
        return all(index in self.items for index in batch)

    def of(self, batch: Sequence[int]) -> list[Document]:
        return [self.documents[index] for index in batch]

    def tokens(self, batch: Sequence[int]) -> int:
        """That each condition is fed after the prefill, for the progress bar."""
        return len(batch) * (most_question_tokens(self.of(batch)) + self.answer_tokens - 1)


def parse_lengths(text: str) -> tuple[int, ...]:
    """`512,1k,4k`: ascending, each once."""
    lengths = sorted(parse_tokens(part.strip()) for part in text.split(","))
    if lengths[0] < 1 or len(set(lengths)) < len(lengths):
        raise argparse.ArgumentTypeError(f"{text!r} are not different numbers >= 1")
    return tuple(lengths)


def make_cells(lengths: Sequence[int], depths: int, documents: int, seed: int) -> list[Cell]:
    """By length, then depth: `depths` of them evenly from 0 to 1 (the middle, if one). Seeds count up from `seed`."""
    places = [index / (depths - 1) for index in range(depths)] if depths > 1 else [0.5]
    grid = [(length, place) for length in lengths for place in places for _ in range(documents)]
    return [Cell(index, length, place, seed + index) for index, (length, place) in enumerate(grid)]


def run(arguments: argparse.Namespace, settings: Settings, assigned: Settings) -> int:
    """The job, from parsed flags; returns the exit status."""
    conditions = make_conditions(settings, arguments.also, assigned)
    config = strategy_of(conditions).config
    if config.model.weights == "random":
        source = settings["model.weights"].source
        raise ConfigError(f"random weights (from {source}): their answers mean nothing; allowed are real and auto")
    cells = make_cells(arguments.lengths, arguments.depths, arguments.documents, config.run.seed)
    choice = build.choose_model(config)
    longest, question, answer, documents = arguments.lengths[-1], QUESTION_TOKENS, ANSWER_TOKENS, None
    if not choice.location.needs_download:
        tokenizer = load_tokenizer(choice.location.prepare())
        documents = _documents(tokenizer, cells)
        question, answer = most_question_tokens(documents), most_answer_tokens(tokenizer, documents)
    _check_positions(choice, config, longest + answer)
    prompt, decode = max(1, longest - question), question + answer - 1
    conditions = [
        replace(one, config=build.with_kv_share(with_settings(one.config, {"run.gen": decode}), prompt + decode))
        for one in conditions
    ]
    plan = admit_conditions(choice, conditions, prompt, decode, "--lengths")
    with open_conditions(conditions, choice, plan) as llms:
        tokenizer = llms[0].tokenizer
        documents = documents or _documents(tokenizer, cells)
        batches = cut_batches(cells, config.run.batch)
        store = ItemStore(arguments.out, "needle", _identity(llms, conditions, arguments))
        items = store.load(batches)
        work = _Work(cells, documents, most_answer_tokens(tokenizer, documents), batches, store, items)
        return _evaluate(llms, conditions, work, arguments)


def _documents(tokenizer: Tokenizer, cells: Sequence[Cell]) -> list[Document]:
    return [hidden_fact_document(tokenizer, cell.length, cell.seed, cell.depth, "--lengths") for cell in cells]


def most_question_tokens(documents: Sequence[Document]) -> int:
    """Of the longest question."""
    return max(len(document.question_tokens) for document in documents)


def most_answer_tokens(tokenizer: Tokenizer, documents: Sequence[Document]) -> int:
    """Enough to judge each: the answer, what shows that it ends there, and one for a blank before it."""
    start = len(tokenizer.encode(""))  # BOS, where the model wants one
    return max(len(tokenizer.encode(f" {document.answer}.")) - start for document in documents) + 1


def cut_batches(cells: Sequence[Cell], sequences: int) -> list[list[int]]:
    """Ids of up to `sequences` cells of one length."""
    batches: list[list[int]] = []
    for _, group in groupby(cells, key=lambda cell: cell.length):
        ids = [cell.id for cell in group]
        batches += [ids[first : first + sequences] for first in range(0, len(ids), sequences)]
    return batches


def _check_positions(choice: ModelChoice, config: Config, tokens: int) -> None:
    """Beyond a learned position table there is only speed; far beyond rotary ones there is nothing to be found."""
    limit = choice.spec.max_positions
    if choice.spec.family == "opt" and tokens > limit:
        raise ConfigError(
            f"--lengths: {tokens} tokens, the answer included, exceed {choice.spec.name}'s {limit} learned positions: "
            "what is found there means nothing; give smaller ones"
        )
    try:
        build.check_positions(choice, tokens, config.model.extend_positions)
    except ConfigError as error:
        raise ConfigError(f"--lengths: {error}") from None


def _identity(
    llms: Sequence[LLM], conditions: Sequence[Condition], arguments: argparse.Namespace
) -> dict[str, Any]:
    """All that an item depends on, but the code; the whole grid, as seeds and batches depend on it."""
    return {
        **identity(llms, conditions),
        "lengths": list(arguments.lengths),
        "depths": arguments.depths,
        "documents": arguments.documents,
    }


def _evaluate(
    llms: Sequence[LLM], conditions: Sequence[Condition], work: _Work, arguments: argparse.Namespace
) -> int:
    """Batch by batch; what is finished is always in the report. Returns the exit status."""
    head, status = _report_head(llms, conditions, work, arguments), 0
    total, done = (
        len(llms) * sum(work.tokens(batch) for batch in work.batches if work.is_done(batch) or all_)
        for all_ in (True, False)
    )
    if done:
        print(f"{len(work.items)} of {len(work.cells)} cells are in {arguments.out} already")
    report = _report(head, llms, work)
    with tqdm(total=total, initial=done, desc="needle", unit="token", disable=None) as bar:
        try:
            for batch in work.batches:
                if work.is_done(batch):
                    continue
                items = _measure(llms, work, batch, advances(bar))
                work.store.append(items)
                work.items.update({item["id"]: item for item in items})
                report = _report(head, llms, work)
                bar.set_postfix_str(", ".join(f"{one['right']}/{one['cells']}" for one in report["results"]))
                _write(report, arguments)
        except KeyboardInterrupt:
            status = 130
    _write(report, arguments)
    print(format_needle(report))
    if arguments.report is not None:
        print(f"report: {arguments.report}")
    if arguments.out is not None:
        missing = write_heat_map(report, arguments.out / HEAT_MAP)
        print(f"report: {arguments.out / REPORT}")
        print(f"heat map: {arguments.out / HEAT_MAP}" if missing is None else f"no heat map: {missing}")
    return status


def _measure(llms: Sequence[LLM], work: _Work, batch: Sequence[int], on_step: Callable[[int], None]) -> list[Item]:
    """The items of a batch. What was attended to is known of the batch alone."""
    documents, statistics = work.of(batch), [AttentionStatistics() for _ in llms]
    answers = answer(llms, documents, work.answer_tokens, statistics, on_step)
    attended = [some.summary() for some in statistics]
    texts = [[_text(llm, ids) for ids in some] for llm, some in zip(llms, answers, strict=True)]
    layout = build.window_layout(llms[:2][-1].config)  # of the strategy that the flags describe
    left = layout.sinks + layout.host_rows(len(documents[0].ids) - most_question_tokens(documents))
    return [
        {
            **asdict(work.cells[index]),
            "expected": document.answer,
            "beyond_window": document.fact_tokens.stop <= left,
            "answers": [some[place] for some in texts],
            "right": [document.is_answered_by(some[place]) for some in texts],
            "attended": attended,
        }
        for place, (index, document) in enumerate(zip(batch, documents, strict=True))
    ]


@torch.inference_mode()
def answer(
    llms: Sequence[LLM],
    documents: Sequence[Document],
    tokens: int,
    statistics: Sequence[AttentionStatistics],
    on_step: Callable[[int], None] = lambda sequences: None,
) -> list[list[list[int]]]:
    """`tokens` generated ids for each LLM and document, greedy; documents of one length, one prefill by the first LLM.

    All documents take as many decode steps as the longest question has tokens: before a shorter one, the last tokens
    of the text. statistics: one an LLM, told of each step. on_step: called with the number of sequences after each.
    """
    ids = torch.tensor([document.ids for document in documents])
    length = ids.shape[1]
    asks = most_question_tokens(documents)
    batches = [llm.new_batch([length + tokens - 1] * len(documents)) for llm in llms]  # the last one is not fed
    llms[0].prefill(batches[0], ids[:, : length - asks].tolist(), mirrors=batches[1:])
    question = ids[:, length - asks :].t().contiguous().to(llms[0].device)  # [tokens of the question, B]
    results = []
    for llm, batch, observed in zip(llms, batches, statistics, strict=True):
        said: list[torch.Tensor] = []
        for step in range(asks + tokens - 1):
            llm.telemetry.begin_step()
            logits = llm.decode(batch, question[step] if step < asks else said[-1])
            observed.observe(batch)
            if step >= asks - 1:
                said.append(logits.argmax(-1))
            on_step(len(documents))
        results.append(torch.stack(said, dim=1).tolist())
    return results


def _text(llm: LLM, ids: Sequence[int]) -> str:
    """Up to the end of the text, if the model said so."""
    ends = (index for index, token in enumerate(ids) if token in llm.eos_token_ids)
    return llm.tokenizer.decode(ids[: next(ends, len(ids))])


def _report_head(
    llms: Sequence[LLM], conditions: Sequence[Condition], work: _Work, arguments: argparse.Namespace
) -> dict[str, Any]:
    return {
        "task": "needle",
        **report_head(llms, conditions, arguments.strategy),
        "lengths": list(arguments.lengths),
        "depths": sorted({cell.depth for cell in work.cells}),
        "documents": arguments.documents,
        "seed": work.cells[0].seed,
        "answer_tokens": work.answer_tokens,
        "items": None if work.store.path is None else work.store.path.name,
    }


def _report(head: Mapping[str, Any], llms: Sequence[LLM], work: _Work) -> dict[str, Any]:
    items = [work.items[cell.id] for cell in work.cells if cell.id in work.items]
    return {
        **head,
        "machine": describe_machine(llms[-1]),
        "complete": len(items) == len(work.cells),
        "results": summarise_needle(items),
        "cells": [{name: value for name, value in item.items() if name != "attended"} for item in items],
    }


def _write(report: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.report is not None:
        write_report(dict(report), arguments.report)
    if arguments.out is not None:
        write_whole("--out", arguments.out / REPORT, json.dumps(report, indent=1))
