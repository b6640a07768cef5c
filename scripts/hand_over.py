"""What it costs to hand a scan to the CPU and to get it back, beside the scan itself.

    python3 scripts/hand_over.py [--threads 1,8,15] [--rounds 300]

A watched job starts when a word in memory changes and ends by writing another one, as the engine's scans do under CUDA.
For jobs of growing size it prints the microseconds from the one to the other, median and 90th percentile; the smallest
job is all hand-over, as its keys lie in the caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

from hybridgen import _C
from hybridgen.benchmarks.rows import cores_for

HEAD_DIM, HEADS = 128, 8
TOKENS = (256, 2048, 16384)  # of each of 8 KV heads, fp16: 0.5, 4 and 34 MB


def measure(worker: _C.ScanWorker, tokens: int, rounds: int) -> list[float]:
    """Microseconds of each round."""
    keys = np.ones((HEADS, tokens, HEAD_DIM), np.float16)
    query = np.ones((HEADS, HEAD_DIM), np.float32)
    out = np.zeros((HEADS, tokens), np.float32)
    words = np.zeros((2, 16), np.uint32)
    start, done = (words[index].ctypes.data for index in range(2))
    found = []
    for turn in range(1, rounds + 1):
        job = worker.submit(
            query.ctypes.data, keys.ctypes.data, out.ctypes.data, "float16", HEADS, HEADS, HEAD_DIM, [tokens],
            (0, tokens * HEAD_DIM, HEAD_DIM), (0, tokens), 1.0, hold=True,
        )  # fmt: skip
        worker.watch(job, start, done, turn)
        time.sleep(0.0003)  # all threads are awake and look at the word
        began = time.perf_counter_ns()
        words[0, 0] = turn
        while words[1, 0] != turn:
            pass
        found.append((time.perf_counter_ns() - began) / 1e3)
        worker.wait(job)
    return found


def main() -> None:
    """Prints a line for each number of threads and size."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, max(1, cores // 2), max(1, cores - 1)}))))
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    for threads in map(int, arguments.threads.split(",")):
        worker = _C.ScanWorker(threads, cores_for(threads))
        for tokens in TOKENS:
            found = measure(worker, tokens, arguments.rounds)
            size_mb = HEADS * tokens * HEAD_DIM * 2 / 1e6
            ninetieth = statistics.quantiles(found, n=10)[-1]
            print(
                f"{threads:3} threads, {size_mb:5.1f} MB: {statistics.median(found):8.1f} us, 90 %: {ninetieth:8.1f} us"
            )
        worker.close()


if __name__ == "__main__":
    main()
