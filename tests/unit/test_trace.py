"""The trace file: its schema, one time base, and what `experiments/read_trace.py` reads off it."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import read_trace
from hybridgen.engine.generation import generate
from hybridgen.engine.llm import LLM
from hybridgen.engine.sampler import Sampler
from hybridgen.engine.trace import build_trace, write_trace
from hybridgen.errors import ConfigError
from hybridgen.output import check_output_path
from hybridgen.telemetry import StepTimings, Telemetry, TracedSpan
from tests.equivalence.tiny_models import TINY_MODELS, save_tiny_model

NAME = next(name for name in sorted(TINY_MODELS) if "llama" in name or "qwen" in name)
STEPS = 6


class DeviceClock:
    """Marks count milliseconds from a moment that the host does not know, as CUDA events do."""

    AHEAD_MS = 5e6

    is_costly = False

    def mark(self) -> float:
        return time.perf_counter() * 1e3 + self.AHEAD_MS

    def restart(self) -> None:
        pass

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start

    def origin(self) -> tuple[float, float]:
        now = time.perf_counter()
        return now * 1e3 + self.AHEAD_MS, now


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def row_names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}


# Telemetry


def test_only_the_steps_asked_for_are_traced() -> None:
    telemetry = Telemetry(trace_steps=2)
    steps = []
    for _ in range(4):
        telemetry.begin_step()
        with telemetry.span("qkv", 0):
            pass
        steps.append(telemetry.end_step())
    assert [len(step.spans) for step in steps] == [1, 1, 0, 0]
    assert telemetry.trace_steps == 0


def test_without_a_trace_the_clock_has_no_origin_to_give() -> None:
    """On CUDA an origin waits for the device."""

    class Clock(DeviceClock):
        def origin(self) -> tuple[float, float]:
            raise AssertionError

    telemetry = Telemetry(clock=Clock())
    telemetry.begin_step()
    with telemetry.span("qkv", 0):
        pass
    step = telemetry.end_step()
    assert step.spans == () and set(step.stage_ms) == {"qkv"}


def test_device_marks_and_host_times_share_a_time_base() -> None:
    telemetry = Telemetry(clock=DeviceClock(), trace_steps=1)
    telemetry.begin_step()
    before = time.perf_counter()
    with telemetry.span("choose", 3, row="beside"):
        between = time.perf_counter()
    telemetry.host_time("scan", 4, between, between + 1e-3, row="scan worker", moved_bytes=7)
    after = time.perf_counter()
    step = telemetry.end_step()
    assert {(span.stage, span.layer, span.row, span.bytes) for span in step.spans} == {
        ("choose", 3, "beside", 0),
        ("scan", 4, "scan worker", 7),
    }
    choose = next(span for span in step.spans if span.stage == "choose")
    slack = 1e-6  # of the float64 sums
    assert before - slack <= choose.start_s <= between + slack <= choose.end_s + 2 * slack <= after + 3 * slack
    assert step.start_s <= before and [span.start_s for span in step.spans] == sorted(s.start_s for s in step.spans)


def test_bytes_belong_to_the_span_in_which_they_are_counted() -> None:
    telemetry = Telemetry(trace_steps=1)
    telemetry.begin_step()
    telemetry.count_bytes("h2d", 1)
    with telemetry.span("fetch", 0, row="beside"):
        telemetry.count_on_device("h2d", torch.tensor([2, 3]), 10)
        telemetry.count_bytes("h2d", 4)
        with telemetry.span("inner", 0):
            telemetry.count_bytes("d2h", 8)
        telemetry.count_bytes("h2d", 16)
    telemetry.count_on_device("h2d", torch.tensor([1]), 100)
    step = telemetry.end_step()
    assert {span.stage: span.bytes for span in step.spans} == {"fetch": 70, "inner": 8}
    assert step.bytes_moved == {"h2d": 171, "d2h": 8}
    assert step.stage_bytes == {"fetch": 70, "inner": 8}


# The file


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[StepTimings]:
    """Of a tiny model whose layers but the first look ahead."""
    overrides = {
        "runtime.device": "cpu",
        "runtime.worker_threads": 1,
        "cache.gpu_window": 32,
        "model.exact_layers": [0],
        "selection.keep": 0.2,
    }
    threads = torch.get_num_threads()
    try:
        with LLM(str(save_tiny_model(NAME, tmp_path_factory.mktemp("models"))), overrides) as llm:
            batch = llm.new_batch([300])
            logits = llm.prefill(batch, [list(range(90)) * 3])
            llm.telemetry.trace_steps = STEPS
            return generate(llm, batch, logits, STEPS + 3, Sampler(llm.config.sampling, llm.device, 0)).steps
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trace(steps: list[StepTimings], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Through the file."""
    path = tmp_path_factory.mktemp("trace") / "t.json"
    write_trace(build_trace(steps, {"model": NAME}), path)
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_schema(trace: dict[str, Any]) -> None:
    assert trace["otherData"] == {"model": NAME, "steps_traced": STEPS, "steps": STEPS + 2}
    names = row_names(trace)
    assert list(names.values()) == ["step", "compute", "choice", "beside", "scan worker", "host"]
    for event in complete(trace):
        assert {"ph", "ts", "dur", "pid", "tid", "name", "args"} <= set(event)
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert event["tid"] in names and event["cat"] == names[event["tid"]]
        assert 0 <= event["args"]["step"] < STEPS
        assert event["name"] == "step" or event["args"]["layer"] >= 0
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M") and {"name", "pid", "tid"} <= set(event)


