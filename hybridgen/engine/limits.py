"""How fast a decode step could be, and what the GPU waited for: contracts.md, "limit_ms" and "gpu_idle_fraction".

The time of the GPU's own kernels is measured by the profiler in one more step: the events around a stage see launch
gaps and waits as well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch
from hybridgen.engine.llm import LLM
from hybridgen.machine import MachineCeilings, limit_ms

_SCORE = "_score"  # begins the name of what runs in the stream of the choice, beside the compute stream

log = logging.getLogger(__name__)


def kernel_ms(llm: LLM, batch: Batch, tokens: Tensor) -> float | None:
    """Decode `tokens` [B], one more each, and add up the kernels that do not read host memory.

    These are all of the compute stream, and the choice's own. None without a GPU or a profiler that sees it.
    """
    if llm.device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(llm.device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with llm.call_by_call(), torch.profiler.profile(activities=activities) as profiler:
            marker = torch.ones(1, device=llm.device)  # the compute stream, as the profiler numbers it
            llm.decode(batch, tokens)
            stream.synchronize()
        del marker
        kineto: Any = profiler.profiler
        events = [event for event in kineto.kineto_results.events() if "CUDA" in str(event.device_type())]
    except RuntimeError as error:
        log.warning("the profiler sees no GPU kernels (%s): gpu_idle_fraction is not known", error)
        return None
    if not events:
        log.warning("the profiler sees no GPU kernels: gpu_idle_fraction is not known")
        return None
    streams = {events[0].device_resource_id()}
    streams |= {event.device_resource_id() for event in events if event.name().startswith(_SCORE)}
    own = [event for event in events if event.device_resource_id() in streams]
    return float(sum(event.duration_ns() for event in own)) / 1e6


def limits(report: Mapping[str, Any], gpu_ms: float | None, ceilings: MachineCeilings | None) -> dict[str, Any]:
    """The report's `gpu_kernels_ms`, `gpu_idle_fraction` and `limit_ms`; null where what they need is not known.

    report: bytes, times and plan of the run; gpu_ms: as of `kernel_ms`.
    """
    step_ms, moved = report["decode_ms_per_token"]["median"], report["bytes_per_token"]
    known = None
    if ceilings is not None:
        plan = report["memory_plan"]
        streamed = plan["host"].get("streamed weights", 0) + plan["disk"].get("weights", 0)
        streamed += report["streamed_kv_bytes_per_token"]
        fetched = report["fetched_bytes_per_token"]
        known = limit_ms(
            ceilings,
            scan_bytes=moved["cpu_read"],
            logits_bytes=max(0.0, moved["h2d"] - fetched - streamed),
            fetched_bytes=fetched,
            streamed_bytes=streamed,
            gpu_ms=gpu_ms,
        )
    waited = report["waited_ms_per_token"]
    return {
        "gpu_kernels_ms": gpu_ms,
        "gpu_idle_fraction": idle_fraction(gpu_ms, step_ms, waited["link_wait"], waited["scan_wait"]),
        "limit_ms": known,
    }


def idle_fraction(
    gpu_ms: float | None, step_ms: float | None, link_wait_ms: float, scan_wait_ms: float
) -> dict[str, float] | None:
    """Shares of a step in which the GPU does no work of its own, by cause; None where that is not known.

    link_wait: the compute stream stood for fetched rows; scan_wait: so much of that as these had to wait for scores;
    launch_gap: the rest.
    """
    if gpu_ms is None or not step_ms:
        return None
    idle = max(0.0, step_ms - gpu_ms)
    waiting = min(idle, link_wait_ms)
    scan_wait = min(waiting, scan_wait_ms)
    parts = {"total": idle, "link_wait": waiting - scan_wait, "scan_wait": scan_wait, "launch_gap": idle - waiting}
    return {name: spent / step_ms for name, spent in parts.items()}
