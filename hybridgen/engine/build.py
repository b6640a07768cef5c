"""From a Config to the parts of an engine: which model, does it fit, its weights, its layers' attention.

The order matters and is the caller's: `choose_model` (no byte fetched), `memory_plan.plan_memory` and its check,
then `obtain_weights`, then `LLM`. So an impossible job is refused before anything is downloaded.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridgen.attention.tiered import Kernels
from hybridgen.config import Config, with_settings
from hybridgen.engine.layer_modes import LayerMode, predictor_file
from hybridgen.errors import CheckpointError, ConfigError, HubUnavailableError
from hybridgen.kv_cache.disk_rows import DiskLayout, disk_layout
from hybridgen.kv_cache.host_keys import KeyStorage, value_part
from hybridgen.kv_cache.layout import WindowLayout, disk_rows, host_shape
from hybridgen.kv_cache.partial_keys import Skews, skew_shape
from hybridgen.models import family_of, gguf_file, query_maps, spec_of
from hybridgen.models.base import DecoderModel, QueryMap
from hybridgen.models.checkpoint import ModelLocation, checkpoint_key, download, fetch_config, locate, open_checkpoint
from hybridgen.models.hf_directory import weight_files
from hybridgen.models.loading import ModelWeights, Progress, load_weights, random_weights
from hybridgen.models.spec import LayerSpec, ModelSpec
from hybridgen.models.stored_rows import stored_layers
from hybridgen.models.tokenizer import has_tokenizer_files
from hybridgen.offload.disk import disk_folder
from hybridgen.offload.disk_weights import (
    DiskWeights,
    LayerFile,
    checkpoint_identity,
    random_identity,
    stage_bytes,
)
from hybridgen.offload.logit_worker import selected_isa
from hybridgen.offload.weight_slots import WeightFormat
from hybridgen.offload.weights import HostWeights, host_weights
from hybridgen.output import check_output_path
from hybridgen.selection.eviction import policy_of
from hybridgen.types import DTYPES

ROPE_SLACK_TOKENS = 1024  # rotary models are let run this far beyond their positions, with a warning

_PACKED_BITS = {"int8": 8, "int4": 4}  # of `compress` settings
_KEY_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class ModelChoice:
    """A model whose shape is known and whose weights are not loaded yet."""

    location: ModelLocation
    spec: ModelSpec
    family: type[DecoderModel]
    device: torch.device
    dtype: torch.dtype

    def with_dtype(self, dtype: torch.dtype) -> ModelChoice:
        return ModelChoice(self.location, self.spec, self.family, self.device, dtype)


@dataclass(frozen=True)
class ObtainedWeights:
    """Loaded weights, and what the report says of them."""

    tensors: ModelWeights
    spec: ModelSpec  # as the checkpoint says it; before, only its config was known
    kind: str  # "real" or "random"
    random_reason: str | None
    directory: Path | None  # where the tokenizer lies, if anywhere
    host: HostWeights | None = None  # the layers' weights that are not on the device, and where each part lies
    disk: DiskWeights | None = None  # those of them that are on disk

    @property
    def has_tokenizer(self) -> bool:
        """A directory may hold weights alone (a tiny test model)."""
        return self.directory is not None and has_tokenizer_files(self.directory)


def choose_device(kind: str) -> torch.device:
    """`auto`, `cpu` or `cuda`; ConfigError if CUDA is asked for and absent."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA GPU (allowed here: 'cpu', 'auto')")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def choose_model(config: Config) -> ModelChoice:
    """Find the model and read its shape; touches the network only for a hub id whose shape is unknown."""
    device = choose_device(config.runtime.device)
    location = fetch_config(locate(config.model.name))
    assert location.config is not None
    spec = spec_of(config.model.name, location.config)
    name: str = config.model.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.torch_dtype
    if name not in DTYPES:
        raise CheckpointError(f"model {spec.name}: its dtype {name!r} is not supported (allowed: {', '.join(DTYPES)})")
    family = family_of(config.model.name, location.config)
    return ModelChoice(location, spec, family, device, DTYPES[name])


def weight_shares(config: Config) -> tuple[float, float]:
    """Of the decoder layers' weights, on the device and on disk, as asked for; `auto`: all that is not on disk."""
    on_gpu, on_disk = config.placement.weights_on_gpu, config.placement.weights_on_disk
    disk = 0.0 if on_disk == "auto" else on_disk
    return (1.0 - disk if on_gpu == "auto" else on_gpu), disk


def weight_format(config: Config, dtype: torch.dtype) -> WeightFormat:
    """How the decoder layers' tensors are kept."""
    return WeightFormat(dtype, _PACKED_BITS.get(config.placement.compress_weights))


