"""The evaluation command on a tiny model: right figures, one prefill for all, a report that survives."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridgen import evaluate
from hybridgen.config import Setting
from hybridgen.engine.build import choose_model
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.evaluation import conditions, perplexity_job
from hybridgen.evaluation.perplexity import cut_passages
from tests.equivalence.tiny_models import load_hf, random_tokens, save_tiny_model, save_word_tokenizer

VOCABULARY = 113
CONTEXT, DECODE, PASSAGES = 200, 12, 4
LENGTH = CONTEXT + DECODE + 1
TEXT_TOKENS = 1000
SHAPE = ["--context", "200", "--decode", "12", "--passages", "4", "--batch", "3", "--gpu-window", "16"]
SHAPE += ["--set", "runtime.torch_threads=1"]  # several tests run beside each other


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Llama with a tokenizer of one word an id."""
    directory = save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("evaluate"))
    save_word_tokenizer(directory, VOCABULARY)
    return directory


def write_text(path: Path, ids: list[int]) -> Path:
    path.write_text(" ".join(f"w{index}" for index in ids))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", random_tokens(VOCABULARY, TEXT_TOKENS, seed=11))


@pytest.fixture
def run(model: Path, text: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str, status: int = 0) -> dict[str, Any]:
        report = tmp_path / "report.json"
        argv = ["--model", str(model), "--text", str(text), *SHAPE, *flags, "--report", str(report)]
        assert evaluate.main(argv) == status
        content: dict[str, Any] = json.loads(report.read_text())
        return content

    return run


def reference_losses(model: Path, ids: list[int], firsts: list[int]) -> list[float]:
    """Mean nats a token by transformers, in one dense pass over each passage."""
    hf, losses = load_hf(model), []
    for first in firsts:
        passage = torch.tensor([ids[first : first + LENGTH]])
        with torch.inference_mode():
            log_p = torch.log_softmax(hf(passage).logits[0].double(), -1)
        scored = range(CONTEXT, CONTEXT + DECODE)
        losses.append(-sum(float(log_p[at, passage[0, at + 1]]) for at in scored) / DECODE)
    return losses


