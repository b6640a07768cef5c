"""At partial budget the engine keeps the tokens that contracts.md says, and computes with them."""

from __future__ import annotations

import pytest

from tests.equivalence.against_engine import Case, SideBySide, Turns, engine
from tests.equivalence.dense_simulation import DenseSimulation, Settings
from tests.equivalence.tiny_models import TIES, random_tokens
from tests.equivalence.zoo import ModelZoo

# After the prefill a sequence's window holds W + (P - S - W) % 64 rows. With W 64 and S 4 that is W + 62 for
# 386 tokens, W + 40 for 236 and less than W for 50, whose host tier stays empty.
RAGGED_64: Turns = (((386, 50, 236), 36),)
RAGGED_100: Turns = (((294, 60, 230), 36),)  # with W 100: W + 62, less than W, W + 62


KEEP = Settings(window=64, keep=0.1)
MASS = Settings(window=64, keep=None, keep_mass=0.9)
PAIR = Settings(window=64, keep=0.1, keep_mass=0.9)

CASES = {
    "opt keep": Case("opt", KEEP, RAGGED_64),
    "gqa2 keep": Case("llama-gqa2", KEEP, RAGGED_64, seed=1),
    "qwen2 keep off": Case("qwen2", Settings(window=100, keep=0.1, lookahead="off"), RAGGED_100),
    "mha mass": Case("llama-mha", MASS, RAGGED_64, seed=1),
    "gqa3 mass off": Case("llama-gqa3", Settings(window=100, keep=None, keep_mass=0.9, lookahead="off"), RAGGED_100),
    "qwen2 mass": Case("qwen2", MASS, RAGGED_64),
    "opt pair": Case("opt", PAIR, RAGGED_64, seed=1),
    "gqa4 pair min 8": Case("llama-gqa4", Settings(window=100, keep=0.05, keep_mass=0.8, min_keep=8), RAGGED_100),
    "gqa2 min 64": Case("llama-gqa2", Settings(window=64, keep=0.1, min_keep=64), RAGGED_64),
    "gqa3 mass min 64": Case(
        "llama-gqa3", Settings(window=64, keep=None, keep_mass=0.9, min_keep=64), RAGGED_64, seed=3
    ),
    "mha count": Case("llama-mha", Settings(window=100, keep=24), RAGGED_100),
    "gqa2 count 1": Case("llama-gqa2", Settings(window=64, keep=1), RAGGED_64),
    "qwen2 count and mass": Case("qwen2", Settings(window=64, keep=40, keep_mass=0.9), RAGGED_64, seed=2),
    "llama3 exact select": Case(
        "llama3-rope", Settings(window=64, keep=0.1, exact_layers=(0, 2), exact_mode="select"), RAGGED_64
    ),
    "opt exact select mass": Case(
        "opt",
        Settings(window=64, keep=None, keep_mass=0.9, min_keep=8, exact_layers=(0, 1), exact_mode="select"),
        RAGGED_64,
        seed=1,
    ),
    "gqa2 off, all select": Case(
        "llama-gqa2", Settings(window=64, keep=0.1, lookahead="off", exact_mode="select"), RAGGED_64
    ),
    "gqa2 resident 0 1 4": Case("llama-gqa2", Settings(window=64, keep=0.1, exact_layers=(0, 1, 4)), RAGGED_64),
    "micro-batches of 2": Case("opt", PAIR, RAGGED_64, {"runtime__micro_batch": 2}, seed=1),
    "micro-batches of 1": Case("llama-gqa2", MASS, RAGGED_64, {"runtime__micro_batch": 1}, seed=1),
    "prefill in chunks": Case("qwen2", KEEP, RAGGED_64, {"runtime__prefill_chunk": 50}, seed=2),
    "no sinks, window 1": Case("opt", Settings(window=1, sinks=0, keep=0.1), (((190, 1, 127), 36),), seed=1),
    "20 sinks, immediate": Case(
        "llama-mha",
        Settings(window=30, sinks=20, keep=0.1, min_keep=8),
        (((240, 10, 112), 36),),
        {"runtime__transfer": "immediate"},
    ),
    "layer 0 is always exact": Case("opt", Settings(window=64, keep=0.1, exact_layers=()), RAGGED_64),
    "layer 0 selects": Case(
        "opt", Settings(window=64, keep=0.1, exact_layers=(), exact_mode="select"), RAGGED_64, seed=1
    ),
    "no scan thread": Case("llama-gqa3", PAIR, RAGGED_64, {"runtime__worker_threads": 0}),
    # A sequence that begins shorter than the window gets its first host rows in decode, layer by layer.
    "filling": Case("llama-gqa4", Settings(window=16, keep=0.1, exact_mode="select"), (((130, 10), 150),), seed=1),
    # 0.259375 x 960 is 249; a float product is a little more and would be rounded up to 250.
    "decimals": Case("llama-gqa3", Settings(window=16, keep=0.259375), (((1000,), 2),)),
}


