"""`attention.lookahead_layers: 2` against the oracle: queries by the input of two layers before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from hybridgen.evaluation.calibration import Texts, fit_query_maps, through_layers
from hybridgen.models.checkpoint import checkpoint_key
from hybridgen.models.query_maps import write_query_maps
from tests.equivalence.against_engine import Case, Turns
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.test_calibrated import with_maps
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

RAGGED: Turns = (((210, 12, 180), 24),)
TURNS: Turns = (((150, 20, 260), 20), ((70, 60, 1), 0), ((1, 30, 65), 9))
KEEP = Settings(window=16, keep=0.1, lookahead_layers=2)
FITTED = dataclasses.replace(KEEP, predictor="fitted")
IMMEDIATE = {"runtime__transfer": "immediate"}


def like(**changes: Any) -> Settings:
    return dataclasses.replace(KEEP, **changes)


CASES = {
    "opt": Case("opt", KEEP, RAGGED),
    "gqa2, mass": Case("llama-gqa2", like(keep=None, keep_mass=0.9), RAGGED),
    "gqa3, pair, micro-batches": Case("llama-gqa3", like(keep_mass=0.9), RAGGED, {"runtime__micro_batch": 2}, seed=1),
    "qwen2, immediate": Case("qwen2", KEEP, RAGGED, IMMEDIATE, seed=1),
    "llama3, no scan thread": Case("llama3-rope", KEEP, RAGGED, {"runtime__worker_threads": 0}),
    "gqa4, streamed weights": Case("llama-gqa4", KEEP, RAGGED, {"placement__weights_on_gpu": 0.3}),
    "delta, opt": Case("opt", like(predictor="delta"), RAGGED),
    "delta, gqa2, append": Case("llama-gqa2", like(predictor="delta"), TURNS),
    "exact 0 1 4, gqa2": Case("llama-gqa2", like(exact_layers=(0, 1, 4)), RAGGED),
    "exact 0 3, select, qwen2": Case("qwen2", like(exact_layers=(0, 3), exact_mode="select"), RAGGED),
    "int8, gqa3": Case("llama-gqa3", like(key_type="int8"), RAGGED),
    "int8, immediate": Case("llama-gqa2", like(key_type="int8"), RAGGED, IMMEDIATE),
    "int2, opt": Case("opt", like(sketch="int2"), RAGGED),
    "int2 at home, gqa2": Case("llama-gqa2", like(sketch="int2", sketch_home="gpu"), RAGGED),
    "logits, mha": Case("llama-mha", like(lookahead="logits"), RAGGED),
    "logits, delta, qwen2, append": Case("qwen2", like(lookahead="logits", predictor="delta"), TURNS),
}
WITH_MAPS = {
    "select, gqa2": Case("llama-gqa2", FITTED, RAGGED),
    "select, opt, immediate": Case("opt", FITTED, RAGGED, IMMEDIATE, seed=2),
    "logits, qwen2": Case("qwen2", dataclasses.replace(FITTED, lookahead="logits"), RAGGED),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_and_logits(zoo: ModelZoo, name: str) -> None:
    run = CASES[name].run(zoo).simulated
    assert run.ageings()  # the steps do cross ageing blocks
    assert min(record.budget for records in run.steps for record in records) < 0.9


@pytest.mark.parametrize("name", WITH_MAPS)
def test_with_maps(zoo: ModelZoo, name: str, tmp_path: Path) -> None:
    case = with_maps(zoo, WITH_MAPS[name], tmp_path / "maps.safetensors", lookahead_layers=2)
    assert min(record.budget for records in case.run(zoo).simulated.steps for record in records) < 0.9


def test_another_layer_is_looked_at(zoo: ModelZoo) -> None:
    """The oracle's choices do depend on it: else the cases above would show nothing."""
    near, far = (Case("llama-gqa2", like(lookahead_layers=ahead), RAGGED).run(zoo).simulated for ahead in (1, 2))
    assert not torch.equal(near.logits[0], far.logits[0])


@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "qwen2"])
@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
def test_full_budget_is_full_attention(zoo: ModelZoo, transfer: str, name: str) -> None:
    assert_greedy_equals_transformers(zoo, name, like(keep=1.0), runtime__transfer=transfer)


def test_maps_of_another_distance_are_refused(zoo: ModelZoo, tmp_path: Path) -> None:
    directory, file = zoo.directory("qwen2"), tmp_path / "maps.safetensors"
    with LLM(str(directory), {"runtime.device": "cpu", "attention.lookahead_layers": 2}) as llm:
        fits = fit_query_maps(llm, Texts(*([random_tokens(llm.spec.vocab_size, 90, seed=seed)] for seed in range(3))))
    maps = {fit.layer: fit.map for fit in fits}
    write_query_maps(file, maps, [0], checkpoint_key(directory), {}, lookahead_layers=2)
    given = {"runtime.device": "cpu", "attention.predictor": str(file)}
    with LLM(str(directory), {**given, "attention.lookahead_layers": 2}) as llm:
        assert len(llm.generate([[5, 6, 7] * 60], 3).output_ids[0]) == 3
    with pytest.raises(ConfigError, match=r"predict a query 2 layer\(s\) before its own"):
        LLM(str(directory), given)


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_maps_are_fitted_to(zoo: ModelZoo, ahead: int) -> None:
    """The input of the layer so many before, and of the first layer where there is none."""
    with LLM(str(zoo.directory("opt")), {"runtime.device": "cpu"}) as llm:
        sequences = [random_tokens(llm.spec.vocab_size, 40, seed=seed) for seed in range(2)]
        inputs: list[torch.Tensor] = []
        for layer, earlier, given in through_layers(llm, sequences, ahead=ahead):
            if layer.number > 0:
                assert torch.equal(earlier, inputs[max(0, layer.number - ahead)]), layer.number
            inputs.append(given.clone())
    assert len(inputs) == llm.spec.num_layers and not torch.equal(inputs[0], inputs[1])


@pytest.mark.parametrize("strategy", ["aog", "h2o", "full"])
def test_strategies_that_predict_nothing_do_not_mind(zoo: ModelZoo, strategy: str) -> None:
    outputs = []
    for ahead in (1, 2):
        with LLM(
            str(zoo.directory("opt")), {"runtime.device": "cpu", "attention.lookahead_layers": ahead}, strategy
        ) as llm:
            outputs.append(llm.generate([[5, 6, 7] * 60], 9).output_ids)
    assert outputs[0] == outputs[1]


def test_weights_have_to_come_as_early(zoo: ModelZoo) -> None:
    with pytest.raises(ConfigError, match="a depth of 2 or more"):
        LLM(str(zoo.directory("opt")), {"attention.lookahead_layers": 2, "placement.prefetch_depth": 1})
