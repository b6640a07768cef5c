"""The pool: order, held jobs, waiting, closing, errors."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridgen import _C
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, Ticket
from hybridgen.telemetry import Telemetry
from tests.kernels.scan_case import ScanCase

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[0, 1, 2])
def worker(request):
    worker = _C.ScanWorker(request.param)
    yield worker
    worker.close()


@pytest.fixture
def case():
    return ScanCase("float16", [700, 0, 65], 2, 3, 64)


def start_later(worker, job, delay=0.05):
    """Starts a held job from a thread that knows only C, as CUDA's callback thread does."""
    function, data = worker.start_call(job)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)  # releases the GIL around the call
    thread = threading.Timer(delay, call, [data])
    thread.start()
    return thread


def wait_for(condition, seconds=20.0):
    until = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < until
        time.sleep(0.001)


def test_threads_and_times(worker, case):
    before = time.perf_counter()
    start, end = worker.wait(case.submit(worker))
    assert before <= start <= end <= time.perf_counter()
    case.check()


def test_done_without_waiting(case):
    worker = _C.ScanWorker(2)
    job = case.submit(worker)
    wait_for(lambda: worker.done(job))
    case.check()
    worker.wait(job)
    worker.close()


@pytest.mark.parametrize("help_", [False, True])
def test_many_jobs_in_flight(worker, help_):
    cases = [ScanCase("bfloat16", [5 * i, 200], 2, 1 + i % 5, 64) for i in range(60)]
    for _ in range(3):  # slots are used again
        jobs = [c.submit(worker) for c in cases]
        assert len(set(jobs)) == len(jobs)
        for job in jobs[::2] + jobs[1::2][::-1]:
            worker.wait(job, help=help_)
        for c in cases:
            c.check()
            c.forget()
    assert sum(worker.jobs_by_isa.values()) == 180


