"""Changing plans on CUDA: candidates, unscored candidates, a larger K; a feedback run that is replayed; no waiting."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.engine.schedule import ReplaySchedule, Schedule
from hybridgen.types import KeepRule, LayerPlan, StepPlan
from tests.equivalence.tiny_models import TINY_MODELS, save_tiny_model

PROMPT_LENGTHS = (400, 150, 310)
STEPS = 40


def engine(model: Path, device: str, **overrides: object) -> LLM:
    settings = {
        "runtime.device": device,
        "model.dtype": "float32",
        "cache.gpu_window": 64,
        "model.exact_layers": [0],
        "selection.min_keep": 8,
        "selection.keep": 0.2,
        "schedule.mode": "feedback",
        **overrides,
    }
    return LLM(str(model), settings)


def decode(llm: LLM, schedule: Schedule | None) -> tuple[list[list[int]], list[StepPlan]]:
    """Greedy ids of each step, and what was planned."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    batch = llm.new_batch([len(prompt) + STEPS for prompt in prompts], schedule)
    tokens = llm.prefill(batch, prompts).argmax(-1)
    ids = [tokens.tolist()]
    for _ in range(STEPS):
        llm.telemetry.begin_step()
        tokens = llm.decode(batch, tokens).argmax(-1)
        ids.append(tokens.tolist())
        llm.observe(batch, llm.telemetry.end_step())
    return ids, batch.plans


def mixed_plans(modes: tuple[str, ...], rule: KeepRule, seed: int) -> list[StepPlan]:
    """Full scans, lists of several sizes (some no larger than K) and a larger K, changing every few steps."""
    draw = random.Random(seed)
    plans: list[StepPlan] = []
    while len(plans) < STEPS:
        layers = []
        for mode in modes:
            if mode == "resident":
                layers.append(LayerPlan("resident", None))
                continue
            extra = draw.choice((1.0, 1.0, 1.5, 2.0))
            size = draw.choice((None, 1, 48, 64, 100, 1000))
            layers.append(LayerPlan("post_qkt" if size is None else "pre_qkt", rule, size, extra=extra))
        plans += [StepPlan(tuple(layers))] * draw.choice((1, 2, 5))
    return plans[:STEPS]


@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
@pytest.mark.parametrize("mass", [None, 0.9])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_plans_that_change_give_the_tokens_of_the_cpu(
    name: str, mass: float | None, lookahead: str, directory: Path
) -> None:
    model = save_tiny_model(name, directory)
    found = []
    for device in ("cuda", "cpu"):
        with engine(model, device, **{"attention.lookahead": lookahead}) as llm:
            plans = mixed_plans(llm.modes, KeepRule(0.2, mass, 8), seed=3)
            found.append(decode(llm, ReplaySchedule(plans, llm.modes))[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("keep", [{"selection.keep": 0.2}, {"selection.keep_mass": 0.9, "selection.keep": 0.5}])
def test_a_feedback_run_is_replayed(keep: dict[str, object], directory: Path) -> None:
    model = save_tiny_model(sorted(TINY_MODELS)[0], directory)
    with engine(model, "cuda", **keep) as llm:
        ids, plans = decode(llm, None)
        again, _ = decode(llm, ReplaySchedule(plans, llm.modes))
    assert ids == again


@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
def test_decode_never_waits_for_the_stream(lookahead: str, directory: Path) -> None:
    """Without a word: a scalar from pageable memory, say. The tickets' waits for an event are meant, and not seen here.

    Over 80 steps blocks age, lists are made anew and plans change.
    """
    model = save_tiny_model(sorted(TINY_MODELS)[0], directory)
    with engine(model, "cuda", **{"attention.lookahead": lookahead, "runtime.mass_probe_interval": 0}) as llm:
        plans = mixed_plans(llm.modes, KeepRule(0.2, None, 8), seed=3) * 3
        batch = llm.new_batch([500] * 2, ReplaySchedule(plans, llm.modes))
        tokens = llm.prefill(batch, [list(range(90)) * 4] * 2).argmax(-1)
        for step in range(100):
            # The first round compiles, and loads modules, which waits.
            torch.cuda.set_sync_debug_mode("error" if step >= STEPS else "default")
            try:
                logits = llm.decode(batch, tokens)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            tokens = logits.argmax(-1)
