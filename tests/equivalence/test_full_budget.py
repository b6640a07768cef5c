"""With everything kept, hybrid attention gives the tokens of transformers' greedy decoding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.against_engine import engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.tiny_models import TINY_MODELS, random_tokens
from tests.equivalence.zoo import ModelZoo

STEPS = 24
LENGTHS = (207, 12, 130)
EVERYTHING = Settings(keep=1.0, window=16)


def assert_greedy_equals_transformers(
    zoo: ModelZoo,
    name: str,
    settings: Settings,
    lengths: tuple[int, ...] = LENGTHS,
    strategy: str = "hybridgen",
    **overrides: Any,
) -> None:
    vocab_size = zoo.dense(name).vocab_size
    prompts = [random_tokens(vocab_size, length, seed=length) for length in lengths]
    expected = [zoo.greedy(name, tuple(prompt), STEPS) for prompt in prompts]
    with engine(zoo.directory(name), settings, strategy, **overrides) as llm:
        batch = llm.new_batch([length + STEPS for length in lengths])
        tokens = llm.prefill(batch, prompts).argmax(1).tolist()
        output = [[token] for token in tokens]
        for _ in range(STEPS - 1):
            tokens = llm.decode(batch, tokens).argmax(1).tolist()
            for sequence, token in zip(output, tokens, strict=True):
                sequence.append(token)
    assert output == expected


@pytest.mark.parametrize("lookahead", ["select", "off"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_family_and_group_size(zoo: ModelZoo, name: str, lookahead: Any) -> None:
    assert_greedy_equals_transformers(zoo, name, Settings(keep=1.0, window=16, lookahead=lookahead))


@pytest.mark.parametrize("lengths", [(207,), (207, 12, 130)], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("window", [1, 64, 300])
@pytest.mark.parametrize("name", ["opt", "llama-gqa3"])
def test_every_window(zoo: ModelZoo, name: str, window: int, lengths: tuple[int, ...]) -> None:
    assert_greedy_equals_transformers(zoo, name, Settings(keep=1.0, window=window), lengths)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("opt", Settings(keep=None, keep_mass=1.0, window=16)),
        ("qwen2", Settings(keep=None, keep_mass=1.0, window=16, lookahead="off")),
        ("llama-gqa2", Settings(keep=1.0, keep_mass=1.0, window=16, min_keep=64)),
        ("llama-gqa4", Settings(keep=9999, window=16)),
        ("llama3-rope", Settings(keep=1.0, window=16, exact_mode="select")),
        ("llama-mha", Settings(keep=0.1, window=16, exact_layers=(0, 1, 2, 3))),
        ("qwen2", Settings(keep=0.1, window=16, min_keep=1000)),
        ("opt", Settings(keep=1.0, window=16, sinks=0)),
    ],
    ids=["mass", "mass off", "pair", "count", "exact select", "all resident", "min_keep", "no sinks"],
)
def test_every_way_to_keep_everything(zoo: ModelZoo, name: str, settings: Settings) -> None:
    assert_greedy_equals_transformers(zoo, name, settings)


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize(("name", "lookahead"), [("opt", "off"), ("qwen2", "select")])
def test_micro_batches(zoo: ModelZoo, name: str, lookahead: Any, micro_batch: int) -> None:
    settings = Settings(keep=1.0, window=16, lookahead=lookahead)
    assert_greedy_equals_transformers(zoo, name, settings, runtime__micro_batch=micro_batch)


@pytest.mark.parametrize("chunk", [1, 50, 64])
def test_prefill_in_chunks(zoo: ModelZoo, chunk: int) -> None:
    assert_greedy_equals_transformers(zoo, "llama-gqa2", EVERYTHING, runtime__prefill_chunk=chunk)


@pytest.mark.parametrize("strategy", ["full", "aog", "aoc", "offload-dense"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_strategies_that_choose_nothing(zoo: ModelZoo, name: str, strategy: str) -> None:
    assert_greedy_equals_transformers(zoo, name, Settings(keep=0.1, window=16), strategy=strategy)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("lengths", [(207,), (207, 12, 130)], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("strategy", ["aog", "aoc", "offload-dense"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_they_do_not_either_with_immediate_transfers(
    zoo: ModelZoo, name: str, strategy: str, lengths: tuple[int, ...], kernels: str
) -> None:
    assert_greedy_equals_transformers(
        zoo, name, Settings(keep=0.1, window=16), lengths, strategy, runtime__transfer="immediate",
        runtime__kernels=kernels,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["full", "aog", "aoc", "offload-dense"])
def test_they_do_not_in_micro_batches_and_chunks(zoo: ModelZoo, strategy: str) -> None:
    assert_greedy_equals_transformers(
        zoo, "opt", EVERYTHING, strategy=strategy, runtime__micro_batch=2, runtime__prefill_chunk=50
    )


def test_immediate_transfers(zoo: ModelZoo) -> None:
    assert_greedy_equals_transformers(zoo, "qwen2", EVERYTHING, runtime__transfer="immediate")
