"""The needle job: the question goes through decode, figures are right, a run that was killed goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from hybridgen import evaluate
from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.evaluation import needle_job
from hybridgen.evaluation.document import Document
from hybridgen.evaluation.needle_job import cut_batches, make_cells
from hybridgen.evaluation.needle_results import format_needle, summarise_needle, write_heat_map
from hybridgen.models.checkpoint import locate
from tests.equivalence.tiny_models import load_hf, save_tiny_model

SINKS, RECENT = 4, 12
STREAMING = {"eviction.sinks": SINKS, "eviction.recent": RECENT}
GRID = ["--lengths", "160,300", "--depths", "3", "--batch", "2", "--gpu-window", "16"]
ALSO = ["--keep", "1.0", "--also", f"strategy=streaming-llm-original,eviction.recent={RECENT}"]
WORDS = """
    the The secret number of town is Remember it Now answer question What and a was on in at by near with over from
    Ashford Brightwater Coldbrook Dunmore Eastwick Fernhill Greystone Hollowell Ironbridge Kingsport Larkspur Millbrook
    Northgate Oakham Pinecrest Redcliff baker gardener sailor postman teacher carpenter miller ferryman
"""


def save_tokenizer(directory: Path) -> None:
    """Words, digits, blanks and signs are tokens; most words of a document are the same unknown one."""
    tokens = ["[?]", *"0123456789", " ", "\n\n", ".", "?", ":", ",", *WORDS.split()]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[?]")
    )
    pattern = tokenizers.Regex(r"\d|[A-Za-z']+|\s+|[^\sA-Za-z\d]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("needle"))
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def hf(model: Path) -> Any:
    return load_hf(model)


@pytest.fixture(scope="module")
def llms(model: Path) -> Iterator[list[LLM]]:
    """Full attention, and a window that has lost most of a document."""
    with LLM(str(model), {"runtime.device": "cpu"}, strategy="full") as full:
        config = LLM(str(model), {"runtime.device": "cpu", **STREAMING}, strategy="streaming-llm-original").config
        yield [full, full.sharing(config)]


@pytest.fixture(scope="module")
def documents(llms: list[LLM]) -> list[Document]:
    return needle_job._documents(llms[0].tokenizer, make_cells([160], 3, 1, seed=0))


def greedy(hf: Any, document: Document, prefilled: int | None, tokens: int) -> list[int]:
    """By transformers: all of the first `prefilled` tokens see each other, later ones sinks and the last RECENT alone.

    None: everyone sees everything.
    """
    ids = list(document.ids)
    for _ in range(tokens):
        query, key = torch.arange(len(ids)).unsqueeze(1), torch.arange(len(ids))
        seen = key <= query
        if prefilled is not None:
            seen &= (query < prefilled) | (key < SINKS) | (key > query - RECENT)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.inference_mode():
            ids.append(int(hf(torch.tensor([ids]), attention_mask=mask).logits[0, -1].argmax()))
    return ids[len(document.ids) :]


def answers(llms: Sequence[LLM], documents: Sequence[Document]) -> list[list[list[int]]]:
    return needle_job.answer(llms, documents, 6, [AttentionStatistics() for _ in llms])


def test_answers_are_those_of_a_strategy_at_work_on_the_whole_question(
    llms: list[LLM], documents: list[Document], hf: Any
) -> None:
    asks = max(len(document.question_tokens) for document in documents)
    full, streaming = answers(llms, documents)
    assert full == [greedy(hf, document, None, 6) for document in documents]
    assert streaming == [greedy(hf, document, 160 - asks, 6) for document in documents]
    # Had the question been prefilled, or all of it but its last token, these would be others.
    for prefilled in (160, 159):
        assert streaming != [greedy(hf, document, prefilled, 6) for document in documents]
    assert streaming != full


def test_the_prefill_ends_where_the_question_begins(
    llms: list[LLM], documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefilled: list[tuple[int, list[list[int]]]] = []
    fed: dict[LLM, list[list[int]]] = {llm: [] for llm in llms}
    prefill, decode = LLM.prefill, LLM.decode

    def seen_prefill(self: LLM, batch: Any, prompts: Any, mirrors: Any = (), progress: Any = None) -> Any:
        prefilled.append((len(mirrors), prompts))
        return prefill(self, batch, prompts, mirrors, progress)

    def seen_decode(self: LLM, batch: Any, tokens: Any) -> Any:
        fed[self].append(tokens.tolist())
        return decode(self, batch, tokens)

    monkeypatch.setattr(LLM, "prefill", seen_prefill)
    monkeypatch.setattr(LLM, "decode", seen_decode)
    said = answers(llms, documents)
    asks = max(len(document.question_tokens) for document in documents)
    assert prefilled == [(1, [document.ids[:-asks] for document in documents])]
    for llm, generated in zip(llms, said, strict=True):
        for place, document in enumerate(documents):
            assert [step[place] for step in fed[llm]] == document.ids[-asks:] + generated[place][:-1]
    text = llms[0].tokenizer.decode(documents[0].ids[documents[0].question_tokens.start :])
    assert text.startswith("\n\nNow answer the question.") and text.endswith(documents[0].question)


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*flags: str, status: int = 0, out: str = "out") -> dict[str, Any]:
        argv = ["--model", str(model), "--tasks", "needle", "--device", "cpu", *GRID, *ALSO, *flags]
        assert evaluate.main([*argv, "--out", str(tmp_path / out)]) == status
        content: dict[str, Any] = json.loads((tmp_path / out / "needle.json").read_text())
        return content

    return run


def test_the_report_says_who_finds_what(
    run: Callable[..., dict[str, Any]],
    hf: Any,
    llms: list[LLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What full attention says is called right here: a tiny model finds nothing."""
    cells = make_cells([160, 300], 3, 1, seed=0)
    documents = needle_job._documents(llms[0].tokenizer, cells)
    expected = [llms[0].tokenizer.decode(greedy(hf, document, None, 8)) for document in documents]
    monkeypatch.setattr(needle_job, "most_answer_tokens", lambda tokenizer, documents: 8)
    monkeypatch.setattr(Document, "is_answered_by", lambda self, text: text == expected[documents.index(self)])
    report = run()
    assert report["complete"] and report["task"] == "needle"
    assert [cell["answers"][0] for cell in report["cells"]] == expected
    assert [(cell["length"], cell["depth"]) for cell in report["cells"]] == [
        (length, depth) for length in (160, 300) for depth in (0.0, 0.5, 1.0)
    ]
    assert [cell["expected"] for cell in report["cells"]] == [document.answer for document in documents]
    assert [cell["beyond_window"] for cell in report["cells"]] == [True, False, False, True, True, False]
    full, everything, streaming = report["results"]
    assert full["right"] == everything["right"] == 6
    assert streaming["right"] == sum(cell["answers"][2] == cell["answers"][0] for cell in report["cells"]) < 6
    assert full["budget"] == 1.0 and full["of_full"]["share"] is None
    assert everything["budget"] == pytest.approx(1.0) and everything["of_full"]["share"]["value"] == 1.0
    # Sinks and window of sequences that grow from the prefill's length to the last step's.
    shares = []
    for first in range(0, 6, 3):
        for some in (documents[first : first + 2], documents[first + 2 : first + 3]):  # by batch
            asks = max(len(document.question_tokens) for document in some)
            length = len(some[0].ids)
            lengths = range(length - asks + 1, length + 8)
            shares += [sum((SINKS + RECENT) / tokens for tokens in lengths) / len(lengths)] * len(some)
    assert streaming["budget"] == pytest.approx(sum(shares) / 6, rel=1e-4)
    assert streaming["of_full_beyond_window"]["cells"] == 3
    table = capsys.readouterr().out
    assert "6/6" in table and f"{streaming['right']}/6" in table and "100.0 [61.0, 100.0]" in table
    assert "(not complete)" not in table


