"""Flags: what they read, what they fill, and which wins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridgen import cli
from hybridgen.__main__ import available_commands
from hybridgen.__main__ import main as hybridgen_main
from hybridgen.cli import Parser, add_engine_flags, config_from, parse_share
from hybridgen.config import Config
from hybridgen.errors import ConfigError
from hybridgen.quantities import parse_keep, parse_size, parse_tokens


def parse(*argv: str) -> Config:
    parser = Parser("test")
    add_engine_flags(parser)
    return config_from(parser.parse_args(list(argv)))


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_tokens, "2048", 2048),
        (parse_tokens, "2k", 2048),
        (parse_tokens, "32K", 32768),
        (parse_tokens, "0", 0),  # refused later, with the name of the setting
        (parse_size, "24GiB", 24 * 1024**3),
        (parse_size, "500MiB", 500 * 1024**2),
        (parse_size, "24g", 24 * 1024**3),
        (parse_size, "1.5 GiB", 3 * 1024**3 // 2),
        (parse_size, "2GB", 2 * 1000**3),
        (parse_size, "1tb", 10**12),
        (parse_size, "1024", 1024),
        (parse_size, "1b", 1),
        (parse_keep, "0.1", 0.1),
        (parse_keep, "1.0", 1.0),
        (parse_keep, "1", 1),
        (parse_keep, ".5", 0.5),
        (parse_share, "auto", "auto"),
        (parse_share, "0.5", 0.5),
    ],
)
def test_what_is_read(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value and type(read(text)) is type(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((parse_tokens, text) for text in ("", "k", "-1", "2kb", "1.5k", "two", "1e3", "2 k")),
        *((parse_size, text) for text in ("", "GiB", "-1g", "1gg", "ten")),
        *((parse_keep, text) for text in ("", "all", "1e-1", "10%", "0.1.2")),
        *((parse_share, text) for text in ("", "some", "50%")),
    ],
)
def test_what_is_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises((argparse.ArgumentTypeError, ValueError)) as error:
        read(text)
    assert isinstance(error.value, argparse.ArgumentTypeError), "argparse hides the text of other errors"
    assert repr(text) in str(error.value)


# flag, text, path, value: every flag must arrive where it belongs
ARRIVES = [
    ("--model", "opt-13b", "model.name", "opt-13b"),
    ("--seq", "4k", "run.seq", 4096),
    ("--gen", "7", "run.gen", 7),
    ("--batch", "3", "run.batch", 3),
    ("--seed", "5", "run.seed", 5),
    ("--device", "cpu", "runtime.device", "cpu"),
    ("--dtype", "bfloat16", "model.dtype", "bfloat16"),
    ("--weights", "random", "model.weights", "random"),
    ("--weights-on-gpu", "1.0", "placement.weights_on_gpu", 1.0),
    ("--gpu-memory", "2GiB", "placement.gpu_memory_bytes", 2 * 1024**3),
    ("--gpu-window", "1k", "cache.gpu_window", 1024),
    ("--keep", "0.2", "selection.keep", 0.2),
    ("--keep-mass", "0.9", "selection.keep_mass", 0.9),
    ("--min-keep", "9", "selection.min_keep", 9),
    ("--lookahead", "off", "attention.lookahead", "off"),
    ("--key-type", "int8", "cache.key_type", "int8"),
    ("--sketch", "int2", "cache.sketch", "int2"),
    ("--sketch-home", "gpu", "cache.sketch_home", "gpu"),
    ("--schedule", "replay:r.json", "schedule.mode", "replay:r.json"),
    ("--target-ms", "12.5", "schedule.target_ms", 12.5),
]


@pytest.mark.parametrize(("flag", "text", "path", "value"), ARRIVES)
def test_a_flag_fills_its_setting(flag: str, text: str, path: str, value: Any) -> None:
    section, name = path.split(".")
    assert getattr(getattr(parse("--sketch", "int2", flag, text), section), name) == value  # a home needs a sketch


def test_every_flag_is_tried_above() -> None:
    assert [flag for flag, *_ in cli._FLAGS] == [flag for flag, *_ in ARRIVES]


def test_precedence(tmp_path: Path) -> None:
    """flag > --set > strategy file > default."""
    file = tmp_path / "mine.yaml"
    file.write_text("cache: {gpu_window: 100, sinks: 1}\nselection: {min_keep: 1}\n")
    config = parse(
        *("--gpu-window", "300", "--strategy", str(file), "--set", "cache.gpu_window=200", "--set", "cache.sinks=2")
    )
    assert config.cache.gpu_window == 300  # all three
    assert config.cache.sinks == 2  # --set over the file
    assert config.selection.min_keep == 1  # the file over the default
    assert config.run.gen == 32


def test_the_last_assignment_wins() -> None:
    assert parse("--set", "cache.sinks=1", "--set", "cache.sinks=2").cache.sinks == 2


def test_keep_and_keep_mass_from_two_layers() -> None:
    assert parse("--keep", "0.2").selection.keep_mass is None
    assert parse("--keep-mass", "0.9").selection.keep is None
    both = parse("--keep", "0.2", "--keep-mass", "0.9").selection
    assert (both.keep, both.keep_mass) == (0.2, 0.9)
    assert (parse().selection.keep, parse().selection.keep_mass) == (0.3, 0.95)


def test_the_source_of_a_flag_is_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"from --gpu-window"):
        parse("--gpu-window", "0")
    with pytest.raises(ConfigError, match=r"from --set cache.sinks=-1"):
        parse("--set", "cache.sinks=-1")


@pytest.mark.parametrize(
    "argv", [["--nonsense"], ["--seq"], ["--seq", "many"], ["--keep", "all"], ["--batch", "two"], ["stray"]]
)
def test_argparse_errors_are_config_errors(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert argv[-1] in str(error.value)


def test_a_flag_can_be_left_out() -> None:
    parser = Parser("test")
    add_engine_flags(parser, leave_out=["--gen"])
    with pytest.raises(ConfigError):
        parser.parse_args(["--gen", "3"])
    assert config_from(parser.parse_args(["--seq", "3"])).run.seq == 3


# How a command ends


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(lambda argv: len(argv), ["a", "b", "c"]) == 3

    def wrong(argv: list[str]) -> int:
        raise ConfigError("this is wrong")

    assert cli.run_command(wrong, []) == 2
    assert capsys.readouterr().err == "error: this is wrong\n"

    def stopped(argv: list[str]) -> int:
        raise KeyboardInterrupt

    assert cli.run_command(stopped, []) == 130

    def bug(argv: list[str]) -> int:
        raise RuntimeError("a bug is not a user's error")

    with pytest.raises(RuntimeError):
        cli.run_command(bug, [])


def test_the_command_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"run", "info"} <= set(available_commands())
    assert hybridgen_main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hybridgen ")
    assert hybridgen_main(["run", "--model", "nosuchmodel"]) == 2
    assert "unknown model 'nosuchmodel'" in capsys.readouterr().err
    assert hybridgen_main(["rnu"]) == 2
    assert "did you mean 'run'" in capsys.readouterr().err
    assert hybridgen_main([]) == 2
    assert "usage: hybridgen" in capsys.readouterr().err
