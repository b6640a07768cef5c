"""`experiments/cuda_agreement.py`: its arithmetic by hand, its steps against transformers, and a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import cuda_agreement
from experiments.cuda_agreement import Agreement, Difference, compare, missed_bounds, teacher_forced
from hybridgen.engine.llm import LLM
from tests.equivalence.tiny_models import load_hf, random_tokens, save_tiny_model, save_word_tokenizer

VOCABULARY = 113
CONTEXT, STEPS = 200, 12
SHAPE = ["--context", str(CONTEXT), "--steps", str(STEPS), "--set", "cache.gpu_window=16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("agreement"))
    save_word_tokenizer(directory, VOCABULARY)
    return directory


def test_kl_by_hand() -> None:
    """(1/2, 1/4, 1/4) against (1/4, 1/2, 1/4): ln 2 / 2 - ln 2 / 4. What is added to all logits changes nothing."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    found = compare(torch.cat([p, p]), torch.cat([q + 7.0, p - 3.0]))
    assert found.divergences == pytest.approx([math.log(2) / 4, 0.0], abs=1e-7)
    assert found.mean_kl == pytest.approx(math.log(2) / 8, abs=1e-7)


def test_a_planted_difference_is_counted() -> None:
    reference = torch.randn(1000, 50, generator=torch.Generator().manual_seed(1))
    reference[7, 20], reference[7, 30] = 8.0, 7.5
    other = reference.clone()
    other[7, 30] += 0.75
    found = compare(reference, other, passage=3)
    assert found.differences == [Difference(passage=3, step=7, reference=20, other=30, gap=0.5)]
    assert found.share == 0.999
    assert found.largest_logit_error == 0.75
    assert sum(kl > 0 for kl in found.divergences) == 1


@pytest.mark.parametrize(
    ("dtype", "gaps", "kl", "missed"),
    [
        ("float32", [9e-4], 1.0, 0),  # one of 1000 steps, at a near tie; KL is float16's bound
        ("float32", [1e-3], 0.0, 1),
        ("float32", [9e-4, 9e-4], 0.0, 1),
        ("float32", [9e-4, 0.5], 0.0, 2),
        ("float32", [math.nan], 0.0, 1),
        ("float16", [0.5, 0.5], 9e-4, 0),
        ("float16", [], 1e-3, 1),
        ("float16", [], math.nan, 1),
    ],
)
def test_bounds(dtype: str, gaps: list[float], kl: float, missed: int) -> None:
    differences = [Difference(0, step, 1, 2, gap) for step, gap in enumerate(gaps)]
    assert len(missed_bounds(dtype, Agreement(1000, differences, [kl] * 1000))) == missed


def test_steps_are_those_of_transformers_at_full_budget(model: Path) -> None:
    """One row a token that is fed, each predicting that token's successor."""
    tokens = random_tokens(VOCABULARY, CONTEXT + STEPS, seed=3)
    seen: list[int] = []
    settings = {"runtime.device": "cpu", "cache.gpu_window": 16, "selection.keep": 1.0}
    with LLM(str(model), settings) as llm:
        logits = teacher_forced(llm, tokens, CONTEXT, lambda batch: seen.append(batch.lengths[0]))
    with torch.inference_mode():
        expected = load_hf(model)(torch.tensor([tokens])).logits[0, CONTEXT:]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert seen == list(range(CONTEXT + 1, CONTEXT + STEPS + 1))


def test_a_run_on_a_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text(" ".join(f"w{index}" for index in random_tokens(VOCABULARY, 2 * (CONTEXT + STEPS), seed=4)))
    argv = ["--model", str(model), "--text", str(text), *SHAPE, "--set", "selection.min_keep=8", "--cpu-only"]
    status = cuda_agreement.main([*argv, "--report", str(file)])
    report: dict[str, Any] = json.loads(file.read_text())
    reference, exact, half = report["runs"]
    assert reference["against_reference"] is None
    assert exact["against_reference"]["argmax_agreement"] == 1.0
    assert exact["against_reference"]["missed"] == []
    assert exact["against_reference"]["kl_nats"]["mean"] < 1e-8
    assert 1e-8 < half["against_reference"]["kl_nats"]["mean"] <= half["against_reference"]["kl_nats"]["max"]
    assert status == int(half["against_reference"]["missed"] != [])
    assert all(run["budget"] < 0.75 and run["kept_fraction"] < 0.15 and run["seconds"] > 0 for run in report["runs"])
    assert [run["config"]["model"]["dtype"] for run in report["runs"]] == ["float32", "float32", "float16"]
    assert capsys.readouterr().out.count(" float") == 3


def test_a_wrong_step_is_named_and_ends_with_status_1(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights, so that one tensor given on is the other's; the second run's second passage is spoilt."""
    runs: list[Tensor] = []

    def spoilt(*arguments: Any) -> Tensor:
        runs.append(teacher_forced(*arguments))
        if len(runs) == 4:
            runs[-1][5, runs[-1][5].argmin()] = 9.0
        return runs[-1]

    monkeypatch.setattr(cuda_agreement, "teacher_forced", spoilt)
    argv = ["--model", str(model), "--weights", "random", *SHAPE, "--cpu-only"]
    assert cuda_agreement.main(argv) == 1
    out = capsys.readouterr().out
    assert "lazy float32, passage 1, step 5: token " in out
    assert "MISSED, lazy float32: argmax agreement 0.95833 < 0.999" in out
    assert "MISSED, lazy float16" not in out  # the weights are the same ones, converted


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cpu-only"], "--text FILE"),
        (["--cpu-only", "--text", "nowhere.txt"], "nowhere.txt"),
        (["--cpu-only", "--steps", "0"], "--steps 0"),
        (["--cpu-only", "--set", "cache.window=3"], "cache.window"),
    ],
)
def test_wrong_inputs(model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_agreement.main(["--model", str(model), *flags]) == 2
    assert words in capsys.readouterr().err
