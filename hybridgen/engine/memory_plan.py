"""What a job needs on the device and on the host, by the shapes that the engine's parts allocate; and what there is."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from hybridgen.attention.resident import splits_for
from hybridgen.attention.tiered import Kernels
from hybridgen.config import Config, with_settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import LayerMode, fits_to_prompts, predictor_file
from hybridgen.engine.prompt_maps import fit_bytes
from hybridgen.engine.scheduling import most_fetched, names_candidates
from hybridgen.kv_cache.host_keys import KeyStorage, key_parts, sketch_parts, value_part
from hybridgen.kv_cache.layout import device_shape, host_shape, tensor_bytes
from hybridgen.kv_cache.partial_keys import skew_shape
from hybridgen.kv_cache.quantize import ENCODED_AT_ONCE
from hybridgen.models.query_maps import query_map_elements
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.groupwise import ENCODING_BYTES
from hybridgen.offload.weights import WeightFootprint, weight_footprint
from hybridgen.placement.plan import GIB, MemoryPlan
from hybridgen.selection.eviction import policy_of
from hybridgen.selection.eviction.base import SCORED_AT_ONCE

CUDA_RESERVE_BYTES = GIB * 6 // 10  # context, loaded kernels, library workspaces
PLANNED_SHARE = 0.98  # of --gpu-memory: measured peaks were up to 1.7 % above their plans


def memory_limits(config: Config, device: torch.device) -> tuple[int | None, int]:
    """Bytes that may be planned with on the device (None without a GPU) and on the host."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return limits_within(config, free, psutil.virtual_memory().available)


def limits_within(config: Config, free_device: int | None, free_host: int) -> tuple[int | None, int]:
    """The same of a machine with so many bytes free."""
    host = config.placement.host_memory_bytes or int(0.9 * free_host)
    if free_device is None:
        return None, host
    asked = config.placement.gpu_memory_bytes
    return int(0.9 * free_device if asked is None else PLANNED_SHARE * min(asked, free_device)), host


def plan_memory(
    choice: ModelChoice, config: Config, modes: tuple[LayerMode, ...], batch: int, capacity: int
) -> MemoryPlan:
    """What `batch` sequences of up to `capacity` tokens need, by the shapes that the caches allocate.

    What config leaves on `auto` is as it is without a budget: `engine.memory_budget` settles it first.
    """
    spec, dtype = choice.spec, choice.dtype
    layout, element, keys_as = build.window_layout(config), dtype.itemsize, build.key_storage(config, dtype)
    plan = MemoryPlan(device_is_host=choice.device.type == "cpu")
    on_disk = build.kv_disk_layout(config, spec, batch, capacity, dtype) if "streamed" in modes else None
    if on_disk is not None:
        plan.host["KV on its way to and from disk"] = on_disk.memory_bytes
    kept = scoring = attending = 0
    resident = window = host = staging = logits = past = listed = sketches = encoding = streamed = 0
    for layer, mode in zip(spec.layers, modes, strict=True):
        past = max(past, layer.kv_bytes_per_token(element) * capacity)
        if mode == "resident":
            resident += 2 * tensor_bytes(device_shape(layer, batch, capacity), dtype)
            continue
        if mode == "evicting":
            slots, prompt, step = _evicting_bytes(layer, batch, capacity, config, choice)
            kept, scoring, attending = kept + slots, max(scoring, prompt), max(attending, step)
            if config.eviction.home == "host":
                rows = tensor_bytes(device_shape(layer, batch, build.host_slots(config, capacity)), dtype)
                host, streamed = host + 2 * rows, max(streamed, 4 * rows)
            continue
        shape = host_shape(layer, batch, layout, capacity)
        window += 2 * tensor_bytes(device_shape(layer, batch, layout.rows), dtype)
        held = shape if on_disk is None else (*shape[:2], shape[2] - on_disk.rows, shape[3])
        stored = [*key_parts(held, keys_as), value_part(held, keys_as, dtype)]
        host += sum(tensor_bytes(*part) for part in stored)
        if mode == "streamed":
            kernels = build.device_kernels(config, choice.device)
            needed = _streamed_bytes(layer, batch, shape[2], layout.rows, dtype, kernels, keys_as)
            streamed = max(streamed, needed)
            if keys_as.packed_bits is not None:  # of one layer, and of one that is leaving for the host
                leaving = tensor_bytes(*value_part((1, *shape[1:]), keys_as, dtype)) * 4
                at_once = min(layer.num_kv_heads * capacity * layer.head_dim, ENCODED_AT_ONCE)
                encoding = max(encoding, leaving + ENCODING_BYTES * at_once)
            continue
        head = capacity * layer.head_dim
        keys = min(layer.num_kv_heads * head, max(ENCODED_AT_ONCE, head))
        # Making codes of keys, and judging them, takes several float32 copies of those that are encoded at a time
        # (measured: 5.9 and 2.8 times float16 keys).
        if keys_as.bits is not None or keys_as.stored is torch.int8:
            encoding = max(encoding, keys * (12 if keys_as.bits is not None else 6))
        if keys_as.on_device:
            sketches += sum(tensor_bytes(*part) for part in sketch_parts(shape, keys_as, dtype))
        if keys_as.sketch == "partial":  # and the queries of one KV head, skewed, in float32
            sketches += tensor_bytes(skew_shape(layer), torch.float32)
            encoding = max(encoding, 8 * layer.group_size * head)
        if mode == "on_cpu":
            contexts = batch * layer.num_heads * (2 * layer.head_dim + 1) * 4
            name = "query and context for the CPU"
            plan.host[name] = plan.host.get(name, 0) + contexts
            continue
        fetched = most_fetched(config, layout.host_rows(capacity))
        rows = batch * layer.num_kv_heads * (fetched + layout.rows)
        # Fetched K and V of two layers or three, and the float32 copy that attention makes of one of them.
        turns = config.attention.lookahead_layers + 1
        encoded = 0 if keys_as.stored is dtype else fetched * (layer.head_dim * keys_as.stored.itemsize + 4)
        staging = max(
            staging,
            batch * layer.kv_bytes_per_token(element) * fetched * turns
            + turns * batch * layer.num_kv_heads * encoded
            + rows * layer.head_dim * 8,
        )
        # Two scans in flight; then probabilities, 8-byte sort keys and their order for one of them.
        scores = batch * layer.num_heads * shape[2]
        logits = max(logits, scores * 4 * 2 + scores * 4 * 2 + batch * layer.num_kv_heads * shape[2] * 28)
        if names_candidates(config):
            listed += tensor_bytes(shape[:3], torch.int32)
        plan.host["query and logits of the scans"] = max(
            plan.host.get("query and logits of the scans", 0), 2 * scores * 4
        )
    chunk = min(build.prefill_chunk(config, choice.device), batch * capacity)  # of one prompt, or of several short ones
    widest = max(layer.num_heads * layer.head_dim * 4 for layer in spec.layers)
    widest = max(widest, choice.family.mlp_tensors * spec.intermediate_size)
    parts = 0  # of attention over KV that is all on a GPU
    if choice.device.type == "cuda" and "resident" in modes:
        parts = batch * splits_for(capacity) * max(layer.num_heads * (layer.head_dim + 2) for layer in spec.layers) * 4
    attended = max(layer.num_heads * layer.head_dim for layer in spec.layers)
    repeated = max(layer.group_size for layer in spec.layers)  # KV heads are repeated where flash kernels are not
    on_flash = choice.device.type == "cuda" and dtype != torch.float32
    fitted = fitting = 0
    predicted = [layer for layer, mode in zip(spec.layers, modes, strict=True) if mode == "lookahead"]
    if predicted and (fits_to_prompts(config) or predictor_file(config) is not None):
        fitted = sum(query_map_elements(layer, spec.hidden_size) for layer in predicted) * element
    if predicted and fits_to_prompts(config):
        width, ahead = max(layer.num_heads * layer.head_dim for layer in predicted), config.attention.lookahead_layers
        fitting = fit_bytes(spec.hidden_size, width, batch * capacity, ahead, element)
    plan.device = {
        "weights": 0,
        "slots for streamed weights": 0,
        "fitted query maps": fitted,
        "KV of resident layers": resident,
        "attention over resident KV": parts,
        "KV of sinks and windows": window,
        "KV that is not evicted": kept,
        "attention over what is kept": attending,
        "sketches of the host's keys": sketches,
        "fetched rows": staging,
        "streamed KV of two layers": streamed,
        "logits and choice": logits,
        "mass lately and candidates": 2 * listed,
        "prefill: hidden states": batch * capacity * spec.hidden_size * element,
        # Two: the layer at work, and one that is leaving for the host.
        "prefill: KV of one sequence": past * (2 if on_flash or repeated == 1 else 2 + repeated),
        "prefill: queries and context": max(2 * capacity, 3 * chunk if chunk > capacity else 0) * attended * element,
        "prefill: keys in fewer bits": encoding,
        "prefill: scores": scoring,
        "prefill: fitting query maps": fitting,
        "prefill: one piece": chunk * (widest + 4 * spec.hidden_size) * element,
        "LM head": batch * spec.vocab_size * 8,
    }
    if choice.device.type == "cuda":
        plan.device["CUDA context and libraries"] = CUDA_RESERVE_BYTES
    plan.host = {"KV host tier": host, "candidates": listed, **plan.host}
    return place_weights(choice, config, plan)


def _evicting_bytes(
    layer: LayerSpec, batch: int, capacity: int, config: Config, choice: ModelChoice
) -> tuple[int, int, int]:
    """Of a layer that evicts, on the device: its slots; scoring a prompt and choosing of it; attention of a step."""
    build.reindexes(config, layer)  # an error comes early
    eviction, policy, slots = config.eviction, policy_of(config.eviction), build.most_kept_tokens(config, capacity) + 1
    if eviction.home == "host":
        slots = build.host_slots(config, capacity)
    rows = batch * layer.num_kv_heads * slots
    kept = rows * (8 + 4 + 1)  # position, score, closed
    if eviction.home == "device":
        kept += 2 * tensor_bytes(device_shape(layer, batch, slots), choice.dtype)
    at_once = max(layer.num_heads * capacity, min(SCORED_AT_ONCE, layer.num_heads * capacity**2))
    copies = 4 if eviction.prefill == "windowed" else policy.prompt_copies
    if policy.prompt_kernel and choice.device.type == "cuda":
        at_once, copies = layer.num_heads * capacity, 4  # sums of rows, numbers of queries and what makes them
    chosen = layer.num_kv_heads * capacity * 40  # scores, positions, sort keys and their order
    scoring = copies * at_once * 4 + chosen + capacity * layer.kv_bytes_per_token(choice.dtype.itemsize)
    copied = 0 if choice.device.type == "cuda" or choice.dtype is torch.float32 else rows * layer.head_dim * 4
    logits = batch * layer.num_heads * slots * 4 * (2 + policy.prompt_copies)
    return kept, scoring, logits + rows * 24 + copied


def _streamed_bytes(
    layer: LayerSpec, batch: int, rows: int, window: int, dtype: torch.dtype, kernels: Kernels, keys_as: KeyStorage
) -> int:
    """Of layers whose host rows pass through the device: K and V of two of them, and what attention to one makes.

    Where they arrive packed, those of one are unpacked.
    """
    plain = (batch, layer.num_kv_heads, rows, layer.head_dim)
    slots = 4 * tensor_bytes(*value_part(plain, keys_as, dtype))
    if keys_as.packed_bits is not None:
        slots += 2 * tensor_bytes(plain, dtype)
    if kernels != "torch":
        return slots + batch * layer.num_heads * (layer.head_dim + 2) * 4 * -(-(rows + window) // 256)
    # Logits and weights of all sequences; of one, float32 copies of K, then of V.
    logits = batch * layer.num_heads * (rows + window) * 4 * 3
    copied = 0 if dtype is torch.float32 else layer.num_kv_heads * (rows + window) * layer.head_dim * 4
    return slots + logits + copied


def place_weights(choice: ModelChoice, config: Config, plan: MemoryPlan) -> MemoryPlan:
    """The plan with the weights where config wants them; `auto` is all of them on the device."""
    needed = footprint(choice, config, *build.weight_shares(config))
    device = {"weights": needed.device_bytes, "slots for streamed weights": needed.staging_bytes}
    host = {"streamed weights": needed.host_bytes, "buffers for weights from disk": needed.stages_bytes}
    return replace(
        plan,
        device=plan.device | device,
        host=plan.host | host,
        disk=plan.disk | {"weights": needed.disk_bytes},
        weights_on_gpu=needed.share,
        weights_on_disk=needed.disk_share,
    )


def without_weights(plan: MemoryPlan) -> tuple[int, int]:
    """Bytes of all that `place_weights` does not place: on the device, and on the host beside that."""
    placed = ("weights", "slots for streamed weights", "streamed weights", "buffers for weights from disk")
    parts = ({name: size for name, size in items.items() if name not in placed} for items in (plan.device, plan.host))
    device, host = (sum(part.values()) for part in parts)
    return device, host


def footprint(choice: ModelChoice, config: Config, share: float, on_disk: float) -> WeightFootprint:
    """Bytes of all weights with these shares of the decoder layers' on the device and on disk."""
    depth, bits = config.placement.prefetch_depth, build.weight_format(config, choice.dtype).bits
    return weight_footprint(choice.family, choice.spec, choice.dtype, share, depth, on_disk, bits)


def settled(config: Config, plan: MemoryPlan) -> Config:
    """The config with the shares that the plan found, where it asks for `auto`."""
    if plan.weights_on_gpu is None:
        return config
    if config.placement.weights_on_disk == "auto" and plan.weights_on_disk:
        config = with_settings(config, {"placement.weights_on_disk": plan.weights_on_disk})
    return config if config.placement.weights_on_gpu != "auto" else with_share(config, plan.weights_on_gpu)


def with_share(config: Config, share: float) -> Config:
    """The config that asks for this share of the weights on the device."""
    return with_settings(config, {"placement.weights_on_gpu": share})
