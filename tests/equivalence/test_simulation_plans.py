"""The oracle's plans: candidates, `lately`, K and the unscored case, on hand-made numbers and against plainer code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.equivalence.dense_simulation import (
    Choice,
    DenseSimulation,
    LayerRecord,
    Plan,
    Scan,
    Settings,
    choose,
    disagreement,
    name_candidates,
    naming_too_close,
    too_close,
)
from tests.equivalence.simulated_batch import SimulatedBatch
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

# ---------------------------------------------------------------------------------------------------------
# K and the number of candidates


@pytest.mark.parametrize(
    ("plan", "host", "expected"),
    [
        (Plan(0.1), 640, 64),
        (Plan(0.1, extra=1.5), 640, 96),
        (Plan(0.1, extra=1.01), 640, 65),
        (Plan(0.1, extra=1.1), 100, 11),  # 10 x 1.1 is 11, where floats would make it 11.000000000000002
        (Plan(0.1, extra=20.0), 640, 640),
        (Plan(10, extra=2.0), 15, 15),
        (Plan(0.1, min_keep=100, extra=1.5), 640, 150),
        (Plan(0.1, min_keep=100, extra=1.5), 64, 64),
        (Plan(None), 64, 64),
        (Plan(0.1, 1.0, extra=1.5), 640, 96),
    ],
)
def test_k_without_a_mass(plan: Plan, host: int, expected: int) -> None:
    assert plan.kept(host) == expected


@pytest.mark.parametrize(
    ("plan", "needed", "expected"),
    [
        (Plan(0.5, 0.9), 100, 100),
        (Plan(0.5, 0.9), 400, 320),
        (Plan(0.5, 0.9), None, 320),  # the candidates hold less: the rule's largest number
        (Plan(None, 0.9), None, 640),
        (Plan(0.5, 0.9, min_keep=128), 100, 128),
        (Plan(0.5, 0.9, min_keep=400), 500, 400),  # min_keep is above the cap
        (Plan(0.5, 0.9, extra=1.25), 101, 127),
        (Plan(0.5, 0.9, extra=1.25), 400, 400),  # the cap does not bind what `extra` adds
    ],
)
def test_k_of_a_mass(plan: Plan, needed: int | None, expected: int) -> None:
    assert plan.kept(640, needed) == expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(0.1), 640),  # Post-QKT
        (Plan(0.1, scan_tokens=100), 100),
        (Plan(0.1, scan_tokens=1000), 640),
        (Plan(0.1, scan_tokens=1), 64),
        (Plan(0.1, scan_tokens=80, extra=1.5), 96),
        (Plan(0.1, scan_tokens=1, min_keep=70), 70),
        (Plan(0.1, 0.9, scan_tokens=1), 1),  # a mass may be held by none
        (Plan(0.1, 0.9, scan_tokens=1, min_keep=70), 70),
        (Plan(0.1, 0.9, scan_tokens=1, min_keep=70, extra=1.5), 105),
        (Plan(0.1, 1.0, scan_tokens=1), 64),  # all of the mass is no mass
        (Plan(None, 1.0, scan_tokens=1), 640),
    ],
)
def test_how_many_candidates(plan: Plan, expected: int) -> None:
    assert plan.candidates(640) == expected


def test_a_list_is_for_a_micro_batch() -> None:
    plan = Plan(0.1, scan_tokens=100)
    assert Scan(plan, (640, 64, 0)).sizes == (100, 64, 0) and not Scan(plan, (640, 64, 0)).full
    assert Scan(plan, (64, 0)).full and Scan(Plan(0.1), (640, 64)).full
    assert Scan(plan, (100,)).full
    keeps_all = [
        (Plan(0.1, scan_tokens=1), (640, 64, 0), True),
        (Plan(0.1, scan_tokens=7), (640, 64), True),  # 64 and 7 tokens are kept anyway
        (Plan(0.1, scan_tokens=8), (640, 64), False),  # one of 8 is dropped, though not one of 64
        (Plan(0.1, scan_tokens=64), (640,), True),
        (Plan(0.1, scan_tokens=65), (640,), False),
        (Plan(0.1, scan_tokens=65, extra=1.01), (640,), True),
        (Plan(0.1, 0.9, scan_tokens=1), (640,), False),
        (Plan(0.1, 1.0, scan_tokens=1), (640,), True),
        (Plan(1.0, scan_tokens=1), (640,), False),  # all of the host: a full scan
    ]
    for each, hosts, expected in keeps_all:
        assert Scan(each, hosts).keeps_all == expected, (each, hosts)


# ---------------------------------------------------------------------------------------------------------
# Which

HOST = range(4, 12)
LATELY = {4: 0.1, 5: 0.3, 6: 0.3, 7: 0.0, 8: 0.2, 10: 0.9, 11: 0.05}  # 9 was never scored


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, []),
        (1, [11]),
        (2, [11, 10]),
        (3, [11, 10, 5]),  # the odd one is recent; 5 and 6 are equal
        (4, [11, 10, 5, 6]),
        (5, [11, 10, 9, 5, 6]),
        (6, [11, 10, 9, 5, 6, 8]),
        (7, [11, 10, 9, 8, 5, 6, 4]),
        (8, [11, 10, 9, 8, 5, 6, 4, 7]),
    ],
)
def test_recent_and_heavy(count: int, expected: list[int]) -> None:
    named, left = name_candidates(LATELY, HOST, count)
    assert sorted(named) == sorted(expected)
    assert sorted([*named, *left]) == list(HOST)


def test_a_close_naming_is_unclear() -> None:
    """Two never scored rows are equal for everyone; two scored ones are not."""
    for lately, count, close in (
        (LATELY, 3, True),  # 5 and 6
        (LATELY, 4, False),  # 6 and 8
        ({}, 4, False),
        ({5: 1e-9}, 3, False),  # 5 and nothing
        ({5: 0.3, 6: 0.3 * (1 - 1e-5)}, 3, True),
        ({5: 0.3, 6: 0.3 * (1 - 1e-4)}, 3, False),
        (LATELY, 8, False),
        (LATELY, 1, False),
    ):
        assert (naming_too_close(lately, *name_candidates(lately, HOST, count)) is not None) == close, (lately, count)


P = [0.10, 0.05, 0.20, 0.00, 0.30, 0.10, 0.15, 0.10]
MIDDLE = range(1, 7)  # 3 was not scored; a sink and a window row hold 0.2
SCORED = [6, 5, 1, 2, 4]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(0.5), [4, 2, 6]),  # three of the host of six, not of the list of five
        (Plan(0.5, extra=1.5), [4, 2, 6, 5, 1]),
        (Plan(1.0), [4, 2, 6, 5, 1]),
        (Plan(2, extra=1.3), [4, 2, 6]),
        (Plan(None, 0.69), [4, 2]),
        (Plan(None, 0.69, extra=1.5), [4, 2, 6]),
        (Plan(None, 0.69, extra=1.6), [4, 2, 6, 5]),
        (Plan(None, 0.69, extra=9.0), [4, 2, 6, 5, 1]),
        (Plan(0.3, 0.94, extra=1.5), [4, 2, 6]),  # the cap is two
        (Plan(None, 0.15, min_keep=1), [4]),
        (Plan(None, 0.15, min_keep=1, extra=2.0), [4, 2]),
        (Plan(None, 0.999), [4, 2, 6, 5, 1]),
    ],
)
def test_choose_among_candidates(plan: Plan, expected: list[int]) -> None:
    assert choose(P, MIDDLE, plan, SCORED).positions == expected


def test_candidates_that_hold_too_little_are_no_reason_to_keep_less() -> None:
    p = [0.2, 0.1, 0.0, 0.1, 0.0, 0.1, 0.0, 0.1]  # sums to 0.6: rounding aside this does not happen
    assert choose(p, MIDDLE, Plan(0.5, 0.9), [1, 3, 5]).positions == [1, 3, 5]
    assert choose(p, MIDDLE, Plan(0.3, 0.9), [1, 3, 5]).positions == [1, 3]
    assert choose(p, MIDDLE, Plan(0.3, 0.9, extra=1.5), [1, 3, 5]).positions == [1, 3, 5]


@pytest.mark.parametrize(
    ("other", "accepted"),
    [
        ([4, 2], True),
        ([4], False),
        ([4, 3], False),  # was not scored
        ([4, 2, 6], False),
    ],
)
def test_disagreement_among_candidates(other: list[int], accepted: bool) -> None:
    assert (disagreement(choose(P, MIDDLE, Plan(2), SCORED), other) is None) == accepted


def test_count_at_the_threshold_with_extra() -> None:
    """One token more or less is what `extra` makes of it. Two hold 0.7 but for a tenth of the tolerance."""
    choice = choose(P, MIDDLE, Plan(None, 0.7 + 1e-7, extra=1.5), SCORED)
    assert choice.positions == [4, 2, 6, 5, 1]  # ceil(1.5 x 3)
    assert list(choice.other_counts) == [3] and choice.other_counts[3] < 1e-6
    for count, accepted in ((2, False), (3, True), (4, False), (5, True)):
        assert (disagreement(choice, choice.ranking[:count]) is None) == accepted
    assert too_close(choice) is None
    assert too_close(choose(P, MIDDLE, Plan(None, 0.7 + 1.5e-6, extra=1.5), SCORED)) is not None
    capped = choose(P, MIDDLE, Plan(2, 0.7 + 1.5e-6, extra=1.5), SCORED)
    assert too_close(capped) is None  # two or three by the mass are two by the cap


def test_what_was_not_scored_is_judged_as_a_set() -> None:
    nan = math.nan
    choice = Choice([3, 1, 5], [3, 1, 5], [nan] * 8, nan)
    assert disagreement(choice, [1, 3, 5]) is None and disagreement(choice, [5, 3, 1]) is None
    assert disagreement(choice, [1, 3]) and disagreement(choice, [1, 3, 4]) and disagreement(choice, [1, 3, 3])
    assert too_close(choice) is None and math.isnan(choice.mass(3))


# ---------------------------------------------------------------------------------------------------------
# Steps of one layer by hand: a sink, a host of four rows and a window row, whose keys are ln(w), so that a query
# of 1 weighs a row by w and one of 2 by its square


class OneLayer(DenseSimulation):
    """Layer 1 of a model of one head and one channel."""

    def __init__(self, weights: Sequence[float], host: int, **settings: Any) -> None:
        model: Any = SimpleNamespace(num_layers=2, kv_heads=1, group=1, heads=1, head_dim=1)
        super().__init__(model, Settings(sinks=1, window=1, **settings))
        keys = torch.tensor(weights, dtype=torch.float64).log()[None, :, None]
        self.keys, self.length = [keys, keys], len(weights)
        self.host_lengths = [0, host]

    def scan(self, plan: Plan, query: float = 1.0) -> LayerRecord:
        record = LayerRecord(True, self.host_lengths[1], [], [], self.length + 1)
        chooser = torch.full((1, 1, 1), query, dtype=torch.float64)
        self._choose(1, chooser, record, Scan(plan, (self.host_lengths[1],)))
        return record

    def averages(self) -> list[float]:
        return [self.lately[1][0].get(row, 0.0) for row in range(1, 1 + self.host_lengths[1])]


def test_lately_by_hand() -> None:
    layer = OneLayer([2, 3, 1, 4, 6, 4], host=4)
    full = layer.scan(Plan(1))
    assert full.full and not full.named and full.choices[0].positions == [4]
    once = [3 / 80, 1 / 80, 4 / 80, 6 / 80]
    assert layer.averages() == pytest.approx(once)
    # The recent row 4 and, of the others, row 3. They, the sink and the window row weigh 6, 4, 2 and 4.
    listed = layer.scan(Plan(1, scan_tokens=2))
    assert listed.named and not listed.full and sorted(listed.candidates[0]) == [3, 4]
    assert listed.choices[0].positions == [4] and listed.choices[0].local_mass == pytest.approx(6 / 16)
    assert listed.choices[0].p == pytest.approx([2 / 16, 0, 0, 4 / 16, 6 / 16, 4 / 16])
    twice = [3 / 80, 1 / 80, 4 / 80 + (4 / 16 - 4 / 80) / 4, 6 / 80 + (6 / 16 - 6 / 80) / 4]
    assert layer.averages() == pytest.approx(twice)
    # The same list by another query: squares.
    again = layer.scan(Plan(1, scan_tokens=2), query=2.0)
    assert not again.named and sorted(again.candidates[0]) == [3, 4]
    assert layer.averages()[3] == pytest.approx(twice[3] + (36 / 72 - twice[3]) / 4)


def test_trials_by_hand() -> None:
    """Lists of one, two and three rows of a full scan, by what was heavy before it; the best two are counted."""
    layer = OneLayer([2, 3, 1, 4, 6, 4], host=4)
    assert layer.scan(Plan(2, trial_tokens=(1, 2, 3, 9))).trials == [
        pytest.approx([12 / 20, 15 / 20, 16 / 20, 16 / 20])  # nothing was scored yet: row 1 is first
    ]
    layer.lately[1][0] = {2: 0.9}
    assert layer.scan(Plan(2, trial_tokens=(2, 3))).trials == [pytest.approx([13 / 20, 16 / 20])]
    assert layer.scan(Plan(1, scan_tokens=2, trial_tokens=(2,))).trials == []


def test_a_list_lasts() -> None:
    """Until its size or the host changes, or a full scan comes between; whatever K and `lately` do."""
    layer = OneLayer([2, 3, 1, 4, 6, 5, 5, 4], host=5)
    two, three = Plan(1, scan_tokens=2), Plan(1, scan_tokens=3)

    def named(plan: Plan, query: float = 1.0) -> list[int]:
        record = layer.scan(plan, query)
        assert record.named
        return sorted(record.candidates[0])

    assert named(two) == [1, 5]  # nothing was scored yet: the lowest row
    assert not layer.scan(two).named
    assert not layer.scan(dataclasses.replace(two, extra=1.5)).named
    assert not layer.scan(Plan(2, None, 1, scan_tokens=1)).named  # two are kept, so that two are listed
    assert named(three) == [1, 4, 5]
    assert named(two) == [1, 5]
    assert layer.scan(Plan(1), query=-9.0).full  # to which row 2, of weight 1, is nearly all there is
    assert named(two) == [2, 5]
    assert layer.scan(Plan(1, scan_tokens=5)).full  # a list of all is a full scan
    assert named(two) == [2, 5]
    layer.host_lengths[1] = 6
    assert 6 in named(two)
    assert not layer.scan(two).named


def test_all_kept_is_not_scored() -> None:
    layer = OneLayer([2, 3, 1, 4, 6, 4], host=4)
    layer.scan(Plan(1))
    before = layer.averages()
    record = layer.scan(Plan(2, scan_tokens=1))
    assert not record.scored and record.named and sorted(record.choices[0].positions) == [3, 4]
    assert math.isnan(record.mass[0]) and layer.averages() == before
    scored = layer.scan(Plan(1, scan_tokens=2))  # the same list, now with something to choose
    assert scored.scored and not scored.named and scored.choices[0].positions == [4]
    weighing = OneLayer([2, 3, 1, 4, 6, 4], host=4, lookahead="logits")
    record = weighing.scan(Plan(2, scan_tokens=1))
    assert record.scored and record.choices[0].positions == [4, 1] and weighing.averages() != [0.0] * 4
    assert OneLayer([2, 3, 1, 4, 6, 4], host=4).scan(Plan(None, 0.99, 2, scan_tokens=1)).scored


@pytest.mark.parametrize(
    ("settings", "denominator"),
    [
        # Row 1 is dropped, row 2 was never scored. By the true query 2, 4, 6 of sink, window, new token.
        ({}, 2 + 3 + 4 + 6),
        ({"lookahead": "off"}, 2 + 3 + 4 + 6),
        ({"lookahead": "logits"}, 2 + 9 + 49 + 4 + 6),
        ({"lookahead": "logits", "dropped": "renormalise"}, 2 + 9 + 4 + 6),
    ],
)
def test_attention_by_hand(settings: dict[str, Any], denominator: float) -> None:
    """A sink, host rows of weight 7, 5 and 3, a window row, the new token."""
    layer = OneLayer([2, 7, 5, 3, 4, 6], host=3, **settings)
    layer.values = [torch.tensor([1.0, 10.0, 100.0, 1e3, 1e4, 1e5], dtype=torch.float64)[None, :, None]] * 2
    record = LayerRecord(True, 3, [], [], 6, candidates=[[1, 3]], full=False)
    query, predicted = torch.ones(1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    context = float(layer._attend(1, 0, query, predicted, [0, 3, 4, 5], record))
    host_weight = 9 if settings.get("lookahead") == "logits" else 3
    assert context == pytest.approx((2 + host_weight * 1000 + 4 * 10000 + 6 * 100000) / denominator)


# ---------------------------------------------------------------------------------------------------------
# Whole steps


def decoded(zoo: ModelZoo, settings: Settings, plans: Any, name: str = "llama-gqa2", steps: int = 20) -> SimulatedBatch:
    run = SimulatedBatch(zoo.dense(name), settings, 2, 0, plans)
    run.prefill(run.prompts((300, 170)))
    for token in random_tokens(90, steps, seed=31):
        run.decode([token, token + 1])
    return run


@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
def test_plans_that_are_full_scans_are_none(zoo: ModelZoo, lookahead: Any) -> None:
    """Post-QKT by plan, and lists as long as the host, are what the settings say; trials attend to nothing."""
    settings = Settings(window=16, keep=0.1, lookahead=lookahead)
    expected = decoded(zoo, settings, None).logits
    for changes in ({}, {"scan_tokens": 999}, {"trial_tokens": (64, 32)}):
        plan = dataclasses.replace(settings.plan, **changes)
        assert torch.equal(decoded(zoo, settings, lambda step, layer, plan=plan: plan).logits, expected)
    other = dataclasses.replace(settings.plan, scan_tokens=40)
    assert (decoded(zoo, settings, lambda step, layer: other).logits - expected).abs().max() > 1e-2


def test_everything_kept_by_extra_is_full_attention(zoo: ModelZoo) -> None:
    full = decoded(zoo, Settings(window=16, keep=1.0), None).logits
    plan = Plan(0.1, scan_tokens=40, extra=10.0)  # never fewer candidates than are kept
    assert (decoded(zoo, Settings(window=16), lambda step, layer: plan).logits - full).abs().max() < 1e-10


def test_renormalised_logits_of_unscored_lists_by_the_settings(zoo: ModelZoo) -> None:
    """Where all candidates are kept none has a share that is dropped: both denominators are one."""
    plan = Plan(0.2, scan_tokens=1)
    runs = [
        decoded(zoo, Settings(window=16, keep=0.2, lookahead="logits", dropped=dropped), lambda step, layer: plan)
        for dropped in ("share", "renormalise")
    ]
    assert (runs[0].logits - runs[1].logits).abs().max() < 1e-10


def test_micro_batches_renew_their_lists_together(zoo: ModelZoo) -> None:
    """Alone, a sequence names when its own host grows; together, when that of any does."""
    settings, plan = Settings(window=16, keep=0.1), Plan(0.1, scan_tokens=40)

    def namings(micro_batch: int) -> list[set[int]]:
        run = SimulatedBatch(zoo.dense("llama-mha"), settings, 2, 0, lambda step, layer: plan, micro_batch)
        run.prefill(run.prompts((147, 177)))  # windows of W + 63 and W + 29 rows: layer 1 ages after 17 and 51 steps
        for token in random_tokens(90, 54, seed=32):
            run.decode([token, token + 1])
        return [{step for step, records in enumerate(run.steps) if records[i].layers[1].named} for i in (0, 1)]

    assert namings(1) == [{0, 17}, {0, 51}]
    assert namings(2) == namings(0) == [{0, 17, 51}] * 2


def test_lists_and_lately_outlive_a_further_turn(zoo: ModelZoo) -> None:
    """A turn that moves nothing to the host leaves the list; one that does names it anew, by what was heavy before."""
    settings, plan = Settings(window=16, keep=0.1), Plan(0.1, scan_tokens=40)
    run = SimulatedBatch(zoo.dense("llama-mha"), settings, 1, 0, lambda step, layer: plan)
    run.prefill(run.prompts((212,)))  # 212 = 4 + 192 + 16

    def named() -> bool:
        return run.decode(run.draw())[0].layers[1].named

    assert named() and not named()
    run.prefill(run.prompts((30,)))
    assert not named()
    before = dict(run.sequences[0].lately[1][0])
    run.prefill(run.prompts((64,)))
    assert run.sequences[0].lately[1][0] == before and named()
    heavy = sorted(before, key=lambda row: -before[row])[:20]
    record = run.steps[-1][0].layers[1]
    recent = range(4 + record.host_length - 20, 4 + record.host_length)
    assert set(record.candidates[0]) == {*recent, *heavy}
