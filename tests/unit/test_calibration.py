"""Fitting the maps that predict queries: the mathematics, the pass over the layers, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from hybridgen import calibrate, run
from hybridgen.engine.llm import LLM
from hybridgen.evaluation import calibration
from hybridgen.evaluation.calibration import NormalEquations, Texts, fit_query_maps
from tests.equivalence.dense_simulation import DenseModel
from tests.equivalence.tiny_models import random_tokens, save_tiny_model, save_word_tokenizer

VOCABULARY = 113
CONTEXT = 256


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- the equations


def test_a_linear_map_with_a_constant_is_recovered() -> None:
    """In batches of unequal size; one channel is large and hardly moves, one does not move at all."""
    features, true, constant = draw(1, 500, 12), draw(2, 5, 12), draw(3, 5)
    features[:, 3] = 300.0 + 0.01 * features[:, 3]
    features[:, 7] = 2.0
    targets = (features.double() @ true.double().T + constant.double()).float()
    equations = NormalEquations()
    for rows in (slice(0, 37), slice(37, 300), slice(300, 500)):
        equations.add(features[rows], targets[rows])
    ((weight, bias),) = equations.solve([1e-12])
    others = [column for column in range(12) if column not in (3, 7)]
    torch.testing.assert_close(weight[:, others], true[:, others].double(), rtol=0, atol=1e-4)
    found = features.double() @ weight.T + bias
    assert (found - targets).abs().max() < 1e-3


@pytest.mark.parametrize("strength", [1e-6, 1e-2, 1.0, 100.0])
def test_the_solution_is_that_of_least_squares(strength: float) -> None:
    """Of the same problem with rows for the ridge below it, and the constant term as a column that has none."""
    rows, n, m = 90, 11, 6
    features, targets = draw(4, rows, n) * torch.linspace(0.2, 3, n) + 1.5, draw(5, rows, m) + 4
    equations = NormalEquations()
    equations.add(features[:40], targets[:40])
    equations.add(features[40:], targets[40:])
    _, (weight, bias) = equations.solve([0.3, strength])
    x, y = features.double(), targets.double()
    ridge = (rows * strength * x.var(0, correction=0).mean()).sqrt()
    above = torch.cat((x, torch.ones(rows, 1, dtype=torch.float64)), dim=1)
    below = torch.cat((ridge * torch.eye(n, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)), dim=1)
    expected = torch.linalg.lstsq(torch.cat((above, below)), torch.cat((y, torch.zeros(n, m)))).solution.T
    torch.testing.assert_close(weight, expected[:, :n], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias, expected[:, n], rtol=1e-5, atol=1e-5)


# -- the pass over a model's layers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        if not (parent / name).is_dir():
            save_word_tokenizer(save_tiny_model(name, parent), VOCABULARY)
        return parent / name

    return model


def sequences(vocabulary: int, count: int, seed: int, length: int = CONTEXT) -> list[list[int]]:
    return [random_tokens(vocabulary, length, seed + index) for index in range(count)]


@pytest.mark.parametrize(
    ("name", "share"), [("llama-gqa2", 1.0), ("opt", 1.0), ("qwen2", 0.4), ("llama-gqa3", 1.0)]
)
def test_fitted_maps_and_how_they_are_judged(models: Callable[[str], Path], name: str, share: float) -> None:
    """Against float64, from the definitions: that cosine, recall and mass are what they are said to be, that the map
    is least in what the ridge makes of it, and that it does better than Wq on text that it has not seen."""
    dense = DenseModel(models(name))
    texts = Texts(*(sequences(dense.vocab_size, count, seed) for count, seed in ((10, 10), (2, 50), (2, 70))))
    values = {"runtime.device": "cpu", "model.dtype": "float32", "placement.weights_on_gpu": share}
    with LLM(str(models(name)), values, "full") as llm:
        fits = fit_query_maps(llm, texts)
    assert [fit.layer for fit in fits] == list(range(1, dense.num_layers))
    fit_inputs = [dense.layer_inputs(ids) for ids in texts.fit]
    judge_inputs = [dense.layer_inputs(ids) for ids in texts.judge]
    for fit in fits:
        layer = fit.layer
        assert fit.map.bias is not None
        own = f"{dense.prefix}.layers.{layer}.self_attn.q_proj"
        wq = dense.weights[f"{own}.weight"]
        bias = dense.weights.get(f"{own}.bias", torch.zeros(wq.shape[0], dtype=torch.float64))
        x = torch.cat([dense.attention_input(layer, inputs[layer - 1]) for inputs in fit_inputs])
        y = torch.cat([F.linear(dense.attention_input(layer, inputs[layer]), wq, bias) for inputs in fit_inputs])
        x_mean, y_mean = x.mean(0), y.mean(0)
        centred = x - x_mean
        ridge = fit.strength * centred.pow(2).mean() * torch.eye(len(x_mean), dtype=torch.float64)
        covariance = centred.T @ centred / len(x)
        across = centred.T @ (y - y_mean - centred @ wq.T) / len(x)
        expected = wq + torch.linalg.solve(covariance + ridge, across).T
        # By what they make of the text: where no text has a part, a map is free, and OPT's norm leaves out a direction.
        made = F.linear(x, fit.map.weight.double(), fit.map.bias.double())
        torch.testing.assert_close(made, F.linear(x, expected, y_mean - expected @ x_mean), rtol=0, atol=2e-3)

        predictors = {"before": None, "after": (fit.map.weight.double(), fit.map.bias.double())}
        assert fit.true_mass is not None and fit.after.mass is not None
        for when, predictor in predictors.items():
            cosines, recalls, kept, total = [], [], [], []
            for inputs in judge_inputs:
                true = dense.query(layer, inputs[layer], 0)
                guess = dense.query(layer, inputs[layer - 1], 0, predictor)
                cosines.append(F.cosine_similarity(true, guess, dim=-1).mean())
                key, _ = dense.key_value(layer, inputs[layer], 0)
                for head in range(dense.kv_heads):
                    for t in range(CONTEXT - 64, CONTEXT):
                        heads = slice(head * dense.group, (head + 1) * dense.group)
                        p, q = (
                            (query[heads, t] @ key[head, :t].T * dense.head_dim**-0.5).softmax(-1).mean(0)[4:64]
                            for query in (true, guess)
                        )
                        best, chosen = (set(some.topk(6).indices.tolist()) for some in (p, q))
                        recalls.append(len(best & chosen) / 6)
                        kept.append(p[list(chosen)].sum())
                        total.append(p.sum())
            judged: Any = getattr(fit, when)
            assert judged.cosine == pytest.approx(float(torch.stack(cosines).mean()), abs=2e-4)
            assert judged.recall == pytest.approx(sum(recalls) / len(recalls), abs=5e-3)
            mass = float(torch.stack(kept).sum() / torch.stack(total).sum())
            assert judged.mass == pytest.approx(mass, abs=2e-2)  # a mean over sequences there
            assert judged.mass <= fit.true_mass + 1e-6
        assert fit.after.cosine > fit.before.cosine


def test_a_context_without_a_host_tier_judges_by_the_cosine_alone(models: Callable[[str], Path]) -> None:
    short = [sequences(VOCABULARY, count, seed, length=60) for count, seed in ((3, 1), (1, 5), (1, 9))]
    with LLM(str(models("llama-gqa2")), {"runtime.device": "cpu"}, "full") as llm:
        fits = fit_query_maps(llm, Texts(*short))
    assert all(fit.before.recall is fit.after.mass is fit.true_mass is None for fit in fits)
    assert "-" in calibrate.format_fits(fits, [0])


def test_the_strength_is_that_of_the_best_cosine(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless ridge leaves Wq; of two strengths the better one on the tuned text is taken."""
    texts = Texts(*(sequences(VOCABULARY, count, seed) for count, seed in ((6, 10), (1, 50), (1, 50))))

    def fitted(*strengths: float) -> list[calibration.LayerFit]:
        monkeypatch.setattr(calibration, "STRENGTHS", strengths)
        with LLM(str(models("llama-gqa2")), {"runtime.device": "cpu"}, "full") as llm:
            return fit_query_maps(llm, texts)

    little, endless, both = fitted(1e-2), fitted(1e12), fitted(1e-2, 1e12)
    for one, other, chosen in zip(little, endless, both, strict=True):
        assert abs(other.after.cosine - other.before.cosine) < 0.05  # but for the constant term
        assert chosen.after.cosine == pytest.approx(max(one.after.cosine, other.after.cosine), abs=1e-6)


