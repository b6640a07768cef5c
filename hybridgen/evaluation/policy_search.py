"""Which placement is best for a machine: FlexGen's policy search and MoE-Lightning's, by enumeration. Pure numbers.

FlexGen (arXiv 2303.06865, section 4.3; algorithms.md 1): shares of weights, KV and activations on GPU, host and disk, a
micro-batch and how many of them make a block, attention on the GPU or the CPU; the policy with the least time a token
whose memory fits wins. MoE-Lightning (algorithms.md 2) searches the same space with a roofline, and finds attention on
the CPU with staggered micro-batches. Both are here one search over `machine_model.predict`. The papers solve a linear
programme; here the grid is small enough to be looked at whole:

* KV on the GPU: whole layers, in `Grid.kv_steps` steps. Weights on the GPU: for each of these the most that fits, as
  less is never faster. What the host has no room for goes to the disk, weights before KV (they are read only).
* Activations: on the GPU, where this engine keeps them; `machine_model.Spread` knows of others.
* Micro-batches: numbers that divide the batch.

Memory is the engine's own plan (`engine/memory_plan.py`) for the machine in question. Micro-batches save none there, as
each has its own staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybridgen.config import Config, with_settings
from hybridgen.engine import memory_plan
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.memory_budget import Limits
from hybridgen.evaluation.machine_model import Prediction, Spread, predict
from hybridgen.models.loading import layer_shapes
from hybridgen.offload.weights import WeightFootprint
from hybridgen.placement.hardware import Hardware
from hybridgen.placement.plan import MemoryPlan
from hybridgen.placement.weight_split import possible_shares

Attention = Literal["gpu", "cpu"]
ROUNDING = 1.0 + 1e-9  # a policy that is better by less is as good
KV_ON_DISK_LAYERS = 2  # layers whose KV is in the host's memory on its way from the disk


@dataclass(frozen=True)
class Shares:
    """Of all bytes of a kind: where they lie; adds up to 1."""

    gpu: float
    host: float
    disk: float


@dataclass(frozen=True)
class Policy:
    """FlexGen's twelve variables."""

    weights: Shares
    kv: Shares
    activations: Shares
    micro_batch: int
    num_micro_batches: int
    attention: Attention

    @property
    def batch(self) -> int:
        """FlexGen's block."""
        return self.micro_batch * self.num_micro_batches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Placed:
    """A policy, what it takes and how fast it is."""

    policy: Policy
    prediction: Prediction
    config: Config
    modes: tuple[LayerMode, ...]
    plan: MemoryPlan
    disk_bytes: int


@dataclass(frozen=True)
class Grid:
    """What is looked at."""

    batches: Sequence[int] = (1,)
    kv_steps: int = 10  # KV on the GPU: 0, 1 / kv_steps, ..., 1 of the layers
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16)
    attention: Sequence[Attention] = ("gpu", "cpu")


def search(
    choice: ModelChoice,
    configs: Mapping[Attention, Config],
    prompt: int,
    gen: int,
    hardware: Hardware,
    limits: Limits,
    grid: Grid | None = None,
) -> Placed | None:
    """The policy of most tokens a second, prefill included; None if nothing fits. Ties: the one that was met first.

    configs: for attention there, with `streamed` and `on_cpu` executors. limits: bytes of GPU and host.
    """
    best: Placed | None = None
    for placed in candidates(choice, configs, prompt, gen, hardware, limits, grid or Grid()):
        if best is None or placed.prediction.tokens_per_s > ROUNDING * best.prediction.tokens_per_s:
            best = placed
    return best


