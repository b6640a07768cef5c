"""Executor `evicting` on a GPU: against the same reference as on the CPU, and whole steps as graphs."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence.dense_eviction import Rules
from tests.equivalence.test_evicting import LENGTHS, RULES, WINDOWED, Compared, open_engine
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

CUDA = {"runtime__device": "cuda", "runtime__transfer": "auto"}
ALL = {**RULES, "streaming, windowed": WINDOWED[1]}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    return ModelZoo(tmp_path_factory.mktemp("tiny-models"))


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_what_is_kept_and_what_comes_out(zoo: ModelZoo, rules: Rules, home: str) -> None:
    with open_engine(zoo, "llama-gqa2", rules, eviction__home=home, **CUDA) as llm:
        both = Compared(zoo, llm, "llama-gqa2", rules, 3, room=200)
        both.prefill(LENGTHS)
        both.decode()
        both.prefill((3, 40, 20), seed=1000)
        both.decode(12)


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_a_step_is_one_graph(zoo: ModelZoo, rules: Rules) -> None:
    outputs, held = [], []
    for graphs in (True, False):
        overrides = {**CUDA, "model__dtype": "bfloat16", "runtime__cuda_graphs": graphs}
        with open_engine(zoo, "llama-gqa2", rules, **overrides) as llm:
            batch = llm.new_batch([200])
            llm.prefill(batch, [random_tokens(100, 120, seed=1)])
            outputs.append([llm.decode(batch, [3 + step]).cpu() for step in range(12)])
            held.append([layer.attended for layer in batch.all_layers()])
            assert bool(batch.whole_step._graphs) == graphs
    assert held[0] == held[1]
    for some, other in zip(*outputs, strict=True):
        assert torch.equal(some, other)