def obtain_weights(
    choice: ModelChoice, config: Config, needs_text: bool, progress: Progress | None = None
) -> ObtainedWeights:
    """Load, download first if need be, or make random weights: contracts.md, `--weights auto`.

    needs_text: the output is to be read, so random weights cannot stand in for a hub that does not answer.
    """
    location, reason = choice.location, None
    directory = location.directory
    if config.model.weights == "random":
        reason = "asked for"
        if needs_text and not location.needs_download:
            directory = location.prepare()
    else:
        try:
            directory = download(location) if location.needs_download else location.prepare()
        except HubUnavailableError as error:
            if config.model.weights == "real" or needs_text:
                why = "--weights real was given" if config.model.weights == "real" else "a prompt was given"
                raise CheckpointError(
                    f"{error}; {why}, so random weights cannot stand in. Give a local directory as --model, "
                    "or --weights random without a prompt"
                ) from None
            reason = str(error)
    family, device, dtype, (share, on_disk) = choice.family, choice.device, choice.dtype, weight_shares(config)
    form = weight_format(config, dtype)
    if reason is not None:
        spec, parts = choice.spec, None
        host = host_weights(family, spec, share, device, dtype, on_disk, form.bits)
        with _own_file(choice, spec, config, None, host) as file:
            tensors = random_weights(family, spec, device, dtype, config.run.seed, progress, host, file, form.codec)
    else:
        assert directory is not None
        with open_checkpoint(directory) as checkpoint:
            # A GGUF file's RoPE factors, say, are known only now.
            spec = spec_of(choice.spec.name, checkpoint.config)
            host = host_weights(family, spec, share, device, dtype, on_disk, form.bits)
            in_place = on_disk and form.codec is None
            parts = stored_layers(family, spec, checkpoint, dtype) if in_place else None
            with _own_file(choice, spec, config, directory, host) if parts is None else nullcontext() as file:
                sparing, packing = on_disk > 0, form.codec
                tensors = load_weights(
                    family, spec, checkpoint, device, dtype, progress, host, file, sparing, packing
                )
    disk = None
    if host is not None and host.split.disk_elements:
        if file is not None:
            parts = file.layers()
        assert parts is not None
        sources = [family.layer_tensors(spec, layer) for layer in range(spec.num_layers)]
        disk = DiskWeights(host.split, parts, stage_bytes(sources, host.split.layers, form))
    kind = "real" if reason is None else "random"
    return ObtainedWeights(tensors, spec, kind, reason, directory, host, disk)


def own_file(choice: ModelChoice, spec: ModelSpec, config: Config, directory: Path | None) -> LayerFile:
    """The file of ours for layers that cannot be read from disk where they are; directory None: they are random."""
    form = weight_format(config, choice.dtype)
    if directory is None:
        identity = random_identity(config.run.seed, choice.device)
    else:
        identity = checkpoint_identity(weight_files(directory))
        identity += "" if form.codec is None else f" packed on {choice.device.type}"
    return LayerFile(choice.family, spec, form, disk_folder(config.placement.disk_dir), identity)


def file_to_write(choice: ModelChoice, config: Config) -> LayerFile | None:
    """The file of ours that loading will write first if weights lie on disk.

    None: they are read where they are, or an earlier start wrote it.
    """
    location, directory = choice.location, choice.location.directory
    if directory is None and location.gguf is not None:
        directory = gguf_file.converted(location.gguf)
    form = weight_format(config, choice.dtype)
    if config.model.weights == "random":
        file = own_file(choice, choice.spec, config, None)
    elif directory is not None:
        if form.codec is None and weight_files(directory)[0].suffix == ".safetensors":
            with open_checkpoint(directory) as checkpoint:
                if stored_layers(choice.family, choice.spec, checkpoint, choice.dtype) is not None:
                    return None
        file = own_file(choice, choice.spec, config, directory)
    else:  # not here yet: a GGUF file is converted to float32
        stored = "float32" if location.gguf is not None else choice.spec.torch_dtype
        if form.codec is None and DTYPES.get(stored) is choice.dtype:
            return None
        file = LayerFile(choice.family, choice.spec, form, disk_folder(config.placement.disk_dir), "to come")
    return None if file.is_written else file


def _own_file(
    choice: ModelChoice, spec: ModelSpec, config: Config, directory: Path | None, host: HostWeights | None
) -> AbstractContextManager[LayerFile | None]:
    """As `own_file`; None where no weights lie on disk."""
    if host is None or not host.split.disk_elements:
        return nullcontext()
    return own_file(choice, spec, config, directory)