@pytest.mark.parametrize("case", CASES)
def test_kept_sets_and_logits(zoo: ModelZoo, case: str) -> None:
    run = CASES[case].run(zoo).simulated
    if case == "decimals":
        assert 0.259375 * 960 > 249
        assert set(run.kept()) == {249}
        return
    assert sum(run.ageings().values()) >= 2  # the steps do cross ageing blocks
    assert min(record.budget for records in run.steps for record in records) < 0.85
    if case == "filling":
        ageings = run.ageings()
        assert set(ageings) == set(range(4)) and min(ageings.values()) >= 3
        grown = [[records[1].layers[layer].host_length for records in run.steps] for layer in range(4)]
        first_visible = [lengths.index(64) for lengths in grown]
        assert first_visible == sorted(set(first_visible))  # staggered: no two layers in one step
        assert min(run.kept()) == 0 and len(set(run.kept())) > 4


def test_a_mass_of_one_keeps_every_token(zoo: ModelZoo) -> None:
    """Although float32 sums reach 1 earlier. No probability is 0, so that all of it is held by all tokens."""
    case = Case("qwen2", Settings(window=1, keep=None, keep_mass=1.0), (((300, 170), 3),))
    run = case.run(zoo).simulated
    assert {record.budget for records in run.steps for record in records} == {1.0}


def test_equal_probabilities_keep_the_lower_positions(zoo: ModelZoo) -> None:
    """Seven tokens, no positions: a host of 192 rows has seven different keys in layer 0, and 20 are kept."""
    settings = Settings(window=64, keep=20, exact_mode="select")
    model = zoo.dense(TIES.name)
    simulation = DenseSimulation(model, settings)
    prompt = [token % 7 + 3 for token in random_tokens(model.vocab_size, 300, seed=1)]
    simulation.prefill(prompt)
    with engine(zoo.directory(TIES.name), settings) as llm:
        batch = llm.new_batch([310])
        llm.prefill(batch, [prompt])
        for token in (3, 7, 9, 4):
            llm.decode(batch, [token])
            ours = batch.selections()[0][0]
            for choice, chosen in zip(simulation.decode(token).layers[0].choices, ours, strict=True):
                last_kept, first_left = choice.ranking[19], choice.ranking[20]
                assert choice.p[last_kept] == choice.p[first_left] and last_kept < first_left
                assert set(chosen) == set(choice.positions)


@pytest.mark.parametrize("first", [1, 1.0], ids=["count first", "share first"])
def test_a_count_of_one_is_not_a_share_of_one(zoo: ModelZoo, first: int | float) -> None:
    """1 == 1.0 in Python, also as a key of a cache; one keeps one token, the other all of them."""
    for keep in (1, 1.0) if isinstance(first, int) else (1.0, 1):
        case = Case("llama-gqa3", Settings(window=64, keep=keep), (((200,), 1),))
        assert set(case.run(zoo).simulated.kept()) == {128 if isinstance(keep, float) else 1}


def test_two_live_batches_do_not_mix(zoo: ModelZoo) -> None:
    """Batches of equal shapes in one engine, their steps interleaved."""
    name, settings = "llama-gqa3", PAIR
    with engine(zoo.directory(name), settings) as llm:
        runs = [SideBySide(llm, zoo.dense(name), settings, [250, 250], seed) for seed in (0, 1)]
        for run in runs:
            run.prefill((200, 140))
        for _ in range(6):
            for run in runs:
                run.decode(1)
