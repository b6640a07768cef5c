"""Maps that predict a batch's queries, fitted to its own prompts while these are prefilled: predictor `prompt`.

As in `evaluation/calibration.py`, a map W takes the place of Wq where a layer's query is predicted from the input of an
earlier layer: the ridge regression of q - Wq n(x) on n(x). But nothing has to be at hand beforehand. The prefill has
the inputs of all layers for every token; some thousand of them say what Wq of an earlier input misses in this text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.models.base import DecoderModel, LayerWeights, QueryMap

FIT_TOKENS = 2048  # of the prompts, spread evenly over all of their tokens
PRIOR_TOKENS = 300  # for how many tokens Wq stands


class PromptMaps:
    """The maps of one batch, for each layer whose query is predicted."""

    def __init__(self, model: DecoderModel, layers: Sequence[int], layers_ahead: int) -> None:
        """Their memory is made here and stays in place: launches that are repeated as a graph read it."""
        self.model, self.layers_ahead = model, layers_ahead
        self.places: dict[int, QueryMap] = {}
        #: Empty until a prefill has fitted all of them: Wq predicts till then.
        self.maps: dict[int, QueryMap] = {}
        #: Tokens that they are fitted to.
        self.tokens = 0
        for layer in layers:
            spec = model.spec.layers[layer]
            width = spec.num_heads * spec.head_dim
            weight = torch.empty(width, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            self.places[layer] = QueryMap(weight, torch.empty(width, dtype=model.dtype, device=model.device))

    def fit(self, lengths: Sequence[int]) -> PromptFit | None:
        """Of a prefill of texts of so many tokens; None: the maps stay, they were fitted to more than it has."""
        total = sum(lengths)
        count = min(total, FIT_TOKENS)
        return None if count < self.tokens else PromptFit(self, torch.arange(count) * total // count, lengths)


class PromptFit:
    """One prefill on its way through the layers."""

    def __init__(self, into: PromptMaps, chosen: Tensor, lengths: Sequence[int]) -> None:
        """chosen: rows of all micro-batches' tokens, int64 ascending; lengths: tokens of each."""
        self._into, self._tokens = into, len(chosen)
        self._rows: list[Tensor] = []
        first = 0
        for length in lengths:
            own = chosen[(chosen >= first) & (chosen < first + length)] - first
            self._rows.append(own.to(into.model.device))
            first += length
        self._inputs: deque[Tensor] = deque(maxlen=into.layers_ahead)  # of the layers before, the nearest one last

    def before_layer(self, layer: int, weights: LayerWeights, states: Sequence[Tensor]) -> None:
        """states: what each micro-batch's tokens [T, hidden] go into the layer with."""
        x = torch.cat([state[rows] for state, rows in zip(states, self._rows, strict=True)])
        places = self._into.places
        if layer in places:
            model, earlier = self._into.model, self._inputs[0]
            features, true = (model.attention_input(weights, some).float() for some in (earlier, x))
            fitted = fitted_map(model.query_map(layer, weights), features, true)
            for place, part in zip(places[layer], fitted, strict=True):
                assert place is not None
                place.copy_(part)
        if layer == max(places):
            self._into.maps.update(places)
            self._into.tokens = self._tokens
        self._inputs.append(x)


def fitted_map(own: QueryMap, features: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Weight float32 [Hq * d, hidden] and bias [Hq * d] of the map from features to the queries of `true`.

    own: Wq and its bias; features, true: normed layer inputs, float32 [T, hidden]. The weight is the least
    |own(true) - W features - b|^2 + PRIOR_TOKENS * v * |W - Wq|^2; b is not held small. v: the median of the features'
    variances (in some models a few channels are larger than all others together, whose mean would leave Wq as it is),
    but a hundredth of their mean at least, for the sake of rounding. Solved among tokens or channels, the fewer ones.
    """
    wq = own.weight.float()
    missed = F.linear(true - features, wq)
    feature_mean, missed_mean = features.mean(0), missed.mean(0)
    x, y = features - feature_mean, missed - missed_mean
    variances = x.square().mean(0)
    ridge = PRIOR_TOKENS * torch.maximum(variances.median(), variances.mean() / 100)
    tokens, channels = x.shape
    gram = x @ x.T if tokens < channels else x.T @ x
    gram.diagonal().add_(ridge.clamp_min(torch.finfo(torch.float32).tiny))
    # The ridge bounds the condition: it fails only where inputs are not finite, and then so are all logits.
    factor, _ = torch.linalg.cholesky_ex(gram)
    if tokens < channels:
        change = torch.cholesky_solve(y, factor).T @ x
    else:
        change = torch.cholesky_solve(x.T @ y, factor).T
    bias = missed_mean - change @ feature_mean
    return wq + change, bias if own.bias is None else bias + own.bias.float()


def warm_up(device: torch.device) -> float:
    """Seconds that the device's library of linear algebra takes to load, as it does when it is first used."""
    start, some = time.perf_counter(), torch.eye(8, device=device)
    fitted_map(QueryMap(some, None), some, some)[0][0, 0].item()
    return time.perf_counter() - start


def fit_bytes(hidden_size: int, width: int, tokens: int, layers_ahead: int, element: int) -> int:
    """The most that fitting one layer's map takes beside the maps. width: Hq * d."""
    tokens = min(tokens, FIT_TOKENS)
    inputs = (layers_ahead + 1) * tokens * hidden_size * element
    rows = 4 * tokens * hidden_size + 4 * tokens * width  # of features and of queries
    return inputs + 4 * (3 * width * hidden_size + rows + 3 * min(tokens, hidden_size) ** 2)