def test_threads_of_python_share_a_worker(worker):
    cases = [ScanCase("float32", [300], 2, 2, 40) for _ in range(8)]
    threads = [threading.Thread(target=lambda c=c: worker.wait(c.submit(worker))) for c in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for c in cases:
        c.check()


def test_empty_job(worker):
    case = ScanCase("float32", [0, 0], 1, 1, 8)
    start, end = worker.wait(case.submit(worker))
    assert start == end
    case.check()


def test_held_job_waits_for_start(worker, case):
    job = case.submit(worker, hold=True)
    other = ScanCase("float32", [80], 1, 1, 64)
    worker.wait(other.submit(worker))  # overtakes the held one
    other.check()
    time.sleep(0.02)
    assert not worker.done(job)
    worker.start(job)
    worker.wait(job)
    case.check()


class Words:
    """A start and a done word for each of some jobs, as a GPU would write and read them."""

    def __init__(self, jobs):
        self.values = np.zeros((jobs, 2, 16), dtype=np.uint32)

    def watch(self, worker, job, index, turn=1):
        start, done = (self.values[index, word].ctypes.data for word in range(2))
        worker.watch(job, start, done, turn)

    def start(self, index, turn=1):
        self.values[index, 0, 0] = turn

    def done(self, index):
        return int(self.values[index, 1, 0])


@pytest.mark.parametrize("threads", [1, 2])
def test_watched_job_starts_at_its_word(threads, case):
    worker, words = _C.ScanWorker(threads), Words(1)
    for turn in (1, 2, 2**32 - 1, 0, 5):  # 0 comes after the largest
        words.start(0, turn - 1 if turn else 2**32 - 1)
        job = case.submit(worker, hold=True)
        words.watch(worker, job, 0, turn)
        time.sleep(0.01)
        assert not worker.done(job)
        words.start(0, turn)
        wait_for(lambda turn=turn: words.done(0) == turn)
        case.check()
        worker.wait(job)
    worker.close()


def test_watched_jobs_start_in_their_order():
    worker, words = _C.ScanWorker(2), Words(3)
    cases = [ScanCase("float32", [300], 2, 2, 40) for _ in range(3)]
    jobs = [case.submit(worker, hold=True) for case in cases]
    for index, job in enumerate(jobs):
        words.watch(worker, job, index)
    words.start(1)
    other = ScanCase("float32", [80], 1, 1, 64)
    worker.wait(other.submit(worker))  # what nobody has to wait for overtakes them
    time.sleep(0.02)
    assert not any(worker.done(job) for job in jobs)
    words.start(0)
    wait_for(lambda: words.done(0) and words.done(1))
    assert not worker.done(jobs[2])
    words.start(2)
    for job, case in zip(jobs, cases, strict=True):
        worker.wait(job)
        case.check()
    worker.close()


def test_close_sets_the_words_that_a_stream_waits_for(case):
    worker, words = _C.ScanWorker(1), Words(2)
    finished = case.submit(worker, hold=True)
    words.watch(worker, finished, 0, 7)
    words.start(0, 7)
    worker.wait(finished)
    never = case.submit(worker, hold=True)
    words.watch(worker, never, 1, 3)
    worker.close()
    assert (words.done(0), words.done(1)) == (7, 3)


def test_close_moves_a_shared_word_forward_only(case):
    """Several jobs in flight share a buffer, and a stream may wait for the last of them."""
    worker, words = _C.ScanWorker(1), Words(1)
    for turn in range(1, 4):  # slots are used again, last first
        words.watch(worker, case.submit(worker, hold=True), 0, turn)
    words.start(0, 3)
    wait_for(lambda: words.done(0) == 3)
    jobs = [case.submit(worker, hold=True) for _ in range(3)]
    for turn, job in enumerate(jobs, start=4):
        words.watch(worker, job, 0, turn)
    worker.close()
    assert words.done(0) == 6


def test_words_are_not_touched_after_close(case):
    """Their memory may be somebody else's by then: of a job that is done, of one that never started."""
    worker, words = _C.ScanWorker(1), Words(2)
    for index in range(2):
        words.watch(worker, case.submit(worker, hold=True), index, 5)
    words.start(0, 5)
    wait_for(lambda: words.done(0) == 5)
    worker.close()
    words.values[:] = 1234
    worker.close()
    del worker
    gc.collect()
    assert (words.values == 1234).all()


def test_what_cannot_be_watched(case):
    words = Words(1)
    idle, worker = _C.ScanWorker(0), _C.ScanWorker(1)
    job = case.submit(idle, hold=True)
    with pytest.raises(ValueError, match="threads=0"):
        words.watch(idle, job, 0)
    job = case.submit(worker, hold=True)
    with pytest.raises(ValueError, match="non-null"):
        worker.watch(job, 0, 0, 1)
    words.watch(worker, job, 0)
    for again in (lambda: words.watch(worker, job, 0), lambda: worker.start(job), lambda: worker.start_call(job)):
        with pytest.raises(ValueError, match="held job"):
            again()
    words.start(0)
    worker.wait(job)
    called = case.submit(worker, hold=True)
    start_later(worker, called).join()
    with pytest.raises(ValueError, match="held job"):
        words.watch(worker, called, 0)
    worker.wait(called)
    idle.close()
    worker.close()


def test_held_job_reads_the_query_when_it_starts(worker, case):
    query = case.query.copy()
    case.query[:] = 0
    job = case.submit(worker, hold=True)
    case.query[:] = query
    worker.start(job)
    worker.wait(job)
    case.check()


def test_held_job_reads_its_rows_when_it_starts(worker):
    case = ScanCase("float16", [700, 0, 65], 2, 3, 64, tier=900)
    rows = case.rows.copy()
    case.rows[:] = np.iinfo(np.int32).max
    job = case.submit(worker, hold=True)
    case.rows[:] = rows
    worker.start(job)
    worker.wait(job)
    case.check()


@pytest.mark.parametrize("help_", [False, True])
def test_start_call_from_another_thread(worker, case, help_):
    job = case.submit(worker, hold=True)
    before = time.perf_counter()
    thread = start_later(worker, job)
    start, _ = worker.wait(job, help=help_)  # blocks, or the timer would never run
    assert start - before >= 0.04
    thread.join()
    case.check()


def test_start_calls_out_of_order(worker):
    cases = [ScanCase("float16", [100 + i], 1, 2, 64) for i in range(6)]
    jobs = [c.submit(worker, hold=True) for c in cases]
    threads = [start_later(worker, job, 0.06 - 0.01 * i) for i, job in enumerate(jobs)]
    for job, c in zip(jobs, cases, strict=True):
        worker.wait(job)
        c.check()
    for thread in threads:
        thread.join()


def test_late_and_repeated_start_calls_do_nothing(worker, case):
    job = case.submit(worker, hold=True)
    function, data = worker.start_call(job)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    worker.start(job)
    worker.wait(job)
    held = case.submit(worker, hold=True)  # must not be what the late call starts
    call(data)
    call(data)
    time.sleep(0.01)
    assert not worker.done(held)
    worker.start(held)
    worker.wait(held)
    late = case.submit(worker, hold=True)
    function, data = worker.start_call(late)
    worker.close()
    del worker
    call(data)


def test_start_errors(worker, case):
    job = case.submit(worker)
    for start in (worker.start, worker.start_call):
        with pytest.raises(ValueError, match=f"job={job}: must be a held job"):
            start(job)
        with pytest.raises(ValueError, match="job=12345: unknown"):
            start(12345)
    worker.wait(job)
    held = case.submit(worker, hold=True)
    worker.start_call(held)
    with pytest.raises(ValueError, match="without a start call"):
        worker.start_call(held)


def test_waiting_twice_and_unknown_jobs(worker, case):
    job = case.submit(worker)
    worker.wait(job)
    for call in (worker.wait, worker.done):
        for unknown in (job, -1, 0, 7, 1 << 60):
            with pytest.raises(ValueError, match=f"job={unknown}: unknown, or already waited for"):
                call(unknown)


def test_two_threads_cannot_wait_for_one_job(worker, case):
    job = case.submit(worker, hold=True)
    thread = threading.Thread(target=worker.wait, args=(job,))
    thread.start()
    time.sleep(0.05)
    with pytest.raises(ValueError, match="another thread waits"):
        worker.wait(job)
    worker.start(job)
    thread.join()
    case.check()


def test_close_in_mid_job():
    """A long queue, a waiter in the middle of it, and a held job's waiter."""
    worker = _C.ScanWorker(2)
    cases = [ScanCase("float32", [3000], 4, 4, 128) for _ in range(4)]
    jobs = [cases[i % 4].submit(worker) for i in range(4000)]  # seconds of work
    held = cases[0].submit(worker, hold=True)
    errors = []

    def wait(job, help_):
        try:
            worker.wait(job, help=help_)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=a) for a in ((jobs[-1], False), (held, True))]
    for thread in threads:
        thread.start()
    wait_for(lambda: worker.done(jobs[0]))
    closers = [threading.Thread(target=worker.close) for _ in range(2)]
    for thread in closers:
        thread.start()
    for thread in closers + threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 2 and all("was closed before job" in e for e in errors)
    worker.close()
    worker.wait(jobs[0])  # what was done before stays known
    before = cases[3].out.copy()
    time.sleep(0.02)
    assert np.array_equal(before, cases[3].out, equal_nan=True)
    for call in (worker.wait, worker.done, worker.start):
        with pytest.raises(RuntimeError, match="closed"):
            call(jobs[-1])
    with pytest.raises(RuntimeError, match="closed"):
        cases[0].submit(worker)


