"""The machine model: how long prefill and decode would take on a machine that need not be at hand. Pure numbers.

What a step moves comes from `byte_formulas.py`; this module divides by rates. Each resource (GPU, link in both
directions, CPU, the host's memory, disk) has so much to do in a step. Where layers overlap, the longest of them is the
step's time: a roofline for a whole step, as in MoE-Lightning (algorithms.md 2) and FlexGen's cost model (1), which take
the largest of compute and transfers, too. Where a layer waits for its own transfer or scan, times add up:

  resident, evicting, streamed ahead, lookahead:   max over resources
  streamed not ahead, select (true query):         GPU + link + CPU, one after another
  on_cpu, n micro-batches staggered:               the largest of GPU, link and CPU, or all of them / n
  lookahead, where the CPU scores:                 no less than (scan + link + GPU + what handing over takes) / 2:
                                                   two layers are under way, and each waits for its own; three
                                                   with lookahead_layers 2

FlexGen's T = L * Tpre + L * (n - 1) * Tgen is `Prediction.total_s`; layers need not be alike, so Tpre and Tgen are
already summed up. Weights that are streamed come once a step for all micro-batches; the GPU reads all of them from its
memory for each.

The constants below are an H200's with 16 cores; another machine's may differ. experiments/machine_model_check.py puts
predictions beside what was measured, and says to which rows the constants were fitted. The model knows nothing of
models so small that launches take longest, of blocks that age, of the codes and scores that some strategies make in a
prefill, of plans that change (feedback), or of sequences of several lengths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from hybridgen.config import Config
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.scheduling import keep_rule
from hybridgen.evaluation.byte_formulas import StepBytes, kept_by_eviction, layer_bytes, sizes_of
from hybridgen.kv_cache.host_keys import sketch_parts
from hybridgen.kv_cache.layout import host_shape, tensor_bytes
from hybridgen.models.base import DecoderModel
from hybridgen.models.loading import layer_shapes
from hybridgen.models.spec import LayerSpec, ModelSpec
from hybridgen.offload.groupwise import GROUP
from hybridgen.placement.hardware import Hardware
from hybridgen.selection.budget import most_kept

GPU_MEMORY_REACHED = 0.75  # of the data sheet: torch's products read weights at 3.5 to 3.9 of 4.8 TB/s
GPU_ARITHMETIC_REACHED = 0.6  # of the data sheet, in a prefill: OPT-13B, 32k tokens, 590 of 989 TFLOP/s
STEP_S = 0.7e-3  # drawing, reading the token, and what the host does before the first layer
# Of one layer, in seconds, beside what its bytes take:
ROTATED_S = 30e-6  # small kernels of a layer with RoPE: norms without a bias and rotations are several each
CHOICE_S = 130e-6  # predicting, scoring, choosing: small kernels, one after another ...
CHOICE_S_PER_SCORE = 40e-12  # ... which look at each query head's score of each row several times
PARTIAL_S_PER_ROW = 0.29e-9  # InfiniGen's scores: products of rows of a few columns, far from the memory's rate
# `logits`: choice and attention are torch operations that the host launches one by one, and the GPU waits for it.
LAUNCHES_S = 3.4e-3
# By policy: its own attention, and the search for what to evict; keyformer's noise is a long chain of operations.
EVICTING_S = {"streaming_llm": 150e-6, "snapkv": 150e-6, "h2o": 200e-6, "keyformer": 310e-6}
# Of each query head's score of a token that is left: small beside its K and V, but where queries share a KV head, as
# products are then cut into too few blocks.
EVICTING_S_PER_SCORE = 0.06e-9
GROUPED_S_PER_SCORE = {"streaming_llm": 0.27e-9, "snapkv": 0.27e-9, "h2o": 0.125e-9, "keyformer": 1.02e-9}
HAND_OVER_S = 250e-6  # the CPU's part of a layer: a query goes, scores come, and the next query
CHAIN_S = 350e-6  # and more of two layers under way, where no resource is busy all the time; boxes differ in it
ATTEND_HAND_OVER_S = 40e-6  # likewise where it attends, by signals alone
FETCH_S = 80e-6  # of the link, where rows are fetched that the GPU alone chose: kernels of the fetch
STREAM_S = 40e-6  # likewise where all K and V are copied
# How much longer a scan takes for each further query of a KV head, whose logits it writes (`bench cpu`, float32).
SLOWER_BY_QUERY = {"fp32": 0.02, "fp16": 0.02, "bf16": 0.02, "int8": 0.06, "int4": 0.07, "int2": 0.12}
ATTENDS_SLOWER_BY_QUERY = 0.17  # where it attends; of a decode step


@dataclass(frozen=True)
class Load:
    """What the resources have to do, in seconds."""

    gpu: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    cpu: float = 0.0
    dram: float = 0.0  # host memory: CPU and link together
    disk: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(*(getattr(self, name) + getattr(other, name) for name in RESOURCES))

    def __mul__(self, times: float) -> Load:
        return Load(*(times * getattr(self, name) for name in RESOURCES))

    @property
    def longest(self) -> float:
        return max(self.gpu, self.h2d, self.d2h, self.cpu, self.dram, self.disk)


RESOURCES = tuple(part.name for part in fields(Load))


@dataclass(frozen=True)
class Spread:
    """Where weights, host KV and hidden states lie beyond what `modes` say; shares of all bytes of their kind."""

    weights_on_gpu: float = 1.0
    weights_on_disk: float = 0.0
    host_kv_on_disk: float = 0.0  # of the KV that is not on the GPU
    hidden_on_host: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Of a job: prefill, then gen - 1 decode steps of all sequences."""

    prefill_s: float
    step_s: float
    prefill: Load
    step: Load
    gen: int
    batch: int

    @property
    def total_s(self) -> float:
        return self.prefill_s + max(0, self.gen - 1) * self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job, prefill included: FlexGen's measure."""
        return self.batch * self.gen / self.total_s

    @property
    def bottleneck(self) -> str:
        """The resource that has most to do in a step; `order` if it is rather that they wait for each other."""
        busiest = max(RESOURCES, key=lambda name: float(getattr(self.step, name)))
        return busiest if self.step.longest >= 0.6 * self.step_s else "order"

    def to_dict(self) -> dict[str, Any]:
        return {
            "prefill_s": self.prefill_s,
            "ms_per_token": 1e3 * self.step_s,
            "decode_tokens_per_s": self.batch / self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "total_s": self.total_s,
            "bottleneck": self.bottleneck,
            "busy_ms_per_step": {name: 1e3 * getattr(self.step, name) for name in RESOURCES},
            "busy_s_of_prefill": {name: getattr(self.prefill, name) for name in RESOURCES},
        }


