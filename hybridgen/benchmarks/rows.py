"""What a measurement gives, and the scan threads that are measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridgen import _C
from hybridgen.errors import ConfigError

#: Called with what comes next, once for each of the steps that were announced.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One measurement. ms: of one scan, copy or walk; gbps: 10^9 bytes of its input a second.

    Null: what has no key type or threads; torch_gbps where torch has no way of the same; fraction_of_ceiling where
    no ceiling was measured. fraction_beside: of the rate of the best read loop between the same walks, the median: a
    neighbour who takes a part of the bandwidth takes it from both. Null where none was measured. written_per_read: of a
    scan, bytes of logits for a byte of its input; they cross the memory's bus, too.
    """

    kernel: str
    key_type: str | None
    shape: str
    threads: int | None
    isa: str | None
    ms: float
    gbps: float
    fraction_of_ceiling: float | None = None
    fraction_beside: float | None = None
    torch_gbps: float | None = None
    written_per_read: float | None = None


class Span(NamedTuple):
    """Bytes moved from one moment of perf_counter to another."""

    start_s: float
    end_s: float
    moved_bytes: float


def rate(spans: list[Span]) -> float:
    """Bytes a second from the first start to the last end."""
    took_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return sum(span.moved_bytes for span in spans) / took_s


def rates_together(first: list[Span], second: list[Span], least_s: float = 0.02) -> tuple[float, float]:
    """Bytes a second of each while both ran; a span that began before or ended after counts in part.

    ConfigError: they ran together for less than `least_s`.
    """
    start_s = max(min(span.start_s for span in spans) for spans in (first, second))
    end_s = min(max(span.end_s for span in spans) for spans in (first, second))
    if end_s - start_s < least_s:
        raise ConfigError(f"two transfers ran together for {1e3 * (end_s - start_s):.1f} ms only: give a larger --gib")

    def within(span: Span) -> float:
        shared_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        return span.moved_bytes * max(0.0, shared_s) / (span.end_s - span.start_s)

    one, other = (sum(map(within, spans)) / (end_s - start_s) for spans in (first, second))
    return one, other


def cores_for(threads: int) -> list[int]:
    """Where the engine pins so many scan threads: the first core, if it can be spared, is for whoever feeds the GPU."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[1:] if threads < len(cores) else cores


class Scanner:
    """The engine's scan threads, given many jobs at once: no Python between two scans."""

    def __init__(self, threads: int, isa: str = "") -> None:
        """isa: a kernel variant; empty for the one that the engine uses. ConfigError: none that runs here."""
        try:
            self._pool = _C.ScanWorker(threads, cores_for(threads), isa)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.threads, self.isa = threads, str(self._pool.isa)

    def submit(self, jobs: Iterable[dict[str, Any]]) -> list[int]:
        """Arguments of `_C.ScanWorker.submit`, each."""
        return [int(self._pool.submit(**job)) for job in jobs]

    def spans(self, jobs: list[int]) -> list[Span]:
        """Wait for them, for the last one first: then none of the others wakes the waiting thread."""
        return [Span(*self._pool.wait_and_count(job, False)) for job in reversed(jobs)][::-1]

    def close(self) -> None:
        self._pool.close()
