"""Full attention's answers beside transformers': the same questions, the same tokens, float32 on the CPU.

    python experiments/task_agreement.py --data DIR [--model smollm2-135m] [--task piqa] [--limit N] [--out DIR]

Every choice of every question goes through `hybridgen.evaluate --strategy full` and through transformers' model of the
same directory, in right-padded batches; what is compared is which choice is the likeliest, and by how much the
log-likelihoods differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accuracy_table import made_up_questions
from common import Experiment, Point, Result, call, main
from tqdm import tqdm

from hybridgen.config import Setting, build_config
from hybridgen.engine import build
from hybridgen.evaluation.loglikelihood import Request, encode
from hybridgen.evaluation.tasks import find_task, load_task
from hybridgen.models.tokenizer import load_tokenizer

BATCH = 32  # sequences, the longest first


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `run` takes beside the common flags."""
    parser.add_argument("--model", default="smollm2-135m", help="on this machine already")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the task's JSONL file")
    parser.add_argument("--task", default="piqa")
    parser.add_argument("--limit", type=int, help="questions (default all)")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One. With --smoke, four made-up questions."""
    if arguments.smoke:
        arguments.task, arguments.limit = "rte", 4
        arguments.data = made_up_questions((arguments.out or Path("build")) / "data")
    settings = {"task": arguments.task, "model": Path(arguments.model).name, "limit": arguments.limit}
    local = {"model": arguments.model, "data": arguments.data, "items": (arguments.out or Path("build")) / "items"}
    local |= {"flags": ("--set", "runtime.torch_threads=1") if arguments.smoke else ()}
    return [Point(arguments.task, settings, local)]


def measure(point: Point) -> Result:
    """Both, and what they differ in."""
    asked, local = point.settings, point.local
    limit = [] if asked["limit"] is None else ["--limit", asked["limit"]]
    report = call(
        "evaluate", "--model", local["model"], "--strategy", "full", "--dtype", "float32", "--device", "cpu",
        "--tasks", asked["task"], "--data", local["data"], "--out", local["items"], *limit, *local["flags"],
    )  # fmt: skip
    lines = (local["items"] / report["tasks"][0]["items"]).read_text(encoding="utf-8").splitlines()[1:]
    ours = {item["id"]: [pair[0] for pair in item["results"][0]] for item in map(json.loads, lines)}

    choice = build.choose_model(build_config({"model.name": Setting(local["model"], "--model")}))
    folder = choice.location.prepare()
    tokenizer = load_tokenizer(folder)
    questions = load_task(find_task(asked["task"]), local["data"], asked["limit"]).questions
    requests = [
        (question.id, encode(tokenizer, "", question.context, text, None, choice.spec.max_positions))
        for question in questions
        for text in question.continuations
    ]
    found = _transformers(folder, [request for _, request in requests])
    theirs: dict[int, list[float]] = {question.id: [] for question in questions}
    for (number, _), value in zip(requests, found, strict=True):
        theirs[number].append(value)
    same = [_likeliest(ours[question.id]) == _likeliest(theirs[question.id]) for question in questions]
    gaps = [abs(a - b) for number in theirs for a, b in zip(ours[number], theirs[number], strict=True)]
    return {
        "questions": len(questions),
        "same_choice": sum(same) / len(same),
        "other_choice": [question.id for question, agrees in zip(questions, same, strict=True) if not agrees],
        "largest_difference_nats": max(gaps),
        "mean_difference_nats": sum(gaps) / len(gaps),
        "accuracy": sum(_likeliest(ours[one.id]) == one.answer for one in questions) / len(questions),
        "accuracy_of_transformers": sum(_likeliest(theirs[one.id]) == one.answer for one in questions) / len(questions),
    }


@torch.inference_mode()
def _transformers(folder: Path, requests: Sequence[Request]) -> list[float]:
    """The log-likelihood of each continuation, in nats."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(requests)), key=lambda at: -len(requests[at].ids))
    values = [0.0] * len(requests)
    for first in tqdm(range(0, len(order), BATCH), desc="transformers", unit="batch"):
        batch = order[first : first + BATCH]
        longest = len(requests[batch[0]].ids)
        ids = torch.tensor([[*requests[at].ids, *[0] * (longest - len(requests[at].ids))] for at in batch])
        mask = torch.tensor([[at < len(requests[one].ids) for at in range(longest)] for one in batch]).long()
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        for row, at in enumerate(batch):
            request = requests[at]
            begin, end = request.context - 1, len(request.ids) - 1
            log_p = model.lm_head(hidden[row, begin:end]).log_softmax(-1)
            targets = torch.tensor(request.ids[request.context :])
            values[at] = float(log_p.gather(1, targets.unsqueeze(1)).double().sum())
    return values


def _likeliest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def table(results: Sequence[Result]) -> str:
    """A line a task."""
    return "\n".join(
        f"{one['name']}, {one['result']['questions']} questions: the same choice in "
        f"{100 * one['result']['same_choice']:.2f} %; accuracy {100 * one['result']['accuracy']:.2f} %, transformers "
        f"{100 * one['result']['accuracy_of_transformers']:.2f} %; log-likelihoods differ by "
        f"{one['result']['largest_difference_nats']:.2g} nats at most"
        for one in results
    )


EXPERIMENT = Experiment("task_agreement", __doc__ or "", points, measure, table, add_flags=add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
