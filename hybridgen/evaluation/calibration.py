"""Fits the maps that predict each layer's query from the input of an earlier layer: calibrated lookahead.

The engine predicts q' = Wq n(x), x the input of the layer before (`attention.lookahead_layers` before) and n the
layer's own norm (HybridGen, arXiv 2604.18529). Here Wq is replaced by the map W that brings q' nearest to the true
query q before rotary positions, over the tokens of a text: ridge regression of q - Wq n(x) on n(x), so that a strong
ridge leaves Wq as it is, not nothing. A constant term, which is not held small, takes the place of the bias. It costs
what Wq costs.

All sequences go through the model together, layer by layer: no more is in memory than the inputs of two layers, or of
three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.engine.llm import LLM
from hybridgen.models.base import DecoderModel, LayerWeights, QueryMap
from hybridgen.models.layers import causal_attention
from hybridgen.models.spec import LayerSpec
from hybridgen.types import Positions

STRENGTHS = (1e-6, 1e-4, 1e-2, 1e-1)  # of the ridge, times the mean variance of n(x)
QUERIES = 64  # of the last tokens of a sequence, by which a choice is judged
WINDOW, SINKS = 128, 4  # tokens that are on the device then
TOP = 0.1  # share of the host's tokens that is chosen


class NormalEquations:
    """Of least squares with a constant term and a ridge, added up batch by batch.

    Products are made in float32 and added in float64, of features less the first batch's mean: a channel that is
    nearly constant and large would else drown its own variance.
    """

    def __init__(self) -> None:
        self._count = 0
        self._shift = self._x = self._y = self._xx = self._xy = torch.empty(0)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """float32 [T, n] and [T, m]."""
        if not self._count:
            self._shift = features.mean(0)
            n, m = features.shape[1], targets.shape[1]
            self._x, self._y, self._xx, self._xy = (
                features.new_zeros(shape, dtype=torch.float64) for shape in ((n,), (m,), (n, n), (n, m))
            )
        features = features - self._shift
        self._count += features.shape[0]
        self._x += features.sum(0)
        self._y += targets.sum(0)
        self._xx += features.T @ features
        self._xy += features.T @ targets

    def solve(self, strengths: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        """For each strength W float64 [m, n] and b [m]: the least |X W^T + b - Y|^2 / T + strength * v * |W|^2.

        v: the mean variance of the features.
        """
        x, y = self._x / self._count, self._y / self._count
        covariance = self._xx / self._count - torch.outer(x, x)
        variances, directions = torch.linalg.eigh(covariance)
        variances.clamp_(min=0.0)  # where a channel is constant, rounding leaves them below it
        across = directions.T @ (self._xy / self._count - torch.outer(x, y))
        found = []
        for strength in strengths:
            ridge = strength * covariance.diagonal().mean()
            weight = (directions @ (across / (variances + ridge).unsqueeze(1))).T
            found.append((weight, y - weight @ (x + self._shift)))
        return found


@dataclass(frozen=True)
class Judgement:
    """How well predicted queries do on text that they were not fitted to."""

    cosine: float  # of q' and q after rotary positions, mean over tokens and heads
    recall: float | None  # share found of the true top tenth of the host's tokens; None: there are too few
    mass: float | None  # attention probability of the chosen tokens, as a share of all of the host's


@dataclass(frozen=True)
class LayerFit:
    """One layer's map, and how it does beside Wq."""

    layer: int
    map: QueryMap  # in the model's dtype, on the CPU
    strength: float
    before: Judgement
    after: Judgement
    true_mass: float | None  # covered where the true query chooses


@dataclass(frozen=True)
class Texts:
    """Sequences of token ids, all of one length."""

    fit: Sequence[Sequence[int]]
    tune: Sequence[Sequence[int]]  # the ridge is chosen by these
    judge: Sequence[Sequence[int]]

    @property
    def all(self) -> list[Sequence[int]]:
        return [*self.fit, *self.tune, *self.judge]


@torch.inference_mode()
def fit_query_maps(llm: LLM, texts: Texts, on_sequence: Callable[[], None] = lambda: None) -> list[LayerFit]:
    """A map for each layer but the first. on_sequence: called after each sequence of each layer."""
    ahead = llm.config.attention.lookahead_layers
    return [
        _fit(layer, earlier, inputs, texts)
        for layer, earlier, inputs in through_layers(llm, texts.all, on_sequence, ahead)
        if layer.number > 0
    ]


def through_layers(
    llm: LLM, sequences: Sequence[Sequence[int]], on_sequence: Callable[[], None] = lambda: None, ahead: int = 1
) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    """Each layer, what the layer `ahead` before it was given, and what it is given: [sequences, T, hidden].

    The first ones have layer 0 before them, and layer 0 nothing. Both are written over when a later layer is asked for.
    sequences: all of one length. on_sequence: called after each sequence of each layer.
    """
    model, store = llm.model, llm.layer_weights
    length = len(sequences[0])
    model.extend_positions(length)
    positions = model.positions(torch.arange(length, device=llm.device))
    inputs = torch.stack([model.embed(torch.tensor(ids, device=llm.device), positions) for ids in sequences])
    before = [torch.empty_like(inputs) for _ in range(ahead)]  # what a layer was given: its number modulo `ahead`
    for number in range(llm.spec.num_layers):
        store.issue(number)
        layer = Layer(model, number, store.wait(number), positions)
        yield layer, before[max(0, number - ahead) % ahead], inputs
        for x, given in zip(inputs, before[number % ahead], strict=True):
            given.copy_(x)
            if number + 1 < llm.spec.num_layers:
                x.copy_(layer.output(x))
            on_sequence()


