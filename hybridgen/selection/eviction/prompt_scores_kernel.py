# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What a prompt's queries give each key, on a GPU: column sums of a softmax whose logits are never in memory.

Two Triton kernels, each of which makes the logits of a tile as it needs them. The first, one program a query head and
block of queries, sums up rows: a log-sum-exp each, online over the keys (as in FlashAttention, arXiv 2205.14135). The
second, one program a KV head and block of keys, adds up exp(logit - log-sum-exp) over the queries that see them: what
is one program's is no other's, so that sums repeat to the bit. Powers and logarithms are to base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.eviction.base import Prompt
from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2

LEAST_SIDE = 16  # of a matrix product
ROWS_A_TURN = 64  # a program's own block has twice as many
BYTES_A_TURN = 16384  # several turns' and twice that of its own are in shared memory; some GPUs have 100 KB of it
WARPS = 8


@triton.jit
def _mixed(x):
    # `keyformer._mixed`, of uint32.
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _exponential(bits):
    # e to the power of -`keyformer.gumbel_of`. Behind the exponent of 1 the 23 bits are a number in [1, 2); what is
    # taken from it leaves (bits + 1/2) / 2^23, exactly.
    one_to_two = ((_mixed(bits) & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return -tl.log(one_to_two - 0.999999940395355224609375)


@triton.jit(do_not_specialize=["new", "rows", "heads"])
def _sum_rows(
    queries, keys, query_bits, key_bits, log_sums,
    slope, noise_slope, new, rows, heads,
    NOISY: tl.constexpr, TAU_IS_1: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The last blocks see most keys: they begin first.
    first, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES, tl.program_id(1)
    kv_head, past = head // GROUP, rows - new
    own, channel = tl.arange(0, QUERIES), tl.arange(0, DIM_PADDED)
    inside, asks = (channel < DIM)[None, :], first + own < new
    here = queries + (first.to(tl.int64) * heads + head) * DIM
    q = tl.load(here + (own[:, None] * heads) * DIM + channel[None, :], mask=asks[:, None] & inside, other=0.0)
    if NOISY:
        own_bits = tl.load(query_bits + head * new + first + own, mask=asks, other=0).to(tl.uint32, bitcast=True)
    their_keys = keys + kv_head.to(tl.int64) * rows * DIM
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in range(0, tl.minimum(past + first + QUERIES, rows), KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < rows
        k = tl.load(their_keys + key[:, None] * DIM + channel[None, :], mask=there[:, None] & inside, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * slope
        if NOISY:
            bits = tl.load(key_bits + kv_head * rows + key, mask=there, other=0).to(tl.uint32, bitcast=True)
            noise = _exponential(own_bits[:, None] + bits[None, :])
            if not TAU_IS_1:
                x -= tl.log2(noise) * noise_slope
        x = tl.where(key[None, :] <= (past + first + own)[:, None], x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 1))  # a number: all see the first key
        powers = tl.exp2(x - new_top[:, None])
        if NOISY and TAU_IS_1:  # exp(x + g) without a logarithm
            powers /= noise
        total = total * tl.exp2(top - new_top) + tl.sum(powers, 1)
        top = new_top
    tl.store(log_sums + head * new + first + own, top + tl.log2(total), mask=asks)


@triton.jit(do_not_specialize=["new", "rows", "heads"])
def _sum_columns(
    queries, keys, query_bits, key_bits, log_sums, sums,
    slope, noise_slope, new, rows, heads,
    NOISY: tl.constexpr, TAU_IS_1: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, past = tl.program_id(1), rows - new
    key, channel = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM_PADDED)
    inside, there = (channel < DIM)[None, :], key < rows
    their_keys = keys + kv_head.to(tl.int64) * rows * DIM
    k = tl.load(their_keys + key[:, None] * DIM + channel[None, :], mask=there[:, None] & inside, other=0.0)
    if NOISY:
        own_bits = tl.load(key_bits + kv_head * rows + key, mask=there, other=0).to(tl.uint32, bitcast=True)
    total = tl.zeros([KEYS], tl.float32)
    turn = tl.arange(0, QUERIES)
    first = tl.maximum(tl.program_id(0) * KEYS - past, 0) // QUERIES * QUERIES  # before, no query sees these keys
    for member in range(GROUP):
        head = kv_head * GROUP + member
        here = queries + (first.to(tl.int64) * heads + head) * DIM
        for start in range(first, new, QUERIES):
            query = start + turn
            asks = query < new
            q = tl.load(here + (turn[:, None] * heads) * DIM + channel[None, :], mask=asks[:, None] & inside, other=0.0)
            # A row a key: what is summed up lies in few threads.
            x = tl.dot(k, tl.trans(q), input_precision="ieee") * slope
            if NOISY:
                bits = tl.load(query_bits + head * new + query, mask=asks, other=0).to(tl.uint32, bitcast=True)
                noise = _exponential(own_bits[:, None] + bits[None, :])
                if not TAU_IS_1:
                    x -= tl.log2(noise) * noise_slope
            log_sum = tl.load(log_sums + head * new + query, mask=asks, other=0.0)
            seen = asks[None, :] & (key[:, None] <= past + query[None, :])
            powers = tl.exp2(x - log_sum[None, :])
            if NOISY and TAU_IS_1:
                powers /= noise
            total += tl.sum(tl.where(seen, powers, 0.0), 1)
            here += QUERIES * heads * DIM
    tl.store(sums + kv_head * rows + key, total, mask=there)


def column_sums(prompt: Prompt, noise: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
    """Of softmax(x) of the masked logits x, or of softmax((x + g) / tau), over queries and a group: float32 [Hkv, n].

    noise: int32 [Hq, m] and [Hkv, n], whose sums (they wrap around) are the `bits` of g = `gumbel_of(bits)`; and tau.
    """
    kv_heads, rows, dim = prompt.keys.shape
    new, heads = prompt.queries.shape[:2]
    queries, keys = prompt.queries.contiguous(), prompt.keys.contiguous()
    query_bits, key_bits, tau = (prompt.positions, prompt.positions, 1.0) if noise is None else noise
    log_sums = torch.empty((heads, new), dtype=torch.float32, device=keys.device)
    sums = torch.empty((kv_heads, rows), dtype=torch.float32, device=keys.device)
    padded = max(LEAST_SIDE, next_power_of_2(dim))
    turn = max(LEAST_SIDE, min(ROWS_A_TURN, BYTES_A_TURN // (padded * keys.element_size())))
    tensors = (queries, keys, query_bits.contiguous(), key_bits.contiguous(), log_sums)
    numbers = (prompt.scale / tau / math.log(2), 1 / tau, new, rows, heads)
    constants = (noise is not None, tau == 1.0, heads // kv_heads, dim, padded)
    own = 2 * turn
    launch(_sum_rows, (cdiv(new, own), heads), tensors, numbers, (*constants, own, turn), WARPS)
    launch(_sum_columns, (cdiv(rows, own), kv_heads), (*tensors, sums), numbers, (*constants, turn, own), WARPS)
    return sums