def test_destruction_closes(case):
    for _ in range(20):
        worker = _C.ScanWorker(2)
        case.submit(worker)
        case.submit(worker, hold=True)
        del worker


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux'")
def test_cores():
    cores = sorted(os.sched_getaffinity(0))
    before = {int(t) for t in os.listdir("/proc/self/task")}
    worker = _C.ScanWorker(3, cores=cores[:2])
    new = sorted({int(t) for t in os.listdir("/proc/self/task")} - before)
    assert [os.sched_getaffinity(t) for t in new] == [{cores[i % len(cores[:2])]} for i in range(3)]
    assert os.sched_getaffinity(0) == set(cores)
    worker.close()
    for core in (-1, 1023, 1 << 20):
        with pytest.raises(ValueError, match=rf"cores\[1\]={core}: must be a core"):
            _C.ScanWorker(2, cores=[cores[0], core])


def exit_code(code: str, **kwargs) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, **kwargs
    )
    return result.returncode, result.stdout + result.stderr


SETUP = """
import os, sys, threading, time
from hybridgen import _C
from tests.kernels.scan_case import ScanCase
worker = _C.ScanWorker(2)
case = ScanCase("float32", [3000], 4, 4, 128)
"""


def test_parked_threads_burn_nothing():
    code = SETUP + (
        "worker.wait(case.submit(worker))\n"
        "time.sleep(0.05); before = time.process_time(); time.sleep(0.3)\n"
        "assert time.process_time() - before < 0.1  # processor time: two spinning threads take up to 0.6\n"
    )
    status, output = exit_code(code)
    assert status == 0, output


