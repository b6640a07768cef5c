"""A plain float64 simulation of hybridgen's decode, written from contracts.md alone.

One sequence at a time; the whole K and V history of every layer is kept, and everything is computed on it
directly. It shares no code with the engine. Slow, and meant to be read next to contracts.md:

* "What is kept": `cap`, `choose`
* "Host tier and ageing": `prefill_host_length`, `ageing_threshold`
* "select" / "logits" / "off" / "Exact layers": `DenseSimulation.decode`, `DenseSimulation._attend`
* lookahead.md, "x" and "delta": `DenseSimulation._predicted_query`

Where contracts.md leaves a choice, this file takes:
* "Appended chunks follow the same rule" is the rule of the prefill, over the whole length, in every layer: the
  stagger of decode begins anew after each append.
* Budget: the new token counts both as attended and as context.
* A mass of 1 keeps every token, however sums are rounded: no probability is 0.
* Exact layers keep their mode with lookahead `off`; layer 0 is exact even when it is not listed.
* L of the stagger counts all layers, resident ones included.
* `logits`, per query head: one softmax over the device's rows (sinks, window, new token) by the true query and
  over host rows by q'. `dropped="share"`: over all host rows, of which only the kept ones add their V.
  `dropped="renormalise"`: over the kept ones alone. Which are kept is what `select` keeps.
* Exact layers of mode `select` do not become `logits` layers: they never use q', and "K chosen with the true query"
  is what `select` and `off` do, a softmax over the attended rows alone, whatever `dropped` says.
* `delta`: the previous token's residual is the one that the cache was made with, by decode (with what was kept) or
  by the prefill, and its last chunk, that came last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

BLOCK = 64  # rows that age together


@dataclass(frozen=True)
class Settings:
    """Everything contracts.md lets one choose. Floats for `keep` are fractions, ints are counts."""

    window: int = 64
    sinks: int = 4
    keep: int | float | None = 0.1
    keep_mass: float | None = None
    min_keep: int = 0
    lookahead: Literal["select", "logits", "off"] = "select"
    predictor: Literal["x", "delta"] = "x"
    dropped: Literal["share", "renormalise"] = "share"  # of `logits`
    exact_layers: tuple[int, ...] = (0,)
    exact_mode: Literal["resident", "select"] = "resident"


# ---------------------------------------------------------------------------------------------------------
# The host tier


def prefill_host_length(tokens: int, sinks: int, window: int) -> int:
    """After a prefill the host holds rows [S, S + 64 x floor(max(0, P - S - W) / 64))."""
    return BLOCK * (max(0, tokens - sinks - window) // BLOCK)


def ageing_threshold(layer: int, num_layers: int, window: int) -> int:
    """The oldest 64 window rows age when the window holds this many rows after the layer's attention."""
    return window + BLOCK + (BLOCK * layer) // num_layers


# ---------------------------------------------------------------------------------------------------------
# What is kept


def cap(keep: int | float, host_length: int) -> int:
    """C = ceil(F x host length) of a fraction, exactly as the decimal is written; N of an integer."""
    if isinstance(keep, int):
        return keep
    return math.ceil(Fraction(repr(keep)) * host_length)


@dataclass
class Choice:
    """What one KV head keeps of the host tier."""

    positions: list[int]  # best first; ties: lower position first
    ranking: list[int]  # all host positions, best first
    p: list[float]  # of every position that the choosing query saw
    local_mass: float  # p of sinks + window
    mass_bound: bool  # the mass rule decided the count

    def mass(self, count: int) -> float:
        """p held by sinks + window + the best `count` host tokens."""
        return self.local_mass + sum(self.p[position] for position in self.ranking[:count])


