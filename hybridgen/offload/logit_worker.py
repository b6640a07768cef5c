"""The CPU's part of a decode step: scan the host's keys for a query, or attend to its rows, beside everything else.

`submit` hands a job to the C++ threads of `hybridgen._C` and returns at once; the ticket's `logits()`
waits for them and brings the result to the device. The scan starts when the query has reached the
host: on CUDA the copy's stream itself sets a word that the threads watch, and the stream that needs the scores waits
for another word: neither Python nor CUDA's own threads stand between, and the host may be layers ahead.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import LazyTransfer, Ticket, TransferEngine
from hybridgen.selection.host_logits import LINK_TOKENS, HostLogits

try:
    from hybridgen import _C
except ImportError as error:
    raise ImportError(
        "the C++ extension is not built: run `python3 setup.py build_ext --inplace` in the checkout, "
        f"or `bash scripts/quickstart.sh` ({error})"
    ) from None

KEY_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SKETCH_BLOCK = 64  # tokens of a sketch's block, as in kv_cache/quantize.py and cpp_ext/kernels/scan.h
_BYTES_PER_CHANNEL = {"int4": 36, "int2": 20}  # of a sketch's block: codes, scale and zero


@dataclass(frozen=True)
class ScannedKeys:
    """Keys in fewer bits, in host memory, as `kv_cache/quantize.py` makes them.

    kind: "int8" (in place of the keys), "int4" or "int2" (a sketch of them).
    codes: int8 [B, Hkv, N, d], channels contiguous; of a sketch uint8 [B, Hkv, N / 64, bytes of a block], blocks
    contiguous. scales: float32 [B, Hkv, N], tokens contiguous, of int8 only. mean: float32 [B, Hkv, d], contiguous:
    what was taken off the keys; None: nothing was.
    """

    kind: str
    codes: HostBuffer
    scales: HostBuffer | None = None
    mean: HostBuffer | None = None


@dataclass(eq=False)
class _Buffers:
    """What one scan in flight needs, in host memory that the device sees."""

    query: HostBuffer  # float32 [B, Hq, d]
    logits: HostBuffer  # float32 [B, Hq, N], or float16 below `maxima`
    maxima: HostBuffer | None  # float32 [B, Hq, N / 256]
    last_use: Ticket  # after which they may be written again
    place: tuple[int, ...]  # where they are kept when free: shape of the query, and whether the layer is odd
    number: int  # the lowest is used first
    words: tuple[HostBuffer, HostBuffer]  # int32 [1]: the device's start signal, and the scan's end
    turn: int = 0  # of the scan they serve: the value of both words
    view: HostLogits | None = None  # of the logits, as they were last asked for


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


@dataclass
class _AttentionBuffers:
    """What one attention job needs, in host memory that the device sees; float32."""

    query: HostBuffer  # [B, Hq, d]
    context: HostBuffer  # [B, Hq, d]
    log_sum: HostBuffer  # [B, Hq]
    last_use: Ticket  # after which they may be written again


class AttentionTicket:
    """Attention by the CPU, under way."""

    def __init__(self, worker: LogitWorker, job: int, buffers: _AttentionBuffers, layer: int) -> None:
        self._worker, self._job, self._buffers, self._layer = worker, job, buffers, layer

    def partial(self) -> tuple[Tensor, Tensor]:
        """Wait; context [B, Hq, d] and log sum exp(logit) [B, Hq], float32, in host memory that the device reads.

        Read each once. A sequence without host rows has 0 and -inf. Valid until `release`.
        """
        self._worker._finish(self._job, "cpu_attention", self._layer)
        context, log_sum = self._buffers.context.device_view, self._buffers.log_sum.device_view
        self._worker._telemetry.count_bytes("h2d", context.nbytes + log_sum.nbytes)
        return context, log_sum

    def release(self, after: Ticket) -> None:
        """Once `after` is over the result is not needed any more."""
        self._buffers.last_use = after


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
        # Jobs, their layers, and what they read and write: alive until they are known to be over.
        self._unsettled: deque[tuple[int, int, tuple[object, ...]]] = deque()
        if self._signals:
            transfer.telemetry.settle = self._settle
        self._attention: dict[tuple[int, ...], list[_AttentionBuffers]] = {}

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
        for int8 keys (cpp_ext/kernels/avx512_vnni.cpp).
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
        host_keys, tokens, arguments = _described(query, keys, lengths)
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
            buffers.turn = (buffers.turn + 1) % (1 << 32)
            start, done = buffers.words
            try:
                self._pool.watch(job, start.tensor.data_ptr(), done.tensor.data_ptr(), buffers.turn)
                self._unsettled.append((job, layer, (buffers, keys, rows)))
                query_target, last_use = buffers.query.device_view, buffers.last_use
                self._transfer.copy_and_signal(query_target, query, last_use, start, buffers.turn)
            except BaseException:
                # It is scored by some older query, and nobody looks: but those behind it get their turn.
                start.tensor.view(torch.uint32).fill_(buffers.turn)
                raise
            return ScanTicket(self, job, buffers, layer, max(lengths))
        if self._lazy and rows_copied is not None:
            rows_copied.wait()
        self._start_after(copied, job)
        return ScanTicket(self, job, buffers, layer, max(lengths))

    def attend(
        self,
        query: Tensor,
        keys: HostBuffer | ScannedKeys,
        values: HostBuffer,
        lengths: list[int],
        scale: float,
        layer: int,
    ) -> AttentionTicket:
        """Attend to the first lengths[b] rows of each sequence, all of them, in one pass.

        query: [B, Hq, d] on the device; keys: as for `submit`, no sketch; values: [B, Hkv, N, d], channels contiguous,
        in host memory. Both stay alive and unchanged until the ticket's `partial` has returned, which also counts what
        was read. ValueError: what does not fit.
        """
        _, _, arguments = _described(query, keys, lengths)
        rows = values.tensor
        if rows.dim() != 4 or rows.shape[0] != query.shape[0] or rows.shape[3] != query.shape[2]:
            raise ValueError(f"values: shape {tuple(rows.shape)} does not match query {tuple(query.shape)}")
        if rows.dtype not in KEY_TYPES or rows.stride(3) != 1 or max(lengths) > rows.shape[2]:
            raise ValueError(
                f"values: {rows.dtype} {tuple(rows.shape)} for lengths {lengths} (allowed: {list(KEY_TYPES)}, channels "
                "contiguous, a row for each token)"
            )
        buffers = self._next_attention_buffers(tuple(query.shape))
        copied = self._transfer.copy(buffers.query.device_view, query, "d2h")
        if self._lazy:
            buffers.context.tensor.fill_(float("nan"))
            buffers.log_sum.tensor.fill_(float("nan"))
        job = self._pool.submit_attention(
            query=buffers.query.tensor.data_ptr(),
            values=rows.data_ptr(),
            value_type=KEY_TYPES[rows.dtype],
            value_strides=tuple(rows.stride()[:3]),
            context=buffers.context.tensor.data_ptr(),
            log_sum=buffers.log_sum.tensor.data_ptr(),
            scale=scale,
            hold=True,
            **arguments,
        )
        self._start_after(copied, job)
        return AttentionTicket(self, job, buffers, layer)

    def close(self) -> None:
        """The threads stop. Nothing of it is used by the device any more: the caller has seen to that."""
        self._pool.close()
        self._unsettled.clear()
        if self._signals:
            self._telemetry.settle = None

    def _start_after(self, copied: Ticket, job: int) -> None:
        """Have the job start once the query has been copied; with lazy transfers, when it is waited for."""
        if self._lazy:
            copied.wait()
        else:
            self._transfer.call_after(copied, *self._pool.start_call(job))

    def _collect(self, job: int, buffers: _Buffers, layer: int, length: int) -> HostLogits:
        if self._signals:
            with self._telemetry.span("scan_wait", layer, row="choice"):
                self._transfer.await_signal(buffers.words[1], buffers.turn)
        else:
            self._finish(job, "scan", layer)
        logits = buffers.view
        if logits is None or logits.values.shape[2] != length:
            maxima = None if buffers.maxima is None else buffers.maxima.device_view
            logits = buffers.view = HostLogits(buffers.logits.device_view[:, :, :length], maxima)
        self._telemetry.count_bytes("h2d", logits.values.numel() * logits.values.element_size())
        return logits

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
        word_bytes = padded_bytes((1,), torch.int32)
        slab = HostSlab(sum(padded_bytes(*part) for part in parts) + 2 * word_bytes, self._device)
        query, logits, *maxima = (slab.take(*part) for part in parts)
        words = slab.take((1,), torch.int32), slab.take((1,), torch.int32)  # each alone in its cache line
        for word in words:
            word.tensor.zero_()
        return _Buffers(query, logits, maxima[0] if maxima else None, Ticket(), place, next(self._numbers), words)

    def _settle(self) -> None:
        """Count what scans have read and how long they took; they are over, or nearly so."""
        while self._unsettled:
            job, layer, _in_use = self._unsettled.popleft()
            self._count(job, "scan", layer, help_=False)

    def _next_attention_buffers(self, shape: tuple[int, ...]) -> _AttentionBuffers:
        """Two in turn, so that a layer's query may leave before the last layer's context has been read."""
        pair = self._attention.setdefault(shape, [])
        if len(pair) < 2:
            sizes = (shape, shape, shape[:2])
            slab = HostSlab(sum(padded_bytes(size, torch.float32) for size in sizes), self._device)
            query, context, log_sum = (slab.take(size, torch.float32) for size in sizes)
            pair.append(_AttentionBuffers(query, context, log_sum, Ticket()))
        else:
            pair.append(pair.pop(0))
            pair[-1].last_use.wait_host()
        return pair[-1]


def _described(query: Tensor, keys: HostBuffer | ScannedKeys, lengths: list[int]) -> tuple[Tensor, int, dict[str, Any]]:
    """The keys, how many tokens they are of, and what `hybridgen._C` wants to know of them. ValueError: what does not
    fit."""
    batch, heads, dim = query.shape
    if isinstance(keys, ScannedKeys):
        key_type, host_keys, tokens = keys.kind, keys.codes.tensor, _check_scanned(keys, query)
    else:
        host_keys = keys.tensor
        if host_keys.dim() != 4 or host_keys.shape[0] != batch or host_keys.shape[3] != dim:
            raise ValueError(f"keys: shape {tuple(host_keys.shape)} does not match query {tuple(query.shape)}")
        if host_keys.dtype not in KEY_TYPES or host_keys.stride(3) != 1:
            raise ValueError(f"keys: dtype {host_keys.dtype} (allowed: {list(KEY_TYPES)}), channels contiguous")
        key_type, tokens = KEY_TYPES[host_keys.dtype], host_keys.shape[2]
    if len(lengths) != batch or max(lengths) > tokens:
        raise ValueError(f"lengths: {lengths} do not fit keys of shape {tuple(host_keys.shape)}")
    arguments = {
        "keys": host_keys.data_ptr(),
        "key_type": key_type,
        "num_heads": heads,
        "num_kv_heads": host_keys.shape[1],
        "head_dim": dim,
        "lengths": lengths,
        "key_strides": tuple(host_keys.stride()[:3]),
        **(_quantized_arguments(keys) if isinstance(keys, ScannedKeys) else {}),
    }
    return host_keys, tokens, arguments


def _check_scanned(keys: ScannedKeys, query: Tensor) -> int:
    """How many tokens there are. ValueError: what does not fit."""
    batch, _, dim = query.shape
    codes = keys.codes.tensor
    sketch = keys.kind in _BYTES_PER_CHANNEL
    if not sketch and keys.kind != "int8":
        raise ValueError(f"keys: kind '{keys.kind}': must be int8, int4 or int2")
    if codes.dim() != 4 or codes.shape[0] != batch:
        raise ValueError(f"keys: shape {tuple(codes.shape)} does not match query {tuple(query.shape)}")
    width, dtype = (_BYTES_PER_CHANNEL[keys.kind] * dim, torch.uint8) if sketch else (dim, torch.int8)
    if codes.dtype is not dtype or codes.shape[3] != width or codes.stride(3) != 1:
        raise ValueError(
            f"keys: codes are {codes.dtype} {tuple(codes.shape)} with strides {codes.stride()}: "
            f"must be {dtype} [B, Hkv, n, {width}], contiguous in the last dimension"
        )
    if sketch and keys.scales is not None:
        raise ValueError(f"keys: {keys.kind} takes no scales, its blocks have their own")
    if not sketch and keys.scales is None:
        raise ValueError("keys: int8 needs scales")
    if keys.scales is not None:
        scales = keys.scales.tensor
        if scales.dtype is not torch.float32 or scales.shape != codes.shape[:3] or scales.stride(2) != 1:
            raise ValueError(
                f"keys: scales are {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}: "
                f"must be torch.float32 {tuple(codes.shape[:3])}, tokens contiguous"
            )
    if keys.mean is not None:
        mean = keys.mean.tensor
        want = (*codes.shape[:2], dim)
        if mean.dtype is not torch.float32 or mean.shape != want or not mean.is_contiguous():
            raise ValueError(
                f"keys: mean is {mean.dtype} {tuple(mean.shape)} with strides {mean.stride()}: "
                f"must be torch.float32 {want}, contiguous"
            )
    return codes.shape[2] * (SKETCH_BLOCK if sketch else 1)


def _quantized_arguments(keys: ScannedKeys) -> dict[str, Any]:
    """What `hybridgen._C` wants to know of them beside the codes."""
    arguments: dict[str, Any] = {"key_mean": 0 if keys.mean is None else keys.mean.tensor.data_ptr()}
    if keys.scales is not None:
        scales = keys.scales.tensor
        arguments |= {"key_scales": scales.data_ptr(), "scale_strides": tuple(scales.stride()[:2])}
    return arguments
