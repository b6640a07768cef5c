"""Decode speed on a machine without a GPU: this engine beside transformers' generate, in one run.

    python experiments/decode_vs_transformers.py [--seq 2048] [--gen 32] [--neighbour]

Same model, same prompt, float32, greedy; the two alternate to cancel drift, medians are reported.
With --neighbour the engine is timed once more while one other thread keeps a core busy.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from hybridgen.engine.llm import LLM  # before torch: OpenMP is to wait passively
from hybridgen.evaluation.document import hidden_fact_document


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


def engine_step_ms(llm: LLM, prompt: list[int], gen: int) -> list[float]:
    """Milliseconds of each decode step of this engine."""
    return [step.step_ms for step in llm.generate([prompt], gen, ignore_eos=True).steps]


def _burn() -> None:
    while True:
        pass


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", action="store_true")
    arguments = parser.parse_args()

    results: dict[str, list[float]] = {"hybridgen": [], "transformers": []}
    threads = torch.get_num_threads()
    with LLM("smollm2-135m", {"runtime.device": "cpu"}) as llm:
        prompt = hidden_fact_document(llm.tokenizer, arguments.seq, seed=0).ids
        assert llm.weights.directory is not None
        for _ in range(arguments.rounds):
            results["hybridgen"] += engine_step_ms(llm, prompt, arguments.gen)
            engine_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
            results["transformers"] += transformers_step_ms(llm.weights.directory, prompt, arguments.gen)
            torch.set_num_threads(engine_threads)
        if arguments.neighbour:
            neighbour = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True)
            neighbour.start()
            time.sleep(0.5)
            results["hybridgen, busy neighbour"] = engine_step_ms(llm, prompt, arguments.gen)
            neighbour.terminate()
    base = statistics.median(results["hybridgen"])
    for name, values in results.items():
        median = statistics.median(values)
        print(f"{name:<28} {median:7.1f} ms/token median  {median / base:5.2f} x hybridgen's")


if __name__ == "__main__":
    main()
