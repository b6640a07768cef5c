# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Scores by a sketch that lies on the GPU: a Triton kernel. `quantize.py` says how a block is laid out.

A word of 32 bits holds codes of four channels, several tokens each. A code is shifted to the top of a float's mantissa,
under the exponent of 1: x = 1 + code / 2^bits, without a conversion, of which a GPU does a quarter as many as of
products. What the ones add up to is taken off at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridgen.kv_cache.quantize import SKETCH_BLOCK, sketch_bytes
from hybridgen.selection.budget import per_sequence
from hybridgen.selection.launch_kernel import cdiv, launch, next_power_of_2

BLOCKS_A_TURN = 1
TURNS = 4
WARPS = 1


@triton.jit
def _channel(query, halves, first, inside, DIM: tl.constexpr):
    """Of channels 4 * quad + first: query times scale, and query times zero."""
    q = tl.load(query, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(halves + first, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(halves + DIM + first, mask=inside, other=0.0).to(tl.float32)
    return q * scale, q * zero


@triton.jit
def _code(words, CHANNEL: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr):
    """1 + code / 2^bits of one channel and token of each word."""
    TOP: tl.constexpr = 23 - BITS
    AT: tl.constexpr = 8 * CHANNEL + BITS * PLACE
    if AT >= TOP:
        moved = words >> (AT - TOP)
    else:
        moved = words << (TOP - AT)
    return ((moved & (((1 << BITS) - 1) << TOP)) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["blocks", "kv_heads", "out_rows"])
def _score_sketch(
    query, sketch, limits, out, scale, blocks, kv_heads, out_rows,
    GROUP: tl.constexpr, DIM: tl.constexpr, QUADS: tl.constexpr, BITS: tl.constexpr, TURN: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    kv_head = head // GROUP
    scored = tl.load(limits + kv_head // kv_heads).to(tl.int32)
    PLACES: tl.constexpr = 8 // BITS  # tokens of a byte
    WORDS: tl.constexpr = 64 // PLACES  # of a quad of channels
    CODE_BYTES: tl.constexpr = 8 * BITS * DIM
    quad = tl.arange(0, QUADS)
    word = tl.arange(0, WORDS)
    q = query + head * DIM + 4 * quad[None, :]
    for turn in range(TURNS):
        block = (tl.program_id(1) * TURNS + turn) * TURN + tl.arange(0, TURN)
        there = block * 64 < scored
        inside = there[:, None] & (quad < DIM // 4)[None, :]
        begin = sketch + (kv_head.to(tl.int64) * blocks + block) * (CODE_BYTES + 4 * DIM)
        codes = begin.to(tl.pointer_type(tl.uint32))[:, None, None] + quad[None, :, None] * WORDS + word[None, None, :]
        words = tl.load(codes, mask=inside[:, :, None], other=0)
        halves = (begin + CODE_BYTES).to(tl.pointer_type(tl.float16))[:, None] + 4 * quad[None, :]
        w0, z0 = _channel(q, halves, 0, inside, DIM)
        w1, z1 = _channel(q + 1, halves, 1, inside, DIM)
        w2, z2 = _channel(q + 2, halves, 2, inside, DIM)
        w3, z3 = _channel(q + 3, halves, 3, inside, DIM)
        base = tl.sum(z0 + z1 + z2 + z3 - (1 << BITS) * (w0 + w1 + w2 + w3), 1)
        for place in tl.static_range(PLACES):
            parts = w0[:, :, None] * _code(words, 0, place, BITS) + w1[:, :, None] * _code(words, 1, place, BITS)
            parts += w2[:, :, None] * _code(words, 2, place, BITS) + w3[:, :, None] * _code(words, 3, place, BITS)
            logits = scale * ((1 << BITS) * tl.sum(parts, 1) + base[:, None])
            token = block[:, None] * 64 + (word // 16 * (16 * PLACES) + 16 * place + word % 16)[None, :]
            tl.store(out + head.to(tl.int64) * out_rows + token, logits, mask=there[:, None] & (token < scored))


def score_sketch(query: Tensor, sketch: Tensor, bits: int, lengths: list[int], scale: float) -> Tensor:
    """Logits of the first lengths[b] tokens of each sequence; the rest is not written.

    query: [B, Hq, d]; sketch: uint8 [B, Hkv, M, sketch_bytes(bits, d)], contiguous. Returns float32 [B, Hq, n],
    n the longest length, whole blocks.
    """
    batch, heads, dim = query.shape
    kv_heads, blocks, size = sketch.shape[1:]
    assert size == sketch_bytes(bits, dim) and sketch.is_contiguous()
    tokens = cdiv(max(lengths), SKETCH_BLOCK) * SKETCH_BLOCK
    out = torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device)
    launch(
        _score_sketch, (batch * heads, cdiv(tokens // SKETCH_BLOCK, BLOCKS_A_TURN * TURNS)),
        (query.contiguous(), sketch, per_sequence(lengths, query.device), out),
        (scale, blocks, kv_heads, tokens),
        (heads // kv_heads, dim, next_power_of_2(dim // 4), bits, BLOCKS_A_TURN, TURNS),
        WARPS,
    )  # fmt: skip
    return out
