"""The ways to attend that an evaluation puts beside each other: full attention first, then those of the flags."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
import torch
from tqdm import tqdm

from hybridgen import __version__
from hybridgen.config import (
    Config,
    Setting,
    Settings,
    build_config,
    load_strategy,
    merge_settings,
    parse_assignment,
)
from hybridgen.engine import build, memory_plan
from hybridgen.engine.admission import admit
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_budget import fit_weights
from hybridgen.engine.report import current_commit
from hybridgen.errors import ConfigError, InsufficientMemoryError, UnknownNameError
from hybridgen.evaluation.paired import CONFIDENCE
from hybridgen.machine import this_gpu
from hybridgen.models.loading import weight_bytes
from hybridgen.placement.plan import MemoryPlan
from hybridgen.quantities import parse_keep, parse_tokens

MASS_PROBE_INTERVAL = 2  # decode steps: 64 of them then probe each layer of most models
DEFAULTS = {
    "runtime.mass_probe_interval": MASS_PROBE_INTERVAL,
    "model.exact_layers_mode": "resident",
    "runtime.torch_threads": "all",  # the same sums, and so the same figures, whoever else uses the cores
}
_KV_ITEMS = (
    "KV of resident layers", "KV of sinks and windows", "KV that is not evicted", "KV host tier", "fitted query maps",
)  # of a memory plan
_STRATEGY = "strategy"  # word of --also: another one, under the same flags
# word of --also -> dotted setting, how its text is read
_VARIANT_WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "keep": ("selection.keep", parse_keep),
    "keep-mass": ("selection.keep_mass", float),
    "min-keep": ("selection.min_keep", int),
    "lookahead": ("attention.lookahead", str),
    "predictor": ("attention.predictor", str),
    "dropped": ("attention.dropped", str),
    "gpu-window": ("cache.gpu_window", parse_tokens),
    "key-type": ("cache.key_type", str),
    "sketch": ("cache.sketch", str),
}
VARIANT_HELP = ", ".join((_STRATEGY, *_VARIANT_WORDS))



@dataclass(frozen=True)
class Condition:
    """One way to attend; the first of all is full attention."""

    name: str
    config: Config


def make_conditions(settings: Settings, also: Sequence[str], assigned: Settings | None = None) -> list[Condition]:
    """Full attention, then the strategy of `settings`, then one condition an `--also`.

    assigned: the flags among the settings, which hold for another strategy of an `--also`, too. Strategy full is
    compared with nothing and stands alone.
    """
    base = build_config(settings)
    executor = base.attention.executor
    if executor == "full":
        if also:
            raise ConfigError(f"--also {also[0]}: strategy full is what all others are compared with, give another")
        return [Condition("full attention", base)]
    configs, names = [base], [""]
    for text in also:
        variant = parse_variant(text)
        strategy = variant.pop(_STRATEGY, None)
        given = settings
        if strategy is not None:
            given = merge_settings(load_strategy(str(strategy.value)), assigned or {})
            given = {path: Setting(value, "the default") for path, value in DEFAULTS.items()} | given
            for path, value in (("run.gen", base.run.gen), ("run.batch", base.run.batch)):
                given[path] = settings.get(path, Setting(value, "the default"))
        configs.append(build_config(merge_settings(given, variant)))
        _check_variant(text, variant, configs[-1].attention.executor)
        names.append("" if strategy is None else f"{strategy.value}: ")
    if any(config.attention.executor == "evicting" and config.eviction.prefill == "windowed" for config in configs):
        raise ConfigError(
            "eviction.prefill = 'windowed': all conditions continue from full attention's prefill "
            "(allowed here: 'dense')"
        )
    full = replace(base, attention=replace(base.attention, executor="full"))
    conditions = [Condition("full attention", full)]
    for name, config, text in zip(names, configs, ["", *also], strict=True):
        name += _name(config, configs)
        is_new = name not in [condition.name for condition in conditions]
        conditions.append(Condition(name if is_new else f"{name} ({text})", config))
    return conditions


def _check_variant(text: str, variant: Settings, executor: str) -> None:
    """ConfigError for what would have no effect, or one on more than the condition."""
    if executor == "full":
        raise ConfigError(f"--also {text}: strategy full is what all others are compared with, give another")
    for path in variant:
        section = path.split(".")[0]
        if path != "model.exact_layers_mode" and section not in ("selection", "attention", "cache", "eviction"):
            raise ConfigError(
                f"--also {text}: {path} is the same for all conditions (allowed are settings of selection, attention, "
                "cache and eviction, and model.exact_layers_mode)"
            )
        if (section == "eviction") != (executor == "evicting") or (section == "selection" and executor != "hybrid"):
            why = {"evicting": "evicts", "hybrid": "evicts nothing"}.get(executor, "chooses nothing")
            raise ConfigError(f"--also {text}: {path} has no effect, as attention.executor = {executor!r} {why}")


def strategy_of(conditions: Sequence[Condition]) -> Condition:
    """The condition that the flags describe: the first after full attention, or full attention itself."""
    return conditions[:2][-1]


def parse_variant(text: str) -> Settings:
    """`keep=0.1,lookahead=off`: the words are those of the flags, `strategy`, or settings by their dotted names."""
    source, variant = f"--also {text}", Settings()
    for part in text.split(","):
        word, _, value = (piece.strip() for piece in part.partition("="))
        if word == _STRATEGY:
            variant[_STRATEGY] = Setting(value, source)
            continue
        if "." in word:
            variant |= {path: Setting(setting.value, source) for path, setting in parse_assignment(part).items()}
            continue
        if word not in _VARIANT_WORDS:
            raise UnknownNameError(f"word in {source}:", word, [_STRATEGY, *_VARIANT_WORDS], "each as WORD=VALUE")
        path, read = _VARIANT_WORDS[word]
        try:
            variant[path] = Setting(read(value), source)
        except (ValueError, argparse.ArgumentTypeError):
            raise ConfigError(f"{source}: {value!r} is no value for {word}") from None
    return variant


def _name(config: Config, all_configs: Sequence[Config]) -> str:
    """What is chosen and by which query; window and min-keep where the conditions differ in them."""
    selection = config.selection
    if config.attention.executor == "evicting":
        eviction = config.eviction
        return f"{eviction.policy}, sinks {eviction.sinks}, heavy {eviction.heavy}, recent {eviction.recent}"
    if config.attention.executor != "hybrid":
        packed = "" if config.cache.compress == "none" else f", {config.cache.compress} in groups"
        return f"all tokens, {config.attention.executor}{packed}"
    words = [
        f"{word} {value}"
        for word, value in (("keep", selection.keep), ("keep-mass", selection.keep_mass))
        if value is not None
    ]
    words.append(f"lookahead {config.attention.lookahead}")
    if len({other.attention.lookahead_layers for other in all_configs}) > 1:
        words.append(f"{config.attention.lookahead_layers} ahead")
    if len({other.attention.predictor for other in all_configs}) > 1:
        words.append(f"predictor {Path(config.attention.predictor).name}")
    if len({other.selection.min_keep for other in all_configs}) > 1:
        words.append(f"min-keep {selection.min_keep}")
    if len({other.cache.gpu_window for other in all_configs}) > 1:
        words.append(f"gpu-window {config.cache.gpu_window}")
    if len({other.cache.key_type for other in all_configs}) > 1:
        words.append(f"key-type {config.cache.key_type}")
    if len({other.cache.sketch for other in all_configs}) > 1:
        words.append(f"sketch {config.cache.sketch}")
    return ", ".join(words)


def admit_conditions(
    choice: ModelChoice, conditions: Sequence[Condition], prompt: int, decode: int, shorter: str, scored: int = 0
) -> MemoryPlan:
    """Print the plan of all conditions together, and return it; refuse it with what to change.

    Sequences of `prompt` tokens and `decode` more; shorter: the flag that makes these fewer, for the message. scored:
    tokens whose logits are computed at once.
    """
    config = strategy_of(conditions).config
    batch, capacity = config.run.batch, prompt + decode
    limits = memory_plan.memory_limits(config, choice.device)
    plan = plan_conditions(choice, conditions, batch, capacity, scored)
    if not plan.fits(*limits):
        compact = choice.with_dtype(torch.bfloat16)
        changes: list[tuple[str, ModelChoice, Sequence[Condition], int]] = [
            (f"--batch {size}", choice, conditions, size) for size in range(batch - 1, 0, -1)
        ]
        changes += [
            ("--batch 1 without --also", choice, conditions[:2], 1),
            ("--batch 1 --dtype bfloat16 without --also", compact, conditions[:2], 1),
        ]
        fitting = (
            change
            for change, candidate, some, size in changes
            if plan_conditions(candidate, some, size, capacity, scored).fits(*limits)
        )
        raise InsufficientMemoryError(
            f"{choice.spec.name} with {len(conditions)} conditions of {batch} x {capacity} tokens "
            f"does not fit\n{plan.describe(*limits)}\n"
            f"what would fit: {next(fitting, f'a smaller model or {shorter}')}"
        )
    admission = admit(choice, config, prompt, decode, batch)
    print(replace(admission, plan=plan, chosen=()).describe())  # what was chosen holds for one condition alone
    return plan


def plan_conditions(
    choice: ModelChoice, conditions: Sequence[Condition], batch: int, capacity: int, scored: int = 0
) -> MemoryPlan:
    """What all conditions need together: each has its own KV, everything else is used in turn."""
    total = MemoryPlan(device_is_host=choice.device.type == "cpu")
    for condition in conditions:
        modes = layer_modes(condition.config, choice.spec.num_layers)
        plan = memory_plan.plan_memory(choice, condition.config, modes, batch, capacity)
        for items, more in ((total.device, plan.device), (total.host, plan.host)):
            for name, size in more.items():
                items[name] = items.get(name, 0) + size if name in _KV_ITEMS else max(items.get(name, 0), size)
    # Of the tokens that are scored: logits, log-probabilities, and the head's own output.
    total.device["LM head"] = max(total.device["LM head"], 12 * scored * choice.spec.vocab_size)
    config = strategy_of(conditions).config
    return fit_weights(choice, config, [total], memory_plan.memory_limits(config, choice.device))[1]


@contextmanager
def open_conditions(
    conditions: Sequence[Condition], choice: ModelChoice, plan: MemoryPlan
) -> Iterator[list[LLM]]:
    """An LLM a condition, all over the same weights, which are loaded first."""
    config = memory_plan.settled(strategy_of(conditions).config, plan)
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:
        weights = build.obtain_weights(choice, config, needs_text=True, progress=advances(bar))
    with ExitStack() as stack:
        llms: list[LLM] = []
        for condition in conditions:
            if llms:
                llms.append(stack.enter_context(llms[0].sharing(condition.config)))
            else:
                llms.append(stack.enter_context(LLM.from_parts(condition.config, choice, weights)))
            llms[-1].telemetry.enabled = False
        yield llms


def advances(bar: tqdm[NoReturn]) -> Callable[[int], None]:
    """What moves the bar on by a count."""

    def advance(count: int) -> None:
        bar.update(count)

    return advance


def identity(llms: Sequence[LLM], conditions: Sequence[Condition]) -> dict[str, Any]:
    """What any result depends on beside a job's own flags, but the code."""
    llm = llms[-1]
    return {
        "model": llm.spec.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "machine": [llm.device.type, this_gpu()],
        "conditions": [[condition.name, condition.config.to_dict()] for condition in conditions],
    }


def report_head(llms: Sequence[LLM], conditions: Sequence[Condition], strategy: str) -> dict[str, Any]:
    """What a report says whatever was measured."""
    llm = llms[-1]
    return {
        "model": llm.spec.name,
        "weights": llm.weights.kind,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "strategy": strategy,
        "batch": llm.config.run.batch,
        "confidence": CONFIDENCE,
        "conditions": [
            {
                "name": condition.name,
                "covered_mass_kind": _mass_kind(condition.config),
                "exact_layers": {str(i): mode for i, mode in enumerate(llm.modes) if mode != "lookahead"},
                "config": condition.config.to_dict(),
            }
            for llm, condition in zip(llms, conditions, strict=True)
        ],
        "versions": {
            "hybridgen": __version__,
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "python": platform.python_version(),
        },
        "commit": current_commit(),
    }


def _mass_kind(config: Config) -> str | None:
    """By which query the choice judged itself."""
    if config.attention.executor != "hybrid":
        return None
    return "predicted" if config.attention.lookahead == "select" else "exact"