class Layer:
    """One layer of the model, for sequences that begin at position 0; x is a layer's input [T, hidden]."""

    def __init__(self, model: DecoderModel, number: int, weights: LayerWeights, positions: Positions) -> None:
        self.model, self.number, self.spec = model, number, model.spec.layers[number]
        self.own = model.query_map(number, weights)
        self._weights, self._positions = weights, positions

    def normed(self, x: Tensor) -> Tensor:
        return self.model.attention_input(self._weights, x).float()

    def query(self, x: Tensor, by: QueryMap | None = None) -> Tensor:
        """float32 [T, Hq, d]; by: another map than Wq."""
        return self.model.query(self.number, self._weights, x, self._positions, by).float()

    def keys(self, x: Tensor) -> Tensor:
        """float32 [Hkv, T, d]."""
        return self.model.qkv(self.number, self._weights, x, self._positions)[1].transpose(0, 1).float()

    def output(self, x: Tensor) -> Tensor:
        query, key, value = self.model.qkv(self.number, self._weights, x, self._positions)
        context = causal_attention(query, key.transpose(0, 1), value.transpose(0, 1), self.spec, x.shape[0])
        return self.model.finish(self.number, self._weights, x, context)


def _fit(layer: Layer, earlier: Tensor, inputs: Tensor, texts: Texts) -> LayerFit:
    """earlier, inputs: [sequences, T, hidden], what the layer before and this one are given."""
    wq, dtype, equations = layer.own.weight.float(), layer.model.dtype, NormalEquations()
    bias = 0.0 if layer.own.bias is None else layer.own.bias.double()
    pairs = list(zip(earlier, inputs, strict=True))
    fit, tune = pairs[: len(texts.fit)], pairs[len(texts.fit) :][: len(texts.tune)]
    judge = pairs[len(fit) + len(tune) :]
    for before, x in fit:
        features = layer.normed(before)
        equations.add(features, F.linear(layer.normed(x) - features, wq))

    solutions = equations.solve(STRENGTHS)
    maps = [QueryMap((wq + change).to(dtype), (bias + constant).to(dtype)) for change, constant in solutions]
    cosines = [query_cosines(layer.query(x), [layer.query(before, some) for some in maps]) for before, x in tune]
    best = max(range(len(maps)), key=lambda index: fmean(of[index] for of in cosines))
    true_mass, (own, better) = _judge(layer, judge, [layer.own, maps[best]])
    chosen = QueryMap(*(part.cpu() for part in maps[best] if part is not None))
    return LayerFit(layer.number, chosen, STRENGTHS[best], own, better, true_mass)


def query_cosines(true: Tensor, predicted: Sequence[Tensor]) -> list[float]:
    """Of each predicted query [T, Hq, d] and the true one."""
    return [float(F.cosine_similarity(query, true, dim=-1).mean()) for query in predicted]


def _judge(
    layer: Layer, pairs: Sequence[tuple[Tensor, Tensor]], maps: Sequence[QueryMap]
) -> tuple[float | None, list[Judgement]]:
    """The mass that the true query's choice covers, and how each map does; means over the sequences."""
    cosines, choices = [], []
    for before, x in pairs:
        true, predicted = layer.query(x), [layer.query(before, some) for some in maps]
        cosines.append(query_cosines(true, predicted))
        choices.append(_choices([true, *predicted], layer.keys(x), layer.spec))
    recalls, masses = ([_mean(column) for column in zip(*rows, strict=True)] for rows in zip(*choices, strict=True))
    means = [fmean(column) for column in zip(*cosines, strict=True)]
    return masses[0], [Judgement(*of_map) for of_map in zip(means, recalls[1:], masses[1:], strict=True)]


def _choices(
    queries: Sequence[Tensor], keys: Tensor, spec: LayerSpec
) -> tuple[list[float | None], list[float | None]]:
    """Recall and mass (see `Judgement`) of what each of the queries chooses; the first one is the true one.

    By the last tokens, from one and the same host tier.
    """
    first = keys.shape[1] - QUERIES
    host = slice(SINKS, first - WINDOW)
    count = math.ceil(TOP * (host.stop - host.start))
    if count < 1:
        return [None] * len(queries), [None] * len(queries)
    each = [_probabilities(query[first:], keys, spec)[..., host] for query in queries]
    true = each[0]
    best = torch.zeros_like(true, dtype=torch.bool).scatter_(-1, true.topk(count, dim=-1).indices, True)
    recalls: list[float | None] = []
    masses: list[float | None] = []
    for probabilities in each:
        chosen = probabilities.topk(count, dim=-1).indices
        recalls.append(float(best.gather(-1, chosen).float().mean()))
        masses.append(float(true.gather(-1, chosen).sum() / true.sum()))
    return recalls, masses


def _probabilities(query: Tensor, keys: Tensor, spec: LayerSpec) -> Tensor:
    """[Hkv, m, T]: of all tokens before each of the last m, mean over the group's heads, as `select` chooses."""
    length, last = keys.shape[1], query.shape[0]
    grouped = query.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, m, d]
    logits = grouped @ keys.unsqueeze(1).transpose(-1, -2) * spec.scale
    place = torch.arange(length, device=keys.device)
    unseen = place >= place[-last:].unsqueeze(1)
    mean: Tensor = logits.masked_fill_(unseen, -torch.inf).softmax(-1).mean(1)
    return mean


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
