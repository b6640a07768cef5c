"""Executor `evicting` on a GPU: against the same reference as on the CPU, and whole steps as graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridgen.config import EvictionConfig
from hybridgen.selection.eviction import Prompt, policy_of
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


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("rules", ["h2o", "keyformer", "snapkv", "streaming, reindexed"])
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa3", "opt"])
def test_prompts_of_several_blocks(zoo: ModelZoo, name: str, rules: str, home: str) -> None:
    mine = replace(RULES[rules], reindexed=RULES[rules].reindexed and name != "opt")
    with open_engine(zoo, name, mine, eviction__home=home, **CUDA) as llm:
        both = Compared(zoo, llm, name, mine, 3, room=600)
        both.prefill((400, 129, 230))
        both.decode(20)
        both.prefill((1, 150, 64), seed=1000)
        both.decode(3)


# query heads, KV heads, channels, keys, queries
PROMPTS = [(4, 4, 128, 1500, 1500), (8, 2, 128, 1025, 600), (2, 2, 80, 777, 1), (3, 1, 64, 640, 640),
           (4, 2, 96, 300, 299), (2, 1, 256, 500, 400), (2, 2, 16, 200, 200)]  # fmt: skip


@pytest.mark.parametrize("tau", [None, 1.0, 1.7], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_scores_of_a_prompt(shape: tuple[int, int, int, int, int], dtype: torch.dtype, tau: float | None) -> None:
    """By the kernel, as by torch on the CPU from the same numbers; and to the bit as before."""
    heads, kv_heads, dim, rows, new = shape
    past = rows - new
    generator = torch.Generator().manual_seed(sum(shape))
    queries = torch.randn(heads, new, dim, generator=generator).to(dtype).transpose(0, 1)
    keys = torch.randn(kv_heads, rows, dim, generator=generator).to(dtype)
    held = torch.rand(kv_heads, 3 * past, generator=generator).argsort(-1)[:, :past].sort(-1).values
    positions = torch.cat((held, torch.arange(3 * past, 3 * past + new).expand(kv_heads, new)), 1)
    prompt = Prompt(queries.float(), keys.float(), positions, 2 / dim**0.5, 3 * past + new)
    on_gpu = replace(prompt, queries=queries.cuda(), keys=keys.cuda(), positions=positions.cuda())
    config = EvictionConfig("h2o") if tau is None else EvictionConfig("keyformer", tau_init=tau)
    policy = policy_of(config)(config, layer=3, seed=2**40 + 7, gen=10)
    expected, found = policy.score_prompt(prompt), policy.score_prompt(on_gpu)
    assert expected is not None and found is not None
    torch.testing.assert_close(found.cpu(), expected, rtol=3e-4, atol=1e-5)
    again = policy.score_prompt(on_gpu)
    assert again is not None and torch.equal(again, found)
