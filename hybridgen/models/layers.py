"""Mathematics that the model families share: rotary tables, rotation, norms, causal attention of a prefill piece."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.models.spec import LayerSpec, RopeSpec

FEW_ROWS = 64  # of a decode step

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


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec) -> Tensor:
    """Attention of the last T of n tokens to all n, causally, for one sequence.

    query [T, Hq, d]; keys, values [Hkv, n, d] with the T newest rows last; returns [T, Hq * d].
    """
    tokens, length = query.shape[0], keys.shape[1]
    q, k, v = query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    if layer.group_size > 1 and not (q.is_cuda and q.dtype != torch.float32):
        # Only the flash kernels share KV heads without a copy of their own.
        k, v = (t.repeat_interleave(layer.group_size, dim=1) for t in (k, v))
    shares_heads = k.shape[1] != q.shape[1]
    if tokens == 1:
        out = F.scaled_dot_product_attention(q, k, v, scale=layer.scale, enable_gqa=shares_heads)
    elif tokens == length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=shares_heads)
    else:
        mask: Tensor
        if q.is_cuda:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(tokens, length)
        else:
            mask = torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril(length - tokens)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=shares_heads)
    return out.squeeze(0).transpose(0, 1).reshape(tokens, -1)
