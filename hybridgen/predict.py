"""`python -m hybridgen.predict`: what a job would take on a machine that need not be at hand, and where to put it.

Without --strategy the policy search says what should lie where, with every token attended to (FlexGen, MoE-Lightning).
With one, that strategy is predicted as the memory budget would settle it there. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridgen.cli import Parser, add_engine_flags, assigned_settings, run_command
from hybridgen.config import (
    Config,
    PlacementConfig,
    Setting,
    Settings,
    build_config,
    load_strategy,
    merge_settings,
    strategy_names,
    with_settings,
)
from hybridgen.engine import build, memory_plan
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import chooses
from hybridgen.engine.memory_budget import WITHOUT_AUTO, Limits, settle
from hybridgen.errors import CheckpointError, ConfigError, InsufficientMemoryError
from hybridgen.evaluation.machine_model import RESOURCES, Prediction, predict
from hybridgen.evaluation.policy_search import Attention, Grid, Placed, modes_of, search
from hybridgen.output import check_output_path, write_whole
from hybridgen.placement.hardware import Hardware, hardware_names, load_hardware
from hybridgen.placement.plan import MemoryPlan, format_bytes
from hybridgen.types import DTYPES

DEFAULT_SEQ = 32 * 1024
BATCHES = tuple(2**power for power in range(9))  # of `--batch auto`
SEARCH_WINDOW = 1  # tokens beside the KV that is placed: FlexGen has none; two blocks of room there are in any case
_SEARCHED: dict[Attention, str] = {"gpu": "aog", "cpu": "aoc"}
_OF_A_CHOICE = ("selection", "eviction", "attention", "schedule")  # settings of strategies that leave tokens out
_LEFT_OUT = ("--strategy", "--batch", "--device", "--weights", "--seed")
_NO_LIMIT = 1 << 60
_FLAGS = {
    "model.name": "--model",
    "model.dtype": "--dtype",
    "run.seq": "--seq",
    "run.gen": "--gen",
    "run.batch": "--batch",
    "cache.gpu_window": "--gpu-window",
}

NAMES = {
    "gpu": "GPU",
    "h2d": "link, to the GPU",
    "d2h": "link, to the host",
    "cpu": "CPU",
    "dram": "host memory",
    "disk": "disk",
}
ADVICE = {
    "gpu": "the GPU's own work takes longest: a faster GPU, a smaller --dtype, or more sequences at once (--batch)",
    "h2d": "what crosses the link takes longest: more GPU memory, fewer rows fetched (--strategy hybridgen, a smaller "
    "--keep), or more sequences for each time that weights come (--batch)",
    "d2h": "what leaves the GPU takes longest: fewer sequences at once (--batch)",
    "cpu": "the CPU's scan takes longest: --key-type int8 or --sketch int2 (hybridgen), or a sketch on the GPU",
    "dram": "the host's memory takes longest: fewer bytes of keys (--key-type int8, --sketch int2), or more memory "
    "channels",
    "disk": "the disk takes longest: more host memory, or a faster disk",
    "order": "layers wait for transfers and the CPU one after another: --lookahead select, or more micro-batches",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a wrong input or a job that does not fit."""
    return run_command(_run, argv)


def _batch(text: str) -> int | str:
    if text == "auto" or (text.isdigit() and int(text) > 0):
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a number of sequences >= 1")


