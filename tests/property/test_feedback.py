"""`--schedule feedback` on a simulated machine: contracts.md, "Feedback"; pure numbers, no clock."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.schedule import FeedbackSchedule, FixedSchedule, StepObservation, controlled_layers
from hybridgen.engine.schedule.feedback import HOLD, LEAST_SCAN, SCAN_STEP, WAIT_HIGH
from hybridgen.types import KeepRule
from tests.property.simulated_machine import SimulatedMachine, Step, drive, last_change

MODES: tuple[LayerMode, ...] = ("resident",) * 3 + ("lookahead",) * 37
KEEP, MASS = KeepRule(0.02, None, 64), KeepRule(0.3, 0.95, 64)
MASS_TEXT = {"local_mass": 0.7, "concentration": 0.07, "missed": 0.01}  # the floor is about 7 % of the host
CASES: dict[str, tuple[KeepRule, bool, dict[str, Any]]] = {
    "random weights": (KEEP, True, {}),
    "keep alone": (KEEP, False, {}),
    "keep alone, a scan of few finds nearly all": (KEEP, False, {"missed": 0.004}),
    "mass": (MASS, False, MASS_TEXT),
    "mass, much K": (KeepRule(None, 0.9, 64), False, {}),
    "the GPU is slow": (KEEP, False, {"gpu_ms": 5.0}),
    "the link is slow": (KeepRule(0.1, None, 64), False, {"link": 0.1}),
    "the CPU is not far behind": (MASS, False, {**MASS_TEXT, "scan_us_per_token": 0.02}),
}


def scenario(name: str, **machine: Any) -> tuple[FeedbackSchedule, SimulatedMachine, KeepRule]:
    rule, random_weights, text = CASES[name]
    schedule = FeedbackSchedule(MODES, rule, 16, random_weights=random_weights)
    return schedule, SimulatedMachine(**{**text, **machine}), rule


def shares(history: list[Step]) -> list[float]:
    return [step.state[0] for step in history]


def reversals(values: list[float]) -> int:
    moves = [after - before for before, after in pairwise(values) if after != before]
    return sum(1 for before, after in pairwise(moves) if before * after < 0)


def never_below_the_floor(history: list[Step]) -> bool:
    return all(step.layer.extra >= 1 and step.seen.kept_tokens >= step.seen.floor_tokens for step in history)


# --- Settling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_settles_within_16_steps(name: str) -> None:
    history = drive(*scenario(name), 80)
    assert last_change(history) <= 16
    assert never_below_the_floor(history)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_noise_moves_nothing_beyond_the_dead_band(name: str, seed: int) -> None:
    """5 % of noise, layers that differ: after 16 steps one level more or less at most, and hardly ever."""
    history = drive(*scenario(name, noise=0.05, layer_spread=0.5, random=random.Random(seed)), 200)
    settled = history[17:]
    scans = [1.0 if step.layer.scan_tokens is None else step.scanned_share for step in settled]
    assert min(scans) >= 0.95 * SCAN_STEP * max(scans)
    assert sum(1 for before, after in pairwise(settled) if before.state != after.state) <= 6
    assert reversals(shares(settled)) <= 3
    assert never_below_the_floor(history)


def test_the_scan_follows_the_cpu_until_nothing_waits_for_it() -> None:
    last = drive(*scenario("random weights"), 20)[-1]
    assert last.layer.mode == "pre_qkt" and last.layer.extra == 1
    assert last.seen.scan_wait_ms <= WAIT_HIGH * last.seen.gpu_ms
    assert last.seen.scan_ms >= SCAN_STEP * 0.95 * last.seen.gpu_ms  # and no fewer tokens than that needs


def test_slack_of_link_and_gpu_raises_k_where_the_scan_may_not_shrink() -> None:
    history = drive(*scenario("keep alone"), 40)
    assert history[-1].layer.extra > 1
    assert history[-1].seen.link_ms < history[-1].seen.scan_ms
    blocked = next(index for index, step in enumerate(history) if step.layer.extra > 1)
    assert shares(history)[blocked] < 0.5  # first fewer tokens were scanned, as few as the mass rule allows


def test_a_larger_k_is_what_lets_the_full_scan_go_under_a_mass() -> None:
    """The floor covers just what --keep-mass asks for, so with fewer scanned it would cover less."""
    history = drive(*scenario("mass"), 40)
    first = next(step for step in history if step.layer.mode == "pre_qkt")
    assert first.layer.extra > 1 and history[-1].layer.mode == "pre_qkt"


@pytest.mark.parametrize("name", ["the GPU is slow", "the link is slow"])
def test_without_cpu_pressure_it_is_the_fixed_schedule(name: str) -> None:
    schedule, machine, rule = scenario(name)
    fixed = FixedSchedule(MODES, rule, 16)
    for step in range(40):
        plan = schedule.plan(step)
        assert [replace(layer, trial_tokens=()) for layer in plan.layers] == list(fixed.plan(step).layers)
        schedule.observe(machine.run(plan, rule))


# --- The mass rule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name != "random weights"])
@pytest.mark.parametrize("missed", [0.002, 0.01, 0.05, 0.3])
def test_what_is_covered_stays_above_what_is_asked_for(name: str, missed: float) -> None:
    schedule, machine, rule = scenario(name, missed=missed)
    for step in drive(schedule, machine, rule, 60):
        covered = machine.mass(int(step.seen.kept_tokens), int(step.seen.scanned_tokens))
        full = machine.mass(int(step.seen.kept_tokens), machine.host_tokens)
        if step.layer.mode == "pre_qkt":
            assert covered >= (rule.mass or 0.98 * full)


def test_a_text_that_changes_gives_the_scan_back() -> None:
    """The mass that a scan of few misses grows tenfold at step 40."""
    schedule, machine, rule = scenario("keep alone, a scan of few finds nearly all")

    def change(step: int) -> None:
        machine.missed = 0.004 if step < 40 else 0.04

    history = drive(schedule, machine, rule, 90, change)
    assert shares(history)[39] < 0.2
    for step in history[40 + 32 :]:
        kept = int(step.seen.kept_tokens)
        assert machine.mass(kept, int(step.seen.scanned_tokens)) >= 0.98 * machine.mass(kept, machine.host_tokens)


def test_a_breach_is_tried_again_later_and_later() -> None:
    """Trials say that fewer tokens would do, the scan itself then says no: over and over."""
    schedule = FeedbackSchedule(MODES, KEEP, 0)
    modes = []
    for step in range(8 * HOLD):
        mode = schedule.plan(step).layers[3 + (step + 1) % 37].mode  # of a layer that is not tried
        modes.append(mode)
        schedule.observe(observed(scan_wait_ms=3.0, covered_mass=0.5 if mode == "pre_qkt" else 0.9))
    starts = [step for step in range(1, len(modes)) if (modes[step - 1], modes[step]) == ("post_qkt", "pre_qkt")]
    pauses = [after - before for before, after in pairwise(starts)]
    assert len(pauses) == 3 and all(pause > HOLD * 2**times for times, pause in enumerate(pauses))


def test_random_weights_need_no_full_scans_and_shrink_to_a_minimum() -> None:
    rule = KeepRule(0.005, None, 0)
    schedule = FeedbackSchedule(MODES, rule, 0, random_weights=True)
    history = drive(schedule, SimulatedMachine(cores=0.01), rule, 30)
    assert LEAST_SCAN <= history[-1].seen.scanned_tokens <= LEAST_SCAN / SCAN_STEP + 64
    assert not any(layer.trial_tokens for layer in schedule.plan(30).layers)
    assert len({layer for layer in schedule.plan(30).layers if layer.mode != "resident"}) == 1


def test_full_scans_rotate_over_the_controlled_layers() -> None:
    schedule, machine, rule = scenario("keep alone")
    drive(schedule, machine, rule, 20)
    tried = []
    for step in range(20, 20 + 37):
        layers = schedule.plan(step).layers
        (full,) = (number for number, layer in enumerate(layers) if layer.mode == "post_qkt")
        others = {layer for number, layer in enumerate(layers) if number > 2 and number != full}
        (other,) = {replace(layer, probe_mass=False) for layer in others}
        now, fewer = layers[full].trial_tokens
        assert now == other.scan_tokens and fewer < now and layers[full].extra == other.extra
        tried.append(full)
    assert sorted(tried) == list(range(3, 40))


@pytest.mark.parametrize(("gpu_ms", "contention"), [(2.0, 0.2), (1.93, 0.6)])
def test_a_larger_scan_that_makes_layers_wait_is_tried_again_later_and_later(gpu_ms: float, contention: float) -> None:
    """What is slower in fact than in the sum of its parts: no swing between two levels."""
    schedule, machine, rule = scenario("random weights", gpu_ms=gpu_ms, scan_us_per_token=0.4, contention=contention)
    machine.cores = 0.2  # from where the scan grows, step by step, up to the level that makes layers wait
    drive(schedule, machine, rule, 20)
    machine.cores = 1.0
    history = drive(schedule, machine, rule, 400, first=20)
    sizes = shares(history)
    largest = max(sizes)
    tried = [step for step, (before, after) in enumerate(pairwise(sizes)) if before < after == largest]
    assert 3 <= len(tried) <= 6 and sizes.count(largest) < len(sizes) / 10
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps == sorted(gaps) and gaps[0] >= 30
    machine.cores = 4.0
    freed = drive(schedule, machine, rule, 32, first=420)
    assert shares(freed)[-1] > largest  # the wait is forgotten where the machine has become faster


# --- Disturbances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random weights", "keep alone", "mass"])
@pytest.mark.parametrize("seed", range(3))
def test_follows_half_of_the_cores_within_32_steps(name: str, seed: int) -> None:
    schedule, machine, rule = scenario(name, noise=0.02, gpu_ms=0.6, random=random.Random(seed))

    def load(step: int) -> None:
        machine.cores = 0.5 if 60 <= step < 120 else 1.0

    history = drive(schedule, machine, rule, 200, load)
    for begin, end in ((60, 120), (120, 200)):
        part = shares(history[begin + 32 : end])
        assert len(set(part)) <= 2 and reversals(part) == 0
    assert never_below_the_floor(history)
    if name == "random weights":  # nothing forbids to follow
        loaded, released = history[60 + 32], history[120 + 32]
        assert loaded.scanned_share < history[59].scanned_share
        for step in (loaded, released):
            assert step.seen.scan_wait_ms <= 1.5 * WAIT_HIGH * step.seen.gpu_ms
        assert released.scanned_share == pytest.approx(history[59].scanned_share, rel=0.6)


@pytest.mark.parametrize("name", ["random weights", "keep alone", "mass"])
def test_cpu_slack_brings_the_full_scan_back_and_then_the_floor(name: str) -> None:
    schedule, machine, rule = scenario(name)
    drive(schedule, machine, rule, 40)
    machine.cores = 50
    history = drive(schedule, machine, rule, 40, first=40)
    assert last_change(history) <= 32
    assert history[-1].layer.mode == "post_qkt" and history[-1].layer.extra == 1


@pytest.mark.parametrize("name", ["random weights", "keep alone", "mass"])
def test_context_growth_by_turns(name: str) -> None:
    """2k tokens more every 32 steps: the floor grows along, and holds at the first step after each turn."""
    schedule, machine, rule = scenario(name, noise=0.02, host_tokens=4096)

    def append(step: int) -> None:
        machine.host_tokens += 2048 if step and step % 32 == 0 else 0

    history = drive(schedule, machine, rule, 32 * 9, append)
    assert never_below_the_floor(history)
    for turn in range(9):
        part = shares(history[32 * turn + 17 : 32 * turn + 32])
        assert reversals(part) == 0
    assert shares(history)[-1] < 0.9  # a scan of 20k tokens is far behind


# --- --target-ms ------------------------------------------------------------------------------------


def with_target(target_ms: float, name: str = "random weights") -> tuple[FeedbackSchedule, list[Step]]:
    rule, random_weights, text = CASES[name]
    schedule = FeedbackSchedule(MODES, rule, 16, random_weights=random_weights, target_ms=target_ms)
    return schedule, drive(schedule, SimulatedMachine(**text), rule, 60)


@pytest.mark.parametrize("target_ms", [20, 40, 80, 120])
def test_a_target_is_met_and_no_more_is_given_away(target_ms: float) -> None:
    schedule, history = with_target(target_ms)
    assert not schedule.target_missed
    assert history[-1].seen.step_ms <= target_ms
    assert last_change(history) <= 32
    free = drive(*scenario("random weights"), 60)
    assert history[-1].scanned_share >= free[-1].scanned_share


def test_time_to_spare_is_spent_on_quality() -> None:
    _, history = with_target(1000)
    assert history[-1].layer.mode == "post_qkt" and history[-1].layer.extra == 4


@pytest.mark.parametrize("name", CASES)
def test_the_floor_wins_over_the_target(name: str) -> None:
    schedule, history = with_target(1, name)
    assert schedule.target_missed
    assert never_below_the_floor(history)
    assert last_change(history) <= 16


# --- Properties of the law --------------------------------------------------------------------------


def observed(**values: Any) -> StepObservation:
    base = StepObservation(
        scan_ms=3.5,
        scan_wait_ms=0.5,
        link_ms=0.2,
        link_wait_ms=0.1,
        gpu_ms=0.5,
        step_ms=40.0,
        host_tokens=32_000,
        scanned_tokens=32_000,
        kept_tokens=640,
        floor_tokens=640,
        covered_mass=0.9,
        full_scan_mass=0.9,
        trial_mass=0.9,
    )
    return replace(base, **values)


milliseconds = st.floats(0, 10)
masses = st.none() | st.floats(0.01, 1)
observations = st.builds(
    StepObservation,
    scan_ms=milliseconds,
    scan_wait_ms=milliseconds,
    link_ms=milliseconds,
    link_wait_ms=milliseconds,
    gpu_ms=milliseconds,
    step_ms=st.floats(0, 400),
    host_tokens=st.integers(0, 200_000),
    scanned_tokens=st.integers(0, 200_000),
    kept_tokens=st.integers(0, 50_000),
    floor_tokens=st.integers(0, 50_000),
    covered_mass=masses,
    full_scan_mass=masses,
    trial_mass=masses,
)
rules = st.builds(
    KeepRule, st.sampled_from([None, 0.02, 0.3, 500]), st.sampled_from([None, 0.5, 0.95, 1.0]), st.just(64)
)
SMALL: tuple[LayerMode, ...] = ("resident", "select", "lookahead", "lookahead", "lookahead")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(observations, max_size=40),
    rules,
    st.booleans(),
    st.none() | st.floats(1, 200),
    st.sampled_from([1.0, 2.0, 8.0]),
)
def test_clamps_and_determinism(
    seen: list[StepObservation], rule: KeepRule, random_weights: bool, target_ms: float | None, most_extra: float
) -> None:
    """Whatever is observed: K between floor and most_extra, the scan between its minimum and all."""
    first, again = (FeedbackSchedule(SMALL, rule, 4, random_weights, target_ms, most_extra) for _ in range(2))
    for step, observation in enumerate(seen):
        plan = first.plan(step)
        assert plan == first.plan(step) == again.plan(step)
        resident, exact, *controlled = plan.layers
        assert resident.mode == "resident"
        assert replace(exact, probe_mass=False) == FixedSchedule(SMALL, rule, 0).plan(0).layers[1]
        for layer in controlled:
            assert 1 <= layer.extra <= most_extra
            assert layer.keep is not None
            assert (layer.keep.keep, layer.keep.mass) == (rule.keep, rule.mass)
            assert layer.keep.min_keep >= rule.min_keep
            assert (layer.scan_tokens is None) == (layer.mode == "post_qkt")
            assert layer.scan_tokens is None or layer.scan_tokens > 0
        first.observe(observation)
        again.observe(observation)
        assert first.target_missed == again.target_missed
        assert target_ms is not None or not first.target_missed


def answer(schedule: FeedbackSchedule, observation: StepObservation, steps: int) -> list[tuple[int, float]]:
    """Scanned tokens and extra after each of some steps that all look alike."""
    result = []
    for step in range(steps):
        schedule.observe(observation)
        layer = schedule.plan(step + 1).layers[-2 if schedule.plan(step + 1).layers[-1].trial_tokens else -1]
        result.append((layer.scan_tokens or int(observation.host_tokens), layer.extra))
    return result


common = {
    "scan_ms": st.floats(0.1, 5),
    "link_ms": st.floats(0.01, 3),
    "gpu_ms": st.floats(0.1, 3),
    "trial_mass": st.floats(0.5, 1),
}
two = st.tuples(st.floats(0, 3), st.floats(0, 3)).map(sorted)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(common), two, st.floats(0, 1), st.booleans(), st.booleans())
def test_more_waiting_for_the_scan_never_scans_more(
    values: dict[str, float], waits: list[float], link_wait: float, random_weights: bool, scanned_less: bool
) -> None:
    less, more = (
        answer(begun(random_weights, scanned_less), observed(**values, scan_wait_ms=wait, link_wait_ms=link_wait), 20)
        for wait in waits
    )
    assert all(a[0] >= b[0] for a, b in zip(less, more, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(common), two, st.floats(0, 1), st.booleans(), st.booleans())
def test_more_waiting_for_the_link_never_keeps_more(
    values: dict[str, float], waits: list[float], scan_wait: float, random_weights: bool, scanned_less: bool
) -> None:
    less, more = (
        answer(begun(random_weights, scanned_less), observed(**values, scan_wait_ms=scan_wait, link_wait_ms=wait), 3)
        for wait in waits
    )
    assert all(a[1] >= b[1] for a, b in zip(less, more, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(common), two, st.booleans())
def test_less_covered_never_scans_less(values: dict[str, float], gap: list[float], by_mass: bool) -> None:
    results = []
    for lost in gap:
        schedule = begun(False, True, MASS if by_mass else KEEP)
        mass = 0.97 - lost / 10
        seen = {**values, "full_scan_mass": 0.97, "covered_mass": mass, "trial_mass": mass, "scan_wait_ms": 1.0}
        results.append(answer(schedule, observed(**seen), 2))
    better, worse = results
    assert all(a[0] <= b[0] for a, b in zip(better, worse, strict=True))


def begun(random_weights: bool, scanned_less: bool, rule: KeepRule = KEEP) -> FeedbackSchedule:
    """A schedule that has seen a step, and perhaps already scans less and keeps more."""
    schedule = FeedbackSchedule(SMALL, rule, 0, random_weights)
    schedule.observe(observed())
    if scanned_less:
        for _ in range(5):
            schedule.observe(observed(scan_wait_ms=3.0, covered_mass=0.99, trial_mass=0.99, full_scan_mass=0.99))
        for _ in range(5):
            schedule.observe(observed(scan_wait_ms=3.0, covered_mass=0.96, trial_mass=0.5, full_scan_mass=0.97))
    return schedule


def test_under_a_mass_fewer_scanned_keep_no_less_than_full_scans_did() -> None:
    """A rule that sees candidates only would stop early: the plan asks for the full scans' K."""
    schedule, machine, rule = scenario("mass")
    last = drive(schedule, machine, rule, 40)[-1]
    assert last.layer.mode == "pre_qkt" and last.layer.keep is not None
    assert machine.floor_tokens(rule) <= last.layer.keep.min_keep < machine.floor_tokens(rule) + 64


