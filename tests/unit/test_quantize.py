"""int8 keys and sketches: packing against plain loops, errors against half a step, awkward rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridgen.kv_cache.quantize import (
    dequantize_int8,
    key_mean,
    make_sketch,
    quantize_int8,
    read_sketch,
    sketch_bytes,
)

BITS = (2, 4)
FP16_ROUNDING = 2.0**-11
FP16_LEAST = 2.0**-24


def random_keys(heads: int = 3, tokens: int = 128, dim: int = 24, dtype: torch.dtype = torch.float32) -> Tensor:
    """Channels of different size and with different biases, as models have them."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    spread = 10.0 ** torch.empty(1, heads, 1, dim).uniform_(-2, 1, generator=generator)
    bias = 10.0 * torch.randn(1, heads, 1, dim, generator=generator)
    return (spread * torch.randn(2, heads, tokens, dim, generator=generator) + bias).to(dtype)


def test_mean_leaves_the_sinks_out() -> None:
    keys = random_keys(dtype=torch.bfloat16)
    mean = key_mean(keys, skip=4)
    assert mean.dtype is torch.float32 and mean.shape == (2, 3, 24)
    torch.testing.assert_close(mean, keys[:, :, 4:].double().mean(dim=2).float())
    assert (key_mean(keys[:, :, :4], skip=4) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_is_within_half_a_step(dtype: torch.dtype) -> None:
    keys = random_keys(dtype=dtype)
    mean = key_mean(keys)
    codes, scales = quantize_int8(keys, mean)
    assert codes.dtype is torch.int8 and codes.shape == keys.shape
    assert scales.dtype is torch.float32 and scales.shape == keys.shape[:3]
    assert (codes.abs().amax(dim=-1) == 127).all()  # symmetric, and the whole range is used
    stored = codes.double() * scales.double().unsqueeze(-1) + mean.double().unsqueeze(2)
    error = (stored - keys.double()).abs()
    assert (error <= 0.50001 * scales.double().unsqueeze(-1) + 1e-6 * keys.double().abs()).all()
    torch.testing.assert_close(dequantize_int8(codes, scales, mean, torch.float32).double(), stored, atol=1e-5, rtol=0)
    assert dequantize_int8(codes, scales, mean, dtype).dtype is dtype


def test_int8_is_a_fixed_point() -> None:
    codes, scales = quantize_int8(random_keys())
    again, scales_again = quantize_int8(dequantize_int8(codes, scales, None, torch.float32))
    assert torch.equal(codes, again)
    torch.testing.assert_close(scales, scales_again)


def test_int8_with_a_mean_survives_large_biases() -> None:
    keys = torch.randn(1, 2, 64, 16)
    keys[..., 3] += 900.0  # as in Qwen2.5
    mean = key_mean(keys)
    assert (dequantize_int8(*quantize_int8(keys, mean), mean, torch.float32) - keys).abs().max() < 0.05
    assert (dequantize_int8(*quantize_int8(keys), None, torch.float32) - keys).abs().max() > 1.0


def awkward_rows(dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    least = torch.finfo(dtype).smallest_normal
    rows = torch.zeros(1, 1, 64, 8, dtype=dtype)
    rows[0, 0, 1] = 3.0
    rows[0, 0, 2] = most
    rows[0, 0, 3] = -most
    rows[0, 0, 4, 0] = most
    rows[0, 0, 5] = least / 4
    rows[0, 0, 6, ::2] = -least
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_awkward_rows_give_no_nan(dtype: torch.dtype) -> None:
    rows = awkward_rows(dtype)
    for mean in (None, key_mean(rows), torch.full((1, 1, 8), 1e30), torch.full((1, 1, 8), -3e38)):
        codes, scales = quantize_int8(rows, mean)
        assert (scales > 0).all() and scales.isfinite().all()
        assert dequantize_int8(codes, scales, mean, torch.float32).isfinite().all()
        for bits in BITS:
            assert read_sketch(make_sketch(rows, bits, mean), bits, 8).isfinite().all()
    zeros = torch.zeros(1, 1, 64, 8, dtype=dtype)
    codes, scales = quantize_int8(zeros)
    assert (dequantize_int8(codes, scales, None, torch.float32) == 0).all()


def test_empty_keys() -> None:
    keys = torch.zeros(2, 3, 0, 16)
    codes, scales = quantize_int8(keys, key_mean(keys))
    assert codes.shape == (2, 3, 0, 16) and scales.shape == (2, 3, 0)
    for bits in BITS:
        sketch = make_sketch(keys, bits)
        assert sketch.shape == (2, 3, 0, sketch_bytes(bits, 16))
        assert read_sketch(sketch, bits, 16).shape == keys.shape


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_sketch_bytes(dim: int) -> None:
    assert sketch_bytes(2, dim) * 8 == 2.5 * 64 * dim
    assert sketch_bytes(4, dim) * 8 == 4.5 * 64 * dim


def read_block(block: bytes, bits: int, dim: int) -> list[list[float]]:
    """One block by its definition: 64 rows of `dim` numbers."""
    numbers = torch.frombuffer(bytearray(block[-4 * dim :]), dtype=torch.float16).double().tolist()
    scale, zero = numbers[:dim], numbers[dim:]
    rows = []
    for token in range(64):
        row = []
        for channel in range(dim):
            quad, k = divmod(channel, 4)
            if bits == 2:
                t, lane = divmod(token, 16)
                code = block[64 * quad + 4 * lane + k] >> (2 * t) & 3
            else:
                v, rest = divmod(token, 32)
                high, lane = divmod(rest, 16)
                code = block[64 * (2 * quad + v) + 4 * lane + k] >> (4 * high) & 15
            row.append(scale[channel] * code + zero[channel])
        rows.append(row)
    return rows


@pytest.mark.parametrize("dim", [8, 24])
@pytest.mark.parametrize("bits", BITS)
def test_layout_against_a_plain_loop(bits: int, dim: int) -> None:
    sketch = make_sketch(random_keys(dim=dim), bits)
    got = read_sketch(sketch, bits, dim)
    for b in range(2):
        for head in range(3):
            for block in range(2):
                want = read_block(bytes(sketch[b, head, block].tolist()), bits, dim)
                rows = got[b, head, 64 * block : 64 * block + 64]
                torch.testing.assert_close(rows.double(), torch.tensor(want, dtype=torch.float64), atol=0, rtol=1e-6)


def sketch_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Low and high end, [..., 1, d], of what the codes of blocks [..., 64, d] span."""
    low, high = blocks.amin(-2, keepdim=True), blocks.amax(-2, keepdim=True)
    if bits == 4:
        return low, high
    deviation, mean = torch.std_mean(blocks, -2, correction=0, keepdim=True)
    middle, length = ((low + high) / 2 + mean) / 2, (high - low) / 4 + 1.8 * deviation
    return middle - length / 2, middle + length / 2


@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_sketch_is_within_half_a_step(bits: int, with_mean: bool) -> None:
    """Of what lies between zero and the highest code; the nearest of these for what does not."""
    keys = random_keys(tokens=192)
    mean = key_mean(keys) if with_mean else None
    sketch = make_sketch(keys, bits, mean)
    error = (read_sketch(sketch, bits, 24, mean) - keys).abs().unflatten(2, (3, 64))
    centred = (keys if mean is None else keys - mean.unsqueeze(2)).unflatten(2, (3, 64))
    low, high = sketch_range(centred, bits)
    step = (high - low) / (2**bits - 1)
    beyond = torch.maximum(low - centred, centred - high).clamp_min(0)
    assert (beyond > 0).any() == (bits == 2)
    # The rounding of the zero, which the span to its top takes over, and of the scale, times the codes.
    rounding = FP16_ROUNDING * (2 * low.abs() + 2 * (high - low)) + 2**bits * FP16_LEAST
    assert (error <= torch.maximum(step / 2, beyond) + rounding + 1e-6 * keys.abs().unflatten(2, (3, 64))).all()


def test_int2_suits_normal_keys() -> None:
    """Four levels that are the same in all blocks are off by 0.1188 at least (Max, 1960)."""
    keys = torch.randn(1, 4, 640, 64)
    assert (read_sketch(make_sketch(keys, 2), 2, 64) - keys).square().mean() < 0.1188


def test_int4_of_what_it_can_say_is_exact() -> None:
    codes = torch.randint(0, 16, (1, 2, 128, 16))
    codes[:, :, ::64], codes[:, :, 1::64] = 0, 15  # every channel of a block has both ends
    keys = 0.5 * codes.float() - 3.0
    assert torch.equal(read_sketch(make_sketch(keys, 4), 4, 16), keys)


def test_int2_by_hand() -> None:
    """Half of the keys 1, half of them -1: a deviation of 1, so codes 0 and 3 are 1/8 * 2 + 0.9 from the middle."""
    keys = torch.ones(1, 1, 64, 8)
    keys[:, :, ::2] = -1
    torch.testing.assert_close(read_sketch(make_sketch(keys, 2), 2, 8), 1.15 * keys, atol=1e-3, rtol=0)


@pytest.mark.parametrize("bits", BITS)
def test_sketch_of_huge_and_constant_channels(bits: int) -> None:
    keys = torch.randn(1, 1, 64, 8)
    keys[..., 0] = 0.0
    keys[..., 1] = -7.25
    keys[..., 2] = torch.linspace(-1e30, 1e30, 64)
    keys[..., 3] = 1e6
    keys[..., 4] = 1e-9 * torch.randn(64)
    read = read_sketch(make_sketch(keys, bits), bits, 8)
    assert (read[..., :2] == keys[..., :2]).all()
    most = 65504.0
    assert read[..., 2].amin() == -most and read[..., 2].amax() == most * (2**bits - 2)
    assert (read[..., 3] >= most).all() and (read[..., 3] <= 1e6 + 500).all()
    assert read[..., 4].abs().max() <= 2 * FP16_LEAST
    ordinary = keys[..., 5:]
    spread = ordinary.amax(2, keepdim=True) - ordinary.amin(2, keepdim=True)
    assert ((read[..., 5:] - ordinary).abs() < spread / 2).all(), "what huge neighbours do not change"


def test_wrong_arguments_are_named() -> None:
    keys = torch.zeros(1, 1, 64, 16)
    with pytest.raises(ValueError, match="bits=3: must be one of"):
        make_sketch(keys, 3)
    with pytest.raises(ValueError, match="head_dim=12: must be a positive multiple of 8"):
        make_sketch(torch.zeros(1, 1, 64, 12), 2)
    with pytest.raises(ValueError, match="keys: 63 tokens: must be a multiple of 64"):
        make_sketch(keys[:, :, 1:], 2)
    with pytest.raises(ValueError, match="sketch: 320 bytes a block: must be 576"):
        read_sketch(make_sketch(keys, 2), 4, 16)
