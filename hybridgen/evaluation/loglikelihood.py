"""How likely a model finds a continuation of a context, with the strategy at work on both.

What stands before the question (few-shot examples) is prefilled, as it would be in a long prompt; the rest of the
context and the continuation go token by token through decode steps, teacher forced. Full attention attends to
everything either way: there the rest goes through a second prefill, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch
from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.errors import ConfigError
from hybridgen.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """ids: context and continuation; the first `context` of them are the context, the first `prefilled` are
    prefilled: at least one token, and not the last one of the context, unless that is all there is."""

    ids: tuple[int, ...]
    context: int
    prefilled: int
    cut: int = 0  # tokens that were left out at the beginning: the model has no positions for them

    @property
    def steps(self) -> int:
        """Tokens that are fed after the prefill; the last token is not."""
        return len(self.ids) - 1 - self.prefilled

    @property
    def targets(self) -> tuple[int, ...]:
        """Of the continuation, those that follow a token fed after the prefill: all, as a rule."""
        return self.ids[max(self.context, self.prefilled + 1) :]


@dataclass(frozen=True)
class Score:
    """Of one continuation. log_likelihood: nats, the sum over its tokens; is_greedy: each is the likeliest."""

    log_likelihood: float
    is_greedy: bool


def encode(
    tokenizer: Tokenizer,
    prefix: str,
    context: str,
    continuation: str,
    decode_from: int | None,
    most_tokens: int,
) -> Request:
    """The request for `continuation` after prefix + context, by the rules of lm-evaluation-harness.

    Context and continuation are encoded together; the continuation is what lies beyond as many tokens as the context
    has alone, and spaces at the context's end belong to the continuation. decode_from: prefill all but so many tokens
    of the context; None: the prefix, or all but one token where there is none. Of more than `most_tokens` fed tokens,
    the first ones are left out.
    """
    whole = prefix + context
    kept = whole.rstrip()
    ids = tokenizer.encode(whole + continuation)
    length = len(tokenizer.encode(kept))
    if decode_from is not None:
        prefilled = length - decode_from
    elif prefix:
        prefilled = _shared(tokenizer.encode(prefix), ids)
    else:
        prefilled = length - 1
    return make_request(ids, length, prefilled, most_tokens)


def make_request(ids: Sequence[int], context: int, prefilled: int, most_tokens: int) -> Request:
    """ids, of which `context` are the context, cut to the model's positions; prefilled: as near to this as can be."""
    if context < 1 or context >= len(ids):
        raise ConfigError(f"a context of {context} tokens in {len(ids)}: both context and continuation need one")
    cut = max(0, len(ids) - 1 - most_tokens)
    if cut >= context:
        raise ConfigError(
            f"a continuation of {len(ids) - context} tokens does not fit into the model's {most_tokens} positions"
        )
    context -= cut
    prefilled = max(1, min(prefilled - cut, context - 1))
    return Request(tuple(ids[cut:]), context, prefilled, cut)


def _shared(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """Tokens that both begin with: the prefix's last one may have been merged with what follows."""
    for index, (one, other) in enumerate(zip(prefix, ids, strict=False)):
        if one != other:
            return index
    return min(len(prefix), len(ids))


def cut_batches(groups: Sequence[Sequence[Request]], sequences: int) -> list[list[int]]:
    """Batches of groups (by their index) of up to `sequences` requests, or one group if that has more.

    A group's requests, the choices of a question, stay together: they share their context. Groups that take as many
    decode steps come together, the longest first.
    """

    def size(index: int) -> tuple[int, int, int]:
        group = groups[index]
        return max(one.steps for one in group), max(len(one.ids) for one in group), -index

    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(groups)), key=size, reverse=True):
        if len(groups[index]) > room:
            batches.append([])
            room = max(sequences, len(groups[index]))
        batches[-1].append(index)
        room -= len(groups[index])
    return batches


def capacities(requests: Sequence[Request]) -> list[int]:
    """Tokens of each sequence of a batch: all take as many steps as the one that takes the most."""
    steps = max(max(one.steps for one in requests), 1)
    return [one.prefilled + steps for one in requests]


