"""TorchThreads on a machine whose neighbours, clock and torch are the test's."""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path

import pytest
import torch

from hybridgen.config import Setting, build_config
from hybridgen.engine import build
from hybridgen.engine.llm import LLM
from hybridgen.engine.torch_threads import CHECK_STEPS, MOST_RETRY_STEPS, RETRY_STEPS, RunDelays, TorchThreads
from tests.equivalence.tiny_models import save_tiny_model

STEP_NS = 40_000_000
RETRY_ROUND = RETRY_STEPS + CHECK_STEPS


class Machine:
    """Cores, some of them taken: a thread without a core of its own waits for half of a step."""

    def __init__(self, cores: int) -> None:
        self.cores, self.taken, self.has_schedstat = cores, 0, True
        self.now_ns, self.delay_ns, self.readings = 0, 0, 0
        self.numbers: list[int] = []  # that torch was set to
        self.ran: list[int] = []  # the number of each step
        self.threads = TorchThreads(cores, self.delays, lambda: self.now_ns, self.numbers.append)

    def delays(self) -> int | None:
        self.readings += 1
        return self.delay_ns if self.has_schedstat else None

    def steps(self, count: int, between_ns: int = 0) -> int:
        for _ in range(count):
            self.threads.step()
            self.ran.append(self.numbers[-1])
            self.now_ns += STEP_NS
            crowded = max(0, self.numbers[-1] + self.taken - self.cores)
            self.delay_ns += min(crowded, self.numbers[-1]) * STEP_NS // 2
            self.threads.end_step()
            self.now_ns += between_ns
        return self.threads.threads


@pytest.fixture
def machine() -> Machine:
    return Machine(2)


def test_calm_never_changes(machine: Machine) -> None:
    machine.steps(1000)
    assert machine.numbers == [2]
    assert machine.threads.lowered_steps == 0
    assert machine.readings <= 1000 // CHECK_STEPS


def test_a_neighbour_takes_a_thread_after_one_window(machine: Machine) -> None:
    machine.taken = 1
    assert machine.steps(CHECK_STEPS) == 2
    assert machine.steps(1) == 1
    assert machine.threads.lowered_steps == 1


@pytest.mark.parametrize("calm", range(20, 20 + CHECK_STEPS))
def test_a_neighbour_that_comes_later_is_seen_within_two_windows(machine: Machine, calm: int) -> None:
    machine.steps(calm)
    machine.taken = 1
    assert machine.steps(2 * CHECK_STEPS + 1) == 1


def test_never_below_one_thread() -> None:
    machine = Machine(3)
    machine.taken = 3
    machine.steps(RETRY_STEPS)
    assert machine.numbers == [3, 2, 1]


def test_a_neighbour_that_goes_gives_the_thread_back(machine: Machine) -> None:
    machine.taken = 1
    machine.steps(CHECK_STEPS + 1)
    machine.taken = 0
    assert machine.steps(RETRY_STEPS - 1) == 1
    assert machine.steps(1) == 2
    machine.steps(500)
    assert machine.numbers == [2, 1, 2]
    assert machine.threads.lowered_steps == RETRY_STEPS


def test_all_threads_come_back_one_by_one() -> None:
    machine = Machine(4)
    machine.taken = 4
    machine.steps(30)
    assert machine.numbers == [4, 3, 2, 1]
    machine.taken = 0
    assert machine.steps(4 * RETRY_ROUND) == 4
    assert machine.numbers == [4, 3, 2, 1, 2, 3, 4]


def runs(machine: Machine) -> list[tuple[int, int]]:
    """(threads, how many steps on end ran with them)."""
    return [(number, len(list(steps))) for number, steps in itertools.groupby(machine.ran)]


def test_retries_become_rarer_up_to_a_limit(machine: Machine) -> None:
    machine.taken = 1
    machine.steps(1200)
    waits = [count for number, count in runs(machine)[:-1] if number == 1]
    assert waits == [RETRY_STEPS, 128, MOST_RETRY_STEPS, MOST_RETRY_STEPS, MOST_RETRY_STEPS]
    assert all(count == CHECK_STEPS for number, count in runs(machine) if number == 2)


def test_a_calm_retry_makes_the_next_one_early_again(machine: Machine) -> None:
    machine.taken = 1
    machine.steps(300)
    machine.taken = 0
    assert machine.steps(MOST_RETRY_STEPS) == 2
    machine.taken = 1
    machine.steps(3 * RETRY_STEPS)
    *_, (_, after_failures), _, (_, after_success), _, _ = runs(machine)
    assert (after_failures, after_success) == (MOST_RETRY_STEPS, RETRY_STEPS)


def test_time_between_requests_counts_for_nothing(machine: Machine) -> None:
    """A crowded prefill (delays, no steps) does not lower; a pause does not make a crowded window look calm."""
    for _ in range(10):
        machine.steps(CHECK_STEPS - 1)
        machine.now_ns += 100 * STEP_NS
        machine.delay_ns += 100 * STEP_NS
    assert machine.steps(3 * CHECK_STEPS) == 2
    machine.taken = 1
    machine.steps(2)
    machine.now_ns += 1000 * STEP_NS
    assert machine.steps(CHECK_STEPS + 1) == 1