def _run(argv: list[str]) -> int:
    parser = Parser("hybridgen.predict", description="Predict memory and time on a machine, and choose a placement.")
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(hardware_names())}, or a .yaml or .json file (configs/hardware/example.yaml explains it)",
    )
    parser.add_argument(
        "--strategy",
        metavar="NAME|FILE",
        help=f"predict this one ({', '.join(strategy_names())}, or a YAML file); without: the best placement",
    )
    parser.add_argument("--batch", type=_batch, metavar="N", help="sequences, or auto: the number of most tokens/s")
    parser.add_argument("--out", type=Path, metavar="F", help="write the prediction as JSON")
    add_engine_flags(parser, leave_out=_LEFT_OUT)
    arguments = parser.parse_args(argv)
    check_output_path("--out", arguments.out)
    hardware, given = load_hardware(arguments.hardware), assigned_settings(arguments)
    if isinstance(arguments.batch, int):
        given["run.batch"] = Setting(arguments.batch, "--batch")
    if arguments.strategy is None:
        report = _search(hardware, given, arguments.batch == "auto")
    elif arguments.batch == "auto":
        raise ConfigError("--batch auto with --strategy: the search alone chooses one (allowed here: a number)")
    else:
        report = _of_strategy(arguments.strategy, hardware, given)
    print(_table(report))
    if arguments.out is not None:
        write_whole("--out", arguments.out, json.dumps(report, indent=1) + "\n")
        print(f"prediction: {arguments.out}")
    return 0


def planned_choice(config: Config) -> ModelChoice:
    """The model as on a machine with a GPU, whether or not there is one here."""
    choice = build.choose_model(with_settings(config, {"runtime.device": "cpu"}))
    name = config.model.dtype if config.model.dtype != "auto" else choice.spec.torch_dtype
    if name not in DTYPES:
        raise CheckpointError(f"model {choice.spec.name}: its dtype {name!r} is not supported")
    return replace(choice, device=torch.device("cuda", 0), dtype=DTYPES[name])


def limits_there(config: Config, hardware: Hardware) -> Limits:
    """Bytes to plan with on that machine, as the engine would there; host memory that is not known is no limit."""
    host = hardware.host_memory_bytes
    return memory_plan.limits_within(config, hardware.gpu_memory_bytes, _NO_LIMIT if host is None else host)


def _search(hardware: Hardware, given: Settings, any_batch: bool) -> dict[str, Any]:
    if "placement.kv_on_gpu" in given:
        raise ConfigError("placement.kv_on_gpu without --strategy: the search chooses it (allowed here: leave it out)")
    for path, setting in given.items():
        if path.split(".")[0] in _OF_A_CHOICE:
            raise ConfigError(
                f"{path} = {setting.value} (from {setting.source}) has no effect without --strategy: the search "
                f"attends to every token (allowed there: {', '.join(strategy_names())})"
            )
    narrow: Settings = {"cache.gpu_window": Setting(SEARCH_WINDOW, "the search's default")}
    configs: dict[Attention, Config] = {
        attention: build_config(merge_settings(load_strategy(name), narrow, given))
        for attention, name in _SEARCHED.items()
    }
    config = configs["gpu"]
    if config.placement.weights_on_gpu != "auto":
        raise ConfigError(
            f"placement.weights_on_gpu = {config.placement.weights_on_gpu} without --strategy: the search chooses it "
            "(allowed here: 'auto')"
        )
    choice, prompt = planned_choice(config), config.run.seq or DEFAULT_SEQ
    notes = _notes(choice, config, prompt, hardware)
    grid = Grid(BATCHES if any_batch else (config.run.batch,))
    limits = limits_there(config, hardware)
    found = search(choice, configs, prompt, config.run.gen, hardware, limits, grid)
    if found is None:
        layers, capacity = choice.spec.num_layers, prompt + config.run.gen
        least = memory_plan.with_share(configs["cpu"], 0.0)
        plan = memory_plan.plan_memory(choice, least, modes_of(0, layers, "cpu"), grid.batches[0], capacity)
        raise InsufficientMemoryError(
            f"{choice.spec.name} with {grid.batches[0]} x {capacity} tokens does not fit on {hardware.name}, wherever "
            f"weights and KV lie; with as little as can be on the GPU\n{plan.describe(*limits)}\n"
            f"disk: {format_bytes(hardware.disk_bytes)}; give a smaller --seq, --batch, --gpu-window or --model"
        )
    flags, missing = flags_of(found, given)
    notes += [f"{path} is not a setting of this version: without it the command does less" for path in missing]
    report = _report(choice, hardware, prompt, found.config, found.plan, found.prediction, limits, notes)
    return report | {"strategy": None, "policy": found.policy.to_dict(), "disk_bytes": found.disk_bytes, "run": flags}


