"""Attention over all host rows by the worker's threads, against float64."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridgen import _C
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.logit_worker import KEPT_SHAPES, LogitWorker
from hybridgen.offload.scanned_keys import attended_rows
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, TransferEngine
from hybridgen.telemetry import Telemetry
from tests.kernels.scan_case import ISAS, KEY_TYPES, QuantizedCase, ScanCase, exact, nan_of, store
from tests.kernels.test_guard_pages import between_guards

ROOT = Path(__file__).parents[2]
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


class Attention:
    """Values beside the keys and query of a scan's case, NaN where there is no token; `check` after the job."""

    def __init__(self, case: ScanCase | QuantizedCase, value_type: str, offset: int = 1) -> None:
        self.case, self.value_type = case, value_type
        batch, heads, d, tokens = len(case.lengths), case.num_kv_heads, case.head_dim, max(case.lengths) + 3
        row = d + case.gap
        tight = case.layout == "heads"
        self.strides = (heads * tokens * row, tokens * row, row) if tight else (tokens * heads * row, row, heads * row)
        dtype = np.uint16 if value_type == "bfloat16" else np.dtype(value_type)
        self.buffer = np.full(offset + batch * heads * tokens * row, nan_of(value_type), dtype)
        steps = [stride * self.buffer.itemsize for stride in (*self.strides, 1)]
        self.values = np.lib.stride_tricks.as_strided(self.buffer[offset:], (batch, heads, tokens, d), steps)
        for b, length in enumerate(case.lengths):
            self.values[b, :, :length] = store(case.rng.standard_normal((heads, length, d), np.float32), value_type)
        self.context = np.full((batch, heads * case.group, d), np.nan, np.float32)
        self.log_sum = np.full((batch, heads * case.group), np.nan, np.float32)

    def arguments(self) -> dict[str, Any]:
        case = self.case
        arguments: dict[str, Any] = {
            "query": case.query.ctypes.data,
            "keys": case.keys.ctypes.data,
            "values": self.values.ctypes.data,
            "context": self.context.ctypes.data,
            "log_sum": self.log_sum.ctypes.data,
            "key_type": case.key_type,
            "value_type": self.value_type,
            "num_heads": case.num_kv_heads * case.group,
            "num_kv_heads": case.num_kv_heads,
            "head_dim": case.head_dim,
            "lengths": case.lengths,
            "key_strides": case.key_strides,
            "value_strides": self.strides,
            "scale": case.scale,
        }
        if isinstance(case, QuantizedCase):
            arguments |= {"key_mean": case.key_mean.ctypes.data if case.mean else 0, **case.scale_arguments()}
        return arguments

    def run(self, worker: _C.ScanWorker) -> Attention:
        _, _, read_bytes = worker.wait_and_count(worker.submit_attention(**self.arguments()))
        assert read_bytes == self.read_bytes()
        return self

    def read_bytes(self) -> int:
        """All keys and values, once."""
        case = self.case
        row = case.head_dim * (BYTES[case.key_type] + BYTES[self.value_type]) + 4 * (case.key_type == "int8")
        return sum(case.lengths) * case.num_kv_heads * row

    def keys_of(self, b: int, h: int) -> np.ndarray:
        case = self.case
        if isinstance(case, QuantizedCase):
            return case.scanned(b, h)[0] + case.key_mean[b, h].astype(np.float64)
        return exact(case.scanned(b)[h], case.key_type)

    def check(self) -> None:
        case = self.case
        for b, h in np.ndindex(len(case.lengths), case.num_kv_heads):
            heads, length = slice(h * case.group, (h + 1) * case.group), case.lengths[b]
            if length == 0:
                assert (self.context[b, heads] == 0).all() and (self.log_sum[b, heads] == -np.inf).all()
                continue
            logits = case.scale * (case.query[b, heads].astype(np.float64) @ self.keys_of(b, h).T)
            top = logits.max(1, keepdims=True)
            weights = np.exp(logits - top)
            log_sum = (top + np.log(weights.sum(1, keepdims=True)))[:, 0]
            values = exact(self.values[b, h, :length], self.value_type)
            want = weights / weights.sum(1, keepdims=True) @ values
            np.testing.assert_allclose(self.context[b, heads], want, rtol=1e-4, atol=2e-5 * abs(values).max())
            np.testing.assert_allclose(self.log_sum[b, heads], log_sum, rtol=1e-5, atol=2e-5)


@pytest.fixture(params=[0, 1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def check(case: ScanCase | QuantizedCase, value_type: str, isa: str, threads: int = 1) -> None:
    worker = _C.ScanWorker(threads, isa=isa)
    try:
        Attention(case, value_type).run(worker).check()
    finally:
        worker.close()


@pytest.mark.parametrize("value_type", KEY_TYPES)
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_types(isa: str, key_type: str, value_type: str, threads: int) -> None:
    check(ScanCase(key_type, [700, 0, 65], 2, 3, 64), value_type, isa, threads)


@pytest.mark.parametrize("group", [*range(1, 10), 12, 16, 17])
@pytest.mark.parametrize("isa", ISAS)
def test_every_group_size(isa: str, group: int) -> None:
    check(ScanCase("float16", [130, 33], 2, group, 128), "float16", isa)
    check(ScanCase("float32", [40], 1, group, 40), "bfloat16", isa)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 120, 128, 136, 256])
