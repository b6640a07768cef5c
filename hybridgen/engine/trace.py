"""`--trace`: the traced decode steps as Chrome trace format JSON, which Perfetto and chrome://tracing open.

One row for the steps, one a stream, one for the scan worker, one for the waits of the host thread; all on one time
base, microseconds from the start of the first step. On CUDA a span of a stream lasts from the event before its first
kernel to the event after its last: gaps between the launches, and waits for another stream inside, are part of it.
`experiments/read_trace.py` reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridgen.output import write_whole
from hybridgen.telemetry import StepTimings, TracedSpan

TRACED_STEPS = 64  # the first of a run: this bounds the memory that a trace takes
_ROWS = ("step", "compute", "choice", "beside", "weights", "scan worker", "host")  # top to bottom; others come below
_PROCESS = 1


def build_trace(steps: Sequence[StepTimings], about: Mapping[str, Any]) -> dict[str, Any]:
    """A complete event ("X") for each span of the traced steps and for each step itself, rows named by metadata.

    about: what the file says of the run that it is of.
    """
    traced = [(index, step) for index, step in enumerate(steps) if step.spans]
    base_s = traced[0][1].start_s if traced else 0.0
    used = {span.row for _, step in traced for span in step.spans}
    rows = [*_ROWS, *sorted(used.difference(_ROWS))]
    events = [_named("process_name", 0, name="hybridgen")]
    for thread, row in enumerate(rows, start=1):
        if row == "step" or row in used:
            events += [_named("thread_name", thread, name=row), _named("thread_sort_index", thread, sort_index=thread)]
    for index, step in traced:
        whole = TracedSpan("step", 0, "step", step.start_s, step.start_s + step.step_ms / 1e3, 0)
        events.append(_complete(whole, 1, base_s, {"step": index}))
        ends = dict.fromkeys(rows, 0.0)
        for span in step.spans:
            arguments = {"layer": span.layer, "step": index} | ({"bytes": span.bytes} if span.bytes else {})
            if span.end_s > ends[span.row]:
                # Threads that are done with one scan begin the next; in a row it begins where the one before ends.
                span = span._replace(start_s=max(span.start_s, ends[span.row]))
                ends[span.row] = span.end_s
            events.append(_complete(span, rows.index(span.row) + 1, base_s, arguments))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**about, "steps_traced": len(traced), "steps": len(steps)},
    }


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """An event a line; whole or not at all."""
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace["traceEvents"])
    rest = json.dumps({name: value for name, value in trace.items() if name != "traceEvents"})
    write_whole("--trace", path, f'{{"traceEvents":[\n{events}\n],{rest[1:]}\n')


def _complete(span: TracedSpan, thread: int, base_s: float, arguments: dict[str, int]) -> dict[str, Any]:
    start, end = (round((moment - base_s) * 1e6, 3) for moment in (span.start_s, span.end_s))
    return {
        "ph": "X",
        "name": span.stage,
        "cat": span.row,
        "ts": start,
        "dur": round(end - start, 3),
        "pid": _PROCESS,
        "tid": thread,
        "args": arguments,
    }


def _named(what: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": arguments}