def _of_strategy(name: str, hardware: Hardware, given: Settings) -> dict[str, Any]:
    settings = merge_settings(load_strategy(name), given)
    config = build_config(settings)
    choice, prompt = planned_choice(config), config.run.seq or DEFAULT_SEQ
    notes = _notes(choice, config, prompt, hardware)
    limits, free = limits_there(config, hardware), [path for path in WITHOUT_AUTO if path not in settings]
    if config.placement.kv_on_gpu is not None:  # as a run has it: the window
        config = build.with_kv_share(config, prompt + config.run.gen)
        free = [path for path in free if path != "cache.gpu_window"]
    settled = settle(choice, config, config.run.batch, prompt + config.run.gen, limits, free)
    if not settled.plan.fits(*limits):
        raise InsufficientMemoryError(
            f"{choice.spec.name} by {name} with {config.run.batch} x {prompt + config.run.gen} tokens does not fit on "
            f"{hardware.name}\n{settled.plan.describe(*limits)}"
        )
    config = settled.config
    share = config.placement.weights_on_gpu
    assert share != "auto"
    if any(map(chooses, settled.modes)):
        notes.append("predicted is --schedule fixed: what feedback leaves out or adds is not modelled")
    by_text = config.selection.keep_mass is not None or config.selection.alpha is not None
    if by_text and any(map(chooses, settled.modes)):
        notes.append("how many rows are kept depends on the text: predicted is the most, of selection.keep")
    config = with_settings(config, {"placement.weights_on_gpu": settled.plan.weights_on_gpu or share})
    found = predict(choice, config, settled.modes, prompt, config.run.gen, hardware)
    notes += [f"chosen: {each.describe()}" for each in settled.chosen if each.value != each.best]
    report = _report(choice, hardware, prompt, config, settled.plan, found, limits, notes)
    return report | {"strategy": name, "policy": None, "disk_bytes": 0, "run": None}


def _notes(choice: ModelChoice, config: Config, prompt: int, hardware: Hardware) -> list[str]:
    warning = build.check_positions(choice, prompt + config.run.gen, config.model.extend_positions)
    notes = [] if warning is None else [warning]
    if hardware.host_memory_bytes is None and config.placement.host_memory_bytes is None:
        notes.append(
            f"{hardware.source} does not say how much host memory there is, so it is no limit here: "
            "--set placement.host_memory_bytes=100GiB makes it one"
        )
    return notes


def flags_of(placed: Placed, given: Settings) -> tuple[str, list[str]]:
    """The command that realises a policy, and those of its settings that this version does not have."""
    policy, config = placed.policy, placed.config
    name = "full" if policy.kv.gpu == 1.0 else _SEARCHED[policy.attention]
    share = math.floor(policy.weights.gpu * 10_000) / 10_000  # rounded down: it fits, too
    words = ["python", "-m", "hybridgen.run", "--strategy", name, "--weights-on-gpu", f"{share:g}"]
    fixed: dict[str, Any] = {
        "model.name": config.model.name,
        "run.seq": config.run.seq or DEFAULT_SEQ,
        "run.gen": config.run.gen,
        "run.batch": policy.batch,
    }
    if policy.kv.gpu in (0.0, 1.0):  # else placement.kv_on_gpu says what the window is
        fixed["cache.gpu_window"] = config.cache.gpu_window
    if policy.num_micro_batches > 1:
        fixed["runtime.micro_batch"] = policy.micro_batch
    later: Mapping[str, float] = {
        "kv_on_gpu": policy.kv.gpu if policy.kv.gpu < 1.0 else 0.0,
        "kv_on_disk": policy.kv.disk,
        "weights_on_disk": policy.weights.disk,
    }
    wanted = fixed | {path: setting.value for path, setting in given.items() if path not in fixed}
    wanted |= {f"placement.{name}": round(share, 4) for name, share in later.items() if share}
    for path, value in wanted.items():
        shown = "[" + ",".join(map(str, value)) + "]" if isinstance(value, list | tuple) else str(value)
        words += [_FLAGS[path], shown] if path in _FLAGS else ["--set", f"{path}={shown}"]
    missing = [f"placement.{name}" for name, share in later.items() if share and not hasattr(PlacementConfig(), name)]
    return shlex.join(words), missing