@pytest.mark.parametrize("isa", ISAS)
def test_every_head_dim(isa: str, head_dim: int) -> None:
    for group in (1, 4, 7):
        check(ScanCase("bfloat16", [100, 17], 2, group, head_dim), "float16", isa)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 64, 1000, 5000])
@pytest.mark.parametrize("isa", ISAS)
def test_lengths_and_layouts(isa: str, length: int, threads: int) -> None:
    """5,000 rows are several chunks of each head, merged."""
    for layout, gap in (("heads", 0), ("heads", 5), ("tokens", 3)):
        check(ScanCase("float16", [length, 3, 0], 3, 2, 64, layout, gap), "float16", isa, threads)


@pytest.mark.parametrize("isa", ISAS)
def test_int8_keys(isa: str, threads: int) -> None:
    for mean in (True, False):
        check(QuantizedCase("int8", [700, 0, 65], 2, 3, 64, mean=mean), "float16", isa, threads)


@pytest.mark.parametrize("scale", [0.0, 3.0, -2.0])
def test_flat_and_peaked_attention(scale: float) -> None:
    """At 3.0 logits of +-100: parts differ by more than float32's exponent."""
    check(ScanCase("float32", [3000], 1, 2, 64, scale=scale), "float32", "", 2)


def test_many_jobs_in_flight_and_slots_used_again() -> None:
    worker = _C.ScanWorker(2)
    for lengths in ([700, 3], [64], [5, 900, 40], [0, 0], [2000]):
        cases = [Attention(ScanCase("float16", lengths, 2, group, 64), "float16") for group in (1, 4, 2)]
        jobs = [worker.submit_attention(**case.arguments()) for case in cases]
        for case, job in zip(cases, jobs, strict=True):
            worker.wait(job)
            case.check()
    worker.close()


def test_a_held_job_reads_its_query_when_it_starts() -> None:
    worker = _C.ScanWorker(1)
    case = Attention(ScanCase("float16", [300], 2, 2, 64), "float16")
    job = worker.submit_attention(**case.arguments(), hold=True)
    case.case.query[:] = case.case.rng.standard_normal(case.case.query.shape)
    worker.start(job)
    worker.wait(job)
    case.check()
    worker.close()


def test_wrong_arguments_are_named() -> None:
    worker = _C.ScanWorker(0)
    case = Attention(ScanCase("float16", [300, 20], 2, 2, 64), "float16")
    good = case.arguments()
    for name, wrong in (
        ("values", 0), ("values", good["values"] + 1), ("context", 0), ("context", 2), ("log_sum", 0), ("query", 0),
        ("keys", 0), ("key_type", "int4"), ("key_type", "int8"), ("value_type", "int8"), ("num_heads", 3),
        ("value_strides", (-1, 64, 64)), ("value_strides", (64, -1, 64)), ("value_strides", (64, 64, 63)),
        ("key_strides", (64, 64, 63)), ("scale", float("nan")), ("lengths", []),
    ):  # fmt: skip
        message = "key_scales" if wrong == "int8" and name == "key_type" else name
        with pytest.raises(ValueError, match=message):
            worker.submit_attention(**{**good, name: wrong})
    worker.close()


def attend_between_guards(isa: str) -> None:
    """Runs in a process of its own, because a stray access ends it."""
    worker = _C.ScanWorker(1, isa=isa)
    for value_type in KEY_TYPES:
        for head_dim in (8, 40, 80, 128):
            for group in (1, 2, 4, 7, 9):
                for length in (1, 15, 16, 17, 100):
                    for at_end in (True, False):
                        case = Attention(ScanCase("float32", [length], 1, group, head_dim), value_type)
                        values = np.ascontiguousarray(case.values[0, 0, :length])
                        keys = np.ascontiguousarray(case.case.keys[0, 0, :length])
                        context, log_sum = (between_guards(out, at_end) for out in (case.context, case.log_sum))
                        moved = {
                            "query": between_guards(case.case.query, at_end),
                            "keys": between_guards(keys, at_end),
                            "values": between_guards(values, at_end),
                            "key_strides": (0, 0, head_dim),
                            "value_strides": (0, 0, head_dim),
                        }
                        given = {**case.arguments(), **moved, "context": context, "log_sum": log_sum}
                        worker.wait(worker.submit_attention(**given))
                        ctypes.memmove(case.context.ctypes.data, context, case.context.nbytes)
                        ctypes.memmove(case.log_sum.ctypes.data, log_sum, case.log_sum.nbytes)
                        case.check()
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux' mmap flags")
@pytest.mark.parametrize("isa", ISAS)
def test_no_access_outside_the_tensors(isa: str) -> None:
    code = f"from tests.kernels.test_attention_jobs import attend_between_guards as f; f({isa!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"


