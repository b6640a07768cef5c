"""Rotary positions against transformers' own, and causal attention in pieces against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridgen.models.config_fields import rope_from_config
from hybridgen.models.layers import causal_attention, inverse_frequencies, rotary_tables, rotate
from hybridgen.models.spec import LayerSpec, RopeScaling, RopeSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (64, {"rope_type": "default", "rope_theta": 10_000.0}),
    "smollm2": (64, {"rope_type": "default", "rope_theta": 100_000.0}),
    "qwen2.5": (128, {"rope_type": "default", "rope_theta": 1_000_000.0}),
    "llama-3.1": (128, {**LLAMA3, "rope_theta": 500_000.0}),
    "llama-3.2": (64, {**LLAMA3, "rope_theta": 500_000.0, "factor": 32.0}),
    "small": (16, {**LLAMA3, "rope_theta": 5000.0, "original_max_position_embeddings": 128}),
}


def theirs(head_dim: int, parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("published", [False, True])
def test_rotation_is_that_of_transformers(name: str, published: bool) -> None:
    """Both ways of writing it in config.json, up to position 131,071."""
    head_dim, parameters = ROPES[name]
    if published:
        rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
        config = {"rope_theta": parameters["rope_theta"], "rope_scaling": rest}
    else:
        config = {"rope_parameters": parameters}
    spec = rope_from_config("m", config)
    reference = theirs(head_dim, parameters)
    frequencies = inverse_frequencies(spec, head_dim)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=1e-6, atol=0)

    positions = torch.tensor([0, 1, 2, 511, 4096, 8191, 131_071])
    query = torch.randn(len(positions), 5, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = reference(query, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(query.unsqueeze(0), query.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    found = rotate(query, rotary_tables(positions, frequencies, torch.float32))
    # an angle of 131,071 is exact to 2^-7 in float32
    torch.testing.assert_close(found, expected.squeeze(0), rtol=0, atol=0.02)
    torch.testing.assert_close(found[:5], expected[0, :5], rtol=0, atol=2e-3)
    torch.testing.assert_close(found[:3], expected[0, :3], rtol=0, atol=1e-5)


def test_llama3_scaling_by_its_definition() -> None:
    """Short wavelengths are kept, long ones stretched by the factor, those between lie between."""
    plain = inverse_frequencies(RopeSpec(500_000.0), 128)
    scaled = inverse_frequencies(RopeSpec(500_000.0, RopeScaling(8.0, 1.0, 4.0, 8192)), 128)
    wavelength = 2 * torch.pi / plain
    short, long = wavelength < 8192 / 4.0, wavelength > 8192 / 1.0
    assert short.any() and long.any() and (~short & ~long).any()
    torch.testing.assert_close(scaled[short], plain[short], rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-6, atol=0)
    between = (scaled / plain)[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all() and (between.diff() < 0).all()


def test_gguf_factors_divide_the_frequencies() -> None:
    factors = tuple(1.0 + index for index in range(8))
    plain = inverse_frequencies(RopeSpec(10_000.0), 16)
    scaled = inverse_frequencies(RopeSpec(10_000.0, factors=factors), 16)
    torch.testing.assert_close(scaled * torch.tensor(factors), plain)


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    frequencies = inverse_frequencies(RopeSpec(10_000.0), 32)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32, generator=generator).unbind(0)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, rotary_tables(torch.tensor([position]), frequencies, torch.float32))

    torch.testing.assert_close(at(q, 77).norm(), q.norm())
    dots = [float((at(q, 10 + shift) * at(k, 3 + shift)).sum()) for shift in (0, 1, 50, 500)]
    assert max(dots) - min(dots) < 1e-3
    assert abs(float((at(q, 11) * at(k, 3)).sum()) - dots[0]) > 1e-3
    torch.testing.assert_close(at(q, 0), q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Angles in half precision would be off by whole turns."""
    frequencies = inverse_frequencies(RopeSpec(10_000.0), 64)
    positions = torch.tensor([4001, 32_000])
    exact = rotary_tables(positions, frequencies, torch.float32)
    for table, wanted in zip(rotary_tables(positions, frequencies, dtype), exact, strict=True):
        assert table.dtype == dtype
        torch.testing.assert_close(table, wanted.to(dtype))


# Causal attention of a prefill piece


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Float64, head by head: query [T, Hq, d], keys and values [Hkv, n, d]."""
    tokens, heads, dim = query.shape
    group, length = heads // keys.shape[0], keys.shape[1]
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    visible = torch.arange(length) <= torch.arange(length - tokens, length).unsqueeze(1)
    for head in range(heads):
        k, v = keys[head // group].double(), values[head // group].double()
        logits = (query[:, head].double() @ k.T / dim**0.5).masked_fill(~visible, -torch.inf)
        out[:, head] = logits.softmax(-1) @ v
    return out.reshape(tokens, heads * dim)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (4, 2, 16), (6, 2, 8), (4, 1, 32), (9, 3, 64)])
def test_pieces_equal_one_piece_equal_float64(heads: int, kv_heads: int, dim: int) -> None:
    length = 67
    layer = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=None)
    generator = torch.Generator().manual_seed(heads)
    query = 2.0 * torch.randn(length, heads, dim, generator=generator)
    keys, values = torch.randn(2, kv_heads, length, dim, generator=generator).unbind(0)
    expected = dense(query, keys, values)
    whole = causal_attention(query, keys, values, layer, 5)
    assert whole.shape == (length, heads * dim)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=2e-5)
    for cuts in ([1, 2, 33, 67], [64, 67], [20, 21, 22, 67]):
        starts = [0, *cuts[:-1]]
        pieces = [
            causal_attention(query[start:end], keys[:, :end], values[:, :end], layer, piece=13)
            for start, end in zip(starts, cuts, strict=True)
        ]
        torch.testing.assert_close(torch.cat(pieces).double(), expected, rtol=0, atol=2e-5)


def test_the_future_is_not_read() -> None:
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_dim=8, rope=None)
    generator = torch.Generator().manual_seed(0)
    query, keys, values = torch.randn(5, 2, 8), *torch.randn(2, 1, 9, 8, generator=generator).unbind(0)
    before = causal_attention(query, keys, values, layer, 5)
    keys[:, 7:] += 100.0
    values[:, 7:] -= 100.0
    after = causal_attention(query, keys, values, layer, 5)  # the query's tokens are 4..8
    assert torch.equal(before[:3], after[:3])
    assert not torch.isclose(before[3:], after[3:]).all(dim=-1).any()