# -- the command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{index}" for index in random_tokens(VOCABULARY, 4000, seed=3)))
    return file


def test_the_command(
    models: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out, report = models("llama-gqa2"), tmp_path / "maps.safetensors", tmp_path / "report.json"
    argv = ["--model", str(directory), "--text", str(text), "--context", "256", "--tokens", "3600", "--device", "cpu"]
    assert calibrate.main([*argv, "--out", str(out), "--report", str(report), "--threshold", "0.5"]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["sequences"] == {"fit": 12, "tune": 1, "judge": 1}
    cosines = {layer["layer"]: layer["after"]["cosine"] for layer in found["layers"]}
    assert list(cosines) == [1, 2, 3, 4, 5]
    assert found["exact_layers"] == [0, *(layer for layer, cosine in cosines.items() if cosine < 0.5)]
    means = found["query_cosine"]
    assert means["after"] > means["before"] and means["after"] == pytest.approx(sum(cosines.values()) / 5)
    assert "recall of top 10 %" in printed and "mean query cosine" in printed and str(out) in printed
    assert {name for name in load_file(out)} == {
        f"layers.{layer}.query.{part}" for layer in cosines for part in ("weight", "bias")
    }
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["exact_layers"]) == found["exact_layers"]

    # What `run` makes of it: the plan counts the maps to the byte, and it is said where the exact layers come from.
    prompt = " ".join(f"w{token}" for token in random_tokens(VOCABULARY, 200, 1))
    job = ["--model", str(directory), "--device", "cpu", "--gpu-window", "16", "--gen", "3", "--prompt", prompt]
    use = ["--set", f"attention.predictor={out}", "--report", str(report)]
    exact = found["exact_layers"]
    for more, source in (([], str(out)), (["--set", f"model.exact_layers={exact}"], "model.exact_layers")):
        assert run.main([*job, *use, *more]) == 0
        assert f"exact layers {exact}, from {source}" in capsys.readouterr().out
        ran = json.loads(report.read_text())
        assert ran["exact_layers_from"] == source and [int(layer) for layer in ran["exact_layers"]] == exact
        predicted = 6 - len(exact)
        assert ran["memory_plan"]["device"]["fitted query maps"] == predicted * (64 * 64 + 64) * 4


def test_several_texts(models: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    """As many sequences from each, and another one to judge by; a cosine below 1 makes every layer exact."""
    directory, report, second = models("llama-gqa2"), tmp_path / "report.json", tmp_path / "second.txt"
    second.write_text(text.read_text())
    argv = ["--model", str(directory), "--text", str(text), "--text", str(second), "--judge-text", str(text)]
    argv += ["--context", "256", "--tokens", "5200", "--device", "cpu", "--report", str(report), "--threshold", "1"]
    assert calibrate.main([*argv, "--out", str(tmp_path / "maps.safetensors")]) == 0
    found = json.loads(report.read_text())
    assert found["sequences"] == {"fit": 16, "tune": 2, "judge": 2} and found["exact_layers"] == [0, 1, 2, 3, 4, 5]
    assert found["texts"] == [str(text), str(second)] and found["judge_text"] == str(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "none.txt"], "--text none.txt: No such file"),
        (["--judge-text", "none.txt"], "--judge-text none.txt: No such file"),
        (["--tokens", "6000"], "has 4000 tokens, and 23 sequences of 256 are to be cut from it"),
        (["--tokens", "700"], "--tokens 700: at least three sequences of --context 256"),
        (["--context", "2000"], "--context 2000: allowed are 2 to 1024"),
        (["--threshold", "2"], "a cosine lies in"),
        (["--out", "maps.bin"], "must end in .safetensors"),
        (["--out", "no/such/maps.safetensors"], "--out no/such/maps.safetensors: the folder does not exist"),
        (["--set", "model.weights=random"], "model.weights = 'random': there is nothing to fit to"),
        (["--set", "placement.host_memory_bytes=1MiB"], "the calibration of .* does not fit"),
    ],
)
def test_wrong_inputs(
    models: Callable[[str], Path], text: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(models("llama-gqa2")), "--text", str(text), "--context", "256", "--tokens", "2000"]
    assert calibrate.main([*argv, "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(said, error), error


def test_a_text_is_asked_for(models: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main(["--model", str(models("llama-gqa2"))]) == 2
    assert "a calibration needs a text, and none ships with the project: --text FILE" in capsys.readouterr().err


def test_a_model_of_one_layer(
    models: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((models("llama-gqa2") / "config.json").read_text())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    (tmp_path / "one" / "model.safetensors").write_bytes((models("llama-gqa2") / "model.safetensors").read_bytes())
    assert calibrate.main(["--model", str(tmp_path / "one"), "--text", str(text)]) == 2
    assert "has 1 layer: none has one before it, to be predicted from" in capsys.readouterr().err
