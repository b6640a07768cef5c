"""How many threads torch computes with on a CPU whose cores may be wanted by others too.

Torch splits a product into equal parts, one a thread. Where another process takes a core, every product waits
for the thread that shares that core, and one thread fewer is faster. The kernel tells: it counts how long each
thread was ready to run and was not let.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

CHECK_STEPS = 4  # a window: so many steps are judged together
# Share of all threads' time spent waiting for a core. Two threads: 0.003 when calm, 0.33 beside a busy process, which
# is one thread's wait: where there are many threads, one busy process stays below this.
CROWDED = 0.3  # of a step, all threads together ready to run and not let: calm 0.01, beside one busy process 0.66
RETRY_STEPS = 64  # with fewer threads, before one more is tried
MOST_RETRY_STEPS = 256
MOST_PAUSE = 0.25  # of the step before it: what lies between two steps of one window

_log = logging.getLogger(__name__)


class RunDelays:
    """Nanoseconds that the threads of this process have been ready to run without a core; None: not known.

    Only differences mean something. They are added up thread by thread: one that ends takes its count along.
    """

    def __init__(self, tasks: str = "/proc/self/task") -> None:
        self._tasks = tasks
        self._seen: dict[str, int] = {}
        self._total_ns = 0

    def __call__(self) -> int | None:
        seen: dict[str, int] = {}
        try:
            threads = os.listdir(self._tasks)
        except OSError:
            return None
        for thread in threads:
            try:
                with open(f"{self._tasks}/{thread}/schedstat", "rb") as file:
                    seen[thread] = int(file.read().split()[1])
            except OSError:  # ended since it was listed
                continue
        if not seen:
            return None
        for thread, delay in seen.items():
            before = self._seen.get(thread, 0)
            self._total_ns += delay - before if delay >= before else delay  # less: a new thread of an old number
        self._seen = seen
        return self._total_ns


class TorchThreads:
    """Owns torch's number of CPU threads: `most` while the cores are free, fewer while others want them.

    `step()` comes before every decode step and `end_step()` after it. Only steps that follow each other closely
    are judged together, so neither a prefill nor a caller's pause counts.
    """

    def __init__(
        self,
        most: int,
        delays: Callable[[], int | None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        watches: bool = True,
    ) -> None:
        """most >= 1; set at once, and kept where not `watches`. delays: growing nanoseconds; default `RunDelays`."""
        self.most = self.threads = most
        self.lowered_steps = 0  # that ran with fewer than `most`
        self._delays = RunDelays() if delays is None else delays
        self._clock, self._set_threads = clock, set_threads
        self._watches = watches and most > 1
        self._steps = 0  # since the number last changed
        self._retry_steps = RETRY_STEPS
        self._is_trial = False  # one thread more than was found right: not judged yet
        self._start_ns = 0  # of the running step
        self._last_ns = 0  # the step before took this long
        self._end_ns: int | None = None  # when it ended
        self._window_steps = 0
        self._window_ns = 0  # inside its steps
        self._window_delay_ns = 0  # what `delays` said when it was opened
        self._in_use = most
        set_threads(most)

    def step(self) -> None:
        """A decode step is about to begin: the moment at which the number may change."""
        if not self._watches:
            return
        now = self._clock()
        self._apply(self.threads)
        if self._end_ns is None or now - self._end_ns > MOST_PAUSE * self._last_ns:
            self._open_window()  # the last step failed, or something else ran since
        elif self._window_steps == CHECK_STEPS:
            self._judge()
        if self.threads < self.most:
            if self._steps >= self._retry_steps:
                self._change(1)
                self._is_trial = True
                self._open_window()
            self.lowered_steps += self.threads < self.most
        self._steps += 1
        self._end_ns = None
        self._start_ns = self._clock()  # what was done here is not the step's

    def end_step(self) -> None:
        """Its result is there. A step that fails need not be ended."""
        if self._watches:
            self._end_ns = self._clock()
            self._last_ns = self._end_ns - self._start_ns
            self._window_ns += self._last_ns
            self._window_steps += 1

    def use_all(self) -> None:
        """For a prefill: its products are large, and are cut finely. The next step goes on with its own number."""
        self._apply(self.most)

    def _apply(self, threads: int) -> None:
        if threads != self._in_use:
            self._in_use = threads
            self._set_threads(threads)

    def _judge(self) -> None:
        """By the window that is full; the next one begins."""
        time_ns, before_ns = self._window_ns, self._window_delay_ns
        self._open_window()
        if self._window_delay_ns - before_ns > CROWDED * time_ns:
            if self._is_trial:
                self._retry_steps = min(2 * self._retry_steps, MOST_RETRY_STEPS)
            if self.threads > 1:
                self._change(-1)
        elif self._is_trial:
            self._retry_steps = RETRY_STEPS
        self._is_trial = False

    def _change(self, by: int) -> None:
        self.threads += by
        self._steps = 0
        self._apply(self.threads)

    def _open_window(self) -> None:
        delay_ns = self._delays()
        if delay_ns is None:
            self._watches = False
            _log.warning("this kernel has no schedstat: torch keeps %d threads whoever else computes", self.threads)
            return
        self._window_steps, self._window_ns, self._window_delay_ns = 0, 0, delay_ns
