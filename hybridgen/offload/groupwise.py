"""Group-wise quantisation in 4 or 8 bits: what FlexGen calls compression (arXiv 2303.06865, section 5).

64 neighbouring numbers of a row are a group (the last one of a row may be shorter): value = step * code + minimum,
code in [0, 2^bits). A row is one run of bytes, so that it is copied, streamed or written to a file as a whole:

    step, minimum of each group, 16 bits each | codes, two in a byte for 4 bits, the even one in the low half | padding

up to a multiple of 4 bytes. Rows of whole groups thus take 0.5625 bytes a number, or 1.0625 for 8 bits.

Step and minimum are fp16 where the values are, else bf16, which has the range of bf16 and float32: neither overflows
for any value of the type. The minimum is rounded down and the step up, before the codes are found by these two. So
every value lies within the codes' range, and is off by at most half a step and the rounding of the result; a step is
(range + rounding of the minimum) / (2^bits - 1), rounded. A group without range has its exact value where 16 bits hold
it, and no division by zero.

Everything here is plain torch, for CPU and CUDA tensors; `groupwise_kernel.py` decodes on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64
BITS = (4, 8)
ENCODED_AT_ONCE = 1 << 24  # values, on a GPU
ENCODING_BYTES = 24  # of memory a value that is encoded, about
_IN_CACHE = 1 << 14  # values at a time on the CPU, which one core has in its cache: ten times faster than all at once
_PAIR_BYTES = 4  # step and minimum of a group
_LARGEST = 2.0**126  # twice this is still a finite float
_LARGEST_FP16 = 65504.0


@dataclass(frozen=True)
class GroupCodec:
    """How rows of values are packed. dtype: of the values, before and after."""

    bits: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits}: must be one of {BITS}")

    @property
    def name(self) -> str:
        return f"int{self.bits} in groups of {GROUP}"

    @property
    def pair_dtype(self) -> torch.dtype:
        """Of step and minimum."""
        return torch.float16 if self.dtype is torch.float16 else torch.bfloat16

    def row_bytes(self, width: int) -> int:
        """Bytes of a packed row of `width` values."""
        return _PAIR_BYTES * groups(width) + -(-_code_bytes(width, self.bits) // 4) * 4

    def encode(self, values: Tensor) -> Tensor:
        """Rows of values [..., width], any floating type, no NaN, as uint8 [..., row_bytes(width)].

        What is beyond 2^126 (65,504 for fp16) is stored as that.
        """
        width = values.shape[-1]
        packed = torch.zeros(*values.shape[:-1], self.row_bytes(width), dtype=torch.uint8, device=values.device)
        at_once = max(1, (ENCODED_AT_ONCE if values.is_cuda else _IN_CACHE) // width)
        rows = zip(values.reshape(-1, width).split(at_once), packed.flatten(0, -2).split(at_once), strict=True)
        for some, out in rows:
            self._encode(some, out)
        return packed

    def _encode(self, values: Tensor, packed: Tensor) -> None:
        """Of a few rows [n, width]."""
        width, levels = values.shape[-1], 2**self.bits - 1
        most = _LARGEST_FP16 if self.dtype is torch.float16 else _LARGEST
        whole = values.float().clamp(-most, most)
        if width % GROUP:
            whole = torch.cat((whole, whole[:, -1:].expand(-1, GROUP - width % GROUP)), dim=-1)
        whole = whole.unflatten(-1, (-1, GROUP))
        minimum = rounded_down(whole.amin(dim=-1), self.pair_dtype)
        # By a tensor: a GPU multiplies by the reciprocal of a plain number, and rounds otherwise than a CPU.
        widest = minimum.float() - whole.amax(dim=-1)
        step = -rounded_down(widest / torch.full_like(widest, levels), self.pair_dtype)
        divisor = step.float().unsqueeze(-1)
        codes = (whole - minimum.float().unsqueeze(-1)).div_(torch.where(divisor > 0, divisor, 1.0))
        codes = codes.add_(0.5).clamp_(0, levels).to(torch.uint8).flatten(-2)[:, :width]  # to the nearest
        start = _PAIR_BYTES * groups(width)
        packed[:, :start] = torch.stack((step, minimum), dim=-1).flatten(-2).view(torch.uint8)
        end = start + _code_bytes(width, self.bits)
        if self.bits == 4:
            packed[:, start : end - width % 2] = codes[:, 1::2] << 4
            packed[:, start:end] |= codes[:, ::2]
        else:
            packed[:, start:end] = codes

    def decode(self, packed: Tensor, out: Tensor) -> Tensor:
        """What rows packed uint8 [..., row_bytes(width)] stand for, into out [..., width]; both contiguous."""
        assert out.dtype is self.dtype and packed.shape[-1] == self.row_bytes(out.shape[-1])
        if packed.is_cuda:
            from hybridgen.offload.groupwise_kernel import decode_rows  # Triton: only where there is a GPU

            decode_rows(packed, self.bits, self.pair_dtype, out)
            return out
        return self.decode_in_torch(packed, out)

    def decode_in_torch(self, packed: Tensor, out: Tensor) -> Tensor:
        """The twin of `groupwise_kernel.decode_rows`; on the CPU about as fast as memory is copied."""
        width = out.shape[-1]
        at_once = max(1, _IN_CACHE // width)
        rows, start = packed.view(-1, packed.shape[-1]).split(at_once), _PAIR_BYTES * groups(width)
        for some, target in zip(rows, out.view(-1, width).split(at_once), strict=True):
            pairs = some[:, :start].contiguous().view(self.pair_dtype).float().unflatten(-1, (-1, 2))
            codes = some[:, start : start + _code_bytes(width, self.bits)]
            values = pairs.new_zeros(some.shape[0], groups(width) * GROUP)
            if self.bits == 4:
                values[:, : 2 * codes.shape[1] : 2] = codes & 15
                values[:, 1 : 2 * codes.shape[1] : 2] = codes >> 4
            else:
                values[:, :width] = codes
            grouped = values.view(-1, groups(width), GROUP)
            grouped.mul_(pairs[..., :1]).add_(pairs[..., 1:])
            if self.dtype is torch.float16:  # the step was rounded up
                values.clamp_(-_LARGEST_FP16, _LARGEST_FP16)
            target.copy_(values[:, :width])
        return out


def groups(width: int) -> int:
    """Groups of a row."""
    return -(-width // GROUP)


def rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of a 16-bit type that are not above these float32 ones, which lie in its range."""
    near = numbers.to(dtype)
    bits = near.view(torch.int16)  # as integers, numbers of one sign are in order; 1 - 2^15 is the next below zero
    below = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, 1 - 2**15))
    return torch.where(near.float() > numbers, below, bits).view(dtype)


def _code_bytes(width: int, bits: int) -> int:
    return -(-width * bits // 8)
