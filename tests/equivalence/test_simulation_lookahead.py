"""The oracle's `logits` and `delta`: against transformers, against plainer code, and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.equivalence.dense_simulation import DenseModel, DenseSimulation, LayerRecord, Settings
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

FP64 = 1e-10
DIFFERENT = 1e-2  # logits that must not be the same differ by more

FAMILIES = ["opt", "llama-mha", "llama-gqa3", "llama3-rope", "qwen2"]
LOGITS = Settings(window=16, keep=1.0, lookahead="logits")


class TrueQuery(DenseSimulation):
    """A perfect prediction."""

    def _predicted_query(self, layer: int, inputs: Sequence[Tensor], query: Tensor) -> Tensor:
        return query


class NoChange(DenseSimulation):
    """Residual streams do not change from layer to layer, `delta` is told."""

    def _predicted_query(self, layer: int, inputs: Sequence[Tensor], query: Tensor) -> Tensor:
        self.changes = [torch.zeros_like(change) for change in self.changes]
        return super()._predicted_query(layer, inputs, query)


class Recorder(DenseSimulation):
    """Keeps what it predicted, by position and layer."""

    def __init__(self, model: DenseModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self.predicted: dict[tuple[int, int], Tensor] = {}

    def _predicted_query(self, layer: int, inputs: Sequence[Tensor], query: Tensor) -> Tensor:
        self.predicted[self.length, layer] = super()._predicted_query(layer, inputs, query)
        return self.predicted[self.length, layer]


def decoded(simulation: DenseSimulation, tokens: list[int], prompt: int) -> Tensor:
    """Logits of every decode step."""
    simulation.prefill(tokens[:prompt])
    return torch.stack([simulation.decode(token).logits for token in tokens[prompt:]])


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > DIFFERENT)


# ---------------------------------------------------------------------------------------------------------
# A perfect prediction


@pytest.mark.parametrize(
    ("name", "dropped"), [*((name, "share") for name in FAMILIES), ("opt", "renormalise"), ("qwen2", "renormalise")]
)
def test_true_query_at_full_budget_is_full_attention(zoo: ModelZoo, name: str, dropped: Any) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 170, seed=21)
    ours = decoded(TrueQuery(model, dataclasses.replace(LOGITS, dropped=dropped)), tokens, 140)
    select = decoded(DenseSimulation(model, Settings(window=16, keep=1.0)), tokens, 140)
    with torch.inference_mode():
        full = zoo.hf(name, torch.float64)(torch.tensor([tokens])).logits[0, 140:]
    assert (ours - full).abs().max() < FP64
    assert (ours - select).abs().max() < FP64


@pytest.mark.parametrize("exact_mode", ["resident", "select"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2"])
def test_true_query_renormalised_is_off(zoo: ModelZoo, name: str, exact_mode: Any) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 170, seed=22)
    settings = Settings(window=16, keep=0.1, exact_layers=(0, 2), exact_mode=exact_mode, lookahead="logits")
    off = decoded(DenseSimulation(model, dataclasses.replace(settings, lookahead="off")), tokens, 140)
    renormalised = decoded(TrueQuery(model, dataclasses.replace(settings, dropped="renormalise")), tokens, 140)
    share = decoded(TrueQuery(model, settings), tokens, 140)
    assert (renormalised - off).abs().max() < FP64
    assert differ(share, off)


def test_no_predicted_layer_or_no_host_is_full_attention(zoo: ModelZoo) -> None:
    model = zoo.dense("llama-gqa2")
    tokens = random_tokens(model.vocab_size, 170, seed=23)
    full = decoded(DenseSimulation(model, Settings(window=16, keep=1.0)), tokens, 150)
    for settings in (
        Settings(window=16, keep=0.01, lookahead="logits", exact_layers=tuple(range(6))),
        Settings(window=16, keep=1.0, lookahead="logits", exact_layers=tuple(range(6)), exact_mode="select"),
        Settings(window=400, keep=0.01, lookahead="logits", predictor="delta"),
    ):
        assert (decoded(DenseSimulation(model, settings), tokens, 150) - full).abs().max() < FP64


# ---------------------------------------------------------------------------------------------------------
# Predictions


@pytest.mark.parametrize(
    ("name", "lookahead"), [*((name, "select") for name in FAMILIES), ("opt", "logits"), ("llama-gqa3", "logits")]
)
def test_delta_without_a_change_is_x(zoo: ModelZoo, name: str, lookahead: Any) -> None:
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 142, seed=24)
    x = Settings(window=16, keep=0.1, lookahead=lookahead)
    delta = dataclasses.replace(x, predictor="delta")
    of_x = decoded(DenseSimulation(model, x), tokens, 130)
    assert torch.equal(decoded(NoChange(model, delta), tokens, 130), of_x)
    assert differ(decoded(DenseSimulation(model, delta), tokens, 130), of_x)


@pytest.mark.parametrize("name", FAMILIES)
def test_delta_is_made_of_the_residuals_of_transformers(zoo: ModelZoo, name: str) -> None:
    """Prefill, decode, two appends, the last of one token, decode: at full budget all of it is one text."""
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 200, seed=25)
    with torch.inference_mode():
        states = zoo.hf(name, torch.float64)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    inputs = torch.stack(states[: model.num_layers])[:, 0]  # of every layer, [layers, tokens, hidden]
    x, delta = (
        Recorder(model, Settings(window=16, keep=1.0, predictor=predictor, exact_layers=(0, 2)))
        for predictor in ("x", "delta")
    )
    for simulation in (x, delta):
        position = 0
        for turn, steps in ((120, 20), (30, 0), (1, 29)):
            simulation.prefill(tokens[position : position + turn])
            for token in tokens[position + turn : position + turn + steps]:
                simulation.decode(token)
            position += turn + steps
    assert position == 200
    expected_keys = {(t, layer) for t in (*range(120, 140), *range(171, 200)) for layer in {*range(1, 6)} - {2}}
    assert set(delta.predicted) == set(x.predicted) == {k for k in expected_keys if k[1] < model.num_layers}
    for t, layer in delta.predicted:
        of_x = inputs[layer - 1, t]
        of_delta = of_x + inputs[layer, t - 1] - inputs[layer - 1, t - 1]
        for simulation, source in ((x, of_x), (delta, of_delta)):
            expected = model.query(layer, source[None], t)
            assert (simulation.predicted[t, layer] - expected).abs().max() < FP64, (t, layer)


# ---------------------------------------------------------------------------------------------------------
# The softmax of both queries


def mixed_attention(
    model: DenseModel, settings: Settings, tokens: list[int], prompt: int, hosts: list[list[range]]
) -> Tensor:
    """Full budget, in one go for all heads: rows in `hosts[step][layer]` are weighed by the predicted query."""

    def attend(query: Tensor, key: Tensor, value: Tensor, other: Tensor, on_host: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(model.heads // model.kv_heads, 0) for t in (key, value))
        scores = torch.where(
            on_host, torch.einsum("hqd,hkd->hqk", other, key), torch.einsum("hqd,hkd->hqk", query, key)
        )
        causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        weights = torch.where(causal, scores / math.sqrt(model.head_dim), -math.inf).softmax(-1)
        return torch.einsum("hqk,hkd->hqd", weights, value)

    caches: list[tuple[Tensor, Tensor]] = []
    before: list[Tensor] = []  # layer inputs of the token before, and the last layer's output
    output = []
    for start, end in ((0, prompt), *((t, t + 1) for t in range(prompt, len(tokens)))):
        hidden = [model.embed(tokens[start:end], start)]
        for layer in range(model.num_layers):
            key, value = model.key_value(layer, hidden[-1], start)
            if start:
                key, value = torch.cat((caches[layer][0], key), 1), torch.cat((caches[layer][1], value), 1)
                caches[layer] = key, value
            else:
                caches.append((key, value))
            query = predicted = model.query(layer, hidden[-1], start)
            on_host = torch.zeros(end, dtype=torch.bool)
            if start and layer not in (0, *settings.exact_layers):
                guess = hidden[layer - 1]
                if settings.predictor == "delta":
                    guess = guess + before[layer] - before[layer - 1]
                predicted = model.query(layer, guess, start)
                on_host[list(hosts[start - prompt][layer])] = True
            hidden.append(model.after_attention(layer, hidden[-1], attend(query, key, value, predicted, on_host)))
        before = [x[-1:] for x in hidden]
        output.append(model.head(hidden[-1][-1:])[0])
    return torch.stack(output[1:])


@pytest.mark.parametrize(
    ("name", "predictor"), [*((name, "x") for name in FAMILIES), ("opt", "delta"), ("llama-gqa3", "delta")]
)
def test_full_budget_mixes_two_queries(zoo: ModelZoo, name: str, predictor: Any) -> None:
    """The paper's scheme with everything kept is not full attention, but what plainer code gives."""
    model = zoo.dense(name)
    tokens = random_tokens(model.vocab_size, 186, seed=26)
    settings = dataclasses.replace(LOGITS, predictor=predictor, exact_layers=(0, 2))
    simulation = DenseSimulation(model, settings)
    simulation.prefill(tokens[:146])
    records = [simulation.decode(token) for token in tokens[146:]]
    ours = torch.stack([record.logits for record in records])
    hosts = [[range(4, 4 + layer.host_length) for layer in record.layers] for record in records]
    assert len({tuple(map(len, step)) for step in hosts}) > 1  # they grow on the way
    assert (ours - mixed_attention(model, settings, tokens, 146, hosts)).abs().max() < FP64
    assert {record.budget for record in records} == {1.0}
    renormalised = DenseSimulation(model, dataclasses.replace(settings, dropped="renormalise"))
    assert (decoded(renormalised, tokens, 146) - ours).abs().max() < FP64  # nothing is dropped
    with torch.inference_mode():
        full = zoo.hf(name, torch.float64)(torch.tensor([tokens])).logits[0, 146:]
    assert differ(ours, full)


