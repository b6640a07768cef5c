"""The machine model and the policy search: by hand, by brute force, and that more of anything never hurts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridgen.config import Config, Setting, build_config, load_strategy, merge_settings, with_settings
from hybridgen.engine import memory_plan
from hybridgen.evaluation.machine_model import (
    ATTENDS_SLOWER_BY_QUERY,
    CHAIN_S,
    HAND_OVER_S,
    ROTATED_S,
    STEP_S,
    STREAM_S,
    Load,
    Spread,
    one_after_another,
    predict,
    roofline_s,
)
from hybridgen.evaluation.policy_search import Attention, Grid, Placed, candidates, modes_of, search, to_disk
from hybridgen.models.loading import layer_shapes
from hybridgen.placement.hardware import Hardware
from hybridgen.placement.plan import GIB, MemoryPlan
from hybridgen.placement.weight_split import possible_shares
from hybridgen.predict import planned_choice

MACHINE = Hardware(
    "test", gpu_memory_gib=1, gpu_memory_gb_per_s=1000, gpu_tflops=100, h2d_gb_per_s=10, cpu_scan_gb_per_s=40,
    host_memory_gib=64, disk_gib=100, disk_read_gb_per_s=2,
)  # fmt: skip
PROMPT, GEN = 4096, 64
LONG = 1 << 18  # so many tokens that small kernels do not count


def configs(**settings: Any) -> dict[Attention, Any]:
    given = {"model.name": "smollm2-135m", "model.dtype": "float16", "run.gen": GEN, "cache.gpu_window": 64}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    made = {path: Setting(value, "test") for path, value in given.items()}
    return {
        "gpu": build_config(merge_settings(load_strategy("aog"), made)),
        "cpu": build_config(merge_settings(load_strategy("aoc"), made)),
    }


CONFIGS = configs()
CHOICE = planned_choice(CONFIGS["gpu"])
LAYERS = CHOICE.spec.num_layers


def hybrid() -> Config:
    keep = {"selection.keep": 0.1, "selection.keep_mass": None, "cache.gpu_window": 64, "run.gen": GEN}
    return with_settings(build_config(load_strategy("hybridgen")), keep)


def found(gpu_bytes: int, host_bytes: int, grid: Grid, hardware: Hardware = MACHINE) -> Placed | None:
    return search(CHOICE, CONFIGS, PROMPT, GEN, hardware, (gpu_bytes, host_bytes), grid)


def least_on_gpu(batch: int) -> int:
    """Bytes with everything elsewhere that can be."""
    config = memory_plan.with_share(with_settings(CONFIGS["cpu"], {"run.batch": batch}), 0.0)
    return memory_plan.plan_memory(CHOICE, config, modes_of(0, LAYERS, "cpu"), batch, PROMPT + GEN).device_bytes


def all_on_gpu(batch: int) -> int:
    config = with_settings(CONFIGS["gpu"], {"run.batch": batch})
    return memory_plan.plan_memory(CHOICE, config, modes_of(LAYERS, LAYERS, "gpu"), batch, PROMPT + GEN).device_bytes


# -- the machine model


def test_a_step_by_hand() -> None:
    """From sizes written out here, all weights on the GPU: SmolLM2-135M has 30 layers, 9 heads and 3 KV heads of 64."""
    context, window = PROMPT + GEN // 2, 64 + 4
    rows = (context - window) // 64 * 64
    kv = 30 * rows * 2 * 3 * 64 * 2
    weights = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536 + 2 * 576) * 2
    head = 49152 * 576 * 2
    local = 30 * (context - rows) * 2 * 3 * 64 * 2
    aog = predict(CHOICE, CONFIGS["gpu"], modes_of(0, LAYERS, "gpu"), PROMPT, GEN, MACHINE)
    assert aog.step.h2d == pytest.approx(kv / 10e9 + 30 * STREAM_S) and aog.step.cpu == 0
    small = 30 * ROTATED_S
    assert aog.step.gpu == pytest.approx((weights + head + kv + local) / 750e9 + small)
    assert aog.step.dram == pytest.approx((kv + 30 * 2 * 3 * 64 * 2) / 40e9), "read for the link, and a new token's row"
    assert aog.step_s == pytest.approx(max(aog.step.h2d, aog.step.gpu) + STEP_S) and aog.bottleneck == "h2d"
    aoc = predict(CHOICE, CONFIGS["cpu"], modes_of(0, LAYERS, "cpu"), PROMPT, GEN, MACHINE)
    shared = 1 + 2 * ATTENDS_SLOWER_BY_QUERY
    assert aoc.step.cpu == pytest.approx(shared * kv / 40e9), "three queries share a KV head"
    own = (weights + local) / 750e9 + small
    logits = predict(CHOICE, hybrid(), ("lookahead",) * LAYERS, PROMPT, GEN, MACHINE)
    kept = math.ceil(0.1 * rows)
    fetched, scores = 30 * 3 * kept * 2 * 64 * 2, 30 * 9 * rows * 2
    assert logits.step.h2d == pytest.approx((fetched + scores) / 9e9)
    assert logits.step.cpu == pytest.approx(1.04 * kv / 2 / 40e9), "three queries share a KV head"
    aged = 30 * (2 * 3 * 64 * 2 + 9 * 64 * 4)
    assert logits.step.dram == pytest.approx((kv / 2 + 2 * scores + fetched + aged) / 40e9)
    there = 30 * 9 * 64 * 4 / 10e9 + 30 * 64 * 3 * 2 * 2 / 10e9
    back = 30 * 9 * 65 * 4 / 9e9
    turns = own + shared * kv / 40e9 + there + back + 30 * 40e-6
    assert aoc.step_s == pytest.approx(head / 750e9 + turns + STEP_S, rel=1e-3)
    assert aoc.total_s == pytest.approx(aoc.prefill_s + (GEN - 1) * aoc.step_s)
    assert aoc.tokens_per_s == pytest.approx(GEN / aoc.total_s)


def test_streamed_weights_come_once_for_all_micro_batches() -> None:
    config = with_settings(CONFIGS["gpu"], {"run.batch": 4})
    modes, spread = modes_of(LAYERS, LAYERS, "gpu"), Spread(weights_on_gpu=0.25, weights_on_disk=0.5)
    whole = predict(CHOICE, config, modes, PROMPT, GEN, MACHINE, spread)
    parts = predict(CHOICE, config, modes, PROMPT, GEN, MACHINE, spread, micro_batches=4)
    weights = sum(torch.Size(s).numel() for layer in layer_shapes(CHOICE.family, CHOICE.spec) for s in layer.values())
    assert whole.step.h2d == parts.step.h2d == pytest.approx(0.75 * weights * 2 / 10e9)
    assert whole.step.disk == parts.step.disk == pytest.approx(0.5 * weights * 2 / 2e9)
    head = CHOICE.spec.vocab_size * CHOICE.spec.hidden_size
    assert parts.step.gpu - whole.step.gpu == pytest.approx(3 * ((weights + head) * 2 / 750e9 + 30 * ROTATED_S))


def test_packed_weights_cross_packed_and_are_unpacked_once_a_step() -> None:
    modes, spread = modes_of(LAYERS, LAYERS, "gpu"), Spread(weights_on_gpu=0.25, weights_on_disk=0.5)
    packed = with_settings(CONFIGS["gpu"], {"placement.compress_weights": "int4"})
    plain, found = (predict(CHOICE, some, modes, PROMPT, GEN, MACHINE, spread) for some in (CONFIGS["gpu"], packed))
    weights = sum(torch.Size(s).numel() for layer in layer_shapes(CHOICE.family, CHOICE.spec) for s in layer.values())
    kept = weights * (4 * 64 + 32) / 64 / 8  # bytes: 64 codes of 4 bits and two numbers of 16
    assert found.step.h2d == pytest.approx(0.75 * kept / 10e9) and found.step.disk == pytest.approx(0.5 * kept / 2e9)
    assert found.step.gpu - plain.step.gpu == pytest.approx((kept + 2 * weights) / 750e9)


def test_work_in_pieces() -> None:
    load = Load(gpu=2.0, cpu=5.0, h2d=1.0)
    assert one_after_another(load, 1) == 8.0, "nothing is staggered"
    assert one_after_another(load, 3) == 5.0, "the CPU always has a piece to work on"
    assert one_after_another(replace(load, gpu=4.5), 2) == 5.25, "each of two pieces goes round, alone most of the time"
    assert roofline_s(MACHINE, 120e12, 0) == pytest.approx(2.0) and roofline_s(MACHINE, 0, 1.5e12) == pytest.approx(2.0)


def test_as_many_micro_batches_as_the_config_asks_for() -> None:
    config = with_settings(CONFIGS["cpu"], {"run.batch": 8, "runtime.micro_batch": 0.25})
    modes = modes_of(0, LAYERS, "cpu")
    asked, four, one = (predict(CHOICE, config, modes, PROMPT, GEN, MACHINE, micro_batches=n) for n in (None, 4, 1))
    assert asked == four != one


def test_a_scan_takes_of_the_links_rate() -> None:
    """20 GB/s of 60 are left while the CPU reads 40: half of a link that reaches 40."""
    together = replace(MACHINE, h2d_gb_per_s=80, zero_copy_gb_per_s=40, host_dram_gb_per_s=60)
    config, modes = with_settings(hybrid(), {"selection.keep": 1.0}), ("lookahead",) * LAYERS
    alone = predict(CHOICE, config, modes, LONG, GEN, MACHINE).step
    beside = predict(CHOICE, config, modes, LONG, GEN, together)
    link, scan = beside.step.h2d, beside.step.cpu
    assert scan == alone.cpu and link > scan / 2, "the link is busy when the scan is over"
    assert beside.step_s == pytest.approx(scan + (link - scan / 2) + LAYERS * HAND_OVER_S + STEP_S)


def test_two_layers_are_under_way() -> None:
    """Scan, link and GPU take the same time: a layer's three follow one another, those of two layers overlap."""
    fast = replace(MACHINE, gpu_memory_gb_per_s=1e6, gpu_tflops=1e6, h2d_gb_per_s=1e6, host_dram_gb_per_s=1e9)
    modes = ("lookahead",) * LAYERS
    quick = predict(CHOICE, hybrid(), modes, LONG, GEN, fast)
    scan, waiting = quick.step.cpu, LAYERS * HAND_OVER_S
    in_chain = waiting + LAYERS * CHAIN_S
    alone = max(scan + waiting, (scan + quick.step.gpu + quick.step.h2d + in_chain) / 2)
    assert quick.step_s == pytest.approx(alone + STEP_S, rel=1e-3), "the scan, or the turns of two layers"
    slow = replace(fast, h2d_gb_per_s=quick.step.h2d * 1e6 / scan)
    both = predict(CHOICE, hybrid(), modes, LONG, GEN, slow)
    assert both.step.h2d == pytest.approx(scan, rel=1e-3)
    each = both.step.gpu + both.step.h2d + scan + in_chain
    assert both.step_s == pytest.approx(max(each / 2, scan + waiting) + STEP_S, rel=1e-3)


