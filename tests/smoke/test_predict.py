"""`python -m hybridgen.predict`, from its arguments to its table and JSON; and against what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from machine_model_check import HARDWARE, as_it_was
from speed_rows import read_rows

from hybridgen.config import strategy_names
from hybridgen.placement.hardware import load_hardware
from hybridgen.predict import main
from hybridgen.run import main as run
from tests.equivalence.tiny_models import save_tiny_model

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
OPT = ("--model", "opt-13b", "--seq", "32k")
LLAMA = ("--model", "llama-3.1-8b", "--seq", "131000")
LESS = ("--gpu-memory", "32GiB", "--gen", "40", "--strategy", "hybridgen")
TENTH = ("--keep", "0.1")


def predicted(tmp_path: Path, *argv: str) -> dict[str, Any]:
    out = tmp_path / "prediction.json"
    assert main([*argv, "--out", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


POINTS = [
    ("compare_opt13b_32k_h200.json", "full", ("--strategy", "full")),
    ("compare_opt13b_32k_h200.json", "aoc", ("--strategy", "aoc")),
    ("compare_opt13b_32k_h200.json", "aog", ("--strategy", "aog")),
    ("compare_opt13b_32k_h200.json", "offload-dense", ("--strategy", "offload-dense")),
    ("compare_opt13b_32k_h200.json", "hybridgen", ("--strategy", "hybridgen", *TENTH)),
    ("compare_opt13b_32k_h200.json", "hybridgen-paper", ("--strategy", "hybridgen-paper", *TENTH)),
    ("compare_opt13b_32k_h200.json", "infinigen", ("--strategy", "infinigen", *TENTH)),
    ("compare_opt13b_32k_h200.json", "quest", ("--strategy", "quest", *TENTH)),
    ("compare_opt13b_32k_h200.json", "h2o", ("--strategy", "h2o")),
    ("decode_rows_h200.txt", "opt-13b 32k full, all resident", ("--strategy", "full")),
    ("decode_rows_h200.txt", "opt-13b 32k fp16 10%", (*LESS, *TENTH)),
    ("decode_rows_h200.txt", "opt-13b 32k int8 10%", (*LESS, *TENTH, "--key-type", "int8")),
    *(
        (
            "decode_rows_h200.txt",
            f"opt-13b 32k {home} int2 {percent}%",
            (*LESS, "--sketch", "int2", "--sketch-home", home, "--keep", str(percent / 100)),
        )
        for home, percent in (("host", 2), ("host", 10), ("gpu", 2), ("gpu", 5))
    ),
    ("decode_rows_h200.txt", "opt-13b 32k fp16 28%", (*LESS, "--keep", "0.28")),
    ("decode_rows_h200.txt", "llama-3.1-8b 131000 int8 10%", (*LLAMA, *LESS, *TENTH, "--key-type", "int8")),
    *(
        (
            "decode_rows_h200.txt",
            f"llama-3.1-8b 131000 {home} int2 2%",
            (*LLAMA, *LESS, "--sketch", "int2", "--sketch-home", home, "--keep", "0.02"),
        )
        for home in ("host", "gpu")
    ),
    *(
        ("decode_rows_h200.txt", f"opt-13b {name}", ("--seq", seq, "--batch", "8", "--gen", "40", *flags))
        for name, seq, flags in (
            ("4k x 8 aoc", "4k", ("--strategy", "aoc", "--gpu-window", "64")),
            ("512 x 8 aoc", "512", ("--strategy", "aoc", "--gpu-window", "64")),
            ("4k x 8 moe-lightning", "4k", ("--strategy", "moe-lightning", "--gpu-window", "64")),
        )
    ),
]


@pytest.mark.parametrize(("file", "row", "flags"), POINTS, ids=[row for _, row, _ in POINTS])
def test_what_was_measured_is_predicted(tmp_path: Path, file: str, row: str, flags: tuple[str, ...]) -> None:
    """Within 15 %, by the rates of its own box where they are known.

    experiments/machine_model_check.py says to which of these the model's constants were fitted.
    """
    found = next(one for one in read_rows(RESULTS / file) if one.label == row)
    box = tmp_path / "box.yaml"
    hardware = asdict(as_it_was(load_hardware(HARDWARE), found)) | {"host_memory_gib": 128.0}
    del hardware["source"]
    box.write_text(yaml.safe_dump(hardware))
    ms = predicted(tmp_path, *OPT, *flags, "--hardware", str(box))["prediction"]["ms_per_token"]
    assert ms == pytest.approx(found.ms, rel=0.15)


def test_a_policy_and_the_command_that_realises_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = predicted(tmp_path, "--model", "opt-6.7b", "--seq", "512", "--hardware", "flexgen-t4", "--batch", "auto")
    policy, found = report["policy"], report["prediction"]
    assert report["batch"] == policy["micro_batch"] * policy["num_micro_batches"] > 1
    assert 0 < policy["weights"]["gpu"] < 1 and found["bottleneck"] in found["busy_ms_per_step"]
    assert report["memory_plan"]["device_bytes"] <= report["limits"]["gpu"] == int(0.9 * int(14.6 * 2**30))
    printed = capsys.readouterr().out
    for word in ("weights", "attention on the", "memory, gpu", "memory, host", "bottleneck", "link", "tokens/s"):
        assert word in printed
    assert report["run"] in printed and f"--batch {report['batch']}" in report["run"]


def test_the_command_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine instead: where all fits, the command asks for nothing that is not there."""
    model = str(save_tiny_model("llama-gqa2", tmp_path))
    report = predicted(tmp_path, "--model", model, "--seq", "90", "--gen", "2", "--hardware", "rtx-4090")
    assert report["policy"]["kv"] == {"gpu": 1.0, "host": 0.0, "disk": 0.0}
    words = report["run"].split()
    assert words[:3] == ["python", "-m", "hybridgen.run"]
    assert run([*words[3:], "--device", "cpu", "--weights", "random"]) == 0
    capsys.readouterr()