def check_positions(choice: ModelChoice, tokens: int, extend: bool) -> str | None:
    """A warning if `tokens` exceed the model's positions, ConfigError if that is not allowed."""
    spec = choice.spec
    if tokens <= spec.max_positions:
        return None
    if spec.family == "opt":
        return (
            f"{tokens} tokens exceed {spec.name}'s {spec.max_positions} learned positions: the table is "
            "interpolated; output is meaningless, speed is not"
        )
    if tokens > spec.max_positions + ROPE_SLACK_TOKENS and not extend:
        raise ConfigError(
            f"{tokens} tokens (prompt and generated) exceed {spec.name}'s {spec.max_positions} positions by more "
            f"than {ROPE_SLACK_TOKENS}: give a smaller --seq or --gen, or --set model.extend_positions=true"
        )
    return f"{tokens} tokens exceed {spec.name}'s {spec.max_positions} positions: output degrades"


def window_layout(config: Config) -> WindowLayout:
    """What stays on the device."""
    return WindowLayout(config.cache.sinks, config.cache.gpu_window)


def kv_disk_layout(config: Config, spec: ModelSpec, batch: int, capacity: int, dtype: torch.dtype) -> DiskLayout | None:
    """Of the file with the host tier's oldest rows (`placement.kv_on_disk`); None: there are none in a file."""
    if config.attention.executor != "streamed" or not config.placement.kv_on_disk:
        return None
    layout, keys_as = window_layout(config), key_storage(config, dtype)
    shapes = [host_shape(layer, batch, layout, capacity) for layer in spec.layers]
    rows = disk_rows(shapes[0][2], config.placement.kv_on_disk)
    parts = [value_part(shape, keys_as, dtype) for shape in shapes]
    return disk_layout(parts, rows, config.placement.prefetch_depth) if rows else None


def with_kv_share(config: Config, tokens: int) -> Config:
    """The config with the window that `placement.kv_on_gpu` asks for, for sequences of up to so many tokens.

    FlexGen's cache percentage, counted in tokens (its own counts sequences): sinks and window together.
    """
    share = config.placement.kv_on_gpu
    if share is None:
        return config
    return with_settings(config, {"cache.gpu_window": max(1, math.floor(share * tokens) - config.cache.sinks)})


def key_storage(config: Config, dtype: torch.dtype) -> KeyStorage:
    """How the host keeps keys; dtype: the model's."""
    stored = dtype if config.cache.key_type == "auto" else _KEY_TYPES[config.cache.key_type]
    sketch = None if config.cache.sketch == "none" else config.cache.sketch
    on_device = sketch is not None and config.cache.sketch_home == "gpu"
    cache, packed = config.cache, _PACKED_BITS.get(config.cache.compress)
    return KeyStorage(stored, sketch, on_device, cache.partial_ratio, cache.pool_capacity, cache.pool_policy, packed)


def skews(config: Config, weights: ObtainedWeights, modes: Sequence[LayerMode], device: torch.device) -> Skews | None:
    """Skewing matrices of the layers with a host tier, where there are partial keys; ConfigError: of another model."""
    if config.cache.sketch != "partial":
        return None
    layers = [layer for layer, mode in enumerate(modes) if mode != "resident"]
    shapes = {layer: skew_shape(weights.spec.layers[layer]) for layer in layers}
    if config.cache.partial_skew == "prompt":
        return Skews(shapes, device)
    file = Path(config.cache.partial_skew)
    check_output_path("cache.partial_skew", file)
    return Skews(shapes, device, file, _identity(weights))