def test_queries_that_share_a_kv_head_slow_a_scan_down() -> None:
    """By six hundredths for each further one, with int8 keys; SmolLM2 has two more."""
    config = with_settings(hybrid(), {"cache.key_type": "int8"})
    whole = predict(CHOICE, hybrid(), ("lookahead",) * LAYERS, PROMPT, GEN, MACHINE).step.cpu
    found = predict(CHOICE, config, ("lookahead",) * LAYERS, PROMPT, GEN, MACHINE).step.cpu
    assert found / whole == pytest.approx((64 + 4) / 128 * 1.12 / 1.04)


def test_hidden_states_on_the_host_cross_the_link_both_ways() -> None:
    config = with_settings(CONFIGS["gpu"], {"run.batch": 8})
    modes = modes_of(LAYERS, LAYERS, "gpu")
    moved = predict(CHOICE, config, modes, PROMPT, GEN, MACHINE, Spread(hidden_on_host=1.0))
    assert moved.step.h2d == moved.step.d2h == pytest.approx(30 * 8 * 576 * 2 / 10e9)


# -- the search


def brute_force(gpu_bytes: int, host_bytes: int, grid: Grid) -> tuple[float, dict[str, Any]]:
    """Every share of weights that there is, each on its own, by the plan of the engine; no disk."""
    best, which = 0.0, {}
    for batch in grid.batches:
        for attention in grid.attention:
            base = with_settings(CONFIGS[attention], {"run.batch": batch})
            for step in range(grid.kv_steps + 1):
                modes = modes_of(round(step * LAYERS / grid.kv_steps), LAYERS, attention)
                for share in possible_shares(layer_shapes(CHOICE.family, CHOICE.spec)):
                    config = memory_plan.with_share(base, share)
                    plan = memory_plan.plan_memory(CHOICE, config, modes, batch, PROMPT + GEN)
                    if not plan.fits(gpu_bytes, host_bytes):
                        continue
                    for pieces in grid.micro_batches:
                        spread = Spread(weights_on_gpu=plan.weights_on_gpu or 0.0)
                        made = predict(CHOICE, config, modes, PROMPT, GEN, MACHINE, spread, pieces)
                        if made.tokens_per_s > best:
                            best = made.tokens_per_s
                            which = {"batch": batch, "kv": step / grid.kv_steps, "pieces": pieces, "at": attention}
    return best, which