def test_what_is_there_is_not_measured_again_and_a_run_that_ended_early_ends_the_same(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = run(out="whole")
    calls, measured = [], needle_job.answer

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(needle_job, "answer", counted)
    partial = run(status=130)
    assert not partial["complete"] and len(partial["cells"]) == 3  # batches of 2, 1, 2, 1
    (path,) = (tmp_path / "out").glob("needle-*.jsonl")
    with open(path, "a") as file:
        file.write(path.read_text().splitlines()[1][:30])  # killed in the middle of a line
    again = run()
    assert len(calls) == 3 + 2
    for part in ("cells", "results", "complete"):
        assert again[part] == whole[part]
    run()
    assert len(calls) == 3 + 2
    run("--lengths", "160")  # another job, another file
    assert len(calls) == 3 + 2 + 2 and len(list((tmp_path / "out").glob("needle-*.jsonl"))) == 2


def test_cells_are_evenly_deep_and_have_documents_of_their_own() -> None:
    cells = make_cells([100, 200], 5, 2, seed=7)
    assert [cell.id for cell in cells] == list(range(20)) and [cell.seed for cell in cells] == list(range(7, 27))
    assert [cell.depth for cell in cells[:10]] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1]
    assert [cell.length for cell in cells] == [100] * 10 + [200] * 10
    assert [cell.depth for cell in make_cells([100], 1, 1, 0)] == [0.5]
    assert [len(batch) for batch in cut_batches(cells, 4)] == [4, 4, 2] * 2
    default = make_cells(needle_job.LENGTHS, needle_job.DEPTHS, 1, 0)
    assert len(default) >= 60 and default[-1].length == 4096


