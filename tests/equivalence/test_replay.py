"""A request under `--schedule feedback` and its replay: the recorded plans give the same tokens and choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybridgen.engine.batch import Batch
from hybridgen.engine.llm import LLM
from hybridgen.engine.schedule import FeedbackSchedule, ReplaySchedule, StepObservation, decode, encode
from hybridgen.types import KeepRule, StepPlan
from tests.equivalence.against_engine import engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

STEPS = 40
LENGTHS = (800, 620)  # host tiers of 768 and 576 rows: the feedback lists no fewer than 256

KEEP = Settings(window=16, keep=0.1)
CASES: dict[str, tuple[str, Settings, dict[str, Any]]] = {
    "keep": ("llama-gqa2", KEEP, {}),
    "mass": ("llama-gqa3", Settings(window=16, keep=0.2, keep_mass=0.9), {}),
    "logits": ("opt", Settings(window=16, keep=0.1, lookahead="logits"), {}),
    "off, micro-batches of 1": ("qwen2", Settings(window=16, keep=0.1, lookahead="off"), {"runtime__micro_batch": 1}),
    "native, delta": (
        "llama-mha",
        Settings(window=16, keep=0.1, predictor="delta"),
        {"runtime__kernels": "native", "runtime__transfer": "immediate"},
    ),
    "native, mass": (
        "llama-gqa2",
        Settings(window=16, keep=0.2, keep_mass=0.9),
        {"runtime__kernels": "native", "runtime__transfer": "immediate"},
    ),
}

Choices = dict[int, list[list[list[int]]]]


def observation(step: int) -> StepObservation:
    """A CPU that others use from step 4 to 24 on, and what its layers find: lists of half the host hold enough."""
    scan = 3.0 if 4 <= step < 24 else 0.1
    return StepObservation(
        scan_ms=scan,
        scan_wait_ms=max(0.0, scan - 1.0),
        link_ms=0.2,
        link_wait_ms=0.0,
        gpu_ms=1.0,
        step_ms=5.0 + 4 * scan,
        host_tokens=672.0,
        scanned_tokens=672.0,
        kept_tokens=68.0,
        floor_tokens=68.0,
        covered_mass=0.985,
        full_scan_mass=0.99,
        trial_mass=0.984 if step < 30 else 0.7,
    )


class OnlyTold(FeedbackSchedule):
    """Does not look at the clock: only the test tells it anything."""

    def observe(self, observation: StepObservation) -> None:
        pass

    def told(self, observation: StepObservation) -> None:
        super().observe(observation)


def greedy(
    llm: LLM, batch: Batch, prompts: Sequence[Sequence[int]], after: Callable[[int], None]
) -> tuple[list[list[int]], list[Choices]]:
    """Tokens and choices of STEPS steps; `after` is called after each."""
    tokens = llm.prefill(batch, prompts).argmax(-1).tolist()
    written, chosen = [tokens], []
    for step in range(STEPS):
        tokens = llm.decode(batch, tokens).argmax(-1).tolist()
        written.append(tokens)
        chosen.append(batch.selections())
        after(step)
    return written, chosen


def feedback_engine(zoo: ModelZoo, case: str) -> tuple[LLM, list[list[int]], list[int]]:
    """With fresh prompts and the room they need."""
    name, settings, overrides = CASES[case]
    vocabulary = zoo.dense(name).vocab_size
    prompts = [random_tokens(vocabulary, length, seed=length) for length in LENGTHS]
    llm = engine(zoo.directory(name), settings, schedule__mode="feedback", **overrides)
    return llm, prompts, [length + STEPS for length in LENGTHS]


def written_down(plans: Sequence[StepPlan]) -> list[StepPlan]:
    """As a report's reader gets them."""
    return decode(json.loads(json.dumps(encode(plans))))


@pytest.mark.parametrize("case", CASES)
def test_a_replay_repeats_plans_that_change(zoo: ModelZoo, case: str) -> None:
    """Made-up observations drive the feedback: away from the full scan, and K up, and back."""
    llm, prompts, capacities = feedback_engine(zoo, case)
    with llm:
        settings, most_extra = CASES[case][1], llm.config.schedule.most_extra
        rule = KeepRule(settings.keep, settings.keep_mass, settings.min_keep)
        schedule = OnlyTold(llm.modes, rule, 0 if case == "logits" else 16, most_extra=most_extra)
        first = llm.new_batch(capacities, schedule=schedule)
        expected = greedy(llm, first, prompts, lambda step: schedule.told(observation(step)))
        layers = [layer for plan in first.plans for layer in plan.layers if layer.mode != "resident"]
        assert len(first.plans) == STEPS
        assert {layer.mode for layer in layers} == {"post_qkt", "pre_qkt"}
        assert len({layer.extra for layer in layers}) > 1
        assert len({layer.scan_tokens for layer in layers}) > 1
        assert any(layer.trial_tokens for layer in layers)

        plans = written_down(first.plans)
        assert plans == first.plans
        second = llm.new_batch(capacities, schedule=ReplaySchedule(plans, llm.modes))
        assert greedy(llm, second, prompts, lambda step: None) == expected
        assert second.plans == first.plans

        # A fixed schedule is another thing: the plans above do matter.
        fixed = llm.new_batch(capacities, schedule=ReplaySchedule(plans[:1], llm.modes))
        assert greedy(llm, fixed, prompts, lambda step: None)[1] != expected[1]


@pytest.mark.parametrize("case", ["keep", "mass"])
def test_a_replay_repeats_what_was_planned_by_the_clock(zoo: ModelZoo, case: str) -> None:
    """The engine's own feedback, told both what was measured and what was made up: whatever comes is recorded."""
    llm, prompts, capacities = feedback_engine(zoo, case)
    with llm:
        first = llm.new_batch(capacities)
        assert isinstance(first.schedule, FeedbackSchedule)
        llm.telemetry.begin_step()

        def after(step: int) -> None:
            llm.observe(first, llm.telemetry.end_step())
            first.schedule.observe(observation(step))
            llm.telemetry.begin_step()

        expected = greedy(llm, first, prompts, after)
        assert len(first.plans) == STEPS
        second = llm.new_batch(capacities, schedule=ReplaySchedule(written_down(first.plans), llm.modes))
        assert greedy(llm, second, prompts, lambda step: None) == expected


def test_each_request_begins_anew(zoo: ModelZoo) -> None:
    """State is per request: a batch's observations move no other batch's plans."""
    llm, _, capacities = feedback_engine(zoo, "keep")
    with llm:
        used, fresh = llm.new_batch(capacities), llm.new_batch(capacities)
        before = fresh.schedule.plan(0)
        for step in range(20):
            used.schedule.observe(observation(step))
        assert used.schedule.plan(20) != before and fresh.schedule.plan(0) == before
        assert llm.new_batch(capacities).schedule.plan(0) == before
        assert used.plans == fresh.plans == []  # nothing was decoded