def choose(p: list[float], host: range, settings: Settings) -> Choice:
    """The host tokens that one KV head keeps, given its group's mean probabilities `p` by position."""
    # Python's sort is stable and `host` ascends: equal probabilities keep the lower position first.
    ranking = sorted(host, key=lambda position: -p[position])
    local = sum(p[: host.start]) + sum(p[host.stop :])
    counts: list[int] = []  # the bounds whose minimum is taken
    mass_count = None
    if settings.keep_mass is not None:
        held, mass_count = local, 0
        # No probability is 0, so that nothing less than every token holds all of it, however p is rounded.
        while mass_count < len(ranking) and (held < settings.keep_mass or settings.keep_mass == 1.0):
            held += p[ranking[mass_count]]
            mass_count += 1
        counts.append(mass_count)
    if settings.keep is not None:
        counts.append(cap(settings.keep, len(host)))
    count = min(len(host), max(settings.min_keep, min(counts)))
    return Choice(ranking[:count], ranking, p, local, mass_bound=mass_count == count)


# ---------------------------------------------------------------------------------------------------------
# Records


@dataclass
class LayerRecord:
    """One layer of one decode step."""

    tiered: bool  # false: an exact layer whose KV stays on the device
    host_length: int
    choices: list[Choice]  # per KV head; empty if not tiered
    attended: list[int]  # tokens per KV head, the new one included
    context: int  # tokens in the cache, the new one included
    problems: list[str] = field(default_factory=list)  # with the choice that was to be followed

    @property
    def budget(self) -> float:
        """Attended tokens / context length, mean over KV heads."""
        return sum(self.attended) / len(self.attended) / self.context

    @property
    def mass(self) -> list[float]:
        """Predicted (or exact) probability covered, per KV head."""
        return [choice.mass(len(choice.positions)) for choice in self.choices]


@dataclass
class StepRecord:
    """One decode step."""

    logits: Tensor
    layers: list[LayerRecord]

    @property
    def budget(self) -> float:
        return sum(layer.budget for layer in self.layers) / len(self.layers)

    @property
    def problems(self) -> list[str]:
        return [f"layer {i}: {p}" for i, layer in enumerate(self.layers) for p in layer.problems]

    def too_close(self, settings: Settings) -> list[str]:
        choices = [choice for layer in self.layers for choice in layer.choices]
        return [reason for choice in choices if (reason := too_close(choice, settings))]


# ---------------------------------------------------------------------------------------------------------
# Comparing a choice with another implementation's

SWAP_TOLERANCE = 1e-6  # relative difference of p below which two tokens may change places
MASS_TOLERANCE = 1e-6  # distance of the covered mass from M below which the count may differ by one
# This simulation run in float32 is up to 3e-5 (relative) away from float64 in p and 1e-6 in covered mass. A
# choice nearer than twice that to another one, yet beyond the tolerances, would test the rounding of the
# machine instead of the rules. The tests' seeds are such that none occurs, and check it.
SWAP_MARGIN = 6e-5
MASS_MARGIN = 2e-6


def disagreement(choice: Choice, other: Sequence[int], host: range, settings: Settings) -> str | None:
    """Why `other` is not the set that `choice` is, or None if it is within the tolerances."""
    if len(set(other)) != len(other):
        return "a position is listed twice"
    if not set(other) <= set(host):
        return f"positions outside the host tier {host}: {sorted(set(other) - set(host))}"
    mine, theirs = len(choice.positions), len(other)
    if mine != theirs:
        at_threshold = (
            choice.mass_bound
            and abs(mine - theirs) == 1
            and settings.keep_mass is not None
            and abs(choice.mass(min(mine, theirs)) - settings.keep_mass) < MASS_TOLERANCE
        )
        if not at_threshold:
            return f"{theirs} tokens instead of {mine} of {len(host)}"
    expected = set(choice.ranking[:theirs])
    missing, extra = sorted(expected - set(other)), sorted(set(other) - expected)
    if missing:
        p_missing, p_extra = ([choice.p[i] for i in some] for some in (missing, extra))
        if max(p_missing) - min(p_extra) > SWAP_TOLERANCE * max(p_missing):
            return f"{extra} instead of {missing}; p {p_extra} against {p_missing}"
    ordered = [choice.p[position] for position in other]
    if any(after > before * (1 + 1e-4) for before, after in pairwise(ordered)):
        return "not listed best first"
    return None


