"""OPT (1.3B to 13B): LayerNorm before each block, learned positions, biases everywhere, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.models.base import DecoderModel, LayerWeights, QueryMap
from hybridgen.models.config_fields import common_fields, layers_from_config, require_size
from hybridgen.models.layers import norm
from hybridgen.models.spec import ModelSpec, TensorSource
from hybridgen.types import Positions

POSITION_OFFSET = 2  # the first two rows of OPT's position table are padding


class OPTModel(DecoderModel):
    """OPT with pre-norm and as wide embeddings as hidden states (all sizes but 350M)."""

    family = "opt"

    def __init__(self, spec: ModelSpec, weights: LayerWeights, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(spec, weights, device, dtype)
        self._position_scale = 1.0

    def extend_positions(self, tokens: int) -> None:
        """Interpolate the learned table so that `tokens` tokens fit (speed tests only).

        The longest batch so far decides, for all batches: make the longest one first.
        """
        self._position_scale = min(self._position_scale, self.spec.max_positions / tokens)

    @staticmethod
    def spec_from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
        hidden = require_size(name, config, "hidden_size")
        allowed = {
            "do_layer_norm_before": True,
            "word_embed_proj_dim": hidden,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        }
        for key, value in allowed.items():
            if config.get(key, value) != value:
                raise ConfigError(f"model {name}: {key} = {config[key]!r} is not supported (allowed: {value!r})")
        return ModelSpec(
            family="opt",
            layers=layers_from_config(name, config, hidden, kv_heads_key=None, rope=None),
            intermediate_size=require_size(name, config, "ffn_dim"),
            norm_eps=1e-5,
            qkv_bias=True,
            **common_fields(name, config, tied_by_default=True),
        )

    @staticmethod
    def global_tensors(spec: ModelSpec) -> dict[str, TensorSource]:
        hidden = spec.hidden_size
        prefix = "model.decoder"
        tensors = {
            "embed": TensorSource((spec.vocab_size, hidden), (f"{prefix}.embed_tokens.weight",)),
            "positions": TensorSource(
                (spec.max_positions + POSITION_OFFSET, hidden), (f"{prefix}.embed_positions.weight",)
            ),
            "norm": TensorSource((hidden,), (f"{prefix}.final_layer_norm.weight",)),
            "norm_bias": TensorSource((hidden,), (f"{prefix}.final_layer_norm.bias",)),
        }
        if not spec.tie_word_embeddings:
            tensors["lm_head"] = TensorSource((spec.vocab_size, hidden), ("lm_head.weight",))
        return tensors

    @staticmethod
    def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, TensorSource]:
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        prefix = f"model.decoder.layers.{layer}"
        projections = [f"{prefix}.self_attn.{which}_proj" for which in "qkv"]
        linear = {
            "out": (f"{prefix}.self_attn.out_proj", (hidden, hidden)),
            "up": (f"{prefix}.fc1", (ffn, hidden)),
            "down": (f"{prefix}.fc2", (hidden, ffn)),
            "attn_norm": (f"{prefix}.self_attn_layer_norm", (hidden,)),
            "mlp_norm": (f"{prefix}.final_layer_norm", (hidden,)),
        }
        tensors = {
            "qkv": TensorSource((3 * hidden, hidden), tuple(f"{name}.weight" for name in projections)),
            "qkv_bias": TensorSource((3 * hidden,), tuple(f"{name}.bias" for name in projections)),
        }
        for key, (name, shape) in linear.items():
            tensors[key] = TensorSource(shape, (f"{name}.weight",))
            tensors[f"{key}_bias"] = TensorSource(shape[:1], (f"{name}.bias",))
        return tensors

    def embed(self, tokens: Tensor, positions: Positions) -> Tensor:
        table = self.weights["positions"]
        x = F.embedding(tokens, self.weights["embed"])
        if self._position_scale == 1.0:
            return x + F.embedding(positions.index + POSITION_OFFSET, table)
        last = self.spec.max_positions - 1
        place = (positions.index.to(torch.float32) * self._position_scale).clamp(max=last)
        low = place.floor().long()
        high = (low + 1).clamp(max=last)
        share = (place - low).unsqueeze(-1).to(table.dtype)
        return x + torch.lerp(table[low + POSITION_OFFSET], table[high + POSITION_OFFSET], share)

    def qkv(self, layer: int, w: LayerWeights, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        at = self.spec.layers[layer]
        fused = F.linear(self._norm(x, w, "attn_norm"), w["qkv"], w["qkv_bias"])
        query, key, value = fused.view(x.shape[0], 3, at.num_heads, at.head_dim).unbind(1)
        return query, key, value

    def attention_input(self, w: LayerWeights, x: Tensor) -> Tensor:
        return self._norm(x, w, "attn_norm")

    def query_map(self, layer: int, w: LayerWeights) -> QueryMap:
        at = self.spec.layers[layer]
        width = at.num_heads * at.head_dim
        return QueryMap(w["qkv"][:width], w["qkv_bias"][:width])

    def finish(self, layer: int, w: LayerWeights, x: Tensor, context: Tensor) -> Tensor:
        x = x + F.linear(context, w["out"], w["out_bias"])
        hidden = F.linear(self._norm(x, w, "mlp_norm"), w["up"], w["up_bias"]).relu_()
        return x + F.linear(hidden, w["down"], w["down_bias"])

    def logits(self, x: Tensor) -> Tensor:
        head = self.weights["embed" if self.spec.tie_word_embeddings else "lm_head"]
        return F.linear(self._norm(x, self.weights, "norm"), head).float()

    def _norm(self, x: Tensor, w: LayerWeights, name: str) -> Tensor:
        return norm(x, w[name], w[f"{name}_bias"], self.spec.norm_eps)
