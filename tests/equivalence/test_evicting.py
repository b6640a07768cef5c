"""Executor `evicting` against `dense_eviction.py`: which tokens are left after a prompt and after each step, and what
comes out; and what else it promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.errors import HybridGenError
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_eviction import DenseEviction, Rules
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.test_full_budget import assert_greedy_equals_transformers
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

STEPS = 40
LENGTHS = (97, 1, 60)  # the second is shorter than any budget
PLAIN = Settings(exact_layers=())
STREAMING = Rules("streaming_llm", recent=24, sinks=4)
RULES = {
    "h2o": Rules("h2o", heavy=0.1, recent=0.1),
    "h2o, counts": Rules("h2o", heavy=9, recent=5, sinks=2),
    "h2o, exact layer": Rules("h2o", heavy=0.25, recent=0.1, exact=(1,)),
    "h2o, no heavy": Rules("h2o", heavy=0, recent=12),
    "streaming, original": STREAMING,
    "streaming, reindexed": replace(STREAMING, reindexed=True),
    "streaming, shares": replace(STREAMING, recent=0.3, reindexed=True),
    "keyformer": Rules("keyformer", heavy=0.21, recent=0.09, gen=STEPS, seed=5),
    "snapkv": Rules("snapkv", heavy=16, recent=8),
}


def open_engine(zoo: ModelZoo, name: str, rules: Rules, **overrides: Any) -> LLM:
    settings = replace(PLAIN, exact_layers=rules.exact)
    return engine(zoo.directory(name), settings, "h2o", **(rules.settings() | overrides))


class Compared:
    """A batch in the engine, and its sequences in the reference."""

    def __init__(self, zoo: ModelZoo, llm: LLM, name: str, rules: Rules, sequences: int, room: int) -> None:
        self.llm, self.vocab = llm, zoo.dense(name).vocab_size
        self.batch = llm.new_batch([room] * sequences)
        self.dense = [DenseEviction(zoo.dense(name), rules) for _ in range(sequences)]
        self.generator = torch.Generator().manual_seed(1)

    def prefill(self, lengths: tuple[int, ...], seed: int = 0) -> None:
        prompts = [random_tokens(self.vocab, n, seed=seed + n) for n in lengths]
        self.compare(self.llm.prefill(self.batch, prompts), [
            one.prefill(prompt) for one, prompt in zip(self.dense, prompts, strict=True)
        ])  # fmt: skip

    def decode(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            tokens = torch.randint(3, self.vocab, (len(self.dense),), generator=self.generator).tolist()
            logits = self.llm.decode(self.batch, tokens)
            self.compare(logits, [one.decode(token) for one, token in zip(self.dense, tokens, strict=True)])

    def compare(self, logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
        assert (logits.cpu().double() - torch.stack(expected)).abs().max() < LOGITS_TOLERANCE
        kept = self.batch.kept_positions()
        assert sorted(kept) == self.dense[0]._evicting()
        for layer, sequences in kept.items():
            for one, theirs in zip(self.dense, sequences, strict=True):
                assert one.follow(layer, theirs) == []


@pytest.mark.parametrize("lengths", [(97,), LENGTHS], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa2"])
def test_what_is_kept_and_what_comes_out(zoo: ModelZoo, name: str, rules: Rules, lengths: tuple[int, ...]) -> None:
    with open_engine(zoo, name, rules) as llm:
        both = Compared(zoo, llm, name, rules, len(lengths), room=max(lengths) + STEPS)
        both.prefill(lengths)
        both.decode()


@pytest.mark.parametrize("overrides", [{"runtime__transfer": "immediate"}, {"runtime__micro_batch": 2},
                                       {"runtime__prefill_chunk": 7}], ids=str)  # fmt: skip
@pytest.mark.parametrize("rules", [RULES["h2o"], STREAMING], ids=["h2o", "streaming"])
def test_opt_and_other_ways_to_run(zoo: ModelZoo, rules: Rules, overrides: dict[str, Any]) -> None:
    with open_engine(zoo, "opt", rules, **overrides) as llm:
        both = Compared(zoo, llm, "opt", rules, 3, room=100)
        both.prefill((50, 7, 33))
        both.decode(10)


EVERYTHING = {
    "h2o": {"eviction__heavy": 1.0, "eviction__recent": 0.5},
    "keyformer": {"eviction__heavy": 300, "eviction__recent": 1},
    "streaming-llm": {"eviction__recent": 300},
    "streaming-llm-original": {"eviction__recent": 300},
    "snapkv": {"eviction__heavy": 250},
}


@pytest.mark.parametrize("lengths", [(207,), (207, 12, 130)], ids=["batch 1", "ragged 3"])
@pytest.mark.parametrize("strategy", EVERYTHING)
@pytest.mark.parametrize("name", ["opt", "llama-gqa3"])
def test_budget_for_everything(zoo: ModelZoo, name: str, strategy: str, lengths: tuple[int, ...]) -> None:
    """algorithms.md, oracle 3: full attention, token for token."""
    overrides = EVERYTHING[strategy] if strategy != "h2o" else {"eviction__heavy": 500, "eviction__recent": 0.1}
    assert_greedy_equals_transformers(zoo, name, PLAIN, lengths, strategy, **overrides)


HOST = ["h2o", "h2o, counts", "streaming, reindexed", "keyformer", "snapkv"]


@pytest.mark.parametrize("overrides", [{}, {"runtime__transfer": "immediate"}], ids=["lazy", "immediate"])
@pytest.mark.parametrize("rules", HOST)
def test_kept_on_the_host(zoo: ModelZoo, rules: str, overrides: dict[str, Any]) -> None:
    with open_engine(zoo, "llama-gqa2", RULES[rules], eviction__home="host", **overrides) as llm:
        both = Compared(zoo, llm, "llama-gqa2", RULES[rules], 3, room=160)
        both.prefill(LENGTHS)
        both.decode()


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_further_turns(zoo: ModelZoo, rules: Rules, home: str) -> None:
    with open_engine(zoo, "llama-gqa2", rules, eviction__home=home) as llm:
        both = Compared(zoo, llm, "llama-gqa2", rules, 3, room=170)
        both.prefill((70, 1, 33))
        both.decode(12)
        both.prefill((5, 60, 2), seed=1000)
        both.decode(12)
        both.prefill((1, 1, 30), seed=2000)
        both.decode(12)


WINDOWED = [replace(STREAMING, windowed=True), replace(STREAMING, windowed=True, reindexed=True),
            Rules("streaming_llm", recent=1, sinks=2, windowed=True, reindexed=True),
            Rules("streaming_llm", recent=9, windowed=True)]  # fmt: skip


@pytest.mark.parametrize("rules", WINDOWED, ids=["original", "reindexed", "window 1", "no sinks"])
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa2"])
def test_windowed_prefill(zoo: ModelZoo, name: str, rules: Rules) -> None:
    with open_engine(zoo, name, rules) as llm:
        both = Compared(zoo, llm, name, rules, 3, room=170)
        both.prefill(LENGTHS)
        both.decode(5)
        both.prefill((3, 50, 20), seed=1000)
        both.decode(5)


def test_blocks_change_nothing(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time: scores of all policies, noise, windowed attention."""
    for module in ("hybridgen.selection.eviction.base", "hybridgen.attention.reindexed"):
        monkeypatch.setattr(f"{module}.SCORED_AT_ONCE", 1)
    for rules in (RULES["h2o"], RULES["keyformer"], RULES["snapkv"], WINDOWED[1]):
        with open_engine(zoo, "llama-gqa2", rules) as llm:
            both = Compared(zoo, llm, "llama-gqa2", rules, 2, room=80)
            both.prefill((50, 20))
            both.decode(3)