def test_one_head_by_hand() -> None:
    """Keys of one channel, ln(w): a query of 1 weighs a row by w, one of 2 by its square. A sink, a host of
    three rows, a window row and the new token; the values are powers of ten."""
    w = torch.tensor([2.0, 3.0, 1.0, 2.0, 4.0, 1.0], dtype=torch.float64)
    values = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0], dtype=torch.float64)
    query, predicted = torch.ones(1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    model: Any = SimpleNamespace(num_layers=2, kv_heads=1, group=1, head_dim=1)

    def context(attended: list[int], layer: int = 1, **settings: Any) -> float:
        simulation = DenseSimulation(model, Settings(sinks=1, window=1, **settings))
        simulation.keys, simulation.values = [w.log()[None, :, None]] * 2, [values[None, :, None]] * 2
        record = LayerRecord(simulation.tiered(layer), 3, [], [], 6)
        return float(simulation._attend(layer, 0, query, predicted, attended, record))

    attended = [0, 1, 3, 4, 5]  # row 2 is dropped
    # By the true query 2, 3, 2, 4, 1; on the host by the predicted one 9, 4, and 1 for the row that is dropped.
    assert context(attended) == pytest.approx((2 + 30 + 2000 + 40000 + 100000) / 12)
    assert context(attended, lookahead="off") == pytest.approx((2 + 30 + 2000 + 40000 + 100000) / 12)
    mixed = 2 + 90 + 4000 + 40000 + 100000
    assert context(attended, lookahead="logits") == pytest.approx(mixed / 21)
    assert context(attended, lookahead="logits", dropped="share") == pytest.approx(mixed / 21)
    assert context(attended, lookahead="logits", dropped="renormalise") == pytest.approx(mixed / 20)
    # Exact layers never use the predicted query, and drop nothing that is not renormalised.
    exact = (2 + 30 + 2000 + 40000 + 100000) / 12
    assert context(attended, layer=0, lookahead="logits", exact_mode="select") == pytest.approx(exact)
    everything = (2 + 30 + 100 + 2000 + 40000 + 100000) / 13
    assert context(list(range(6)), layer=0, lookahead="logits") == pytest.approx(everything)


def test_every_variant_is_another(zoo: ModelZoo) -> None:
    """At partial budget; they keep the same rows as long as they predict the same."""
    model = zoo.dense("llama-gqa2")
    tokens = random_tokens(model.vocab_size, 300, seed=27)
    logits: dict[str, Tensor] = {}
    kept: dict[str, list[list[int]]] = {}
    select = Settings(window=64, keep=0.1)
    mixed = dataclasses.replace(select, lookahead="logits")
    for label, settings in {
        "full": Settings(keep=1.0),
        "off": dataclasses.replace(select, lookahead="off"),
        "select x": select,
        "select delta": dataclasses.replace(select, predictor="delta"),
        "share x": mixed,
        "share delta": dataclasses.replace(mixed, predictor="delta"),
        "renormalise x": dataclasses.replace(mixed, dropped="renormalise"),
        "renormalise delta": dataclasses.replace(mixed, dropped="renormalise", predictor="delta"),
    }.items():
        simulation = DenseSimulation(model, settings)
        simulation.prefill(tokens[:-1])
        record = simulation.decode(tokens[-1])
        logits[label] = record.logits
        kept[label] = [choice.positions for choice in record.layers[1].choices]
    labels = list(logits)
    same = [(a, b) for i, a in enumerate(labels) for b in labels[:i] if not differ(logits[a], logits[b])]
    assert not same
    for predictor in ("x", "delta"):  # the first tiered layer: nothing before it differs
        assert kept[f"select {predictor}"] == kept[f"share {predictor}"] == kept[f"renormalise {predictor}"]
    assert kept["select x"] != kept["select delta"]
