"""What is kept of the host, against the definition in contracts.md written out in plain Python.

The probabilities are multiples of 1/4096, so that every sum is exact and ties are plenty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen.selection.budget import KeepLimits, cap, choose, group_probabilities, keep_limits, most_kept
from hybridgen.types import KeepRule

UNIT = 4096


@dataclass
class Case:
    """Probabilities in units of 1/4096: host[b][h], of the scored rows of sequence b and KV head h, and local[b][h].

    unscored: how many rows more each sequence's host tier holds.
    """

    rule: KeepRule
    host: list[list[list[int]]]
    local: list[list[int]]
    unscored: list[int] | None = None
    extra_thousandths: int = 1000

    @property
    def scored(self) -> list[int]:
        return [len(sequence[0]) for sequence in self.host]

    @property
    def host_lengths(self) -> list[int]:
        return [n + more for n, more in zip(self.scored, self.unscored or [0] * len(self.host), strict=True)]

    @property
    def limits(self) -> KeepLimits:
        scored = None if self.unscored is None else self.scored
        return keep_limits(self.rule, self.host_lengths, scored, self.extra_thousandths / 1000)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(self.scored)
        padded = [[[*head, *[0] * (longest - len(head))] for head in sequence] for sequence in self.host]
        return torch.tensor(padded) / UNIT, torch.tensor(self.local) / UNIT


def plain_count(rule: KeepRule, host: list[int], local: int, host_length: int, extra_thousandths: int) -> int:
    """K of one KV head: contracts.md, 'What is kept', then `extra`, then no more than was scored (`host`)."""
    if rule.keep is None:
        most = host_length
    elif isinstance(rule.keep, int):
        most = rule.keep
    else:
        most = math.ceil(Fraction(repr(rule.keep)) * host_length)
    fewest = host_length
    if rule.mass is not None and rule.mass < 1.0:  # a softmax is never 0, so all of the mass is all of the tokens
        best = sorted(host, reverse=True)
        reached = (Fraction(local + sum(best[:n]), UNIT) >= Fraction(repr(rule.mass)) for n in range(len(host) + 1))
        fewest = next((n for n, enough in enumerate(reached) if enough), host_length)
    own = min(host_length, max(rule.min_keep, min(fewest, most)))
    return min(len(host), math.ceil(Fraction(own * extra_thousandths, 1000)))


def compare(case: Case) -> list[int]:
    """Check `choose` on one case; the counts that were expected."""
    host_p, local_p = case.tensors()
    before = host_p.clone()
    selection = choose(case.limits, host_p, local_p)
    assert torch.equal(host_p, before), "the probabilities are the caller's"
    assert selection.host_lengths == case.scored
    assert selection.rows.dtype == selection.counts.dtype == torch.int64
    assert selection.rows.shape[:2] == selection.counts.shape == selection.mass.shape == local_p.shape
    expected: list[int] = []
    for b, sequence in enumerate(case.host):
        for h, head in enumerate(sequence):
            count = plain_count(case.rule, head, case.local[b][h], case.host_lengths[b], case.extra_thousandths)
            order = sorted(range(len(head)), key=lambda row, p=head: (-p[row], row))
            assert int(selection.counts[b, h]) == count, f"count of sequence {b}, head {h}"
            assert selection.rows[b, h, :count].tolist() == order[:count]
            padding = selection.rows[b, h, count:].tolist()
            assert padding == [0] * len(padding), "padding must point to a row that always exists"
            mass = Fraction(case.local[b][h] + sum(head[row] for row in order[:count]), UNIT)
            assert float(selection.mass[b, h]) == float(mass)
            expected.append(count)
    if expected:
        assert max(expected) <= selection.rows.shape[2] <= case.limits.widest
    return expected


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(lambda n: max(n) > 0))
    most = draw(st.sampled_from([1, 3, 30]))  # few different values: many ties
    host, local = [], []
    for length in lengths:
        host.append([draw(st.lists(st.integers(0, most), min_size=length, max_size=length)) for _ in range(heads)])
        local.append([UNIT - sum(head) if draw(st.booleans()) else draw(st.integers(0, 2000)) for head in host[-1]])
    fraction = st.integers(1, 100).map(lambda percent: percent / 100)
    keep = draw(st.one_of(st.none(), fraction, st.integers(1, 60)))
    masses = st.one_of(fraction, st.integers(1, UNIT).map(lambda units: units / UNIT))
    mass = draw(masses if keep is None else st.one_of(st.none(), masses))
    rule = KeepRule(keep, mass, draw(st.sampled_from([0, 0, 1, 5, 64])))
    more = st.sampled_from([0, 1, 20, 300])
    unscored = draw(st.one_of(st.none(), st.lists(more, min_size=len(lengths), max_size=len(lengths))))
    return Case(rule, host, local, unscored, draw(st.sampled_from([1000, 1000, 1001, 1300, 2500, 4000])))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(case=cases())
def test_choose_is_the_definition(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (KeepRule(0.3, None, 0), 3),  # the cap alone
        (KeepRule(0.31, None, 0), 4),
        (KeepRule(4, None, 0), 4),
        (KeepRule(4, None, 6), 6),  # min_keep is a floor, over the cap too
        (KeepRule(1, None, 64), 10),  # but never more than there is
        (KeepRule(99, None, 0), 10),
        (KeepRule(1.0, None, 0), 10),
        (KeepRule(None, 0.5, 0), 0),  # the device holds the mass already
        (KeepRule(None, 0.5, 2), 2),
        (KeepRule(None, 2049 / UNIT, 0), 1),
        (KeepRule(None, (2048 + 400) / UNIT, 0), 1),  # reached exactly is reached
        (KeepRule(None, (2048 + 401) / UNIT, 0), 2),
        (KeepRule(0.1, (2048 + 401) / UNIT, 0), 1),  # the cap binds the mass
        (KeepRule(0.1, (2048 + 401) / UNIT, 3), 3),
        (KeepRule(None, 4095 / UNIT, 0), 6),  # what is left over is not needed
        (KeepRule(None, 1.0, 0), 10),  # a p of 0 is a rounded one: all of the mass is all of the tokens
        (KeepRule(0.5, 1.0, 0), 5),
    ],
)
def test_counts_by_hand(rule: KeepRule, expected: int) -> None:
    """2048/4096 lie on the device; the host's rows hold the rest, four of them nothing."""
    host = [200, 0, 400, 400, 0, 400, 300, 0, 348, 0]
    assert sum(host) == 2048
    assert compare(Case(rule, [[host]], [[2048]])) == [expected]


