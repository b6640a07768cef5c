"""The CPU's part of a decode step: scan the host's keys for a query, or attend to its rows, beside everything else.

`submit` and `attend` hand a job to the C++ threads of `hybridgen._C` and return at once; the ticket's `logits()` or
`partial()` waits for them and brings the result to the device. A job starts when the query has reached the host: on
CUDA the stream that sends it then sets a word that the threads watch, and the stream that needs the result waits for
another word: neither Python nor CUDA's own threads stand between, and the host may be layers ahead.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.scanned_keys import AttendedRows, ScannedKeys, described
from hybridgen.offload.transfer import LazyTransfer, Ticket, TransferEngine
from hybridgen.selection.host_logits import LINK_TOKENS, HostLogits

try:
    from hybridgen import _C
except ImportError as error:
    raise ImportError(
        "the C++ extension is not built: run `python3 setup.py build_ext --inplace` in the checkout, "
        f"or `bash scripts/quickstart.sh` ({error})"
    ) from None

KEPT_SHAPES = 4  # of requests, whose buffers are kept for the next one of that shape


@dataclass(eq=False, kw_only=True)
class _InFlight:
    """What one job in flight needs, in host memory that the device sees."""

    query: HostBuffer  # float32 [B, Hq, d]
    place: tuple[int, ...]  # where it is kept when free
    number: int  # the lowest is used first
    words: tuple[HostBuffer, HostBuffer]  # int32 [1]: the device's start signal, and the job's end
    turn: int = 0  # of the job it serves: the value of both words


@dataclass(eq=False, kw_only=True)
class _Buffers(_InFlight):
    """Of a scan; place: shape of the query, and whether the layer is odd."""

    last_use: Ticket  # after which they may be written again
    logits: HostBuffer  # float32 [B, Hq, N], or float16 below `maxima`
    maxima: HostBuffer | None  # float32 [B, Hq, N / 256]
    view: HostLogits | None = None  # of the logits, as they were last asked for


@dataclass(eq=False, kw_only=True)
class _AttentionBuffers(_InFlight):
    """Of attention by the CPU; float32. place: shape of the query, and the layer."""

    context: HostBuffer  # [B, Hq, d]
    log_sum: HostBuffer  # [B, Hq]


class ScanTicket:
    """A scan under way."""

    def __init__(self, worker: LogitWorker, job: int, buffers: _Buffers, layer: int, length: int) -> None:
        self._worker, self._job, self._buffers = worker, job, buffers
        self._layer, self._length = layer, length

    def logits(self) -> HostLogits:
        """Of [B, Hq, longest host length].

        For work that is issued to the running stream from now on: with signals it waits there for the scan's end,
        without them the host waits here. Valid until `release`.
        """
        return self._worker._collect(self._job, self._buffers, self._layer, self._length)

    def release(self, after: Ticket) -> None:
        """Once `after` is over the logits are not needed any more."""
        self._buffers.last_use = after
        self._worker._free[self._buffers.place].append(self._buffers)


def selected_isa() -> str:
    """The instruction set that the kernels use: the best this CPU has, or what HYBRIDGEN_CPU_ISA says."""
    return str(_C.selected_isa())


class AttentionTicket:
    """Attention by the CPU, under way."""

    def __init__(self, worker: LogitWorker, job: int, buffers: _AttentionBuffers, layer: int) -> None:
        self._worker, self._job, self._buffers, self._layer = worker, job, buffers, layer

    def partial(self) -> tuple[Tensor, Tensor]:
        """Context [B, Hq, d] and log sum exp(logit) [B, Hq], float32, in host memory that the device reads.

        As of `ScanTicket.logits`: it is there for what is issued from now on. Read each once. A sequence without host
        rows has 0 and -inf. The same tensors for a layer in every step, so that what reads them may be a piece.
        """
        self._worker._await(self._job, self._buffers, "cpu_attention", self._layer)
        context, log_sum = self._buffers.context.device_view, self._buffers.log_sum.device_view
        self._worker._telemetry.count_bytes("h2d", context.nbytes + log_sum.nbytes)
        return context, log_sum

    def release(self) -> None:
        """What was issued to the running stream so far is all that reads the result."""
        self._worker._free_attention[self._buffers.place].append(self._buffers)


class LogitWorker:
    """Owns the scan threads and the buffers between them and the device."""

    def __init__(
        self,
        threads: int,
        cores: list[int],
        transfer: TransferEngine,
        device: torch.device,
        logits_in_half: bool = False,
    ) -> None:
        """threads: 0 means that whoever waits for a scan does it; cores: where to pin, [] for anywhere.

        logits_in_half: they cross a link in float16, below the maxima of blocks.
        """
        try:
            self._pool = _C.ScanWorker(threads, cores)
        except ValueError as error:  # HYBRIDGEN_CPU_ISA names none that this CPU has
            raise ConfigError(str(error)) from None
        self._transfer = transfer
        self._telemetry = transfer.telemetry
        self._device = device
        self._lazy = isinstance(transfer, LazyTransfer)
        self._in_half = logits_in_half
        self._free: dict[tuple[int, ...], list[_Buffers]] = {}
        self._numbers = itertools.count()
        # With signals, the device starts a scan and waits for it; the host only looks at what was measured, in the end.
        self._signals = transfer.signals and threads > 0
        # Jobs, their stages and layers, and what they read and write: alive until they are known to be over.
        self._unsettled: deque[tuple[int, str, int, tuple[object, ...]]] = deque()
        if self._signals:
            transfer.telemetry.settle = self._settle
        self._free_attention: dict[tuple[int, ...], list[_AttentionBuffers]] = {}

    @property
    def threads(self) -> int:
        return int(self._pool.threads)

    @property
    def jobs_by_isa(self) -> dict[str, int]:
        """Scans done, by the instruction set that did them."""
        return dict(self._pool.jobs_by_isa)

    def submit(
        self,
        query: Tensor,
        keys: HostBuffer | ScannedKeys,
        lengths: list[int],
        scale: float,
        layer: int,
        rows: HostBuffer | None = None,
        rows_copied: Ticket | None = None,
    ) -> ScanTicket:
        """Score the first lengths[b] keys of each sequence: logits = scale * q . k.

        query: [B, Hq, d] on the device; keys: [B, Hkv, N, d], channels contiguous, in host memory, or ScannedKeys:
        then a logit is that of the key that the codes and the mean stand for, and the query is rounded, too: for a
        sketch (less than 2 % of what tells logits apart; cpp_ext/kernels/scan.h), and where the CPU has VNNI to 16 bits
        for int8 keys (cpp_ext/kernels/int8_query512.h).
        rows: int32 [B, Hkv, n], contiguous, in host memory: only these keys are scored, each KV head its own, and
        lengths[b] counts listed rows; logit j is that of the key in row rows[b, h, j]. Each must be a row of the keys;
        it is read when the scan runs, and not checked. Sort them for a sketch: each run of rows of one block of 64
        costs the whole block. rows_copied: the transfer that fills `rows`, if one is under way; it must have been
        issued in direction "d2h", whose copies keep their order, so that the query's copy, which starts the scan, comes
        after it. Keys and rows stay unchanged until `logits` has returned or, with signals, until what was issued after
        it is over. What was read is counted then, or when the step is settled: int8's scales with its codes, whole
        blocks of a sketch.
        ValueError: what does not fit.
        """
        batch, heads, dim = query.shape
        host_keys, tokens, arguments = described(query, keys, lengths)
        if rows is not None:
            listed = rows.tensor
            if listed.dtype is not torch.int32 or not listed.is_contiguous():
                raise ValueError(f"rows: {listed.dtype} with strides {listed.stride()}, must be int32, contiguous")
            if listed.dim() != 3 or listed.shape[:2] != host_keys.shape[:2]:
                raise ValueError(f"rows: shape {tuple(listed.shape)} does not match keys {tuple(host_keys.shape)}")
            if max(lengths) > listed.shape[2]:
                raise ValueError(f"lengths: {lengths} do not fit rows of shape {tuple(listed.shape)}")

        buffers = self._take_buffers(batch, heads, tokens, dim, layer)
        copied = Ticket()
        if not self._signals:
            buffers.last_use.wait_host()
            copied = self._transfer.copy(buffers.query.device_view, query, "d2h")
        if self._lazy:
            buffers.logits.tensor.fill_(float("nan"))
        job = self._pool.submit(
            query=buffers.query.tensor.data_ptr(),
            out=buffers.logits.tensor.data_ptr(),
            out_strides=tuple(buffers.logits.tensor.stride()[:2]),
            scale=scale,
            hold=True,
            maxima=0 if buffers.maxima is None else buffers.maxima.tensor.data_ptr(),
            maxima_stride=0 if buffers.maxima is None else buffers.maxima.tensor.shape[2],
            rows=0 if rows is None else rows.tensor.data_ptr(),
            rows_stride=0 if rows is None else rows.tensor.shape[2],
            **arguments,
        )
        if self._signals:
            target, start = buffers.query.device_view, buffers.words[0]
            send = partial(self._transfer.copy_and_signal, target, query, buffers.last_use, start)
            self._start_by_signal(job, buffers, "scan", layer, (keys, rows), send)
        else:
            if self._lazy and rows_copied is not None:
                rows_copied.wait()
            self._start_after(copied, job)
        return ScanTicket(self, job, buffers, layer, max(lengths))

    def attend(self, query: Tensor, rows: AttendedRows, scale: float, layer: int) -> AttentionTicket:
        """Attend to these rows, all of them, in one pass; query: [B, Hq, d] on the device.

        Keys and values stay unchanged as long as a scan's keys, and what was read is counted as a scan's.
        ValueError: a query of another shape than the rows were described for.
        """
        if query.shape != rows.query_shape:
            raise ValueError(f"query: shape {tuple(query.shape)} for rows that go with {tuple(rows.query_shape)}")
        buffers = self._take_attention_buffers(tuple(query.shape), layer)
        copied = Ticket()
        if not self._signals:
            copied = self._transfer.copy(buffers.query.device_view, query, "d2h")
        if self._lazy:
            buffers.context.tensor.fill_(float("nan"))
            buffers.log_sum.tensor.fill_(float("nan"))
        job = self._pool.submit_attention(
            query=buffers.query.tensor.data_ptr(),
            context=buffers.context.tensor.data_ptr(),
            log_sum=buffers.log_sum.tensor.data_ptr(),
            scale=scale,
            hold=True,
            **rows.arguments,
        )
        if self._signals:
            # In the running stream, which has read the result of the job before: half the calls of a copy beside it.
            send = partial(self._transfer.write_and_signal, buffers.query.device_view, query, buffers.words[0])
            self._start_by_signal(job, buffers, "cpu_attention", layer, (rows,), send)
        else:
            self._start_after(copied, job)
        return AttentionTicket(self, job, buffers, layer)

    def close(self) -> None:
        """The threads stop. Nothing of it is used by the device any more: the caller has seen to that."""
        self._pool.close()
        self._unsettled.clear()
        if self._signals:
            self._telemetry.settle = None

    def _start_by_signal(
        self,
        job: int,
        buffers: _InFlight,
        stage: str,
        layer: int,
        reads: tuple[object, ...],
        send: Callable[[int], None],
    ) -> None:
        """The device sends the query and starts the job. reads: what has to live as long as that.

        send: has it do so, by setting the start word to a number.
        """
        buffers.turn = (buffers.turn + 1) % (1 << 32)
        start, done = buffers.words
        try:
            self._pool.watch(job, start.tensor.data_ptr(), done.tensor.data_ptr(), buffers.turn)
            self._unsettled.append((job, stage, layer, (buffers, *reads)))
            send(buffers.turn)
        except BaseException:
            # It is done by some older query, and nobody looks: but those behind it get their turn. Not before the
            # device has set the word for the job before, which would put it back.
            try:
                self._transfer.finish()
            finally:
                start.tensor.view(torch.uint32).fill_(buffers.turn)
            raise

    def _start_after(self, copied: Ticket, job: int) -> None:
        """Have the job start once the query has been copied; with lazy transfers, when it is waited for."""
        if self._lazy:
            copied.wait()
        else:
            self._transfer.call_after(copied, *self._pool.start_call(job))

    def _collect(self, job: int, buffers: _Buffers, layer: int, length: int) -> HostLogits:
        self._await(job, buffers, "scan", layer, row="choice")
        logits = buffers.view
        if logits is None or logits.values.shape[2] != length:
            maxima = None if buffers.maxima is None else buffers.maxima.device_view
            logits = buffers.view = HostLogits(buffers.logits.device_view[:, :, :length], maxima)
        self._telemetry.count_bytes("h2d", logits.values.numel() * logits.values.element_size())
        return logits

    def _await(self, job: int, buffers: _InFlight, stage: str, layer: int, row: str = "compute") -> None:
        """What is issued from now on finds the job done. row: of a trace, where that is waited for."""
        if not self._signals:
            self._finish(job, stage, layer)
            return
        with self._telemetry.span("scan_wait", layer, row=row):
            self._transfer.await_signal(buffers.words[1], buffers.turn)

    def _finish(self, job: int, stage: str, layer: int) -> None:
        """Wait for the job, and count what it read."""
        if self._lazy:
            self._pool.start(job)
        waited_from = time.perf_counter()
        # With a GPU to feed, the thread that feeds it does not scan.
        help_ = self.threads == 0 or self._device.type == "cpu"
        self._count(job, stage, layer, help_)
        self._telemetry.host_time("scan_wait", layer, waited_from, time.perf_counter())

    def _count(self, job: int, stage: str, layer: int, help_: bool) -> None:
        start_s, end_s, read_bytes = self._pool.wait_and_count(job, help_)
        self._telemetry.count_bytes("cpu_read", read_bytes)
        self._telemetry.host_time(stage, layer, start_s, end_s, row="scan worker", moved_bytes=read_bytes)

    def _take_buffers(self, batch: int, heads: int, length: int, dim: int, layer: int) -> _Buffers:
        """The same ones for a layer in every step, so that what reads them may be a piece (offload/pieces.py)."""
        place = (batch, heads, dim, layer % 2)  # while one layer's are read, the next one's are written
        free = self._free.setdefault(place, [])
        if free:
            buffers = min(free, key=lambda some: some.number)
            free.remove(buffers)
            if buffers.logits.tensor.shape[2] >= length:
                return buffers
            buffers.last_use.wait_host()
        # None is free, or it is from a shorter request and makes way.
        length = -(-length // LINK_TOKENS) * LINK_TOKENS
        dtype = torch.float16 if self._in_half else torch.float32
        parts = [((batch, heads, dim), torch.float32), ((batch, heads, length), dtype)]
        if self._in_half:
            parts.append(((batch, heads, length // LINK_TOKENS), torch.float32))
        slab = HostSlab(sum(padded_bytes(*part) for part in parts) + self._word_bytes, self._device)
        query, logits, *maxima = (slab.take(*part) for part in parts)
        return _Buffers(
            query=query, logits=logits, maxima=maxima[0] if maxima else None, last_use=Ticket(), place=place,
            number=next(self._numbers), words=self._words(slab),
        )  # fmt: skip

    _word_bytes = 2 * padded_bytes((1,), torch.int32)

    def _words(self, slab: HostSlab) -> tuple[HostBuffer, HostBuffer]:
        """Each alone in its cache line."""
        words = slab.take((1,), torch.int32), slab.take((1,), torch.int32)
        for word in words:
            word.tensor.zero_()
        return words

    def _settle(self) -> None:
        """Count what jobs have read and how long they took; they are over, or nearly so."""
        while self._unsettled:
            job, stage, layer, _in_use = self._unsettled.popleft()
            self._count(job, stage, layer, help_=False)

    def _take_attention_buffers(self, shape: tuple[int, ...], layer: int) -> _AttentionBuffers:
        """The same ones for a layer in every step; each micro-batch under way has its own."""
        place = (*shape, layer)
        free = self._free_attention.setdefault(place, [])
        if free:
            buffers = min(free, key=lambda some: some.number)
            free.remove(buffers)
            return buffers
        self._drop_other_shapes(place)
        sizes = (shape, shape, shape[:2])
        slab = HostSlab(sum(padded_bytes(size, torch.float32) for size in sizes) + self._word_bytes, self._device)
        query, context, log_sum = (slab.take(size, torch.float32) for size in sizes)
        return _AttentionBuffers(
            query=query, context=context, log_sum=log_sum, place=place, number=next(self._numbers),
            words=self._words(slab),
        )  # fmt: skip

    def _drop_other_shapes(self, place: tuple[int, ...]) -> None:
        """Those of the layer that belong to requests of other shapes, but the last few, make way."""
        others = [other for other in self._free_attention if other[-1] == place[-1] and other != place]
        if len(others) >= KEPT_SHAPES:
            self._transfer.finish()  # the device may still read what they hold
            del self._free_attention[others[0]]
