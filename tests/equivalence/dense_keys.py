"""Keys that the host does not keep as they were made, written from contracts.md ("Quantised keys") alone.

Plain float64, no code of the engine. The numeric definitions:

* fp16, bf16: a key is the nearest number of that type.
* int8: scale * code + mean; the mean of each channel is over the first prefill piece without sinks; the scale of a
  row is the largest distance from the mean / 127.
* sketch: in each block of 64 rows and channel scale * code + zero, the zero the low end of what is spanned and the
  scale the rest / (2^bits - 1), both in fp16. int4 spans all keys. int2 spans, about the middle between their mean and
  that of the least and the largest, a fourth of what int4 does and 1.8 standard deviations; others get the code of its
  nearest end. What is scored is not quite the query times that: the query times scale[c] is rounded to
  127 steps each way of its largest channel, one step a block and query head, and what rounding took from it is made
  good for a code in the middle (cpp_ext/kernels/scan.h).

Where the CPU multiplies int8 keys in integers, their scan takes a query head for integers of 16 bits times one step
(cpp_ext/kernels/int8_query512.h).

A key within float32's rounding of the middle between two codes may become either. `judge` says whether another
implementation's choice is one of the two, and it is then taken over (`StoredKeys.follow`), so that it does not spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from hybridgen import _C

KeyType = Literal["fp32", "fp16", "bf16", "int8"]
Sketch = Literal["none", "int4", "int2"]

BLOCK = 64  # rows of a sketch's block
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FRACTION_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
SKETCH_BITS = {"int4": 4, "int2": 2}

# How far float32 keys and queries are from float64 ones, of 1 + their size: several times what is observed.
# A step of int8 is about 2e-2 of these models' keys.
ROUNDING = 1e-4

ROUNDS_QUERY = _C.selected_isa() in ("avx512_vnni", "amx", "amx_emulated")  # of int8 keys: no other kernel does
MOST_QUERY = 127 * 256 + 127  # the largest of its integers

QUERIES = 64
LEAST_KEYS = 128
LEAST_RECALL = {"int8": 0.95, "int4": 0.9, "int2": 0.7}
CLOSE_RECALL = 0.004  # nearer to the least than this, rounding may decide


@dataclass(frozen=True)
class KeyStorage:
    """How the host keeps a layer's keys: what stands for them, and the sketch that is scored instead."""

    key_type: KeyType = "fp32"
    sketch: Sketch = "none"
    sketch_home: Literal["host", "gpu"] = "host"  # gpu: its scores are those of the keys that it stands for

    @property
    def plain(self) -> bool:
        return self.key_type == "fp32" and self.sketch == "none"

    @property
    def kind(self) -> str:
        """The engine's word for it."""
        name = "int8" if self.key_type == "int8" else str(DTYPES[self.key_type]).removeprefix("torch.")
        return name if self.sketch == "none" else f"{name}+{self.sketch}"


@dataclass(frozen=True)
class Encoded:
    """Whole blocks of a sequence's keys as an implementation keeps them.

    rows: [kv_heads, n, d] of a floating type, or int8 codes with scales [kv_heads, n] and mean [kv_heads, d];
    sketch: uint8 [kv_heads, n / 64, bytes], None without one.
    """

    rows: Tensor
    scales: Tensor | None = None
    mean: Tensor | None = None
    sketch: Tensor | None = None


# ---------------------------------------------------------------------------------------------------------
# Rounding


def half_spacing(numbers: Tensor, fraction_bits: int, least_exponent: int = -14) -> Tensor:
    """Of the floating numbers around each: the farthest that the nearest one can be."""
    exponent = torch.where(numbers == 0, least_exponent, torch.frexp(numbers)[1] - 1).clamp(min=least_exponent)
    return torch.ldexp(torch.ones_like(numbers), exponent - fraction_bits - 1)


def beyond(theirs: Tensor, mine: Tensor, allowed: Tensor | float) -> Tensor:
    """How much farther than allowed the worst of their numbers is, in units of float32's rounding."""
    return ((theirs.double() - mine).abs() - allowed).div(ROUNDING * (1 + mine.abs())).amax()


