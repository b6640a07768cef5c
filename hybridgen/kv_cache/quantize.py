"""Keys in fewer bits: int8 in place of the keys, and sketches of 2 or 4 bits beside them.

int8: one scale a token and KV head, symmetric about a per-channel mean: key = scale * code + mean. The mean goes first
because some models' key biases (Qwen2.5) are far larger than what tells their tokens apart. Where the CPU has VNNI, the
scan takes a query head for integers of 16 bits with step = max |query| / 32639, so a logit is off by at most
step / 2 * scale * sum |code|, besides float32's rounding. (For normal keys and queries that is a 200th of what the
rounding of the keys may cost.)

Sketch: blocks of 64 tokens; in each block every channel has its own scale and zero: key = scale * code + zero. A block
is one run of bytes: the codes, fp16 scale[d], fp16 zero[d]. Its codes are laid out for integer dot products of four
bytes: channels go in quads, and a vector of 64 bytes has byte 4 * lane + k for channel 4 * quad + k.

    int2: one vector a quad; bits 2t and 2t + 1 belong to token 16 * t + lane, t < 4
    int4: two vectors a quad; of vector v the low nibble belongs to token 32 * v + lane, the high one to
          token 32 * v + 16 + lane

`cpp_ext/kernels/scan.h` says the same in C++. Everything here is plain torch, for CPU and CUDA tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import AGEING_BLOCK

ENCODED_AT_ONCE = 1 << 24  # elements, or one head's where it has more
SKETCH_BLOCK = AGEING_BLOCK  # a sketch's block ages as a whole
SKETCH_BITS = (2, 4)
_LANES = 16
_LARGEST = 2.0**126  # twice this and a mean are still finite floats
_LARGEST_FP16 = 65504.0
_LARGEST_SKETCHED = 2.0**21  # more than scale * 15 + zero is with the largest numbers of fp16


def head_groups(keys: Tensor) -> list[slice]:
    """The heads of keys [Hkv, n, d] that are encoded at a time: float32 copies of all would take gigabytes."""
    at_a_time = max(1, ENCODED_AT_ONCE // max(1, keys[0].numel()))
    return [slice(head, head + at_a_time) for head in range(0, keys.shape[0], at_a_time)]


def key_mean(keys: Tensor, skip: int = 0) -> Tensor:
    """The mean over tokens from row `skip` (the sinks' end) on; zero without any.

    keys: [B, Hkv, n, d], any floating type. Returns float32 [B, Hkv, d], at most 2^126 in size.
    """
    rows = keys[:, :, skip:]
    if rows.shape[2] == 0:
        return torch.zeros(*keys.shape[:2], keys.shape[3], dtype=torch.float32, device=keys.device)
    return rows.mean(dim=2, dtype=torch.float64).clamp(-_LARGEST, _LARGEST).float()  # a sum that overflows nowhere


def quantize_int8(keys: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys, each within half a scale of what it was.

    keys: [B, Hkv, n, d], any floating type, no NaN; mean: float32 [B, Hkv, d], or None for zero.
    Returns int8 [B, Hkv, n, d] and float32 [B, Hkv, n]. Scales are positive, also for rows of zeros; what lies more
    than 2^126 from the mean is stored as 2^126, so no row gives an infinity or NaN.
    """
    centred = keys.float() if mean is None else keys.float() - mean.unsqueeze(2)
    centred = centred.clamp(-_LARGEST, _LARGEST)
    scales = (centred.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (centred / scales.unsqueeze(-1)).round_().to(torch.int8)
    return codes, scales


def dequantize_int8(codes: Tensor, scales: Tensor, mean: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The keys that int8 rows stand for: scale * code + mean, in float32, then rounded to `dtype`.

    codes: int8 [B, Hkv, n, d]; scales: float32 [B, Hkv, n]; mean: float32 [B, Hkv, d] or None. Returns [B, Hkv, n, d].
    """
    keys = codes.float() * scales.unsqueeze(-1)
    if mean is not None:
        keys += mean.unsqueeze(2)
    return keys.to(dtype)


def sketch_bytes(bits: int, head_dim: int) -> int:
    """Bytes of the sketch of one block of 64 tokens of one KV head: 2.5 or 4.5 bits an element.

    ValueError: bits other than 2 and 4; a head_dim that is no multiple of 8.
    """
    if bits not in SKETCH_BITS:
        raise ValueError(f"bits={bits}: must be one of {SKETCH_BITS}")
    if head_dim <= 0 or head_dim % 8:
        raise ValueError(f"head_dim={head_dim}: must be a positive multiple of 8")
    return SKETCH_BLOCK * head_dim * bits // 8 + 2 * head_dim * 2


def make_sketch(keys: Tensor, bits: int, mean: Tensor | None = None) -> Tensor:
    """The sketch of whole blocks of keys, less their mean if one is given.

    keys: [B, Hkv, 64 * m, d], any floating type, no NaN; mean: float32 [B, Hkv, d] or None.
    Returns uint8 [B, Hkv, m, sketch_bytes(bits, d)].
    Codes run from the low to the high end of a range (`_sketch_range`). The zero is its low end and the scale the way
    from there to the high end / (2^bits - 1), both rounded to fp16 before the codes are found, so a key in the range is
    off by at most half a scale and fp16's rounding. A key beyond it, as int2 has some, takes the nearest code, and may
    be off by more. Where fp16 overflows, zero and scale are its largest numbers; a channel without range, or with less
    than fp16 can tell from none, has scale 0 and codes 0.
    ValueError: a number of tokens that is no multiple of 64; bits and head_dim as sketch_bytes.
    """
    batch, heads, tokens, dim = keys.shape
    size = sketch_bytes(bits, dim)
    if tokens % SKETCH_BLOCK:
        raise ValueError(f"keys: {tokens} tokens: must be a multiple of {SKETCH_BLOCK}")
    centred = keys.float() if mean is None else keys.float() - mean.unsqueeze(2)
    centred = centred.clamp(-_LARGEST_SKETCHED, _LARGEST_SKETCHED)
    centred = centred.view(batch, heads, tokens // SKETCH_BLOCK, SKETCH_BLOCK, dim)
    levels = 2**bits - 1
    low, high = _sketch_range(centred, bits)
    zero = low.clamp(-_LARGEST_FP16, _LARGEST_FP16).half()
    span = high - zero.float()
    scale = (span / levels).clamp(0.0, _LARGEST_FP16).half()
    step = scale.float().unsqueeze(3)
    codes = (centred - zero.float().unsqueeze(3)) / torch.where(step > 0, step, 1.0)
    codes = torch.where(step > 0, codes.round_().clamp_(0, levels), 0.0).to(torch.uint8)

    sketch = torch.empty(batch, heads, tokens // SKETCH_BLOCK, size, dtype=torch.uint8, device=keys.device)
    sketch[..., : size - 4 * dim] = _pack(codes, bits)
    sketch[..., size - 4 * dim : size - 2 * dim] = scale.view(torch.uint8)
    sketch[..., size - 2 * dim :] = zero.view(torch.uint8)
    return sketch


def read_sketch(sketch: Tensor, bits: int, head_dim: int, mean: Tensor | None = None) -> Tensor:
    """The keys that a sketch stands for: scale * code + zero, and the mean if one was taken off.

    sketch: uint8 [B, Hkv, m, sketch_bytes(bits, head_dim)]. Returns float32 [B, Hkv, 64 * m, head_dim].
    ValueError: a width that is not sketch_bytes.
    """
    size = sketch_bytes(bits, head_dim)
    if sketch.shape[3] != size:
        raise ValueError(f"sketch: {sketch.shape[3]} bytes a block: must be {size} ({bits} bits, head_dim {head_dim})")
    codes = _unpack(sketch[..., : size - 4 * head_dim], bits, head_dim).float()
    scale = sketch[..., size - 4 * head_dim : size - 2 * head_dim].contiguous().view(torch.float16).float()
    zero = sketch[..., size - 2 * head_dim :].contiguous().view(torch.float16).float()
    keys = codes * scale.unsqueeze(3) + zero.unsqueeze(3)
    keys = keys.flatten(2, 3)
    return keys if mean is None else keys + mean.unsqueeze(2)


def sketch_logits(query: Tensor, sketch: Tensor, bits: int, rows: int, scale: float) -> Tensor:
    """scale * q . k for the keys that the first `rows` tokens of a sketch stand for; the twin of `sketch_kernel.py`.

    query: [B, Hq, d]; sketch: uint8 [B, Hkv, m, sketch_bytes(bits, d)]. Returns float32 [B, Hq, rows].
    """
    blocks = -(-rows // SKETCH_BLOCK)
    keys = read_sketch(sketch[:, :, :blocks], bits, query.shape[2])[:, :, :rows]
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    logits: Tensor = scale * grouped @ keys.transpose(2, 3)
    return logits.flatten(1, 2)


def _sketch_range(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What the codes of each block and channel span: low and high end, [B, Hkv, m, d] each, of [B, Hkv, m, 64, d].

    int4: from the least key to the largest. int2 would waste its four codes on the ends of that: its range lies about
    the middle between the mean and the range's own, and reaches 1/8 of the range and 0.9 standard deviations each way.
    That is nearly the least squared error for uniform and for normal keys, and for what turns with the position.
    """
    least, most = blocks.amin(dim=3), blocks.amax(dim=3)
    if bits > 2:
        return least, most
    mean = blocks.mean(dim=3)
    deviation = (blocks - mean.unsqueeze(3)).square_().mean(dim=3).sqrt_()
    centre, reach = (least + most) / 4 + mean / 2, (most - least) / 8 + 0.9 * deviation
    return centre - reach, centre + reach


def _pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [B, Hkv, m, 64, d] to [B, Hkv, m, 64 * d * bits / 8]."""
    # Tokens to (vector, place in the byte, lane), channels to (quad, k); bytes run over quad, vector, lane, k.
    places = 8 // bits
    parts = codes.unflatten(-1, (-1, 4)).unflatten(3, (-1, places, _LANES))
    parts = parts.permute(0, 1, 2, 6, 3, 5, 7, 4)
    packed: Tensor = parts[..., 0].contiguous()
    for place in range(1, places):
        packed |= parts[..., place] << (bits * place)
    return packed.flatten(3)


def _unpack(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """The inverse of `_pack`."""
    places = 8 // bits
    vectors = SKETCH_BLOCK // (_LANES * places)
    parts = packed.unflatten(-1, (head_dim // 4, vectors, _LANES, 4))
    codes = torch.stack([(parts >> (bits * place)) & (2**bits - 1) for place in range(places)], dim=-1)
    codes = codes.permute(0, 1, 2, 4, 7, 5, 3, 6)  # vector, place, lane, quad, k
    return codes.flatten(6, 7).flatten(3, 5)
