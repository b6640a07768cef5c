"""Predictor `prompt`: maps that the prefill fits, against a float64 fit of the oracle's own layer inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.engine.llm import LLM
from hybridgen.engine.prompt_maps import FIT_TOKENS, PRIOR_TOKENS, fitted_map
from hybridgen.models.base import QueryMap
from tests.equivalence.against_engine import Case, Turns
from tests.equivalence.dense_simulation import DenseModel, Settings
from tests.equivalence.simulated_batch import SimulatedBatch
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

RAGGED: Turns = (((210, 12, 180), 20),)
TURNS: Turns = (((150, 20, 260), 9), ((70, 60, 1), 4))  # the second prompts are shorter: the maps stay
SELECT = Settings(window=16, keep=0.1, predictor="fitted")
LOGITS = dataclasses.replace(SELECT, lookahead="logits")
CASES = {
    "select, gqa2": Case("llama-gqa2", SELECT, RAGGED),
    "select, opt, mass": Case("opt", dataclasses.replace(SELECT, keep=None, keep_mass=0.9), RAGGED, seed=1),
    "select, gqa3, micro-batches": Case("llama-gqa3", SELECT, RAGGED, {"runtime__micro_batch": 2}),
    "select, qwen2, streamed weights": Case("qwen2", SELECT, RAGGED, {"placement__weights_on_gpu": 0.3}),
    "select, llama3, chunks": Case("llama3-rope", SELECT, RAGGED, {"runtime__prefill_chunk": 50}),
    "select, opt, two ahead": Case("opt", dataclasses.replace(SELECT, lookahead_layers=2), RAGGED, seed=1),
    "logits, gqa2, append": Case("llama-gqa2", LOGITS, TURNS),
    "logits, qwen2, two ahead": Case("qwen2", dataclasses.replace(LOGITS, lookahead_layers=2), RAGGED),
    "logits, opt, exact 0 2": Case("opt", dataclasses.replace(LOGITS, exact_layers=(0, 2)), RAGGED),
}


def ridge(own: QueryMap, features: Tensor, true: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """What `fitted_map` says, as plain least squares: the ridge is rows that want no change."""
    bias = 0.0 if own.bias is None else own.bias
    wanted = true @ own.weight.T - features @ own.weight.T
    channels, variances = features.shape[1], features.var(0, correction=0)
    v = max(float(variances.sort().values[(channels - 1) // 2]), float(variances.mean()) / 100)  # the lower median
    rows = torch.cat([features, (prior * v) ** 0.5 * torch.eye(channels, dtype=features.dtype)])
    rows = torch.cat([rows, torch.zeros(len(rows), 1, dtype=features.dtype)], 1)
    rows[: len(features), -1] = 1.0  # the constant, which is free
    targets = torch.cat([wanted, wanted.new_zeros(channels, wanted.shape[1])])
    change = torch.linalg.lstsq(rows, targets).solution
    return own.weight + change[:-1].T, bias + change[-1]


def oracle_maps(model: DenseModel, groups: Sequence[Sequence[Sequence[int]]], ahead: int) -> dict[int, Any]:
    """groups: the prompts of each micro-batch. All of their tokens are few enough to be fitted to."""
    each = [model.layer_inputs(prompt) for prompts in groups for prompt in prompts]
    inputs = [torch.cat(parts) for parts in zip(*each, strict=True)]
    maps = {}
    for layer in range(1, model.num_layers):
        name = f"{model.prefix}.layers.{layer}.self_attn.q_proj"
        own = QueryMap(model.weights[f"{name}.weight"], model.weights.get(f"{name}.bias"))
        features, true = (model.attention_input(layer, inputs[at]) for at in (max(0, layer - ahead), layer))
        maps[layer] = ridge(own, features, true, PRIOR_TOKENS)
    return maps


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_and_logits(zoo: ModelZoo, name: str) -> None:
    case = CASES[name]
    model, (lengths, _) = zoo.dense(case.model), case.turns[0]
    assert sum(lengths) <= FIT_TOKENS
    prompts = SimulatedBatch(model, case.settings, len(lengths), case.seed).prompts(lengths)
    model.fitted = oracle_maps(model, [prompts], case.settings.lookahead_layers)
    run = dataclasses.replace(case, overrides={**case.overrides, "attention__predictor": "prompt"}).run(zoo)
    assert min(record.budget for records in run.simulated.steps for record in records) < 0.9
    fitted = run.batch.prompt_maps
    assert fitted is not None and fitted.tokens == sum(lengths)
    predicted = [layer for layer in range(model.num_layers) if layer and layer not in case.settings.exact_layers]
    assert sorted(fitted.maps) == predicted
    for layer, found in fitted.maps.items():
        weight, bias = model.fitted[layer]
        own = model.weights[f"{model.prefix}.layers.{layer}.self_attn.q_proj.weight"]
        assert (weight - own).abs().max() > 1e-3, "there is something to fit"
        assert torch.allclose(found.weight.double(), weight, atol=2e-5), layer
        assert found.bias is not None and torch.allclose(found.bias.double(), bias, atol=2e-5), layer


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("tokens", "channels"), [(40, 96), (96, 96), (300, 96), (2, 16)])
def test_the_fit_is_least_squares(tokens: int, channels: int, biased: bool) -> None:
    """Solved among tokens or among channels, with features that are far from zero and of unlike size."""
    seeded = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seeded, dtype=torch.float64)

    size = 10 ** normal(channels)
    features = (normal(tokens, channels) + 3.0) * size
    true = features + 0.3 * normal(tokens, channels) * size + 0.1
    own = QueryMap(normal(24, channels) / size.mean(), normal(24) if biased else None)
    plain = QueryMap(own.weight.float(), None if own.bias is None else own.bias.float())
    found = fitted_map(plain, features.float(), true.float())
    expected = ridge(own, features, true, PRIOR_TOKENS)
    queries = [features @ weight.double().T + bias for weight, bias in (found, expected)]
    assert torch.allclose(*queries, rtol=0, atol=1e-4 * float(queries[1].abs().max()))


def llm(zoo: ModelZoo, name: str = "llama-gqa2", **values: Any) -> LLM:
    given = {"runtime.device": "cpu", "model.dtype": "float32", "cache.gpu_window": 16, "runtime.worker_threads": 0}
    given |= {"attention.predictor": "prompt", "selection.keep": 0.1, "model.exact_layers": [0]}
    given |= {path.replace("__", "."): value for path, value in values.items()}
    return LLM(str(zoo.directory(name)), given)


@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "qwen2"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_full_budget_is_full_attention(zoo: ModelZoo, name: str, ahead: int) -> None:
    settings = Settings(keep=1.0, window=16, predictor="fitted", lookahead_layers=ahead)
    assert_greedy_equals_transformers(zoo, name, settings, attention__predictor="prompt")


def test_a_longer_prompt_fits_anew_and_a_shorter_one_does_not(zoo: ModelZoo) -> None:
    with llm(zoo) as engine:
        batch = engine.new_batch([700])
        maps = batch.prompt_maps
        assert maps is not None
        seen = []
        for length in (80, 30, 300):
            engine.prefill(batch, [random_tokens(engine.spec.vocab_size, length, seed=length)])
            seen.append((maps.tokens, maps.maps[2].weight.clone(), maps.maps[2].weight.data_ptr()))
    assert [tokens for tokens, *_ in seen] == [80, 80, 300]
    assert torch.equal(seen[0][1], seen[1][1]) and not torch.equal(seen[1][1], seen[2][1])
    assert len({place for *_, place in seen}) == 1  # graphs of launches read it there


def test_of_a_long_prompt_some_tokens_from_all_of_it(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same maps as of a fit to those tokens' inputs alone, in whatever micro-batch they are."""
    monkeypatch.setattr("hybridgen.engine.prompt_maps.FIT_TOKENS", 64)
    with llm(zoo, runtime__micro_batch=1) as engine:
        prompts = [random_tokens(engine.spec.vocab_size, length, seed=length) for length in (200, 96)]
        batch = engine.new_batch([300, 300])
        engine.prefill(batch, prompts)
        assert batch.prompt_maps is not None and batch.prompt_maps.tokens == 64
        found = batch.prompt_maps.maps[1]
        assert all(part.query_maps[1] is found for part in batch.micro_batches)
    model = zoo.dense("llama-gqa2")
    spread = [number * 296 // 64 for number in range(64)]
    rows = [[row for row in spread if row < 200], [row - 200 for row in spread if row >= 200]]
    first, second = (
        torch.cat([model.layer_inputs(prompt)[at][some] for prompt, some in zip(prompts, rows, strict=True)])
        for at in (0, 1)
    )
    own = QueryMap(model.weights["model.layers.1.self_attn.q_proj.weight"], None)
    weight, bias = ridge(own, model.attention_input(1, first), model.attention_input(1, second), PRIOR_TOKENS)
    assert found.bias is not None
    assert torch.allclose(found.weight.double(), weight, atol=2e-5)
    assert torch.allclose(found.bias.double(), bias, atol=2e-5)


@pytest.mark.parametrize("prompt", [1, 2, 5])
def test_prompts_of_hardly_any_token(zoo: ModelZoo, prompt: int) -> None:
    with llm(zoo) as engine:
        batch = engine.new_batch([200])
        logits = engine.prefill(batch, [random_tokens(engine.spec.vocab_size, prompt, seed=3)])
        assert batch.prompt_maps is not None and len(batch.prompt_maps.maps) == engine.spec.num_layers - 1
        for layer, (weight, bias) in batch.prompt_maps.maps.items():
            assert bias is not None and weight.isfinite().all() and bias.isfinite().all()
            own = engine.model.query_map(layer, engine.layer_weights.wait(layer)).weight
            assert (weight - own).abs().max() <= (0.0 if prompt == 1 else 0.1 * own.abs().max())
        for _ in range(120):  # long enough for a host tier
            logits = engine.decode(batch, logits.argmax(1).tolist())
            assert logits.isfinite().all()
        assert max(batch.host_lengths(3)) > 0


def test_until_a_prefill_has_fitted_all_of_them_the_layers_own_maps_predict(zoo: ModelZoo) -> None:
    """A batch without a prompt, or whose first prefill was interrupted, decodes as with predictor `x`."""
    tokens = random_tokens(zoo.dense("opt").vocab_size, 120, seed=5)
    decoded = []
    for predictor in ("prompt", "x"):
        with llm(zoo, "opt", attention__predictor=predictor, attention__lookahead="logits") as engine:
            batch = engine.new_batch([200])
            if predictor == "prompt":
                assert batch.prompt_maps is not None and not batch.prompt_maps.maps
                for place in batch.prompt_maps.places.values():
                    place.weight.fill_(torch.nan)

                def interrupt(layer: int) -> None:
                    if layer == 3:
                        raise KeyboardInterrupt

                with pytest.raises(KeyboardInterrupt):
                    engine.prefill(batch, [tokens], progress=interrupt)
                assert not batch.prompt_maps.maps and not batch.prompt_maps.tokens
                batch = engine.new_batch([200])
            decoded.append(torch.cat([engine.decode(batch, [token]) for token in tokens]))
    assert torch.equal(*decoded)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_half_precision_the_maps_are_those_of_float32(zoo: ModelZoo, dtype: str) -> None:
    fitted = []
    for kind in ("float32", dtype):
        with llm(zoo, "qwen2", model__dtype=kind) as engine:
            batch = engine.new_batch([300])
            engine.prefill(batch, [random_tokens(engine.spec.vocab_size, 250, seed=4)])
            assert batch.prompt_maps is not None and batch.prompt_maps.maps[2].weight.dtype == engine.dtype
            fitted.append(batch.prompt_maps.maps[2].weight.float())
    assert (fitted[0] - fitted[1]).abs().max() < 0.03 * fitted[0].abs().max()


@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e6])
def test_one_large_channel_does_not_keep_the_others_from_being_fitted(size: float) -> None:
    """What can be learned of the others is, up to where rounding forbids it."""
    seeded = torch.Generator().manual_seed(2)
    features = torch.randn(3000, 64, generator=seeded)
    true = features + 0.5 * features.roll(1, dims=1)
    features[:, 9] *= size
    true[:, 9] = features[:, 9]
    own = QueryMap(torch.randn(16, 64, generator=seeded), None)
    weight, bias = fitted_map(own, features, true)
    wanted = true @ own.weight.T
    before, after = (
        (some - wanted).square().mean() for some in (features @ own.weight.T, features @ weight.T + bias)
    )
    assert after < (0.05 if size < 100 else 1.0) * before


