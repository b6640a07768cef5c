"""The fused choice and attention: against float64 from the definitions, and against the torch code they replace."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridgen import _C
from hybridgen.attention.base import attention_logits, group_by_kv_head, joint_attention
from hybridgen.attention.native import attend_rows, choose_rows
from hybridgen.selection import budget
from hybridgen.selection.budget import KeepLimits, keep_limits
from hybridgen.types import KeepRule, TokenSelection
from tests.kernels.scan_case import ISAS, fresh_rng
from tests.kernels.test_guard_pages import between_guards

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (1, 2, 3, 4, 7)
HEAD_DIMS = (8, 40, 64, 80, 96, 128)
RULES = (
    KeepRule(0.3, None, 4),
    KeepRule(5, None, 0),
    KeepRule(None, None, 64),
    KeepRule(0, None, 0),
    KeepRule(0.3, 0.95, 4),
    KeepRule(None, 0.8, 2),
    KeepRule(None, 1.0, 0),
    KeepRule(None, 0.05, 0),
    KeepRule(10, 0.9, 30),
    KeepRule(0.5, 1 - 1e-12, 0),  # more than rounding may leave
)


@dataclass
class Case:
    """A layer's tensors, with NaN in everything that must not be used, and awkward strides."""

    lengths: list[int]
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    device_rows: int = 37
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype = torch.float32
    empty_share: float = 0.3
    spread: float = 1.5
    integers: bool = False  # queries and keys whose products are exact in float32
    scale: float = 0.0
    query: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rng = fresh_rng()
        batch, heads, rows = len(self.lengths), self.kv_heads * self.group, max(self.lengths) + 3
        self.scale = self.scale or self.dim**-0.5
        fused = torch.full((batch, heads + 2, self.dim), torch.nan)
        fused[:, :heads] = self._numbers(batch, heads, self.dim)
        self.query = fused.to(self.query_dtype)[:, :heads]
        self.keys, self.values = (self._stored(batch, self.device_rows) for _ in range(2))
        self.host_keys, self.host_values = (self._stored(batch, rows) for _ in range(2))
        self.empty = torch.from_numpy(self.rng.random((batch, 1, 1, self.device_rows)) < self.empty_share)
        self.empty[..., 0] = False
        for tensor in (self.keys, self.values):
            tensor.masked_fill_(self.empty.squeeze(1).unsqueeze(-1), torch.nan)
        logits = self._numbers(batch, heads, rows) * self.spread
        self.host_logits = torch.full((batch, heads, rows + 5), torch.nan)[..., :rows]
        for b, length in enumerate(self.lengths):
            self.host_logits[b, :, :length] = logits[b, :, :length]

    def _numbers(self, *shape: int) -> Tensor:
        if self.integers:
            return torch.from_numpy(self.rng.integers(-30, 31, shape)).float()
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def _stored(self, batch: int, rows: int) -> Tensor:
        """[B, Hkv, rows, d] as a view of [B, rows + 1, Hkv, d + 8] with NaN between."""
        wide = torch.full((batch, rows + 1, self.kv_heads, self.dim + 8), torch.nan, dtype=self.dtype)
        view = wide[:, :rows, :, 3 : 3 + self.dim].transpose(1, 2)
        view.copy_(self._numbers(batch, self.kv_heads, rows, self.dim))
        return view

    def limits(self, rule: KeepRule, hidden: int = 0, extra: float = 1.0) -> KeepLimits:
        """hidden: this many host rows more that were not scored."""
        return keep_limits(rule, [length + hidden for length in self.lengths], self.lengths, extra)

    def choose(self, limits: KeepLimits, isa: str = "") -> TokenSelection:
        return choose_rows(self.query, self.keys, self.empty, self.host_logits, limits, self.scale, isa=isa)

    def attend(self, selection: TokenSelection | None, isa: str = "") -> tuple[Tensor, Tensor]:
        """With NaN in each host row that is not chosen."""
        keys, values = self.host_keys, self.host_values
        if selection is not None:
            keys, values = (torch.full_like(t, torch.nan) for t in (keys, values))
            for b, h in np.ndindex(*selection.counts.shape):
                rows = selection.rows[b, h, : selection.counts[b, h]]
                keys[b, h, rows], values[b, h, rows] = self.host_keys[b, h, rows], self.host_values[b, h, rows]
        context, log_sum = attend_rows(
            self.query, self.keys, self.values, self.empty, keys, values, selection, self.scale, True, isa=isa
        )
        assert log_sum is not None and context.dtype == log_sum.dtype == torch.float32
        return context, log_sum

    def local_logits(self, b: int, h: int) -> np.ndarray:
        """float64 [G, rows with a token]."""
        keys = exact(self.keys[b, h])[~self.empty[b, 0, 0].numpy()]
        return self.scale * (exact(self.query[b, h * self.group : (h + 1) * self.group]) @ keys.T)

    def exact_p(self, b: int, h: int) -> tuple[np.ndarray, float]:
        """p of the host rows, by the definition, and the sum over the device rows."""
        local = self.local_logits(b, h)
        host = exact(self.host_logits[b, h * self.group : (h + 1) * self.group, : self.lengths[b]])
        p = softmax(np.concatenate((local, host), axis=1)).mean(0)
        return p[local.shape[1] :], float(p[: local.shape[1]].sum())

    def check_choice(self, limits: KeepLimits, isa: str = "", tolerance: float = 1e-4) -> TokenSelection:
        """With p asked for, which must change nothing."""
        got = self.choose(limits, isa)
        found_p = torch.full((len(self.lengths), self.kv_heads, self.host_logits.shape[2]), torch.nan)
        again = choose_rows(self.query, self.keys, self.empty, self.host_logits, limits, self.scale, found_p, isa)
        for name in ("rows", "counts", "padding", "mass"):
            assert torch.equal(getattr(got, name), getattr(again, name))
        batch, heads, width = got.rows.shape
        assert (batch, heads) == (len(self.lengths), self.kv_heads)
        assert got.rows.is_contiguous() and got.padding.is_contiguous()
        assert got.rows.dtype == got.counts.dtype == torch.int64 and got.mass.dtype == torch.float32
        assert got.padding.shape == (batch, heads, 1, width) and got.padding.dtype == torch.bool
        assert width == got.counts.max() and got.host_lengths == self.lengths
        assert torch.equal(got.padding[:, :, 0], torch.arange(width) >= got.counts.unsqueeze(-1))
        assert (got.rows[got.padding[:, :, 0]] == 0).all()
        for b, h in np.ndindex(batch, heads):
            p, local = self.exact_p(b, h)
            np.testing.assert_allclose(found_p[b, h, : p.size].numpy(), p, rtol=1e-3, atol=1e-7)
            assert (found_p[b, h, p.size :] == 0).all()
            count = int(got.counts[b, h])
            rows = got.rows[b, h, :count].numpy()
            assert len(set(rows.tolist())) == count
            assert ((rows >= 0) & (rows < self.lengths[b])).all()
            chosen = p[rows]
            assert (chosen[1:] <= chosen[:-1] * (1 + tolerance) + 1e-37).all()
            others = np.delete(p, rows)
            if count and others.size:
                assert others.max() <= chosen.min() * (1 + tolerance) + 1e-37
            assert got.mass[b, h] == pytest.approx(chosen.sum() + local, abs=tolerance)

            # Of the numbers that p within the tolerance allows, K must be that of one.
            held = np.concatenate(([0.0], np.cumsum(np.sort(p)[::-1]))) + local
            allowed = []
            for slack in (-tolerance, tolerance):
                number = limits.most[b]
                if limits.mass is not None and (held >= limits.mass + slack).any():
                    enough = int(np.argmax(held >= limits.mass + slack))
                    number = min(max(enough, limits.least[b]), number)
                kept = math.ceil(Fraction(number * limits.extra_thousandths, 1000))
                allowed.append(min(self.lengths[b], kept))
            assert allowed[0] <= count <= allowed[1]
        return got

    def check_attention(self, selection: TokenSelection | None, isa: str, tolerance: float = 1e-5) -> None:
        context, log_sum = self.attend(selection, isa)
        for b, h in np.ndindex(len(self.lengths), self.kv_heads):
            heads = slice(h * self.group, (h + 1) * self.group)
            logits, values = self.local_logits(b, h), exact(self.values[b, h])[~self.empty[b, 0, 0].numpy()]
            if selection is not None:
                rows = selection.rows[b, h, : selection.counts[b, h]]
                keys = exact(self.host_keys[b, h, rows])
                logits = np.concatenate((logits, self.scale * (exact(self.query[b, heads]) @ keys.T)), axis=1)
                values = np.concatenate((values, exact(self.host_values[b, h, rows])))
            np.testing.assert_allclose(
                context[b, heads].numpy(), softmax(logits) @ values, rtol=10 * tolerance,
                atol=tolerance * np.abs(values).max(),
            )  # fmt: skip
            top = logits.max(1)
            exact_sum = top + np.log(np.exp(logits - top[:, None]).sum(1))
            np.testing.assert_allclose(log_sum[b, heads].numpy(), exact_sum, rtol=1e-5, atol=10 * tolerance)


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))