# Through `LogitWorker`


@pytest.mark.parametrize("make", [ImmediateTransfer, LazyTransfer])
def test_the_worker_attends_and_counts(make: type[TransferEngine], threads: int) -> None:
    telemetry = Telemetry()
    worker = LogitWorker(threads, [], make(telemetry), torch.device("cpu"))
    keys, values = (torch.randn(2, 3, 200, 16, dtype=torch.float16) for _ in range(2))
    lengths = [200, 64]
    rows = attended_rows(torch.empty(2, 6, 16), HostBuffer(keys, keys), HostBuffer(values, values), lengths)
    for step in range(5):  # each layer has its own buffers
        query = torch.randn(2, 6, 16)
        ticket = worker.attend(query, rows, 0.25, layer=step)
        context, log_sum = ticket.partial()
        for b, length in enumerate(lengths):
            logits = 0.25 * query[b].view(3, 2, 16) @ keys[b, :, :length].float().mT
            want = logits.softmax(-1) @ values[b, :, :length].float()
            torch.testing.assert_close(context[b].view(3, 2, 16), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(log_sum[b].view(3, 2), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        ticket.release()
    assert telemetry.bytes_moved == {
        "d2h": 5 * 2 * 6 * 16 * 4,
        "h2d": 5 * 2 * 6 * (16 + 1) * 4,
        "cpu_read": 5 * sum(lengths) * 3 * 16 * 2 * 2,
    }
    worker.close()


def _worker(threads: int) -> LogitWorker:
    return LogitWorker(threads, [], ImmediateTransfer(Telemetry()), torch.device("cpu"))


def test_the_worker_names_what_does_not_fit() -> None:
    keys, query = torch.randn(1, 2, 64, 16), torch.randn(1, 4, 16)

    def attend(lengths: list[int] = [64], **changed: torch.Tensor) -> None:  # noqa: B006 - not changed
        given = {"keys": keys, "values": keys, **changed}
        attended_rows(query, *(HostBuffer(given[name], given[name]) for name in ("keys", "values")), lengths)

    for name, wrong in (
        ("keys", keys[..., :8]),
        ("keys", keys.double()),
        ("values", keys[..., :8]),
        ("values", keys.double()),
        ("values", keys[:, :, :63]),
        ("values", keys.mT.contiguous().mT),
    ):
        with pytest.raises(ValueError, match=name):
            attend(**{name: wrong})
    with pytest.raises(ValueError, match="lengths"):
        attend([65])
    rows, worker = attended_rows(query, HostBuffer(keys, keys), HostBuffer(keys, keys), [64]), _worker(0)
    with pytest.raises(ValueError, match=r"query: shape \(2, 4, 16\) for rows that go with \(1, 4, 16\)"):
        worker.attend(query.expand(2, 4, 16), rows, 1.0, 0)
    worker.close()


def test_lengths_are_those_that_were_described() -> None:
    """Whatever the caller does to its list."""
    keys, query, lengths, worker = torch.randn(1, 2, 64, 16), torch.randn(1, 4, 16), [5], _worker(0)
    rows = attended_rows(query, HostBuffer(keys, keys), HostBuffer(keys, keys), lengths)
    lengths[0] = 9
    context, _ = worker.attend(query, rows, 1.0, 0).partial()
    logits = query[0].view(2, 2, 16) @ keys[0, :, :5].mT
    torch.testing.assert_close(context[0].view(2, 2, 16), logits.softmax(-1) @ keys[0, :, :5])
    worker.close()


def test_buffers_of_many_shapes_are_not_kept() -> None:
    """Of each layer those of the last few."""
    worker = _worker(0)
    for batch in range(1, 12):
        keys, query = torch.randn(batch, 2, 64, 16), torch.randn(batch, 4, 16)
        rows = attended_rows(query, HostBuffer(keys, keys), HostBuffer(keys, keys), [64] * batch)
        ticket = worker.attend(query, rows, 1.0, 3)
        ticket.partial()
        ticket.release()
    assert [place[0] for place in worker._free_attention] == list(range(12 - KEPT_SHAPES, 12))
    worker.close()


@pytest.mark.parametrize("lengths", [(5, 0, 9), (0, 0, 0)])
def test_nothing_is_written_before_the_job_starts(lengths: tuple[int, ...]) -> None:
    """Not for sequences without a token, either: the device may still read what the last job has left there."""
    worker = _C.ScanWorker(1)
    try:
        attention = Attention(ScanCase("float32", list(lengths), 2, 2, 64), "float32")
        job = worker.submit_attention(**attention.arguments(), hold=True)
        assert np.isnan(attention.context).all() and np.isnan(attention.log_sum).all()
        worker.start(job)
        worker.wait_and_count(job)
        attention.check()
    finally:
        worker.close()
