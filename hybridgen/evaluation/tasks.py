"""Question answering tasks from local JSONL files, with the prompts and the metrics of lm-evaluation-harness.

A task turns a row into a `Question`: a context, the texts that may follow it, and which one is right. What follows is
separated from the context by a space. Examples (`few_shot`) are questions with their answers, a blank line after each.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridgen.errors import ConfigError, UnknownNameError

Row = Mapping[str, Any]
Metric = Literal["acc", "acc_norm", "perplexity"]
FEW_SHOT_DELIMITER = "\n\n"
_BY_CHARACTERS = ("openbookqa", "hellaswag")  # tasks that are usually quoted by acc_norm


@dataclass(frozen=True)
class Question:
    """A document of a task. id: number of its row, from 0.

    continuations: with what separates them from the context. characters: of each choice without that: what acc_norm
    divides by.
    """

    id: int
    context: str
    continuations: tuple[str, ...]
    characters: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class Task:
    """files: of the questions, the first that is there. examples: of the few shots, by the file of the questions.

    Where a file is not among `examples`, or they are not there, the examples are other rows of the file itself.
    """

    name: str
    files: tuple[str, ...]
    examples: Mapping[str, str]
    metrics: tuple[Metric, ...]
    read: Callable[[Row], tuple[str, Sequence[str]]]  # context and choices; a space comes between them
    is_choice: bool = True  # else there is one continuation, which is right if greedy decoding gives it

    @property
    def main(self) -> Metric:
        """The accuracy that stands for the task in a mean over tasks: per character where choices differ in kind."""
        return "acc_norm" if self.name in _BY_CHARACTERS else "acc"

    def question(self, number: int, row: Row) -> Question:
        """number: of the row in its file, from 0. ValueError, KeyError and the like if it is none of this task."""
        context, choices = self.read(row)
        delimiter = " " if self.is_choice else ""
        answer = int(row["label"]) if self.is_choice else 0
        if not 0 <= answer < len(choices):
            raise ValueError(f"label {answer} is no index into {len(choices)} choices")
        return Question(
            number,
            context,
            tuple(delimiter + choice for choice in choices),
            tuple(len(choice) for choice in choices),
            answer,
        )


def _piqa(row: Row) -> tuple[str, Sequence[str]]:
    return f"Question: {row['goal']}\nAnswer:", row["choices"]


_CONNECTORS = {"cause": "because", "effect": "therefore"}


def _copa(row: Row) -> tuple[str, Sequence[str]]:
    """The harness puts a space before the choice and the delimiter before that: two spaces."""
    context, choices = _copa_one_space(row)
    return context, [f" {choice}" for choice in choices]


def _copa_one_space(row: Row) -> tuple[str, Sequence[str]]:
    premise = row["premise"].strip()[:-1]  # without its full stop
    return f"{premise} {_CONNECTORS[row['question']]}", [choice[0].lower() + choice[1:] for choice in row["choices"]]


def _openbookqa(row: Row) -> tuple[str, Sequence[str]]:
    return row["question_stem"], row["choices"]


def _rte(row: Row) -> tuple[str, Sequence[str]]:
    return f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:", ("True", "False")


def _hellaswag(row: Row) -> tuple[str, Sequence[str]]:
    """The file's rows have been through the harness's replacements already; outer spaces go."""
    return row["context"].strip(), [choice.strip() for choice in row["choices"]]


def _lambada(row: Row) -> tuple[str, Sequence[str]]:
    context, _, word = row["text"].rpartition(" ")
    return context, [f" {word}"]


_COPA_FILES = ("copa_test.jsonl", "copa_validation.jsonl")
_COPA_EXAMPLES = {file: "copa_train.jsonl" for file in _COPA_FILES}
# rte: the wording of GLUE is the harness's task rte, that of SuperGLUE its sglue_rte.
TASKS = {
    task.name: task
    for task in (
        Task("piqa", ("piqa_validation.jsonl",), {}, ("acc", "acc_norm"), _piqa),
        Task("copa", _COPA_FILES, _COPA_EXAMPLES, ("acc",), _copa),
        Task("copa_one_space", _COPA_FILES, _COPA_EXAMPLES, ("acc",), _copa_one_space),
        Task(
            "openbookqa",
            ("openbookqa_test.jsonl", "openbookqa_validation.jsonl"),
            {"openbookqa_test.jsonl": "openbookqa_validation.jsonl"},
            ("acc", "acc_norm"),
            _openbookqa,
        ),
        Task("rte", ("rte_glue_validation.jsonl", "rte_validation.jsonl"), {}, ("acc",), _rte),
        Task("sglue_rte", ("rte_validation.jsonl",), {}, ("acc",), _rte),
        Task("lambada", ("lambada_openai_test.jsonl",), {}, ("acc", "perplexity"), _lambada, is_choice=False),
        Task("hellaswag", ("hellaswag_validation.jsonl",), {}, ("acc", "acc_norm"), _hellaswag),
    )
}


def find_task(name: str) -> Task:
    """UnknownNameError, with the nearest names, if there is none."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]


