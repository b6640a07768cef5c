"""Eviction of tokens as its definition reads (algorithms.md, sections 3-5 and SnapKV in 8), in float64.

One sequence; every key of every token stays, unrotated, and a mask says which each KV head still has. A prompt's
probabilities are one S x S matrix. Shares no code with the engine. Where algorithms.md leaves a choice, this takes:
* after a prompt and after each decode step stay: the first `sinks`, the last `recent`, of the rest the `heavy` of
  highest score (ties: lower position). So a token that leaves the window competes at once.
* shares are of all tokens so far, counted at the end of each prompt, rounded up, and hold until the next prompt.
* StreamingLLM: "evict so that n_s + w >= total before adding": `recent` counts the new token of a step.
* the group's heads: sum of their probabilities (SnapKV: mean).
* a further turn sees what is left and, causally, itself; scores go on, but for SnapKV, which votes afresh.
* "position = index inside the cache": the rank of a key among those that the query sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.equivalence.dense_simulation import DenseModel

CLOSE = 1e-4  # relative difference of scores below which float32 may keep another token


@dataclass(frozen=True)
class Rules:
    policy: str
    heavy: int | float = 0
    recent: int | float = 8
    sinks: int = 0
    reindexed: bool = False
    windowed: bool = False
    tau_init: float = 1.0
    tau_end: float = 2.0
    gen: int = 32
    seed: int = 0
    pool: int = 5
    exact: tuple[int, ...] = ()  # layers that keep everything

    def count(self, share: int | float, tokens: int) -> int:
        return share if isinstance(share, int) else math.ceil(Fraction(repr(share)) * tokens)

    def settings(self) -> dict[str, Any]:
        """For the engine."""
        names = ("policy", "heavy", "recent", "sinks", "tau_init", "tau_end", "pool")
        values = {f"eviction__{name}": getattr(self, name) for name in names}
        values["eviction__prefill"] = "windowed" if self.windowed else "dense"
        values["eviction__positions"] = "reindexed" if self.reindexed else "original"
        return values | {"run__gen": self.gen, "run__seed": self.seed, "model__exact_layers": list(self.exact)}


class DenseEviction:
    """Prompt, further turns and decode of one sequence."""

    def __init__(self, model: DenseModel, rules: Rules) -> None:
        self.model, self.rules = model, rules
        empty = torch.empty(model.kv_heads, 0, model.head_dim, dtype=torch.float64)
        self.keys, self.values = [empty] * model.num_layers, [empty] * model.num_layers
        self.alive = [torch.zeros(model.kv_heads, 0, dtype=torch.bool) for _ in self.keys]
        self.scores = [torch.zeros(model.kv_heads, 0, dtype=torch.float64) for _ in self.keys]
        self.length = self.steps = self.total = self.window = 0

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Logits of the last token."""
        rules, self.steps = self.rules, 0
        logits = self._forward(tokens, prompt=True)
        counts_new = rules.policy == "streaming_llm"
        self.window = rules.count(rules.recent, self.length) - counts_new
        self.total = rules.sinks + rules.count(rules.heavy, self.length) + self.window
        for layer in self._evicting():
            for head in range(self.model.kv_heads):
                self._keep_best(layer, head)
        return logits

    def decode(self, token: int) -> Tensor:
        logits = self._forward([token], prompt=False)
        self.steps += 1
        if self.rules.policy != "snapkv":
            for layer in self._evicting():
                for head in range(self.model.kv_heads):
                    self._keep_best(layer, head)
        return logits

    def kept(self, layer: int) -> list[list[int]]:
        return [torch.nonzero(head).flatten().tolist() for head in self.alive[layer]]

    def follow(self, layer: int, theirs: Sequence[Sequence[int]]) -> list[str]:
        """Why another implementation's tokens are not these; where only rounding tells them apart, they are taken."""
        problems = []
        for head, (mine, other) in enumerate(zip(self.kept(layer), theirs, strict=True)):
            differing = sorted(set(mine) ^ set(other))
            if not differing:
                continue
            scores = self.scores[layer][head, differing]
            if len(mine) != len(other) or scores.max() - scores.min() > CLOSE * scores.max():
                problems.append(f"layer {layer}, KV head {head}: {differing} differ, of scores {scores.tolist()}")
                continue
            self.alive[layer][head] = False
            self.alive[layer][head, list(other)] = True
        return problems

    def _evicting(self) -> list[int]:
        return [layer for layer in range(self.model.num_layers) if layer not in self.rules.exact]

    def _keep_best(self, layer: int, head: int) -> None:
        alive = self.kept(layer)[head]
        if len(alive) <= self.total:
            return
        ends = [j for j in alive if j < self.rules.sinks or j >= self.length - self.window]
        others = [j for j in alive if j not in ends]
        others.sort(key=lambda j: (-float(self.scores[layer][head, j]), j))
        keep = ends + others[: self.total - len(ends)]
        self.alive[layer][head] = False
        self.alive[layer][head, keep] = True

    def _forward(self, tokens: Sequence[int], prompt: bool) -> Tensor:
        model, first = self.model, self.length
        x = model.embed(tokens, first)
        self.length += len(tokens)
        for layer in range(model.num_layers):
            normed, name = model.attention_input(layer, x), f"{model.prefix}.layers.{layer}.self_attn"
            query, key, value = (model._heads(f"{name}.{part}_proj", normed, 0, rotate=False) for part in "qkv")
            self.keys[layer] = torch.cat((self.keys[layer], key), 1)
            self.values[layer] = torch.cat((self.values[layer], value), 1)
            new = torch.ones(model.kv_heads, len(tokens), dtype=torch.bool)
            self.alive[layer] = torch.cat((self.alive[layer], new), 1)
            self.scores[layer] = torch.cat((self.scores[layer], new.double() * 0), 1)
            visible = self._visible(layer, first, prompt)
            logits = self._logits(layer, query, visible, first)
            p = logits.softmax(-1)
            context = p @ self.values[layer].repeat_interleave(model.group, 0)
            if layer not in self.rules.exact:
                self._score(layer, logits, p, first, prompt)
            x = model.after_attention(layer, x, context)
        return model.head(x[-1:])[0]

    def _visible(self, layer: int, first: int, prompt: bool) -> Tensor:
        """bool [kv heads, new tokens, all tokens]."""
        rules, i, j = self.rules, torch.arange(first, self.length)[:, None], torch.arange(self.length)[None]
        visible = self.alive[layer][:, None] & (j <= i)
        if rules.windowed and prompt and layer not in rules.exact:
            visible &= (j < rules.sinks) | (j > i - rules.count(rules.recent, self.length))
        return visible

    def _logits(self, layer: int, query: Tensor, visible: Tensor, first: int) -> Tensor:
        """[heads, new tokens, all tokens], -inf where a key is not visible."""
        model, keys, everything = self.model, self.keys[layer], torch.arange(self.length)
        if self.rules.reindexed and layer not in self.rules.exact:
            rows = []
            for number in range(query.shape[1]):
                seen = visible[0, number]  # all heads alike
                index = seen.cumsum(0) - 1
                own = index[first + number].expand(1)
                asking = self._rotated(query[:, number : number + 1], own)
                rows.append(self._product(asking, self._rotated(keys, index)))
            logits = torch.cat(rows, 1)
        else:
            logits = self._product(self._rotated(query, everything[first:]), self._rotated(keys, everything))
        return logits.masked_fill(~visible.repeat_interleave(model.group, 0), -math.inf)

    def _product(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.repeat_interleave(self.model.group, 0).transpose(1, 2) * self.model.head_dim**-0.5

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.model.inv_freq is None:
            return x
        angle = positions.float()[:, None] * self.model.inv_freq
        cos, sin = angle.cos().double(), angle.sin().double()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _score(self, layer: int, logits: Tensor, p: Tensor, first: int, prompt: bool) -> None:
        rules, model = self.rules, self.model
        by_group = (model.kv_heads, model.group, *logits.shape[1:])
        if rules.policy == "h2o":
            self.scores[layer] += p.view(by_group).sum((1, 2))
        elif rules.policy == "keyformer":
            t = 0 if prompt else min(self.steps + 1, rules.gen)
            tau = rules.tau_init + t * (rules.tau_end - rules.tau_init) / rules.gen
            noise = gumbel(rules.seed, layer, model.heads, range(first, self.length), self.length)
            f = ((logits + noise) / tau).softmax(-1)
            self.scores[layer] += f.view(by_group).sum((1, 2))
        elif rules.policy == "snapkv" and prompt:
            votes = p[:, -rules.count(rules.recent, self.length) :].view(model.kv_heads, model.group, -1, self.length)
            votes = votes.mean(1).sum(1)
            self.scores[layer].zero_()
            for head in range(model.kv_heads):
                last = self.length - rules.count(rules.recent, self.length)
                older = [j for j in range(max(0, last)) if self.alive[layer][head, j]]
                for place, j in enumerate(older):
                    near = [older[k] for k in range(place - rules.pool // 2, place + rules.pool // 2 + 1)
                            if 0 <= k < len(older)]  # fmt: skip
                    self.scores[layer][head, j] = votes[head, near].sum() / rules.pool


def gumbel(seed: int, layer: int, heads: int, queries: range, keys: int) -> Tensor:
    """The engine's noise, from its description: 32 bits that the finaliser of MurmurHash3 scrambles; [heads, queries,
    keys], float64."""

    def mixed(x: Any) -> Any:
        x = np.asarray(x, dtype=np.uint32).copy()
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    key = np.zeros(1, np.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32, layer):
        key = mixed(key + np.uint32(word) + np.uint32(0x9E3779B9))
    asking = mixed(np.array(queries, dtype=np.uint32) + key)
    rows = mixed(asking[None] + np.arange(heads, dtype=np.uint32)[:, None])
    bits = mixed(rows[:, :, None] + mixed(np.arange(keys, dtype=np.uint32)))
    uniform = ((bits & np.uint32((1 << 23) - 1)).astype(np.float64) + 0.5) / (1 << 23)
    return torch.from_numpy(-np.log(-np.log(uniform)))
