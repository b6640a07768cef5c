"""What the pieces of a decode layer cost on a GPU, alone: fetch by grid, choice, attention.

    python experiments/bench_gpu_kernels.py

Shapes of OPT-13B at 32k, 10 % kept, float16. Prints milliseconds and, for the fetch, GB/s.
"""

from __future__ import annotations

import torch

from hybridgen.attention.base import attention_logits, joint_attention
from hybridgen.offload import fetch_kernel
from hybridgen.offload.host_memory import HostSlab
from hybridgen.selection.budget import choose, group_probabilities, keep_limits
from hybridgen.types import KeepRule

HEADS, HOST, DIM, LOCAL, KEEP = 40, 32_128, 128, 644, 0.1


def time_ms(work, rounds: int = 20) -> float:  # type: ignore[no-untyped-def]
    """Median by CUDA events."""
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # noqa: TID251
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[rounds // 2]


def main() -> None:
    """Run and print."""
    device = torch.device("cuda", 0)
    slab = HostSlab(2 * HEADS * HOST * DIM * 2 + HEADS * HOST * 4 + 3 * 4096, device)
    keys, values = (slab.take((1, HEADS, HOST, DIM), torch.float16) for _ in range(2))
    host_logits = slab.take((1, HEADS, HOST), torch.float32)
    for buffer in (keys, values, host_logits):
        buffer.device_view.normal_()
    logits = host_logits.device_view.view(1, HEADS, 1, HOST)
    local = torch.randn(1, HEADS, 1, LOCAL, device=device)
    rule = KeepRule(KEEP, None, 64)
    host_p, local_p = group_probabilities(local, logits, [HOST])
    limits = keep_limits(rule, [HOST])
    selection = choose(limits, host_p, local_p)
    print(f"probabilities  {time_ms(lambda: group_probabilities(local, logits, [HOST])):.3f} ms")
    print(f"choice         {time_ms(lambda: choose(limits, host_p, local_p)):.3f} ms")

    kept = selection.rows.shape[2]
    target = [torch.zeros(1, HEADS, kept, DIM, dtype=torch.float16, device=device) for _ in range(2)]
    moved = 2 * target[0].numel() * 2
    for blocks in (16, 32, 64, 128):
        for turn in (8, 16, 32, 64):
            fetch_kernel.BLOCKS, fetch_kernel.ROWS_A_TURN = blocks, turn
            took = time_ms(
                lambda: fetch_kernel.fetch_rows(
                    [keys.device_view, values.device_view], selection.rows, selection.counts, target
                )
            )
            print(f"fetch {blocks:4} blocks, {turn:3} rows a turn: {took:.3f} ms, {moved / took / 1e6:.1f} GB/s")

    query = torch.randn(1, HEADS, 1, DIM, dtype=torch.float16, device=device)
    window = torch.randn(2, 1, HEADS, LOCAL, DIM, dtype=torch.float16, device=device)
    empty = torch.zeros(1, 1, 1, LOCAL, dtype=torch.bool, device=device)

    def attend() -> None:
        scores = [
            attention_logits(query, window[0], empty, 0.1),
            attention_logits(query, target[0], selection.padding, 0.1),
        ]
        joint_attention(scores, [window[1], target[1]])

    print(f"attention      {time_ms(attend):.3f} ms")


if __name__ == "__main__":
    main()
