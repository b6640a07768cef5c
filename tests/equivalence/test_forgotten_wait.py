"""A forgotten wait cannot hide: the lazy transfers, the default here, poison what has not come yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.engine.llm import LLM
from hybridgen.offload.transfer import LazyTransfer, Ticket
from hybridgen.telemetry import Telemetry
from tests.equivalence.against_engine import Case, SideBySide, engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.zoo import ModelZoo

NAME = "llama-gqa2"
SETTINGS = Settings(window=16, keep=0.1)
LOGITS = Settings(window=16, keep=0.1, lookahead="logits", predictor="delta")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def is_fetch(targets: list[Tensor], direction: str) -> bool:
    return len(targets) == 2


def is_query(targets: list[Tensor], direction: str) -> bool:
    return direction == "d2h" and len(targets) == 1 and targets[0].shape[1:] == (HEADS, HEAD_DIM)


def is_host_rows(targets: list[Tensor], direction: str) -> bool:
    """Rows of K or V on their way to the host tier."""
    return direction == "d2h" and len(targets) == 1 and targets[0].shape[-3::2] == (KV_HEADS, HEAD_DIM)


def is_one_to_device(targets: list[Tensor], direction: str) -> bool:
    """In prefill rows of K or V of the host tier, for an appended chunk to attend to; in decode with `logits` V."""
    return direction == "h2d" and len(targets) == 1


def forget(monkeypatch: pytest.MonkeyPatch, kind: Callable[[list[Tensor], str], bool]) -> list[int]:
    """From now on nobody waits for transfers of this kind; returns a list that counts them."""
    issue = LazyTransfer._issue
    forgotten: list[int] = []

    def issue_and_forget(self: Any, targets: Any, work: Any, direction: Any, sources: Any) -> Ticket:
        ticket = issue(self, targets, work, direction, sources)
        if not kind(targets, direction):
            return ticket
        forgotten.append(1)
        return Ticket()

    monkeypatch.setattr(LazyTransfer, "_issue", issue_and_forget)
    return forgotten


PROMPTS = (140, 146)  # windows of W + 56 and W + 62 rows: the first layers age within few steps
CASES = {
    "nothing forgotten": Case(NAME, SETTINGS, ((PROMPTS, 20), ((40, 30), 2)), seed=1),
    "nothing forgotten, logits": Case(NAME, LOGITS, ((PROMPTS, 20), ((40, 30), 2)), seed=1),
}
SEED = CASES["nothing forgotten"].seed


def start(zoo: ModelZoo, llm: LLM, settings: Settings = SETTINGS) -> SideBySide:
    run = SideBySide(llm, zoo.dense(NAME), settings, [300, 300], SEED)
    run.prefill(PROMPTS)
    return run


def forgotten_in_decode_is_caught(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, settings: Settings, kind: Any
) -> None:
    with engine(zoo.directory(NAME), settings) as llm:
        run = start(zoo, llm, settings)
        run.decode(1)
        forgotten = forget(monkeypatch, kind)
        with pytest.raises(AssertionError, match=r"decode step \d+: (sequence|logits)"):
            run.decode(19)
    assert forgotten


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_caught_where_nothing_is_forgotten(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    forgotten = forget(monkeypatch, lambda targets, direction: False)
    run = CASES[case].run(zoo)
    assert not forgotten and run.simulated.ageings()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (SETTINGS, is_fetch),
        (SETTINGS, is_host_rows),
        (SETTINGS, is_query),
        (LOGITS, is_one_to_device),
        (LOGITS, is_host_rows),
        (LOGITS, is_query),
    ],
    ids=["fetched rows", "aged rows", "query", "logits, fetched rows", "logits, aged rows", "logits, query"],
)
def test_of_a_transfer_in_decode(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, settings: Settings, kind: Any) -> None:
    """At a partial budget what is poisoned may not be chosen, but then something else is wrongly chosen."""
    forgotten_in_decode_is_caught(zoo, monkeypatch, settings, kind)


def is_of(dtype: torch.dtype, wanted: str) -> Callable[[list[Tensor], str], bool]:
    """One-tensor copies of a type that V does not have, nor a query or K as it is."""
    return lambda targets, direction: direction == wanted and len(targets) == 1 and targets[0].dtype is dtype


def is_scales(wanted: str) -> Callable[[list[Tensor], str], bool]:
    """One float a row: [Hkv, 64] on their way to the host, [B, Hkv, K, 1] fetched."""

    def kind(targets: list[Tensor], direction: str) -> bool:
        shape = targets[0].shape
        one_a_row = len(shape) == 2 if wanted == "d2h" else shape[-1] == 1
        return direction == wanted and len(targets) == 1 and targets[0].dtype is torch.float32 and one_a_row

    return kind


@pytest.mark.parametrize(
    ("keys_as", "kind"),
    [
        ({"key_type": "int8"}, is_fetch),
        ({"key_type": "int8"}, is_scales("h2d")),
        ({"key_type": "int8"}, is_scales("d2h")),
        ({"key_type": "int8"}, is_of(torch.int8, "d2h")),
        ({"sketch": "int4"}, is_of(torch.uint8, "d2h")),
        ({"sketch": "int2"}, is_query),
        ({"key_type": "fp16"}, is_fetch),
        ({"key_type": "fp16"}, is_of(torch.float16, "d2h")),
    ],
    ids=["codes and V", "scales", "aged scales", "aged codes", "aged sketch", "query", "fp16", "aged fp16"],
)
def test_of_quantised_keys(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, keys_as: Any, kind: Any) -> None:
    forgotten_in_decode_is_caught(zoo, monkeypatch, Settings(window=16, keep=0.1, **keys_as), kind)


@pytest.mark.parametrize("kind", [is_fetch, is_host_rows], ids=["fetched rows", "aged rows"])
def test_of_rows_in_decode_at_full_budget(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    with engine(zoo.directory(NAME), Settings(window=16, keep=1.0)) as llm:
        run = start(zoo, llm, Settings(window=16, keep=1.0))
        forgotten = forget(monkeypatch, kind)
        logits = [llm.decode(run.batch, [3 + i, 4 + i]) for i in range(20)]
    assert forgotten
    assert logits[-1].isnan().all()


@pytest.mark.parametrize(("settings", "tensors"), [(SETTINGS, 2), (LOGITS, 1)], ids=["select", "logits"])
def test_logits_fetch_no_keys(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, settings: Settings, tensors: int) -> None:
    """Of what is kept, five layers' K and V, or V alone, come to the device."""
    issue = LazyTransfer._issue
    fetched: list[int] = []  # numbers of each transfer

    def count(self: Any, targets: Any, work: Any, direction: Any, sources: Any) -> Ticket:
        if direction == "h2d":
            fetched.append(sum(target.numel() for target in targets))
        return issue(self, targets, work, direction, sources)

    monkeypatch.setattr(LazyTransfer, "_issue", count)
    with engine(zoo.directory(NAME), settings) as llm:
        run = start(zoo, llm, settings)
        fetched.clear()
        run.decode(1)
    kept = run.simulated.kept()
    assert len(kept) == 2 * 5 * KV_HEADS and set(kept) == {7}
    assert fetched == [2 * KV_HEADS * 7 * HEAD_DIM * tensors] * 5


def test_of_rows_in_prefill(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = forget(monkeypatch, is_host_rows)
    with engine(zoo.directory(NAME), Settings(window=16, keep=1.0)) as llm:
        run = start(zoo, llm, Settings(window=16, keep=1.0))
        assert forgotten
        assert llm.decode(run.batch, [3, 4]).isnan().all()


def test_of_rows_read_back_for_an_append(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(zoo.directory(NAME), SETTINGS) as llm:
        run = start(zoo, llm)
        forgotten = forget(monkeypatch, is_one_to_device)
        assert llm.prefill(run.batch, [[5, 6, 7], [8]]).isnan().all()
    assert forgotten


def test_lazy_target_is_poisoned_until_waited_for() -> None:
    transfer = LazyTransfer(Telemetry())
    target, source = torch.zeros(3), torch.arange(3.0)
    ticket = transfer.copy(target, source, "h2d")
    assert target.isnan().all()
    ticket.wait()
    assert torch.equal(target, source)