def test_interpreter_exit_in_mid_job():
    """With daemon threads inside wait, and a worker that is never collected."""
    code = SETUP + (
        "for _ in range(3000): job = case.submit(worker)\n"
        "held = case.submit(worker, hold=True)\n"
        "sys.keep = worker\n"
        "for args in ((job, False), (held, True)):\n"
        "    threading.Thread(target=worker.wait, args=args, daemon=True).start()\n"
        "time.sleep(0.01)\n"
    )
    status, output = exit_code(code)
    assert status == 0, output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_child_of_a_fork_does_not_hang():
    code = SETUP + (
        "job = case.submit(worker, hold=True)\n"
        "if os.fork() == 0:\n"
        "    for method in (worker.wait, worker.start, worker.done, worker.start_call):\n"
        "        try: method(job)\n"
        "        except RuntimeError as error: assert 'fork' in str(error)\n"
        "        else: os._exit(3)\n"
        "    worker.close()\n"
        "    del worker\n"
        "    own = _C.ScanWorker(1); own.wait(case.submit(own)); case.check()\n"
        "    sys.exit(0)\n"
        "status = os.wait()[1]\n"
        "worker.start(job); worker.wait(job); case.check()\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    status, output = exit_code(code)
    assert status == 0, output


def test_ctrl_c_ends_a_wait():
    code = SETUP + (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "job = case.submit(worker, hold=True)\n"
        f"threading.Timer(0.3, os.kill, [os.getpid(), {int(signal.SIGINT)}]).start()\n"
        "try: worker.wait(job)\n"
        "except KeyboardInterrupt: pass\n"
        "worker.start(job); worker.wait(job); case.check()\n"
    )
    status, output = exit_code(code)
    assert status == 0, output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": 0}, "query=0: must be a non-null address"),
        ({"keys": 0}, "keys=0: must be a non-null address"),
        ({"out": 0}, "out=0: must be a non-null address"),
        ({"out": 4098}, "out=4098: .* a multiple of 4"),
        ({"keys": 4097}, "keys=4097: .* a multiple of 2"),
        ({"key_type": "int3"}, "key_type='int3': must be one of float32, float16, bfloat16, int8, int4, int2"),
        ({"num_heads": 0}, "num_heads=0: must be a positive multiple of num_kv_heads=2"),
        ({"num_heads": 5}, "num_heads=5: must be a positive multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be positive"),
        ({"head_dim": 0}, "head_dim=0: must be a positive multiple of 8"),
        ({"head_dim": 60}, "head_dim=60: must be a positive multiple of 8"),
        ({"lengths": []}, r"len\(lengths\)=0: must be at least 1"),
        ({"lengths": [3, -1]}, r"lengths\[1\]=-1: must be 0 or more"),
        ({"key_strides": (-1, 640, 64)}, r"key_strides\[0\] \(batch\)=-1"),
        ({"key_strides": (1280, -1, 64)}, r"key_strides\[1\] \(head\)=-1"),
        ({"key_strides": (1280, 640, 63)}, r"key_strides\[2\] \(token\)=63: must be at least head_dim=64"),
        ({"out_strides": (9, 10)}, r"out_strides\[0\] \(batch\)=9: must be at least the longest length, 10"),
        ({"out_strides": (60, 9)}, r"out_strides\[1\] \(head\)=9: must be at least the longest length, 10"),
        ({"scale": float("nan")}, "scale=nan: must be finite"),
        ({"rows": 4098, "rows_stride": 10}, "rows=4098: .* a multiple of 4"),
        ({"rows": 4096}, "rows_stride=0: must be at least the longest length, 10"),
        ({"rows": 4096, "rows_stride": 9}, "rows_stride=9: must be at least the longest length, 10"),
    ],
)
def test_wrong_arguments(change, message):
    good = {
        "query": 4096, "keys": 4096, "out": 4096, "key_type": "float16", "num_heads": 6, "num_kv_heads": 2,
        "head_dim": 64, "lengths": [10, 4], "key_strides": (1280, 640, 64), "out_strides": (60, 10),
        "scale": 1.0, "hold": True,
    }  # fmt: skip
    worker = _C.ScanWorker(1)
    worker.submit(**good)  # held, so nothing is read
    worker.submit(**good, rows=4096, rows_stride=10)
    with pytest.raises(ValueError, match=message):
        worker.submit(**(good | change))


