"""Flags that the commands share, and how a command ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hybridgen.config import (
    Config,
    Setting,
    Settings,
    build_config,
    load_strategy,
    merge_settings,
    parse_assignment,
    strategy_names,
)
from hybridgen.errors import ConfigError, HybridGenError
from hybridgen.quantities import parse_keep, parse_size, parse_tokens


class Parser(argparse.ArgumentParser):
    """Errors are ConfigErrors: one message, exit status 2, like every other wrong input."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse_share(text: str) -> float | str:
    """`auto` or a fraction."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a fraction in [0, 1]") from None


# flag, dotted setting, how its text is read, metavar, help
_FLAGS: list[tuple[str, str, Callable[[str], Any], str, str]] = [
    ("--model", "model.name", str, "M", "alias, Hugging Face directory, .gguf file or hub id (default smollm2-135m)"),
    ("--seq", "run.seq", parse_tokens, "N", "prompt tokens: 2048, 2k, 32k (default 32k on CUDA, 2k on the CPU)"),
    ("--gen", "run.gen", parse_tokens, "N", "tokens to generate (default 32)"),
    ("--batch", "run.batch", int, "N", "sequences (default 1)"),
    ("--seed", "run.seed", int, "N", "of the document, of sampling and of random weights (default 0)"),
    ("--device", "runtime.device", str, "D", "auto, cpu or cuda"),
    ("--dtype", "model.dtype", str, "D", "auto, float32, float16 or bfloat16 (also fp32, fp16, bf16)"),
    ("--weights", "model.weights", str, "W", "real, random or auto"),
    ("--weights-on-gpu", "placement.weights_on_gpu", parse_share, "F", "of the layers' weights: auto, or in [0, 1]"),
    ("--gpu-memory", "placement.gpu_memory_bytes", parse_size, "SIZE", "such as 24GiB (default 0.9 of what is free)"),
    ("--gpu-window", "cache.gpu_window", parse_tokens, "N", "recent tokens on the device (default 512)"),
    ("--keep", "selection.keep", parse_keep, "F|N", "host tokens kept: a fraction with a decimal point, or a count"),
    ("--keep-mass", "selection.keep_mass", float, "M", "attention mass that what is attended must hold"),
    ("--min-keep", "selection.min_keep", int, "N", "never keep fewer host tokens than this (default 64)"),
    ("--lookahead", "attention.lookahead", str, "MODE", "select (by predicted query), logits (weigh by it) or off"),
    ("--key-type", "cache.key_type", str, "T", "of the host's keys: auto (the dtype), fp32, fp16, bf16 or int8"),
    ("--sketch", "cache.sketch", str, "S", "scored for the host's keys: none, int4, int2, partial or pages"),
    ("--sketch-home", "cache.sketch_home", str, "H", "host, where the CPU scores by it, or gpu (default: if it fits)"),
    ("--schedule", "schedule.mode", str, "MODE", "fixed, feedback, paper or replay:REPORT"),
    ("--target-ms", "schedule.target_ms", float, "X", "step time that --schedule feedback aims at"),
]  # fmt: skip


SYNTHETIC_KV = "--synthetic-kv"


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """The flags that fill a Config, `--strategy` and `--set`. leave_out: those that the command does without."""
    for flag, path, read, metavar, help_text in _FLAGS:
        if flag not in leave_out:
            parser.add_argument(flag, dest=path, type=read, metavar=metavar, help=help_text)
    if SYNTHETIC_KV not in leave_out:
        parser.add_argument(
            SYNTHETIC_KV,
            dest="runtime.synthetic_kv",
            action="store_true",
            default=None,
            help="with random weights: draw the prompt's K and V at random instead of computing them",
        )
    if "--strategy" not in leave_out:
        parser.add_argument(
            "--strategy",
            default="hybridgen",
            metavar="NAME|FILE",
            help=f"a strategy ({', '.join(strategy_names())}) or a YAML file (default hybridgen)",
        )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="any setting by its dotted name; repeatable",
    )


def given_settings(arguments: argparse.Namespace) -> Settings:
    """What was given, merged: flag > --set > strategy file."""
    return merge_settings(load_strategy(arguments.strategy), assigned_settings(arguments))


def assigned_settings(arguments: argparse.Namespace) -> Settings:
    """What was given beside the strategy: flag > --set."""
    assigned: Settings = {}
    for text in arguments.set:
        assigned |= parse_assignment(text)
    flags = {
        path: Setting(value, flag) for flag, path, *_ in _FLAGS if (value := getattr(arguments, path, None)) is not None
    }
    if getattr(arguments, "runtime.synthetic_kv", None):
        flags["runtime.synthetic_kv"] = Setting(True, SYNTHETIC_KV)
    return assigned | flags


def config_from(arguments: argparse.Namespace) -> Config:
    """The checked Config of parsed flags."""
    return build_config(given_settings(arguments))


def run_command(command: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command; a wrong input is one line on stderr and exit status 2."""
    try:
        return command(list(sys.argv[1:] if argv is None else argv))
    except HybridGenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "out of memory" in str(error)):
            raise
        print(
            f"error: out of memory in spite of the plan: {error}; give a smaller --seq or --gpu-memory", file=sys.stderr
        )
        return 2