def test_bytes_and_budget(zoo: ModelZoo) -> None:
    """algorithms.md, section 0: 2 K Hkv d e to the device, 2 Hkv d e back. K is 20 % of the prompt; a slot is free."""
    lengths, layers, row = (100, 50, 70), 6, 2 * 16 * 4
    statistics = AttentionStatistics()
    with open_engine(zoo, "llama-gqa2", RULES["h2o"], eviction__home="host") as llm:
        batch = llm.new_batch([110] * 3)
        llm.prefill(batch, [random_tokens(100, n, seed=n) for n in lengths])
        for _ in range(3):
            llm.telemetry.begin_step()
            llm.decode(batch, [3, 4, 5])
            moved = llm.telemetry.end_step()
            kept = sum(n // 5 + 1 for n in lengths)
            assert moved.bytes_moved == {"h2d": layers * 2 * kept * row, "d2h": layers * 2 * 3 * row}
            assert moved.stage_bytes["stream"] == layers * 2 * kept * row
        statistics.observe(batch)
        summary = statistics.summary()
        assert summary["budget"] == pytest.approx(sum((n // 5 + 1) / (n + 3) for n in lengths) / 3)
        assert summary["kept_fraction"] is None and summary["mass_mean"] is None
    with open_engine(zoo, "llama-gqa2", RULES["h2o"]) as llm:
        batch = llm.new_batch([110])
        llm.prefill(batch, [random_tokens(100, 100, seed=1)])
        llm.telemetry.begin_step()
        llm.decode(batch, [3])
        assert llm.telemetry.end_step().bytes_moved == {}


def test_mirrors(zoo: ModelZoo) -> None:
    """From full attention's prefill as from its own."""
    prompts = [random_tokens(100, n, seed=n) for n in LENGTHS]
    with open_engine(zoo, "llama-gqa2", RULES["h2o"]) as llm:
        full = llm.sharing(replace(llm.config, attention=replace(llm.config.attention, executor="full")))
        windowed = replace(llm.config.eviction, policy="streaming_llm", heavy=0, prefill="windowed")
        other = llm.sharing(replace(llm.config, eviction=windowed))
        alone, mirror, main, refused = (one.new_batch([110] * 3) for one in (llm, llm, full, other))
        llm.prefill(alone, prompts)
        full.prefill(main, prompts, mirrors=[mirror])
        for step in range(5):
            assert torch.equal(llm.decode(alone, [step, 4, 5]), llm.decode(mirror, [step, 4, 5]))
            assert alone.kept_positions() == mirror.kept_positions()
        with pytest.raises(HybridGenError, match="windowed"):
            full.prefill(full.new_batch([110] * 3), prompts, mirrors=[refused])


@pytest.mark.parametrize(
    ("name", "strategy", "overrides", "message"),
    [
        ("opt", "streaming-llm", {"eviction__positions": "reindexed"}, "added to the embeddings"),
        ("llama-mha", "h2o", {"eviction__positions": "reindexed"}, "StreamingLLM"),
        ("llama-mha", "snapkv", {"eviction__prefill": "windowed"}, "StreamingLLM"),
        ("llama-mha", "streaming-llm", {"eviction__heavy": 3}, "scores nothing"),
        ("llama-mha", "h2o", {"eviction__policy": "h20"}, "did you mean 'h2o'"),
        ("llama-mha", "h2o", {"cache__sketch": "int4"}, "kept as it is"),
        ("llama-mha", "snapkv", {"eviction__pool": 4}, "odd"),
        ("llama-mha", "h2o", {"eviction__recent": 0.0}, "recent"),
    ],
)
def test_errors(zoo: ModelZoo, name: str, strategy: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(HybridGenError, match=message), engine(zoo.directory(name), PLAIN, strategy, **overrides) as llm:
        llm.new_batch([10])
