"""Log-likelihoods on CUDA are those of the CPU: by prefill and by decode, with a prefix that all have in common."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from hybridgen.engine.llm import LLM
from hybridgen.evaluation.loglikelihood import Request, Score, make_request, score
from tests.equivalence.tiny_models import random_tokens, save_tiny_model

STRATEGIES: dict[str, dict[str, object]] = {
    "hybridgen": {"selection.keep": 0.3, "selection.keep_mass": None, "selection.min_keep": 0},
    "aoc": {},
    "h2o": {"eviction.heavy": 20, "eviction.recent": 8},
    "streaming-llm": {"eviction.recent": 8},
}


def requests() -> list[Request]:
    prefix = random_tokens(96, 150, seed=0)
    made = []
    for seed, (context, choices) in enumerate(((40, (5, 9)), (17, (1, 1)), (3, (20, 2, 7))), start=1):
        ids = random_tokens(96, context, seed)
        for index, tokens in enumerate(choices):
            whole = [*prefix, *ids, *random_tokens(96, max(tokens, 3), 10 * seed + index)[:tokens]]
            made.append(make_request(whole, 150 + context, 150, 1000))
    return made


def scores(model: Path, device: str) -> list[list[Score]]:
    settings: dict[str, object] = {"runtime.device": device, "model.dtype": "float32", "cache.gpu_window": 32}
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(str(model), settings, "full"))]
        for strategy, overrides in STRATEGIES.items():
            with LLM(str(model), {**settings, **overrides}, strategy) as other:
                config = other.config
            llms.append(stack.enter_context(llms[0].sharing(config)))
        return score(llms, requests())


def test_scores_of_the_cpu(directory: Path) -> None:
    model = save_tiny_model("llama-gqa2", directory)
    for name, found, expected in zip(["full", *STRATEGIES], scores(model, "cuda"), scores(model, "cpu"), strict=True):
        values = ([one.log_likelihood for one in some] for some in (found, expected))
        assert next(values) == pytest.approx(next(values), abs=2e-3), name
        assert [one.is_greedy for one in found] == [one.is_greedy for one in expected], name
