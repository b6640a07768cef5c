"""One scan with its inputs in awkward places, and what it has to give."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import torch

from hybridgen import _C
from hybridgen.kv_cache.quantize import SKETCH_BLOCK, read_sketch, sketch_bytes

KEY_TYPES = ("float32", "float16", "bfloat16")
SKETCH_BITS = {"int4": 4, "int2": 2}
QUANTIZED = ("int8", *SKETCH_BITS)
ISAS = tuple(_C.isa_variants())
MOST_QUERY = 127 * 256 + 127  # query heads are integers up to it, where they are rounded for int8 keys
MOST_ROUNDED_DIM = 512  # of heads that are
ROUNDING_ISAS = ("avx512_vnni", "amx", "amx_emulated")  # where they are


def fresh_rng() -> np.random.Generator:
    """New inputs in every run; a failure shows the seed among the captured output."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def store(values: np.ndarray, key_type: str) -> np.ndarray:
    """fp32 values as stored keys: bf16 is a uint16 array, numpy has no such type."""
    if key_type == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16)
    return values.astype(key_type)


def exact(stored: np.ndarray, key_type: str) -> np.ndarray:
    """What stored keys mean, in float64."""
    if key_type == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return stored.astype(np.float64)


def nan_of(key_type: str) -> object:
    return np.uint16(0x7FC0) if key_type == "bfloat16" else np.nan


@dataclass
class ScanCase:
    """Keys, query and output with NaN in every element that the scan must neither use nor write.

    layout: 'heads' [batch, head, token, d], or 'tokens' [batch, token, head, d].
    gap: unused elements after each key row. offset: elements between the buffers' start and the data, so that
    nothing is aligned to more than its element. tier: 0, or how many rows each KV head has, of which it scans a list
    of its own of lengths[b]: in any order, some repeatedly.
    """

    key_type: str
    lengths: list[int]
    num_kv_heads: int
    group: int
    head_dim: int
    layout: str = "heads"
    gap: int = 0
    offset: int = 1
    scale: float = 0.125
    tier: int = 0

    def __post_init__(self) -> None:
        self.rng = fresh_rng()
        batch, heads, d = len(self.lengths), self.num_kv_heads, self.head_dim
        tokens = (self.tier or max(self.lengths)) + 3
        row = d + self.gap
        if self.layout == "heads":
            self.key_strides = (heads * tokens * row, tokens * row, row)
        else:
            self.key_strides = (tokens * heads * row, row, heads * row)
        dtype = np.uint16 if self.key_type == "bfloat16" else np.dtype(self.key_type)
        self.key_buffer = np.full(self.offset + batch * heads * tokens * row, nan_of(self.key_type), dtype)
        self.keys = np.lib.stride_tricks.as_strided(
            self.key_buffer[self.offset :],
            (batch, heads, tokens, d),
            [s * self.key_buffer.itemsize for s in (*self.key_strides, 1)],
        )
        # Beyond the lengths rows that do not exist.
        list_buffer = np.full(1 + batch * heads * (max(self.lengths) + 2), np.iinfo(np.int32).max, np.int32)
        self.rows = list_buffer[1:].reshape(batch, heads, -1)
        for b, h in np.ndindex(batch, heads):
            length = self.lengths[b]
            rows = self.rng.integers(0, self.tier, length) if self.tier else np.arange(length)
            self.rows[b, h, :length] = rows
            self.keys[b, h, rows] = store(self.rng.standard_normal((tokens, d), dtype=np.float32), self.key_type)[rows]

        num_heads = heads * self.group
        query_buffer = np.empty(self.offset + batch * num_heads * d, np.float32)
        self.query = query_buffer[self.offset :].reshape(batch, num_heads, d)
        self.query[:] = self.rng.standard_normal(self.query.shape)
        width = max(self.lengths) + 8
        self.out_strides = (num_heads * width, width)
        out_buffer = np.full(self.offset + batch * num_heads * width, np.nan, np.float32)
        self.out = out_buffer[self.offset :].reshape(batch, num_heads, width)

    def scanned(self, b: int) -> np.ndarray:
        """The stored keys that sequence b's logits belong to: [num_kv_heads, lengths[b], d]."""
        return np.stack([self.keys[b, h, self.rows[b, h, : self.lengths[b]]] for h in range(self.num_kv_heads)])

    def submit(self, worker: _C.ScanWorker, hold: bool = False) -> int:
        return worker.submit(
            query=self.query.ctypes.data,
            keys=self.keys.ctypes.data,
            out=self.out.ctypes.data,
            key_type=self.key_type,
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            lengths=self.lengths,
            key_strides=self.key_strides,
            out_strides=self.out_strides,
            scale=self.scale,
            hold=hold,
            **({"rows": self.rows.ctypes.data, "rows_stride": self.rows.shape[2]} if self.tier else {}),
        )

    def check(self) -> None:
        """Against float64; nothing is written beyond the lengths.

        Stored keys are exact in fp32, so all error is that of fp32 sums. Eight or more partial sums take at
        most d / 8 products each (two roundings, one with FMA); adding and scaling them, at most 8 more.
        """
        rounding = (2 * self.head_dim / 8 + 8) * 2.0**-24
        for b, length in enumerate(self.lengths):
            assert np.isnan(self.out[b, :, length:]).all(), f"written beyond lengths[{b}]={length}"
            K = exact(self.scanned(b), self.key_type)
            q = self.query[b].astype(np.float64).reshape(self.num_kv_heads, self.group, self.head_dim)
            want = self.scale * (q @ K.transpose(0, 2, 1))
            size = abs(self.scale) * (abs(q) @ abs(K).transpose(0, 2, 1))
            allowed = rounding * size
            got = self.out[b, :, :length].reshape(want.shape)
            assert (abs(got - want) <= allowed).all(), f"sequence {b}: {abs(got - want).max()}"

    def forget(self) -> None:
        self.out[:] = np.nan