def test_a_pause_while_a_retry_is_judged_decides_nothing(machine: Machine) -> None:
    machine.taken = 1
    machine.steps(CHECK_STEPS + 1 + RETRY_STEPS)
    assert machine.numbers == [2, 1, 2]
    for _ in range(5):
        machine.now_ns += 1000 * STEP_NS
        assert machine.steps(CHECK_STEPS - 1) == 2
    machine.steps(2)
    assert machine.numbers == [2, 1, 2, 1]
    assert machine.steps(RETRY_STEPS) == 1  # not early: the retry was a failure


def test_what_a_caller_does_after_each_step_does_not_hide_a_neighbour(machine: Machine) -> None:
    machine.taken = 1
    assert machine.steps(CHECK_STEPS + 1, between_ns=STEP_NS // 5) == 1


def test_a_step_that_failed_is_left_out(machine: Machine) -> None:
    machine.steps(CHECK_STEPS - 1)
    machine.threads.step()
    machine.now_ns += 100 * STEP_NS
    machine.delay_ns += 100 * STEP_NS
    assert machine.steps(3 * CHECK_STEPS) == 2


def test_without_schedstat_it_never_changes_and_says_so_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has_schedstat, machine.taken = False, 1
    with caplog.at_level(logging.WARNING):
        machine.steps(500)
    assert machine.numbers == [2]
    assert [record.name for record in caplog.records] == ["hybridgen.engine.torch_threads"]
    assert "schedstat" in caplog.text


def test_one_thread_is_left_alone() -> None:
    machine = Machine(1)
    machine.taken = 1
    machine.steps(100)
    assert (machine.numbers, machine.readings, machine.threads.lowered_steps) == ([1], 0, 0)


def write(tasks: Path, **delays: int) -> None:
    for thread, delay in delays.items():
        (tasks / thread).mkdir(exist_ok=True)
        (tasks / thread / "schedstat").write_text(f"123 {delay} 7\n")


def test_delays_survive_threads_that_end(tmp_path: Path) -> None:
    delays = RunDelays(str(tmp_path))
    assert delays() is None
    write(tmp_path, t1=1000, t2=50)
    start = delays()
    assert start is not None
    write(tmp_path, t1=1010, t2=55, t3=4)
    assert delays() == start + 10 + 5 + 4
    (tmp_path / "t1" / "schedstat").unlink()
    write(tmp_path, t2=56, t3=3)  # another thread by the name of t3
    assert delays() == start + 19 + 1 + 3


def test_no_proc_no_delays(tmp_path: Path) -> None:
    assert RunDelays(str(tmp_path / "absent"))() is None


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel has no schedstat")
def test_this_process_has_delays() -> None:
    delays = RunDelays()
    first = delays()
    time.sleep(0.01)
    second = delays()
    assert first is not None and second is not None and 0 <= first <= second


def test_a_prefill_uses_all_threads_and_the_next_step_its_own_number(machine: Machine) -> None:
    machine.taken = 1
    machine.steps(CHECK_STEPS + 1)
    machine.threads.use_all()
    assert machine.numbers == [2, 1, 2]
    machine.steps(1, between_ns=STEP_NS)
    assert machine.numbers == [2, 1, 2, 1] and machine.threads.threads == 1


def test_one_neighbour_is_seen_by_many_threads() -> None:
    machine = Machine(16)
    machine.taken = 1
    assert machine.steps(2 * CHECK_STEPS) == 15


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [("auto", None, 6), ("all", None, 6), ("all", "2", 2), ("auto", "2", 2), ("auto", "99", 6), ("auto", "0", 1),
     ("all", "3,1", 3), (5, "2", 5), (1, None, 1)],
)  # fmt: skip
def test_how_many_there_are(
    asked: str | int, environment: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight cores, two of which are the scan's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    config = build_config({"runtime.torch_threads": Setting(asked, "a test")})
    assert build.torch_threads(config, torch.device("cpu"), 2) == expected


@pytest.mark.parametrize("asked", ["auto", "all"])
def test_only_auto_looks_at_the_neighbours(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a decode beside others that take every core, `all` keeps its number."""
    waited_ns = itertools.count(step=10**12)  # more than all steps take
    monkeypatch.setattr(RunDelays, "__call__", lambda self: next(waited_ns))
    monkeypatch.setattr(build, "torch_threads", lambda *_: 2)
    before, model = torch.get_num_threads(), save_tiny_model("llama-gqa2", tmp_path)
    try:
        with LLM(str(model), {"runtime.device": "cpu", "runtime.torch_threads": asked}) as llm:
            llm.generate([list(range(1, 20))], 4 * CHECK_STEPS)
            assert (llm.torch_threads.lowered_steps > 0) == (asked == "auto")
    finally:
        torch.set_num_threads(before)