@pytest.mark.parametrize("part", [0.05, 0.5])
def test_the_best_of_all_is_found(part: float) -> None:
    grid = Grid(batches=(4,), kv_steps=2, micro_batches=(1, 2))
    least = least_on_gpu(4)
    gpu_bytes = int(least + part * (all_on_gpu(4) - least))
    best, which = brute_force(gpu_bytes, 64 * GIB, grid)
    placed = found(gpu_bytes, 64 * GIB, grid)
    assert placed is not None and placed.prediction.tokens_per_s == pytest.approx(best, rel=1e-9)
    policy = placed.policy
    assert (policy.batch, policy.kv.gpu, policy.num_micro_batches) == (which["batch"], which["kv"], which["pieces"])
    assert policy.attention == which["at"] or policy.kv.gpu == 1.0
    assert placed.plan.device_bytes <= gpu_bytes and policy.kv.disk == policy.weights.disk == 0


def test_everything_on_the_gpu_where_it_fits() -> None:
    placed = found(all_on_gpu(1), 64 * GIB, Grid())
    assert placed is not None and placed.policy.weights.gpu == placed.policy.kv.gpu == 1.0
    assert found(least_on_gpu(1) - GIB, 64 * GIB, Grid()) is None


def test_more_of_anything_is_never_slower() -> None:
    grid, least, most = Grid(batches=(1, 2, 4, 8), kv_steps=4, micro_batches=(1, 2)), least_on_gpu(1), all_on_gpu(8)

    def speeds(limits: list[tuple[int, int]]) -> list[float]:
        placed = [found(*limit, grid) for limit in limits]
        return [0.0 if one is None else one.prediction.tokens_per_s for one in placed]

    steps = range(9)
    for made in (
        speeds([(int(least + step * (most - least) / 8), 64 * GIB) for step in steps]),
        speeds([(int(1.02 * least), int(step * GIB / 8)) for step in range(1, 9)]),
    ):
        assert made == sorted(made) and made[0] < made[-1]
    gpu_bytes = int(1.1 * least)
    by_name = {}
    for name in ("h2d_gb_per_s", "cpu_scan_gb_per_s", "gpu_memory_gb_per_s", "gpu_tflops"):
        faster = [replace(MACHINE, **{name: factor * getattr(MACHINE, name)}) for factor in (1, 2, 4)]
        placed = [found(gpu_bytes, 64 * GIB, grid, machine) for machine in faster]
        by_name[name] = [one.prediction.tokens_per_s for one in placed if one is not None]
        assert by_name[name] == sorted(by_name[name])
    assert by_name["cpu_scan_gb_per_s"][0] < by_name["cpu_scan_gb_per_s"][-1]


