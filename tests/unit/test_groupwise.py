"""Group-wise codes: the layout by plain loops, errors against half a step, groups without range and at the limits."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridgen.offload.groupwise import GroupCodec, rounded_down

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7}  # of step and minimum
WIDTHS = (1, 2, 63, 64, 65, 80, 127, 128, 200)


def encoded(values: Tensor, bits: int) -> tuple[GroupCodec, Tensor, Tensor]:
    """The codec, the packed rows and what they stand for."""
    codec = GroupCodec(bits, values.dtype)
    packed = codec.encode(values)
    assert packed.dtype is torch.uint8 and packed.shape == (*values.shape[:-1], codec.row_bytes(values.shape[-1]))
    return codec, packed, codec.decode(packed, torch.full_like(values, math.nan))


def parts_of(packed: Tensor, bits: int, width: int, pair: torch.dtype) -> list[tuple[float, float, list[int]]]:
    """Step, minimum and codes of each group of one row, read byte by byte."""
    row, count = bytes(packed.tolist()), -(-width // 64)

    def number(at: int) -> float:
        if pair is torch.float16:
            return float(struct.unpack("<e", row[at : at + 2])[0])
        return float(struct.unpack("<f", b"\0\0" + row[at : at + 2])[0])  # bf16: the upper half of a float

    found = []
    for group in range(count):
        codes = []
        for index in range(64 * group, min(64 * group + 64, width)):
            byte = row[4 * count + (index if bits == 8 else index // 2)]
            codes.append(byte if bits == 8 else byte >> 4 if index % 2 else byte & 15)
        found.append((number(4 * group), number(4 * group + 2), codes))
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_and_values_by_a_plain_loop(dtype: torch.dtype, bits: int, width: int) -> None:
    values = (torch.randn(3, 2, width) * torch.tensor([0.1, 3.0]).unsqueeze(-1) + 1.5).to(dtype)
    codec, packed, decoded = encoded(values, bits)
    for index in ((0, 0), (2, 1)):
        exact = []
        for step, minimum, codes in parts_of(packed[index], bits, width, codec.pair_dtype):
            exact += [minimum + step * code for code in codes]
        rounding = torch.finfo(dtype).eps / 2 + 2**-23
        assert decoded[index].tolist() == pytest.approx(exact, rel=rounding, abs=1e-7)


@pytest.mark.parametrize(("bits", "size"), [(4, 0.5625), (8, 1.0625)])
@pytest.mark.parametrize("width", [64, 128, 5120])
def test_bytes_an_element(bits: int, size: float, width: int) -> None:
    """Of FlexGen's: 4 bits, and fp16 scale and minimum of 64."""
    assert GroupCodec(bits, torch.float16).row_bytes(width) == size * width


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_words(bits: int, width: int) -> None:
    size, least = GroupCodec(bits, torch.float32).row_bytes(width), width * bits / 8 + 4 * math.ceil(width / 64)
    assert size % 4 == 0 and least <= size < least + 4


def check_bounds(values: Tensor, bits: int) -> None:
    """Half a step, where a step is the range over the codes and what rounding to 16 bits adds; and finite."""
    codec, packed, decoded = encoded(values, bits)
    assert decoded.isfinite().all()
    fraction = FRACTION_BITS[codec.pair_dtype]
    least = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}[codec.pair_dtype]  # the smallest number
    for row, packed_row, made in zip(values, packed, decoded, strict=True):
        numbers, results = row.double().tolist(), made.double().tolist()
        for group, (step, minimum, _) in enumerate(parts_of(packed_row, bits, len(numbers), codec.pair_dtype)):
            some = slice(64 * group, 64 * group + 64)
            low, high = min(numbers[some]), max(numbers[some])
            assert minimum <= low and step >= 0
            assert low - minimum <= max(abs(low) * 2.0**-fraction, least) * 1.001
            span = high - low + abs(low) * 2.0**-fraction + least
            assert step <= (span / (2**bits - 1) * (1 + 2.0**-fraction) + least) * 1.001
            for number, result in zip(numbers[some], results[some], strict=True):
                of_result = max(abs(result), abs(number)) * torch.finfo(values.dtype).eps + least
                # float32's rounding of what is added up
                of_sum = (abs(minimum) + step * 2**bits) * 2.0**-22
                assert abs(result - number) <= step / 2 + of_result + of_sum