def test_a_choice_is_left_to_make() -> None:
    rule = KeepRule(0.1, None, 0)
    history = drive(FeedbackSchedule(MODES, rule, 0, random_weights=True), SimulatedMachine(cores=0.01), rule, 40)
    assert all(step.seen.scanned_tokens >= 2 * step.seen.kept_tokens for step in history)
    assert history[-1].seen.scanned_tokens <= 2 * history[-1].seen.kept_tokens / SCAN_STEP + 64


@pytest.mark.parametrize(
    ("seen", "lowered"),
    [
        ({"link_wait_ms": 2.0, "covered_mass": 0.97}, True),  # the link is the cause, and there is a margin
        ({"link_wait_ms": 2.0, "covered_mass": 0.955}, False),  # --keep-mass lives on the larger K
        ({"link_wait_ms": 0.0, "covered_mass": 0.97}, False),  # the GPU is the cause: not while fewer are scanned
    ],
)
def test_where_keep_mass_lives_on_the_larger_k(seen: dict[str, float], lowered: bool) -> None:
    schedule, machine, rule = scenario("mass")
    extra = drive(schedule, machine, rule, 40)[-1].layer.extra
    assert extra > 1
    quiet = {"scan_ms": 2.4, "scan_wait_ms": 0.05, "link_ms": 0.4, "link_wait_ms": 0.0, "gpu_ms": 0.95}
    quiet |= {"covered_mass": seen["covered_mass"], "trial_mass": 0.9}
    for _ in range(30):  # within the dead band, until the averages know nothing else
        schedule.observe(observed(**quiet))
    assert schedule.plan(70).layers[20].extra == extra
    for _ in range(12):
        schedule.observe(observed(**{**quiet, "scan_wait_ms": 0.0, **seen}))
    now = schedule.plan(82).layers[20]
    assert now.mode == "pre_qkt" and (now.extra < extra) is lowered