def item(length: int, depth: float, right: tuple[int, ...], beyond_window: bool = True) -> dict[str, Any]:
    known = {"budget": 0.5, "kept_fraction": None, "mass_mean": None}
    attended = [{**known, "budget": 1.0}, {**known, "budget": length / 1000}, {**known, "budget": None}][: len(right)]
    return {
        "length": length, "depth": depth, "right": [bool(one) for one in right], "beyond_window": beyond_window,
        "attended": attended,
    }  # fmt: skip


ITEMS = [
    item(100, 0.0, (1, 1, 0)), item(100, 0.5, (1, 1, 0)), item(100, 1.0, (1, 1, 1), beyond_window=False),
    item(200, 0.0, (1, 0, 0)), item(200, 0.5, (0, 1, 0)), item(200, 1.0, (1, 1, 1), beyond_window=False),
]  # fmt: skip


def test_figures_of_cells() -> None:
    full, ours, other = summarise_needle(ITEMS)
    assert (full["cells"], full["right"], full["budget"]) == (6, 5, 1.0)
    # What full attention does not find is not counted, whoever finds it.
    assert (ours["right"], ours["of_full"]["cells"], ours["of_full"]["right"]) == (5, 5, 4)
    share = ours["of_full"]["share"]
    assert (share["value"], round(share["low"], 4), round(share["high"], 4)) == (0.8, 0.3755, 0.9638)
    assert ours["of_full_beyond_window"]["cells"] == 3 and ours["of_full_beyond_window"]["right"] == 2
    assert [(part["length"], part["right"], part["cells"]) for part in ours["by_length"]] == [(100, 3, 3), (200, 1, 2)]
    assert ours["budget"] == pytest.approx(0.15) and other["budget"] is None
    assert other["of_full_beyond_window"]["right"] == 0 and other["of_full"]["right"] == 2
    assert summarise_needle([]) == []


def report_of(items: list[dict[str, Any]], names: Sequence[str] = ("full attention", "ours", "other")) -> Any:
    return {
        "model": "m", "dtype": "float32", "conditions": [{"name": name} for name in names], "lengths": [100, 200],
        "depths": [0.0, 0.5, 1.0], "complete": False, "results": summarise_needle(items), "cells": items,
    }  # fmt: skip


