"""Logits as they cross the link (contracts.md): float16 below the maximum of each 256 tokens, for every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridgen import _C
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.transfer import ImmediateTransfer, Ticket
from hybridgen.selection.host_logits import LINK_TOKENS, HostLogits
from hybridgen.telemetry import Telemetry
from tests.kernels.scan_case import ISAS, KEY_TYPES, ScanCase

NEVER_WRITTEN = np.uint16(0x7E5A)  # a NaN


def scanned_both_ways(case: ScanCase, isa: str, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 logits, then those of the same kernels in float16 bits [B, Hq, n] and their maxima."""
    worker = _C.ScanWorker(threads, isa=isa)
    worker.wait(case.submit(worker))
    halves = np.full((case.out.shape[0], case.out.shape[1], case.out_strides[1] + 1), NEVER_WRITTEN)[:, :, 1:]
    maxima = np.full((*halves.shape[:2], -(-halves.shape[2] // LINK_TOKENS)), np.nan, np.float32)
    submit: Any = worker.submit

    class Linked:
        def submit(self, **arguments: Any) -> int:
            strides = tuple(stride // 2 for stride in halves.strides[:2])
            changed = {"out": halves.ctypes.data, "out_strides": strides, "maxima": maxima.ctypes.data}
            return int(submit(**(arguments | changed), maxima_stride=maxima.shape[2]))

    worker.wait(case.submit(Linked()))  # type: ignore[arg-type]
    worker.close()
    return case.out, halves, maxima


def check(case: ScanCase, isa: str, threads: int = 1) -> None:
    logits, halves, maxima = scanned_both_ways(case, isa, threads)
    for b, length in enumerate(case.lengths):
        assert (halves[b, :, length:] == NEVER_WRITTEN).all() and (halves[b, :, :length] != NEVER_WRITTEN).all()
        assert np.isnan(maxima[b, :, -(-length // LINK_TOKENS) :]).all()
        for first in range(0, length, LINK_TOKENS):
            block = slice(first, min(first + LINK_TOKENS, length))
            true, top = logits[b, :, block], maxima[b, :, first // LINK_TOKENS, None]
            assert (top[:, 0] == true.max(1)).all()
            below = np.maximum(true - top, np.float32(-60_000))
            assert (halves[b, :, block].view(np.float16) == below.astype(np.float16)).all()
            one = slice(b, b + 1)
            found = HostLogits(torch.from_numpy(halves[one].view(np.float16)), torch.from_numpy(maxima[one]))
            decoded = found.float()[0, :, block].numpy()
            assert (abs(decoded - true) <= 2.0**-11 * (top - true) + 2.0**-23 * abs(top) + 2.0**-24).all()


@pytest.mark.parametrize("group", [1, 3, 4, 17])
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_blocks_and_ragged_lengths(isa: str, key_type: str, group: int) -> None:
    check(ScanCase(key_type, [0, 1, 255, 256, 257, 1003], 2, group, 64), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_lists_and_many_chunks(isa: str) -> None:
    check(ScanCase("float16", [9001, 5, 700], 2, 2, 128, tier=12_000), isa, threads=3)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_of_thousands(isa: str) -> None:
    check(ScanCase("float32", [2000, 300], 1, 2, 64, scale=500.0), isa)


@pytest.mark.parametrize("threads", [0, 1])
def test_what_a_worker_hands_out(threads: int) -> None:
    device = torch.device("cpu")
    worker = LogitWorker(threads, [], ImmediateTransfer(Telemetry()), device, logits_in_half=True)
    keys, query = torch.randn(2, 2, 700, 64).half(), torch.randn(2, 6, 64)
    for lengths in ([700, 333], [64, 0]):
        ticket = worker.submit(query, HostBuffer(keys, keys), lengths, 0.5, layer=0)
        found = ticket.logits()
        assert found.values.dtype is torch.float16 and found.maxima is not None
        for b, length in enumerate(lengths):
            wanted = 0.5 * query[b].view(2, 3, 64) @ keys[b].float().transpose(1, 2)
            torch.testing.assert_close(found.float()[b, :, :length], wanted.view(6, -1)[:, :length], atol=0.02, rtol=0)
        ticket.release(Ticket())
    worker.close()


def test_maxima_have_room() -> None:
    case, worker = ScanCase("float32", [300], 1, 1, 8), _C.ScanWorker(0)
    with pytest.raises(ValueError, match="maxima_stride=1: must be at least one for each 256 tokens, 2"):
        worker.submit(
            query=case.query.ctypes.data, keys=case.keys.ctypes.data, out=case.out.ctypes.data, key_type="float32",
            num_heads=1, num_kv_heads=1, head_dim=8, lengths=[300], key_strides=case.key_strides,
            out_strides=case.out_strides, scale=1.0, maxima=4096, maxima_stride=1,
        )  # fmt: skip
    worker.close()
