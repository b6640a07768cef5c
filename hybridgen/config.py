"""All settings: frozen dataclasses, filled from a strategy file, `--set a.b=c` and flags.

Precedence: flag > --set > strategy file > default. Each value remembers where it came from, so
that an error can say so. The dotted path of a field is its name everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from hybridgen.config_rules import ON_GPU_ALONE, check_sketch, check_values
from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.quantities import parse_size, parse_tokens


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and what is known of its layers."""

    name: str = "smollm2-135m"
    weights: Literal["auto", "real", "random"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    extend_positions: bool = False  # allow RoPE positions far beyond what the model was trained on
    # Layers that never use a predicted query; auto: those that a predictor FILE names, else 0, 1 and 2.
    exact_layers: tuple[int, ...] | Literal["auto"] = "auto"
    # A number: so many of them, the first ones, are resident and the rest select.
    exact_layers_mode: int | Literal["auto", "resident", "select"] = "auto"


@dataclass(frozen=True)
class SelectionConfig:
    """Which host tokens are kept. A float is a fraction of the host tier, an int a count."""

    keep: float | int | None = 0.3
    keep_mass: float | None = 0.95
    min_keep: int = 64
    # InfiniGen's rule in place of a mass: rows whose logit is above the head's largest less this count, and as many are
    # kept as the mean over heads and sequences says. With partial keys only; `keep` is the cap.
    alpha: float | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Where attention runs, and which query chooses."""

    # hybrid chooses host tokens; the others attend to all: full keeps them on the device, streamed brings them there at
    # every step, on_cpu has the CPU attend to them.
    executor: Literal["hybrid", "full", "streamed", "on_cpu", "evicting"] = "hybrid"  # evicting: `eviction`
    stream_ahead: bool = True  # streamed: a layer's rows come while the layer before computes; no: when it begins
    lookahead: Literal["select", "logits", "off"] = "select"
    # How many layers before its own a layer's query is predicted. 1: the paper. 2: scan, choice and fetch have a layer
    # more to hide behind, and the query is predicted worse.
    lookahead_layers: int = 1
    # How a later layer's query is predicted. x: its norm and Wq on this layer's input (the paper); delta: the same on x
    # plus what the last token's residual gained in between; prompt: on x, by maps that the prefill fits to the prompt;
    # FILE.safetensors: by maps of `calibrate`.
    predictor: str = "x"
    dropped: Literal["share", "renormalise"] = "share"  # `logits`: whether dropped rows keep their denominator


@dataclass(frozen=True)
class EvictionConfig:
    """Which tokens the executor `evicting` leaves (`selection/eviction`).

    A float is a share of the prompt, an int a count. For StreamingLLM alone: `positions`, how far from a query a sink
    is, and `prefill`, what a prompt's tokens attend to.
    """

    policy: str = "h2o"  # or keyformer, streaming_llm, snapkv
    heavy: float | int = 0.1  # tokens of the highest scores
    recent: float | int = 0.1  # the newest tokens (snapkv: of the prompt, those that vote)
    sinks: int = 0  # the first tokens, whatever their score
    home: Literal["device", "host"] = "device"  # where K and V of the kept tokens lie
    # reindexed: as in the cache; original: as in the text; auto: the former where the model has RoPE.
    positions: Literal["auto", "original", "reindexed"] = "auto"
    prefill: Literal["dense", "windowed"] = "dense"  # dense: everything, then evict; windowed: sinks + recent
    tau_init: float = 1.0  # keyformer: temperature of the scores, in the prompt ...
    tau_end: float = 2.0  # ... and after run.gen decode steps
    pool: int = 5  # snapkv: neighbouring keys whose votes are averaged


@dataclass(frozen=True)
class CacheConfig:
    """What of the KV cache stays on the device: the first `sinks` and the last `gpu_window` tokens."""

    gpu_window: int = 512
    sinks: int = 4
    # The host's keys: auto is the model's dtype; int8 replaces them. A sketch lies beside them and is scored instead:
    # codes of 4 or 2 bits, or on the GPU alone InfiniGen's partial keys or Quest's bounds of pages.
    key_type: Literal["auto", "fp32", "fp16", "bf16", "int8"] = "auto"
    sketch: Literal["none", "int4", "int2", "partial", "pages"] = "none"
    # Where it lies, and who scores by it. auto: the GPU if a memory budget has room, the host where there is none.
    sketch_home: Literal["auto", "host", "gpu"] = "auto"
    partial_ratio: float = 0.2  # partial: share of the skewed keys' columns
    # partial: where the skewing matrices come from. prompt: the first one; FILE.safetensors: read if it is there, else
    # made from the first prompt and written.
    partial_skew: str = "prompt"
    # partial: share of the prompt's host rows that may be alive, that is, be chosen (row_pool.py), and who dies first.
    # 1.0: none ever does.
    pool_capacity: float = 1.0
    pool_policy: Literal["counter", "fifo", "lru"] = "counter"
    # streamed: the host's K and V in 8 or 4 bits, in groups of 64 channels (offload/groupwise.py), on the link, too.
    compress: Literal["none", "int8", "int4"] = "none"


@dataclass(frozen=True)
class PlacementConfig:
    """Where bytes live."""

    # Share of the decoder layers' weights that stays on the device; the rest is streamed from host memory.
    # auto: the largest that the memory plan allows; all of it where no job is planned (LLM(...) from Python).
    weights_on_gpu: float | Literal["auto"] = "auto"
    # Share that is read from disk in every step. auto: what device and host have no room for by the memory plan; none
    # where no job is planned.
    weights_on_disk: float | Literal["auto"] = "auto"
    # The decoder layers' matrices in 8 or 4 bits, in groups of 64 along a row (offload/groupwise.py), wherever they lie
    # and on the link; a layer's are unpacked on the device before it runs.
    compress_weights: Literal["none", "int8", "int4"] = "none"
    # Layers whose streamed weights are under way while one runs. 2, not 1: the query predicted for layer i + 1
    # needs that layer's weights when layer i begins; with 1 they would be sent for only then.
    prefetch_depth: int = 2
    gpu_memory_bytes: int | None = None  # never more than this (engine/memory_budget.py); None: 0.9 of what is free
    # Memory nodes of the host's K and V: local, semantic (K near, V far), interleave or inverse; near and far: which.
    memory: Literal["local", "semantic", "interleave", "inverse"] = "local"
    near_node: int | None = None  # None: the node of this process's cores
    far_node: int | None = None  # None: a node without cores, or else another than the near one
    host_memory_bytes: int | None = None  # None: 0.9 of what is available (too little where RAM grows on demand)
    # streamed: the share of the host tier's rows, the oldest, that lie in a file instead of host memory; realised
    # within one block of 64 (and the last block stays in memory).
    kv_on_disk: float = 0.0
    # For a planned job (run, compare, evaluate): the share of prompt + gen tokens on the device, sinks and window, in
    # place of cache.gpu_window.
    kv_on_gpu: float | None = None
    disk_dir: str | None = None  # where our files of offloaded bytes go; None: `offload` in the cache folder
    disk_threads: int = 4  # that read from disk


@dataclass(frozen=True)
class ScheduleConfig:
    """How decode steps are planned: which tokens are scored, how many are kept."""

    mode: str = "fixed"  # fixed, feedback, paper, or replay:FILE (a report); `run` takes feedback if none is given
    target_ms: float | None = None  # feedback: the step time to aim at
    most_extra: float = 2.0  # feedback: K may grow to this multiple of what `fixed` would keep; memory is set aside
    paper_interval: int = 4  # paper: decode steps between two changes; 0: none
    paper_both_at_once: bool = False  # paper: tighten K and scan together, as the published port does


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine's side of a run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    prefill_chunk: int = 0  # tokens of one prefill piece; 0: 2048 on the CPU, 4096 on a GPU
    micro_batch: float | int = 0  # sequences of one micro-batch (0: all); a float is a share of the batch, rounded up
    worker_threads: int | Literal["auto"] = "auto"
    transfer: Literal["auto", "immediate", "lazy", "cuda"] = "auto"
    kernels: Literal["auto", "torch", "native"] = "auto"  # of choice and attention; native: C++ on the CPU
    cuda_graphs: bool = True  # on a GPU: what a decode step does again and again is launched as graphs (pieces.py)
    # Threads that torch computes with on the CPU; all: one a core that the scan leaves (or OMP_NUM_THREADS); auto: the
    # same, but fewer while others use the cores: sums are rounded in another order then.
    torch_threads: int | Literal["auto", "all"] = "auto"
    mass_probe_interval: int = 16  # decode steps between probes of the true covered mass; 0: never
    synthetic_kv: bool = False  # with random weights: the prompt's K and V are drawn, not computed (synthetic_kv.py)


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class RunConfig:
    """The job: what `python -m hybridgen.run` is asked to do."""

    seq: int | None = None
    gen: int = 32
    batch: int = 1
    seed: int = 0
    check_answer: bool | None = None  # None: for contexts up to 8k


@dataclass(frozen=True)
class Config:
    """Everything. `to_dict` is what the report records."""

    model: ModelConfig = field(default_factory=ModelConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Setting:
    """One value on its way into a Config, and where it came from (`--keep`, a file, ...)."""

    value: Any
    source: str


Settings = dict[str, Setting]  # dotted path -> setting


def configs_dir() -> Path:
    """Where `models/` and `strategies/` lie (in a checkout a link to the top level's `configs/`)."""
    return Path(__file__).parent / "configs"


def strategy_names() -> list[str]:
    """The strategies that ship in configs/strategies."""
    return sorted(path.stem for path in (configs_dir() / "strategies").glob("*.yaml"))


def load_strategy(name_or_file: str) -> Settings:
    """Settings of a named strategy (configs/strategies) or of a YAML file."""
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        path = configs_dir() / "strategies" / f"{name_or_file}.yaml"
        if not path.is_file():
            raise UnknownNameError("strategy", name_or_file, strategy_names(), "or give a .yaml file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"strategy file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"strategy file {path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"strategy file {path} must map sections to settings, got {type(content).__name__}")
    return {key: Setting(value, f"strategy file {path}") for key, value in _flatten(content).items()}


def parse_assignment(text: str) -> Settings:
    """`a.b=c` from the command line; the value is read as YAML."""
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ConfigError(f"--set {text!r}: expected PATH=VALUE, for example --set cache.sinks=8")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not valid YAML: {error}") from None
    return {path.strip(): Setting(parsed, f"--set {text}")}


def merge_settings(*layers: Settings) -> Settings:
    """Later layers win. A layer that gives only one of `selection.keep` and `selection.keep_mass`
    switches the other off: each of them alone has a meaning of its own (contracts.md). So do a mass and
    `selection.alpha`, which exclude each other; there `keep` stays, a cap to both."""
    keep, mass, alpha = "selection.keep", "selection.keep_mass", "selection.alpha"
    merged: Settings = {}
    for layer in layers:
        given = [path for path in (keep, mass, alpha) if path in layer and layer[path].value is not None]
        off = {(keep,): [mass], (mass,): [keep, alpha], (keep, mass): [alpha], (alpha,): [mass], (keep, alpha): [mass]}
        for path in off.get(tuple(given), []):
            merged[path] = Setting(None, layer[given[-1]].source)
        merged |= layer
    return merged


def build_config(settings: Mapping[str, Setting]) -> Config:
    """Check every setting and make the Config; raises ConfigError naming path, value and source."""
    known = _known_paths()
    sections: dict[str, dict[str, Any]] = {}
    for path, setting in settings.items():
        if path not in known:
            near = difflib.get_close_matches(path, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(
                f"unknown setting {path!r} (from {setting.source}){hint} Known: {', '.join(sorted(known))}"
            )
        section, name = path.split(".")
        sections.setdefault(section, {})[name] = _coerce(path, setting, known[path])
    config = Config(
        **{
            section.name: typing.get_type_hints(Config)[section.name](**sections.get(section.name, {}))
            for section in dataclasses.fields(Config)
        }
    )
    check_values(config, settings)
    if config.cache.sketch in ON_GPU_ALONE:  # `auto` leaves nothing open
        config = with_settings(config, {"cache.sketch_home": "gpu"})
    check_sketch(config)
    return config


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with these settings, by their dotted paths; the values are taken as they are."""
    for path, value in values.items():
        section, name = path.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _known_paths() -> dict[str, Any]:
    known: dict[str, Any] = {}
    for section, section_type in typing.get_type_hints(Config).items():
        for name, hint in typing.get_type_hints(section_type).items():
            known[f"{section}.{name}"] = hint
    return known


def _coerce(path: str, setting: Setting, hint: Any) -> Any:
    """The value as the field's type, or a ConfigError that says what is allowed."""
    value = setting.value
    if path == "model.dtype" and isinstance(value, str):
        value = _SHORT_DTYPES.get(value, value)
    if isinstance(value, str) and (read := _reader(path)):  # as the flags read it
        with contextlib.suppress(argparse.ArgumentTypeError):
            value = read(value)
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if typing.get_origin(option) is Literal and value is False and "off" in typing.get_args(option):
            return "off"  # YAML reads a bare off as false
        if typing.get_origin(option) is tuple:
            element = typing.get_args(option)[0]
            items = value if isinstance(value, (list, tuple)) else (value,)  # one element needs no brackets
            if all(_is(item, element) for item in items):
                return tuple(items)
        if isinstance(option, type) and _is(value, option):
            return value
    if float in options and _is(value, int):
        return float(value)
    words = _describe(options)
    if read := _reader(path):
        words += f" (a text such as {'24GiB' if read is parse_size else '32k'} is read, too)"
    raise ConfigError(f"{path} = {value!r} (from {setting.source}): allowed is {words}")


_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_TOKEN_COUNTS = ("run.seq", "run.gen", "cache.gpu_window", "cache.sinks", "runtime.prefill_chunk")


def _reader(path: str) -> Callable[[str], int] | None:
    """What reads a text such as `24GiB` or `32k`, where a size or a number of tokens is meant."""
    return parse_size if path.endswith("_bytes") else parse_tokens if path in _TOKEN_COUNTS else None


def _is(value: Any, wanted: type) -> bool:
    return isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))


def _describe(options: tuple[Any, ...]) -> str:
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            words += [repr(choice) for choice in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            words.append(f"a list of {typing.get_args(option)[0].__name__}")
        else:
            words.append("null" if option is type(None) else option.__name__)
    return " or ".join(words)
