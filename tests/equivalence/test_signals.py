"""Scans that the device starts and waits for by words in memory give what scans give that the host waits for."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from hybridgen.engine.llm import LLM
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.transfer import ImmediateTransfer, Ticket
from tests.equivalence.against_engine import engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.zoo import ModelZoo

NAME = "llama-gqa2"


class Signals:
    """What a GPU's streams do, done by the thread that computes."""

    def __init__(self) -> None:
        self.sent = self.awaited = 0

    def copy_and_signal(self, target: Tensor, source: Tensor, after: Ticket, word: HostBuffer, value: int) -> None:
        after.wait()
        target.copy_(source)
        word.tensor.view(torch.uint32).fill_(value)
        self.sent += 1

    def write_and_signal(self, target: Tensor, source: Tensor, word: HostBuffer, value: int) -> None:
        self.copy_and_signal(target, source, Ticket(), word, value)

    def await_signal(self, word: HostBuffer, value: int) -> None:
        until = time.perf_counter() + 20
        while int(word.tensor.view(torch.uint32)) != value:
            assert time.perf_counter() < until
        self.awaited += 1


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Signals:
    made = Signals()
    copy, write, wait = made.copy_and_signal, made.write_and_signal, made.await_signal
    monkeypatch.setattr(ImmediateTransfer, "signals", True)
    monkeypatch.setattr(ImmediateTransfer, "copy_and_signal", lambda self, *args: copy(*args))
    monkeypatch.setattr(ImmediateTransfer, "write_and_signal", lambda self, *args: write(*args))
    monkeypatch.setattr(ImmediateTransfer, "await_signal", lambda self, *args: wait(*args))
    return made


def decode(llm: LLM) -> Tensor:
    """Next-token logits of each step: two turns, over which blocks age."""
    batch = llm.new_batch([500, 300])
    logits = [llm.prefill(batch, [list(range(90)) * 4, list(range(60)) * 3])]
    for turn in ([7] * 20, [8, 9]):
        logits += [llm.decode(batch, logits[-1].argmax(-1)) for _ in range(35)]
        logits.append(llm.prefill(batch, [turn, turn]))
    logits.append(llm.decode(batch, [3, 4]))
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        (Settings(window=64, keep=0.1), {}),
        (Settings(window=64, keep=None, keep_mass=0.8, lookahead="off"), {}),
        (Settings(window=64, keep=0.1, lookahead="logits"), {}),
        (Settings(window=64, keep=0.1, key_type="int8"), {}),
        (Settings(window=64, keep=0.1, sketch="int4"), {"cache__sketch_home": "host"}),
        (Settings(window=64, keep=0.1), {"runtime__micro_batch": 1}),
    ],
    ids=["select", "off", "logits", "int8", "int4", "micro-batches"],
)
def test_logits_are_those_of_scans_that_are_waited_for(
    zoo: ModelZoo, settings: Settings, overrides: dict[str, object], signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"runtime__transfer": "immediate", **overrides}
    with engine(zoo.directory(NAME), settings, **overrides) as llm:
        found = decode(llm)
        step = llm.telemetry.end_step()
    assert signals.sent == signals.awaited > 0
    scanned = sum(mode != "resident" for mode in llm.modes)
    assert len(step.stage_ms["scan"]) == scanned and step.bytes_moved["cpu_read"] > 0, "counted when the step is over"
    monkeypatch.setattr(ImmediateTransfer, "signals", False)
    with engine(zoo.directory(NAME), settings, **overrides) as llm:
        assert torch.equal(decode(llm), found)
    assert signals.sent == signals.awaited


def test_steps_that_nobody_ends_are_settled(zoo: ModelZoo, signals: Signals) -> None:
    settings = Settings(window=64, keep=0.1)
    with engine(zoo.directory(NAME), settings, runtime__transfer="immediate") as llm:
        batch = llm.new_batch([300])
        tokens = llm.prefill(batch, [list(range(90)) * 2]).argmax(-1)
        for _ in range(5):
            tokens = llm.decode(batch, tokens).argmax(-1)
        assert len(llm._worker._unsettled) == sum(mode != "resident" for mode in llm.modes), "those of one step"


def test_a_step_that_breaks_off_blocks_nobody(
    zoo: ModelZoo, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query's copy fails: the job that is watched already must not keep the next ones waiting."""
    settings = Settings(window=64, keep=0.1)
    with engine(zoo.directory(NAME), settings, runtime__transfer="immediate") as llm:
        batch = llm.new_batch([300])
        llm.prefill(batch, [list(range(90)) * 2])
        llm.decode(batch, [3])
        with monkeypatch.context() as broken:
            broken.setattr(ImmediateTransfer, "copy_and_signal", lambda *args: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                llm.decode(batch, [4])
        other = llm.new_batch([300])
        llm.prefill(other, [list(range(90)) * 2])
        assert llm.decode(other, [3]).isfinite().all()