def test_a_share_of_the_kv_on_the_gpu_is_said_once(tmp_path: Path) -> None:
    """Not beside the window that it stands for: `run` takes one of them."""
    argv = ("--model", "smollm2-135m", "--seq", "1k", "--gen", "4", "--hardware", "rtx-4090", "--gpu-memory", "1180MiB")
    report = predicted(tmp_path, *argv)
    assert 0 < report["policy"]["kv"]["gpu"] < 1
    assert "placement.kv_on_gpu=" in report["run"] and "--gpu-window" not in report["run"]
    assert main([*argv, "--set", "placement.kv_on_gpu=0.5"]) == 2, "the search chooses it"


@pytest.mark.parametrize("strategy", strategy_names())
def test_every_strategy_has_a_prediction(tmp_path: Path, strategy: str) -> None:
    flags = ("--strategy", strategy, "--batch", "2", "--hardware", "example")
    report = predicted(tmp_path, "--model", "llama-3.2-1b", "--seq", "8k", *flags)
    found = report["prediction"]
    assert found["ms_per_token"] >= max(found["busy_ms_per_step"].values()) > 0 and found["prefill_s"] > 0
    assert report["policy"] is None and report["config"]["run"]["batch"] == 2


def test_more_memory_is_never_slower(tmp_path: Path) -> None:
    for strategy in ("full", "aog", "aoc"):
        times = []
        for size in ("5GiB", "7GiB", "10GiB", "14GiB", "20GiB"):
            flags = ("--strategy", strategy, "--gpu-memory", size, "--seq", "4k", "--hardware", "example")
            times.append(predicted(tmp_path, "--model", "llama-3.1-8b", *flags)["prediction"]["ms_per_token"])
        assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--hardware"),
        (("--hardware", "nowhere"), "unknown hardware 'nowhere'"),
        (("--hardware", "example", "--batch", "0"), "'0' is neither 'auto' nor a number of sequences >= 1"),
        (("--hardware", "example", "--batch", "auto", "--strategy", "aog"), "--batch auto with --strategy"),
        (("--hardware", "example", "--weights-on-gpu", "0.5"), "the search chooses it"),
        (("--hardware", "example", "--keep", "0.1"), "0.1 (from --keep) has no effect without --strategy"),
        (("--hardware", "example", "--strategy", "flexgen"), "unknown strategy 'flexgen'"),
        (("--hardware", "example", "--out", "/nowhere/x.json"), "--out"),
        (("--hardware", "ci-2-cores"), "gpu is null"),
        (("--hardware", "example", "--model", "llama-3.1-8b", "--batch", "500"), "does not fit on example"),
        (
            ("--hardware", "rtx-4090", "--model", "opt-13b", "--strategy", "full"),
            "opt-13b by full with 1 x 32800 tokens does not fit on RTX 4090",
        ),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(argv)) == 2
    assert words in capsys.readouterr().err
