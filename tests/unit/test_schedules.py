"""The fixed, the paper's and the replayed schedule: pure numbers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen.config import Setting, build_config
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule import (
    FixedSchedule,
    PaperSchedule,
    ReplaySchedule,
    StepObservation,
    decode,
    encode,
    read_plans,
)
from hybridgen.engine.schedule.average import RunningAverages
from hybridgen.engine.scheduling import make_schedule
from hybridgen.errors import ConfigError
from hybridgen.types import KeepRule, LayerPlan, StepPlan

RULE = KeepRule(0.1, None, 0)
MODES: tuple[LayerMode, ...] = ("resident", "lookahead", "resident", "lookahead", "select")


def latencies(host_ms: float, device_ms: float, host_tokens: int = 1000) -> StepObservation:
    return StepObservation(
        scan_ms=host_ms * 0.75,
        scan_wait_ms=0,
        link_ms=host_ms * 0.25,
        link_wait_ms=0,
        gpu_ms=device_ms,
        step_ms=1,
        host_tokens=host_tokens,
        scanned_tokens=host_tokens,
        kept_tokens=50,
        floor_tokens=50,
    )


# --- fixed ------------------------------------------------------------------------------------------


# --- paper (algorithms.md 7.4) ----------------------------------------------------------------------


def decide(schedule: PaperSchedule, host_ms: float, device_ms: float, times: int = 1) -> LayerPlan:
    """The plan after `times` decisions on the same latencies."""
    for _ in range(4 * times):
        schedule.observe(latencies(host_ms, device_ms))
    return schedule.plan(0).layers[1]


def ratio(plan: LayerPlan) -> float:
    assert plan.keep is not None and isinstance(plan.keep.keep, float)
    return plan.keep.keep


def test_paper_begins_with_a_full_scan_and_a_ratio_of_5_percent() -> None:
    layers = PaperSchedule(MODES, 0).plan(0).layers
    assert layers[0] == layers[2] == LayerPlan("resident", None)
    assert layers[1] == layers[3] == layers[4] == LayerPlan("post_qkt", KeepRule(0.05, None, 1))


def test_paper_decides_every_interval_by_the_mean_of_it() -> None:
    schedule = PaperSchedule(MODES, 0)
    for host in (1, 1, 1):
        schedule.observe(latencies(host, 2))
        assert ratio(schedule.plan(0).layers[1]) == 0.05
    schedule.observe(latencies(5, 2))  # 8 against 8
    assert ratio(schedule.plan(0).layers[1]) == 0.06
    off = PaperSchedule(MODES, 0, interval=0)
    for _ in range(20):
        off.observe(latencies(9, 1))
    assert off.plan(20) == PaperSchedule(MODES, 0).plan(0)


def test_paper_raises_the_ratio_to_half() -> None:
    schedule = PaperSchedule(MODES, 0)
    assert ratio(decide(schedule, 1, 2)) == pytest.approx(0.06)
    assert ratio(decide(schedule, 1, 2)) == pytest.approx(0.072)
    assert ratio(decide(schedule, 1, 2, 30)) == 0.5


def test_paper_caps_the_scan_only_once_the_ratio_is_at_its_floor() -> None:
    schedule = PaperSchedule(MODES, 0)
    plans = [decide(schedule, 2, 1) for _ in range(16)]
    assert [round(ratio(plan), 4) for plan in plans[:3]] == [0.04, 0.032, 0.0256]
    first = next(index for index, plan in enumerate(plans) if plan.mode == "pre_qkt")
    assert ratio(plans[first - 1]) == ratio(plans[first]) == 0.01
    assert all(plan.scan_tokens is None and plan.mode == "post_qkt" for plan in plans[:first])
    assert [plan.scan_tokens for plan in plans[first : first + 6]] == [500, 250, 125, 62, 32, 32]
    # and back: ratio x 1.2; the cap x 1.2, at least by one, dropped when it reaches the host
    wider = [decide(schedule, 1, 1) for _ in range(22)]
    assert [plan.scan_tokens for plan in wider[:3]] == [38, 45, 54]
    assert ratio(wider[0]) == pytest.approx(0.012)
    assert wider[-1].mode == "post_qkt" and wider[-1].scan_tokens is None


def test_paper_as_the_port_has_it_tightens_both_at_once() -> None:
    schedule = PaperSchedule(MODES, 0, both_at_once=True)
    plan = decide(schedule, 2, 1)
    assert (ratio(plan), plan.mode, plan.scan_tokens) == (0.04, "pre_qkt", 500)


def test_paper_probes_like_fixed() -> None:
    plans = [PaperSchedule(MODES, 16).plan(step) for step in range(64)]
    probed = {step: [i for i, layer in enumerate(plan.layers) if layer.probe_mass] for step, plan in enumerate(plans)}
    assert {step: layers for step, layers in probed.items() if layers} == {0: [1], 16: [3], 32: [4], 48: [1]}


# --- replay -----------------------------------------------------------------------------------------

rules = st.builds(
    KeepRule,
    st.none() | st.integers(1, 500) | st.floats(0.001, 1),
    st.none() | st.floats(0.1, 1),
    st.integers(0, 128),
)
layers = st.just(LayerPlan("resident", None)) | st.builds(
    LayerPlan,
    mode=st.sampled_from(["post_qkt", "pre_qkt"]),
    keep=rules,
    scan_tokens=st.none() | st.integers(1, 10_000),
    probe_mass=st.booleans(),
    extra=st.floats(1, 8),
    trial_tokens=st.lists(st.integers(64, 10_000), max_size=2).map(tuple),
)
few_layers = st.lists(layers, min_size=1, max_size=3)
few_steps = few_layers.flatmap(lambda kinds: st.lists(st.lists(st.sampled_from(kinds), min_size=4, max_size=4)))


@settings(max_examples=60, deadline=None)
@given(few_steps)
def test_decode_inverts_encode(chosen: list[list[LayerPlan]]) -> None:
    steps = [StepPlan(tuple(layers)) for layers in chosen]
    coded = json.loads(json.dumps(encode(steps)))
    again = decode(coded)
    assert again == steps
    assert repr(again) == repr(steps)  # 1 (a token) and 1.0 (all) stay apart
    for entry, following in pairwise(coded):
        assert repr(entry["layers"]) != repr(following["layers"])


def test_equal_neighbours_are_written_once() -> None:
    keep_one, keep_all = (LayerPlan("post_qkt", KeepRule(keep, None, 0)) for keep in (1, 1.0))
    resident = LayerPlan("resident", None)
    steps = [StepPlan((resident, keep_one, keep_one, keep_all))] * 5 + [StepPlan((resident,) * 4)]
    coded = encode(steps)
    assert [(entry["steps"], [layer["count"] for layer in entry["layers"]]) for entry in coded] == [
        (5, [1, 2, 1]),
        (1, [4]),
    ]
    assert coded[0]["layers"][1]["full_scan"] is True and coded[0]["layers"][0]["full_scan"] is False


def report(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_replay_repeats_each_step_and_then_the_last(tmp_path: Path) -> None:
    source = PaperSchedule(MODES, 4)
    plans = []
    for step in range(40):
        plans.append(source.plan(step))
        source.observe(latencies(3 if step < 20 else 1, 2))
    path = report(tmp_path / "report.json", {"scheduler": {"steps": encode(plans)}})
    replay = ReplaySchedule(read_plans(path), MODES)
    for step in range(60):
        assert replay.plan(step) == plans[min(step, 39)]
        replay.observe(latencies(9, 1))


def test_a_report_of_an_older_version_can_be_replayed(tmp_path: Path) -> None:
    keep = {"keep": 0.1, "mass": None, "min_keep": 0}
    layers = [
        {"mode": "resident", "keep": None, "scan_tokens": None, "full_scan": False, "count": 1},
        {"mode": "post_qkt", "keep": keep, "scan_tokens": None, "full_scan": True, "count": 2},
    ]
    plans = read_plans(report(tmp_path / "r.json", {"scheduler": {"steps": [{"steps": 2, "layers": layers}]}}))
    fixed = FixedSchedule(("resident", "select", "lookahead"), RULE, 0)
    assert plans == [fixed.plan(0), fixed.plan(1)]


@pytest.mark.parametrize("modes", [("streamed",) * 3, ("on_cpu",) * 3])
def test_where_nothing_is_chosen_every_schedule_plans_the_same(modes: tuple[LayerMode, ...], tmp_path: Path) -> None:
    plan = StepPlan((LayerPlan("all", None),) * 3)
    assert FixedSchedule(modes, RULE, 16).plan(0) == PaperSchedule(modes, 16).plan(0) == plan
    for mode in ("fixed", "feedback"):
        config = build_config({"schedule.mode": Setting(mode, "test")})
        assert make_schedule(config, modes, random_weights=False).plan(0) == plan
    path = report(tmp_path / "r.json", {"scheduler": {"steps": encode([plan] * 3)}})
    assert ReplaySchedule(read_plans(path), modes).plan(7) == plan
    for wrong in ("resident", "lookahead"):
        with pytest.raises(ConfigError, match=f"plans layer 0 as all, but here it is {wrong}"):
            ReplaySchedule([plan], (wrong,) * 3)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (MODES[:4], r"r\.json: step 0 plans 5 layers, but the model has 4"),
        (("resident",) * 5, r"plans layer 1 as post_qkt, but here it is resident"),
        (("lookahead",) * 5, r"plans layer 0 as resident, but here it is lookahead"),
        (("streamed",) * 5, r"plans layer 0 as resident, but here it is streamed"),
    ],
)
def test_replay_of_another_model(modes: tuple[LayerMode, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplaySchedule([FixedSchedule(MODES, RULE, 0).plan(0)], modes, "r.json")
    with pytest.raises(ConfigError, match="no decode step"):
        ReplaySchedule([], modes, "r.json")


LAYER = {"mode": "post_qkt", "keep": None, "scan_tokens": None, "count": 1}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '"scheduler"',
        {"scheduler": None},
        {"scheduler": {"steps": 3}},
        {"scheduler": {"steps": [{}]}},
        {"scheduler": {"steps": [{"steps": 1, "layers": [{**LAYER, "mode": "quest"}]}]}},
        {"scheduler": {"steps": [{"steps": 1, "layers": [{**LAYER, "keep": {"kept": 1}}]}]}},
        {"scheduler": {"steps": [{"steps": "1", "layers": [LAYER]}]}},
    ],
)
def test_not_a_report(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ConfigError, match=r"not a report with scheduler\.steps"):
        read_plans(report(tmp_path / "r.json", content))


def test_reports_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plans(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="directory"):
        read_plans(tmp_path)
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a report"):
        read_plans(binary)


# --- averages ---------------------------------------------------------------------------------------


def test_averages() -> None:
    averages = RunningAverages(0.25)
    for value in (1.0, 2.0, 3.0, 4.0):
        averages.add(scan=value, mass=None)
    assert averages["scan"] == pytest.approx(2.5)  # plain mean so far
    averages.add(scan=6.5, link=1.0)
    assert averages["scan"] == pytest.approx(3.5)  # and exponential from here
    assert (averages.count("scan"), averages.count("mass"), averages.get("mass")) == (5, 0, None)
    averages.keep(["link"])
    assert (averages.get("scan"), averages["link"], averages.count("scan")) == (None, 1.0, 0)


def test_where_the_gpu_scores_no_plan_of_candidates_is_replayed(tmp_path: Path) -> None:
    plans = [StepPlan((LayerPlan("pre_qkt", RULE, 500),))]
    path = report(tmp_path / "r.json", {"scheduler": {"steps": encode(plans)}})
    values = {"cache.sketch": "int2", "cache.sketch_home": "gpu", "schedule.mode": f"replay:{path}"}
    config = build_config({name: Setting(value, "test") for name, value in values.items()})
    with pytest.raises(ConfigError, match="pre_qkt"):
        make_schedule(config, ("lookahead",), random_weights=False)
