"""What experiments work out themselves: parts of a step, rows of ablations, rates where K and V lie apart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ablations
import decode_table
import pytest
import semantic_mapping
import stage_times
from common import Point, Result
from semantic_mapping import MEMORY_POLICIES, PLATFORM_C, Traffic, traffic, with_far_memory

from hybridgen.config import Setting, build_config, load_strategy, merge_settings
from hybridgen.engine.generation import SAMPLE_EVERY
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.evaluation.comparison import UNTIMED_STEPS
from hybridgen.offload.host_memory import MemoryNode
from hybridgen.placement.hardware import Hardware
from hybridgen.predict import planned_choice

# Where a step's time goes


def report(device: str, exact: dict[str, str], waited: tuple[float, float], **stages: float) -> dict[str, Any]:
    return {
        "device": device,
        "exact_layers": exact,
        "stage_ms_per_layer": stages,
        "waited_ms_per_token": {"scan_wait": waited[0], "link_wait": waited[1]},
        "decode_ms_per_token": {"median": 50.0},
    }


def parts(of: dict[str, Any], layers: int) -> dict[str, float]:
    return stage_times.parts_of(of | {"stage_ms_per_token": stage_times._of_all_layers(of, layers)})


def test_stages_count_as_often_as_there_are_layers_with_them() -> None:
    """Ten layers: two resident, one that chooses by the true query, seven that look ahead."""
    of = report(
        "cuda:0", {"0": "resident", "1": "resident", "2": "select"}, (3.0, 5.0),
        qkv=0.5, predict=0.1, attention=0.2, mlp=1.0, lm_head=4.0, scan=0.7, choose=0.3, fetch=0.4,
    )  # fmt: skip
    found = parts(of, 10)
    assert found["QKV and predicted query"] == pytest.approx(10 * 0.5 + 7 * 0.1)
    assert found["attention"] == pytest.approx(10 * 0.2)
    assert found["MLP and LM head"] == pytest.approx(10 * 1.0 + 4.0)
    assert found["CPU busy"] == pytest.approx(8 * 0.7) and found["link busy"] == pytest.approx(8 * 0.4)
    # The GPU stood for 5 ms, for 3 of them because scores were not there.
    assert found["waits for the CPU"] == pytest.approx(3.0) and found["waits for the link"] == pytest.approx(2.0)
    assert found["the rest"] == pytest.approx(50.0 - 5.7 - 2.0 - 14.0 - 5.0)
    assert list(found) == [name for name in stage_times.COLOURS]


def test_all_layers_stream_or_attend_on_the_cpu() -> None:
    streamed = parts(report("cuda:0", dict.fromkeys("0123", "streamed"), (0.0, 9.0), stream=3.0), 4)
    assert streamed["link busy"] == pytest.approx(12.0) and streamed["waits for the link"] == pytest.approx(9.0)
    on_cpu = parts(report("cpu", dict.fromkeys("0123", "on_cpu"), (2.0, 0.5), cpu_attention=1.0, merge=0.1), 4)
    assert on_cpu["CPU busy"] == pytest.approx(4.0) and on_cpu["attention"] == pytest.approx(0.4)
    assert on_cpu["waits for the CPU"] == pytest.approx(2.0) and on_cpu["waits for the link"] == 0.0


def test_stages_are_timed_in_steps_that_make_nothing_new() -> None:
    assert stage_times.GEN > 2 * SAMPLE_EVERY and stage_times.GEN % SAMPLE_EVERY == 0
    assert SAMPLE_EVERY > UNTIMED_STEPS


def test_a_length_has_the_comparisons_reports_and_says_who_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of another machine or of other settings that the folder has, too, whichever is newer."""
    of = {**dict.fromkeys(stage_times.KEPT), **report("cuda:0", {}, (0.0, 1.0), mlp=1.0)}
    of["bytes_per_token"] = {"h2d": 3e6, "cpu_read": 0.0}
    of |= {"config": {"a": 1}, "machine": {"gpu": "here"}}
    for name, own in (
        ("aog-r0-b", {"model": "m"}),
        ("aog-r0-a", {"machine": {"gpu": "there"}}),
        ("aog-r0-c", {"config": {"a": 2}}),
        ("aoc-r0-b", {"model": "m"}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(of | own))
    same = {"summary": {}, "skipped": None, "config": of["config"]}
    strategies: list[dict[str, Any]] = [{"name": name, **same} for name in ("aog", "aoc")]
    strategies.append({"name": "hybridgen", "summary": None, "skipped": "no room"})
    content = {"model": "smollm2-135m", "prompt_tokens": 4096, "strategies": strategies, "machine": of["machine"]}
    monkeypatch.setattr(stage_times, "compare", lambda *words: content)
    settings = {"seq": "4k", "strategies": list(stage_times.STRATEGIES), "flags": []}
    found = stage_times.measure(Point("4k", settings, {"folder": tmp_path}))
    assert list(found["reports"]) == ["aog", "aoc"] and found["reports"]["aog"]["model"] == "m"
    assert found["reports"]["aoc"]["stage_ms_per_token"] == {"mlp": 30.0}
    text = stage_times.table([{"settings": settings, "result": found}])
    assert "hybridgen, 4k: no room" in text and text.count(" 4096 ") == 2


# Ablations


def test_each_row_of_the_ablations_is_a_strategy_of_its_own(tmp_path: Path) -> None:
    """With what its group changes and nothing else."""
    given = argparse.Namespace(quality_only=False, smoke=False, text=None, speed_model="m", seq="32k", out=tmp_path)
    (point,) = ablations.points(given)
    rows = {(row["group"], row["row"]): row for row in point.settings["rows"]}
    files = {name: ablations._write_row(tmp_path, row) for name, row in rows.items()}
    assert len({file.stem for file in files.values()}) == len(rows) == sum(map(len, ablations.SPEED.values()))
    configs = {name: build_config(load_strategy(str(file))) for name, file in files.items()}
    assert files["kept", "2 %, int2, GPU"].stem == "kept-2-int2-gpu"
    base = configs["lookahead", "select"]
    assert (base.selection.keep, base.selection.keep_mass, base.schedule.mode) == (0.1, None, "fixed")
    assert configs["schedule", "feedback"].schedule.mode == "feedback"
    assert configs["all tokens", "aog: shipped"].attention.executor == "streamed"
    assert [config for name, config in configs.items() if config == base] == [base]


def test_a_row_that_was_skipped_is_named() -> None:
    spent = {"decode_ms_per_token": {"median": 8.0, "p90": 9.0}, "limit_ms": 7.0, "kept_fraction": 0.1}
    spent |= {"budget": 0.2, "peak_gpu_bytes": 2**30}
    twice = spent | {"decode_ms_per_token": {"median": 16.0, "p90": 16.0}}
    rows = [{"group": "g", "row": row, "strategy": "hybridgen", "settings": {}} for row in ("select", "b", "c")]
    entries = [("g-select", spent, None), ("g-b", None, "no room"), ("g-c", twice, None)]
    result = {"model": "m", "prompt_tokens": 64, "dtype": "float16", "device": "cuda:0"}
    result["strategies"] = [{"name": name, "summary": found, "skipped": why} for name, found, why in entries]
    text = ablations.table([{"settings": {"kind": "speed", "rows": rows}, "result": result}])
    assert "g, b: no room" in text
    assert [line.split() for line in text.splitlines() if line.startswith("g ")] == [
        ["g", "select", "8.0", "9.0", "1.00", "7.0", "0.100", "0.200", "1.0"],
        ["g", "c", "16.0", "16.0", "2.00", "7.0", "0.100", "0.200", "1.0"],
    ]


# K and V in different memories

MACHINE = Hardware(
    "test", gpu_memory_gib=80, gpu_memory_gb_per_s=1000, gpu_tflops=100, h2d_gb_per_s=60, zero_copy_gb_per_s=50,
    cpu_scan_gb_per_s=100, host_dram_gb_per_s=150,
)  # fmt: skip
MOVED = Traffic(scanned=10e9, keys=1e9, values=2e9, others=1e9)


@pytest.mark.parametrize(
    ("memory", "scan", "fetch", "dram"),
    [
        ("local", 100, 50, 150),
        # V, 2 GB, comes at 20 GB/s: 3 GB in 0.1 s, and the far memory is as long at it.
        ("semantic", 100, 30, 14 / 0.1),
        # K, 10 GB scanned at 20 GB/s, and 1 GB fetched from there.
        ("inverse", 20, 50, 14 / (11 / 20)),
        # 5 of 10 GB in 0.25 s; 1.5 of 3 GB in 0.075 s; 6.5 GB in all from far.
        ("interleave", 10 / 0.25, 3 / 0.075, 14 / (6.5 / 20)),
    ],
)
def test_rates_follow_from_where_k_and_v_lie(memory: str, scan: float, fetch: float, dram: float) -> None:
    placed = with_far_memory(MACHINE, MOVED, memory, far_gb_per_s=20)
    found = (placed.cpu_scan_gb_per_s, placed.zero_copy_gb_per_s, placed.host_dram_gb_per_s)
    assert found == pytest.approx((scan, fetch, dram))


@pytest.mark.parametrize(("strategy", "keys_too"), [("hybridgen-paper", False), ("hybridgen", True)])
def test_what_is_read_of_k_and_of_v(strategy: str, keys_too: bool) -> None:
    """SmolLM2: 30 layers, of which three are resident, 3 KV heads of 64 channels in float16; 55 blocks on the host."""
    given = {"model.name": "smollm2-135m", "model.dtype": "float16", "selection.keep": 0.1, "selection.keep_mass": None}
    settings = merge_settings(load_strategy(strategy), {path: Setting(value, "test") for path, value in given.items()})
    config = build_config(settings)
    choice = planned_choice(config)
    found = traffic(choice, config, layer_modes(config, 30), 4096)
    rows, row = 55 * 64, 27 * 3 * 64 * 2
    assert found.scanned == rows * row and found.values == 352 * row
    assert found.keys == (352 * row if keys_too else 0)


def modelled(far: float) -> list[Result]:
    job = {
        "strategy": "hybridgen",
        "keep": "0.1",
        "kind": "modelled",
        "model": "smollm2-135m",
        "seq": "8k",
        "batch": 16,
    }
    points = []
    for memory in MEMORY_POLICIES:
        settings = job | {"hardware": vars(PLATFORM_C), "memory": memory, "far_gb_per_s": far}
        points.append({"settings": settings, "result": semantic_mapping.measure(Point("", settings))})
    return points


def test_a_slow_far_memory_is_worst_for_keys() -> None:
    spent = {point["settings"]["memory"]: point["result"]["ms_per_token"] for point in modelled(far=10.0)}
    assert spent["semantic"] < spent["interleave"] < spent["inverse"]
    fast = {point["settings"]["memory"]: point["result"]["ms_per_token"] for point in modelled(far=1e5)}
    assert max(fast.values()) <= 1.001 * fast["local"] and fast["local"] == pytest.approx(spent["local"])


def test_what_is_modelled_says_so() -> None:
    text = semantic_mapping.table(modelled(far=10.0))
    assert "MODELLED, not measured: platform C" in text and text.count(" modelled ") == len(MEMORY_POLICIES)


def test_with_two_memory_nodes_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [MemoryNode(0, [0, 1], 1 << 30, 1 << 30, {}), MemoryNode(1, [], 1 << 30, 1 << 30, {})]
    monkeypatch.setattr(semantic_mapping, "memory_nodes", lambda: nodes)
    asked: list[Sequence[Any]] = []

    def call(command: str, *flags: Any) -> Result:
        asked.append((command, *flags))
        return {
            "decode_ms_per_token": {"median": 7.0, "p90": 8.0}, "model": "m", "prompt_tokens": [512], "batch": 1,
            "bytes_per_token": {"cpu_read": 1e9}, "fetched_bytes_per_token": 1e8, "host_memory": {},
        }  # fmt: skip

    monkeypatch.setattr(semantic_mapping, "call", call)
    arguments = argparse.Namespace(smoke=False, modelled=False, far_gb_per_s=None)
    grid = semantic_mapping.points(arguments)
    assert {point.settings["kind"] for point in grid} == {"measured"}
    results = [{"settings": point.settings, "result": semantic_mapping.measure(point)} for point in grid]
    for memory in MEMORY_POLICIES:
        assert sum(f"placement.memory={memory}" in flags for flags in asked) == len(grid) / 4
    assert "modelled" not in semantic_mapping.table(results).lower()
    arguments.modelled = True
    assert {point.settings["kind"] for point in semantic_mapping.points(arguments)} == {"modelled"}
    monkeypatch.setattr(semantic_mapping, "memory_nodes", lambda: nodes[:1])
    arguments.modelled = False
    assert {point.settings["kind"] for point in semantic_mapping.points(arguments)} == {"modelled"}


# decode_table.py


def test_a_rows_limit_is_by_the_mean_of_what_memory_gave_before_and_after() -> None:
    report = {"limit_ms": {"scan": 100.0, "dram": 110.0, "link": 50.0, "gpu": None, "limit": 110.0}}
    assert decode_table.limit_of(report, None) == {"scan": 100.0, "dram": 110.0, "link": 50.0}
    slower = {"before": {"scan": 120e9, "together": 150e9}, "after": {"scan": 80e9, "together": 150e9}}
    found = decode_table.limit_of(report, slower)  # bytes over 120 GB/s took 100 ms: over 100 GB/s 120 ms
    assert found == pytest.approx({"scan": 120.0, "dram": 110.0, "link": 50.0})
    assert decode_table.limit_of({"limit_ms": None}, slower) == {}
