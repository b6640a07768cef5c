"""InfiniGen and Quest over dense attention, in float64, from their definitions (algorithms.md, 6 and 8).

A batch goes through the layers side by side, because InfiniGen keeps as many tokens of every head as the mean over all
of them says. What another implementation chose is judged, and then used, so that a tie does not spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from tests.equivalence.dense_simulation import BLOCK, DenseModel, ageing_threshold, cap, prefill_host_length

PAGE = 16
ROUNDING = 2e-4  # relative difference of p below which two tokens may change places
LOGIT_ROUNDING = 2e-4  # distance of a logit from the threshold below which it may be counted or not

Chosen = Mapping[int, Sequence[Sequence[Sequence[int]]]]  # layer -> sequence -> KV head -> positions


@dataclass(frozen=True)
class Method:
    """What scores the host's tokens, and how many are kept."""

    scores: Literal["keys", "partial", "pages"]
    keep: float | int = 1.0
    alpha: float | None = None
    ratio: float = 0.2
    predicted: bool = True  # the query of the layer for the previous layer's input, else its own
    sinks: int = 4
    window: int = 64
    exact: tuple[int, ...] = (0, 1)  # all their KV is on the device; else layer 0 chooses by its own query


@dataclass
class _Sequence:
    keys: list[Tensor]  # of each layer, [kv heads, n, d]
    values: list[Tensor]
    hosts: list[int]  # host rows of each layer
    columns: dict[int, Tensor] = field(default_factory=dict)  # A[:, columns] of each layer, [kv heads, d, d']
    length: int = 0