def test_what_the_host_has_no_room_for_goes_to_the_disk() -> None:
    grid = Grid(batches=(8,), kv_steps=1, micro_batches=(1,))
    gpu_bytes = int(1.02 * least_on_gpu(8))
    roomy = found(gpu_bytes, 64 * GIB, grid)
    assert roomy is not None and roomy.disk_bytes == 0
    tight = found(gpu_bytes, roomy.plan.host_bytes // 2, grid)
    assert tight is not None and tight.plan.host_bytes <= roomy.plan.host_bytes // 2
    policy = tight.policy
    assert policy.weights.disk > 0 and policy.kv.disk > 0, "weights first, but they do not suffice"
    assert policy.weights.host == pytest.approx(0, abs=1e-6)
    for shares in (policy.weights, policy.kv, policy.activations):
        assert shares.gpu + shares.host + shares.disk == pytest.approx(1)
    assert tight.prediction.step.disk > 0 and tight.prediction.step_s > roomy.prediction.step_s
    no_disk = replace(MACHINE, disk_gib=None)
    assert found(gpu_bytes, roomy.plan.host_bytes // 2, grid, no_disk) is None


def test_bytes_on_the_disk() -> None:
    plan = MemoryPlan(False, {}, {"streamed weights": 1000, "KV host tier": 1000, "other": 10})
    moved = to_disk(plan, 1500, layers=10, depth=1)
    assert moved is not None
    fits, weights, kv = moved
    assert fits.host_bytes <= 1500 and kv == 0 and weights == int(510 / 0.8) + 1  # a fifth of it is on its way
    moved = to_disk(plan, 600, layers=10, depth=1)
    assert moved is not None and moved[0].host_bytes <= 600 and moved[1] == 1000 and moved[2] > 0
    assert to_disk(plan, 300, layers=10, depth=1) is None
    assert to_disk(plan, 2010, layers=10, depth=1) == (plan, 0, 0)


def test_what_is_looked_at() -> None:
    """Numbers of micro-batches that divide; a GPU with all KV has no attention on the CPU."""
    grid = Grid(batches=(6,), kv_steps=3)
    seen = list(candidates(CHOICE, CONFIGS, PROMPT, GEN, MACHINE, (64 * GIB, 64 * GIB), grid))
    assert {one.policy.num_micro_batches for one in seen} == {1, 2}
    assert {one.policy.kv.gpu for one in seen} == {0.0, 1 / 3, 2 / 3, 1.0}
    assert all(one.policy.attention == "gpu" for one in seen if one.policy.kv.gpu == 1.0)
    assert {one.config.runtime.micro_batch for one in seen} == {0, 3}
