"""The evaluation command on questions: right figures from a tiny model, items that outlive a kill, clear errors."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen import evaluate
from hybridgen.evaluation import task_job
from hybridgen.evaluation.item_store import ItemStore
from tests.equivalence.tiny_models import load_hf, save_character_tokenizer, save_tiny_model

WORDS = ("stone", "water", "apple", "green bread", "salt", "an old lamp", "rain")
QUESTIONS = 12
NARROW = ["--gpu-window", "8", "--keep", "0.2", "--min-keep", "0"]
NARROW += ["--set", "runtime.torch_threads=1"]  # several tests run beside each other


def goal(number: int) -> str:
    return " ".join(WORDS[(number * step) % 7] for step in range(1, 12 + 3 * number))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("evaluate-tasks"))
    save_character_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    piqa = [
        {"goal": goal(i), "choices": [WORDS[i % 7], WORDS[(i + 2) % 7]], "label": i % 2} for i in range(QUESTIONS)
    ]
    lambada = [{"text": f"{goal(i)} lamp"} for i in range(5)]
    for name, rows in (("piqa_validation", piqa), ("lambada_openai_test", lambada)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(model: Path, data: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str, status: int = 0, out: str = "out", tasks: str = "piqa") -> dict[str, Any]:
        argv = ["--model", str(model), "--data", str(data), "--tasks", tasks, "--batch", "5", "--device", "cpu"]
        assert evaluate.main([*argv, *flags, "--out", str(tmp_path / out)]) == status
        content: dict[str, Any] = json.loads((tmp_path / out / "evaluate.json").read_text())
        return content

    return run


def items(folder: Path, task: str) -> dict[int, Any]:
    (path,) = folder.glob(f"{task}-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["task"] == task
    return {item["id"]: item for item in lines[1:]}


def reference(model: Path, context: str, continuation: str) -> float:
    """By transformers; a character is an id."""
    ids = [96 if character == "\n" else ord(character) - 31 for character in context + continuation]
    with torch.inference_mode():
        log_p = torch.log_softmax(load_hf(model)(torch.tensor([ids])).logits[0].double(), -1)
    return float(sum(log_p[at - 1, ids[at]] for at in range(len(context), len(ids))))


def test_items_and_metrics_are_those_of_transformers(
    run: Callable[..., dict[str, Any]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(*NARROW, "--also", "keep=1.0", tasks="piqa,lambada")
    found = items(tmp_path / "out", "piqa")
    acc, norm = [], []
    for number in range(QUESTIONS):
        choices = [WORDS[number % 7], WORDS[(number + 2) % 7]]
        expected = [reference(model, f"Question: {goal(number)}\nAnswer:", f" {choice}") for choice in choices]
        full, narrow, everything = ([pair[0] for pair in one] for one in found[number]["results"])
        assert full == pytest.approx(expected, abs=2e-4) and everything == pytest.approx(expected, abs=2e-4)
        assert narrow != pytest.approx(expected, abs=1e-3)
        acc.append(float((expected[1] > expected[0]) == number % 2))
        norm.append(float((expected[1] / len(choices[1]) > expected[0] / len(choices[0])) == number % 2))
    piqa, lambada = report["tasks"]
    assert report["complete"] and piqa["cut_requests"] == 0
    for metric, values in (("acc", acc), ("acc_norm", norm)):
        estimate = piqa["results"][0]["metrics"][metric]
        assert estimate["value"] == pytest.approx(statistics.fmean(values))
        assert estimate["standard_error"] == pytest.approx(statistics.stdev(values) / QUESTIONS**0.5)
    everything = piqa["results"][2]
    assert everything["same_choice"]["value"] == 1.0 and everything["budget"] == pytest.approx(1.0)
    assert everything["against_full"]["acc"]["value"] == 0.0
    assert piqa["results"][1]["budget"] < 0.9
    losses = [-reference(model, goal(number), " lamp") for number in range(5)]
    perplexity = lambada["results"][0]["metrics"]["perplexity"]["value"]
    assert perplexity == pytest.approx(math.exp(statistics.fmean(losses)), rel=1e-3)
    assert report["mean"][1]["accuracy"]["value"] == pytest.approx(
        (piqa["results"][1]["metrics"]["acc"]["value"] + lambada["results"][1]["metrics"]["acc"]["value"]) / 2
    )
    table = capsys.readouterr().out
    assert "full attention" in table and "keep 1.0" in table and "acc_norm" in table and "\nmean" in table


def test_few_shots_stand_before_each_question(
    run: Callable[..., dict[str, Any]], model: Path, data: Path, tmp_path: Path
) -> None:
    run("--num-fewshot", "1", "--limit", "2", "--strategy", "full")
    shots = [f"Question: {goal(i)}\nAnswer: {(WORDS[i % 7], WORDS[(i + 2) % 7])[i % 2]}\n\n" for i in range(QUESTIONS)]
    for number, item in items(tmp_path / "out", "piqa").items():
        question = f"Question: {goal(number)}\nAnswer:"
        found = item["results"][0][0][0]
        possible = [reference(model, shot + question, f" {WORDS[number % 7]}") for shot in shots]
        near = [index for index, value in enumerate(possible) if abs(value - found) < 2e-4]
        assert len(near) == 1 and near != [number]


def test_decode_from_gives_the_strategy_more_of_the_question(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    for name, flags in (("one", []), ("more", ["--decode-from", "30"])):
        run(*NARROW, *flags, "--limit", "4", out=name)
    one, more = (items(tmp_path / name, "piqa") for name in ("one", "more"))
    for number in one:
        full, other = (found[number]["results"] for found in (one, more))
        assert full[0][0][0] == pytest.approx(other[0][0][0], abs=2e-4)
        assert full[1][0][0] != pytest.approx(other[1][0][0], abs=2e-4)


def test_a_killed_evaluation_resumes_and_ends_with_the_same_result(
    run: Callable[..., dict[str, Any]], model: Path, data: Path, tmp_path: Path
) -> None:
    whole = run(*NARROW, out="whole")
    argv = ["--model", str(model), "--data", str(data), "--tasks", "piqa", "--batch", "5", "--device", "cpu", *NARROW]
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridgen.evaluate", *argv, "--out", str(tmp_path / "killed")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if any(path.read_text().count("\n") > 1 for path in (tmp_path / "killed").glob("*.jsonl")):
                break
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (path,) = (tmp_path / "killed").glob("*.jsonl")
    lines = path.read_text().split("\n")
    assert len(lines) > 1
    path.write_text("\n".join([*lines[:4], lines[1][:20]]))  # at the latest now, and in the middle of a line
    resumed = run(*NARROW, out="killed")
    assert items(tmp_path / "killed", "piqa") == items(tmp_path / "whole", "piqa")
    assert resumed["tasks"] == whole["tasks"] and resumed["complete"]


def test_two_processes_give_the_items_of_one(
    run: Callable[..., dict[str, Any]], model: Path, data: Path, tmp_path: Path
) -> None:
    """Under `accelerate launch`, which only knows several processes on CPUs as --multi_gpu (or with MPI)."""
    pytest.importorskip("accelerate")
    one = run(*NARROW, tasks="piqa,lambada", out="one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
        "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port),
    ]  # fmt: skip
    argv = ["--model", str(model), "--data", str(data), "--tasks", "piqa,lambada", "--batch", "5", "--device", "cpu"]
    finished = subprocess.run(
        [*launcher, "-m", "hybridgen.evaluate", *argv, *NARROW, "--out", str(tmp_path / "two")],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("full attention") == 5  # four metrics and a mean, from one process alone
    two = json.loads((tmp_path / "two" / "evaluate.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    for task in ("piqa", "lambada"):
        expected, found = (items(tmp_path / name, task) for name in ("one", "two"))
        assert list(found) == list(expected)  # in the file's order
        for index, item in expected.items():
            for ours, theirs in zip(item["results"], found[index]["results"], strict=True):
                assert ours == theirs  # to the last bit: the same batches, the same number of threads
    assert [task["results"][0]["metrics"]["acc"] for task in two["tasks"]] == [
        task["results"][0]["metrics"]["acc"] for task in one["tasks"]
    ]


def test_what_is_there_is_not_measured_again(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls, score = [], task_job.score

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(task_job, "score", counted)
    partial = run(*NARROW, status=130)
    assert not partial["complete"] and partial["tasks"][0]["results"][0]["questions"] == 4
    report = run(*NARROW)
    assert len(calls) == 3 + 4 and report["complete"]  # six batches of two questions
    run(*NARROW)
    assert len(calls) == 3 + 4
    run(*NARROW, "--limit", "1")  # another job, another file
    assert len(calls) == 3 + 4 + 1 and len(list((tmp_path / "out").glob("piqa-*.jsonl"))) == 2


def test_a_store_keeps_whole_batches_alone(tmp_path: Path) -> None:
    batches = [[3, 1], [0, 2]]
    store = ItemStore(tmp_path / "new", "piqa", {"of": "a test"})
    assert store.load(batches) == {} and store.path is not None
    store.append([{"id": 3}, {"id": 1}])
    store.append([{"id": 0}, {"id": 2}])
    whole = store.path.read_text()
    assert store.load(batches) == {index: {"id": index} for index in range(4)}
    for damaged in (whole[:-1], whole[:-4], whole.replace('{"id": 2}', '{"id": }')):
        store.path.write_text(damaged)
        assert store.load(batches) == {1: {"id": 1}, 3: {"id": 3}}
        store.append([{"id": 0}, {"id": 2}])
        assert store.path.read_text() == whole
    store.path.write_text(f"x{whole}")
    assert store.load(batches) == {}
    assert ItemStore(tmp_path / "new", "piqa", {"of": "another"}).path != store.path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "piqua"], "unknown task 'piqua'; did you mean 'piqa'?"),
        (["--tasks", "piqa,piqa"], "a task is named twice"),
        (["--tasks", "piqa,perplexity"], "perplexity goes by itself"),
        (["--tasks", "hellaswag"], "no file for task hellaswag (looked for hellaswag_validation.jsonl"),
        (["--limit", "0"], "'0' is not a number >= 1"),
        (["--limit", "-1"], "--limit: "),
        (["--num-fewshot", "-1"], "--num-fewshot: "),
        (["--num-fewshot", "12"], "--num-fewshot 12: "),
        (["--decode-from", "0"], "'0' is not a number >= 1"),
        (["--data", "nowhere"], "--data nowhere: this is no folder"),
        (["--context", "7"], "--context has no effect on --tasks piqa"),
        (["--weights", "random"], "their answers mean nothing"),
        (["--report", "nowhere/r.json"], "the folder does not exist"),
        (["--strategy", "hybridge"], "did you mean"),
        (["--also", "mass=1"], "unknown word in --also mass=1"),
    ],
)
def test_wrong_input_is_one_message_and_status_2(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert evaluate.main(["--model", str(model), "--data", str(data), "--tasks", "piqa", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")


def test_flags_of_questions_have_no_effect_on_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--limit", "3"]) == 2
    assert "--limit has no effect on --tasks perplexity" in capsys.readouterr().err
    assert evaluate.main(["--tasks", "piqa"]) == 2
    assert "--data DIR" in capsys.readouterr().err
