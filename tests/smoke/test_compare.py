"""`hybridgen compare` as a user starts it, on a tiny random model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridgen import __main__, compare
from hybridgen.config import strategy_names, with_settings
from hybridgen.engine.llm import LLM
from hybridgen.engine.synthetic_kv import SYNTHETIC_KV_NOTE
from hybridgen.errors import InsufficientMemoryError
from hybridgen.evaluation import comparison_job
from hybridgen.evaluation.comparison import Reference
from hybridgen.evaluation.comparison_store import ComparisonStore

PROMPT, GEN = 400, 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=100_000, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def flags(tiny: Path, out: Path | None = None, *more: str) -> list[str]:
    argv = ["--model", str(tiny), "--weights", "random", "--seq", str(PROMPT), "--gen", str(GEN)]
    argv += ["--set", "model.exact_layers=[0]", "--gpu-window", "64"]
    return [*argv, *([] if out is None else ["--out", str(out)]), *more]


def content(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return found


def by_name(out: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in content(out)["strategies"]}


class Measured:
    """Stands before `measure`: which strategy it was called for, and what it does at the n-th call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None, error: BaseException | None = None):
        self.names: list[str] = []
        measure = compare.measure

        def watched(llm: Any, prompts: Any, reference: Any, strategy: str, plan: Any) -> Any:
            self.names.append(strategy)
            if len(self.names) == fail_at:
                assert error is not None
                raise error
            return measure(llm, prompts, reference, strategy, plan)

        monkeypatch.setattr(compare, "measure", watched)


def test_all_strategies(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["compare", *flags(tiny, tmp_path), "--strategies", "all", "--budget", "0.6"]) == 0
    out = capsys.readouterr().out
    found, entries = content(tmp_path), by_name(tmp_path)
    assert set(entries) == set(strategy_names()) and found["complete"] and found["rounds"] == 2
    assert (found["prompt_tokens"], found["gen"], found["batch"]) == (PROMPT, GEN, 1)
    assert found["matched"] == "--budget 0.6" and found["reference"]["strategy"] == "full"
    assert "random weights: agreement and KL mean nothing for quality" in out
    assert (tmp_path / "compare.txt").read_text().strip() in out
    for name, entry in entries.items():
        summary = entry["summary"]
        assert entry["skipped"] is None and summary["rounds"] == 2, name
        decode = summary["decode_ms_per_token"]
        assert 0 < decode["p10"] <= decode["median"] <= decode["p90"] and summary["prefill_s"] > 0
        assert summary["tokens_per_s"] == pytest.approx(1e3 / decode["mean"])
        if entry["attends_to_all"]:
            assert summary["budget"] == 1.0 and entry["split"] == {
                "exact": 1,
                "local": 0,
                "fetched": 0,
                "is_bound": False,
            }
            assert summary["agreement"] == 1.0 and abs(summary["kl_nats"]) < 1e-6
        elif entry["split"]["is_bound"]:
            assert summary["budget"] <= 0.62
        else:
            assert summary["budget"] == pytest.approx(0.6, abs=0.02), name
            assert f"{name} " in out and "= exact 0.1667 + local" in out
        for index in range(2):
            (report,) = (json.loads(file.read_text()) for file in tmp_path.glob(f"{name}-r{index}-*.json"))
            assert len(report["step_ms"]) == GEN - 1 - 2 and len(report["comparison"]["kl_nats"]) == GEN - 1
    assert entries["full"]["summary"]["bytes_per_token"] == {"h2d": 0, "d2h": 0, "cpu_read": 0}
    assert not list(tmp_path.glob("*.tmp"))


