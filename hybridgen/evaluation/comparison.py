"""One strategy beside full attention: both decode the same tokens, full attention's own greedy continuation.

So step times and next-token distributions come from the same steps. What is compared, is compared between two steps,
outside the time of either.
"""

from __future__ import annotations

import gc
import hashlib
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridgen.engine.generation import generate, timed
from hybridgen.engine.limits import kernel_ms, limits
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import build_report
from hybridgen.machine import read_ceilings
from hybridgen.output import write_whole

UNTIMED_STEPS = 2  # of each round: what is made once (kernels, graphs, buffers) is made in them

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Reference:
    """Full attention's continuation, and how likely it held every token; on the CPU.

    strategy: who computed it. tokens: int64 [B, gen]; the first comes from the prefill. log_p: float32
    [gen - 1, B, vocab], of the tokens after it.
    """

    strategy: str
    tokens: Tensor
    log_p: Tensor

    @property
    def name(self) -> str:
        """A few letters that tell one continuation from another."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:12]

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        buffer = io.BytesIO()
        np.savez(buffer, strategy=np.array(self.strategy), tokens=self.tokens.numpy(), log_p=self.log_p.numpy())
        write_whole("--out", path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Reference:
        """ValueError, or what numpy raises, if the file is damaged."""
        with np.load(path, allow_pickle=False) as content:
            tokens, log_p = torch.from_numpy(content["tokens"]), torch.from_numpy(content["log_p"])
            if tokens.dtype != torch.int64 or log_p.shape[:2] != (tokens.shape[1] - 1, tokens.shape[0]):
                raise ValueError(f"tokens {tuple(tokens.shape)} and log_p {tuple(log_p.shape)} do not belong together")
            return cls(str(content["strategy"]), tokens, log_p)


class _Greedy:
    """The most likely token; the logits are left for whoever looks between two steps."""

    logits: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits = logits
        return logits.argmax(dim=-1)


class _Forced(_Greedy):
    """The next token of a given continuation, once there are logits."""

    def __init__(self, tokens: Tensor) -> None:
        """tokens: int64 [B, gen], on the device."""
        self._tokens = tokens
        self.given = 0

    def __call__(self, logits: Tensor) -> Tensor:
        # Times zero: who waits for the token waits for the logits, as with a sampler.
        token = self._tokens[:, self.given] + 0 * super().__call__(logits)
        self.given += 1
        return token


@torch.inference_mode()
def make_reference(llm: LLM, prompts: Prompts, gen: int, strategy: str) -> Reference:
    """Decode greedily."""
    batch = llm.new_batch([len(ids) + gen for ids in prompts])
    logits = llm.prefill(batch, prompts)
    greedy = _Greedy()
    log_p: list[Tensor] = []

    def note(ids: list[int]) -> None:
        log_p.append(_log_p(greedy.logits))

    generation = generate(llm, batch, logits, gen, greedy, on_token=note)
    return Reference(strategy, torch.tensor(generation.output_ids), torch.stack(log_p[1:]))


@torch.inference_mode()
def measure(
    llm: LLM, prompts: Prompts, reference: Reference, strategy: str, memory_plan: dict[str, Any]
) -> dict[str, Any]:
    """Prefill, then decode the reference's tokens: the report of `run`, with `step_ms` and the `comparison`.

    Times are of all steps but the first two; bytes and distributions of all. memory_plan: `Admission.to_dict`.
    """
    if llm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(llm.device)
    gen = reference.tokens.shape[1]
    batch = llm.new_batch([len(ids) + gen for ids in prompts])
    logits, prefill_s = timed(lambda: llm.prefill(batch, prompts))
    forced = _Forced(reference.tokens.to(llm.device))
    divergences: list[float] = []
    agreements: list[float] = []

    def compare(ids: list[int]) -> None:
        if forced.given < 2:  # the prefill's logits
            return
        expected, found = reference.log_p[forced.given - 2].double(), _log_p(forced.logits).double()
        divergences.append(float(torch.sum(expected.exp() * (expected - found), dim=-1).mean()))
        agreements.append(float((expected.argmax(-1) == found.argmax(-1)).double().mean()))

    generation = generate(llm, batch, logits, gen, forced, on_token=compare)
    report = build_report(llm, batch, generation, prompts, None, prefill_s, memory_plan, strategy, None)
    step_ms = [step.step_ms for step in generation.steps[UNTIMED_STEPS:]]
    report["decode_ms_per_token"] = spread(step_ms)
    report["tokens_per_s"] = 1e3 * len(prompts) / statistics.fmean(step_ms)
    report |= limits(report, kernel_ms(llm, batch, reference.tokens[:, -1]), read_ceilings())
    report["step_ms"] = step_ms
    report["comparison"] = {
        "reference": reference.strategy,
        "reference_name": reference.name,
        "kl_nats": divergences,
        "agreement": agreements,
    }
    for name in ("prompt_ids", "output_ids", "text"):  # the same for all
        del report[name]
    return report


def free_memory(llm: LLM) -> None:
    """After a batch was dropped: its slabs and device memory are there for the next one."""
    gc.collect()
    if llm.device.type == "cuda":
        torch.cuda.empty_cache()


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One strategy's figures from the reports of its rounds."""
    step_ms = [ms for report in rounds for ms in report["step_ms"]]

    def over_rounds(*path: str) -> float | None:
        found = []
        for report in rounds:
            value: Any = report
            for name in path:
                value = None if value is None else value[name]
            if value is not None:
                found.append(value)
        return statistics.fmean(found) if found else None

    peaks = [report["peak_gpu_bytes"] for report in rounds if report["peak_gpu_bytes"] is not None]
    return {
        "rounds": len(rounds),
        "decode_ms_per_token": spread(step_ms),
        "tokens_per_s": 1e3 * rounds[0]["batch"] / statistics.fmean(step_ms),
        "prefill_s": min(report["prefill_s"] for report in rounds),  # what is made once is in the first
        "bytes_per_token": {name: over_rounds("bytes_per_token", name) for name in ("h2d", "d2h", "cpu_read")},
        "gpu_idle_fraction": over_rounds("gpu_idle_fraction", "total"),
        "limit_ms": over_rounds("limit_ms", "limit"),
        "peak_gpu_bytes": max(peaks, default=None),
        "budget": over_rounds("budget"),
        "kept_fraction": over_rounds("kept_fraction"),
        "agreement": statistics.fmean(x for report in rounds for x in report["comparison"]["agreement"]),
        "kl_nats": statistics.fmean(x for report in rounds for x in report["comparison"]["kl_nats"]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, the tenth and the ninetieth percentile (nearest ranks), and the mean."""
    ordered = sorted(values)

    def ranked(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {
        "median": statistics.median(ordered),
        "p10": ranked(0.1),
        "p90": ranked(0.9),
        "mean": statistics.fmean(ordered),
    }


def _log_p(logits: Tensor) -> Tensor:
    """float32 logits [B, vocab] -> log-probabilities on the CPU."""
    return torch.log_softmax(logits.float(), dim=-1).cpu()