def _identity(weights: ObtainedWeights) -> str:
    """Tells a checkpoint (and its dtype) from others, by numbers of its embeddings and norms."""
    digest = hashlib.sha256(repr(weights.spec.layers).encode())
    for name, tensor in sorted(weights.tensors.shared.items()):
        flat = tensor.reshape(-1)
        some = flat[:: max(1, flat.numel() // 4096)].float().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def fitted_queries(
    config: Config, weights: ObtainedWeights, modes: Sequence[LayerMode], device: torch.device, dtype: torch.dtype
) -> dict[int, QueryMap]:
    """Maps of the layers whose query is predicted by a calibration's file; ConfigError if it is another model's."""
    file = predictor_file(config)
    if file is None:
        return {}
    made_for, is_real = query_maps.read_checkpoint_key(file), weights.kind == "real"
    key = checkpoint_key(weights.directory) if is_real and weights.directory is not None else "random weights"
    if made_for != key:
        raise ConfigError(
            f"attention.predictor = {file}: made for checkpoint {made_for}, but this is {key}: python -m "
            "hybridgen.calibrate makes one for this model (allowed without: 'x', 'delta', 'prompt')"
        )
    ahead, asked = query_maps.read_lookahead_layers(file), config.attention.lookahead_layers
    if ahead != asked:
        raise ConfigError(
            f"attention.predictor = {file}: its maps predict a query {ahead} layer(s) before its own, and "
            f"attention.lookahead_layers = {asked} (allowed with this file: {ahead}; hybridgen.calibrate --set "
            f"attention.lookahead_layers={asked} makes another one)"
        )
    layers = {layer: weights.spec.layers[layer] for layer, mode in enumerate(modes) if mode == "lookahead"}
    return query_maps.read_query_maps(file, layers, weights.spec.hidden_size, device, dtype)


def reindexes(config: Config, layer: LayerSpec) -> bool:
    """Whether an evicting layer counts positions as they are in the cache (`eviction.positions`)."""
    asked = config.eviction.positions
    if asked == "reindexed" and layer.rope is None:
        raise ConfigError(
            "eviction.positions = 'reindexed' with a model whose positions are added to the embeddings: keys cannot be "
            "given other ones (allowed: 'auto', 'original')"
        )
    can = policy_of(config.eviction).reindexes and layer.rope is not None
    return can and asked != "original"


def most_kept_tokens(config: Config, capacity: int) -> int:
    """Tokens of a sequence of up to `capacity` that an evicting layer holds between two steps, at the most."""
    policy = policy_of(config.eviction)(config.eviction, 0, 0, 1)
    room = 0 if policy.evicts_in_decode else config.run.gen
    return min(capacity, policy.budget(capacity).total + room)


def host_slots(config: Config, capacity: int) -> int:
    """Slots of each KV head in host memory: how much of the capacity will be prompt is not known when it is taken."""
    evicts = policy_of(config.eviction).evicts_in_decode
    return (most_kept_tokens(config, capacity) if evicts else capacity) + 1


def prefill_chunk(config: Config, device: torch.device) -> int:
    """Tokens of one prefill piece."""
    return config.runtime.prefill_chunk or (4096 if device.type == "cuda" else 2048)


def micro_batch_size(config: Config, sequences: int) -> int:
    """Sequences of one micro-batch, of so many in all; 0: all of them."""
    asked = config.runtime.micro_batch
    return asked if isinstance(asked, int) else math.ceil(asked * sequences)


def worker_threads(config: Config, device: torch.device) -> tuple[int, list[int]]:
    """Scan threads and the cores to pin them to; with a GPU one core is left to the thread that feeds it.

    Without a GPU torch computes on the same cores. A scan is then a small part of a step, and on few
    cores it is best done by the thread that waits for it (0 threads) with torch on all of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = config.runtime.worker_threads
    if threads != "auto" and threads > len(cores) - 1:
        raise ConfigError(
            f"runtime.worker_threads = {threads}: one of the {len(cores)} cores at hand is for torch, "
            f"so at most {len(cores) - 1} are allowed"
        )
    if device.type == "cuda":
        count = max(1, len(cores) - 1) if threads == "auto" else threads
        return count, cores[1:] if count < len(cores) else []
    if threads == "auto":
        return (0 if len(cores) < 4 else len(cores) // 4), []
    return threads, []


def torch_threads(config: Config, device: torch.device, scan_threads: int) -> int:
    """Threads for torch's own work on the CPU: with a GPU they hardly matter and stay as they are.

    Unless a number was asked for, OMP_NUM_THREADS is obeyed, as by torch itself.
    """
    asked = config.runtime.torch_threads
    most = max(1, len(os.sched_getaffinity(0)) - scan_threads)
    if isinstance(asked, str):
        if device.type == "cuda":
            return torch.get_num_threads()
        named = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # further ones are of nested regions
        return min(most, max(1, int(named))) if named.isdigit() else most
    if asked > most:
        raise ConfigError(
            f"runtime.torch_threads = {asked}: the scan has {scan_threads} of {len(os.sched_getaffinity(0))} cores, "
            f"so at most {most} are allowed"
        )
    return asked


def native_kernels(config: Config, device: torch.device) -> bool:
    """Whether choice and attention run in C++: on the CPU, unless torch's are asked for.

    The lazy transfer engine is there to test the torch path, whose transfers can be waited for. Without
    vector instructions the C++ attention is slower than torch's.
    """
    if config.runtime.kernels == "native" and config.attention.lookahead == "logits":
        raise ConfigError("runtime.kernels = 'native' has none for --lookahead logits (allowed there: 'auto', 'torch')")
    if config.runtime.kernels == "native" and device.type == "cuda":
        raise ConfigError("runtime.kernels = 'native' are kernels for the CPU (allowed on CUDA: 'auto', 'torch')")
    automatic = device.type == "cpu" and config.runtime.transfer != "lazy" and selected_isa() != "scalar"
    return automatic if config.runtime.kernels == "auto" else config.runtime.kernels == "native"


def device_kernels(config: Config, device: torch.device) -> Kernels:
    """What attention on the device is made of."""
    if native_kernels(config, device):
        return "native"
    return "triton" if device.type == "cuda" and config.runtime.kernels == "auto" else "torch"
