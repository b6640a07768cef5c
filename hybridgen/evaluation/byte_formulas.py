"""Bytes that a decode step moves, by strategy: the transfer table of the field's methods as formulas.

B sequences, Hq query and Hkv KV heads of d channels, e bytes an element, N host rows, K rows fetched. Two things are
this engine's own. New rows go to the host in blocks of 64: `d2h` holds a row's share, and a step in which a block
leaves moves 64 times that. And what the CPU counts as read (`cpu_read`) is what it scans or attends to; rows that the
device reads over the link come from the same memory, and are `link_read`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridgen.config import Config
from hybridgen.engine import build
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.scheduling import keep_rule
from hybridgen.kv_cache.host_keys import value_part
from hybridgen.kv_cache.layout import tensor_bytes
from hybridgen.kv_cache.quantize import SKETCH_BLOCK, sketch_bytes
from hybridgen.kv_cache.row_pool import pool_rows
from hybridgen.models.spec import LayerSpec, ModelSpec
from hybridgen.selection.budget import most_kept
from hybridgen.selection.eviction import policy_of


@dataclass(frozen=True)
class StepBytes:
    """Of one decode step of the whole batch."""

    d2h: float = 0.0
    h2d: float = 0.0
    cpu_read: float = 0.0
    link_read: float = 0.0  # of the host's K and V by the device: a part of h2d

    def __add__(self, other: StepBytes) -> StepBytes:
        return StepBytes(
            self.d2h + other.d2h,
            self.h2d + other.h2d,
            self.cpu_read + other.cpu_read,
            self.link_read + other.link_read,
        )

    @property
    def dram_read(self) -> float:
        """From the host's memory, whoever reads."""
        return self.cpu_read + self.link_read


@dataclass(frozen=True)
class Sizes:
    """Bytes of an element: of K and V as the model computes, of the host's logits; and of its rows as they are kept.

    key, value, scanned: of a row of one KV head, as K and V are stored and as the CPU reads K to score it; 0: the
    device scores.
    """

    batch: int
    element: int
    logit: int
    key: Callable[[LayerSpec], float]
    scanned: Callable[[LayerSpec], float]
    value: Callable[[LayerSpec], float]


def resident(layer: LayerSpec, sizes: Sizes) -> StepBytes:
    """All K and V on the device: nothing moves."""
    return StepBytes()


def streamed(layer: LayerSpec, sizes: Sizes, rows: int) -> StepBytes:
    """FlexGen, attention on the GPU: 2 B N Hkv d e to the device; packed, e is 0.5625 for 4 bits."""
    moved = sizes.batch * rows * layer.num_kv_heads * (sizes.key(layer) + sizes.value(layer))
    return StepBytes(h2d=moved, link_read=moved) + _aged(layer, sizes)


def on_cpu(layer: LayerSpec, sizes: Sizes, rows: int) -> StepBytes:
    """FlexGen, attention on the CPU: B Hq d to the host and B Hq (d + 1) back, float32; all K and V are read there."""
    if not rows:
        return _aged(layer, sizes)
    heads, dim = sizes.batch * layer.num_heads, layer.head_dim
    read = sizes.batch * rows * layer.num_kv_heads * (sizes.scanned(layer) + dim * sizes.element)
    return StepBytes(4 * heads * dim, 4 * heads * (dim + 1), read) + _aged(layer, sizes)


def chosen(layer: LayerSpec, sizes: Sizes, rows: int, kept: int, values_only: bool = False) -> StepBytes:
    """K rows a KV head chosen from N: B Hq d (float32) to the host, B Hq N logits and B Hkv K rows back.

    values_only: HybridGen as published, which weighs by the logits and fetches no keys. Where the device scores, there
    is neither query nor logits.
    """
    if not rows:
        return _aged(layer, sizes)
    row = layer.head_dim * sizes.element + (0 if values_only else sizes.key(layer))
    fetched = sizes.batch * layer.num_kv_heads * kept * row
    scanned, heads = sizes.scanned(layer), sizes.batch * layer.num_heads
    query, logits = (4 * heads * layer.head_dim, heads * rows * sizes.logit) if scanned else (0, 0)
    read = sizes.batch * layer.num_kv_heads * rows * scanned
    return StepBytes(query, fetched + logits, read, fetched) + _aged(layer, sizes)


