"""What values settings may have, each by itself and together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridgen.errors import ConfigError

if TYPE_CHECKING:
    from hybridgen.config import Config, Setting

ON_GPU_ALONE = ("partial", "pages")  # sketches that the CPU does not score by
SCHEDULES = ("fixed", "feedback", "paper")
REPLAY = "replay:"

RANGES: dict[str, tuple[str, Any]] = {
    "selection.keep_mass": ("a fraction in (0, 1]", lambda v: 0 < v <= 1),
    "selection.keep": (
        "a fraction in (0, 1] (with a decimal point) or a count >= 1",
        lambda v: 0 < v <= 1 if isinstance(v, float) else v >= 1,
    ),
    "selection.min_keep": ("a count >= 0", lambda v: v >= 0),
    "selection.alpha": ("a difference of logits > 0", lambda v: v > 0),
    "eviction.heavy": (
        "a fraction in [0, 1] (with a decimal point) or a count >= 0",
        lambda v: 0 <= v <= 1 if isinstance(v, float) else v >= 0,
    ),
    "eviction.recent": (
        "a fraction in (0, 1] (with a decimal point) or a count >= 1",
        lambda v: 0 < v <= 1 if isinstance(v, float) else v >= 1,
    ),
    "eviction.sinks": ("a number of tokens >= 0", lambda v: v >= 0),
    "eviction.tau_init": ("a temperature > 0", lambda v: v > 0),
    "eviction.tau_end": ("a temperature > 0", lambda v: v > 0),
    "eviction.pool": ("an odd number of keys >= 1", lambda v: v >= 1 and v % 2 == 1),
    "attention.lookahead_layers": ("1 or 2", lambda v: v in (1, 2)),
    "attention.predictor": (
        "'x', 'delta', 'prompt' or a file FILE.safetensors that hybridgen.calibrate wrote",
        lambda v: v in ("x", "delta", "prompt") or v.endswith(".safetensors"),
    ),
    "cache.gpu_window": ("a number of tokens >= 1", lambda v: v >= 1),
    "cache.sinks": ("a number of tokens >= 0", lambda v: v >= 0),
    "cache.partial_ratio": ("a fraction in (0, 1]", lambda v: 0 < v <= 1),
    "cache.partial_skew": (
        "'prompt' or a file FILE.safetensors",
        lambda v: v == "prompt" or v.endswith(".safetensors"),
    ),
    "cache.pool_capacity": ("a fraction in (0, 1]", lambda v: 0 < v <= 1),
    "placement.weights_on_gpu": ("'auto' or a fraction in [0, 1]", lambda v: v == "auto" or 0 <= v <= 1),
    "placement.weights_on_disk": ("'auto' or a fraction in [0, 1]", lambda v: v == "auto" or 0 <= v <= 1),
    "placement.prefetch_depth": ("a number of layers >= 1", lambda v: v >= 1),
    "placement.gpu_memory_bytes": ("a size > 0", lambda v: v > 0),
    "placement.host_memory_bytes": ("a size > 0", lambda v: v > 0),
    "placement.kv_on_disk": ("a fraction in [0, 1]", lambda v: 0 <= v <= 1),
    "placement.kv_on_gpu": ("a fraction in [0, 1]", lambda v: 0 <= v <= 1),
    "placement.disk_threads": ("a number of threads >= 1", lambda v: v >= 1),
    "schedule.mode": (
        f"{', '.join(SCHEDULES)} or {REPLAY}FILE",
        lambda v: v in SCHEDULES or (v.startswith(REPLAY) and v != REPLAY),
    ),
    "schedule.target_ms": ("a number of milliseconds > 0", lambda v: v > 0),
    "schedule.most_extra": ("a factor >= 1", lambda v: v >= 1),
    "schedule.paper_interval": ("a number of steps >= 0 (0: never)", lambda v: v >= 0),
    "runtime.prefill_chunk": ("a number of tokens >= 0 (0: automatic)", lambda v: v >= 0),
    "runtime.micro_batch": (
        "a number of sequences >= 0 (0: all), or a share of the batch with a decimal point, in (0, 1]",
        lambda v: v >= 0 if isinstance(v, int) else 0 < v <= 1,
    ),
    "runtime.worker_threads": ("'auto' or a number >= 0", lambda v: v == "auto" or v >= 0),
    "runtime.torch_threads": ("'auto', 'all' or a number >= 1", lambda v: isinstance(v, str) or v >= 1),
    "runtime.mass_probe_interval": ("a number of steps >= 0 (0: never)", lambda v: v >= 0),
    "sampling.temperature": ("0 (greedy) or a number >= 0.001", lambda v: v == 0 or v >= 0.001),
    "sampling.stop": ("strings that are not empty", all),
    "run.seed": ("a number in [0, 2**63)", lambda v: 0 <= v < 2**63),
    "sampling.top_k": ("a count >= 0 (0: off)", lambda v: v >= 0),
    "sampling.top_p": ("a fraction in (0, 1]", lambda v: 0 < v <= 1),
    "run.seq": ("a number of tokens >= 1", lambda v: v >= 1),
    "run.gen": ("a number of tokens >= 1", lambda v: v >= 1),
    "run.batch": ("a number of sequences >= 1", lambda v: v >= 1),
    "model.exact_layers": ("'auto' or layer numbers >= 0", lambda v: v == "auto" or all(layer >= 0 for layer in v)),
    "model.exact_layers_mode": (
        "'auto', 'resident', 'select' or a number of layers >= 0",
        lambda v: not isinstance(v, int) or v >= 0,
    ),
}


def check_values(config: Config, settings: Mapping[str, Setting]) -> None:
    """Each by itself, then what goes together; ConfigError: what is given, what is allowed, where it came from."""
    for path, (allowed, holds) in RANGES.items():
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not holds(value):
            source = settings[path].source if path in settings else "the default"
            raise ConfigError(f"{path} = {value!r} (from {source}): allowed is {allowed}")
    ahead, depth = config.attention.lookahead_layers, config.placement.prefetch_depth
    if ahead > depth:
        raise ConfigError(
            f"attention.lookahead_layers = {ahead} with placement.prefetch_depth = {depth}: weights that are streamed "
            f"have to come as early as a query is predicted by them (allowed: a depth of {ahead} or more)"
        )
    if config.runtime.synthetic_kv and config.model.weights != "random":
        raise ConfigError(
            f"--synthetic-kv with model.weights = {config.model.weights!r}: over keys and values that are no prompt's "
            "the output means nothing (allowed: --weights random)"
        )
    selection = config.selection
    if selection.keep is None and selection.keep_mass is None and selection.alpha is None:
        raise ConfigError("selection.keep and selection.keep_mass are both null: give one of them")
    _check_executor(config)
    window = settings.get("cache.gpu_window")
    if config.placement.kv_on_gpu is not None and window is not None and not window.source.startswith("strategy file"):
        raise ConfigError(
            f"placement.kv_on_gpu = {config.placement.kv_on_gpu} and cache.gpu_window = {window.value!r} (from "
            f"{window.source}): each says how much of the KV cache stays on the device; give one of them"
        )
    on_gpu, on_disk = config.placement.weights_on_gpu, config.placement.weights_on_disk
    if on_gpu != "auto" and on_disk != "auto" and on_gpu + on_disk > 1 + 1e-9:
        raise ConfigError(
            f"placement.weights_on_gpu = {on_gpu} and placement.weights_on_disk = {on_disk}: together they are more "
            "than all weights (allowed: a sum in [0, 1]; the rest is the host's)"
        )
    if config.cache.sketch in ON_GPU_ALONE and config.cache.sketch_home == "host":
        raise ConfigError(
            f"cache.sketch_home = 'host' with cache.sketch = {config.cache.sketch!r}: it lies on the GPU alone "
            "(allowed: 'auto' or 'gpu')"
        )


def check_sketch(config: Config) -> None:
    """What goes with a sketch on the GPU, of whatever kind."""
    cache, selection = config.cache, config.selection
    if cache.sketch_home == "gpu":
        if cache.sketch == "none":
            raise ConfigError("cache.sketch_home = 'gpu' without a sketch: give --sketch int4, int2, partial or pages")
        if config.schedule.mode in ("feedback", "paper"):
            raise ConfigError(
                f"schedule.mode = {config.schedule.mode!r} with cache.sketch_home = 'gpu': the GPU scores every token, "
                "so no scan is there to be shortened (allowed: fixed or replay:FILE)"
            )
    if cache.sketch in ON_GPU_ALONE and config.attention.lookahead == "logits":
        raise ConfigError(
            f"attention.lookahead = 'logits' with cache.sketch = {cache.sketch!r}: it chooses tokens, and its scores "
            "are no logits to weigh them by (allowed: 'select' or 'off')"
        )
    if selection.alpha is not None and selection.keep_mass is not None:
        raise ConfigError(
            f"selection.alpha = {selection.alpha} and selection.keep_mass = {selection.keep_mass}: each says how many "
            "tokens are kept; give one of them"
        )
    if selection.alpha is not None and cache.sketch != "partial":
        raise ConfigError(
            f"selection.alpha = {selection.alpha} with cache.sketch = {cache.sketch!r}: it is the rule of InfiniGen's "
            "partial keys (allowed: 'partial')"
        )
    pool = type(cache)()
    for name in ("pool_capacity", "pool_policy"):
        if cache.sketch != "partial" and getattr(cache, name) != getattr(pool, name):
            raise ConfigError(
                f"cache.{name} = {getattr(cache, name)!r} with cache.sketch = {cache.sketch!r}: it is the host pool of "
                "InfiniGen's partial keys (allowed: 'partial')"
            )
    if cache.pool_capacity < 1.0 and config.schedule.mode.startswith(REPLAY):
        raise ConfigError(
            f"cache.pool_capacity = {cache.pool_capacity} with schedule.mode = {config.schedule.mode!r}: plans "
            "that are replayed may ask for more rows than are alive (allowed: 'fixed')"
        )
    if cache.sketch == "pages" and selection.keep_mass is not None:
        raise ConfigError(
            f"selection.keep_mass = {selection.keep_mass} with cache.sketch = 'pages': whole pages are kept, as many "
            "as --keep alone says (allowed: null)"
        )


def _check_executor(config: Config) -> None:
    """What needs a choice does not go with a strategy that attends to every host token."""
    executor, cache = config.attention.executor, config.cache
    if executor in ("streamed", "on_cpu") and cache.sketch != "none":
        raise ConfigError(
            f"cache.sketch = {cache.sketch!r} with attention.executor = {executor!r}: every host token is attended to, "
            "so none is scored by a sketch (allowed: 'none')"
        )
    if executor == "evicting" and (cache.sketch != "none" or cache.key_type != "auto"):
        raise ConfigError(
            f"cache.sketch = {cache.sketch!r} and cache.key_type = {cache.key_type!r} with attention.executor = "
            "'evicting': what is kept is kept as it is (allowed: 'none' and 'auto')"
        )
    if executor != "streamed" and config.placement.kv_on_disk:
        raise ConfigError(
            f"placement.kv_on_disk = {config.placement.kv_on_disk} with attention.executor = {executor!r}: only rows "
            "that come to the device at every step, whole, are read from disk (allowed: 0; or attention.executor = "
            "'streamed')"
        )
    if executor in ("full", "evicting") and config.placement.kv_on_gpu is not None:
        raise ConfigError(
            f"placement.kv_on_gpu = {config.placement.kv_on_gpu} with attention.executor = {executor!r}: there is no "
            "window (allowed: null; or the executors hybrid, streamed and on_cpu)"
        )
    if executor != "streamed" and cache.compress != "none":
        raise ConfigError(
            f"cache.compress = {cache.compress!r} with attention.executor = {executor!r}: only rows that come to the "
            "device at every step, whole, are kept in fewer bits (allowed: 'none'; or attention.executor = 'streamed')"
        )
    if executor == "streamed" and cache.key_type != "auto":
        raise ConfigError(
            f"cache.key_type = {cache.key_type!r} with attention.executor = 'streamed': rows are copied to the device "
            "as they are, so the host keeps them in the model's type (allowed: 'auto'; --dtype changes both, and "
            "cache.compress = 'int8' or 'int4' packs keys and values)"
        )