def too_close(choice: Choice, settings: Settings) -> str | None:
    """Why float32 may choose otherwise although it follows the rules, or None if the choice is clear."""
    count, ranking = len(choice.positions), choice.ranking
    if 0 < count < len(ranking):
        kept, left = choice.p[ranking[count - 1]], choice.p[ranking[count]]
        if SWAP_TOLERANCE * kept <= kept - left < SWAP_MARGIN * kept:
            return f"p of the last kept and the first left token: {kept}, {left}"
    if choice.mass_bound and settings.keep_mass is not None and settings.keep_mass < 1:
        for near in (count - 1, count):
            if near >= 0 and MASS_TOLERANCE <= abs(choice.mass(near) - settings.keep_mass) < MASS_MARGIN:
                return f"{near} tokens hold {choice.mass(near)}"
    return None


# ---------------------------------------------------------------------------------------------------------
# The models' mathematics, in float64


class DenseModel:
    """OPT, Llama or Qwen2 from a Hugging Face directory; every method works on [tokens, hidden]."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: t.double() for name, t in load_file(directory / "model.safetensors").items()}
        self.opt = self.config["model_type"] == "opt"
        self.prefix = "model.decoder" if self.opt else "model"
        self.num_layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config.get("num_key_value_heads") or self.heads)
        self.group = self.heads // self.kv_heads
        self.head_dim = int(self.config.get("head_dim") or self.config["hidden_size"] // self.heads)
        self.vocab_size = int(self.config["vocab_size"])
        self.inv_freq = None if self.opt else self._inverse_frequencies()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.opt:
            return F.layer_norm(x, x.shape[-1:], weight, self.weights[f"{name}.bias"], 1e-5)
        return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def embed(self, tokens: Sequence[int], first: int) -> Tensor:
        x = self.weights[f"{self.prefix}.embed_tokens.weight"][list(tokens)]
        if self.opt:  # OPT's table begins with two unused rows
            table = self.weights[f"{self.prefix}.embed_positions.weight"]
            x = x + table[first + 2 : first + 2 + len(tokens)]
        return x

    def attention_input(self, layer: int, x: Tensor) -> Tensor:
        name = "self_attn_layer_norm" if self.opt else "input_layernorm"
        return self.norm(f"{self.prefix}.layers.{layer}.{name}", x)

    def query(self, layer: int, x: Tensor, first: int) -> Tensor:
        """[heads, tokens, head_dim], rotated; `x` is the layer's input before its norm."""
        normed = self.attention_input(layer, x)
        return self._heads(f"{self.prefix}.layers.{layer}.self_attn.q_proj", normed, first, rotate=True)

    def key_value(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Two of [kv_heads, tokens, head_dim]; keys rotated."""
        normed = self.attention_input(layer, x)
        attention = f"{self.prefix}.layers.{layer}.self_attn"
        return (
            self._heads(f"{attention}.k_proj", normed, first, rotate=True),
            self._heads(f"{attention}.v_proj", normed, first, rotate=False),
        )

    def after_attention(self, layer: int, x: Tensor, context: Tensor) -> Tensor:
        """Output projection, residual, MLP; `context` is [heads, tokens, head_dim]."""
        name = f"{self.prefix}.layers.{layer}"
        flat = context.transpose(0, 1).reshape(x.shape[0], -1)
        if self.opt:
            x = x + self.linear(f"{name}.self_attn.out_proj", flat)
            inner = F.relu(self.linear(f"{name}.fc1", self.norm(f"{name}.final_layer_norm", x)))
            return x + self.linear(f"{name}.fc2", inner)
        x = x + self.linear(f"{name}.self_attn.o_proj", flat)
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        gate = F.silu(self.linear(f"{name}.mlp.gate_proj", normed))
        return x + self.linear(f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", normed))

    def head(self, x: Tensor) -> Tensor:
        x = self.norm(f"{self.prefix}.final_layer_norm" if self.opt else f"{self.prefix}.norm", x)
        tied = "lm_head.weight" not in self.weights
        return F.linear(x, self.weights[f"{self.prefix}.embed_tokens.weight" if tied else "lm_head.weight"])

    def _heads(self, name: str, normed: Tensor, first: int, rotate: bool) -> Tensor:
        heads = self.linear(name, normed).reshape(normed.shape[0], -1, self.head_dim).transpose(0, 1)
        if self.inv_freq is None or not rotate:
            return heads
        # float32 angles and tables are part of the models' definition (transformers computes them so).
        positions = torch.arange(first, first + normed.shape[0], dtype=torch.float32)
        angle = positions[:, None] * self.inv_freq
        cos, sin = angle.cos().double(), angle.sin().double()
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _inverse_frequencies(self) -> Tensor:
        old = {"rope_theta": self.config.get("rope_theta"), **(self.config.get("rope_scaling") or {})}
        rope = self.config.get("rope_parameters") or old
        channels = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inv_freq = 1.0 / rope["rope_theta"] ** channels
        if rope.get("rope_type", "default") == "default":
            return inv_freq
        assert rope["rope_type"] == "llama3"
        # Wavelengths longer than the original context over `low` are slowed down by `factor`, those shorter
        # than it over `high` are kept, those between are interpolated.
        factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * inv_freq / factor + blend * inv_freq


# ---------------------------------------------------------------------------------------------------------
# One sequence


class DenseSimulation:
    """Prefill, append and decode of one sequence, as contracts.md defines them."""

    def __init__(self, model: DenseModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        empty = torch.empty(model.kv_heads, 0, model.head_dim, dtype=torch.float64)
        self.keys = [empty] * model.num_layers
        self.values = [empty] * model.num_layers
        self.host_lengths = [0] * model.num_layers  # as the layer's next submission will see it
        self.length = 0
        # What the last token's residual stream went through in each layer: its output minus its input.
        self.changes: list[Tensor] = []  # [1, hidden] each

    def tiered(self, layer: int) -> bool:
        return not (self.is_exact(layer) and self.settings.exact_mode == "resident")

    def is_exact(self, layer: int) -> bool:
        return layer == 0 or layer in self.settings.exact_layers  # layer 0 has no predecessor

    def is_predicted(self, layer: int) -> bool:
        return self.settings.lookahead != "off" and not self.is_exact(layer)

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Exact attention over everything; also a further turn. Returns the last token's logits."""
        model, first = self.model, self.length
        x = model.embed(tokens, first)
        total = first + len(tokens)
        visible = torch.arange(total)[None, :] <= torch.arange(first, total)[:, None]
        last_inputs = []
        for layer in range(model.num_layers):
            query = model.query(layer, x, first)
            self._append(layer, x, first)
            logits = self._logits(query, self.keys[layer]).masked_fill(~visible, -math.inf)
            context = logits.softmax(-1) @ self._per_query_head(self.values[layer])
            last_inputs.append(x[-1:])
            x = model.after_attention(layer, x, context)
        self.length = total
        self.changes = [after - before for before, after in pairwise([*last_inputs, x[-1:]])]
        host = prefill_host_length(total, self.settings.sinks, self.settings.window)
        assert all(host >= before for before in self.host_lengths)
        self.host_lengths = [host if self.tiered(layer) else 0 for layer in range(model.num_layers)]
        return model.head(x[-1:])[0]

    def decode(self, token: int, follow: Mapping[int, Sequence[Sequence[int]]] | None = None) -> StepRecord:
        """One step. `follow`: another implementation's choices (layer -> KV head -> positions), which are
        judged and, where they differ within the tolerances, used, so that a tie does not spread."""
        model, position = self.model, self.length
        x = model.embed([token], position)
        inputs: list[Tensor] = []  # of the layers so far
        records = []
        for layer in range(model.num_layers):
            query = model.query(layer, x, position)
            predicted = self._predicted_query(layer, inputs, query) if self.is_predicted(layer) else query
            record = LayerRecord(self.tiered(layer), self.host_lengths[layer], [], [], position + 1)
            if record.tiered:
                self._choose(layer, predicted, record)
            kept = self._followed(layer, record, follow)
            inputs.append(x)
            self._append(layer, x, position)
            context = []
            for kv_head in range(model.kv_heads):
                rows = self._attended_rows(record, kept[kv_head] if record.tiered else None)
                record.attended.append(len(rows))
                context.append(self._attend(layer, kv_head, query, predicted, rows, record))
            x = model.after_attention(layer, x, torch.cat(context))
            records.append(record)
            self._age(layer)
        self.length += 1
        self.changes = [after - before for before, after in pairwise([*inputs, x])]
        return StepRecord(model.head(x)[0], records)

    # -- parts of a step

    def _predicted_query(self, layer: int, inputs: Sequence[Tensor], query: Tensor) -> Tensor:
        """q' of this layer, from what is known when the layer before it begins: this layer's own norm, projection
        and position, on `x`, the input of the layer before, or on `delta`, the same plus what the previous token's
        residual gained in that layer. `query` is the true one, for tests that replace the prediction by it."""
        before = inputs[layer - 1]
        if self.settings.predictor == "delta":
            before = before + self.changes[layer - 1]
        return self.model.query(layer, before, self.length)

    def _attend(
        self, layer: int, kv_head: int, query: Tensor, predicted: Tensor, attended: list[int], record: LayerRecord
    ) -> Tensor:
        """[group, 1, head_dim] of one KV head's query heads; the new token's row is in the cache already."""
        keys, values = self.keys[layer][kv_head], self.values[layer][kv_head]
        heads = slice(kv_head * self.model.group, (kv_head + 1) * self.model.group)
        logits = query[heads] @ keys.T * self.model.head_dim**-0.5  # [group, 1, context]
        counted = torch.zeros(record.context, dtype=torch.bool)  # the rows of the denominator
        counted[attended] = True
        if record.tiered and self.is_predicted(layer) and self.settings.lookahead == "logits":
            host = list(self._host(record))
            logits[..., host] = predicted[heads] @ keys[host].T * self.model.head_dim**-0.5
            if self.settings.dropped == "share":
                counted[host] = True
        probabilities = logits.masked_fill(~counted, -math.inf).softmax(-1)
        return probabilities[..., attended] @ values[attended]

    def _choose(self, layer: int, chooser: Tensor, record: LayerRecord) -> None:
        """p over sinks, window and host (the new token is not in it), then the rule, per KV head."""
        probabilities = self._logits(chooser, self.keys[layer]).softmax(-1)[:, 0]  # [heads, length]
        grouped = probabilities.reshape(self.model.kv_heads, self.model.group, -1).mean(1)
        record.choices = [choose(p, self._host(record), self.settings) for p in grouped.tolist()]

    def _followed(
        self, layer: int, record: LayerRecord, follow: Mapping[int, Sequence[Sequence[int]]] | None
    ) -> list[list[int]]:
        own = [choice.positions for choice in record.choices]
        if follow is None:
            return own
        if not record.tiered:
            if layer in follow:
                record.problems.append("has a choice, but all of its tokens are on the device")
            return own
        if layer not in follow or len(follow[layer]) != len(own):
            record.problems.append("has no choice for every KV head")
            return own
        kept = []
        for kv_head, (choice, other) in enumerate(zip(record.choices, follow[layer], strict=True)):
            problem = disagreement(choice, other, self._host(record), self.settings)
            if problem:
                record.problems.append(f"KV head {kv_head}: {problem}")
            kept.append(choice.positions if problem else list(other))
        return kept

    def _host(self, record: LayerRecord) -> range:
        return range(self.settings.sinks, self.settings.sinks + record.host_length)

    def _attended_rows(self, record: LayerRecord, kept: list[int] | None) -> list[int]:
        """Sinks, window, the new token, and the kept rows of the host."""
        everything = range(record.context)
        if kept is None:
            return list(everything)
        host = self._host(record)
        return sorted([row for row in everything if row not in host] + kept)

    def _age(self, layer: int) -> None:
        if not self.tiered(layer):
            return
        window_rows = self.keys[layer].shape[1] - self.settings.sinks - self.host_lengths[layer]
        if window_rows >= ageing_threshold(layer, self.model.num_layers, self.settings.window):
            self.host_lengths[layer] += BLOCK

    def _append(self, layer: int, x: Tensor, first: int) -> None:
        key, value = self.model.key_value(layer, x, first)
        self.keys[layer] = torch.cat((self.keys[layer], key), dim=1)
        self.values[layer] = torch.cat((self.values[layer], value), dim=1)

    def _per_query_head(self, kv: Tensor) -> Tensor:
        return kv.repeat_interleave(self.model.group, dim=0)

    def _logits(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ self._per_query_head(keys).transpose(1, 2) * self.model.head_dim**-0.5
