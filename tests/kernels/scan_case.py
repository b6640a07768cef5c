"""One scan with its inputs in awkward places, and what it has to give."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from hybridgen import _C

KEY_TYPES = ("float32", "float16", "bfloat16")
ISAS = tuple(_C.isa_variants())


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
            got = self.out[b, :, :length].reshape(want.shape)
            assert (abs(got - want) <= rounding * size).all(), f"sequence {b}: {abs(got - want).max()}"

    def forget(self) -> None:
        self.out[:] = np.nan