def test_a_channel_that_hardly_moves_is_given_no_large_weight() -> None:
    """Its values are rounding, by which nothing can be predicted."""
    seeded = torch.Generator().manual_seed(2)
    features, true = (torch.randn(200, 32, generator=seeded) for _ in range(2))
    features[:, 7] = 5.0 + 1e-6 * torch.randn(200, generator=seeded)
    own = torch.randn(16, 32, generator=seeded)
    weight, bias = fitted_map(QueryMap(own, None), features, true)
    assert (weight - own)[:, 7].abs().max() < 0.01
    assert bias.isfinite().all()


def test_strategies_that_continue_from_one_prefill_have_maps_of_their_own(zoo: ModelZoo) -> None:
    prompt = random_tokens(zoo.dense("opt").vocab_size, 220, seed=8)

    def decoded(engine: LLM, batch: Any, logits: Tensor) -> Tensor:
        steps = []
        for token in (5, 6, 7):
            logits = engine.decode(batch, [token])
            steps.append(logits)
        return torch.cat(steps)

    with llm(zoo, "opt", attention__predictor="x") as first:
        alone = []
        for ahead in (1, 2):
            attention = dataclasses.replace(
                first.config.attention, predictor="prompt", lookahead="logits", lookahead_layers=ahead
            )
            other = first.sharing(dataclasses.replace(first.config, attention=attention))
            batch = other.new_batch([230])
            alone.append((other, decoded(other, batch, other.prefill(batch, [prompt]))))
        leading = first.new_batch([230])
        mirrors = [other.new_batch([230]) for other, _ in alone]
        logits = first.prefill(leading, [prompt], mirrors)
        for (other, expected), mirror in zip(alone, mirrors, strict=True):
            assert torch.equal(decoded(other, mirror, logits), expected)
    assert not torch.equal(alone[0][1], alone[1][1])


def test_drawn_keys_leave_the_layers_own_map(zoo: ModelZoo) -> None:
    """--synthetic-kv: no layer changes its input, so there is nothing to be fitted."""
    with llm(zoo, "qwen2", runtime__synthetic_kv=True, model__weights="random") as engine:
        batch = engine.new_batch([300])
        engine.prefill(batch, [[1] * 200])
        assert batch.prompt_maps is not None
        engine.layer_weights.issue(2)
        own, found = engine.model.query_map(2, engine.layer_weights.wait(2)), batch.prompt_maps.maps[2]
        assert torch.equal(found.weight, own.weight) and own.bias is not None and found.bias is not None
        assert torch.equal(found.bias, own.bias)


@pytest.mark.parametrize("values", [{"attention__lookahead": "off"}, {"attention__executor": "full"}])
def test_where_nothing_is_predicted_nothing_is_fitted(zoo: ModelZoo, values: dict[str, Any]) -> None:
    with llm(zoo, **values) as engine:
        assert engine.new_batch([50]).prompt_maps is None