def test_the_table_has_these_figures() -> None:
    text = format_needle(report_of(ITEMS))
    rows = [line.split() for line in text.splitlines()]
    assert ["ours", "5/6", "4/5", "80.0", "[37.6,", "96.4]", "2/3", "66.7", "[20.8,", "93.9]", "0.150"] in rows
    assert ["of", "full's,", "by", "length", "100", "200"] in rows
    assert ["ours", "3/3", "1/2"] in rows and ["other", "1/3", "1/2"] in rows
    assert "(not complete)" in text
    # Nothing that full attention finds: no share.
    nothing = format_needle(report_of([item(100, 0.0, (0, 1, 1))]))
    assert ["ours", "1/1", "0/0", "0/0", "0.100"] in [line.split() for line in nothing.splitlines()]
    assert format_needle({**report_of([]), "results": []}) == "no cell was finished"


def test_the_heat_map_is_drawn_or_one_line_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_heat_map(report_of([]), tmp_path / "none.png") == "no cell was finished"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert write_heat_map(report_of(ITEMS), tmp_path / "none.png") == "matplotlib is not installed"
    pytest.importorskip("matplotlib")
    for name, items in (("whole", ITEMS), ("part", ITEMS[:2])):
        assert write_heat_map(report_of(items), tmp_path / f"{name}.png") is None
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.png", "whole.png"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "100,x"], "'x' is not a number of tokens"),
        (["--lengths", "200,200"], "not different numbers >= 1"),
        (["--lengths", "0"], "not different numbers >= 1"),
        (["--lengths", "30,200"], "--lengths gives 30"),
        (["--lengths", "9k"], "--lengths: 9224 tokens"),
        (["--depths", "0"], "'0' is not a number >= 1"),
        (["--documents", "-1"], "--documents"),
        (["--context", "7"], "--context has no effect on --tasks needle"),
        (["--data", "."], "--data has no effect on --tasks needle"),
        (["--tasks", "needle,piqa"], "needle goes by itself"),
        (["--tasks", "perplexity"], "--lengths has no effect on --tasks perplexity"),
        (["--tasks", "needel"], "did you mean 'needle'"),
        (["--weights", "random"], "their answers mean nothing"),
        (["--report", "nowhere/r.json"], "the folder does not exist"),
        (["--also", "mass=1"], "unknown word in --also mass=1"),
        (["--set", "placement.host_memory_bytes=4000000"], "what would fit: --batch"),
        (["--set", "placement.host_memory_bytes=1000"], "a smaller model or --lengths"),
    ],
)
def test_wrong_input_is_one_message_and_status_2(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert evaluate.main(["--model", str(model), "--tasks", "needle", *GRID, "--batch", "3", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")


def test_one_process_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate.main(["--tasks", "needle"]) == 2
    assert "--tasks needle is the job of one process, the launcher started 2" in capsys.readouterr().err


def test_learned_positions_end_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_tiny_model("opt", tmp_path)
    save_tokenizer(directory)
    assert evaluate.main(["--model", str(directory), "--tasks", "needle", "--lengths", "1k"]) == 2
    assert "1024 learned positions" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_finds_what_the_window_has_lost(tmp_path: Path) -> None:
    if locate("smollm2-135m").needs_download:
        pytest.skip("SmolLM2 is not on this machine")
    flags = ["--lengths", "1k", "--depths", "5", "--gpu-window", "128", "--device", "cpu"]
    also = ["--also", "strategy=streaming-llm,eviction.recent=128"]
    report_file = tmp_path / "report.json"
    assert evaluate.main(["--tasks", "needle", *flags, *also, "--report", str(report_file)]) == 0
    full, ours, streaming = json.loads(report_file.read_text())["results"]
    assert full["right"] == 5 and ours["of_full"]["right"] == 5 and ours["budget"] < 0.6
    assert streaming["of_full_beyond_window"]["right"] == 0 and streaming["right"] >= 1