def exact_int8(keys: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Unrounded codes, and the scale of each row; keys [kv_heads, n, d], mean [kv_heads, d]."""
    centred = keys - mean[:, None]
    scales = centred.abs().amax(-1).clamp(min=1e-30) / 127
    return centred / scales[..., None], scales


def query_step(query: Tensor) -> Tensor:
    """What the integers for query heads [..., d] are multiplied by, float32 [..., 1]."""
    most = query.float().abs().amax(-1, keepdim=True)
    return most / torch.full_like(most, MOST_QUERY)


def rounded_query(query: Tensor) -> Tensor:
    """What int8 keys are multiplied by instead of query heads [..., d]; float32 as far as integers depend on it."""
    most = query.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.full_like(most, MOST_QUERY) / most, 0.0)
    return (query.float() * inverse).round().double() * query_step(query).double()  # half to even


# ---------------------------------------------------------------------------------------------------------
# Sketches


@lru_cache
def _byte_and_shift(bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """Where the code of each token and channel of a block lies, [64, d] each.

    Channels go in quads; byte 4 * lane + k of a vector of 64 bytes is of channel 4 * quad + k, lane = token % 16.
    """
    where, shift = (torch.zeros(BLOCK, dim, dtype=torch.int64) for _ in range(2))
    for token in range(BLOCK):
        for channel in range(dim):
            quad, k = divmod(channel, 4)
            place = token // 16
            vector = quad if bits == 2 else 2 * quad + place // 2
            where[token, channel] = 64 * vector + 4 * (token % 16) + k
            shift[token, channel] = bits * (place if bits == 2 else place % 2)
    return where, shift


def unpack_sketch(sketch: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [kv_heads, blocks, 64, d], scale and zero [kv_heads, blocks, d] of uint8 [kv_heads, blocks, bytes]."""
    where, shift = _byte_and_shift(bits, dim)
    end = BLOCK * dim * bits // 8
    assert sketch.shape[2] == end + 4 * dim
    codes = (sketch[:, :, where].int() >> shift) & (2**bits - 1)
    scale, zero = sketch[:, :, end:].contiguous().view(torch.float16).double().chunk(2, dim=2)
    return codes.double(), scale, zero


def sketch_span(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The ends of what the codes of keys [kv_heads, blocks, 64, d] span, [kv_heads, blocks, d] each."""
    ends = blocks.amin(2), blocks.amax(2)
    if bits == 4:
        return ends
    mean = blocks.mean(2)
    deviation = (blocks - mean[:, :, None]).square().mean(2).sqrt()
    middle = ((ends[0] + ends[1]) / 2 + mean) / 2
    length = (ends[1] - ends[0]) / 4 + 1.8 * deviation
    return middle - length / 2, middle + length / 2


def sketch_codes(blocks: Tensor, bits: int, scale: Tensor, zero: Tensor) -> Tensor:
    """Unrounded codes of keys [kv_heads, blocks, 64, d]."""
    step = scale[:, :, None]
    codes = (blocks - zero[:, :, None]) / torch.where(step > 0, step, 1.0)
    return torch.where(step > 0, codes.clamp(0, 2**bits - 1), 0.0)


def sketch_logits(query: Tensor, rounding: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """query [group, d] times the keys of one KV head's blocks, [group, blocks * 64], as the scan computes it.

    rounding: the float32 query that decides how weights are rounded. codes [blocks, 64, d], scale and zero [blocks, d].
    """
    folded = rounding.float()[:, None] * scale.float()  # [group, blocks, d], in float32 for the ties of its rounding
    most = folded.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, 127 / most, 0.0)
    weights = (folded * inverse).round().double()  # half to even
    step: Tensor = most.double() / 127
    exact = query[:, None] * scale
    middle = (2**bits - 1) / 2
    base = query @ zero.T + middle * (exact - step * weights).sum(-1)  # [group, blocks]
    sums: Tensor = torch.einsum("gbc,btc->gbt", weights, codes)
    logits: Tensor = step * sums + base[..., None]
    return logits.flatten(1)


# ---------------------------------------------------------------------------------------------------------
# Is a layer quantised at all?


def recall(queries: Tensor, keys: Tensor, made: Tensor) -> float:
    """The share of the true top tenth that `made` of the keys finds.

    queries: [heads, n, d]; keys, made: [kv_heads, m, d].
    """
    group, top = queries.shape[0] // keys.shape[0], max(1, keys.shape[1] // 10)
    found = 0
    for head, rows in enumerate(queries):
        true, other = ((rows @ some[head // group].T).topk(top).indices.tolist() for some in (keys, made))
        found += sum(len({*a} & {*b}) for a, b in zip(true, other, strict=True))
    return found / (top * queries.shape[0] * queries.shape[1])


def settle(asked: KeyStorage, queries: Tensor, keys: Tensor) -> tuple[KeyStorage, list[str]]:
    """What of `asked` finds enough, and reasons why that is too close to be sure.

    queries: [heads, n, d], the last ones of the prompt; keys: [kv_heads, m, d], without sinks.
    """
    key_type, sketch, close = asked.key_type, asked.sketch, []

    def finds_enough(kind: str, made: Tensor) -> bool:
        if made.shape[1] < LEAST_KEYS:
            return True
        share = recall(queries, keys[:, : made.shape[1]], made)
        if abs(share - LEAST_RECALL[kind]) < CLOSE_RECALL:
            close.append(f"{kind} keys find {share} of the top tenth")
        return share >= LEAST_RECALL[kind]

    whole = keys[:, : keys.shape[1] // BLOCK * BLOCK]
    if key_type == "int8":
        mean = keys.mean(1) if keys.shape[1] else torch.zeros(keys.shape[0], keys.shape[2], dtype=keys.dtype)
        codes, scales = exact_int8(keys, mean)
        if not finds_enough("int8", codes.round() * scales[..., None] + mean[:, None]):
            key_type = "fp32"
    if sketch != "none" and whole.shape[1]:
        stored = StoredKeys(KeyStorage("fp32", sketch), keys.new_zeros(keys.shape[0], keys.shape[2]))
        stored.add(whole)
        if not finds_enough(sketch, stored.sketched()):
            sketch = "none"
    return KeyStorage(key_type, sketch, asked.sketch_home), close


# ---------------------------------------------------------------------------------------------------------
# One layer's host tier of one sequence


class StoredKeys:
    """The keys of the host, in order: what they were, what stands for them, and what is scored."""

    def __init__(self, storage: KeyStorage, mean: Tensor) -> None:
        """mean: [kv_heads, d], of int8."""
        self.storage, self.mean = storage, mean
        kv_heads, dim = mean.shape
        self.original = mean.new_empty(kv_heads, 0, dim)
        self.rows = self.original  # what stands for them
        self.followed = 0  # rows that another implementation's have been compared with
        blocks = mean.new_empty(kv_heads, 0, dim)
        self.codes, self.scale, self.zero = mean.new_empty(kv_heads, 0, BLOCK, dim), blocks, blocks  # of the sketch

    @property
    def bits(self) -> int:
        """Of the sketch; 0 without one."""
        return SKETCH_BITS.get(self.storage.sketch, 0)

    @property
    def rounds_query(self) -> bool:
        """Does the scan of the rows?"""
        return self.storage.key_type == "int8" and ROUNDS_QUERY

    def rounding_of(self, kv_head: int, query: Tensor) -> float:
        """The most that the scan's rounding of query [group, d] can move an unscaled logit of the rows."""
        if not self.rounds_query or not self.rows.shape[1]:
            return 0.0
        sizes = (self.rows[kv_head] - self.mean[kv_head]).abs().sum(-1)
        return float(query_step(query).max() / 2 * sizes.max())

    def add(self, keys: Tensor) -> None:
        """Whole blocks [kv_heads, 64 * m, d] enter the host."""
        assert keys.shape[1] % BLOCK == 0
        self.original = torch.cat((self.original, keys), dim=1)
        if self.storage.key_type == "int8":
            codes, scales = exact_int8(keys, self.mean)
            stored = codes.round() * scales[..., None] + self.mean[:, None]
        else:
            stored = keys if self.storage.key_type == "fp32" else keys.to(DTYPES[self.storage.key_type]).double()
        self.rows = torch.cat((self.rows, stored), dim=1)
        if self.bits:
            blocks = keys.unflatten(1, (-1, BLOCK))
            low, high = sketch_span(blocks, self.bits)
            zero = low.half().double()
            scale = ((high - zero) / (2**self.bits - 1)).clamp(min=0).half().double()
            self._add_sketch(sketch_codes(blocks, self.bits, scale, zero).round(), scale, zero)

    def sketched(self) -> Tensor:
        """The keys that the sketch stands for, [kv_heads, n, d]."""
        return (self.codes * self.scale[:, :, None] + self.zero[:, :, None]).flatten(1, 2)

    def logits(self, kv_head: int, query: Tensor, rounding: Tensor | None = None) -> Tensor:
        """Of query [group, d] and every row, unscaled, [group, n]; rounding: the query that decides on ties."""
        if not self.bits:
            if not self.rounds_query:
                return query @ self.rows[kv_head].T
            mean = self.mean[kv_head]
            return rounded_query(query if rounding is None else rounding) @ (self.rows[kv_head] - mean).T + (
                query @ mean
            ).unsqueeze(-1)
        if self.storage.sketch_home == "gpu":
            return query @ self.sketched()[kv_head].T
        sketch = self.codes[kv_head], self.scale[kv_head], self.zero[kv_head]
        return sketch_logits(query, query if rounding is None else rounding, *sketch, self.bits)

    def follow(self, theirs: Encoded) -> list[str]:
        """Judge another implementation's rows, those from `followed` on, and take them over if they are right."""
        last = self.followed + theirs.rows.shape[1]
        assert last <= self.rows.shape[1]
        new = slice(self.followed, last)
        problems = self._judge_rows(theirs, new)
        if self.bits and not problems:
            problems = self._judge_sketch(theirs, slice(self.followed // BLOCK, last // BLOCK))
        self.followed = last
        return problems

    def _judge_rows(self, theirs: Encoded, new: slice) -> list[str]:
        keys, worst = self.original[:, new], {}
        if self.storage.key_type == "int8":
            assert theirs.scales is not None and theirs.mean is not None and theirs.rows.dtype is torch.int8
            worst["mean"] = beyond(theirs.mean, self.mean, 0.0)
            mean, scales = theirs.mean.double(), theirs.scales.double()
            worst["scale"] = beyond(127 * scales, 127 * exact_int8(keys, mean)[1], 0.0)
            stored = theirs.rows.double() * scales[..., None] + mean[:, None]
            allowed = scales[..., None] / 2
        else:
            assert theirs.rows.dtype is DTYPES[self.storage.key_type]
            stored = theirs.rows.double()
            allowed = half_spacing(keys, FRACTION_BITS[self.storage.key_type])
        worst["key"] = beyond(stored, keys, allowed)
        # Keys of fp32 are no others: their rounding is everywhere, and none of it is followed.
        if self.storage.key_type != "fp32":
            self.rows = torch.cat((self.rows[:, : new.start], stored, self.rows[:, new.stop :]), dim=1)
            self.mean = self.mean if theirs.mean is None else theirs.mean.double()
        return [f"rows {new}: {name} off by {float(off):.3} roundings" for name, off in worst.items() if not off <= 1]

    def _judge_sketch(self, theirs: Encoded, new: slice) -> list[str]:
        assert theirs.sketch is not None
        blocks = self.original.unflatten(1, (-1, BLOCK))[:, new]
        codes, scale, zero = unpack_sketch(theirs.sketch, self.bits, blocks.shape[3])
        low, high = sketch_span(blocks, self.bits)
        levels = 2**self.bits - 1
        expected = (high - zero) / levels
        step = torch.where(scale > 0, scale, 1.0)[:, :, None]
        difference = (codes - sketch_codes(blocks, self.bits, scale, zero)).abs()
        worst = {
            "zero": beyond(zero, low, half_spacing(low, 10)),
            "scale": beyond(levels * scale, levels * expected, levels * half_spacing(expected, 10)),
            "code": ((difference - 0.5) * step / (ROUNDING * (1 + blocks.abs()))).amax(),
        }
        after = self.codes[:, new.stop :], self.scale[:, new.stop :], self.zero[:, new.stop :]
        self.codes, self.scale, self.zero = (part[:, : new.start] for part in (self.codes, self.scale, self.zero))
        self._add_sketch(codes, scale, zero)
        self._add_sketch(*after)
        return [f"blocks {new}: {name} off by {float(off):.3} roundings" for name, off in worst.items() if not off <= 1]

    def _add_sketch(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.codes = torch.cat((self.codes, codes), dim=1)
        self.scale = torch.cat((self.scale, scale), dim=1)
        self.zero = torch.cat((self.zero, zero), dim=1)


def problem_of_query(theirs: Tensor, mine: Tensor) -> str | None:
    """Why the query [heads, d] that another implementation scans with is not this one."""
    off = float(beyond(theirs, mine, 0.0))
    return None if off <= 1 else f"scans with another query, off by {off:.3} roundings"


def named_otherwise(
    lately: Sequence[float], named: Sequence[int], other: Sequence[int], recent: Sequence[int], margin: float
) -> str | None:
    """Why `other` is no list of candidates that rounding may have made of `named`; `lately` by position."""
    missing, extra = sorted({*named} - {*other}), sorted({*other} - {*named})
    if len(named) != len(other) or len({*other}) != len(other) or {*missing} & {*recent}:
        return f"names {extra} instead of {missing}, {len(other)} for {len(named)}"
    most, least = (max((lately[i] for i in missing), default=0.0), min((lately[i] for i in extra), default=0.0))
    return None if most - least <= margin * most else f"names {extra} instead of {missing}: lately {least}, {most}"