def evicting(layer: LayerSpec, sizes: Sizes, slots: int, on_host: bool) -> StepBytes:
    """H2O, Keyformer, SnapKV, StreamingLLM: kept on the device, nothing moves; on the host, all slots in use come."""
    if not on_host:
        return StepBytes()
    token = sizes.batch * layer.kv_bytes_per_token(sizes.element)
    return StepBytes(d2h=token, h2d=slots * token, link_read=slots * token)


def step_bytes(
    spec: ModelSpec,
    config: Config,
    modes: Sequence[LayerMode],
    dtype: torch.dtype,
    tokens: int,
    on_cuda: bool,
    prompt: int | None = None,
) -> StepBytes:
    """Of a decode step with `tokens` tokens of context in each sequence, by a fixed schedule; K is the most it may be.

    modes: of the layers. on_cuda: whether a link lies between host and device. prompt: so many of the tokens were
    prefilled; None: all.
    """
    sizes = sizes_of(config, dtype, on_cuda)
    rows = build.window_layout(config).host_rows(tokens)
    total = StepBytes()
    for layer, mode in zip(spec.layers, modes, strict=True):
        total += layer_bytes(layer, config, mode, sizes, rows, tokens, prompt)
    return total


def layer_bytes(
    layer: LayerSpec, config: Config, mode: str, sizes: Sizes, rows: int, tokens: int, prompt: int | None = None
) -> StepBytes:
    """Of one layer, whose host tier has `rows` rows of each sequence of `tokens` tokens; prompt: as in `step_bytes`."""
    if mode == "resident":
        return resident(layer, sizes)
    if mode == "streamed":
        return streamed(layer, sizes, rows)
    if mode == "on_cpu":
        return on_cpu(layer, sizes, rows)
    if mode == "evicting":
        return evicting(layer, sizes, evicting_slots(config, tokens, prompt), config.eviction.home == "host")
    weighs = mode == "lookahead" and config.attention.lookahead == "logits"
    kept = most_kept(keep_rule(config), rows)
    if config.cache.pool_capacity < 1.0:
        of_prompt = build.window_layout(config).host_rows(tokens if prompt is None else prompt)
        kept = min(kept, pool_rows(config.cache.pool_capacity, of_prompt))
    return chosen(layer, sizes, rows, kept, weighs)


def sizes_of(config: Config, dtype: torch.dtype, on_cuda: bool) -> Sizes:
    """Of the config's keys and logits; dtype: the model's."""
    cache, element = config.cache, dtype.itemsize
    stored = build.key_storage(config, dtype).stored

    def value(layer: LayerSpec) -> float:
        width = (1, 1, 1, layer.head_dim)
        return tensor_bytes(*value_part(width, build.key_storage(config, dtype), dtype))

    def key(layer: LayerSpec) -> float:
        if cache.compress != "none":
            return value(layer)
        return layer.head_dim * stored.itemsize + (4 if stored is torch.int8 else 0)

    def scanned(layer: LayerSpec) -> float:
        if cache.sketch == "none":
            return key(layer)
        if cache.sketch in ("int4", "int2") and cache.sketch_home != "gpu":
            return sketch_bytes(int(cache.sketch.removeprefix("int")), layer.head_dim) / SKETCH_BLOCK
        return 0.0  # on the device

    return Sizes(config.run.batch, element, 2 if on_cuda and dtype != torch.float32 else 4, key, scanned, value)


def kept_by_eviction(config: Config, tokens: int, prompt: int | None = None) -> int:
    """Tokens that a cache that evicts holds of `tokens`; how many stay is settled by the prompt's length alone."""
    prompt = tokens if prompt is None else prompt
    policy = policy_of(config.eviction)(config.eviction, 0, 0, 1)
    total = policy.budget(prompt).total
    if not policy.evicts_in_decode:
        return min(prompt, total) + tokens - prompt
    return min(tokens, total)


def evicting_slots(config: Config, tokens: int, prompt: int | None = None) -> int:
    """Slots of a KV head from the first to the last that is in use: one is free among them where the head is full."""
    held = kept_by_eviction(config, tokens, prompt)
    policy = policy_of(config.eviction)(config.eviction, 0, 0, 1)
    is_full = policy.evicts_in_decode and held == policy.budget(tokens if prompt is None else prompt).total
    return held + is_full


def _aged(layer: LayerSpec, sizes: Sizes) -> StepBytes:
    """A new row's share of the blocks that leave the window: its K and V as they are kept, and its part of a sketch."""
    key, scanned = sizes.key(layer), sizes.scanned(layer)
    sketch = scanned if scanned != key else 0.0
    row = key + sizes.value(layer) + sketch
    return StepBytes(d2h=sizes.batch * layer.num_kv_heads * row)
