"""Maps that predict a batch's queries, fitted to its own prompts while these are prefilled: predictor `prompt`.

As in `evaluation/calibration.py`, a map W takes the place of Wq where a layer's query is predicted from the input of an
earlier layer: the ridge regression of q - Wq n(x) on n(x). But nothing has to be at hand beforehand. The prefill has
the inputs of all layers for every token; some thousand of them say what Wq of an earlier input misses in this text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.models.base import DecoderModel, LayerWeights, QueryMap

FIT_TOKENS = 2048  # of the prompts, spread evenly over them
PRIOR_TOKENS = 300  # for how many tokens Wq stands; 100 to 1,000 do as well (experiments/RESULTS.md)


class PromptMaps:
    """The maps of one batch, for each layer whose query is predicted."""

    def __init__(self, model: DecoderModel, layers: Sequence[int], layers_ahead: int) -> None:
        """Their memory is made here and stays in place: launches that are repeated as a graph read it."""
        self.model, self.layers_ahead = model, layers_ahead
        self.maps: dict[int, QueryMap] = {}
        #: Tokens that they are fitted to.
        self.tokens = 0
        for layer in layers:
            spec = model.spec.layers[layer]
            width = spec.num_heads * spec.head_dim
            weight = torch.empty(width, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            self.maps[layer] = QueryMap(weight, torch.empty(width, dtype=model.dtype, device=model.device))

    def fit(self, lengths: Sequence[int]) -> PromptFit | None:
        """Of a prefill of texts of so many tokens; None: the maps stay, they were fitted to more than it has."""
        chosen = [_spread(length, min(length, FIT_TOKENS // len(lengths))) for length in lengths]
        tokens = sum(len(rows) for rows in chosen)
        if tokens < self.tokens or not tokens:
            return None
        self.tokens = tokens
        return PromptFit(self, [rows.to(self.model.device) for rows in chosen])


class PromptFit:
    """One prefill on its way through the layers."""

    def __init__(self, into: PromptMaps, chosen: Sequence[Tensor]) -> None:
        """chosen: rows of each micro-batch's tokens."""
        self._into, self._chosen = into, chosen
        self._inputs: deque[Tensor] = deque(maxlen=into.layers_ahead)  # of the layers before, the nearest one last

    def before_layer(self, layer: int, weights: LayerWeights, states: Sequence[Tensor]) -> None:
        """states: what each micro-batch's tokens [T, hidden] go into the layer with."""
        x = torch.cat([state[rows] for state, rows in zip(states, self._chosen, strict=True)])
        target = self._into.maps.get(layer)
        if target is not None:
            model, earlier = self._into.model, self._inputs[0]
            own = model.query_map(layer, weights)
            features, true = (model.attention_input(weights, some).float() for some in (earlier, x))
            weight, bias = fitted_map(own, features, true)
            target.weight.copy_(weight)
            assert target.bias is not None
            target.bias.copy_(bias)
        self._inputs.append(x)


def fitted_map(own: QueryMap, features: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Weight float32 [Hq * d, hidden] and bias [Hq * d] of the map from features to the queries of `true`.

    own: Wq and its bias; features, true: normed layer inputs, float32 [T, hidden]. The weight is the least
    |own(true) - W features - b|^2 + PRIOR_TOKENS * v * |W - Wq|^2, v being the mean variance of the features; b is not
    held small. Solved among tokens or among channels, whichever are fewer.
    """
    wq = own.weight.float()
    missed = F.linear(true - features, wq)
    feature_mean, missed_mean = features.mean(0), missed.mean(0)
    x, y = features - feature_mean, missed - missed_mean
    tokens, channels = x.shape
    gram = x @ x.T if tokens < channels else x.T @ x
    ridge = PRIOR_TOKENS * gram.diagonal().sum() / (tokens * channels)
    gram.diagonal().add_(ridge.clamp_min(torch.finfo(torch.float32).tiny))
    factor = torch.linalg.cholesky(gram)
    if tokens < channels:
        change = torch.cholesky_solve(y, factor).T @ x
    else:
        change = torch.cholesky_solve(x.T @ y, factor).T
    bias = missed_mean - change @ feature_mean
    return wq + change, bias if own.bias is None else bias + own.bias.float()


def fit_bytes(hidden_size: int, width: int, tokens: int, layers_ahead: int, element: int) -> int:
    """The most that fitting one layer's map takes beside the maps. width: Hq * d."""
    tokens = min(tokens, FIT_TOKENS)
    inputs = (layers_ahead + 1) * tokens * hidden_size * element
    rows = 4 * tokens * hidden_size + 4 * tokens * width  # of features and of queries
    return inputs + 4 * (3 * width * hidden_size + rows + 3 * min(tokens, hidden_size) ** 2)


def _spread(length: int, count: int) -> Tensor:
    """`count` of `length` rows, evenly spread, int64."""
    return torch.arange(count) * length // count if count else torch.empty(0, dtype=torch.int64)