def roofline_s(hardware: Hardware, flops: float, read_bytes: float) -> float:
    """Seconds of GPU kernels that do so many operations and read so many bytes of its memory."""
    arithmetic = flops / (1e12 * GPU_ARITHMETIC_REACHED * hardware.gpu_tflops)
    return max(arithmetic, read_bytes / (1e9 * GPU_MEMORY_REACHED * hardware.gpu_memory_gb_per_s))


def predict(
    choice: ModelChoice,
    config: Config,
    modes: Sequence[LayerMode],
    prompt: int,
    gen: int,
    hardware: Hardware,
    spread: Spread | None = None,
    micro_batches: int | None = None,
) -> Prediction:
    """Time of `run.batch` sequences of `prompt` tokens each, of which `gen` more are made.

    modes: of the layers. spread: None for the config's share of weights, all else on GPU and host. micro_batches: None
    for as many as the config asks for.
    """
    if micro_batches is None:
        size = build.micro_batch_size(config, config.run.batch) or config.run.batch
        micro_batches = math.ceil(config.run.batch / size)
    if spread is None:
        share = config.placement.weights_on_gpu
        spread = Spread(1.0 if share == "auto" else share)
    tokens = prompt + gen // 2  # in the middle of the decode steps
    kinds = Counter(zip(choice.spec.layers, modes, layer_elements(choice.family, choice.spec), strict=True))
    job = _Job(choice, config, hardware, spread, prompt, tokens, micro_batches)
    beside, in_turn, background, waiting, jobs, chain = job.head(), Load(), Load(), 0.0, 0.0, job.head().gpu
    for (layer, mode, elements), times in kinds.items():
        load, streamed, own = job.step(layer, mode, elements)
        background += streamed * times
        if mode == "on_cpu":
            in_turn, jobs = in_turn + load * times, jobs + micro_batches * own * times
        elif mode == "select" or (mode == "streamed" and not config.attention.stream_ahead):
            in_turn, waiting = in_turn + load * times, waiting + own * times
        else:
            beside, waiting = beside + load * times, waiting + own * times
            under_way = 1 + config.attention.lookahead_layers
            chain += times * ((load.gpu + load.h2d + load.cpu + own + CHAIN_S) / under_way if load.cpu else load.gpu)
    step = beside + in_turn + background
    in_turn_s = one_after_another(in_turn + Load(cpu=jobs), micro_batches if jobs else 1)
    link = step.h2d + (1.0 - job.link_beside_scan) * min(beside.cpu, step.h2d / job.link_beside_scan)
    step_s = max(step.longest, link, beside.longest + in_turn_s, chain - waiting) + waiting + STEP_S
    prefill = sum((job.prefill(*kind) * times for kind, times in kinds.items()), Load())
    return Prediction(prefill.longest, step_s, prefill, step, gen, config.run.batch)


