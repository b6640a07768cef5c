"""What a model is, layer by layer, before any weight is loaded.

Everything that must know a model's shape (memory plans, caches, executors, random weights) reads
these descriptions and nothing else. No code may assume that all layers are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (the numbers of `rope_scaling` in a Hugging Face config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of one layer; channel i is rotated with channel i + head_dim/2.

    `factors` (head_dim/2 numbers) divide the inverse frequencies, as GGUF's `rope_freqs` does.
    """

    theta: float
    scaling: RopeScaling | None = None
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one decoder layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    attention: Literal["full", "sliding"] = "full"
    window: int | None = None  # tokens a sliding layer sees, itself included

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token of one sequence takes in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model: sizes, layers and the few switches its mathematics needs."""

    name: str
    family: str  # key of `models.FAMILIES`
    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str  # what the checkpoint stores: "float16", "bfloat16" or "float32"

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class TensorSource:
    """One tensor of this engine: its shape, and the checkpoint tensors it is stacked from.

    `parts` are Hugging Face names, concatenated along dimension 0 in this order (fused QKV and
    gate/up projections).
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
