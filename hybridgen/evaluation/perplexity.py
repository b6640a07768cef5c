"""Perplexity through the decode path: teacher-forced tokens after an exact prefill that all conditions share.

A passage is `context + decode + 1` tokens: the context is prefilled, `decode` tokens are fed one by
one, and each must predict the next. So every token that is scored went through decode attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.errors import ConfigError
from hybridgen.evaluation import paired


@dataclass(frozen=True)
class Passage:
    """A piece of a text."""

    first: int  # the text's token that it begins with
    ids: list[int]  # context + decode + 1 of them, BOS included where the model wants one


@dataclass
class Measurement:
    """One condition on some passages, in their order; figures are means over a passage's scored tokens."""

    losses: list[float] = field(default_factory=list)  # nats a token
    divergences: list[float] = field(default_factory=list)  # KL(full || this), nats a token
    agreements: list[float] = field(default_factory=list)  # share of tokens with full attention's argmax
    attended: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    """Passages of a batch, and `AttentionStatistics.summary` of its steps."""

    def extend(self, other: Measurement) -> None:
        """Append the other's passages."""
        self.losses += other.losses
        self.divergences += other.divergences
        self.agreements += other.agreements
        self.attended += other.attended


def cut_passages(ids: Sequence[int], start: Sequence[int], context: int, decode: int, passages: int) -> list[Passage]:
    """Non-overlapping passages, each in the middle of its share of the text.

    ids: the whole text; start: what the model wants in front of any text (BOS), counted in the context.
    ConfigError if the text or the context is too short.
    """
    length = context + decode + 1 - len(start)
    if context <= len(start):
        raise ConfigError(f"--context {context}: more than {len(start)} needed, the model's own first tokens")
    if passages * length > len(ids):
        raise ConfigError(
            f"the text has {len(ids)} tokens and holds {len(ids) // length} passages of {length} "
            f"(context + decode + 1 to predict), not {passages}: give a smaller --passages or --context"
        )
    firsts = [((2 * index + 1) * len(ids) // passages - length) // 2 for index in range(passages)]
    return [Passage(first, [*start, *ids[first : first + length]]) for first in firsts]


@torch.inference_mode()
def measure(
    llms: Sequence[LLM],
    passages: Sequence[Passage],
    decode: int,
    on_decoded: Callable[[int], None] = lambda tokens: None,
) -> list[Measurement]:
    """Log-losses of `decode` tokens of each passage for each LLM, all from one prefill by the first.

    The LLMs share their weights; the first is full attention, which the others are compared with.
    on_decoded: called with the number of tokens after each step of each LLM.
    """
    full, count = llms[0], len(passages)
    ids = torch.tensor([passage.ids for passage in passages])
    context = ids.shape[1] - decode - 1
    batches = [llm.new_batch([context + decode] * count) for llm in llms]
    full.prefill(batches[0], ids[:, :context].tolist(), mirrors=batches[1:])
    tokens = ids[:, context:].to(full.device)
    shape = (len(llms), count)
    losses, divergences, agreements = (torch.zeros(shape, dtype=torch.float64, device=full.device) for _ in range(3))
    statistics = [AttentionStatistics() for _ in llms]
    for step in range(decode):
        fed, target = tokens[:, step], tokens[:, step + 1 : step + 2]
        for index, (llm, batch) in enumerate(zip(llms, batches, strict=True)):
            llm.telemetry.begin_step()
            log_p = torch.log_softmax(llm.decode(batch, fed).double(), dim=-1)
            statistics[index].observe(batch)
            losses[index] -= log_p.gather(1, target).squeeze(1)
            if index == 0:
                full_log_p, full_choice = log_p, log_p.argmax(-1)
            divergences[index] += torch.sum(full_log_p.exp() * (full_log_p - log_p), dim=-1)
            agreements[index] += log_p.argmax(-1) == full_choice
            on_decoded(count)
    return [
        Measurement(
            (losses[index] / decode).tolist(),
            (divergences[index] / decode).tolist(),
            (agreements[index] / decode).tolist(),
            [(count, statistics[index].summary())],
        )
        for index in range(len(llms))
    ]


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One result a condition, in the form of the report. The first measurement is full attention.

    Paired with full attention, and from the third on also with the second, the first condition.
    """
    full = measurements[0]
    return [
        {
            "passages": len(measured.losses),
            "perplexity": asdict(paired.perplexity(measured.losses)),
            "against_full": _against(measured, full, None) if index > 0 else None,
            "against_first": _against(measured, measurements[1], full) if index > 1 else None,
            "kl_nats_per_token": asdict(paired.mean(measured.divergences)) if index > 0 else None,
            "argmax_agreement": asdict(paired.mean(measured.agreements)) if index > 0 else None,
            "budget": _weighted(measured, "budget"),
            "kept_fraction": _weighted(measured, "kept_fraction"),
            "covered_mass": {
                "mean": _weighted(measured, "mass_mean"),
                "min": _least(measured, "mass_min"),
                "true_probe": _weighted(measured, "mass_true"),
            },
        }
        for index, measured in enumerate(measurements)
    ]


def _against(measured: Measurement, other: Measurement, full: Measurement | None) -> dict[str, Any]:
    """Changes against another condition: relative (percent), in perplexity, in percentage points of full."""
    ours, theirs = measured.losses, other.losses
    changes = {
        "percent": asdict(paired.percent_change(ours, theirs)),
        "perplexity": asdict(paired.perplexity_difference(ours, theirs)),
    }
    if full is not None:
        changes["percentage_points"] = asdict(paired.percentage_points(ours, theirs, full.losses))
    return changes


def _weighted(measured: Measurement, name: str) -> float | None:
    known = [(count, summary[name]) for count, summary in measured.attended]
    parts = [(count, value) for count, value in known if value is not None]
    total = sum(count for count, _ in parts)
    return sum(count * value for count, value in parts) / total if total else None


def _least(measured: Measurement, name: str) -> float | None:
    values = [summary[name] for _, summary in measured.attended]
    return min((value for value in values if value is not None), default=None)
