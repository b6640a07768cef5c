"""A live cache accepts further turns: chunks attend to everything before them, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.equivalence.against_engine import LOGITS_TOLERANCE, Case, Turns, engine
from tests.equivalence.dense_simulation import Settings, prefill_host_length
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo


@pytest.mark.parametrize(
    ("name", "settings", "strategy", "overrides"),
    [
        ("opt", Settings(keep=1.0, window=16), "hybridgen", {}),
        ("llama-gqa2", Settings(keep=1.0, window=64, lookahead="off"), "hybridgen", {}),
        ("qwen2", Settings(keep=None, keep_mass=1.0, window=1), "hybridgen", {"runtime__prefill_chunk": 33}),
        ("llama-gqa3", Settings(window=16), "full", {"runtime__micro_batch": 1}),
        ("llama-gqa3", Settings(window=16), "aog", {"runtime__micro_batch": 1}),
        ("llama-gqa2", Settings(window=64), "aog", {}),
        ("qwen2", Settings(window=16), "aoc", {"runtime__prefill_chunk": 33}),
        ("opt", Settings(window=1), "aoc", {"runtime__transfer": "immediate"}),
    ],
    ids=["keep", "off", "mass, chunks", "full", "aog", "aog, window 64", "aoc, chunks", "aoc, immediate"],
)
def test_turns_equal_one_text_at_full_budget(
    zoo: ModelZoo, name: str, settings: Settings, strategy: str, overrides: dict[str, Any]
) -> None:
    """Appends with decode steps in between; every row of logits against transformers."""
    texts = [random_tokens(zoo.dense(name).vocab_size, length, seed=length) for length in (300, 270)]
    with torch.inference_mode():
        expected = [zoo.hf(name, torch.float64)(torch.tensor([text])).logits[0] for text in texts]
    with engine(zoo.directory(name), settings, strategy, **overrides) as llm:
        batch = llm.new_batch([len(text) for text in texts])
        done = [0, 0]

        def check(logits: torch.Tensor, turn: list[int]) -> None:
            for i, length in enumerate(turn):
                done[i] += length
                assert (logits[i].double() - expected[i][done[i] - 1]).abs().max() < LOGITS_TOLERANCE, done
            assert batch.lengths == done

        for turn, steps in (([120, 90], 7), ([90, 110], 5), ([1, 2], 0), ([70, 30], 3)):
            rows = [text[at : at + length] for text, at, length in zip(texts, done, turn, strict=True)]
            check(llm.prefill(batch, rows), turn)
            for _ in range(steps):
                check(llm.decode(batch, [text[at] for text, at in zip(texts, done, strict=True)]), [1, 1])


TURNS: Turns = (((150, 20, 260), 30), ((100, 60, 1), 20), ((1, 130, 65), 9), ((64, 1, 3), 9))
CASES = {
    "append, keep": Case("llama-gqa2", Settings(window=64, keep=0.1), TURNS, seed=5),
    "append, mass": Case("opt", Settings(window=16, keep=None, keep_mass=0.9, exact_mode="select"), TURNS, seed=3),
    "append, off": Case(
        "qwen2",
        Settings(window=64, keep=0.1, lookahead="off", min_keep=8),
        TURNS,
        {"runtime__micro_batch": 2},
    ),
    "append, pair": Case(
        "llama3-rope", Settings(window=16, keep=0.1, keep_mass=0.9), TURNS, {"runtime__prefill_chunk": 40}
    ),
    # Twenty appends of a single token each.
    "append, single tokens": Case(
        "llama-mha", Settings(window=16, keep=0.1), (((140, 75), 0), *([((1, 1), 0)] * 20), ((1, 1), 3))
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_turns_at_partial_budget(zoo: ModelZoo, case: str) -> None:
    """Rows older than the last W..W+63 are on the host from the first step after an append on."""
    run, settings = CASES[case].run(zoo).simulated, CASES[case].settings
    lengths = [0] * len(run.sequences)
    before = 0
    for turn, steps in CASES[case].turns:
        lengths = [length + added for length, added in zip(lengths, turn, strict=True)]
        for length, record in zip(lengths, run.steps[before] if steps else [], strict=steps > 0):
            hosts = {layer.host_length for layer in record.layers if layer.tiered}
            assert hosts == {prefill_host_length(length, settings.sinks, settings.window)}
        before += steps
        lengths = [length + steps for length in lengths]
    assert run.ageings() or case == "append, single tokens"
