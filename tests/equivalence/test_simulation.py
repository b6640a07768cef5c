"""The oracle itself: equal to transformers at full budget, and its rules on hand-made numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.equivalence.dense_simulation import (
    Choice,
    DenseSimulation,
    Settings,
    ageing_threshold,
    cap,
    choose,
    disagreement,
    prefill_host_length,
)
from tests.equivalence.tiny_models import TINY_MODELS, random_tokens
from tests.equivalence.zoo import ModelZoo

# Float32 inference of these models is within 1e-4 of float64 (measured: up to 4e-5 on logits of up to 10).
FP32 = 1e-4
FP64 = 1e-10


def hf_logits(zoo: ModelZoo, name: str, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return zoo.hf(name, dtype)(torch.tensor([tokens])).logits[0].double()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_dense_model_equals_transformers(zoo: ModelZoo, name: str) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 260, seed=5)
    simulation = DenseSimulation(model, Settings())
    ours = simulation.prefill(tokens)
    for dtype, tolerance in ((torch.float64, FP64), (torch.float32, FP32)):
        theirs = hf_logits(zoo, name, tokens, dtype)[-1]
        assert (ours - theirs).abs().max() < tolerance, dtype
    assert ours.std() > 0.3  # not flat


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        (Settings(keep=1.0, window=16), 150),
        (Settings(keep=1.0, window=16, lookahead="off", exact_mode="select"), 150),
        (Settings(keep=None, keep_mass=1.0, window=64), 210),
        (Settings(keep=0.01, window=400), 150),
        (Settings(keep=0.01, window=1, exact_layers=tuple(range(6))), 150),
    ],
    ids=["keep 1.0", "off", "mass 1.0", "window >= prompt", "all exact"],
)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_full_budget_decode_equals_transformers(zoo: ModelZoo, name: str, settings: Settings, prompt: int) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, prompt + 70, seed=6)
    theirs = hf_logits(zoo, name, tokens, torch.float64)
    simulation = DenseSimulation(model, settings)
    assert (simulation.prefill(tokens[:prompt]) - theirs[prompt - 1]).abs().max() < FP64
    for position in range(prompt, len(tokens)):
        record = simulation.decode(tokens[position])
        assert (record.logits - theirs[position]).abs().max() < FP64, position
        assert record.budget == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["opt", "llama-gqa2"])
def test_appends_equal_one_prefill_at_full_budget(zoo: ModelZoo, name: str) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 230, seed=7)
    theirs = hf_logits(zoo, name, tokens, torch.float64)
    simulation = DenseSimulation(model, Settings(keep=1.0, window=16))
    for first, last in ((0, 90), (90, 91), (91, 200), (200, 230)):
        assert (simulation.prefill(tokens[first:last]) - theirs[last - 1]).abs().max() < FP64
        assert set(simulation.host_lengths[1:]) == {prefill_host_length(last, 4, 16)}


def test_partial_budget_is_a_real_restriction(zoo: ModelZoo) -> None:
    """The attention of the tiny models is peaked, and predicted, true and full attention all differ."""
    model = zoo.dense("llama-gqa2")
    tokens = random_tokens(model.vocab_size, 300, seed=8)
    logits, masses, kept = {}, [], []
    for label, settings in {
        "full": Settings(keep=1.0),
        "select": Settings(keep=0.1),
        "off": Settings(keep=0.1, lookahead="off"),
        "mass": Settings(keep=None, keep_mass=0.9),
    }.items():
        simulation = DenseSimulation(model, settings)
        simulation.prefill(tokens[:-1])
        record = simulation.decode(tokens[-1])
        logits[label] = record.logits
        tiered = [layer for layer in record.layers if layer.tiered]
        if label == "select":
            masses = [mass for layer in tiered for mass in layer.mass]
        if label == "mass":
            kept = [len(choice.positions) for layer in tiered for choice in layer.choices]
            assert all(mass >= 0.9 for layer in tiered for mass in layer.mass)
    assert 0.5 < min(masses) < max(masses) < 0.999
    assert len(set(kept)) > 4 and max(kept) < 150
    for a, b in (("full", "select"), ("full", "off"), ("select", "off"), ("full", "mass")):
        assert (logits[a] - logits[b]).abs().max() > 100 * FP32, (a, b)


# ---------------------------------------------------------------------------------------------------------
# The rules, on numbers worked out by hand


def test_cap_is_exact_for_decimals() -> None:
    assert 0.07 * 6400 > 448  # what a float product would do
    assert cap(0.07, 6400) == 448
    assert cap(0.1, 640) == 64 and cap(0.1, 641) == 65 and cap(0.1, 0) == 0
    assert cap(1.0, 640) == 640 and cap(1e-5, 64) == 1
    assert cap(1, 640) == 1 and cap(100, 64) == 100


P = [0.10, 0.05, 0.20, 0.05, 0.30, 0.05, 0.15, 0.10]
HOST = range(1, 7)  # position 0: a sink; position 7: window; together 0.2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(keep=0.5), [4, 2, 6]),
        (Settings(keep=0.51), [4, 2, 6, 1]),  # three tokens have 0.05: the lower positions first
        (Settings(keep=0.67), [4, 2, 6, 1, 3]),
        (Settings(keep=1), [4]),
        (Settings(keep=1, min_keep=2), [4, 2]),
        (Settings(keep=99), [4, 2, 6, 1, 3, 5]),
        (Settings(keep=0.1, min_keep=99), [4, 2, 6, 1, 3, 5]),
        (Settings(keep=None, keep_mass=0.15), []),  # sinks and window hold it
        (Settings(keep=None, keep_mass=0.45), [4]),
        (Settings(keep=None, keep_mass=0.51), [4, 2]),
        (Settings(keep=None, keep_mass=0.71), [4, 2, 6]),
        (Settings(keep=None, keep_mass=1.0), [4, 2, 6, 1, 3, 5]),
        (Settings(keep=0.3, keep_mass=0.71), [4, 2]),  # the cap binds
        (Settings(keep=0.9, keep_mass=0.51), [4, 2]),  # the mass binds
        (Settings(keep=0.3, keep_mass=0.71, min_keep=4), [4, 2, 6, 1]),
        (Settings(keep=0.3, keep_mass=0.15, min_keep=1), [4]),
        (Settings(keep=3, keep_mass=0.95), [4, 2, 6]),
    ],
)
def test_choose(settings: Settings, expected: list[int]) -> None:
    assert choose(P, HOST, settings).positions == expected


@pytest.mark.parametrize(
    ("other", "accepted"),
    [
        ([4, 2, 6, 1], True),
        ([4, 2, 6, 3], True),  # equal p
        ([2, 4, 6, 1], False),  # order
        ([4, 2, 6], False),
        ([4, 2, 6, 1, 3], False),
        ([4, 2, 1, 3], False),
        ([4, 2, 6, 6], False),
        ([4, 2, 6, 0], False),  # a sink
        ([4, 2, 6, 7], False),  # a window row
    ],
)
def test_disagreement(other: list[int], accepted: bool) -> None:
    settings = Settings(keep=4)
    assert (disagreement(choose(P, HOST, settings), other) is None) == accepted


def test_count_may_differ_by_one_at_the_threshold_only() -> None:
    settings = Settings(keep=None, keep_mass=0.7)  # 0.2 + 0.3 + 0.2: exactly what two tokens hold
    choice = choose(P, HOST, settings)
    for count, accepted in ((1, False), (2, True), (3, True), (4, False)):
        assert (disagreement(choice, choice.ranking[:count]) is None) == accepted
    capped = dataclasses.replace(settings, keep=1)
    assert disagreement(choose(P, HOST, capped), [4, 2]) is not None


def test_host_tier_by_hand() -> None:
    lengths = {tokens: prefill_host_length(tokens, 4, 100) for tokens in (1, 104, 167, 168, 231, 232, 400)}
    assert lengths == {1: 0, 104: 0, 167: 0, 168: 64, 231: 64, 232: 128, 400: 256}
    assert [ageing_threshold(layer, 6, 100) for layer in range(6)] == [164, 174, 185, 196, 206, 217]


def test_ageing_during_decode_by_hand(zoo: ModelZoo) -> None:
    """A prompt of 130 tokens, W 20: the host begins with 64 rows, the window with 130 - 4 - 64 = 62. Layer 3
    of 4 ages when the window holds 20 + 64 + 48 = 132 rows: after 70 steps, visible in the 71st."""
    simulation = DenseSimulation(zoo.dense("llama-mha"), Settings(window=20, keep=2))
    simulation.prefill(random_tokens(113, 130, seed=9))
    seen = [simulation.decode(token).layers for token in random_tokens(113, 80, seed=10)]
    for layer, steps in ((1, 38), (2, 54), (3, 70)):
        assert [step[layer].host_length for step in seen] == [64] * steps + [128] * (80 - steps)
    assert not seen[0][0].tiered
    assert all(step[0].attended == [131 + i] * 3 for i, step in enumerate(seen))
    assert seen[0][1].attended == [131 - 64 + 2] * 3
    assert seen[0][1].budget == pytest.approx(69 / 131)
    record = seen[40][1]
    assert all(math.isclose(sum(choice.p), 1.0) for choice in record.choices)
    assert all(len(choice.p) == 130 + 40 for choice in record.choices)  # the new token is not in it


def test_a_wrong_choice_is_reported_and_not_followed(zoo: ModelZoo) -> None:
    tokens = random_tokens(113, 200, seed=11)
    settings = Settings(window=16, keep=8)
    right, judged = (DenseSimulation(zoo.dense("llama-gqa2"), settings) for _ in range(2))
    right.prefill(tokens)
    judged.prefill(tokens)
    own = right.decode(5)
    follow = {i: [c.positions for c in layer.choices] for i, layer in enumerate(own.layers) if layer.tiered}
    wrong = {**follow, 3: [own.layers[3].choices[0].ranking[1:9], follow[3][1]]}
    record = judged.decode(5, wrong)
    assert len(record.problems) == 1 and "layer 3: KV head 0" in record.problems[0]
    assert torch.equal(record.logits, own.logits)


def test_choice_keeps_the_ranking() -> None:
    choice = choose(P, HOST, Settings(keep=2))
    assert isinstance(choice, Choice) and choice.ranking == [4, 2, 6, 1, 3, 5]
    assert choice.mass(2) == pytest.approx(0.7)
