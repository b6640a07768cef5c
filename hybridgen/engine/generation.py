"""The loop around the engine: prefill a prompt, then draw, decode, repeat until done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from hybridgen.engine.batch import Batch
from hybridgen.engine.schedule import is_steered
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.telemetry import StepTimings, Telemetry

SAMPLE_EVERY = 4  # steps, of which one is timed stage by stage


class Decoder(Protocol):
    """What the loop needs of an LLM."""

    telemetry: Telemetry

    def decode(self, batch: Batch, tokens: Sequence[int] | Tensor) -> Tensor: ...

    def observe(self, batch: Batch, timings: StepTimings) -> None: ...


@dataclass
class Generation:
    """What came out. `steps` are the decode steps; the first token comes from the prefill.

    decode_s: from the first step's beginning to the last one's end, with all that was done in between.
    """

    output_ids: list[list[int]]
    steps: list[StepTimings] = field(default_factory=list)
    decode_s: float = 0.0
    statistics: AttentionStatistics = field(default_factory=AttentionStatistics)
    ended_by: Literal["length", "stop", "interrupt"] = "length"


def generate(
    llm: Decoder,
    batch: Batch,
    logits: Tensor,
    max_new_tokens: int,
    sampler: Callable[[Tensor], Tensor],
    ends: Callable[[list[int]], bool] = lambda ids: False,
    on_token: Callable[[list[int]], None] = lambda ids: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Generation:
    """Decode up to max_new_tokens of each sequence, starting from the prefill's logits [B, vocab].

    ends: whether a sequence's output is complete (EOS, a stop string); it then takes no more tokens.
    on_token: called with each step's token ids. interrupted: asked after each step.
    """
    result = Generation([[] for _ in range(logits.shape[0])])
    telemetry = llm.telemetry
    # A GPU's marks lengthen a step by milliseconds: where nobody steers by them, only some steps have them.
    sparing = telemetry.clock.is_costly and not is_steered(batch.schedule) and max_new_tokens > 2 * SAMPLE_EVERY
    telemetry.sample_every = SAMPLE_EVERY if sparing else 1
    running = [True] * logits.shape[0]
    tokens = sampler(logits)
    began = time.perf_counter()
    for index in range(max_new_tokens):
        if index:
            tokens = sampler(llm.decode(batch, tokens))
        ids: list[int] = tokens.tolist()
        if index:
            result.statistics.observe(batch)
            result.steps.append(telemetry.end_step())
            llm.observe(batch, result.steps[-1])
            result.decode_s = time.perf_counter() - began
        for sequence, token in enumerate(ids):
            if running[sequence]:
                result.output_ids[sequence].append(token)
                running[sequence] = not ends(result.output_ids[sequence])
        on_token(ids)
        if not any(running):
            result.ended_by = "stop"
            break
        if interrupted():
            result.ended_by = "interrupt"
            break
        telemetry.begin_step()
        if not index:
            began = time.perf_counter()
    return result


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Result and seconds, waiting until the device has it."""
    start = time.perf_counter()
    result = work()
    result[:1].sum().item()
    return result, time.perf_counter() - start
