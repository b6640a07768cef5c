"""What eviction policies are made of: noise, ties, budgets, and the memory plan of their slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.config import Config, EvictionConfig, Setting, build_config, load_strategy, merge_settings
from hybridgen.engine import build, memory_plan
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.selection.eviction import POLICIES, Budget, kept_rows
from hybridgen.selection.eviction.keyformer import Keyformer, gumbel
from tests.equivalence.tiny_models import save_tiny_model

HEADS = torch.arange(4).view(4, 1, 1)
POSITIONS = torch.arange(400)


def noise(seed: int = 0, layer: int = 0) -> torch.Tensor:
    key = Keyformer(EvictionConfig("keyformer"), layer, seed, gen=8)._key
    return gumbel(key, HEADS, POSITIONS.unsqueeze(1), POSITIONS)


def test_noise_is_gumbel() -> None:
    """Mean and variance of the standard distribution; rows, columns and heads know nothing of each other."""
    x = noise()
    assert x.isfinite().all()
    assert x.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert x.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for other in (x.roll(1, 2), x.roll(1, 1), x.roll(1, 0), x.transpose(1, 2), noise(seed=1), noise(layer=1)):
        correlation = torch.corrcoef(torch.stack((x.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) < 0.01


def test_noise_depends_on_positions_alone() -> None:
    key = Keyformer(EvictionConfig("keyformer"), 3, 2**40 + 7, gen=8)._key
    whole = gumbel(key, HEADS, POSITIONS.unsqueeze(1), POSITIONS)
    some = torch.tensor([399, 5, 5, 17])
    assert torch.equal(gumbel(key, HEADS[2:], some.unsqueeze(1), some), whole[2:][:, some][:, :, some])


@pytest.mark.parametrize("budget", [Budget(1, 2, 2), Budget(0, 0, 3), Budget(0, 3, 0), Budget(2, 8, 5)])
def test_kept_rows(budget: Budget) -> None:
    """Ties: the lower position."""
    scores = torch.tensor([[9.0, 1, 3, 3, 3, 0, 7, 8], [0, 0, 0, 0, 0, 0, 0, 5]])
    expected = []
    for row in scores.tolist():
        ends = [i for i in range(8) if i < budget.sinks or i >= 8 - budget.recent]
        others = sorted((i for i in range(8) if i not in ends), key=lambda i: (-row[i], i))
        expected.append(sorted(ends + others[: budget.heavy]))
    assert kept_rows(scores, budget).tolist() == expected


@pytest.mark.parametrize(
    ("policy", "settings", "tokens", "expected"),
    [
        ("h2o", {"heavy": 0.1, "recent": 0.1}, 101, Budget(0, 11, 11)),
        ("h2o", {"heavy": 0.07, "recent": 3, "sinks": 4}, 6400, Budget(4, 448, 3)),  # not 449, as floats have it
        ("streaming_llm", {"heavy": 0, "recent": 512, "sinks": 4}, 9, Budget(4, 0, 511)),
        ("snapkv", {"heavy": 2016, "recent": 32}, 5000, Budget(0, 2016, 32)),
    ],
)
def test_budgets(policy: str, settings: dict[str, Any], tokens: int, expected: Budget) -> None:
    made = POLICIES[policy](EvictionConfig(policy, **settings), 0, 0, 8)
    assert made.budget(tokens) == expected


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    path: Path = save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("model"))

    def make(strategy: str, **values: Any) -> Config:
        values |= {"model.name": str(path), "runtime.device": "cpu", "model.dtype": "bfloat16"}
        given = {name.replace("__", "."): Setting(value, "the test") for name, value in values.items()}
        return build_config(merge_settings(load_strategy(strategy), given))

    return make


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("strategy", ["h2o", "streaming-llm", "snapkv"])
def test_the_plan(config_of: Callable[..., Config], strategy: str, home: str) -> None:
    """To the byte where the prompt fills the capacity as far as it is not generated."""
    config = config_of(strategy, eviction__home=home, run__gen=10)
    if strategy == "snapkv":
        config = replace(config, eviction=replace(config.eviction, heavy=30, recent=8))
    batch, capacity, choice = 2, 110, build.choose_model(config)
    modes = layer_modes(config, choice.spec.num_layers)
    plan = memory_plan.plan_memory(choice, config, modes, batch, capacity)
    with LLM.from_parts(config, choice, build.obtain_weights(choice, config, needs_text=False), modes) as llm:
        live = llm.new_batch([capacity] * batch)
        llm.prefill(live, [list(range(3, 103))] * batch)
        kvs: list[Any] = [layer._kv for layer in live.micro_batches[0].layers]  # type: ignore[attr-defined]
        state = sum(kv.positions.nbytes + kv.scores.nbytes + batch * 2 * kv.slots for kv in kvs)
        kv_bytes = sum(kv.keys.nbytes + kv.values.nbytes for kv in kvs)
    planned = plan.device["KV that is not evicted"] - (kv_bytes if home == "device" else 0)
    if home == "host":
        assert plan.host["KV host tier"] == kv_bytes
        assert plan.device["streamed KV of two layers"] == 2 * kv_bytes // len(kvs)
        assert state <= planned
    elif strategy == "h2o":  # shares: of the capacity, of which a tenth was no prompt
        assert 0 <= plan.device["KV that is not evicted"] - kv_bytes - state < 0.2 * (kv_bytes + state)
    else:
        assert state == planned
    assert plan.device["KV of resident layers"] == plan.device["KV of sinks and windows"] == 0
    assert plan.device["prefill: scores"] > 0
