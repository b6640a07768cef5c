"""What the Python thread does in a decode step: cProfile over steady steps on random weights.

    python experiments/profile_host.py --model opt-13b --seq 32k --keep 0.1
"""

from __future__ import annotations

import cProfile
import pstats
import time

import torch

from hybridgen.cli import Parser, add_engine_flags, config_from
from hybridgen.engine import build
from hybridgen.engine.llm import LLM

STEPS = 6


def main() -> None:
    """Run and print."""
    parser = Parser(description=__doc__)
    add_engine_flags(parser)
    config = config_from(parser.parse_args())
    choice = build.choose_model(config)
    weights = build.obtain_weights(choice, config, needs_text=False)
    tokens = config.run.seq or 2048
    with LLM.from_parts(config, choice, weights) as llm:
        batch = llm.new_batch([tokens + 4 * STEPS])
        token = llm.prefill(batch, torch.randint(choice.spec.vocab_size, (1, tokens)).tolist()).argmax(-1)

        def steps() -> float:
            nonlocal token
            start = time.perf_counter()
            for _ in range(STEPS):
                llm.telemetry.begin_step()
                token = llm.decode(batch, token).argmax(-1)
                token.tolist()
                llm.telemetry.end_step()
            return (time.perf_counter() - start) / STEPS * 1e3

        steps()
        print(f"{steps():.1f} ms a step without the profiler")
        with cProfile.Profile() as profile:
            print(f"{steps():.1f} ms a step with it")
        for order in ("tottime", "cumtime"):
            pstats.Stats(profile).sort_stats(order).print_stats(32)


if __name__ == "__main__":
    main()