def rounded_query(query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What some ISAs take for query heads [..., d] before int8 keys meet them, and its steps [..., 1]; float64.

    By its definition in cpp_ext/kernels/int8_query512.h; fp32 as far as integers depend on it.
    """
    most = abs(query).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most > 1e-30, np.float32(MOST_QUERY) / most, np.float32(0))
    step = (most / np.float32(MOST_QUERY)).astype(np.float64)
    return np.rint(query * inverse) * step, step


@dataclass
class QuantizedCase:
    """The same for int8 keys and sketches, with any bytes as codes.

    Scales of int8 rows that no logit is of, and blocks of a sketch without such a row, are NaN. tier: as in ScanCase;
    a sketch's lists are sorted unless `shuffled`. mean: whether one was taken off.
    """

    key_type: str
    lengths: list[int]
    num_kv_heads: int
    group: int
    head_dim: int
    layout: str = "heads"
    gap: int = 0
    offset: int = 1
    scale: float = 0.125
    tier: int = 0
    mean: bool = True
    shuffled: bool = False

    def __post_init__(self) -> None:
        self.rng = fresh_rng()
        batch, heads, d = len(self.lengths), self.num_kv_heads, self.head_dim
        self.bits = SKETCH_BITS.get(self.key_type)
        tokens = (self.tier or max(self.lengths)) + 3
        self.units = -(-tokens // SKETCH_BLOCK) + 1 if self.bits else tokens
        size = sketch_bytes(self.bits, d) if self.bits else d
        row = size + self.gap
        if self.layout == "heads":
            self.key_strides = (heads * self.units * row, self.units * row, row)
        else:
            self.key_strides = (self.units * heads * row, row, heads * row)
        # All bits set is a NaN in fp16 and fp32.
        self.key_buffer = np.full(self.offset + batch * heads * self.units * row, 0xFF, np.uint8)
        shape = (batch, heads, self.units, size)
        self.keys = np.lib.stride_tricks.as_strided(
            self.key_buffer[self.offset :], shape, (*self.key_strides, 1), writeable=True
        )
        scale_buffer = np.full(self.offset + batch * heads * (tokens + 5), np.nan, np.float32)
        self.key_scales = scale_buffer[self.offset :].reshape(batch, heads, tokens + 5)
        mean_buffer = np.empty(self.offset + batch * heads * d, np.float32)
        self.key_mean = mean_buffer[self.offset :].reshape(batch, heads, d)
        self.key_mean[:] = 3 * self.rng.standard_normal(self.key_mean.shape) if self.mean else 0

        list_buffer = np.full(1 + batch * heads * (max(self.lengths) + 2), np.iinfo(np.int32).max, np.int32)
        self.rows = list_buffer[1:].reshape(batch, heads, -1)
        for b, h in np.ndindex(batch, heads):
            length = self.lengths[b]
            rows = self.rng.integers(0, self.tier, length) if self.tier else np.arange(length)
            if self.bits and not self.shuffled:
                rows.sort()
            self.rows[b, h, :length] = rows
            self.fill(b, h, rows)

        num_heads = heads * self.group
        query_buffer = np.empty(self.offset + batch * num_heads * d, np.float32)
        self.query = query_buffer[self.offset :].reshape(batch, num_heads, d)
        self.query[:] = self.rng.standard_normal(self.query.shape)
        width = max(self.lengths) + 8
        self.out_strides = (num_heads * width, width)
        out_buffer = np.full(self.offset + batch * num_heads * width, np.nan, np.float32)
        self.out = out_buffer[self.offset :].reshape(batch, num_heads, width)

    def fill(self, b: int, h: int, rows: np.ndarray) -> None:
        """Random codes and scales for these rows, or for the blocks that hold them."""
        d = self.head_dim
        units = np.unique(rows // SKETCH_BLOCK) if self.bits else np.unique(rows)
        codes = self.rng.integers(0, 256, (len(units), self.keys.shape[3]), np.uint8)
        if self.bits:
            numbers = np.concatenate(
                [self.rng.uniform(0.1, 1.0, (len(units), d)), self.rng.normal(-0.8, 0.5, (len(units), d))], axis=1
            )
            codes[:, -4 * d :] = numbers.astype(np.float16).view(np.uint8)
        else:
            self.key_scales[b, h, units] = self.rng.uniform(0.001, 0.02, len(units))
        self.keys[b, h, units] = codes

    def scanned(self, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
        """The stored keys that KV head h's logits belong to, without the mean, and their rows; float64 [n, d]."""
        rows = self.rows[b, h, : self.lengths[b]]
        if self.bits is None:
            codes = self.keys[b, h, rows].view(np.int8).astype(np.float64)
            return codes * self.key_scales[b, h, rows].astype(np.float64)[:, None], rows
        sketch = torch.from_numpy(np.ascontiguousarray(self.keys[b, h]))[None, None]
        return read_sketch(sketch, self.bits, self.head_dim)[0, 0].double().numpy()[rows], rows

    def submit(self, worker: _C.ScanWorker, hold: bool = False) -> int:
        return worker.submit(
            query=self.query.ctypes.data,
            keys=self.keys.ctypes.data,
            out=self.out.ctypes.data,
            key_type=self.key_type,
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            lengths=self.lengths,
            key_strides=self.key_strides,
            out_strides=self.out_strides,
            scale=self.scale,
            hold=hold,
            key_mean=self.key_mean.ctypes.data if self.mean else 0,
            **({"rows": self.rows.ctypes.data, "rows_stride": self.rows.shape[2]} if self.tier else {}),
            **({} if self.bits else self.scale_arguments()),
        )

    def scale_arguments(self) -> dict[str, object]:
        strides = tuple(stride // 4 for stride in self.key_scales.strides[:2])
        return {"key_scales": self.key_scales.ctypes.data, "scale_strides": strides}

    def logits(self, b: int, h: int) -> np.ndarray:
        """A sketch's logits of KV head h by the definition in cpp_ext/kernels/scalar.cpp; float64 [group, lengths[b]].

        fp32 as far as integers depend on it.
        """
        d = self.head_dim
        keys, rows = self.scanned(b, h)
        numbers = np.ascontiguousarray(self.keys[b, h][:, -4 * d :]).view(np.float16).astype(np.float32)
        scale, zero = numbers[:, :d].astype(np.float64), numbers[:, d:].astype(np.float64)
        at = rows // SKETCH_BLOCK
        codes = np.divide(keys - zero[at], scale[at], out=np.zeros_like(keys), where=scale[at] != 0).round()
        want = np.empty((self.group, len(rows)))
        for g, q in enumerate(self.query[b, h * self.group : (h + 1) * self.group]):
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # blocks that no row is of
                weights = q * numbers[:, :d]
                most = abs(weights).max(axis=1, keepdims=True)
                inverse = np.where(most > 1e-30, np.float32(127) / most, np.float32(0))
                stand_in = np.rint(weights * inverse) * (most / np.float32(127)).astype(np.float64)
                of_block = (2**self.bits - 1) / 2 * (weights - stand_in).sum(axis=1) + zero @ q.astype(np.float64)
            want[g] = (codes * stand_in[at]).sum(axis=1) + of_block[at]
            want[g] += q.astype(np.float64) @ self.key_mean[b, h].astype(np.float64)
        return self.scale * want

    def check(self, isa: str) -> None:
        """Against float64; nothing is written beyond the lengths. int8: within rounding of fp32 sums, as ScanCase.

        Where `isa` rounds the query of int8 keys, within that of the rounded one, and within half a step a channel
        more of the query itself. Sketches: within rounding of their definition.
        """
        rounding = (2 * self.head_dim / 8 + 16) * 2.0**-24
        rounds = isa in ROUNDING_ISAS and self.bits is None and self.head_dim <= MOST_ROUNDED_DIM
        for b, length in enumerate(self.lengths):
            assert np.isnan(self.out[b, :, length:]).all(), f"written beyond lengths[{b}]={length}"
            for h in range(self.num_kv_heads):
                heads = slice(h * self.group, (h + 1) * self.group)
                q, mean = self.query[b, heads].astype(np.float64), self.key_mean[b, h].astype(np.float64)
                K, _ = self.scanned(b, h)
                size = abs(q) @ abs(K).T + (abs(q) @ abs(mean))[:, None]
                wants = [(self.scale * (q @ K.T + (q @ mean)[:, None]), size * rounding)]
                if self.bits:
                    size += 20 * abs(q).sum(axis=1)[:, None]  # of its parts: scales and zeros of 1, codes of 15
                    wants = [(self.logits(b, h), size * rounding)]
                elif rounds:
                    rounded, step = rounded_query(self.query[b, heads])
                    wants = [
                        (wants[0][0], size * rounding + step / 2 * abs(K).sum(axis=1)),
                        (self.scale * (rounded @ K.T + (q @ mean)[:, None]), size * rounding),
                    ]
                for want, allowed in wants:
                    error = abs(self.out[b, heads, :length] - want)
                    assert (error <= abs(self.scale) * allowed).all(), f"sequence {b}, KV head {h}: {error.max()}"

    def read_bytes(self) -> int:
        """What the scan reads of the keys."""
        if self.bits is None:
            return sum(self.lengths) * self.num_kv_heads * (self.head_dim + 4)
        blocks = 0
        for b, h in np.ndindex(len(self.lengths), self.num_kv_heads):
            blocks += len(np.unique(self.rows[b, h, : self.lengths[b]] // SKETCH_BLOCK))
        return blocks * sketch_bytes(self.bits, self.head_dim)

    def forget(self) -> None:
        self.out[:] = np.nan