def test_keep_and_the_order(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round runs backwards, the third as the first. No folder: nothing is written."""
    seen = Measured(monkeypatch)
    argv = [*flags(tiny), "--strategies", "aog,hybridgen,full", "--keep", "0.25", "--rounds", "3"]
    monkeypatch.chdir(tmp_path)
    assert compare.main(argv) == 0
    forth, back = ["aog", "hybridgen", "full"], ["full", "hybridgen", "aog"]
    assert seen.names == forth + back + forth
    assert not list(tmp_path.iterdir())


def test_it_goes_on_where_it_was_interrupted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(tiny, tmp_path), "--strategies", "full,hybridgen", "--keep", "0.1"]
    with monkeypatch.context() as patch:
        seen = Measured(patch, fail_at=4, error=KeyboardInterrupt())
        assert compare.main(argv) == 130
    assert seen.names == ["full", "hybridgen", "hybridgen", "full"]
    out = capsys.readouterr().out
    assert "hybridgen" in out and "ms/token" in out, "the table so far"
    assert not content(tmp_path)["complete"]
    assert by_name(tmp_path)["hybridgen"]["summary"]["rounds"] == 2
    before = {file: file.read_bytes() for file in tmp_path.glob("*-r*-*.json")}
    assert len(before) == 3

    with monkeypatch.context() as patch:
        patch.setattr(compare, "make_reference", None)  # it is there
        seen = Measured(patch)
        assert compare.main(argv) == 0
    assert seen.names == ["full"] and content(tmp_path)["complete"]
    assert all(file.read_bytes() == text for file, text in before.items())

    with monkeypatch.context() as patch:
        patch.setattr(compare, "_load", None)  # nothing is left to be run, so nothing is loaded
        assert compare.main(argv) == 0
    assert "already" in capsys.readouterr().out

    seen = Measured(monkeypatch)  # another share is another comparison
    assert compare.main([*argv[:-1], "0.2"]) == 0
    assert seen.names == ["hybridgen", "hybridgen"], "to full attention it is the same"


def test_a_crash_keeps_what_is_done(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*flags(tiny, tmp_path), "--strategies", "full,hybridgen", "--keep", "0.1"]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a fault"):
        Measured(patch, fail_at=3, error=RuntimeError("a fault"))
        compare.main(argv)
    seen = Measured(monkeypatch)
    assert compare.main(argv) == 0
    assert seen.names == ["hybridgen", "full"]


def test_damaged_and_foreign_files_are_measured_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(tiny, tmp_path), "--strategies", "full,hybridgen,aog", "--keep", "0.1", "--rounds", "1"]
    assert compare.main(argv) == 0
    (damaged,), (foreign,) = tmp_path.glob("full-r0-*"), tmp_path.glob("aog-r0-*")
    sound = damaged.read_text()
    damaged.write_text(sound[:-100])
    other = json.loads(foreign.read_text())
    other["comparison"]["reference_name"] = "another"
    foreign.write_text(json.dumps(other))
    capsys.readouterr()
    seen = Measured(monkeypatch)
    assert compare.main(argv) == 0
    assert seen.names == ["full", "aog"]
    out = capsys.readouterr().out
    assert f"{damaged} is damaged" in out and "aog, round 0: of another continuation" in out

    for file in tmp_path.glob("reference-*"):
        file.write_bytes(file.read_bytes()[:1000])
    foreign.unlink()
    seen.names.clear()
    assert compare.main(argv) == 0
    assert seen.names == ["aog"] and "is made again" in capsys.readouterr().out

    for file in tmp_path.glob("reference-*"):
        with file.open("wb") as stream:
            np.save(stream, np.zeros(3))
    lacking = {key: value for key, value in json.loads(sound).items() if key != "peak_gpu_bytes"}
    damaged.write_text(json.dumps(lacking))
    seen.names.clear()
    assert compare.main(argv) == 0
    out = capsys.readouterr().out
    assert seen.names == ["full"] and "'peak_gpu_bytes' is missing" in out and "is made again" in out


@pytest.mark.parametrize(
    "change",
    [
        {"comparison": {}}, {"comparison": None}, {"comparison": {"agreement": [1], "kl_nats": [0]}},
        {"step_ms": []}, {"step_ms": [0]}, {"step_ms": ["a"]}, {"budget": None}, {"bytes_per_token": {}},
        "machine", "reference_name", 3,
    ],
    ids=str,
)  # fmt: skip
def test_a_round_that_lacks_something_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    report: dict[str, Any] = dict.fromkeys(("model", "weights", "device", "dtype", "machine"), "x") | {
        "batch": 1, "step_ms": [1.0], "prefill_s": 1.0, "bytes_per_token": {"h2d": 1, "d2h": 1, "cpu_read": 1},
        "gpu_idle_fraction": None, "limit_ms": {"limit": 1.0}, "peak_gpu_bytes": None, "budget": 1.0,
        "kept_fraction": None,
        "comparison": {"reference": "full", "reference_name": "a", "kl_nats": [0.0], "agreement": [1.0]},
    }  # fmt: skip
    store = ComparisonStore(tmp_path)
    store.save("x", "key", 0, report)
    assert store.rounds("x", "key", 1) == {0: report}
    if isinstance(change, dict):
        report |= change
    elif isinstance(change, str):
        report.pop(change, None)
        report["comparison"].pop(change, None)
    (tmp_path / "x-r0-key.json").write_text(json.dumps([change] if change == 3 else report))
    assert store.rounds("x", "key", 1) == {}
    assert "is damaged" in capsys.readouterr().out


def test_one_that_does_not_fit_is_skipped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full attention: then aog is what the others are compared with. One that fails later leaves the others alone."""
    admit = comparison_job.admit

    def small(choice: Any, config: Any, *arguments: Any) -> Any:
        if config.attention.executor == "full":
            raise InsufficientMemoryError("all KV does not fit\nmemory plan: ...\nwhat would fit: --seq 256")
        return admit(choice, config, *arguments)

    monkeypatch.setattr(comparison_job, "admit", small)
    Measured(monkeypatch, fail_at=2, error=RuntimeError("CUDA out of memory. Tried to allocate\nmore"))
    argv = [*flags(tiny, tmp_path), "--strategies", "full,aoc,hybridgen,aog", "--keep", "0.2"]
    assert compare.main(argv) == 0
    out, entries = capsys.readouterr().out, by_name(tmp_path)
    assert "full: skipped, all KV does not fit; what would fit: --seq 256" in out
    assert "reference: aog" in out and content(tmp_path)["reference"]["strategy"] == "aog"
    assert entries["full"]["summary"] is None and entries["hybridgen"]["skipped"].startswith("out of memory")
    assert entries["aog"]["summary"]["rounds"] == entries["aoc"]["summary"]["rounds"] == 2
    assert entries["aog"]["summary"]["kl_nats"] == pytest.approx(0, abs=1e-6)


def test_nothing_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> Any:
        raise InsufficientMemoryError("nothing fits")

    monkeypatch.setattr(comparison_job, "admit", refuse)
    assert compare.main([*flags(tiny), "--keep", "0.2"]) == 2
    assert capsys.readouterr().err == "error: nothing fits\n"


def test_the_distance_is_that_of_full_attention_along_its_own_tokens(tiny: Path, tmp_path: Path) -> None:
    """By a loop of its own, in float64."""
    argv = flags(tiny, tmp_path, "--strategies", "hybridgen-paper", "--keep", "0.05", "--rounds", "1")
    assert compare.main(argv) == 0
    (file,) = tmp_path.glob("hybridgen-paper-r0-*.json")
    report = json.loads(file.read_text())
    reference = Reference.load(next(iter(tmp_path.glob("reference-*.npz"))))
    settings = {"model.weights": "random", "model.exact_layers": [0], "cache.gpu_window": 64, "runtime.device": "cpu"}
    prompt = torch.randint(300, (1, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    paper = {"selection.keep": 0.05, "selection.keep_mass": None, "selection.min_keep": 0}
    with LLM(str(tiny), settings, "full") as full, LLM(str(tiny), {**settings, **paper}, "hybridgen-paper") as other:
        batches = [llm.new_batch([PROMPT + GEN]) for llm in (full, other)]
        token = full.prefill(batches[0], prompt).argmax(-1)
        other.prefill(batches[1], prompt)
        tokens, distances, agreements = [int(token)], [], []
        for _ in range(GEN - 1):
            p, q = (
                llm.decode(batch, token).double().softmax(-1) for llm, batch in zip((full, other), batches, strict=True)
            )
            distances.append(float((p * (p / q).log()).sum()))
            agreements.append(float(p.argmax() == q.argmax()))
            token = p.argmax(-1)
            tokens.append(int(token))
    assert reference.tokens.tolist() == [tokens]
    assert report["comparison"]["kl_nats"] == pytest.approx(distances, abs=1e-6)
    assert report["comparison"]["agreement"] == agreements
    assert max(distances) > 1e-5, "there is something to be seen"


def test_a_batch_and_a_strategy_file(tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("attention: {executor: hybrid, lookahead: 'off'}\nselection: {keep: 0.5, keep_mass: null}\n")
    out = tmp_path / "out"
    argv = flags(tiny, out, "--strategies", f"{own},aoc", "--batch", "2", "--rounds", "1", "--keep", "40")
    assert compare.main(argv) == 0
    mine = by_name(out)["mine"]
    assert content(out)["batch"] == 2 and mine["config"]["selection"]["keep"] == 40
    summary = mine["summary"]
    assert summary["tokens_per_s"] == pytest.approx(2e3 / summary["decode_ms_per_token"]["mean"])


def test_random_weights_fall_back_to_a_share(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = flags(tiny, tmp_path, "--strategies", "hybridgen", "--rounds", "1")
    assert compare.main(argv) == 0
    assert "--keep 0.1 is used" in capsys.readouterr().out
    assert by_name(tmp_path)["hybridgen"]["config"]["selection"]["keep"] == 0.1


def test_weights_that_come_out_random(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer is known when the plans are made already. What is done is found again."""
    load = compare._load

    def offline(choice: Any, config: Any) -> Any:
        return load(choice, with_settings(config, {"model.weights": "random"}))

    monkeypatch.setattr(compare, "_load", offline)
    argv = flags(tiny, tmp_path, "--strategies", "hybridgen,aog", "--rounds", "1")
    del argv[2:4]
    assert compare.main(argv) == 0
    selection = by_name(tmp_path)["hybridgen"]["config"]["selection"]
    assert (selection["keep"], selection["keep_mass"], selection["min_keep"]) == (0.1, None, 0)
    assert content(tmp_path)["weights"] == "random"
    seen = Measured(monkeypatch)
    assert compare.main(argv) == 0
    assert not seen.names

    given = tmp_path / "given"
    argv = flags(tiny, given, "--strategies", "hybridgen", "--rounds", "1", "--set", "selection.keep=0.4")
    del argv[2:4]
    assert compare.main(argv) == 0
    assert content(given)["weights"] == "random" and content(given)["matched"] is None
    assert by_name(given)["hybridgen"]["config"]["selection"]["keep"] == 0.4


def test_what_random_weights_keep_is_admitted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StreamingLLM's window grows from 8 to 0.1 of the prompt: the limits are those before the weights were loaded."""
    load, admit, seen = compare._load, comparison_job.admit, []

    def noted(choice: Any, config: Any, *arguments: Any, limits: Any = None) -> Any:
        if config.attention.executor == "evicting":
            seen.append((config.eviction.recent, limits))
            if config.eviction.recent == PROMPT // 10:
                raise InsufficientMemoryError("too much now")
        return admit(choice, config, *arguments, limits=limits)

    monkeypatch.setattr(comparison_job, "admit", noted)
    monkeypatch.setattr(compare, "_load", lambda *a: load(a[0], with_settings(a[1], {"model.weights": "random"})))
    own = tmp_path / "mine.yaml"
    own.write_text("attention: {executor: evicting}\neviction: {policy: streaming_llm, heavy: 0, recent: 8}\n")
    argv = flags(tiny, tmp_path / "out", "--strategies", f"full,{own}", "--rounds", "1")
    del argv[2:4]
    assert compare.main(argv) == 0
    assert seen[0] == (8, None) and seen[-1][0] == 40 and seen[-1][1][1] > 0
    entries = by_name(tmp_path / "out")
    assert entries["mine"]["skipped"] == "too much now" and entries["full"]["summary"] is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "0.5", "--keep", "0.1"], "--budget 0.5 and --keep 0.1"),
        (["--budget", "0"], "--budget 0: allowed is a fraction"),
        (["--budget", "1.5"], "--budget 1.5: allowed is a fraction"),
        (["--budget", "0.2", "--strategies", "hybridgen"], "hybridgen attends to more .* smallest possible is 0."),
        (["--budget", "0.2"], r"[3-9] strategies .*: hybridgen 0\.\d+, .*, quest 0.*possible for all is 0\.\d+"),
        (["--set", "attention.executor=hybrid"], "--set attention.executor=hybrid: the strategies decide that"),
        (["--keep", "1.5"], "selection.keep = 1.5 .from --keep 1.5."),
        (["--budget", "0.5", "--set", "selection.keep=0.2"], "--set selection.keep=0.2: --budget decides"),
        (["--budget", "0.5", "--set", "model.exact_layers_mode=auto"], "exact_layers_mode"),
        (["--strategies", "full,hybrid"], "unknown strategy 'hybrid'"),
        (["--strategies", "full,full"], "two of them have the same name"),
        (["--strategies", ","], "give names"),
        (["--rounds", "0"], "--rounds 0"),
        (["--gen", "3"], "--gen 3: .*allowed is >= 4"),
        (["--set", "cache.gpuwindow=3"], "unknown setting 'cache.gpuwindow'"),
        (["--out", "/dev/null/x"], "--out /dev/null/x"),
    ],
)
def test_wrong_inputs(tiny: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert compare.main([*flags(tiny), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_flag_that_one_strategy_cannot_have_skips_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags(tiny, tmp_path, "--strategies", "aoc,aog", "--rounds", "1", "--set", "cache.key_type=int8")
    assert compare.main([*argv, "--keep", "0.1"]) == 0
    assert "cache.key_type = 'int8'" in by_name(tmp_path)["aog"]["skipped"]
    assert by_name(tmp_path)["aoc"]["summary"] is not None


def test_a_policy_that_refuses_a_flag_is_skipped(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --keep the recent tokens lie beside, and a line says so."""
    argv = flags(tiny, tmp_path, "--strategies", "h2o,streaming-llm", "--rounds", "1", "--keep", "0.1")
    argv += ["--set", "eviction.heavy=0.2"]
    assert compare.main(argv) == 0
    out = capsys.readouterr().out
    assert "it scores nothing" in by_name(tmp_path)["streaming-llm"]["skipped"]
    assert by_name(tmp_path)["h2o"]["summary"] is not None
    assert "--keep 0.1: a cache that evicts keeps" in out and "recent tokens beside them" in out
    assert compare.main([*argv, "--list-strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (refused,) = (line for line in lines if line.startswith("streaming-llm"))
    assert re.match(r"streaming-llm +refused: eviction.heavy = 0.2", refused) and max(map(len, lines[:4])) < 150


def test_each_smallest_budget_and_that_of_all(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*flags(tiny), "--budget", "0.2"]) == 2
    error = capsys.readouterr().err
    smallest = [float(number) for number in re.findall(r"[a-z] (0\.\d{4})[,;]", error)]
    assert len(smallest) > 2 and float(error.split()[-1]) == max(smallest)


def test_list_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    """Of any known model and length, without its weights."""
    assert compare.main(["--list-strategies", "--model", "llama-3.1-8b", "--seq", "32k", "--dtype", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "llama-3.1-8b, float16, 1 x 32768 tokens" in lines[0]
    rows = {line.split()[0]: line for line in lines[3:] if line}
    assert set(rows) == set(strategy_names())
    assert rows["full"].split()[-3:] == ["0.00"] * 3
    assert float(rows["offload-dense"].split()[-1]) == pytest.approx(4295 * (32768 - 68 - 32) / 32768, rel=0.002)
    assert "<=" in rows["hybridgen"] and "by mass 0.95, keep 0.3" in rows["hybridgen"]
    assert "within 4 of the largest logit, at most 0.2 of them" in rows["infinigen"]
    assert "20 % of the columns of skewed keys on the device" in rows["infinigen"]
    assert "bounds of pages of 16 tokens on the device" in rows["quest"]


def test_synthetic_kv(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All strategies decode over the same random K and V, and table and files say that these are synthetic."""
    more = ("--synthetic-kv", "--strategies", "full,hybridgen,aoc", "--keep", "1.0", "--rounds", "1")
    assert compare.main(flags(tiny, tmp_path, *more)) == 0
    assert capsys.readouterr().out.count(SYNTHETIC_KV_NOTE) == 2
    for entry in by_name(tmp_path).values():
        assert entry["config"]["runtime"]["synthetic_kv"] is True
        assert abs(entry["summary"]["kl_nats"]) < 1e-6
