"""InfiniGen's pool: which rows are alive, against a simulation row by row, and what is chosen of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.engine.layer_modes import layer_modes
from hybridgen.errors import ConfigError
from hybridgen.evaluation.byte_formulas import step_bytes
from hybridgen.evaluation.strategy_list import describe_strategy
from hybridgen.kv_cache.row_pool import RowPool, pool_parts
from tests.equivalence.dense_scores import LOGIT_ROUNDING, Chosen, DenseScores, Method
from tests.equivalence.dense_simulation import BLOCK, DenseModel, cap
from tests.equivalence.test_device_scores import ALPHA, NATIVE, RAGGED, close, engine
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

BY_COUNT = Method("partial", 20, None, 0.5, window=16, predicted=False)


class Pool:
    """One KV head's rows: who is alive, how often each was fetched, and when it was last."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.alive: list[int] = []  # oldest first
        self.fetches: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.step = 0

    def join(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.alive.append(row)
            self.fetches[row], self.last[row] = 0, self.step
        while len(self.alive) > self.capacity:
            older = self.alive[: len(self.alive) // 2]
            rank = {"fifo": dict.fromkeys(older, 0), "counter": self.fetches, "lru": self.last}[self.policy]
            order = sorted(older, key=lambda row: (rank[row], row))
            dying = order[: len(self.alive) - self.capacity]
            self.alive = [row for row in self.alive if row not in dying]

    def fetch(self, rows: Sequence[int]) -> None:
        self.step += 1
        for row in rows:
            self.fetches[row] += 1
            self.last[row] = self.step


class DensePool(DenseScores):
    """`DenseScores` of which rows die."""

    def __init__(self, model: DenseModel, method: Method, sequences: int, share: float, policy: str) -> None:
        super().__init__(model, method, sequences)
        self.share, self.policy = Fraction(repr(share)), policy
        self.pools: dict[tuple[int, int, int], Pool] = {}  # layer, sequence, KV head
        self.deaths = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        logits = super().prefill(prompts)
        for b, seq in enumerate(self.sequences):
            for layer, host in enumerate(seq.hosts):
                for head in range(self.model.kv_heads):
                    pool = Pool(self.policy, max(BLOCK, math.floor(self.share * host)))
                    pool.join(range(host))
                    self.pools[layer, b, head] = pool
        return logits

    def decode(self, tokens: Sequence[int], chosen: Chosen) -> Tensor:
        logits = super().decode(tokens, chosen)
        for (layer, b, head), pool in self.pools.items():
            host = len(pool.fetches)
            if host:
                pool.fetch([position - self.method.sinks for position in chosen[layer][b][head]])
            if self.sequences[b].hosts[layer] > host:
                before = len(pool.alive)
                pool.join(range(host, self.sequences[b].hosts[layer]))
                self.deaths += before + BLOCK - len(pool.alive)
        return logits

    def _scores(self, layer: int, seq: Any, query: Tensor) -> Tensor:
        logits = super()._scores(layer, seq, query)
        b = next(i for i, each in enumerate(self.sequences) if each is seq)
        for head in range(self.model.heads):
            pool = self.pools[layer, b, head // self.model.group]
            dead = sorted(set(range(seq.hosts[layer])) - set(pool.alive))
            logits[head, [self.method.sinks + row for row in dead]] = -math.inf
        return logits

    def _counts(self, layer: int, scores: list[Tensor]) -> list[range]:
        method = self.method
        alive = [len(self.pools[layer, b, 0].alive) for b in range(len(self.sequences))]
        hosts = [seq.hosts[layer] for seq in self.sequences]
        caps = [min(there, cap(method.keep, host)) for there, host in zip(alive, hosts, strict=True)]
        if method.alpha is None:
            return [range(count, count + 1) for count in caps]
        above = []
        for near in (LOGIT_ROUNDING, -LOGIT_ROUNDING):
            count = 0
            for seq, logits in zip(self.sequences, scores, strict=True):
                threshold = logits.amax(-1, keepdim=True) - method.alpha + near
                count += int((logits > threshold)[:, self._host(seq, layer)].sum())
            above.append(Fraction(count, max(1, self.model.heads * sum(alive))))
        fewest, most = ([math.floor(share * there) for there in alive] for share in above)
        return [range(min(a, c), min(b, c) + 1) for a, b, c in zip(fewest, most, caps, strict=True)]


def compare(
    zoo: ModelZoo,
    name: str,
    method: Method,
    share: float,
    policy: str,
    lengths: tuple[int, ...] = RAGGED,
    steps: int = 24,
    **overrides: Any,
) -> DensePool:
    """Side by side: every choice is of rows that are alive, and these are the same after every step."""
    dense = zoo.dense(name)
    prompts = [random_tokens(dense.vocab_size, length, seed=length) for length in lengths]
    reference = DensePool(dense, method, len(lengths), share, policy)
    logits = reference.prefill(prompts)
    generator = torch.Generator().manual_seed(5)
    overrides |= {"cache__pool_capacity": share, "cache__pool_policy": policy}
    with engine(zoo.directory(name), "infinigen", method, **overrides) as llm:
        batch = llm.new_batch([length + steps for length in lengths])
        close(llm.prefill(batch, prompts), logits, "prefill")
        compare_alive(reference, batch, "prefill")
        for step in range(steps):
            tokens = torch.multinomial(logits.softmax(1), 1, generator=generator).flatten().tolist()
            ours = llm.decode(batch, tokens)
            logits = reference.decode(tokens, batch.selections())
            assert not reference.problems, f"step {step}: {reference.problems[:3]}"
            close(ours, logits, f"step {step}")
            compare_alive(reference, batch, f"step {step}")
    return reference


def compare_alive(reference: DensePool, batch: Any, where: str) -> None:
    for (layer, b, head), pool in reference.pools.items():
        if layer in reference.method.exact:
            continue
        of_layer = batch.micro_batches[0].layers[layer]._kv.host_keys.sketch.pool
        rows = len(pool.fetches)
        alive = (~of_layer.dead[b, head, :rows]).nonzero().flatten().tolist()
        assert alive == pool.alive, f"{where}: layer {layer}, sequence {b}, KV head {head}"
        assert of_layer.alive[b] == len(alive), where


@pytest.mark.parametrize("policy", ["counter", "lru", "fifo"])
@pytest.mark.parametrize(
    ("name", "method", "overrides"),
    [
        ("opt", ALPHA, {}),
        ("llama-gqa2", ALPHA, {}),
        ("llama-mha", Method("partial", 0.3, 2.0, 0.5), NATIVE),
        ("llama-gqa3", BY_COUNT, {"runtime__transfer": "immediate"}),
    ],
    ids=["opt", "gqa2", "mha, native", "gqa3, true query"],
)
def test_who_is_alive(zoo: ModelZoo, name: str, method: Method, policy: str, overrides: dict[str, Any]) -> None:
    """Ragged 3; 0.6 of 256, 0 (so one block) and 128 rows."""
    reference = compare(zoo, name, method, 0.6, policy, **overrides)
    assert reference.deaths > 0, "a block has joined by decode, and others died for it"
    if policy != "fifo":
        fetched = [pool for pool in reference.pools.values() if len(pool.alive) < len(pool.fetches)]
        assert any(pool.alive != list(range(pool.alive[0], pool.alive[-1] + 1)) for pool in fetched), "it is no window"


@pytest.mark.parametrize("policy", ["counter", "lru"])
def test_whole_steps_that_are_repeated_count_too(zoo: ModelZoo, policy: str) -> None:
    """The lazy engine repeats the recorded step; with no exact layer nothing of it is the host's."""
    method = Method("partial", 0.5, 3.0, 0.5, exact=())
    assert compare(zoo, "llama-gqa2", method, 0.5, policy, (250, 180), steps=72).deaths > 0


def test_every_row_that_is_alive_is_kept_without_an_alpha(zoo: ModelZoo) -> None:
    """Infinite alpha: all of the living, however ragged the batch and unequal their shares."""
    method = Method("partial", 1.0, math.inf, 0.5)
    reference = compare(zoo, "llama-gqa2", method, 0.3, "counter", steps=4)
    assert set(reference.kept) - {0} == {76, 64}, "0.3 of 256, and a block where that is more than the share"


def test_a_capacity_of_one_is_no_pool(zoo: ModelZoo) -> None:
    def tokens(**overrides: Any) -> list[list[int]]:
        with engine(zoo.directory("llama-gqa2"), "infinigen", ALPHA, **overrides) as llm:
            batch, out = llm.new_batch([460] * 2), []
            logits = llm.prefill(batch, [random_tokens(113, 380, seed) for seed in (1, 2)])
            for _ in range(70):
                out.append(logits.argmax(1).tolist())
                logits = llm.decode(batch, logits.argmax(1))
            assert batch.micro_batches[0].layers[3]._kv.host_keys.sketch.pool is None  # type: ignore[attr-defined]
            return out

    assert tokens(cache__pool_capacity=1.0, cache__pool_policy="lru") == tokens()


def test_bytes_of_a_step(zoo: ModelZoo) -> None:
    """All that is alive is fetched, 0.3 of the prompt's 320 host rows; formula and list say so, too."""
    method = Method("partial", 1.0, None, 0.5)
    with engine(zoo.directory("llama-gqa2"), "infinigen", method, cache__pool_capacity=0.3) as llm:
        batch = llm.new_batch([400])
        llm.prefill(batch, [random_tokens(113, 390, 1)])
        llm.telemetry.begin_step()
        llm.decode(batch, [5])
        moved = llm.telemetry.end_step().bytes_moved
        tiered = [layer for layer, chosen in batch.selections().items() if len(chosen[0][0]) == 96]
        assert len(tiered) == llm.spec.num_layers - 2 and moved["h2d"] == len(tiered) * 2 * 96 * 2 * 16 * 4
        modes = layer_modes(llm.config, llm.spec.num_layers)
        assert step_bytes(llm.spec, llm.config, modes, torch.float32, 391, False, 390).h2d == moved["h2d"]
        row = describe_strategy("infinigen", llm.config, modes, llm.spec, torch.float32, 391, False)
        assert "30 % of the prompt's host rows may be chosen (counter)" in row[2]


def test_a_further_turn_widens_the_pool() -> None:
    parts = [torch.zeros(shape, dtype=dtype) for shape, dtype in pool_parts((1, 2, 640, 8))]
    pool = RowPool(0.5, "counter", *parts)
    pool.prompted(0, 128)
    pool.join(0, 0, 128)
    assert pool.alive == [64] and pool.dead[0, :, :64].all() and not pool.dead[0, :, 64:].any()
    pool.prompted(0, 640)
    pool.join(0, 128, 512)
    assert pool.alive == [320], "half of what there is, dead or alive"
    assert (~pool.dead[0]).sum(1).tolist() == [320, 320] and not pool.dead[0, :, 320:].any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache__pool_capacity": 0.0}, r"cache\.pool_capacity = 0\.0 .*allowed is a fraction in \(0, 1\]"),
        ({"cache__pool_capacity": 1.5}, r"cache\.pool_capacity = 1\.5 .*allowed is a fraction in \(0, 1\]"),
        ({"cache__pool_policy": "random"}, r"cache\.pool_policy = 'random' .*'counter' or 'fifo' or 'lru'"),
        ({"cache__pool_capacity": 0.5, "schedule__mode": "replay:x.json"}, r"replayed may ask for more .*'fixed'"),
    ],
)
def test_what_is_refused(zoo: ModelZoo, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(zoo.directory("opt"), "infinigen", ALPHA, **settings)


@pytest.mark.parametrize("name", ["pool_capacity", "pool_policy"])
def test_only_partial_keys_have_a_pool(zoo: ModelZoo, name: str) -> None:
    value = {"pool_capacity": 0.5, "pool_policy": "lru"}[name]
    with pytest.raises(ConfigError, match=rf"cache\.{name} = .*cache\.sketch = 'pages'.*allowed: 'partial'"):
        engine(zoo.directory("opt"), "quest", Method("pages", 0.2), **{f"cache__{name}": value})
