"""Where prefill and decode spend their time: torch's profiler over one run on random weights.

    python experiments/profile_run.py --model opt-13b --seq 32k --keep 0.1

Prints the kernels and operators that take longest, and the device memory after each phase.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from hybridgen.cli import Parser, add_engine_flags, config_from  # before torch: OpenMP waits passively
from hybridgen.engine import build
from hybridgen.engine.llm import LLM

DECODE_STEPS = 4


def memory(phase: str) -> None:
    """One line of device memory; nothing without a GPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved()
        print(
            f"{phase:<10} allocated {allocated / 2**30:.2f} GiB, peak {peak / 2**30:.2f}, reserved "
            f"{reserved / 2**30:.2f}, beside torch {(total - free - reserved) / 2**30:.2f}"
        )


def top(profiler: profile, rows: int = 14) -> None:
    """The longest operators."""
    on_gpu = torch.cuda.is_available()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60))


def main() -> None:
    """Run and print."""
    parser = Parser(description=__doc__)
    add_engine_flags(parser)
    config = config_from(parser.parse_args())
    choice = build.choose_model(config)
    weights = build.obtain_weights(choice, config, needs_text=False)
    memory("weights")
    if torch.cuda.is_available():
        from hybridgen.offload.host_memory import HostSlab

        slab = HostSlab(4 * 2**30, choice.device)
        memory("4 GiB reg.")
        del slab
        memory("freed")
    tokens = config.run.seq or 2048
    with LLM.from_parts(config, choice, weights) as llm:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        prompt = torch.randint(choice.spec.vocab_size, (1, tokens)).tolist()
        batch = llm.new_batch([tokens + 2 * DECODE_STEPS])
        memory("cache")
        with profile(activities=activities) as profiler:
            token = llm.prefill(batch, prompt).argmax(-1)
        memory("prefill")
        top(profiler)
        for _ in range(DECODE_STEPS):
            token = llm.decode(batch, token).argmax(-1)
        with profile(activities=activities) as profiler:
            for _ in range(DECODE_STEPS):
                token = llm.decode(batch, token).argmax(-1)
        memory("decode")
        top(profiler, 20)


if __name__ == "__main__":
    main()
