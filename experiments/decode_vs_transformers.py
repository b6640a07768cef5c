"""Decode speed on a machine without a GPU: this engine beside transformers' generate, in one run.

    python experiments/decode_vs_transformers.py [--seq 2048] [--gen 32] [--rounds 3] [--neighbour]

Same model, same prompt, float32, greedy. The two alternate to cancel drift; medians and means are over all steps
of all rounds, means because a median hides stalls. With --neighbour each round times both once more while another
process keeps a core busy. Every run loads its model anew: what the engine learns of a neighbour ends with it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybridgen.engine.llm import LLM  # before torch: OpenMP is to wait passively
from hybridgen.evaluation.document import hidden_fact_document

# It says that it runs, then burns; it ends with its parent, however that ends.
NEIGHBOUR = "import os; parent = os.getppid(); print(flush=True)\nwhile os.getppid() == parent: pass"
BUSY = ", busy neighbour"


def transformers_step_ms(directory: Path, prompt: list[int], gen: int) -> list[float]:
    """Milliseconds between the tokens of transformers' own generate."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    clock = Clock()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=gen,
            min_new_tokens=gen,
            do_sample=False,
            streamer=clock,
        )
    times = clock.times[1:]  # the first call hands over the prompt
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def engine_step_ms(directory: Path, prompt: list[int], gen: int) -> list[float]:
    """Milliseconds of each decode step of this engine."""
    with LLM(str(directory), {"runtime.device": "cpu"}) as llm:
        return [step.step_ms for step in llm.generate([prompt], gen, ignore_eos=True).steps]


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process keeps one core busy, from before the body begins until it ends."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise RuntimeError("the neighbour did not start")
        yield
        if process.poll() is not None:
            raise RuntimeError("the neighbour ended early")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", action="store_true")
    arguments = parser.parse_args()

    threads = torch.get_num_threads()
    with LLM("smollm2-135m", {"runtime.device": "cpu"}) as llm:
        prompt = hidden_fact_document(llm.tokenizer, arguments.seq, seed=0).ids
        directory = llm.weights.directory
    assert directory is not None
    results: dict[str, list[float]] = {}

    def measure(condition: str) -> None:
        for name, step_ms in (("hybridgen", engine_step_ms), ("transformers", transformers_step_ms)):
            torch.set_num_threads(threads)  # the engine sets its own
            results.setdefault(name + condition, []).extend(step_ms(directory, prompt, arguments.gen))

    for _ in range(arguments.rounds):
        measure("")
        if arguments.neighbour:
            with busy_neighbour():
                measure(BUSY)

    for name, values in results.items():
        median, mean = statistics.median(values), statistics.mean(values)
        print(
            f"{name:<28} {median:7.1f} ms/token median  {mean:7.1f} mean  {max(values):7.1f} longest of {len(values)}"
        )
    pairs = [("transformers", "hybridgen")]
    if arguments.neighbour:
        pairs += [("transformers" + BUSY, "hybridgen" + BUSY)]
        pairs += [(name + BUSY, name) for name in ("hybridgen", "transformers")]
    for name, base in pairs:
        medians, means = (of(results[name]) / of(results[base]) for of in (statistics.median, statistics.mean))
        print(f"{name + ' / ' + base:<56} {medians:5.2f} of medians  {means:5.2f} of means")


if __name__ == "__main__":
    main()