class DenseScores:
    """Sequences that are prefilled and decoded together."""

    def __init__(self, model: DenseModel, method: Method, sequences: int) -> None:
        self.model, self.method = model, method
        self.skews: dict[int, Tensor] = {}  # A of each layer, [kv heads, d, d]
        empty = torch.empty(model.kv_heads, 0, model.head_dim, dtype=torch.float64)
        layers = model.num_layers
        self.sequences = [_Sequence([empty] * layers, [empty] * layers, [0] * layers) for _ in range(sequences)]
        self.problems: list[str] = []
        self.kept: list[int] = []  # every number of tokens that was kept by a KV head
        self.limits: list[tuple[int, int]] = []  # with alpha: of each choice the number by alpha, and the cap

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """First prompts; the last tokens' logits."""
        model, method, out = self.model, self.method, []
        for sequence, prompt in zip(self.sequences, prompts, strict=True):
            x, count = model.embed(prompt, 0), len(prompt)
            hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
            for layer in range(model.num_layers):
                query = model.query(layer, x, 0)
                sequence.keys[layer], sequence.values[layer] = model.key_value(layer, x, 0)
                if method.scores == "partial" and layer not in method.exact:
                    if layer not in self.skews:
                        self.skews[layer] = self._skew(query)
                    sequence.columns[layer] = self._columns(self.skews[layer], query)
                logits = query @ self._each(sequence.keys[layer]).mT * model.head_dim**-0.5
                context = logits.masked_fill(hidden, -math.inf).softmax(-1) @ self._each(sequence.values[layer])
                x = model.after_attention(layer, x, context)
                if layer not in method.exact:
                    sequence.hosts[layer] = prefill_host_length(count, method.sinks, method.window)
            sequence.length = count
            out.append(model.head(x[-1:])[0])
        return torch.stack(out)

    def decode(self, tokens: Sequence[int], chosen: Chosen) -> Tensor:
        """A token more of each sequence; chosen: by another implementation. The next tokens' logits."""
        model, method = self.model, self.method
        xs = [model.embed([token], seq.length) for token, seq in zip(tokens, self.sequences, strict=True)]
        before = xs
        for layer in range(model.num_layers):
            queries = [model.query(layer, x, seq.length) for x, seq in zip(xs, self.sequences, strict=True)]
            choosing = queries
            if method.predicted and layer:
                choosing = [model.query(layer, x, seq.length) for x, seq in zip(before, self.sequences, strict=True)]
            kept = [[[] for _ in range(model.kv_heads)] for _ in xs]
            if layer not in method.exact:
                kept = [list(map(list, heads)) for heads in chosen[layer]]
                self._judge(layer, [query[:, 0] for query in choosing], kept)
            after = []
            for seq, x, query, of_heads in zip(self.sequences, xs, queries, kept, strict=True):
                key, value = model.key_value(layer, x, seq.length)
                seq.keys[layer] = torch.cat((seq.keys[layer], key), dim=1)
                seq.values[layer] = torch.cat((seq.values[layer], value), dim=1)
                seen = torch.ones(model.kv_heads, seq.length + 1, dtype=torch.bool)
                seen[:, self._host(seq, layer)] = False
                for head, positions in enumerate(of_heads):
                    seen[head, positions] = True
                logits = query @ self._each(seq.keys[layer]).mT * model.head_dim**-0.5
                logits = logits.masked_fill(~self._each(seen).unsqueeze(1), -math.inf)
                after.append(model.after_attention(layer, x, logits.softmax(-1) @ self._each(seq.values[layer])))
            before, xs = xs, after
            self._age(layer)
        for seq in self.sequences:
            seq.length += 1
        return torch.stack([model.head(x)[0] for x in xs])

    # -- what is chosen

    def _judge(self, layer: int, queries: list[Tensor], kept: list[list[list[int]]]) -> None:
        """queries: [heads, d] each."""
        scores = [self._scores(layer, *pair) for pair in zip(self.sequences, queries, strict=True)]
        counts = self._counts(layer, scores)
        for b, (seq, logits) in enumerate(zip(self.sequences, scores, strict=True)):
            host = self._host(seq, layer)
            p = logits.softmax(-1).view(self.model.kv_heads, self.model.group, -1).mean(1)
            for head, positions in enumerate(kept[b]):
                where = f"layer {layer}, sequence {b}, KV head {head}"
                self.kept.append(len(positions))
                if len(positions) not in counts[b]:
                    self.problems.append(f"{where}: {len(positions)} tokens instead of {list(counts[b])}")
                ranking = sorted(range(host.start, host.stop), key=lambda row, p=p[head]: (-float(p[row]), row))
                mine = set(ranking[: len(positions)])
                missing, extra = sorted(mine - set(positions)), sorted(set(positions) - mine)
                if len(set(positions)) != len(positions) or len(missing) != len(extra):
                    self.problems.append(f"{where}: not {len(positions)} host tokens")
                elif missing and p[head, missing].max() - p[head, extra].min() > ROUNDING * p[head, missing].max():
                    self.problems.append(f"{where}: {extra} instead of {missing}")

    def _scores(self, layer: int, seq: _Sequence, query: Tensor) -> Tensor:
        """[heads, length]: sinks and window by their keys, the host by what stands for its keys."""
        keys, host, scale = seq.keys[layer], self._host(seq, layer), self.model.head_dim**-0.5
        logits = (query.unsqueeze(1) @ self._each(keys).mT)[:, 0] * scale
        for head in range(self.model.heads):
            kv_head = head // self.model.group
            rows, q = keys[kv_head, host], query[head]
            if self.method.scores == "partial":
                columns = seq.columns[layer][kv_head]
                logits[head, host] = (rows @ columns) @ (q @ columns) * scale
            elif self.method.scores == "pages":
                for first in range(host.start, host.stop, PAGE):
                    page = keys[kv_head, first : first + PAGE]
                    bound = torch.maximum(q * page.amin(0), q * page.amax(0)).sum()
                    logits[head, first : first + PAGE] = bound * scale
        return logits

    def _counts(self, layer: int, scores: list[Tensor]) -> list[range]:
        """The numbers of tokens that may be kept of each sequence: more than one if rounding decides."""
        method, hosts = self.method, [seq.hosts[layer] for seq in self.sequences]
        caps = [min(host, cap(method.keep, host)) for host in hosts]
        if method.scores == "pages":
            caps = [PAGE * math.ceil(count / PAGE) for count in caps]
        if method.alpha is None:
            return [range(count, count + 1) for count in caps]
        shares = []
        for near in (LOGIT_ROUNDING, -LOGIT_ROUNDING):
            above = 0
            for seq, logits in zip(self.sequences, scores, strict=True):
                threshold = logits.amax(-1, keepdim=True) - method.alpha + near
                above += int((logits > threshold)[:, self._host(seq, layer)].sum())
            shares.append(Fraction(above, max(1, self.model.heads * sum(hosts))))
        fewest, most = ([math.floor(share * host) for host in hosts] for share in shares)
        self.limits += list(zip(fewest, caps, strict=True))
        return [range(min(a, c), min(b, c) + 1) for a, b, c in zip(fewest, most, caps, strict=True)]

    def _skew(self, query: Tensor) -> Tensor:
        """Right singular vectors of the group's queries [heads, n, d], one below the other."""
        stacked = query.reshape(self.model.kv_heads, -1, self.model.head_dim)
        return torch.linalg.svd(stacked, full_matrices=False).Vh.mT

    def _columns(self, skew: Tensor, query: Tensor) -> Tensor:
        width = int(Fraction(repr(self.method.ratio)) * self.model.head_dim)
        columns = []
        for kv_head, a in enumerate(skew):
            heads = slice(kv_head * self.model.group, (kv_head + 1) * self.model.group)
            weights = (query[heads] @ a).abs().sum((0, 1))
            order = weights.argsort(descending=True)
            if width < len(order):
                last, first = weights[order[width - 1]], weights[order[width]]
                assert last - first > 2e-5 * last, "within rounding of other columns: another seed is needed"
            columns.append(a[:, order[:width]])
        return torch.stack(columns)

    # -- the tiers

    def _host(self, seq: _Sequence, layer: int) -> slice:
        return slice(self.method.sinks, self.method.sinks + seq.hosts[layer])

    def _age(self, layer: int) -> None:
        """All layers in one step, as the device scores."""
        for seq in self.sequences:
            window = seq.keys[layer].shape[1] - self.method.sinks - seq.hosts[layer]
            threshold = ageing_threshold(0, self.model.num_layers, self.method.window)
            if layer not in self.method.exact and window >= threshold:
                seq.hosts[layer] += BLOCK

    def _each(self, of_kv_heads: Tensor) -> Tensor:
        return of_kv_heads.repeat_interleave(self.model.group, dim=0)
