"""Which host tokens a `pre_qkt` layer scores: sizes, the list and when it is made anew, what is learned."""

from __future__ import annotations

import pytest
import torch

from hybridgen.selection.budget import choose, keep_limits
from hybridgen.selection.candidates import LATELY_WEIGHT, Candidates, all_are_kept, candidate_sizes, trial_mass
from hybridgen.types import KeepRule, LayerPlan

CPU = torch.device("cpu")
TEN_PERCENT = KeepRule(0.1, None, 4)


def plan(scan_tokens: int | None, rule: KeepRule = TEN_PERCENT, extra: float = 1.0) -> LayerPlan:
    return LayerPlan("post_qkt" if scan_tokens is None else "pre_qkt", rule, scan_tokens, extra=extra)


@pytest.mark.parametrize(
    ("asked", "hosts", "expected"),
    [
        (plan(None), [640, 64], None),
        (plan(128), [640, 64], [128, 64]),
        (plan(640), [640, 64], None),
        (plan(16), [640, 64], [64, 16]),  # never fewer than K, which is ceil(0.1 x 640)
        (plan(16, extra=2.5), [640, 64], [160, 18]),  # ceil(2.5 x 7)
        (plan(16, KeepRule(0.5, 0.9, 20)), [640, 64], [20, 20]),  # under a mass, what is kept is known by then only
        (plan(16, KeepRule(0.5, 1.0, 20)), [640, 64], [320, 32]),
    ],
)
def test_sizes(asked: LayerPlan, hosts: list[int], expected: list[int] | None) -> None:
    assert candidate_sizes(asked, hosts) == expected


def test_nothing_is_scored_where_all_would_be_kept() -> None:
    assert all_are_kept(keep_limits(TEN_PERCENT, [640, 64], [64, 7]))
    assert not all_are_kept(keep_limits(TEN_PERCENT, [640, 64], [65, 7]))
    assert not all_are_kept(keep_limits(KeepRule(0.1, 0.9, 64), [640], [64])), "a mass may be reached by fewer"


def test_half_are_recent_and_half_had_mass_lately() -> None:
    candidates = Candidates((1, 2, 16), CPU)
    p = torch.zeros(1, 2, 12)
    p[0, 0, [1, 3]], p[0, 0, 11] = 0.2, 0.5
    p[0, 1, 2], p[0, 1, 5] = 0.1, 0.3
    candidates.learn(p, listed=False, sizes=[12])
    assert candidates.name([5], [12])
    assert candidates.rows.tolist() == [[[1, 3, 9, 10, 11], [2, 5, 9, 10, 11]]]
    assert candidates.name([6], [12])
    assert candidates.rows.tolist() == [[[0, 1, 3, 9, 10, 11], [0, 2, 5, 9, 10, 11]]], "ties: the lower row"


def test_a_ragged_batch_is_padded_with_row_0() -> None:
    candidates = Candidates((3, 1, 16), CPU)
    candidates.name([4, 2, 3], [16, 3, 3])
    assert candidates.rows.tolist() == [[[0, 1, 14, 15]], [[0, 2, 0, 0]], [[0, 1, 2, 0]]]


def test_the_list_stays_until_there_is_a_reason() -> None:
    candidates = Candidates((1, 1, 192), CPU)
    assert candidates.name([4], [128])
    assert not candidates.name([4], [128])
    candidates.learn(torch.full((1, 1, 4), 0.25), listed=True, sizes=[4])
    assert not candidates.name([4], [128]), "what was learned of the listed rows changes nothing"
    assert candidates.name([5], [128]) and candidates.name([5], [192])
    candidates.learn(torch.full((1, 1, 192), 0.005), listed=False, sizes=[192])
    assert candidates.name([5], [192]), "a full scan knows better"


def test_what_is_learned_of_listed_rows_goes_to_their_place() -> None:
    candidates = Candidates((2, 1, 8), CPU)
    candidates.name([4, 2], [8, 3])  # rows 0 1 6 7, and 0 2 with two of padding
    p = torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.6, 0.4, 0.0, 0.0]]])
    candidates.learn(p, listed=True, sizes=[4, 2])
    first, second = candidates._lately[:, 0] / LATELY_WEIGHT
    torch.testing.assert_close(first, torch.tensor([0.1, 0.2, 0, 0, 0, 0, 0.3, 0.4]))
    torch.testing.assert_close(second, torch.tensor([0.6, 0, 0.4, 0, 0, 0, 0, 0]), msg="padding repeats row 0")


def test_trial_mass_is_what_the_best_candidates_hold() -> None:
    """Against the definition, on random p."""
    generator = torch.Generator().manual_seed(5)
    hosts, rule = [96, 64], KeepRule(0.25, 0.7, 3)
    candidates = Candidates((2, 3, 128), CPU)
    candidates.learn(torch.rand(2, 3, 96, generator=generator) * 0.01, listed=False, sizes=hosts)
    candidates._lately[1, :, 64:] = 0
    raw = torch.rand(2, 3, 97, generator=generator) ** 8
    raw[1, :, 64:96] = 0
    raw /= raw.sum(-1, keepdim=True)
    p, local_p = raw[..., :96].contiguous(), raw[..., 96].contiguous()
    chosen = choose(keep_limits(rule, hosts), p, local_p)
    for size in (10, 40, 64, 80, 200):
        found = trial_mass(candidates, p, chosen, size, hosts)
        for b in range(2):
            for head in range(3):
                of_list = candidates.best([min(size, n) for n in hosts], hosts)[b, head, : min(size, hosts[b])]
                best = p[b, head, of_list].sort(descending=True).values[: int(chosen.counts[b, head])]
                assert float(found[b, head]) == pytest.approx(float(best.sum() + local_p[b, head]), abs=1e-6)
    torch.testing.assert_close(trial_mass(candidates, p, chosen, 200, hosts), chosen.mass)
