"""A plain float64 simulation of hybridgen's decode, written from contracts.md alone.

One sequence at a time; the whole K and V history of every layer is kept, and everything is computed on it
directly. It shares no code with the engine. Slow, and meant to be read next to contracts.md:

* "What is kept": `cap`, `Rule`, `choose`
* "Host tier and ageing": `prefill_host_length`, `ageing_threshold`
* "select" / "logits" / "off" / "Exact layers": `DenseSimulation.decode`, `DenseSimulation._attend`
* "Post-QKT" / "Pre-QKT", and plans that change from step to step: `Plan`, `Scan`, `name_candidates`
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
* Pre-QKT, `recent and heavy`: half of the candidates are the youngest host rows, half those of the highest `lately`,
  a moving average of p over the choices that scored them. A list stays until its size or the host changes, or a
  full scan has come between; the sequences of a micro-batch renew theirs together.
* p, and with it the mass, is over sinks, window and the scored rows alone. Candidates that hold less than the mass
  are as good as no mass: the rule's largest number. K itself always counts by the whole host.
* Candidates that would all be kept are not scored, except for `logits`, which needs their logits: there they are a
  choice like any other, and `lately` moves.
* `lately` outlives a further turn; rows that come to the host begin at 0.
* `logits` with `dropped="share"`: rows that were not scored are in no denominator.
* "Quantised keys" (`dense_keys.py`): a row is stored when it enters the host, after the whole prompt's prefill or when
  its block ages. From then on its key is the stored one: for the scan, after a fetch, as the past of a further turn
  and for the true mass. A sketch is made of the key as it was, and only ever chooses, but for `logits`, which weighs
  by what was scored. Sinks, window and V are as they were made.
* Whether a layer's keys are quantised is decided by the first sequence of a micro-batch.
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

from tests.equivalence.dense_keys import (
    QUERIES,
    Encoded,
    KeyStorage,
    KeyType,
    Sketch,
    StoredKeys,
    named_otherwise,
    problem_of_query,
    settle,
)

BLOCK = 64  # rows that age together


@dataclass(frozen=True)
class Rule:
    """How many host tokens are kept. Floats for `keep` are fractions, ints are counts."""

    keep: int | float | None = 0.1
    keep_mass: float | None = None
    min_keep: int = 0

    @property
    def by_mass(self) -> bool:
        return self.keep_mass is not None and self.keep_mass < 1.0

    def kept(self, host_length: int, of_mass: int | None = None) -> int:
        """K. of_mass: the fewest tokens that hold the mass; None: no mass, or not even all of them hold it."""
        counts = [] if of_mass is None else [of_mass]
        if self.keep is not None:
            counts.append(cap(self.keep, host_length))
        return min(host_length, max(self.min_keep, min(counts, default=host_length)))


@dataclass(frozen=True)
class Plan(Rule):
    """What a layer does in one decode step.

    extra: K is this many times what the rule says. scan_tokens: how many candidates Pre-QKT names, but never fewer
    than are surely kept; None: every host token is scored, Post-QKT. trial_tokens: on a full scan, the mass that the
    best K of so many candidates would have covered is measured; nothing is attended by it.
    """

    scan_tokens: int | None = None
    extra: float = 1.0
    trial_tokens: tuple[int, ...] = ()

    def kept(self, host_length: int, of_mass: int | None = None) -> int:
        return min(host_length, math.ceil(Fraction(repr(self.extra)) * super().kept(host_length, of_mass)))

    def candidates(self, host_length: int) -> int:
        if self.scan_tokens is None:
            return host_length
        least = self.kept(host_length, of_mass=0 if self.by_mass else None)
        return min(host_length, max(self.scan_tokens, least))


@dataclass(frozen=True)
class Settings(Rule):
    """Everything contracts.md lets one choose."""

    window: int = 64
    sinks: int = 4
    lookahead: Literal["select", "logits", "off"] = "select"
    lookahead_layers: int = 1
    predictor: Literal["x", "delta", "fitted"] = "x"
    dropped: Literal["share", "renormalise"] = "share"  # of `logits`
    exact_layers: tuple[int, ...] = (0,)
    exact_mode: Literal["resident", "select"] = "resident"
    key_type: KeyType = "fp32"
    sketch: Sketch = "none"
    sketch_home: Literal["host", "gpu"] = "host"
    prefill_chunk: int = 2048  # the first piece makes the mean of int8

    @property
    def keys_as(self) -> KeyStorage:
        return KeyStorage(self.key_type, self.sketch, self.sketch_home)

    @property
    def plan(self) -> Plan:
        """Of every layer and step, unless another one is given."""
        return Plan(self.keep, self.keep_mass, self.min_keep)


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
    ranking: list[int]  # all candidates, best first
    p: list[float]  # of every position that the choosing query saw, else 0; NaN if nothing was scored
    local_mass: float  # p of sinks + window
    # Counts that were right if a little more or less were held -> the distance of what is held from the mass.
    other_counts: dict[int, float] = field(default_factory=dict)

    def mass(self, count: int) -> float:
        """p held by sinks + window + the best `count` candidates."""
        return self.local_mass + sum(self.p[position] for position in self.ranking[:count])


def choose(p: list[float], host: range, rule: Rule, candidates: Sequence[int] | None = None) -> Choice:
    """The host tokens that one KV head keeps, given its group's mean probabilities `p` by position.

    candidates: those of `host` that were scored; None: all of them.
    """
    # Python's sort is stable and positions ascend: equal probabilities keep the lower position first.
    ranking = sorted(sorted(host if candidates is None else candidates), key=lambda position: -p[position])
    choice = Choice([], ranking, p, sum(p[: host.start]) + sum(p[host.stop :]))

    def kept(of_mass: int | None) -> int:
        return min(len(ranking), rule.kept(len(host), of_mass))

    count = kept(None)
    # A mass of 1 is every token's: no probability is 0, however p is rounded.
    if rule.keep_mass is not None and rule.by_mass:
        held, needed = choice.local_mass, 0
        while needed < len(ranking) and held < rule.keep_mass:
            held += p[ranking[needed]]
            needed += 1
        count = kept(needed if held >= rule.keep_mass else None)
        distance = {near: abs(choice.mass(near) - rule.keep_mass) for near in (needed - 1, needed) if near >= 0}
        if needed:
            choice.other_counts[kept(needed - 1)] = distance[needed - 1]
        choice.other_counts[kept(needed + 1)] = distance[needed]
        choice.other_counts.pop(count, None)
    choice.positions = ranking[:count]
    return choice


# ---------------------------------------------------------------------------------------------------------
# What is scored

LATELY_WEIGHT = 0.25  # of the newest p in its moving average


@dataclass(frozen=True)
class Scan:
    """A layer's plan for the sequences of a micro-batch, which are scanned together."""

    plan: Plan
    hosts: tuple[int, ...]  # host length of each

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many candidates each sequence has."""
        return tuple(self.plan.candidates(host) for host in self.hosts)

    @property
    def full(self) -> bool:
        return self.sizes == self.hosts

    @property
    def keeps_all(self) -> bool:
        """There is a list, and nothing to choose from it."""
        pairs = zip(self.sizes, self.hosts, strict=True)
        return not self.full and not self.plan.by_mass and all(size <= self.plan.kept(host) for size, host in pairs)


def name_candidates(lately: Mapping[int, float], host: range, count: int) -> tuple[list[int], list[int]]:
    """`count` host positions to be scored, the recent and the heavy ones, and all that are left, heaviest first."""
    recent = range(host.stop - (count + 1) // 2, host.stop)
    older = sorted(range(host.start, recent.start), key=lambda position: -lately.get(position, 0.0))
    return [*older[: count // 2], *recent], older[count // 2 :]


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
    candidates: list[list[int]] = field(default_factory=list)  # per KV head; empty: all of the host
    full: bool = True  # every host token of every sequence of the micro-batch is scored
    named: bool = False  # the candidates were named in this step
    scored: bool = True  # false: the candidates are kept, whatever their p
    close_namings: list[str] = field(default_factory=list)  # within rounding of other candidates
    trials: list[list[float]] = field(default_factory=list)  # per KV head, the mass of each; NaN: a close naming
    true_mass: list[float] = field(default_factory=list)  # per KV head, covered by the true query and stored keys
    mass_rounding: list[float] = field(default_factory=list)  # the most that a scan's rounding of the query moves it by

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

    def too_close(self) -> list[str]:
        choices = [choice for layer in self.layers for choice in layer.choices]
        namings = [reason for layer in self.layers for reason in layer.close_namings]
        return namings + [reason for choice in choices if (reason := too_close(choice))]


# ---------------------------------------------------------------------------------------------------------
# Comparing a choice with another implementation's

SWAP_TOLERANCE = 1e-6  # relative difference of p below which two tokens may change places
MASS_TOLERANCE = 1e-6  # distance of the covered mass from M below which the count may differ by one
# This simulation run in float32 is up to 3e-5 (relative) away from float64 in p and 1e-6 in covered mass. A
# choice nearer than twice that to another one, yet beyond the tolerances, would test the rounding of the
# machine instead of the rules. The tests' seeds are such that none occurs, and check it.
SWAP_MARGIN = 6e-5
MASS_MARGIN = 2e-6


@dataclass(frozen=True)
class Tolerances:
    """How far from the boundary a choice may be another one: of p, relative, and of mass."""

    swap: float = SWAP_TOLERANCE
    mass: float = MASS_TOLERANCE


# With quantised keys no seed is clear on every machine: a code within rounding of another one, of which there are
# always some, moves all that comes after it. What is left of rounding has room here instead.
GENEROUS = Tolerances(2e-4, 1e-5)


@dataclass(frozen=True)
class Seen:
    """What another implementation scanned in one layer and step: with this query [heads, d], of each KV head these
    positions. Where it differs by no more than rounding, it is followed."""

    query: Tensor
    listed: list[list[int]] | None = None  # None: all of the host


def disagreement(choice: Choice, other: Sequence[int], allowed: Tolerances | None = None) -> str | None:
    """Why `other` is not the set that `choice` is, or None if it is within the tolerances."""
    allowed = allowed or Tolerances()
    if len(set(other)) != len(other):
        return "a position is listed twice"
    outside = sorted(set(other) - set(choice.ranking))
    if outside:
        return f"{outside} are not among the {len(choice.ranking)} candidates"
    mine, theirs = len(choice.positions), len(other)
    if mine != theirs and choice.other_counts.get(theirs, math.inf) >= allowed.mass:
        return f"{theirs} tokens instead of {mine} of {len(choice.ranking)}"
    expected = set(choice.ranking[:theirs])
    missing, extra = sorted(expected - set(other)), sorted(set(other) - expected)
    if missing:
        p_missing, p_extra = ([choice.p[i] for i in some] for some in (missing, extra))
        if max(p_missing) - min(p_extra) > allowed.swap * max(p_missing):
            return f"{extra} instead of {missing}; p {p_extra} against {p_missing}"
    ordered = [choice.p[position] for position in other]
    if any(after > before * (1 + max(1e-4, allowed.swap)) for before, after in pairwise(ordered)):
        return "not listed best first"
    return None


def too_close(choice: Choice) -> str | None:
    """Why float32 may choose otherwise although it follows the rules, or None if the choice is clear."""
    count, ranking = len(choice.positions), choice.ranking
    if 0 < count < len(ranking):
        kept, left = choice.p[ranking[count - 1]], choice.p[ranking[count]]
        if SWAP_TOLERANCE * kept <= kept - left < SWAP_MARGIN * kept:
            return f"p of the last kept and the first left token: {kept}, {left}"
    for other, distance in choice.other_counts.items():
        if MASS_TOLERANCE <= distance < MASS_MARGIN:
            return f"{count} tokens, but {other} if {distance} of mass more or less were held"
    return None


def naming_too_close(lately: Mapping[int, float], named: list[int], left: list[int]) -> str | None:
    """The same of a list of candidates, of which another implementation says nothing: it has no tolerance.

    Rows that were never scored are equal for everyone.
    """
    heavy = named[: len(named) // 2]
    if heavy and left:
        last, first = lately.get(heavy[-1], 0.0), lately.get(left[0], 0.0)
        if last > 0 and last - first < SWAP_MARGIN * last:
            return f"`lately` of the last named and the first unnamed token: {last}, {first}"
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
        # Predictor `fitted`, by whoever made them: of each layer, weight [heads * head_dim, hidden] and bias, float64.
        self.fitted: dict[int, tuple[Tensor, Tensor]] = {}

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

    def query(self, layer: int, x: Tensor, first: int, fitted: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[heads, tokens, head_dim], rotated; `x` is the layer's input before its norm. fitted: weight and bias in
        place of the layer's projection."""
        normed = self.attention_input(layer, x)
        if fitted is not None:
            return self._as_heads(F.linear(normed, *fitted), first, rotate=True)
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

    def layer_inputs(self, tokens: Sequence[int]) -> list[Tensor]:
        """Of full attention: what each layer is given, [tokens, hidden]."""
        x, inputs = self.embed(tokens, 0), []
        unseen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for layer in range(self.num_layers):
            inputs.append(x)
            key, value = (each.repeat_interleave(self.group, 0) for each in self.key_value(layer, x, 0))
            logits = self.query(layer, x, 0) @ key.transpose(1, 2) * self.head_dim**-0.5
            x = self.after_attention(layer, x, logits.masked_fill(unseen, -torch.inf).softmax(-1) @ value)
        return inputs

    def _heads(self, name: str, normed: Tensor, first: int, rotate: bool) -> Tensor:
        return self._as_heads(self.linear(name, normed), first, rotate)

    def _as_heads(self, projected: Tensor, first: int, rotate: bool) -> Tensor:
        heads = projected.reshape(projected.shape[0], -1, self.head_dim).transpose(0, 1)
        if self.inv_freq is None or not rotate:
            return heads
        # float32 angles and tables are part of the models' definition (transformers computes them so).
        positions = torch.arange(first, first + projected.shape[0], dtype=torch.float32)
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
        self.keys = [empty] * model.num_layers  # as they were made
        self.values = [empty] * model.num_layers
        self.host_lengths = [0] * model.num_layers  # as the layer's next submission will see it
        self.length = 0
        self.lately: list[list[dict[int, float]]] = [[{} for _ in range(model.kv_heads)] for _ in self.keys]
        # Of each layer the candidates of every KV head, and the scan that they were named for.
        self.named: list[tuple[Scan, list[list[int]]] | None] = [None] * model.num_layers
        # What the last token's residual stream went through in each layer: its output minus its input.
        self.changes: list[Tensor] = []  # [1, hidden] each
        # Of each layer, as soon as there is a token: None decides by this sequence's first prompt.
        self.keys_as: list[KeyStorage] | None = None
        self.close_recalls: list[str] = []  # within rounding of another decision
        self.stored: list[StoredKeys | None] = [None] * model.num_layers  # the host's keys; None: as they were made
        self._tolerances = Tolerances() if settings.keys_as.plain else GENEROUS
        self._seen: Mapping[int, Seen] = {}  # of the running step

    def tiered(self, layer: int) -> bool:
        return not (self.is_exact(layer) and self.settings.exact_mode == "resident")

    def is_exact(self, layer: int) -> bool:
        return layer == 0 or layer in self.settings.exact_layers  # layer 0 has no predecessor

    def is_predicted(self, layer: int) -> bool:
        return self.settings.lookahead != "off" and not self.is_exact(layer)

    def weighs_predicted(self, layer: int) -> bool:
        """Predicted logits enter the layer's softmax."""
        return self.is_predicted(layer) and self.settings.lookahead == "logits"

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Exact attention over everything; also a further turn. Returns the last token's logits."""
        model, first = self.model, self.length
        x = model.embed(tokens, first)
        total = first + len(tokens)
        visible = torch.arange(total)[None, :] <= torch.arange(first, total)[:, None]
        last_inputs, queries = [], []
        for layer in range(model.num_layers):
            query = model.query(layer, x, first)
            self._append(layer, x, first)
            queries.append(query)
            logits = self._logits(query, self._cached(layer)).masked_fill(~visible, -math.inf)
            context = logits.softmax(-1) @ self._per_query_head(self.values[layer])
            last_inputs.append(x[-1:])
            x = model.after_attention(layer, x, context)
        self.length = total
        self.changes = [after - before for before, after in pairwise([*last_inputs, x[-1:]])]
        host = prefill_host_length(total, self.settings.sinks, self.settings.window)
        assert all(host >= before for before in self.host_lengths)
        if not first:
            self._settle_keys(queries)
        self.host_lengths = [host if self.tiered(layer) else 0 for layer in range(model.num_layers)]
        for layer in range(model.num_layers):
            self._store(layer)
        return model.head(x[-1:])[0]

    def decode(
        self,
        token: int,
        follow: Mapping[int, Sequence[Sequence[int]]] | None = None,
        scans: Sequence[Scan] | None = None,
        seen: Mapping[int, Seen] | None = None,
    ) -> StepRecord:
        """One step. `follow`: another implementation's choices (layer -> KV head -> positions), which are
        judged and, where they differ within the tolerances, used, so that a tie does not spread.
        `scans`: one a layer; None: what the settings say, for a sequence that is alone. `seen`: of the layers whose
        host is scanned, with quantised keys."""
        self._seen = seen or {}
        scans = scans or [Scan(self.settings.plan, (length,)) for length in self.host_lengths]
        model, position = self.model, self.length
        x = model.embed([token], position)
        inputs: list[Tensor] = []  # of the layers so far
        records = []
        for layer in range(model.num_layers):
            query = model.query(layer, x, position)
            predicted = self._predicted_query(layer, inputs, query) if self.is_predicted(layer) else query
            record = LayerRecord(self.tiered(layer), self.host_lengths[layer], [], [], position + 1)
            if record.tiered:
                if layer in self._seen and (problem := problem_of_query(self._seen[layer].query, predicted[:, 0])):
                    record.problems.append(problem)
                self._choose(layer, predicted, record, scans[layer])
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
        """q' of this layer, from what is known when the layer `lookahead_layers` before it begins (or layer 0): this
        layer's own norm, projection and position, on `x`, the input of that layer, or on `delta`, the same plus what
        the previous token's residual gained from there on. `fitted`: as `x`, with another projection in place of the
        layer's. `query` is the true one, for tests that replace the prediction by it."""
        source = max(0, layer - self.settings.lookahead_layers)
        before = inputs[source]
        if self.settings.predictor == "fitted":
            return self.model.query(layer, before, self.length, self.model.fitted[layer])
        if self.settings.predictor == "delta":
            for between in range(source, layer):
                before = before + self.changes[between]
        return self.model.query(layer, before, self.length)

    def _attend(
        self, layer: int, kv_head: int, query: Tensor, predicted: Tensor, attended: list[int], record: LayerRecord
    ) -> Tensor:
        """[group, 1, head_dim] of one KV head's query heads; the new token's row is in the cache already."""
        keys, values = self._cached(layer)[kv_head], self.values[layer][kv_head]
        heads = slice(kv_head * self.model.group, (kv_head + 1) * self.model.group)
        logits = query[heads] @ keys.T * self.model.head_dim**-0.5  # [group, 1, context]
        counted = torch.zeros(record.context, dtype=torch.bool)  # the rows of the denominator
        counted[attended] = True
        if record.tiered:
            covered = logits[..., attended].logsumexp(-1) - logits.logsumexp(-1)
            record.true_mass.append(float(covered.exp().mean()))
            stored = self.stored[layer]
            moved = 0.0 if stored is None else stored.rounding_of(kv_head, query[heads, 0])
            record.mass_rounding.append(moved * self.model.head_dim**-0.5)
        if record.tiered and self.weighs_predicted(layer):
            scored = record.candidates[kv_head] if record.candidates else list(self._host(record))
            logits[..., scored] = self._scores(layer, predicted, record)[heads][..., scored]
            if self.settings.dropped == "share":
                counted[scored] = True
        probabilities = logits.masked_fill(~counted, -math.inf).softmax(-1)
        return probabilities[..., attended] @ values[attended]

    def _choose(self, layer: int, chooser: Tensor, record: LayerRecord, scan: Scan) -> None:
        """Per KV head its candidates; p over sinks, window and them (the new token is not in it); then the rule."""
        host = self._host(record)
        record.candidates = self._candidates(layer, record, scan)
        record.scored = self.weighs_predicted(layer) or not scan.keeps_all
        if not record.scored:
            unknown = [math.nan] * self.length
            record.choices = [Choice(rows, rows, unknown, math.nan) for rows in record.candidates]
            return
        logits = self._scores(layer, chooser, record)[:, 0]  # [heads, length]
        for kv_head, rows in enumerate(record.candidates):
            unseen = torch.zeros(self.length, dtype=torch.bool)
            unseen[list(set(host) - set(rows))] = True
            heads = slice(kv_head * self.model.group, (kv_head + 1) * self.model.group)
            p = logits[heads].masked_fill(unseen, -math.inf).softmax(-1).mean(0).tolist()
            record.choices.append(choose(p, host, scan.plan, rows))
            lately = self.lately[layer][kv_head]
            if scan.full:
                record.trials.append(self._trials(record.choices[-1], lately, host, scan.plan))
            for row in rows:
                lately[row] = lately.get(row, 0.0) + LATELY_WEIGHT * (p[row] - lately.get(row, 0.0))

    def _trials(self, choice: Choice, lately: Mapping[int, float], host: range, plan: Plan) -> list[float]:
        """What as many tokens as were chosen would hold, had candidates been named instead."""
        masses = []
        for size in plan.trial_tokens:
            named, left = name_candidates(lately, host, min(size, len(host)))
            best = sorted((choice.p[row] for row in named), reverse=True)[: len(choice.positions)]
            close = naming_too_close(lately, named, left) is not None
            masses.append(math.nan if close else choice.local_mass + sum(best))
        return masses

    def _candidates(self, layer: int, record: LayerRecord, scan: Scan) -> list[list[int]]:
        """Named anew unless the last list of this layer was for as many, of the same hosts, and is the last scan."""
        host, named = self._host(record), self.named[layer]
        record.full = scan.full
        if scan.full:
            self.named[layer] = None
            return [list(host) for _ in range(self.model.kv_heads)]
        record.named = named is None or (named[0].sizes, named[0].hosts) != (scan.sizes, scan.hosts)
        if named is None or record.named:
            named = scan, []
            theirs = self._seen[layer].listed if layer in self._seen else None
            for kv_head, lately in enumerate(self.lately[layer]):
                rows, left = name_candidates(lately, host, scan.plan.candidates(len(host)))
                if theirs is None:
                    reason = naming_too_close(lately, rows, left)
                    record.close_namings += [reason] if reason else []
                else:
                    recent = rows[len(rows) // 2 :]
                    by_position = [lately.get(row, 0.0) for row in range(host.stop)]
                    problem = named_otherwise(by_position, rows, theirs[kv_head], recent, self._tolerances.swap)
                    record.problems += [f"KV head {kv_head}: {problem}"] if problem else []
                    rows = rows if problem else theirs[kv_head]
                named[1].append(rows)
            self.named[layer] = named
        return named[1]

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
            problem = disagreement(choice, other, self._tolerances)
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
        turn = 0 if self.settings.sketch != "none" and self.settings.sketch_home == "gpu" else layer
        if window_rows >= ageing_threshold(turn, self.model.num_layers, self.settings.window):
            self.host_lengths[layer] += BLOCK
            self._store(layer)

    def _settle_keys(self, queries: Sequence[Tensor]) -> None:
        """How each layer's host keeps its keys, after the first prompt; queries: of each layer, all of the prompt."""
        settings, first = self.settings, self.settings.sinks
        if settings.keys_as.plain:
            return
        if self.keys_as is None:
            self.keys_as = []
            last_piece = (self.length - 1) % settings.prefill_chunk + 1
            for layer, query in enumerate(queries):
                some = query[:, -min(QUERIES, last_piece) :]
                decision, close = settle(settings.keys_as, some, self.keys[layer][:, first:])
                self.keys_as.append(decision)
                self.close_recalls += [f"layer {layer}: {reason}" for reason in close if self.tiered(layer)]
        for layer, keys in enumerate(self.keys):
            piece = keys[:, first : settings.prefill_chunk]
            mean = piece.mean(1) if piece.shape[1] else keys.new_zeros(keys.shape[0], keys.shape[2])
            if self.tiered(layer) and not self.keys_as[layer].plain:
                self.stored[layer] = StoredKeys(self.keys_as[layer], mean)

    def _store(self, layer: int) -> None:
        """Rows that the host has and had not."""
        stored = self.stored[layer]
        if stored is not None:
            first, last = (self.settings.sinks + rows for rows in (stored.rows.shape[1], self.host_lengths[layer]))
            stored.add(self.keys[layer][:, first:last])

    def follow_keys(self, layer: int, theirs: Encoded) -> list[str]:
        """Judge how another implementation keeps the host rows that were not judged yet, and follow it."""
        stored = self.stored[layer]
        assert stored is not None
        return [f"layer {layer}: {problem}" for problem in stored.follow(theirs)]

    def _cached(self, layer: int) -> Tensor:
        """The keys that attention sees: of the host's rows the stored ones."""
        keys, stored, sinks = self.keys[layer], self.stored[layer], self.settings.sinks
        if stored is None or not stored.rows.shape[1]:
            return keys
        return torch.cat((keys[:, :sinks], stored.rows, keys[:, sinks + stored.rows.shape[1] :]), dim=1)

    def _scores(self, layer: int, chooser: Tensor, record: LayerRecord) -> Tensor:
        """[heads, 1, rows]: of sinks and window by their keys, of the host by what the scan reads."""
        logits, stored, host = self._logits(chooser, self._cached(layer)), self.stored[layer], self._host(record)
        if stored is None or not (stored.bits or stored.rounds_query) or not host:
            return logits
        rounding = self._seen[layer].query if layer in self._seen else chooser[:, 0]
        for kv_head in range(self.model.kv_heads):
            heads = slice(kv_head * self.model.group, (kv_head + 1) * self.model.group)
            scanned = stored.logits(kv_head, chooser[heads, 0], rounding[heads])
            logits[heads, 0, host.start : host.stop] = scanned * self.model.head_dim**-0.5
        return logits

    def _append(self, layer: int, x: Tensor, first: int) -> None:
        key, value = self.model.key_value(layer, x, first)
        self.keys[layer] = torch.cat((self.keys[layer], key), dim=1)
        self.values[layer] = torch.cat((self.values[layer], value), dim=1)

    def _per_query_head(self, kv: Tensor) -> Tensor:
        return kv.repeat_interleave(self.model.group, dim=0)

    def _logits(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ self._per_query_head(keys).transpose(1, 2) * self.model.head_dim**-0.5