def both(case: Case, isa: str, rules: tuple[KeepRule, ...] = RULES) -> None:
    """Every rule's choice, and attention over one of them and over none."""
    for rule in rules:
        case.check_choice(case.limits(rule), isa)
        case.check_choice(case.limits(rule, hidden=400, extra=1.375), isa)
    case.check_attention(case.choose(case.limits(RULES[4]), isa), isa)
    case.check_attention(None, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_all_shapes(isa: str, dtype: torch.dtype, group: int) -> None:
    for dim in HEAD_DIMS:
        case = Case([100, 0, 31], group=group, dim=dim, dtype=dtype)
        rule = RULES[int(case.rng.integers(len(RULES)))]
        case.check_choice(case.limits(rule, hidden=int(case.rng.integers(0, 2)) * 50), isa)
        case.check_attention(case.choose(case.limits(RULES[4]), isa), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_every_rule(isa: str) -> None:
    both(Case([900, 64, 0, 1, 450]), isa)
    both(Case([1472], kv_heads=3, device_rows=644), isa)
    both(Case([0, 0]), isa)
    both(Case([17, 80], kv_heads=1, group=17, empty_share=0.0), isa)
    both(Case([65], device_rows=1), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("query_dtype", DTYPES[1:], ids=str)
def test_half_precision_queries(isa: str, query_dtype: torch.dtype) -> None:
    both(Case([70, 20], dtype=query_dtype, query_dtype=query_dtype), isa, RULES[3:5])


@pytest.mark.parametrize("isa", ISAS)
def test_channels_of_the_query_apart(isa: str) -> None:
    case = Case([70, 20])
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    both(case, isa, RULES[3:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", GROUPS)
def test_against_the_torch_code(isa: str, group: int) -> None:
    case = Case([500, 120], group=group)
    keys, values = (torch.nan_to_num(t) for t in (case.keys, case.values))
    query = group_by_kv_head(case.query.contiguous(), case.kv_heads)
    host_logits = group_by_kv_head(case.host_logits[..., : max(case.lengths)].contiguous(), case.kv_heads)
    local = attention_logits(query, keys, case.empty, case.scale)
    host_p, local_p = budget.group_probabilities(local, host_logits, case.lengths)
    for rule in RULES:
        hidden, extra = ((0, 1.0), (300, 1.0), (0, 1.5), (90, 2.001))[int(case.rng.integers(4))]
        limits = case.limits(rule, hidden, extra)
        got, want = case.choose(limits, isa), budget.choose(limits, host_p, local_p)
        assert got.host_lengths == want.host_lengths == case.lengths
        if limits.mass is None:
            assert torch.equal(got.counts, want.counts)
        elif limits.mass < 0.999:
            assert (got.counts - want.counts).abs().max() <= math.ceil(extra)
        torch.testing.assert_close(got.mass, want.mass, atol=1e-2 if rule.mass else 1e-5, rtol=1e-5)
        width = min(got.rows.shape[2], want.rows.shape[2])
        both_keep = ~got.padding[:, :, 0, :width] & ~want.padding[:, :, 0, :width]
        p_got, p_want = (host_p.gather(2, s.rows[..., :width])[both_keep] for s in (got, want))
        torch.testing.assert_close(p_got, p_want, atol=1e-9, rtol=1e-4)

        fetched = []
        for host in (case.host_keys, case.host_values):
            fetched.append(host.gather(2, want.rows.unsqueeze(-1).expand(-1, -1, -1, case.dim)))
        logits = [local, attention_logits(query, fetched[0], want.padding, case.scale)]
        context = joint_attention(logits, [values, fetched[1]]).flatten(1, 2)
        native, log_sum = case.attend(want, isa)
        torch.testing.assert_close(native, context, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(log_sum, torch.logsumexp(torch.cat(logits, -1), -1).flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("levels", (1, 2, 4))
def test_ties_go_to_the_lower_row(isa: str, levels: int) -> None:
    case = Case([333, 100], group=4)
    level = torch.from_numpy(case.rng.integers(0, levels, (2, 1, 336)))
    case.host_logits = level.float().mul(1.7).expand(-1, case.kv_heads * 4, -1).contiguous()
    for rule in RULES:
        got = case.check_choice(case.limits(rule), isa)
        for b, h in np.ndindex(2, case.kv_heads):
            best = np.argsort(-level[b, 0, : case.lengths[b]].numpy(), kind="stable")
            count = int(got.counts[b, h])
            assert got.rows[b, h, :count].tolist() == best[:count].tolist()


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_logits(isa: str) -> None:
    """Products are exact in float32 here, so that p is comparable at +-5000; nearly all p underflow to 0."""
    case = Case([500, 64], integers=True, scale=1.0)
    case.host_logits = torch.from_numpy(case.rng.uniform(-5000, 5000, case.host_logits.shape)).float()
    for rule in RULES:
        case.check_choice(case.limits(rule), isa)
    case.check_attention(case.choose(case.limits(RULES[0]), isa), isa)
    case.keys.zero_()
    case.host_logits.fill_(-5000.0)
    case.host_logits[:, :, 7] = 5000.0
    got = case.choose(case.limits(KeepRule(None, 0.999, 0)), isa)
    assert got.rows.tolist() == [[[7]] * case.kv_heads] * 2
    got = case.choose(case.limits(KeepRule(4, None, 0)), isa)
    assert got.rows.tolist() == [[[7, 0, 1, 2]] * case.kv_heads] * 2  # p is 0: by row


@pytest.mark.parametrize("isa", ISAS)
def test_no_row_at_all(isa: str) -> None:
    case = Case([0])
    case.empty.fill_(True)
    context, log_sum = case.attend(None, isa)
    assert (context == 0).all() and (log_sum == -torch.inf).all()


def test_nan_does_no_harm() -> None:
    """What a NaN among the logits gives is undefined, but it stays within the output."""
    for isa in ISAS:
        case = Case([300])
        case.host_logits[:, :, ::3] = torch.nan
        for rule in RULES:
            limits = case.limits(rule, hidden=100, extra=1.5)
            got = case.choose(limits, isa)
            assert ((got.rows >= 0) & (got.rows < 300)).all()
            assert (got.counts <= limits.widest).all()


@settings(max_examples=60, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from(HEAD_DIMS),
    device_rows=st.integers(1, 70),
    empty_share=st.sampled_from((0.0, 0.2, 0.9)),
    spread=st.sampled_from((0.0, 0.1, 2.0, 30.0)),
    keep=st.one_of(st.none(), st.integers(0, 250), st.floats(0.01, 1.0).map(lambda f: round(f, 3))),
    mass=st.one_of(st.none(), st.floats(0.0, 1.0)),
    min_keep=st.integers(0, 80),
    hidden=st.just(0) | st.integers(0, 500),
    extra=st.just(1.0) | st.floats(1.0, 9.0),
)
def test_fuzz(
    isa, dtype, lengths, kv_heads, group, dim, device_rows, empty_share, spread, keep, mass, min_keep, hidden, extra
):
    case = Case(lengths, kv_heads, group, dim, device_rows, dtype, torch.float32, empty_share, spread)
    got = case.check_choice(case.limits(KeepRule(keep, mass, min_keep), hidden, extra), isa)
    case.check_attention(got, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_limits_beyond_what_was_scored(isa: str) -> None:
    """Limits that no rule gives, too: what is kept never exceeds what was scored."""
    case = Case([30, 0, 100])
    for least, most, mass, extra, want in (
        ([500, 500, 500], [900, 900, 900], None, 1000, [30, 0, 100]),
        ([500, 500, 500], [900, 900, 900], 0.5, 1000, [30, 0, 100]),
        ([0, 0, 0], [900, 900, 900], 0.999999999, 3000, [30, 0, 100]),
        ([3, 3, 3], [10, 10, 10], 0.0, 1000, [3, 0, 3]),
        ([3, 3, 3], [10, 10, 10], 0.0, 1001, [4, 0, 4]),
        ([11, 11, 11], [10, 10, 10], 0.0, 1100, [11, 0, 11]),
        ([0, 0, 0], [10, 10, 10], None, 2950, [30, 0, 30]),
        ([0, 0, 0], [2, 2, 2], None, 2_000_000_000, [30, 0, 100]),
        ([0, 0, 0], [0, 5, 0], None, 4000, [0, 0, 0]),
        ([0, 0, 0], [10, 10, 10], -1.0, 4000, [0, 0, 0]),
    ):
        got = case.check_choice(KeepLimits(case.lengths, least, most, mass, extra), isa)
        assert got.counts.tolist() == [[count] * case.kv_heads for count in want]


@pytest.mark.parametrize("isa", ISAS)
def test_extra_counts_from_the_number_that_holds_the_mass(isa: str) -> None:
    case = Case([200], kv_heads=1, group=1, device_rows=1, spread=0.0)
    case.keys.fill_(0.0)  # every p is 1 / 201
    for mass, extra, want in ((10.5 / 201, 1.0, 10), (10.5 / 201, 1.01, 11), (10.5 / 201, 1.5, 15), (0.7, 1.5, 200)):
        got = case.check_choice(case.limits(KeepRule(None, mass, 0), extra=extra), isa)
        assert got.counts.item() == want and got.rows.tolist() == [[list(range(want))]]


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_scored_or_nothing_kept(isa: str) -> None:
    case = Case([40, 7])
    empty = case.host_logits[..., :0]
    p = torch.empty(2, case.kv_heads, 0)
    limits = KeepLimits([0, 0], [5, 5], [9, 9], 0.9)
    got = choose_rows(case.query, case.keys, case.empty, empty, limits, case.scale, p, isa)
    assert got.rows.shape == (2, case.kv_heads, 0) and got.counts.eq(0).all()
    torch.testing.assert_close(got.mass, torch.ones(2, case.kv_heads))
    case.check_attention(got, isa)
    got = case.check_choice(KeepLimits(case.lengths, [0, 0], [0, 0]), isa)
    assert got.rows.shape[2] == 0 and (got.mass < 1).all()
    case.check_attention(got, isa)


def test_threads_do_not_share_scratch() -> None:
    cases = [Case([200 + 50 * i], dim=HEAD_DIMS[i]) for i in range(4)]
    limits = [case.limits(RULES[4]) for case in cases]
    chosen = [case.choose(limit) for case, limit in zip(cases, limits, strict=True)]
    want = [(selection.rows, case.attend(selection)[0]) for case, selection in zip(cases, chosen, strict=True)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            selection = cases[i].choose(limits[i])
            if not (torch.equal(selection.rows, want[i][0]) and torch.equal(cases[i].attend(selection)[0], want[i][1])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_arguments_are_named() -> None:
    case = Case([100, 40])
    limits = case.limits(RULES[0])
    selection = case.choose(limits)
    heads = case.kv_heads * case.group

    def choice(name: str, **changed: object) -> None:
        arguments = {
            "query": case.query, "keys": case.keys, "empty": case.empty, "host_logits": case.host_logits,
            "limits": limits, "scale": 1.0,
        }  # fmt: skip
        with pytest.raises(ValueError, match=name):
            choose_rows(**{**arguments, **changed})

    def attention(name: str, **changed: object) -> None:
        arguments = {
            "query": case.query, "keys": case.keys, "values": case.values, "empty": case.empty,
            "host_keys": case.host_keys, "host_values": case.host_values, "selection": selection, "scale": 1.0,
        }  # fmt: skip
        with pytest.raises(ValueError, match=name):
            attend_rows(**{**arguments, **changed})

    for call in (choice, attention):
        call("query", query=case.query.to("meta"))
        call("keys", keys=case.keys.double())
        call("keys", keys=case.keys[:1])
        call("keys", keys=case.keys.to("meta"))
        call("keys", keys=case.keys.transpose(2, 3).contiguous().transpose(2, 3))
        call("empty", empty=case.empty[..., :5])
        call("empty", empty=case.empty.float())
        call("scale", scale=float("nan"))
        call("isa", isa="abacus")
    choice("num_heads", query=case.query[:, :5], host_logits=case.host_logits[:, :5])
    attention("num_heads", query=case.query[:, :5])
    choice("head_dim", query=case.query[..., :60], keys=case.keys[..., :60])
    choice("host_logits", host_logits=case.host_logits[:, :5])
    choice("host_logits", host_logits=case.host_logits.double())
    choice("host_logits", host_logits=case.host_logits.transpose(1, 2).contiguous().transpose(1, 2))
    choice(r"len\(scored\)=1", limits=replace(limits, scored=[100], most=[20]))
    choice(r"len\(least\)=3", limits=replace(limits, least=[1, 1, 1]))
    choice(r"scored\[0\]=104", limits=replace(limits, scored=[104, 40]))
    choice(r"scored\[1\]=-1", limits=replace(limits, scored=[100, -1]))
    choice(r"least\[1\]=-1", limits=replace(limits, least=[0, -1]))
    choice(r"most\[0\]=-3", limits=replace(limits, most=[-3, 1]))
    choice(r"most\[1\]", limits=replace(limits, most=[3, 1 << 31]))
    choice("mass", limits=replace(limits, mass=float("nan")))
    for extra in (999, 0, -1000, 1 << 31):
        choice(f"extra_thousandths={extra}", limits=replace(limits, extra_thousandths=extra))
    p = torch.empty(2, case.kv_heads, case.host_logits.shape[2])
    for wrong in (p[..., 1:].contiguous(), p[:1], p.double(), p.to("meta"), p.transpose(1, 2).contiguous().mT):
        choice("probabilities", probabilities=wrong)
    attention("values", values=case.values[:, :, :5])
    attention("host_keys", host_keys=None)
    attention("host_keys", host_keys=case.host_keys[:1])
    attention("host_values", host_values=case.host_values.to("meta"))
    for changed in (-1, case.host_keys.shape[2]):
        rows = selection.rows.clone()
        rows[0, 1, 3] = changed
        attention("rows", selection=replace(selection, rows=rows))
    for counts in (selection.counts + selection.rows.shape[2], selection.counts[:1], selection.counts.float()):
        attention("counts", selection=replace(selection, counts=counts))
    attention("rows", selection=replace(selection, rows=selection.rows[:1]))

    shape = (2, heads, case.kv_heads, case.dim, case.device_rows, 0)
    nowhere = (0, "float32", 0, 0, 0)
    keys = (case.keys.data_ptr(), "float32", *case.keys.stride()[:3])
    query, empty = (case.query.data_ptr(), *case.query.stride()[:2]), (case.empty.data_ptr(), case.device_rows)
    for name, position, value in (
        ("batch", 0, (0, *shape[1:])),
        ("device_rows", 0, (*shape[:4], -1, 0)),
        ("query", 1, (0, 0, 0)),
        ("query", 1, (query[0], -1, 0)),
        ("keys='float8'", 2, (keys[0], "float8", *keys[2:])),
        ("keys", 2, (keys[0] + 1, *keys[1:])),
        ("keys", 2, (*keys[:4], 8)),
        ("values", 3, nowhere),
        ("empty", 4, (0, 0)),
        ("kept", 7, -1),
        ("context", 11, 0),
    ):
        arguments = [shape, query, keys, keys, empty, nowhere, nowhere, 0, 0, 0, 1.0, 64, 0]
        arguments[position] = value
        with pytest.raises(ValueError, match=name):
            _C.attend(*arguments)


def run_between_guards(isa: str) -> None:
    """Runs in a process of its own, because a stray access ends it."""
    rng = np.random.default_rng(0)
    for kind, element in (("float32", np.float32), ("bfloat16", np.uint16)):
        for dim in (8, 40, 64, 128):
            for group in (1, 3, 9):
                for rows, kept in ((1, 1), (15, 16), (17, 5), (100, 33)):
                    for at_end in (True, False):
                        kv = between_guards(np.zeros((rows, dim), element), at_end)
                        query = between_guards(np.ones((group, dim), np.float32), at_end)
                        empty = between_guards(np.zeros(rows, np.bool_), at_end)
                        logits = between_guards(rng.random((group, rows), np.float32), at_end)
                        out = [between_guards(np.zeros(kept, t), at_end) for t in (np.int64, np.bool_)]
                        most = min(kept, rows)
                        p = between_guards(np.zeros(rows, np.float32), at_end)
                        counts, masses = (between_guards(np.zeros(1, t), at_end) for t in (np.int64, np.float32))
                        shape, tensor = (1, group, 1, dim, rows, rows), (kv, kind, 0, 0, dim)
                        width = _C.choose(
                            shape, (query, 0, dim), tensor, (empty, 0), (logits, 0, rows), 1.0, [rows], [0],
                            [kept], 1.0, 1000, *out, counts, masses, p, isa,
                        )  # fmt: skip
                        assert width == most == ctypes.c_int64.from_address(counts).value
                        context = between_guards(np.zeros((group, dim), np.float32), at_end)
                        log_sum = between_guards(np.zeros(group, np.float32), at_end)
                        _C.attend(
                            shape, (query, 0, dim), tensor, tensor, (empty, 0), tensor, tensor, width, out[0], counts,
                            1.0, context, log_sum, isa,
                        )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux' mmap flags")
@pytest.mark.parametrize("isa", ISAS)
def test_no_access_outside_the_tensors(isa: str) -> None:
    code = f"from tests.kernels.test_native_attention import run_between_guards as f; f({isa!r})"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