def _report(
    choice: ModelChoice,
    hardware: Hardware,
    prompt: int,
    config: Config,
    plan: MemoryPlan,
    found: Prediction,
    limits: Limits,
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "model": choice.spec.name,
        "dtype": str(choice.dtype).removeprefix("torch."),
        "hardware": {"name": hardware.name, "file": hardware.source},
        "prompt_tokens": prompt,
        "gen": config.run.gen,
        "batch": config.run.batch,
        "prediction": found.to_dict(),
        "memory_plan": plan.to_dict(),
        "limits": {
            "gpu": limits[0],
            "host": None if limits[1] > _NO_LIMIT // 2 else limits[1],
            "disk": hardware.disk_bytes,
        },
        "change": ADVICE[found.bottleneck],
        "notes": list(notes),
        "config": config.to_dict(),
    }


def _table(report: Mapping[str, Any]) -> str:
    """For people."""
    found, plan, limits, policy = (report[name] for name in ("prediction", "memory_plan", "limits", "policy"))
    what = f"{report['batch']} x {report['prompt_tokens']} prompt tokens, {report['gen']} generated"
    rows = [
        ("model", f"{report['model']}, {report['dtype']}: {what}"),
        ("hardware", f"{report['hardware']['name']} ({report['hardware']['file']})"),
    ]
    if policy is None:
        share = report["config"]["placement"]["weights_on_gpu"]
        rows.append(("strategy", f"{report['strategy']}, {100 * share:.4g} % of the layers' weights on the GPU"))
    else:
        for kind in ("weights", "kv", "activations"):
            shares = ", ".join(f"{name} {100 * share:.4g} %" for name, share in policy[kind].items() if share)
            rows.append(("KV" if kind == "kv" else kind, shares))
        micro = f"{policy['num_micro_batches']} micro-batch(es) of {policy['micro_batch']}"
        rows.append(("schedule", f"{micro}; attention on the {policy['attention'].upper()}"))
    for tier, taken in (("gpu", plan["device_bytes"]), ("host", plan["host_bytes"]), ("disk", report["disk_bytes"])):
        if tier != "disk" or taken:
            most = "unknown" if limits[tier] is None else format_bytes(limits[tier])
            rows.append((f"memory, {tier}", f"{format_bytes(taken)} of {most}"))
    rows += [
        ("prefill", f"{found['prefill_s']:.2f} s"),
        ("decode", f"{found['ms_per_token']:.1f} ms a step, {found['decode_tokens_per_s']:.2f} tokens/s"),
        ("whole job", f"{found['total_s']:.1f} s, {found['tokens_per_s']:.2f} tokens/s with the prefill"),
    ]
    busy = found["busy_ms_per_step"]
    rows.append(("busy in a step", ", ".join(f"{NAMES[name]} {busy[name]:.1f} ms" for name in RESOURCES if busy[name])))
    rows.append(("bottleneck", f"{NAMES.get(found['bottleneck'], found['bottleneck'])}: {report['change']}"))
    if report["run"] is not None:
        rows.append(("to run it", report["run"]))
    lines = [f"{name:<16} {value}" for name, value in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


if __name__ == "__main__":
    sys.exit(main())