def test_mass_that_cannot_be_reached_keeps_all() -> None:
    """Rounding can leave the sum below the mass: then every token is wanted, none is invented."""
    assert compare(Case(KeepRule(None, 0.99, 0), [[[5, 0, 5]]], [[100]])) == [3]


@pytest.mark.parametrize(
    ("rule", "unscored", "extra_thousandths", "expected"),
    [
        (KeepRule(0.3, None, 0), 0, 1500, 5),  # ceil(1.5 x 3)
        (KeepRule(0.3, None, 0), 0, 1001, 4),
        (KeepRule(4, None, 0), 0, 4000, 10),  # never more than there is
        (KeepRule(0.3, None, 0), 10, 1000, 6),  # by the host's length, not by what was scored
        (KeepRule(0.3, None, 0), 10, 1500, 9),
        (KeepRule(0.3, None, 0), 90, 1000, 10),  # but only scored rows can be kept
        (KeepRule(None, (2048 + 401) / UNIT, 0), 90, 1000, 2),
        (KeepRule(None, (2048 + 401) / UNIT, 0), 0, 2500, 5),  # the mass's own number, then the extra
        (KeepRule(0.1, (2048 + 401) / UNIT, 0), 0, 3000, 3),  # the cap binds the mass, not the extra
        (KeepRule(None, 0.5, 0), 0, 4000, 0),
        (KeepRule(None, 0.5, 50), 90, 1000, 10),  # a floor above what was scored
        (KeepRule(None, 4095 / UNIT, 0), 90, 1000, 6),
    ],
)
def test_extra_and_scored_by_hand(rule: KeepRule, unscored: int, extra_thousandths: int, expected: int) -> None:
    """The rows of `test_counts_by_hand`, of a host tier that may be longer."""
    host = [200, 0, 400, 400, 0, 400, 300, 0, 348, 0]
    assert compare(Case(rule, [[host]], [[2048]], [unscored], extra_thousandths)) == [expected]


@pytest.mark.parametrize(("rule", "expected"), [(KeepRule(None, 0.9, 0), 6), (KeepRule(0.04, 0.9, 0), 4)])
def test_mass_that_the_scored_rows_do_not_hold(rule: KeepRule, expected: int) -> None:
    """The rule's number is then the most that it allows, for a host of 100; six rows were scored."""
    assert compare(Case(rule, [[[50, 0, 40, 30, 20, 10]]], [[2048]], [94])) == [expected]


