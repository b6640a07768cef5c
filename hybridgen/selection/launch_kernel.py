"""Triton launches that cost the host a tenth of Triton's own.

`kernel[grid](...)` looks up its compiled form anew at each call, by every argument: 11 us on a quiet core, three times
that beside the scan threads, for about five launches a layer. Here the look-up is one dictionary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor
from triton.runtime.driver import driver

_ALIGNMENT = 16  # bytes; a kernel compiled for pointers aligned so takes no others

_compiled: dict[tuple[Any, ...], Any] = {}


def cdiv(number: int, by: int) -> int:
    """The quotient, rounded up; `triton.cdiv`, made for kernels too, takes 3 us, and so does its next power of two."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than number, 1 at least."""
    return 1 << max(number - 1, 0).bit_length()


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int | float, ...],
    constants: tuple[int | bool, ...],
    warps: int,
) -> None:
    """Launch on the running stream of the tensors' device, which must be the current one.

    The kernel's parameters: tensors, then numbers, all named in `do_not_specialize` (32 bits, floats float32), then
    constants. Whatever else decides how it is compiled is in the key.
    """
    device = tensors[0].device
    key = (kernel.fn, device, warps, constants, *[tensor.dtype for tensor in tensors])
    pointers = [tensor.data_ptr() for tensor in tensors]
    aligned = reduce(operator.or_, pointers) % _ALIGNMENT == 0
    compiled = _compiled.get(key) if aligned else None
    if compiled is not None:
        stream = driver.active.get_current_stream(device.index)
        compiled.run(
            *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *pointers, *numbers, *constants,
        )  # fmt: skip
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
    if aligned and compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled
