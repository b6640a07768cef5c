"""What a model family is: pure mathematics, given weights and a `ModelSpec`.

A family sees flat token rows [T, hidden]: T tokens of any sequences. It knows nothing of caches,
devices, batches or strategies; attention itself is done by the executors in `attention/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.models.layers import inverse_frequencies, rotary_tables, rotate
from hybridgen.models.spec import ModelSpec, RopeSpec, TensorSource
from hybridgen.types import Positions

LayerWeights = Mapping[str, Tensor]


class QueryMap(NamedTuple):
    """From a normed layer input to the layer's query before rotary positions: Wq, or what was fitted in its place."""

    weight: Tensor  # [Hq * d, hidden]
    bias: Tensor | None  # [Hq * d]


class DecoderModel(ABC):
    """One decoder-only family. Subclasses are named in `models/__init__.py` by HF architecture."""

    family: ClassVar[str]
    #: Tensors of [T, intermediate size] that are alive at once in `finish`: for the memory plan.
    mlp_tensors: ClassVar[int] = 3

    def __init__(self, spec: ModelSpec, weights: LayerWeights, device: torch.device, dtype: torch.dtype) -> None:
        """`weights`: the tensors of `global_tensors(spec)`, on the device, in dtype."""
        self.spec = spec
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self._ropes: list[RopeSpec] = []
        self._frequencies: list[Tensor] = []
        self._rope_ids: list[int | None] = []
        for layer in spec.layers:
            if layer.rope is None:
                self._rope_ids.append(None)
                continue
            if layer.rope not in self._ropes:
                self._ropes.append(layer.rope)
                self._frequencies.append(inverse_frequencies(layer.rope, layer.head_dim).to(device))
            self._rope_ids.append(self._ropes.index(layer.rope))

    # What the checkpoint must hold

    @staticmethod
    @abstractmethod
    def spec_from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
        """Read a Hugging Face config; ConfigError for a variant that is not supported."""

    @staticmethod
    @abstractmethod
    def global_tensors(spec: ModelSpec) -> dict[str, TensorSource]:
        """Embeddings, final norm, LM head."""

    @staticmethod
    @abstractmethod
    def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, TensorSource]:
        """The tensors of one decoder layer."""

    def extend_positions(self, tokens: int) -> None:  # noqa: B027 - not abstract: rotary positions need nothing
        """Make sequences of `tokens` tokens possible where positions are a table."""

    # The mathematics

    def positions(self, index: Tensor) -> Positions:
        """Rotary tables for positions [T], int64 on the device."""
        tables = {
            rope: rotary_tables(index, frequencies, self.dtype) for rope, frequencies in enumerate(self._frequencies)
        }
        return Positions(index, tables)

    def rotary(self, layer: int, positions: Positions) -> tuple[Tensor, Tensor] | None:
        rope = self._rope_ids[layer]
        return None if rope is None else positions.rotary[rope]

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Positions) -> Tensor:
        """Token ids [T] -> hidden states [T, hidden]."""

    @abstractmethod
    def qkv(self, layer: int, w: LayerWeights, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Layer input [T, hidden] -> query [T, Hq, d], key and value [T, Hkv, d], positions applied."""

    @abstractmethod
    def attention_input(self, w: LayerWeights, x: Tensor) -> Tensor:
        """Layer input [T, hidden] -> what Wq, Wk and Wv are applied to, [T, hidden]: the layer's first norm."""

    @abstractmethod
    def query_map(self, layer: int, w: LayerWeights) -> QueryMap:
        """The layer's own Wq and its bias."""

    def query(
        self, layer: int, w: LayerWeights, x: Tensor, positions: Positions, fitted: QueryMap | None = None
    ) -> Tensor:
        """As `qkv`, the query alone. With x = the input of layer - 1 it is the predicted query q'.

        fitted: used in place of Wq, of which nothing is then looked up in `w`.
        """
        at, own = self.spec.layers[layer], fitted or self.query_map(layer, w)
        query = F.linear(self.attention_input(w, x), own.weight, own.bias)
        query = query.view(x.shape[0], at.num_heads, at.head_dim)
        tables = self.rotary(layer, positions)
        return query if tables is None else rotate(query, tables)

    @abstractmethod
    def finish(self, layer: int, w: LayerWeights, x: Tensor, context: Tensor) -> Tensor:
        """Output projection of context [T, Hq * d], residual, MLP: the next layer's input [T, hidden]."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Final norm and LM head: [T, hidden] -> float32 [T, vocab]."""