def test_nothing_scored() -> None:
    limits = keep_limits(KeepRule(0.5, None, 4), [100, 30], [0, 0], 2.0)
    assert limits.widest == 0
    selection = choose(limits, torch.zeros(2, 3, 0), torch.ones(2, 3))
    assert selection.rows.shape == (2, 3, 0) and not selection.counts.any()


def test_limits_of_a_million_rows() -> None:
    """The product count x thousandths passes 2^31."""
    limits = keep_limits(KeepRule(None, None, 0), [1 << 20], None, 4.0)
    assert limits.kept(600_000, 1 << 20) == 1 << 20 and limits.kept(100_000, 1 << 20) == 400_000


def test_equal_rows_go_by_position() -> None:
    limits = keep_limits(KeepRule(3, None, 0), [50])
    selection = choose(limits, torch.full((1, 1, 50), 0.01), torch.tensor([[0.5]]))
    assert selection.rows[0, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rule", [KeepRule(0.5, None, 2), KeepRule(None, 0.9, 2), KeepRule(3, 0.9, 0)])
def test_an_empty_host_beside_a_full_one(rule: KeepRule) -> None:
    compare(Case(rule, [[[], []], [[7, 7, 9], [0, 1, 0]], [[1], [0]]], [[UNIT, UNIT], [1000, 3000], [0, 0]]))


def test_all_hosts_empty() -> None:
    selection = choose(keep_limits(KeepRule(None, 0.9, 4), [0, 0]), torch.zeros(2, 1, 0), torch.ones(2, 1))
    assert selection.counts.tolist() == [[0], [0]]
    assert selection.mass.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_fraction_is_the_decimal_that_was_written(percent: int) -> None:
    """0.07 x 6400 is 448; in floats it is 448.00000000000006, whose ceiling is 449."""
    for length in (0, 64, 640, 6400, 32_000, 1_048_576):
        exact = -(-percent * length // 100)
        assert cap(KeepRule(percent / 100, None, 0), length) == exact


def test_staging_holds_the_most_that_can_be_kept() -> None:
    assert most_kept(KeepRule(0.1, None, 64), 1000) == 100
    assert most_kept(KeepRule(0.1, 0.95, 64), 128) == 64
    assert most_kept(KeepRule(None, 0.95, 64), 128) == 128
    assert most_kept(KeepRule(7, None, 0), 3) == 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3).filter(lambda n: max(n) > 0),
    spread=st.sampled_from([0.1, 5.0, 300.0, 5000.0]),
)
def test_probabilities_are_a_softmax_over_all_of_it_then_a_mean(seed: int, lengths: list[int], spread: float) -> None:
    """Over sinks, window and host together, per query head; the mean over a KV head's group comes last."""
    generator = torch.Generator().manual_seed(seed)
    batch, kv_heads, group, local_rows = len(lengths), 2, 3, 6
    local = spread * torch.randn(batch, kv_heads, group, local_rows, generator=generator)
    local[:, :, :, -1] = -torch.inf  # a slot without a token
    host = spread * torch.randn(batch, kv_heads, group, max(lengths), generator=generator)
    for b, length in enumerate(lengths):
        host[b, :, :, length:] = torch.nan  # whatever a buffer happens to hold
    host_p, local_p = group_probabilities(local.clone(), host.clone(), lengths)
    assert host_p.dtype == local_p.dtype == torch.float32
    for b, length in enumerate(lengths):
        joined = torch.cat((local[b], host[b, :, :, :length]), dim=-1).double()
        p = torch.softmax(joined, dim=-1).mean(dim=1)
        # float32 logits of thousands are exact to 2^-11 only: compare to what that can change
        tolerance = 1e-6 * max(1.0, spread)
        torch.testing.assert_close(host_p[b, :, :length].double(), p[:, local_rows:], atol=tolerance, rtol=1e-4)
        torch.testing.assert_close(local_p[b].double(), p[:, :local_rows].sum(-1), atol=tolerance, rtol=1e-4)
        assert (host_p[b, :, length:] == 0).all()


def test_equal_keys_get_equal_probabilities() -> None:
    """Ties stay ties through the softmax, so that they are broken by position."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 1, 4, 33, generator=generator)
    host_p, _ = group_probabilities(torch.randn(1, 1, 4, 5, generator=generator), torch.cat((half, half), -1), [66])
    assert torch.equal(host_p[..., :33], host_p[..., 33:])
