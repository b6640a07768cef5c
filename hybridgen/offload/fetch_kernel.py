"""The fetch on a GPU: a Triton kernel that reads chosen rows straight out of registered host memory.

A small persistent grid: a few dozen warps keep PCIe full, and leave the other multiprocessors to the layer
that runs beside the fetch (measured: a block per few rows starves it).

How much of it is asked for at once was measured, too, beside a scan. Rows of float16 keys and their values keep PCIe
full in turn; with more under way only those wait who read logits over it meanwhile. Codes and their scales are short:
they are asked for along with the values, and in longer turns.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybridgen.selection.launch_kernel import launch, next_power_of_2

BLOCKS = 32
WARPS = 8
ROWS_A_TURN, CODED_ROWS_A_TURN = 32, 64


# The rows kept change as the run goes on, and must not have the kernel compiled anew: no number is specialised on.
@triton.jit(do_not_specialize=["host_rows", "kept", "heads"])
def _fetch_rows(
    first, second, rows, counts, out_first, out_second, scales, mean, host_rows, kept, heads,
    BOTH: tl.constexpr, CODED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TURN: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, DIM_PADDED)
    for start in range(tl.program_id(0) * TURN, heads * kept, GRID * TURN):
        index = start + tl.arange(0, TURN)
        head = index // kept
        inside = index < heads * kept
        # Padding is not fetched; what the target holds there is finite and weighs nothing.
        wanted = inside & (index - head * kept < tl.load(counts + head, mask=inside, other=0))
        row = tl.load(rows + index, mask=wanted, other=0)
        source = (head.to(tl.int64) * host_rows + row)[:, None] * DIM + channel[None, :]
        target = index.to(tl.int64)[:, None] * DIM + channel[None, :]
        mask = wanted[:, None] & (channel < DIM)[None, :]
        fetched = tl.load(first + source, mask=mask)
        if CODED:
            beside = tl.load(second + source, mask=mask)
            scale = tl.load(scales + head.to(tl.int64) * host_rows + row, mask=wanted, other=0.0)
            shift = tl.load(mean + head[:, None] * DIM + channel[None, :], mask=mask, other=0.0)
            fetched = fetched.to(tl.float32) * scale[:, None] + shift
        tl.store(out_first + target, fetched, mask=mask)
        if BOTH:
            if not CODED:
                beside = tl.load(second + source, mask=mask)
            tl.store(out_second + target, beside, mask=mask)


def fetch_rows(
    sources: list[Tensor],
    rows: Tensor,
    counts: Tensor,
    targets: list[Tensor],
    coding: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Copy the first counts[b, h] rows of each head, of one or two tables; all contiguous, visible to the device.

    sources: [B, Hkv, N, d] each; rows: int64 [B, Hkv, K]; counts: int64 [B, Hkv]; targets: [B, Hkv, K, d].
    coding: of a first table of int8 codes the scales, float32 [B, Hkv, N], and the mean, float32 [B, Hkv, d]; what
    arrives is scale * code + mean, rounded to the target's type.
    """
    batch, heads, host_rows, dim = sources[0].shape
    if rows.shape[2] == 0:
        return
    scales, mean = coding or (sources[0], sources[0])
    turn = ROWS_A_TURN if coding is None else CODED_ROWS_A_TURN
    launch(
        _fetch_rows, (BLOCKS, 1),
        (sources[0], sources[-1], rows, counts, targets[0], targets[-1], scales, mean),
        (host_rows, rows.shape[2], batch * heads),
        (len(sources) == 2, coding is not None, dim, next_power_of_2(dim), turn, BLOCKS),
        WARPS,
    )  # fmt: skip