@pytest.mark.parametrize(("link_wait", "raised"), [(0.0, True), (0.3, True), (1.0, False)])
def test_k_is_raised_only_into_time_that_the_link_has_left(link_wait: float, raised: bool) -> None:
    schedule = begun(False, False)
    for _ in range(3):
        schedule.observe(observed(scan_wait_ms=1.0, link_wait_ms=link_wait, link_ms=0.5, trial_mass=0.5))
    assert (schedule.plan(9).layers[-1].extra > 1) is raised


def test_a_target_is_not_missed_while_something_can_still_be_done() -> None:
    schedule = FeedbackSchedule(MODES, KEEP, 16, random_weights=True, target_ms=1)
    machine, missed = SimulatedMachine(), []
    for step in range(20):
        plan = schedule.plan(step)
        schedule.observe(machine.run(plan, KEEP))
        missed.append((schedule.target_missed, schedule.plan(step + 1) != plan))
    assert missed[-1] == (True, False)
    assert not missed[2][0] and not any(is_missed and moved for is_missed, moved in missed[:15])


def test_state_is_of_one_request() -> None:
    first = scenario("random weights")
    drive(*first, 40)
    fresh, used = scenario("random weights")[0], first[0]
    assert fresh.plan(0) != used.plan(0)
    assert drive(*scenario("random weights"), 40)[-1].layer == drive(*scenario("random weights"), 40)[-1].layer


def test_exact_layers_are_controlled_only_where_all_are_exact() -> None:
    assert controlled_layers(SMALL) == [2, 3, 4]
    assert controlled_layers(("resident", "select", "select")) == [1, 2]
    assert controlled_layers(("resident", "resident")) == []


def test_without_a_host_tier_nothing_happens() -> None:
    schedule = FeedbackSchedule(("resident",) * 3, KEEP, 16, target_ms=5)
    empty = FeedbackSchedule(SMALL, KEEP, 0)
    for step in range(10):
        schedule.observe(observed(host_tokens=0, floor_tokens=0))
        empty.observe(observed(host_tokens=0, floor_tokens=0))
        assert all(layer.mode == "resident" for layer in schedule.plan(step).layers)
        assert empty.plan(step) == FixedSchedule(SMALL, KEEP, 0).plan(step)
