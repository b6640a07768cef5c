"""Kernels read and write nothing beside their rows: data ends at, or begins behind, pages without access."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridgen import _C
from tests.kernels.scan_case import ISAS, KEY_TYPES, QUANTIZED, QuantizedCase, ScanCase, store

PAGE = 4096
ROOT = Path(__file__).parents[2]


def between_guards(data: np.ndarray, at_end: bool) -> int:
    """The address of a copy of `data` that ends (or begins) where an inaccessible page begins (or ends)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = -(-data.nbytes // PAGE)
    base = libc.mmap(None, (pages + 2) * PAGE, 0, 0x22, -1, 0)  # PROT_NONE, private, anonymous
    assert libc.mprotect(base + PAGE, pages * PAGE, 3) == 0
    address = base + PAGE + (pages * PAGE - data.nbytes if at_end else 0)
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
    return address


def scan_between_guards(isa: str) -> None:
    """Runs in a process of its own, because a stray access ends it."""
    worker = _C.ScanWorker(1, isa=isa)
    for key_type in KEY_TYPES:
        for head_dim in (8, 40, 128):
            for group in (1, 2, 3, 8, 9):
                for length in (1, 15, 16, 17, 100):
                    for at_end in (True, False):
                        case = ScanCase(key_type, [length], 1, group, head_dim)
                        keys = between_guards(np.ascontiguousarray(case.keys[0, 0, :length]), at_end)
                        query = between_guards(case.query, at_end)
                        out = between_guards(np.zeros((group, length), np.float32), at_end)
                        job = worker.submit(
                            query, keys, out, key_type, group, 1, head_dim, [length],
                            (0, 0, head_dim), (0, length), case.scale,
                        )  # fmt: skip
                        worker.wait(job)
                        ctypes.memmove(case.query.ctypes.data, query, case.query.nbytes)
                        got = (ctypes.c_float * (group * length)).from_address(out)
                        case.out[0, :, :length] = np.array(got).reshape(group, length)
                        case.check()
    worker.close()


def listed_scan_between_guards(isa: str) -> None:
    """The same for listed rows, the tier's first and last among them."""
    worker = _C.ScanWorker(1, isa=isa)
    for key_type in KEY_TYPES:
        for head_dim in (8, 40, 128):
            for group in (1, 3, 9):
                for length in (1, 15, 16, 17, 100):
                    for at_end in (True, False):
                        case = ScanCase(key_type, [length], 1, group, head_dim, tier=60)
                        case.rows[0, 0, [0, length - 1]] = (59, 0) if length % 2 else (0, 59)
                        case.keys[0, 0, :60] = store(case.rng.random((60, head_dim), np.float32), key_type)
                        keys = between_guards(np.ascontiguousarray(case.keys[0, 0, :60]), at_end)
                        query = between_guards(case.query, at_end)
                        rows = between_guards(np.ascontiguousarray(case.rows[0, 0, :length]), at_end)
                        out = between_guards(np.zeros((group, length), np.float32), at_end)
                        job = worker.submit(
                            query, keys, out, key_type, group, 1, head_dim, [length],
                            (0, 0, head_dim), (0, length), case.scale, rows=rows, rows_stride=length,
                        )  # fmt: skip
                        worker.wait(job)
                        got = (ctypes.c_float * (group * length)).from_address(out)
                        case.out[0, :, :length] = np.array(got).reshape(group, length)
                        case.check()
    worker.close()


def quantized_scan_between_guards(isa: str) -> None:
    """The same for int8 keys with their scales and for sketches, of which only whole blocks are there."""
    worker = _C.ScanWorker(1, isa=isa)
    for key_type in QUANTIZED:
        for head_dim in (8, 24, 128):
            for group in (1, 3, 9):
                for length, tier in ((1, 0), (17, 0), (64, 0), (200, 0), (1, 70), (40, 200)):
                    for at_end in (True, False):
                        case = QuantizedCase(key_type, [length], 1, group, head_dim, tier=tier)
                        used = np.unique(case.rows[0, 0, :length])
                        units = int(used.max()) // 64 + 1 if case.bits else int(used.max()) + 1
                        arrays = {
                            "keys": case.keys[0, 0, :units],
                            "query": case.query,
                            "out": np.zeros((group, length), np.float32),
                            "key_mean": case.key_mean,
                            "key_scales": case.key_scales[0, 0, :units],
                            "rows": case.rows[0, 0, :length],
                        }
                        if case.bits:
                            del arrays["key_scales"]
                        if not tier:
                            del arrays["rows"]
                        at = {name: between_guards(np.ascontiguousarray(a), at_end) for name, a in arrays.items()}
                        job = worker.submit(
                            key_type=key_type, num_heads=group, num_kv_heads=1, head_dim=head_dim, lengths=[length],
                            key_strides=(0, 0, case.keys.shape[3]), out_strides=(0, length), scale=case.scale,
                            rows_stride=length, **at,
                        )  # fmt: skip
                        worker.wait(job)
                        got = (ctypes.c_float * (group * length)).from_address(at["out"])
                        case.out[0, :, :length] = np.array(got).reshape(group, length)
                        case.check(isa)
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux' mmap flags")
@pytest.mark.parametrize("scan", ["scan_between_guards", "listed_scan_between_guards", "quantized_scan_between_guards"])
@pytest.mark.parametrize("isa", ISAS)
def test_no_access_outside_the_rows(isa, scan):
    code = f"from tests.kernels.test_guard_pages import {scan} as f; f({isa!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
