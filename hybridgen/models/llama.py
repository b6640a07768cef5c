"""Llama (3.x, SmolLM2) and Qwen2.5: RMSNorm, rotary positions, grouped queries, SwiGLU.

Qwen2.5 differs in a bias on the query, key and value projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.models.base import DecoderModel, LayerWeights, QueryMap
from hybridgen.models.config_fields import (
    common_fields,
    layers_from_config,
    number,
    require_size,
    rope_from_config,
)
from hybridgen.models.layers import norm, rotate
from hybridgen.models.spec import ModelSpec, TensorSource
from hybridgen.types import Positions


class LlamaModel(DecoderModel):
    """Llama, SmolLM2 and Qwen2.5."""

    family = "llama"
    mlp_tensors = 4  # gate and up, silu(gate), their product

    @staticmethod
    def spec_from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
        is_qwen = config["architectures"][0] == "Qwen2ForCausalLM"
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ConfigError(f"model {name}: hidden_act {activation!r} is not supported (allowed: 'silu')")
        if config.get("mlp_bias") or (config.get("attention_bias") and not is_qwen):
            raise ConfigError(f"model {name}: biases on Llama projections are not supported")
        if config.get("use_sliding_window"):
            raise ConfigError(f"model {name}: use_sliding_window = true is not supported (allowed: false)")
        hidden, rope = require_size(name, config, "hidden_size"), rope_from_config(name, config)
        return ModelSpec(
            family="qwen2" if is_qwen else "llama",
            layers=layers_from_config(name, config, hidden, "num_key_value_heads", rope),
            intermediate_size=require_size(name, config, "intermediate_size"),
            norm_eps=number(name, config, "rms_norm_eps", 1e-6),
            qkv_bias=is_qwen,
            **common_fields(name, config),
        )

    @staticmethod
    def global_tensors(spec: ModelSpec) -> dict[str, TensorSource]:
        table = (spec.vocab_size, spec.hidden_size)
        tensors = {
            "embed": TensorSource(table, ("model.embed_tokens.weight",)),
            "norm": TensorSource((spec.hidden_size,), ("model.norm.weight",)),
        }
        if not spec.tie_word_embeddings:
            tensors["lm_head"] = TensorSource(table, ("lm_head.weight",))
        return tensors

    @staticmethod
    def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, TensorSource]:
        at, hidden, ffn = spec.layers[layer], spec.hidden_size, spec.intermediate_size
        q_width, kv_width = at.num_heads * at.head_dim, at.num_kv_heads * at.head_dim
        prefix = f"model.layers.{layer}"
        projections = [f"{prefix}.self_attn.{which}_proj" for which in "qkv"]
        tensors = {
            "attn_norm": TensorSource((hidden,), (f"{prefix}.input_layernorm.weight",)),
            "qkv": TensorSource((q_width + 2 * kv_width, hidden), tuple(f"{name}.weight" for name in projections)),
            "out": TensorSource((hidden, q_width), (f"{prefix}.self_attn.o_proj.weight",)),
            "mlp_norm": TensorSource((hidden,), (f"{prefix}.post_attention_layernorm.weight",)),
            "gate_up": TensorSource(
                (2 * ffn, hidden), (f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
            ),
            "down": TensorSource((hidden, ffn), (f"{prefix}.mlp.down_proj.weight",)),
        }
        if spec.qkv_bias:
            tensors["qkv_bias"] = TensorSource((q_width + 2 * kv_width,), tuple(f"{name}.bias" for name in projections))
        return tensors

    def embed(self, tokens: Tensor, positions: Positions) -> Tensor:
        return F.embedding(tokens, self.weights["embed"])

    def qkv(self, layer: int, w: LayerWeights, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        at = self.spec.layers[layer]
        fused = F.linear(self._norm(x, w["attn_norm"]), w["qkv"], w.get("qkv_bias"))
        heads = fused.view(x.shape[0], at.num_heads + 2 * at.num_kv_heads, at.head_dim)
        value = heads[:, at.num_heads + at.num_kv_heads :]
        rotated = heads[:, : at.num_heads + at.num_kv_heads]
        tables = self.rotary(layer, positions)
        if tables is not None:
            rotated = rotate(rotated, tables)
        return rotated[:, : at.num_heads], rotated[:, at.num_heads :], value

    def attention_input(self, w: LayerWeights, x: Tensor) -> Tensor:
        return self._norm(x, w["attn_norm"])

    def query_map(self, layer: int, w: LayerWeights) -> QueryMap:
        at = self.spec.layers[layer]
        width = at.num_heads * at.head_dim
        return QueryMap(w["qkv"][:width], w["qkv_bias"][:width] if self.spec.qkv_bias else None)

    def finish(self, layer: int, w: LayerWeights, x: Tensor, context: Tensor) -> Tensor:
        x = x + F.linear(context, w["out"])
        gate, up = F.linear(self._norm(x, w["mlp_norm"]), w["gate_up"]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w["down"])

    def logits(self, x: Tensor) -> Tensor:
        head = self.weights["embed" if self.spec.tie_word_embeddings else "lm_head"]
        return F.linear(self._norm(x, self.weights["norm"]), head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, None, self.spec.norm_eps)