def test_every_stage_is_in_its_row(trace: dict[str, Any]) -> None:
    rows = defaultdict(set)
    for event in complete(trace):
        rows[event["cat"]].add(event["name"])
    assert rows == {
        "step": {"step"},
        "compute": {"predict", "qkv", "link_wait", "attention", "mlp", "lm_head"},
        "choice": {"choose"},
        "beside": {"fetch"},
        "scan worker": {"scan"},
        "host": {"scan_wait"},
    }
    scans = [event for event in complete(trace) if event["name"] == "scan"]
    layers = {event["args"]["layer"] for event in scans}
    assert layers and 0 not in layers and len(scans) >= STEPS * len(layers)
    assert all(event["args"]["bytes"] > 0 for event in complete(trace) if event["name"] in ("scan", "fetch"))


def test_spans_of_a_row_do_not_overlap(trace: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for event in complete(trace):
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for before, after in pairwise(sorted(spans)):
            assert before[1] <= after[0] + 1e-6


def test_everything_lies_in_its_step(trace: dict[str, Any]) -> None:
    """The scan worker's clock is its own: on another time base its spans would lie elsewhere."""
    events = complete(trace)
    whole = {e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "step"}
    assert len(whole) == STEPS and whole[0][0] == 0
    for event in events:
        start, end = whole[event["args"]["step"]]
        assert start - 0.01 <= event["ts"] and event["ts"] + event["dur"] <= end + 0.01
    predicted = {(e["args"]["step"], e["args"]["layer"]): e["ts"] + e["dur"] for e in events if e["name"] == "predict"}
    found = 0
    for event in events:
        if event["name"] == "scan":
            ready = predicted.get((event["args"]["step"], event["args"]["layer"]))
            assert ready is not None and ready - 0.01 <= event["ts"]
            found += 1
    assert found


def test_the_trace_agrees_with_the_stages(trace: dict[str, Any], steps: list[StepTimings]) -> None:
    total = defaultdict(float)
    for event in complete(trace):
        if event["name"] != "step":
            total[event["name"]] += event["dur"] / 1e3
    for stage, milliseconds in total.items():
        expected = sum(sum(step.stage_ms[stage].values()) for step in steps[:STEPS])
        assert milliseconds == pytest.approx(expected, abs=1e-2)


def test_a_scan_begins_where_the_one_before_ends() -> None:
    """Threads that have no more of one scan take of the next; rows that overlap are drawn wrongly."""
    spans = (
        TracedSpan("scan", 1, "scan worker", 10.0, 11.0, 0),
        TracedSpan("scan", 2, "scan worker", 10.5, 12.0, 0),
        TracedSpan("scan", 3, "scan worker", 13.0, 14.0, 0),
    )
    trace = build_trace([StepTimings(5e3, {}, {}, start_s=10.0, spans=spans)], {})
    scans = [(e["ts"], e["dur"]) for e in complete(trace) if e["name"] == "scan"]
    assert scans == [(0.0, 1e6), (1e6, 1e6), (3e6, 1e6)]


def test_no_steps() -> None:
    trace = build_trace([], {})
    assert complete(trace) == [] and trace["otherData"] == {"steps_traced": 0, "steps": 0}


def test_paths_are_checked(tmp_path: Path) -> None:
    check_output_path("--trace", None)
    check_output_path("--trace", tmp_path / "t.json")
    for path, why in ((tmp_path, "folder"), (tmp_path / "no" / "t.json", "does not exist")):
        with pytest.raises(ConfigError, match=f"--trace {re.escape(str(path))}.*{why}"):
            check_output_path("--trace", path)


# experiments/read_trace.py


def hand_made() -> dict[str, Any]:
    """Four steps of 100 us; the first two say nothing that counts."""
    names = {1: "step", 2: "compute", 3: "beside", 5: "scan worker"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}} for tid, name in names.items()
    ]

    def add(tid: int, name: str, layer: int, step: int, start: float, end: float) -> None:
        args = {"layer": layer, "step": step}
        events.append({"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args})

    for step in range(4):
        at, last = 100.0 * step, 100.0 if step < 3 else 140.0
        add(1, "step", 0, step, at, at + last)
        if step < 2:  # would change every share
            add(2, "mlp", 0, step, at, at + last)
            continue
        add(2, "predict", 1, step, at, at + 10)
        add(5, "scan", 1, step, at + 12, at + 40)
        add(2, "qkv", 0, step, at + 10, at + 20)  # wholly beside the scan of 1 but for 2
        add(2, "predict", 2, step, at + 30, at + 44)  # beside the scan of 1: not a later layer's
        add(3, "choose", 1, step, at + 40, at + 50)  # scan of 2 from 46: 4 of 10
        add(5, "scan", 2, step, at + 46, at + 90)
        add(3, "fetch", 1, step, at + 60, at + 100)  # until 90: 30 of 40
        add(2, "attention", 1, step, at + 50, at + 70)  # 20 of 20
        add(2, "mlp", 2, step, at + 70, at + 80)  # the scan of 2 is not later than 2
    return {"traceEvents": events, "otherData": {"model": "m"}}


def test_hand_computed_shares() -> None:
    summary = read_trace.summarize(hand_made())
    assert summary.steps == 2 and summary.ms_per_token == pytest.approx(0.12)
    assert summary.scan_share == pytest.approx(2 * (28 + 44) / 240)
    assert summary.fetch_share == pytest.approx(30 / 40)
    stages = {"predict": 0.0, "qkv": 8 / 10, "choose": 4 / 10, "attention": 1.0, "mlp": 0.0}
    assert summary.stage_shares == pytest.approx(stages)
    assert summary.kernel_share == pytest.approx((8 + 4 + 20) / (24 + 10 + 10 + 20 + 10))
    assert summary.earliest_scan_us == pytest.approx(2.0)
    # compute and beside: 0-20, 30-100
    assert summary.outside_gpu_spans == pytest.approx(1 - 2 * 90 / 240)
    assert list(summary.rows) == ["step", "compute", "scan worker", "beside"]
    compute, scans, beside = (summary.rows[row] for row in ("compute", "scan worker", "beside"))
    assert compute.spans_per_step == 5 and compute.busy_ms_per_step == pytest.approx(0.064)
    assert compute.mean_gap_ms == pytest.approx((0 + 10 + 6 + 0) / 4 / 1e3)
    assert scans.mean_gap_ms == pytest.approx(0.006) and beside.mean_gap_ms == pytest.approx(0.010)
    assert summary.rows["step"].mean_gap_ms is None


def test_what_does_not_occur_has_no_share() -> None:
    trace = hand_made()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] in ("thread_name", "step", "mlp")]
    summary = read_trace.summarize(trace)
    assert summary.scan_share == 0.0 and summary.fetch_share is None and summary.kernel_share == 0.0
    assert summary.earliest_scan_us is None and "-" in read_trace.describe(summary)


def test_scans_of_other_steps_do_not_count() -> None:
    trace = hand_made()
    for event in trace["traceEvents"]:
        if event["name"] == "scan" and event["args"]["step"] == 2:
            event["args"]["step"] = 1
    summary = read_trace.summarize(trace)
    assert summary.fetch_share == pytest.approx(30 / 80)


def test_compressed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(hand_made())
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace.load(plain) == read_trace.load(packed) == hand_made()
    monkeypatch.setattr(sys, "argv", ["read_trace.py", str(plain), str(packed)])
    assert read_trace.main() == 0
    assert capsys.readouterr().out.count("0.750") == 2


@pytest.mark.parametrize("content", ["{}", "[]", "nonsense", json.dumps({"traceEvents": []})])
def test_what_is_no_trace(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["read_trace.py", str(tmp_path / "t.json")])
    assert read_trace.main() == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_real_trace_is_read(trace: dict[str, Any]) -> None:
    summary = read_trace.summarize(trace)
    assert summary.steps == STEPS - read_trace.WARM_UP_STEPS
    assert 0 < summary.scan_share < 1 and summary.ms_per_token > 0
    assert summary.earliest_scan_us is not None and summary.earliest_scan_us > -0.01