@dataclass(frozen=True)
class TaskData:
    """A task's questions, and what stands before each of them.

    file, digest: of the questions (and of the examples, where these come from another file). prefixes: of each
    question, the few-shot examples, each with the blank line after it.
    """

    task: Task
    file: Path
    examples_file: Path | None
    digest: str
    questions: list[Question]
    prefixes: list[str]


def load_task(task: Task, folder: Path, limit: int | None = None, num_fewshot: int = 0, seed: int = 0) -> TaskData:
    """The first `limit` questions of the task's file in `folder`.

    ConfigError: that file, or the one that its examples come from, is not there or is not sound.

    The same examples, drawn with `seed`, stand before all questions, so that they need be computed only once; a
    question that is itself among them gets one that was drawn beside them instead.
    """
    file = _find(task, folder)
    questions, digest = _read(task, file)
    examples_file = None
    pool = questions
    if num_fewshot and (name := task.examples.get(file.name.removesuffix(".gz"))) is not None:
        examples_file = next((path for path in _spellings(folder, name) if path.is_file()), None)
        if examples_file is None:  # other examples are other figures
            raise ConfigError(
                f"--num-fewshot {num_fewshot}: {folder} has no {name} (or {name}.gz), where the examples for the "
                f"questions of {file.name} come from (allowed without it: 0)"
            )
        pool, of_examples = _read(task, examples_file)
        digest = hashlib.sha256((digest + of_examples).encode()).hexdigest()
    drawn = _draw(task, pool, num_fewshot, seed, examples_file or file)
    prefixes = []
    for question in questions[:limit]:
        others = [one for one in drawn if examples_file is not None or one.id != question.id]
        shots = (one.context + one.continuations[one.answer] + FEW_SHOT_DELIMITER for one in others[:num_fewshot])
        prefixes.append("".join(shots))
    return TaskData(task, file, examples_file, digest, questions[:limit], prefixes)


def _draw(task: Task, pool: Sequence[Question], count: int, seed: int, file: Path) -> list[Question]:
    """`count` examples and one in reserve."""
    if not count:
        return []
    if count + 1 > len(pool):
        raise ConfigError(f"--num-fewshot {count}: {file} has {len(pool)} rows for task {task.name}, allowed are fewer")
    return random.Random(seed).sample(pool, count + 1)


def _find(task: Task, folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--data {folder}: this is no folder; task {task.name} needs one that holds {task.files[0]}")
    for name in task.files:
        for path in _spellings(folder, name):
            if path.is_file():
                return path
    looked_for = ", ".join(task.files)
    raise ConfigError(f"--data {folder}: no file for task {task.name} (looked for {looked_for}, also with .gz)")


def _spellings(folder: Path, name: str) -> list[Path]:
    return [folder / name, folder / f"{name}.gz"]


def _read(task: Task, file: Path) -> tuple[list[Question], str]:
    """Questions and the SHA-256 of the file; ConfigError names the line that is not sound."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    questions: list[Question] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            questions.append(task.question(len(questions), json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{file}, line {number}: not a row of task {task.name}: {reason}") from None
    if not questions:
        raise ConfigError(f"{file} holds no row of task {task.name}")
    return questions, hashlib.sha256(content).hexdigest()


def judge(
    task: Task, question: Question, log_likelihoods: Sequence[float], is_greedy: Sequence[bool]
) -> dict[str, float]:
    """The metrics of one question, each of which is averaged (perplexity: the log-likelihood itself).

    acc: the right choice is the likeliest (or, without choices, greedy decoding gives it); acc_norm: per character.
    The first of equal ones counts.
    """
    values: dict[str, float] = {}
    if not task.is_choice:
        return {"acc": float(is_greedy[0]), "perplexity": log_likelihoods[0]}
    lengths = [max(count, 1) for count in question.characters]
    per_character = [value / length for value, length in zip(log_likelihoods, lengths, strict=True)]
    for metric in task.metrics:
        scores = log_likelihoods if metric == "acc" else per_character
        values[metric] = float(max(range(len(scores)), key=scores.__getitem__) == question.answer)
    return values
