"""Tiny random Hugging Face models whose attention is peaked enough to make selection interesting.

Fixed seeds; every bias is non-zero and every norm weight is randomised, so that a forgotten one shows.
The gains below are in units of 1/sqrt(fan in): a query-key gain g gives attention logits with a standard
deviation of about g squared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    logging,
)

logging.disable_progress_bar()

MAX_POSITIONS = 1024
QUERY_KEY_GAIN = 1.8
VALUE_GAIN = 1.0
OUTPUT_GAIN = 0.5  # of what attention and MLP add to the residual stream
HEAD_GAIN = 1.5  # of an untied LM head
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class TinyModel:
    """How to make one model. A negative seed: `build` has filled in the weights.

    `old_rope_config` writes RoPE the way published config.json files do.
    """

    name: str
    build: Callable[[], nn.Module]
    seed: int
    old_rope_config: bool = False


def _opt() -> nn.Module:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=101,
            hidden_size=48,
            word_embed_proj_dim=48,
            ffn_dim=96,
            num_hidden_layers=5,
            num_attention_heads=3,
            max_position_embeddings=MAX_POSITIONS,
            activation_function="relu",
            do_layer_norm_before=True,
            dropout=0.0,
            **NO_TOKENS,
        )
    )


def _llama(
    heads: int, kv_heads: int, head_dim: int, hidden: int, layers: int, tied: bool, rope: dict[str, Any]
) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=113,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            rope_parameters=rope,
            **NO_TOKENS,
        )
    )


def _qwen2() -> nn.Module:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            use_sliding_window=False,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            **NO_TOKENS,
        )
    )


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# llama-gqa3 has head_dim * heads != hidden size, as some published models have.
TINY_MODELS = {
    model.name: model
    for model in (
        TinyModel("opt", _opt, seed=1),
        TinyModel("llama-mha", lambda: _llama(3, 3, 16, 48, 4, False, PLAIN_ROPE), 2),
        TinyModel("llama-gqa2", lambda: _llama(4, 2, 16, 64, 6, True, PLAIN_ROPE), 3),
        TinyModel("llama-gqa3", lambda: _llama(6, 2, 8, 36, 4, True, PLAIN_ROPE), 4),
        TinyModel("llama-gqa4", lambda: _llama(4, 1, 32, 64, 4, False, PLAIN_ROPE), 5),
        TinyModel(
            "llama3-rope",
            lambda: _llama(4, 2, 16, 64, 4, True, dict(LLAMA3_ROPE)),
            seed=6,
            old_rope_config=True,
        ),
        TinyModel("qwen2", _qwen2, seed=7),
    )
}


def _opt_with_ties() -> nn.Module:
    """Layer 0's keys depend on the token alone, not on its position, and are free of rounding.

    Positions are not embedded, and only one channel of each head's key is not 0: one product of one input.
    """
    model = _opt()
    randomise(model, seed=8)
    decoder = model.model.decoder
    decoder.embed_positions.weight.data.zero_()
    key = decoder.layers[0].self_attn.k_proj
    key.bias.data.zero_()
    key.weight.data.zero_()
    for head in range(3):
        key.weight.data[16 * head + head, 5 + head] = 2.0
    return model


TIES = TinyModel("opt-ties", _opt_with_ties, seed=-1)


def _qwen2_rotating() -> nn.Module:
    """In layers 1 and 3 a pair of channels of every key, which no query looks at, is huge and turns with the position.

    A mean does not remove it, and int8's one scale a row is all its own.
    """
    model = _qwen2()
    randomise(model, seed=9)
    for layer in (1, 3):
        attention = model.model.layers[layer].self_attn
        pair = [0, 8]  # turn by one radian a token
        attention.k_proj.bias.data.view(2, 16)[:, pair] = 300.0
        attention.q_proj.bias.data.view(4, 16)[:, pair] = 0.0
        attention.q_proj.weight.data.view(4, 16, -1)[:, pair] = 0.0
    return model


ROTATING = TinyModel("qwen2-rotating", _qwen2_rotating, seed=-1)


def _gain(name: str) -> float:
    if "q_proj" in name or "k_proj" in name:
        return QUERY_KEY_GAIN
    if "v_proj" in name:
        return VALUE_GAIN
    if any(part in name for part in ("o_proj", "out_proj", "down_proj", "fc2")):
        return OUTPUT_GAIN
    return HEAD_GAIN if "lm_head" in name else 1.0


def randomise(model: nn.Module, seed: int) -> None:
    """Overwrite every parameter with seeded numbers of a size chosen by its name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: nn.Parameter, std: float, mean: float = 0.0) -> None:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(mean + std * noise)

    for name, parameter in model.named_parameters():  # tied parameters appear once
        if "embed_positions" in name:
            normal(parameter, 0.4)
        elif "embed_tokens" in name:
            normal(parameter, 0.5)
        elif "norm" in name and name.endswith("weight"):
            normal(parameter, 0.15, mean=1.0)
        elif name.endswith("bias"):
            normal(parameter, 0.4 if any(p in name for p in ("q_proj", "k_proj", "v_proj")) else 0.1)
        else:
            normal(parameter, _gain(name) * parameter.shape[1] ** -0.5)


def _rewrite_rope_as_published(directory: Path) -> None:
    """`rope_scaling` and `rope_theta` at the top level, as in Llama 3.x checkpoints."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    path.write_text(json.dumps(config, indent=2))


def save_tiny_model(name: str, parent: Path) -> Path:
    """Make the model `name` and save it as a Hugging Face directory under `parent`."""
    recipe = {TIES.name: TIES, ROTATING.name: ROTATING, **TINY_MODELS}[name]
    model = recipe.build()
    if recipe.seed >= 0:
        randomise(model, recipe.seed)
    directory = parent / name
    model.save_pretrained(directory)  # type: ignore[operator]
    if recipe.old_rope_config:
        _rewrite_rope_as_published(directory)
    return directory


def save_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one word an id: `w7` is token 7."""
    words = {f"w{index}": index for index in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * F.rms_norm(x, x.shape[-1:], eps=module.variance_epsilon)


def load_hf(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers reads it; end-of-sequence is switched off for generation.

    In float64 the RMS norms are replaced: transformers computes them in float32 whatever the dtype is.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager" if dtype == torch.float32 else "sdpa"
    )
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.forward = partial(_rms_norm, module)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_tokens(vocab_size: int, length: int, seed: int) -> list[int]:
    """A seeded prompt with a repeated passage in it, so that some keys are alike."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
    third = length // 3
    ids[2 * third : 2 * third + third // 2] = ids[: third // 2]
    return [int(token) for token in ids]


def save_character_tokenizer(directory: Path) -> None:
    """A tokenizer of one printable ASCII character an id, from 1; 0 is any other."""
    characters = {chr(code): code - 31 for code in range(32, 127)} | {"\n": 96}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[?]": 0, **characters}, unk_token="[?]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
