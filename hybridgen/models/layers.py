"""Mathematics that the model families share: rotary tables, rotation, norms, causal attention of a prefill piece."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.models.spec import LayerSpec, RopeSpec

FEW_ROWS = 64  # of a decode step
LONG_PROMPT = 4096  # tokens

def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Rotation per position of each channel pair, float32 [head_dim/2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.factors is not None:
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.scaling is None:
        return frequencies
    # Llama 3: long wavelengths are stretched by `factor`, short ones are kept, those between are mixed.
    scaling = rope.scaling
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    kept_share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = kept_share.clamp(0.0, 1.0)
    return frequencies * (kept_share + (1.0 - kept_share) / scaling.factor)


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) for positions [T], each [T, 1, head_dim], computed in float32."""
    angles = torch.outer(positions.to(torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [T, heads, head_dim]: channel i goes with channel i + head_dim/2."""
    cos, sin = tables
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, turned, sin)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [T, hidden], or without a bias RMSNorm."""
    if x.is_cuda and x.shape[0] <= FEW_ROWS:
        from hybridgen.models.norm_kernel import norm_rows  # Triton: only where there is a GPU

        return norm_rows(x, weight, bias, eps)
    if bias is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, piece: int) -> Tensor:
    """Attention of the last T of n tokens to all n, causally, for one sequence.

    query [T, Hq, d]; keys, values [Hkv, n, d] with the T newest rows last; returns [T, Hq * d]. Where T < n, `piece`
    tokens go at a time: a mask may then be as large as piece x n.
    """
    tokens, length = query.shape[0], keys.shape[1]
    q, k, v = query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    if layer.group_size > 1 and not (q.is_cuda and q.dtype != torch.float32):
        # Only the flash kernels share KV heads without a copy of their own.
        k, v = (t.repeat_interleave(layer.group_size, dim=1) for t in (k, v))
    attend = partial(F.scaled_dot_product_attention, scale=layer.scale, enable_gqa=k.shape[1] != q.shape[1])
    if tokens == length:
        with _best_for_long(q):
            out = attend(q, k, v, is_causal=True)
    elif tokens == 1:
        out = attend(q, k, v)
    else:
        out = torch.empty_like(q)
        for first in range(0, tokens, piece):
            last = min(first + piece, tokens)
            seen = length - tokens + last
            some, mask = q[:, :, first:last], _lower_right(last - first, seen, q.device)
            out[:, :, first:last] = attend(some, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)
    return out.squeeze(0).transpose(0, 1).reshape(tokens, -1)


def _best_for_long(query: Tensor) -> AbstractContextManager[None]:
    """cuDNN's kernel is the fastest on long prompts, but makes a plan for each new length: tens of milliseconds."""
    if not query.is_cuda or query.dtype == torch.float32 or query.shape[2] < LONG_PROMPT:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    context: AbstractContextManager[None] = sdpa_kernel(backends, set_priority=True)
    return context


def _lower_right(tokens: int, length: int, device: torch.device) -> Tensor:
    """The causal mask of the last `tokens` of `length` tokens; on a GPU only its name."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        mask: Tensor = causal_lower_right(tokens, length)
        return mask
    return torch.ones(tokens, length, dtype=torch.bool, device=device).tril(length - tokens)