def candidates(
    choice: ModelChoice,
    configs: Mapping[Attention, Config],
    prompt: int,
    gen: int,
    hardware: Hardware,
    limits: Limits,
    grid: Grid,
) -> Iterator[Placed]:
    """All policies of the grid that fit, with the most weights on the GPU that each allows."""
    layers = choice.spec.num_layers
    weights = [
        memory_plan.footprint(choice, configs[grid.attention[0]], share, 0.0)
        for share in possible_shares(layer_shapes(choice.family, choice.spec))
    ]
    resident = sorted({round(step * layers / grid.kv_steps) for step in range(grid.kv_steps + 1)}, reverse=True)
    for batch in grid.batches:
        fits = False
        for attention in grid.attention:
            config = with_settings(configs[attention], {"run.batch": batch})
            for count in resident:
                if count == layers and attention != grid.attention[0]:
                    continue  # no layer is left for the CPU
                modes = modes_of(count, layers, attention)
                bare = memory_plan.plan_memory(choice, config, modes, batch, prompt + gen)
                fitted = fit(choice, config, bare, hardware, limits, weights)
                if fitted is None:
                    continue
                fits = True
                plan, spread, disk_bytes = fitted
                placed = with_settings(config, {"placement.weights_on_gpu": spread.weights_on_gpu})
                for pieces in grid.micro_batches:
                    if batch % pieces:
                        continue
                    sized = with_settings(placed, {"runtime.micro_batch": 0 if pieces == 1 else batch // pieces})
                    found = predict(choice, sized, modes, prompt, gen, hardware, spread, pieces)
                    yield Placed(_policy(spread, count / layers, batch, pieces, attention), found, sized, modes, plan,
                                 disk_bytes)  # fmt: skip
        if not fits:
            return  # nor will a larger batch


def modes_of(resident: int, layers: int, attention: Attention) -> tuple[LayerMode, ...]:
    """The first layers keep all their KV on the GPU."""
    others: LayerMode = "streamed" if attention == "gpu" else "on_cpu"
    return tuple("resident" if layer < resident else others for layer in range(layers))


def fit(
    choice: ModelChoice,
    config: Config,
    bare: MemoryPlan,
    hardware: Hardware,
    limits: Limits,
    weights: Sequence[WeightFootprint],
) -> tuple[MemoryPlan, Spread, int] | None:
    """The plan with the first of the splits of the weights that fits, and what must go to the disk, in bytes.

    bare: a plan, wherever it has the weights; weights: the most on the GPU first.
    """
    device, _ = memory_plan.without_weights(bare)
    for needed in weights:
        if limits[0] is not None and device + needed.device_bytes + needed.staging_bytes > limits[0]:
            continue
        plan = memory_plan.place_weights(choice, memory_plan.with_share(config, needed.share), bare)
        moved = to_disk(plan, limits[1], choice.spec.num_layers, config.placement.prefetch_depth)
        if moved is None:
            return None  # nor will less on the GPU
        plan, cold_weights, cold_kv = moved
        disk_bytes = cold_weights + cold_kv
        if disk_bytes > hardware.disk_bytes:
            return None
        streamed, tier = needed.host_bytes, bare.host.get("KV host tier", 0)
        on_host = 1.0 - needed.share
        spread = Spread(
            needed.share,
            on_host * cold_weights / streamed if streamed else 0.0,
            cold_kv / tier if tier else 0.0,
        )
        return plan, spread, disk_bytes
    return None


def to_disk(plan: MemoryPlan, host_limit: int, layers: int, depth: int) -> tuple[MemoryPlan, int, int] | None:
    """The plan with what the host has no room for on the disk, and so many bytes of weights and of KV; None: in vain.

    On their way from there, weights of `depth` + 1 layers and KV of two lie in the host's memory all the same.
    """
    over, host, moved = plan.host_bytes - host_limit, dict(plan.host), [0, 0]
    parts = (("streamed weights", depth + 1), ("KV host tier", KV_ON_DISK_LAYERS))
    for index, (name, staged_layers) in enumerate(parts):
        size, kept = host.get(name, 0), min(1.0, staged_layers / layers)
        if over <= 0 or not size or kept == 1.0:
            continue
        gone = min(size, int(over / (1.0 - kept)) + 1)
        moved[index], host[name] = gone, size - gone
        host[f"{name}: on their way from the disk"] = int(kept * gone)
        over -= gone - int(kept * gone)
    if over > 0:
        return None
    return MemoryPlan(plan.device_is_host, dict(plan.device), host, plan.weights_on_gpu), moved[0], moved[1]


def _policy(spread: Spread, kv_on_gpu: float, batch: int, pieces: int, attention: Attention) -> Policy:
    weights_on_host = max(0.0, 1.0 - spread.weights_on_gpu - spread.weights_on_disk)
    kv_on_disk = (1.0 - kv_on_gpu) * spread.host_kv_on_disk
    return Policy(
        Shares(spread.weights_on_gpu, weights_on_host, spread.weights_on_disk),
        Shares(kv_on_gpu, 1.0 - kv_on_gpu - kv_on_disk, kv_on_disk),
        Shares(1.0 - spread.hidden_on_host, spread.hidden_on_host, 0.0),
        batch // pieces,
        pieces,
        "gpu" if kv_on_gpu == 1.0 else attention,
    )