@st.composite
def rows(draw: Any) -> Tensor:
    """Up to 3 rows of odd widths, groups of very different sizes, biases and constants."""
    dtype = draw(st.sampled_from(DTYPES))
    width, count = draw(st.integers(1, 150)), draw(st.integers(1, 3))
    largest = 4 if dtype is torch.float16 else 37
    spread = 10.0 ** draw(st.integers(-largest - 4, largest))
    bias = draw(st.sampled_from([0.0, 1.0, -3.0, 100.0])) * 10.0 ** draw(st.integers(-largest, largest - 2))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, width, generator=generator, dtype=torch.float64) * spread / 4 + bias
    values[0, ::3] = draw(st.sampled_from([0.0, bias, spread]))
    finite = torch.finfo(dtype).max if dtype is torch.float16 else 2.0**126
    return values.clamp(-finite, finite).to(dtype)


@settings(max_examples=150, deadline=None)
@given(rows(), st.sampled_from([4, 8]))
def test_error_bounds(values: Tensor, bits: int) -> None:
    check_bounds(values, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_without_range(dtype: torch.dtype, bits: int) -> None:
    """FlexGen's own gives NaN there."""
    for value in (0.0, -0.0, 1.0, -2.5, 1024.0):  # 16 bits hold these
        values = torch.full((2, 80), value, dtype=dtype)
        assert torch.equal(encoded(values, bits)[2], values)
    for value in (0.1, -100.3, 1e-7, 3e4):
        values = torch.full((2, 80), value, dtype=dtype)
        check_bounds(values, bits)
        torch.testing.assert_close(encoded(values, bits)[2], values, rtol=2**-8, atol=2**-24)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_least(dtype: torch.dtype, bits: int) -> None:
    info, most = torch.finfo(dtype), 65504.0 if dtype is torch.float16 else 2.0**126
    for low, high in ((-most, most), (0.0, most), (-most, 0.0), (most / 2, most), (-1e-3, most), (0, info.tiny),
                      (-info.tiny, info.tiny), (info.tiny, 2 * info.tiny)):  # fmt: skip
        values = torch.linspace(0, 1, 70, dtype=torch.float64).mul(high).add(torch.linspace(low, 0, 70))
        values[0], values[1] = low, high
        check_bounds(values.to(dtype).unsqueeze(0), bits)
    beyond = torch.tensor([[info.max, -info.max, math.inf, -math.inf, 1.0]], dtype=dtype)
    assert encoded(beyond, bits)[2].isfinite().all()


def test_both_ends_of_a_plain_range_are_exact() -> None:
    values = torch.arange(16.0).repeat(4).unsqueeze(0)
    assert torch.equal(encoded(values, 4)[2], values)
    values = torch.arange(256.0).view(4, 64) - 128.0
    for row in values:  # a step is 63 / 255, and it is rounded up
        assert (encoded(row.unsqueeze(0), 8)[2] - row).abs().max() <= 0.5 * 63 / 255 * 1.02


def test_a_row_is_packed_by_itself() -> None:
    """So blocks of rows may be packed, kept and unpacked in any order."""
    codec, values = GroupCodec(4, torch.bfloat16), torch.randn(130, 96).bfloat16()
    whole = codec.encode(values)
    assert torch.equal(torch.cat([codec.encode(values[start : start + 64]) for start in (0, 64, 128)]), whole)
    out = torch.full((130, 96), math.nan).bfloat16()
    codec.decode(whole[64:128], out[64:128])  # a slot's view
    assert out[:64].isnan().all() and out[128:].isnan().all()
    assert torch.equal(out[64:128], codec.decode(whole, torch.empty_like(out))[64:128])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_down(dtype: torch.dtype) -> None:
    numbers = torch.cat((torch.randn(2000) * 10.0 ** torch.empty(2000).uniform_(-9, 3), torch.tensor([0.0, -0.0])))
    numbers = torch.cat((numbers, torch.tensor([1e-30, -1e-30, -65504.0, 65504.0]), torch.arange(-5.0, 5.0)))
    down = rounded_down(numbers, dtype)
    bits, step = FRACTION_BITS[dtype], torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for number, below in zip(numbers.tolist(), down.tolist(), strict=True):
        gap = Fraction(number) - Fraction(below)
        assert 0 <= gap < max(Fraction(abs(number)) / 2**bits, Fraction(step)) or gap == 0


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits=2"):
        GroupCodec(2, torch.float16)