@torch.inference_mode()
def score(
    llms: Sequence[LLM],
    requests: Sequence[Request],
    statistics: Sequence[AttentionStatistics] = (),
    on_step: Callable[[int], None] = lambda sequences: None,
) -> list[list[Score]]:
    """One batch, for each LLM: all continue from one prefill by the first.

    statistics: one an LLM, told of each decode step. on_step: called with the number of sequences after each step, or
    with that times the steps after a prefill that takes their place.
    """
    rooms = capacities(requests)
    batches = [llm.new_batch(rooms) for llm in llms]
    logits = llms[0].prefill(batches[0], [one.ids[: one.prefilled] for one in requests], mirrors=batches[1:])
    results = []
    for index, (llm, batch) in enumerate(zip(llms, batches, strict=True)):
        tally = _Tally(requests, logits)
        if llm.config.attention.executor == "full":
            _prefill_rest(llm, batch, requests, tally)
            on_step(len(requests) * max(one.steps for one in requests))
        else:
            _decode_rest(llm, batch, requests, tally, statistics[index] if statistics else None, on_step)
        results.append(tally.scores())
    return results


class _Tally:
    """Sums over each sequence's continuation, on the device: what is read earlier waits for the GPU."""

    def __init__(self, requests: Sequence[Request], logits: Tensor) -> None:
        """logits: after the prefill, float32 [B, vocab]. They count where the continuation begins right there."""
        self._sums = torch.zeros(len(requests), dtype=torch.float64, device=logits.device)
        self._greedy = torch.ones(len(requests), dtype=torch.bool, device=logits.device)
        begins = [one.prefilled == one.context for one in requests]
        if any(begins):
            self.add(logits, *self.tensors([one.ids[one.prefilled] for one in requests], begins))

    def tensors(self, targets: Sequence[int], counts: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """On the device: int64 [B] and bool [B]."""
        device = self._sums.device
        return torch.tensor(targets, device=device), torch.tensor(counts, device=device)

    def add(self, logits: Tensor, targets: Tensor, counts: Tensor) -> None:
        """One token of each sequence, where it counts."""
        log_p = torch.log_softmax(logits, dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        self._sums += torch.where(counts, log_p, 0.0)
        self._greedy &= (logits.argmax(-1) == targets) | ~counts

    def add_all(self, log_p: Tensor, likeliest: Tensor, lengths: Sequence[int]) -> None:
        """Tokens of all sequences end to end, lengths[b] of each."""
        for index, (some, hits) in enumerate(zip(log_p.split(lengths), likeliest.split(lengths), strict=True)):
            self._sums[index] += some.double().sum()
            self._greedy[index] &= hits.all()

    def scores(self) -> list[Score]:
        return [Score(*pair) for pair in zip(self._sums.tolist(), self._greedy.tolist(), strict=True)]


def _prefill_rest(llm: LLM, batch: Batch, requests: Sequence[Request], tally: _Tally) -> None:
    """A prefill needs a token: where none is left to be fed, one whose result is not looked at."""
    rest = [one.ids[one.prefilled : -1] or one.ids[-1:] for one in requests]
    targets = [one.targets for one in requests]
    log_p, likeliest = llm.prefill_scored(batch, rest, targets)
    tally.add_all(log_p, likeliest, [len(some) for some in targets])


def _decode_rest(
    llm: LLM,
    batch: Batch,
    requests: Sequence[Request],
    tally: _Tally,
    statistics: AttentionStatistics | None,
    on_step: Callable[[int], None],
) -> None:
    """Sequences that end early are fed their last token again; those results are not looked at."""
    steps = max(one.steps for one in requests)
    ids = torch.tensor(
        [[one.ids[min(one.prefilled + at, len(one.ids) - 1)] for one in requests] for at in range(steps + 1)]
    )
    counts = torch.tensor(
        [[one.context <= one.prefilled + at < len(one.ids) for one in requests] for at in range(steps + 1)]
    )
    ids, counts = ids.to(llm.device), counts.to(llm.device)
    for step in range(steps):
        llm.telemetry.begin_step()
        logits = llm.decode(batch, ids[step])
        if statistics is not None:
            statistics.observe(batch)
        tally.add(logits, ids[step + 1], counts[step + 1])
        on_step(len(requests))