@lru_cache(maxsize=64)
def layer_elements(family: type[DecoderModel], spec: ModelSpec) -> tuple[int, ...]:
    """Numbers in each layer's weights."""
    return tuple(sum(math.prod(shape) for shape in layer.values()) for layer in layer_shapes(family, spec))


def one_after_another(load: Load, pieces: int) -> float:
    """Of resources that wait for each other: pieces of the work go round through all of them, layer after layer.

    Either a resource always has one to work on, or each piece goes round as fast as if it were alone.
    """
    parts = (load.gpu, load.cpu, load.h2d, load.d2h)
    return max(*parts, sum(parts) / pieces)


@dataclass(frozen=True)
class _Job:
    """The parts of a prediction."""

    choice: ModelChoice
    config: Config
    hardware: Hardware
    spread: Spread
    prompt: int
    tokens: int
    micro_batches: int

    @property
    def element(self) -> int:
        return self.choice.dtype.itemsize

    @property
    def batch(self) -> int:
        return self.config.run.batch

    def kept(self, elements: int) -> float:
        """Bytes of so many of a layer's weights, wherever they lie. A packed group has two 16-bit numbers."""
        bits = build.weight_format(self.config, self.choice.dtype).bits
        return elements * (self.element if bits is None else bits / 8 + 4 / GROUP)

    def unpacking(self, elements: int) -> float:
        """Bytes that the GPU reads and writes to unpack them."""
        is_packed = build.weight_format(self.config, self.choice.dtype).codec is not None
        return self.kept(elements) + elements * self.element if is_packed else 0.0

    def head(self) -> Load:
        """LM head, of all sequences."""
        spec = self.choice.spec
        size = spec.vocab_size * spec.hidden_size
        return Load(gpu=roofline_s(self.hardware, 2 * size * self.batch, self.micro_batches * size * self.element))

    def step(self, layer: LayerSpec, mode: LayerMode, elements: int) -> tuple[Load, Load, float]:
        """Of a decode step in one layer: what it does, what comes beside it, and what is never hidden."""
        hardware, config, element = self.hardware, self.config, self.element
        sizes = sizes_of(config, self.choice.dtype, on_cuda=True)
        rows = build.window_layout(config).host_rows(self.tokens)
        moved = layer_bytes(layer, config, mode, sizes, rows, self.tokens, self.prompt)
        attended, sketch = self._on_gpu(layer, mode, rows)
        reads = self.micro_batches * elements * element + attended * layer.kv_bytes_per_token(element) + sketch
        flops = 2 * self.batch * elements + 4 * attended * layer.num_heads * layer.head_dim
        gpu = roofline_s(hardware, flops, reads + self.unpacking(elements))
        gpu += (self._bookkeeping(layer, mode, rows) + ROTATED_S * (layer.rope is not None)) * self.micro_batches
        on_dma = moved.h2d if mode in ("streamed", "evicting") else 0.0
        link = on_dma / hardware.h2d + (moved.h2d - on_dma) / hardware.zero_copy
        own = 0.0
        if moved.cpu_read:
            own = ATTEND_HAND_OVER_S if mode == "on_cpu" else HAND_OVER_S
        elif moved.link_read:
            link += (STREAM_S if mode == "streamed" else FETCH_S) * self.micro_batches
        cpu = moved.cpu_read / self._scan_rate(layer, mode)
        dram = (moved.cpu_read + 2 * moved.h2d - moved.link_read + moved.d2h) / hardware.host_dram
        return (
            Load(gpu, link, moved.d2h / hardware.d2h, cpu, dram),
            self._background(elements, moved),
            own,  # of one micro-batch: the others work meanwhile
        )

    @property
    def link_beside_scan(self) -> float:
        """What of its rate the link keeps while the CPU scans, in (0, 1]; 1 where both at once were not measured."""
        hardware = self.hardware
        if hardware.host_dram_gb_per_s is None:
            return 1.0
        left = hardware.host_dram - hardware.cpu_scan(_key_type(self.config, self.choice))
        return min(1.0, max(0.1, left / hardware.zero_copy))

    def _scan_rate(self, layer: LayerSpec, mode: LayerMode) -> float:
        """Bytes a second that the CPU reads to score, or to attend to."""
        kind = _key_type(self.config, self.choice)
        further = layer.num_heads // layer.num_kv_heads - 1
        slower = ATTENDS_SLOWER_BY_QUERY if mode == "on_cpu" else SLOWER_BY_QUERY[kind]
        return self.hardware.cpu_scan(kind) / (1.0 + slower * further)

    def _bookkeeping(self, layer: LayerSpec, mode: LayerMode, rows: int) -> float:
        """Seconds of a layer's small kernels, of one micro-batch."""
        if mode == "evicting":
            policy, left = self.config.eviction.policy, kept_by_eviction(self.config, self.tokens, self.prompt)
            per_score = EVICTING_S_PER_SCORE if layer.group_size == 1 else GROUPED_S_PER_SCORE[policy]
            return EVICTING_S[policy] + left * layer.num_heads * self.batch / self.micro_batches * per_score
        if mode not in ("select", "lookahead"):
            return 0.0
        if mode == "lookahead" and self.config.attention.lookahead == "logits":
            return LAUNCHES_S
        scores = rows * self.batch / self.micro_batches
        partial = PARTIAL_S_PER_ROW if self.config.cache.sketch == "partial" else 0.0
        return CHOICE_S + scores * (CHOICE_S_PER_SCORE * layer.num_heads + partial * layer.num_kv_heads)

    def _on_gpu(self, layer: LayerSpec, mode: LayerMode, rows: int) -> tuple[float, float]:
        """Tokens of all sequences that the GPU attends to, and bytes of a sketch that it scores by."""
        config, choice = self.config, self.choice
        if mode == "on_cpu":
            return self.batch * (self.tokens - rows), 0.0
        if mode == "evicting":
            return self.batch * kept_by_eviction(config, self.tokens, self.prompt), 0.0
        if mode not in ("select", "lookahead"):
            return self.batch * self.tokens, 0.0
        keys_as, sketch = build.key_storage(config, choice.dtype), 0
        if keys_as.on_device and rows:
            shape = host_shape(layer, self.batch, build.window_layout(config), self.tokens)
            sketch = sum(tensor_bytes(*part) for part in sketch_parts(shape, keys_as, choice.dtype))
        return self.batch * (self.tokens - rows + most_kept(keep_rule(config), rows)), sketch

    def _background(self, elements: int, moved: StepBytes) -> Load:
        """Weights, hidden states, and what lies on the disk."""
        spread, hardware, element = self.spread, self.hardware, self.element
        streamed = (1.0 - spread.weights_on_gpu) * self.kept(elements)
        hidden = spread.hidden_on_host * self.batch * self.choice.spec.hidden_size * element
        on_disk = spread.weights_on_disk * self.kept(elements)
        on_disk += spread.host_kv_on_disk * (moved.link_read + moved.cpu_read)
        disk = on_disk / hardware.disk_read if on_disk else 0.0
        if spread.host_kv_on_disk:
            disk += spread.host_kv_on_disk * moved.d2h / hardware.disk_write
        h2d, d2h = (streamed + hidden) / hardware.h2d, hidden / hardware.d2h
        # What comes from the disk is written to the host's memory, too.
        return Load(h2d=h2d, d2h=d2h, dram=(streamed + 2 * hidden + on_disk) / hardware.host_dram, disk=disk)

    def prefill(self, layer: LayerSpec, mode: LayerMode, elements: int) -> Load:
        """In one layer: products of every token, causal attention, weights once, KV to the host.

        What fits the maps of predictor `prompt` is not counted.
        """
        spread, hardware, element, tokens = self.spread, self.hardware, self.element, self.batch * self.prompt
        rows = 0 if mode in ("resident", "evicting") else build.window_layout(self.config).host_rows(self.prompt)
        kv = self.batch * rows * layer.kv_bytes_per_token(element)
        flops = 2 * tokens * elements + 2 * tokens * self.prompt * layer.num_heads * layer.head_dim
        streamed = (1.0 - spread.weights_on_gpu) * self.kept(elements)
        hidden = spread.hidden_on_host * tokens * self.choice.spec.hidden_size * element
        disk = spread.weights_on_disk * self.kept(elements) / hardware.disk_read if spread.weights_on_disk else 0.0
        disk += spread.host_kv_on_disk * kv / hardware.disk_write if spread.host_kv_on_disk else 0.0
        return Load(
            gpu=roofline_s(hardware, flops, elements * element + self.unpacking(elements)),
            h2d=(streamed + hidden) / hardware.h2d,
            d2h=(kv + hidden) / hardware.d2h,
            dram=(streamed + kv + 2 * hidden) / hardware.host_dram,
            disk=disk,
        )


def _key_type(config: Config, choice: ModelChoice) -> str:
    """What the CPU reads, as machine files call it."""
    cache = config.cache
    if cache.sketch in ("int4", "int2"):
        return cache.sketch
    if cache.key_type != "auto":
        return cache.key_type
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(choice.dtype).removeprefix("torch.")]