def test_perplexity_equals_transformers_and_full_budget_costs_nothing(
    run: Callable[..., dict[str, Any]], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run("--keep", "1.0", "--also", "keep=0.1,min-keep=0", "--also", "keep-mass=0.9,lookahead=off")
    (text,) = report["texts"]
    assert report["complete"] and report["pooled"] is None
    expected = reference_losses(model, random_tokens(VOCABULARY, TEXT_TOKENS, seed=11), text["first_tokens"])
    full, everything = text["measured"][:2]
    assert full["losses"] == pytest.approx(expected, abs=2e-5)
    assert everything["losses"] == pytest.approx(expected, abs=2e-5)
    results = text["results"]
    assert results[0]["perplexity"]["value"] == pytest.approx(math.exp(sum(expected) / PASSAGES), rel=1e-4)
    assert results[1]["against_full"]["percent"]["value"] == pytest.approx(0, abs=0.01)
    assert results[1]["kl_nats_per_token"]["value"] < 1e-7
    assert results[1]["argmax_agreement"]["value"] == 1.0
    assert results[1]["covered_mass"]["true_probe"] == pytest.approx(1, abs=1e-5)
    for row in results[2:]:
        assert row["kl_nats_per_token"]["value"] > 1e-6
        assert 0 < row["covered_mass"]["true_probe"] < 1
        assert row["budget"] < 1
    # Each of keep and keep-mass switches the other off.
    selections = [condition["config"]["selection"] for condition in report["conditions"]]
    assert (selections[2]["keep"], selections[2]["keep_mass"]) == (0.1, None)
    assert (selections[3]["keep"], selections[3]["keep_mass"]) == (None, 0.9)
    assert results[2]["kept_fraction"] == pytest.approx(0.1, abs=0.01)
    # Paired against the first condition too, here the same as full attention.
    assert results[1]["against_first"] is None
    against = results[2]["against_first"]
    assert against["percent"]["value"] == pytest.approx(results[2]["against_full"]["percent"]["value"], abs=0.01)
    table = capsys.readouterr().out
    assert "keep 0.1, lookahead select, min-keep 0" in table and "against keep 1.0" in table


def test_a_condition_does_not_depend_on_its_neighbours(run: Callable[..., dict[str, Any]]) -> None:
    together = run("--keep", "0.2", "--also", "keep=0.5,gpu-window=64")["texts"][0]["measured"]
    alone = run("--keep", "0.2")["texts"][0]["measured"]
    assert together[1] == alone[1]
    window = run("--keep", "0.5", "--gpu-window", "64")["texts"][0]["measured"]
    assert together[2] == window[1]


def test_several_texts_are_pooled(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = write_text(tmp_path / "second.txt", random_tokens(VOCABULARY, TEXT_TOKENS, seed=12))
    report = run("--text", str(second))
    losses = [text["measured"][1]["losses"] for text in report["texts"]]
    pooled = report["pooled"][1]
    assert pooled["passages"] == 2 * PASSAGES
    assert pooled["perplexity"]["value"] == pytest.approx(math.exp(sum(map(sum, losses)) / (2 * PASSAGES)))
    table = capsys.readouterr().out
    assert "text.txt" in table and "second.txt" in table and "\npooled" in table


def test_strategy_full_stands_alone(run: Callable[..., dict[str, Any]]) -> None:
    report = run("--strategy", "full")
    assert [condition["name"] for condition in report["conditions"]] == ["full attention"]
    (result,) = report["texts"][0]["results"]
    assert result["against_full"] is None and result["budget"] == 1.0


@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_strategies_that_attend_to_all_are_full_attention(run: Callable[..., dict[str, Any]], strategy: str) -> None:
    report = run("--strategy", strategy)
    names = ["full attention", f"all tokens, {'streamed' if strategy == 'aog' else 'on_cpu'}"]
    assert [condition["name"] for condition in report["conditions"]] == names
    full, other = report["texts"][0]["results"]
    assert other["budget"] == 1.0 and report["conditions"][1]["covered_mass_kind"] is None
    assert other["perplexity"]["value"] == pytest.approx(full["perplexity"]["value"], rel=1e-4)


def test_what_is_finished_survives_an_interruption(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run()
    calls, measure = [], perplexity_job.measure

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(perplexity_job, "measure", interrupted)
    report = run(status=130)
    assert not report["complete"]
    first, reference = report["texts"][0], whole["texts"][0]
    assert first["measured"][1]["losses"] == reference["measured"][1]["losses"][:3]
    assert first["first_tokens"] == reference["first_tokens"][:3]
    assert first["results"][1]["passages"] == 3
    assert "(not complete)" in capsys.readouterr().out


def test_one_prefill_serves_all_conditions(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    prefills: list[int] = []
    prefill = LLM.prefill

    def counted(self: LLM, batch: Any, prompts: Any, mirrors: Any = (), progress: Any = None) -> Any:
        prefills.append(len(mirrors))
        return prefill(self, batch, prompts, mirrors, progress)

    monkeypatch.setattr(LLM, "prefill", counted)
    run("--also", "keep=0.1", "--also", "keep=0.1,lookahead=off")
    assert prefills == [3, 3]  # two batches: 3 passages and 1


@given(st.integers(2, 60), st.integers(1, 30), st.integers(1, 12), st.integers(0, 200), st.integers(0, 1))
def test_passages_lie_apart_and_within_the_text(
    context: int, decode: int, passages: int, spare: int, start: int
) -> None:
    length = context + decode + 1 - start
    ids = list(range(passages * length + spare))
    cut = cut_passages(ids, [-1] * start, context, decode, passages)
    assert len(cut) == passages
    end = 0
    for passage in cut:
        assert passage.first >= end
        end = passage.first + length
        assert passage.ids == [-1] * start + ids[passage.first : end]
    assert end <= len(ids)
    gaps = [after.first - before.first for before, after in itertools.pairwise(cut)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_short_text_is_told_how_many_passages_it_holds() -> None:
    with pytest.raises(ConfigError, match="100 tokens and holds 4 passages of 21"):
        cut_passages(range(100), [], 16, 4, 5)
    with pytest.raises(ConfigError, match="--context 1"):
        cut_passages(range(100), [0], 1, 4, 5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--passages", "5"], "holds 4 passages of 213"),
        (["--passages", "0"], "number >= 1"),
        (["--context", "-5"], "--context"),
        (["--weights", "random"], "random weights (from --weights)"),
        (["--tasks", "perplexity,piqua"], "unknown task 'piqua'"),
        (["--text", "/nowhere.txt"], "--text /nowhere.txt: No such file"),
        (["--also", "keap=0.1"], "'keep'"),
        (["--also", "keep"], "'' is no value for keep"),
        (["--also", "lookahead=never"], "from --also lookahead=never"),
        (["--also", "keep=2.0"], "from --also keep=2.0"),
        (["--strategy", "full", "--also", "keep=0.1"], "strategy full is what all others are compared with"),
        (["--strategy", "aoc", "--also", "keep=0.1"], "'on_cpu' chooses nothing"),
        (["--batch", "0"], "run.batch = 0 (from --batch)"),
        (["--context", "2500", "--set", "model.extend_positions=false"], "exceed"),
        (["--set", "placement.host_memory_bytes=3000000"], "what would fit: --batch"),
        (["--set", "placement.host_memory_bytes=1000"], "what would fit: a smaller model"),
        (["--report", "/nowhere/report.json"], "the folder does not exist"),
        (["--seq", "100"], "unrecognized arguments: --seq"),
    ],
)
def test_wrong_input_is_one_message_and_status_2(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert evaluate.main(["--model", str(model), "--text", str(text), *SHAPE, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")


def test_a_missing_text_is_asked_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--model", str(model)]) == 2
    assert "--text FILE" in capsys.readouterr().err


def test_conditions_use_the_words_of_the_flags() -> None:
    settings = {"selection.keep_mass": Setting(0.95, "--keep-mass"), "selection.keep": Setting(None, "")}
    also = ["keep=0.3,keep-mass=0.95", "keep=100", "lookahead=off, min-keep=0,gpu-window=1k"]
    names = [condition.name for condition in conditions.make_conditions(settings, also)]
    assert names == [
        "full attention",
        "keep-mass 0.95, lookahead select, min-keep 64, gpu-window 512",
        "keep 0.3, keep-mass 0.95, lookahead select, min-keep 64, gpu-window 512",
        "keep 100, lookahead select, min-keep 64, gpu-window 512",
        "keep-mass 0.95, lookahead off, min-keep 0, gpu-window 1024",
    ]
    with pytest.raises(UnknownNameError, match="mass"):
        conditions.parse_variant("mass=0.9")


def test_conditions_of_other_strategies(run: Callable[..., dict[str, Any]]) -> None:
    """From the same prefill, under the same flags; settings by their names."""
    report = run(
        "--keep", "0.1", "--set", "cache.sinks=2", "--also", "strategy=h2o,eviction.heavy=9,eviction.recent=0.25",
        "--also", "strategy=aoc",
    )  # fmt: skip
    _, first, h2o, aoc = report["conditions"]
    assert (h2o["config"]["attention"]["executor"], h2o["config"]["eviction"]["heavy"]) == ("evicting", 9)
    assert h2o["config"]["eviction"]["recent"] == 0.25 and h2o["config"]["run"]["gen"] == DECODE
    assert first["config"]["cache"]["sinks"] == h2o["config"]["cache"]["sinks"] == 2
    assert h2o["name"].startswith("h2o: ") and aoc["name"].startswith("aoc: ")
    rows = report["texts"][0]["results"]
    assert rows[2]["budget"] < 1 and rows[2]["kl_nats_per_token"]["value"] > 1e-6
    assert rows[3]["budget"] == 1 and rows[3]["kl_nats_per_token"]["value"] < 1e-7


def test_the_plan_counts_every_condition(model: Path) -> None:
    settings = {"model.name": Setting(str(model), "test"), "cache.gpu_window": Setting(16, "test")}
    one = conditions.make_conditions(settings, [])
    three = conditions.make_conditions(settings, ["keep=0.1", "keep=0.2"])
    choice = choose_model(one[0].config)
    plans = [conditions.plan_conditions(choice, some, 2, 212) for some in (one, three)]
    assert plans[1].host["KV host tier"] == 3 * plans[0].host["KV host tier"]
    assert plans[1].device["weights"] == plans[0].device["weights"]