@pytest.mark.parametrize("threads", [-1, 5000])
def test_wrong_thread_count(threads):
    with pytest.raises(ValueError, match=f"threads={threads}: must be between 0 and 1024"):
        _C.ScanWorker(threads)


class Layer:
    """Host keys, a query and lists of rows for a LogitWorker; B = 2, Hkv = 2, G = 3, d = 64, N = 300."""

    def __init__(self, transfer_kind, threads=1):
        self.lengths = [40, 7]
        self.telemetry = Telemetry()
        self.transfer = transfer_kind(self.telemetry)
        self.worker = LogitWorker(threads, [], self.transfer, torch.device("cpu"))
        keys = torch.randn(2, 2, 300, 64).half()
        self.keys = HostBuffer(keys, keys)
        self.query = torch.randn(2, 6, 64)
        self.listed = torch.randint(0, 300, (2, 2, 40), dtype=torch.int32)
        host = torch.full_like(self.listed, 299)
        self.rows = HostBuffer(host, host)

    def submit(self, **changed):
        good = {
            "query": self.query, "keys": self.keys, "lengths": self.lengths, "scale": 0.5, "layer": 0,
            "rows": self.rows, "rows_copied": None,
        }  # fmt: skip
        return self.worker.submit(**(good | changed))

    def check(self, logits, lengths, rows=None):
        assert logits.shape == (2, 6, max(lengths)) and logits.dtype == torch.float32
        for b, length in enumerate(lengths):
            for head in range(6):
                keys = self.keys.tensor[b, head // 3].double()
                keys = keys[:length] if rows is None else keys[rows[b, head // 3, :length].long()]
                want = 0.5 * keys @ self.query[b, head].double()
                torch.testing.assert_close(logits[b, head, :length].double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("transfer_kind", [ImmediateTransfer, LazyTransfer])
def test_logit_worker_scans_listed_rows(transfer_kind, threads):
    """And all rows again with the same buffers; bytes count what was scanned."""
    layer = Layer(transfer_kind, threads)
    copied = layer.transfer.copy(layer.rows.device_view, layer.listed, "d2h")
    ticket = layer.submit(rows_copied=copied)
    layer.check(ticket.logits().values, layer.lengths, layer.listed)
    assert layer.telemetry.bytes_moved["cpu_read"] == (40 + 7) * 2 * 64 * 2
    ticket.release(Ticket())

    full = layer.submit(lengths=[300, 250], rows=None)
    assert full._buffers is ticket._buffers
    layer.check(full.logits().values, [300, 250])
    full.release(Ticket())
    assert layer.telemetry.bytes_moved["cpu_read"] == (40 + 7 + 300 + 250) * 2 * 64 * 2

    again = layer.submit(lengths=[0, 3])  # the rows are there already
    layer.check(again.logits().values, [0, 3], layer.listed)
    again.release(Ticket())
    none = layer.submit(lengths=[0, 0])
    assert none.logits().values.shape == (2, 6, 0)
    layer.worker.close()


def test_logit_worker_names_wrong_rows():
    layer = Layer(ImmediateTransfer)
    rows = layer.rows.tensor
    for wrong, message in (
        (rows.long(), "rows: torch.int64"),
        (rows.transpose(0, 1), "rows: .* contiguous"),
        (rows[:1], "rows: shape .* does not match keys"),
        (rows[:, 0].contiguous(), "rows: shape .* does not match keys"),
        (rows[..., :39].contiguous(), r"lengths: \[40, 7\] do not fit rows"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.submit(rows=HostBuffer(wrong, wrong))
    wide = torch.zeros(2, 2, 400, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lengths: .* do not fit keys"):  # the logits' buffer is as wide as the keys
        layer.submit(lengths=[301, 7], rows=HostBuffer(wide, wide))
    layer.worker.close()
