"""What the parts of a layer cost on a GPU, alone: kernels and, beside them, their torch twins or other libraries.

    python experiments/bench_gpu_kernels.py [chosen] [whole]

chosen: decode with 10 % kept: choice, scores by sketches, fetch by grid, attention. whole: attention over all KV, a
prompt's attention by library, the products of one token with a layer's matrices. Without either, both. Shapes of
OPT-13B at 32k and of Llama-3.1-8B at 128k, float16. Prints milliseconds and the rate; for the kernels also the host's
microseconds a call: what the launching thread needs while the GPU keeps up or is behind.
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridgen.attention.base import attention_logits, joint_attention
from hybridgen.attention.decode_kernel import attend_rows
from hybridgen.attention.resident import splits_for
from hybridgen.attention.resident_kernel import attend_resident
from hybridgen.kv_cache import sketch_kernel
from hybridgen.kv_cache.quantize import SKETCH_BITS, make_sketch
from hybridgen.kv_cache.sketch_kernel import score_sketch
from hybridgen.offload import fetch_kernel
from hybridgen.offload.host_memory import HostSlab
from hybridgen.selection.budget import choose, group_probabilities, keep_limits
from hybridgen.selection.choose_kernel import choose_rows
from hybridgen.types import KeepRule

HEADS, HOST, DIM, LOCAL, KEEP = 40, 32_128, 128, 644, 0.1
SCALE = DIM**-0.5
CALLS = 100  # of which the host's time is the mean; too few to fill the queue of launches


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


def host_us(work) -> float:  # type: ignore[no-untyped-def]
    """Mean time of the host a call, nothing waited for."""
    work()
    torch.cuda.synchronize()  # noqa: TID251
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    took = time.perf_counter() - start
    torch.cuda.synchronize()  # noqa: TID251
    return took / CALLS * 1e6


def report(name: str, work) -> None:  # type: ignore[no-untyped-def]
    """One line: the device's time and the host's."""
    print(f"{name:22} {time_ms(work):.3f} ms, host {host_us(work):.1f} us a call")


def whole(device: torch.device) -> None:
    """What reads everything: each by its limit, bytes or products."""
    shapes = (("OPT-13B", 40, 40, 32_768), ("Llama-3.1-8B", 32, 8, 131_072))
    for name, heads, kv_heads, tokens in shapes:
        query = torch.randn(1, heads, DIM, dtype=torch.float16, device=device)
        kv = torch.randn(2, 1, kv_heads, tokens, DIM, dtype=torch.float16, device=device)
        index = torch.tensor([tokens - 1], device=device)
        splits = splits_for(tokens)
        took = time_ms(lambda: attend_resident(query, *kv, index, splits, SCALE))  # noqa: B023
        print(f"attend_resident, {name}, {tokens} tokens: {took:.3f} ms, {kv.numel() * 2 / took / 1e6:.0f} GB/s")
        grouped = query.view(1, kv_heads, heads // kv_heads, DIM)
        took = time_ms(lambda: F.scaled_dot_product_attention(grouped, *kv))  # noqa: B023
        print(f"torch's, {name}, {tokens} tokens: {took:.3f} ms, {kv.numel() * 2 / took / 1e6:.0f} GB/s")
    for name, heads, kv_heads, _ in shapes:
        query, (keys, values) = (
            torch.randn(*size, 32_768, DIM, dtype=torch.float16, device=device)
            for size in ((1, heads), (2, 1, kv_heads))
        )
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                took = time_ms(
                    lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True),  # noqa: B023
                    rounds=5,
                )
            rate = 2 * heads * 32_768**2 * DIM / took / 1e9
            print(f"a prompt's attention, {name}, 32768 tokens, {backend.name}: {took:.2f} ms, {rate:.0f} TFLOP/s")
    for rows, columns in ((5120, 5120), (20480, 5120), (5120, 20480), (14336, 4096), (4096, 14336)):
        x = torch.randn(1, columns, dtype=torch.float16, device=device)
        matrices = torch.randn(8, rows, columns, dtype=torch.float16, device=device)  # more than the cache holds
        turn = itertools.cycle(matrices)
        took = time_ms(lambda: F.linear(x, next(turn)), rounds=40)  # noqa: B023
        print(f"one token by {rows} x {columns}: {took:.4f} ms, {rows * columns * 2 / took / 1e6:.0f} GB/s")


def main() -> None:
    """Run and print."""
    asked = sys.argv[1:] or ["chosen", "whole"]
    if set(asked) - {"chosen", "whole"}:
        sys.exit(f"{asked}: allowed are chosen, whole")
    device = torch.device("cuda", 0)
    if "chosen" in asked:
        chosen(device)
    if "whole" in asked:
        whole(device)


def chosen(device: torch.device) -> None:
    """The parts of a step that chooses."""
    slab = HostSlab(2 * HEADS * HOST * DIM * 2 + HEADS * HOST * 4 + 3 * 4096, device)
    keys, values = (slab.take((1, HEADS, HOST, DIM), torch.float16) for _ in range(2))
    host_logits = slab.take((1, HEADS, HOST), torch.float32)
    for buffer in (keys, values, host_logits):
        buffer.device_view.normal_()
    seen = host_logits.device_view
    query = torch.randn(1, HEADS, DIM, dtype=torch.float16, device=device)
    window = torch.randn(2, 1, HEADS, LOCAL, DIM, dtype=torch.float16, device=device)
    empty = torch.zeros(1, 1, 1, LOCAL, dtype=torch.bool, device=device)
    grouped, logits = query.unsqueeze(2), seen.unsqueeze(2)
    local = attention_logits(grouped, window[0], empty, SCALE)
    host_p, local_p = group_probabilities(local, logits.clone(), [HOST])
    for rule in (KeepRule(None, 0.9, 64), KeepRule(KEEP, None, 64)):
        limits = keep_limits(rule, [HOST])
        print(f"keep {rule.keep}, mass {rule.mass}")
        report("choose_rows", lambda limits=limits: choose_rows(query, window[0], empty, seen, limits, SCALE))
        report("twin: probabilities", lambda: group_probabilities(local, logits, [HOST]))
        report("twin: choice", lambda limits=limits: choose(limits, host_p, local_p))
    selection, _ = choose_rows(query, window[0], empty, seen, limits, SCALE)
    there = seen.clone()
    report("choose_rows, on device", lambda: choose_rows(query, window[0], empty, there, limits, SCALE))
    for bits in SKETCH_BITS:
        sketch = make_sketch(torch.randn(1, HEADS, HOST, DIM, dtype=torch.float16, device=device), bits)
        for blocks, turns, warps in itertools.product((1, 2, 4), (1, 4), (1, 4)):
            sketch_kernel.BLOCKS_A_TURN, sketch_kernel.TURNS, sketch_kernel.WARPS = blocks, turns, warps
            took = time_ms(lambda sketch=sketch, bits=bits: score_sketch(query, sketch, bits, [HOST], SCALE))
            rate = sketch.numel() / took / 1e6
            print(f"int{bits} scores, {blocks} blocks, {turns} turns, {warps} warps: {took:.3f} ms, {rate:.0f} GB/s")

    kept = selection.rows.shape[2]
    target = [torch.zeros(1, HEADS, kept, DIM, dtype=torch.float16, device=device) for _ in range(2)]
    moved = 2 * target[0].numel() * 2
    tables = [keys.device_view, values.device_view]

    def fetch() -> None:
        fetch_kernel.fetch_rows(tables, selection.rows, selection.counts, target)

    report("fetch_rows", fetch)
    for blocks in (16, 32, 64, 128):
        for turn in (8, 16, 32, 64):
            fetch_kernel.BLOCKS, fetch_kernel.ROWS_A_TURN = blocks, turn
            took = time_ms(fetch)
            print(f"fetch {blocks:4} blocks, {turn:3} rows a turn: {took:.3f} ms, {moved / took / 1e6:.1f} GB/s")

    def attend() -> None:
        scores = [
            attention_logits(grouped, window[0], empty, SCALE),
            attention_logits(grouped, target[0], selection.padding, SCALE),
        ]
        joint_attention(scores, [window[1], target[1]])

    report("attend_rows", lambda: attend_rows(query, *window, empty, *target, selection.counts, SCALE))
    report("twin: attention", attend)


if __name__ == "__main__":
    main()
