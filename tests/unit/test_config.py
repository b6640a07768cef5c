"""Settings: precedence, where a value came from, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hybridgen.config import (
    Config,
    Setting,
    build_config,
    load_strategy,
    merge_settings,
    parse_assignment,
    strategy_names,
    with_settings,
)
from hybridgen.errors import ConfigError, UnknownNameError


def config(**values: Any) -> Config:
    return build_config({path.replace("__", "."): Setting(value, "the test") for path, value in values.items()})


def test_defaults_are_those_of_the_contract() -> None:
    default = build_config({})
    assert (default.cache.gpu_window, default.cache.sinks) == (512, 4)
    assert (default.selection.keep, default.selection.keep_mass, default.selection.min_keep) == (0.3, 0.95, 64)
    assert default.attention.lookahead == "select"
    assert default.model.weights == "auto"
    assert default.model.exact_layers == "auto"  # 0, 1 and 2 where no file says otherwise
    assert (default.run.gen, default.run.batch, default.run.seed) == (32, 1, 0)
    assert default.schedule.mode == "fixed"
    assert default.sampling.temperature == 0.0


def test_a_config_is_frozen_and_goes_into_json() -> None:
    default = build_config({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.cache.sinks = 8  # type: ignore[misc]
    assert json.loads(json.dumps(default.to_dict()))["cache"]["gpu_window"] == 512


@pytest.mark.parametrize("name", strategy_names())
def test_every_strategy_in_the_repository_builds(name: str) -> None:
    assert isinstance(build_config(load_strategy(name)), Config)


def test_the_default_strategy_is_the_default_config() -> None:
    """`hybridgen` spells out what the dataclasses say: the two must not drift apart."""
    assert build_config(load_strategy("hybridgen")) == build_config({})
    assert build_config(load_strategy("full")).attention.executor == "full"


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("cache.sinks=8", 8),
        ("selection.keep=0.5", 0.5),
        ("selection.keep=5", 5),
        ("selection.keep=null", None),
        ("model.exact_layers=[0, 3]", [0, 3]),
        ("sampling.stop=['a=b', c]", ["a=b", "c"]),
        (" model.extend_positions =true", True),
        ("model.name=org/name", "org/name"),
    ],
)
def test_assignments_are_yaml(text: str, value: Any) -> None:
    (path, setting), *rest = parse_assignment(text).items()
    assert not rest
    assert path == text.partition("=")[0].strip()
    assert setting.value == value and type(setting.value) is type(value)
    assert setting.source == f"--set {text}"


@pytest.mark.parametrize("text", ["cache.sinks", "=8", " =8", "cache.sinks=[1", "a: b"])
def test_bad_assignments_name_the_text(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_assignment(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "result"),
    [
        ("selection.keep", 1, 1),
        ("selection.keep", 1.0, 1.0),
        ("selection.keep_mass", 1, 1.0),
        ("placement.weights_on_gpu", "auto", "auto"),
        ("placement.weights_on_gpu", 1, 1.0),
        ("runtime.worker_threads", "auto", "auto"),
        ("runtime.worker_threads", 3, 3),
        ("model.exact_layers", [], ()),
        ("model.exact_layers_mode", 2, 2),
        ("model.exact_layers_mode", "select", "select"),
        ("sampling.stop", ["x"], ("x",)),
        ("run.seq", None, None),
        ("run.check_answer", False, False),
    ],
)
def test_values_become_the_type_of_the_field(path: str, value: Any, result: Any) -> None:
    section, name = path.split(".")
    given = {path: Setting(value, "the test"), "selection.min_keep": Setting(0, "the test")}
    found = getattr(getattr(build_config(given), section), name)
    assert found == result and type(found) is type(result)


WRONG = [
    # path, value, what the message must say is allowed
    ("cache.gpu_window", 0, ">= 1"),
    ("cache.gpu_window", -5, ">= 1"),
    ("cache.gpu_window", 1.5, "int"),
    ("cache.gpu_window", True, "int"),
    ("cache.gpu_window", "many", "int"),
    ("cache.sinks", -1, ">= 0"),
    ("cache.sinks", None, "int"),
    ("selection.keep", 0.0, "(0, 1]"),
    ("selection.keep", 1.5, "(0, 1]"),
    ("selection.keep", -0.1, "(0, 1]"),
    ("selection.keep", float("nan"), "(0, 1]"),
    ("selection.keep", 0, "count >= 1"),
    ("selection.keep", -3, "count >= 1"),
    ("selection.keep", "most", "float or int or null"),
    ("selection.keep_mass", 0, "(0, 1]"),
    ("selection.keep_mass", 1.01, "(0, 1]"),
    ("selection.keep_mass", float("inf"), "(0, 1]"),
    ("selection.min_keep", -1, ">= 0"),
    ("placement.weights_on_gpu", 1.5, "[0, 1]"),
    ("placement.weights_on_gpu", -0.5, "[0, 1]"),
    ("placement.weights_on_gpu", "all", "'auto'"),
    ("placement.gpu_memory_bytes", 0, "> 0"),
    ("placement.host_memory_bytes", -1, "> 0"),
    ("runtime.prefill_chunk", -1, ">= 0"),
    ("runtime.micro_batch", -1, ">= 0"),
    ("runtime.worker_threads", -1, ">= 0"),
    ("runtime.mass_probe_interval", -1, ">= 0"),
    ("runtime.device", "tpu", "'cpu'"),
    ("model.dtype", "float64", "'bfloat16'"),
    ("model.dtype", 16, "'bfloat16'"),
    ("model.weights", "none", "'random'"),
    ("model.exact_layers", [-1], ">= 0"),
    ("model.exact_layers", [0.5], "list of int"),
    ("model.exact_layers", "three", "list of int"),
    ("model.exact_layers_mode", "none", "int or 'auto'"),
    ("model.exact_layers_mode", -1, "a number of layers >= 0"),
    ("cache.sketch_home", "cpu", "'auto' or 'host' or 'gpu'"),
    ("model.extend_positions", "yes please", "bool"),
    ("model.extend_positions", 1, "bool"),
    ("attention.lookahead", "maybe", "'off'"),
    ("attention.predictor", "y", "FILE.safetensors"),
    ("attention.predictor", 1, "str"),
    ("schedule.mode", "chaos", "fixed, feedback, paper or replay:FILE"),
    ("schedule.mode", "replay:", "fixed, feedback, paper or replay:FILE"),
    ("schedule.target_ms", 0.0, "> 0"),
    ("schedule.most_extra", 0.5, ">= 1"),
    ("schedule.paper_interval", -1, ">= 0"),
    ("runtime.torch_threads", 0, ">= 1"),
    ("sampling.temperature", -0.1, ">= 0"),
    ("sampling.top_k", -1, ">= 0"),
    ("sampling.top_p", 0, "(0, 1]"),
    ("sampling.top_p", 1.1, "(0, 1]"),
    ("sampling.stop", 3, "list of str"),
    ("run.seq", 0, ">= 1"),
    ("run.gen", 0, ">= 1"),
    ("run.batch", 0, ">= 1"),
    ("run.batch", [1, 2], "int"),
    ("run.seed", None, "int"),
]


@pytest.mark.parametrize(("path", "value", "allowed"), WRONG)
def test_a_wrong_value_is_told_what_where_and_what_is_allowed(path: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config({path: Setting(value, "a file of mine")})
    message = str(error.value)
    assert f"{path} = {tuple(value) if value == [-1] else value!r}" in message
    assert "from a file of mine" in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("placement.gpu_memory_bytes", "24GiB", 24 * 1024**3),
        ("placement.host_memory_bytes", "2GB", 2 * 1000**3),
        ("placement.gpu_memory_bytes", "1024", 1024),  # YAML makes it a number
        ("run.seq", "32k", 32768),
        ("run.gen", "1k", 1024),
        ("cache.gpu_window", "2k", 2048),
        ("runtime.prefill_chunk", "1K", 1024),
    ],
)
def test_sizes_and_token_counts_are_read_as_the_flags_read_them(
    path: str, text: str, value: int, tmp_path: Path
) -> None:
    section, name = path.split(".")
    (tmp_path / "mine.yaml").write_text(f"{section}: {{{name}: {text}}}\n")
    for settings in (parse_assignment(f"{path}={text}"), load_strategy(str(tmp_path / "mine.yaml"))):
        assert getattr(getattr(build_config(settings), section), name) == value


@pytest.mark.parametrize(
    ("path", "text", "example"),
    [
        ("placement.gpu_memory_bytes", "24Gib of it", "24GiB"),
        ("run.seq", "32kB", "32k"),
        ("runtime.micro_batch", "2k", "float or int"),  # sequences, not tokens
    ],
)
def test_other_texts_are_refused(path: str, text: str, example: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} = '{text}'.*--set.*allowed is int.*{example}|allowed is {example}"):
        build_config(parse_assignment(f"{path}={text}"))


def test_settings_by_path() -> None:
    changed = with_settings(config(), {"cache.sinks": 9, "run.gen": 3, "cache.gpu_window": 7})
    assert (changed.cache.sinks, changed.cache.gpu_window, changed.run.gen) == (9, 7, 3)
    assert changed == config(cache__sinks=9, cache__gpu_window=7, run__gen=3)


def test_something_must_limit_what_is_kept() -> None:
    with pytest.raises(ConfigError, match=r"selection\.keep and selection\.keep_mass"):
        config(selection__keep=None, selection__keep_mass=None)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("cache.sink", "cache.sinks"),
        ("selection.keepmass", "selection.keep_mass"),
        ("sinks", "cache.sinks"),
        ("cache.gpu_windw", "cache.gpu_window"),
    ],
)
def test_an_unknown_setting_is_told_the_nearest(path: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config({path: Setting(1, f"--set {path}=1")})
    message = str(error.value)
    assert f"unknown setting {path!r} (from --set {path}=1)" in message
    hint = message.partition("did you mean")[2].partition("Known")[0]
    assert near in hint
    assert "runtime.worker_threads" in message, "all known paths are listed"


# Precedence


def test_later_layers_win() -> None:
    file = {"cache.sinks": Setting(1, "file"), "cache.gpu_window": Setting(1, "file")}
    assigned = {"cache.sinks": Setting(2, "set")}
    flag = {"cache.sinks": Setting(3, "flag")}
    merged = merge_settings(file, assigned, flag)
    assert merged["cache.sinks"] == Setting(3, "flag")
    assert merged["cache.gpu_window"] == Setting(1, "file")
    assert file["cache.sinks"].value == 1, "the layers are the caller's"


def test_keep_alone_and_mass_alone_switch_the_other_off() -> None:
    """contracts.md: given alone, --keep-mass has no cap, and --keep has no mass."""
    strategy = load_strategy("hybridgen")
    keep = build_config(merge_settings(strategy, {"selection.keep": Setting(0.1, "--keep")}))
    assert (keep.selection.keep, keep.selection.keep_mass) == (0.1, None)
    mass = build_config(merge_settings(strategy, {"selection.keep_mass": Setting(0.9, "--keep-mass")}))
    assert (mass.selection.keep, mass.selection.keep_mass) == (None, 0.9)
    both = {"selection.keep": Setting(0.1, "--keep"), "selection.keep_mass": Setting(0.9, "--keep-mass")}
    pair = build_config(merge_settings(strategy, both))
    assert (pair.selection.keep, pair.selection.keep_mass) == (0.1, 0.9)
    unchanged = build_config(merge_settings(strategy, {"cache.sinks": Setting(2, "--set")}))
    assert (unchanged.selection.keep, unchanged.selection.keep_mass) == (0.3, 0.95)


# Strategy files


def test_a_strategy_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("cache: {sinks: 2, gpu_window: 64}\nattention:\n  lookahead: 'off'\n")
    settings = load_strategy(str(file))
    assert settings["cache.sinks"] == Setting(2, f"strategy file {file}")
    assert build_config(settings).attention.lookahead == "off"


def test_off_without_quotes_is_the_mode_off(tmp_path: Path) -> None:
    """YAML 1.1 reads a bare `off` as false; a user means the mode."""
    file = tmp_path / "mine.yaml"
    file.write_text("attention:\n  lookahead: off\n")
    assert build_config(load_strategy(str(file))).attention.lookahead == "off"
    assert build_config(parse_assignment("attention.lookahead=off")).attention.lookahead == "off"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "must map"),
        (b"- a\n- b\n", "must map"),
        (b"just words", "must map"),
        (b"a: [1\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
    ],
)
def test_a_damaged_strategy_file_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_strategy(str(file))
    assert str(file) in str(error.value)


def test_a_missing_strategy_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_strategy(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("content", ["1: 2", "attention:", "cache: {sinks: {deep: 1}}", "cache.sinks.deep: 1"])
def test_keys_of_a_strategy_file_are_checked(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match="unknown setting") as error:
        build_config(load_strategy(str(file)))
    assert str(file) in str(error.value)


def test_an_unknown_strategy_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as error:
        load_strategy("hybrdgen")
    message = str(error.value)
    assert "'hybrdgen'" in message and "did you mean 'hybridgen'" in message and "full" in message


@pytest.mark.parametrize(
    ("strategy", "setting", "said"),
    [
        ("aog", {"cache.sketch": "int4"}, r"cache\.sketch = 'int4' with attention\.executor = 'streamed'"),
        ("aoc", {"cache.sketch": "int2"}, r"cache\.sketch = 'int2' with attention\.executor = 'on_cpu'"),
        ("aog", {"cache.key_type": "int8"}, r"cache\.key_type = 'int8' with .*'streamed'.*allowed: 'auto'"),
        ("aoc", {"cache.compress": "int4"}, r"cache\.compress = 'int4' with .*'on_cpu'.*allowed: 'none'.*'streamed'"),
        ("hybridgen", {"cache.compress": "int8"}, r"cache\.compress = 'int8' with .*'hybrid'.*allowed: 'none'"),
        ("aog", {"cache.compress": "int2"}, r"cache\.compress = 'int2'.*'none' or 'int8' or 'int4'"),
        ("aog", {"placement.compress_weights": "int2"}, r"compress_weights = 'int2'.*'none' or 'int8' or 'int4'"),
        ("aog", {"cache.key_type": "fp16"}, "allowed: 'auto'"),
        ("aoc", {"cache.key_type": "int8"}, None),
        ("aoc", {"selection.keep": 0.1, "attention.lookahead": "off", "schedule.mode": "feedback"}, None),
    ],
)
def test_what_does_not_go_with_attention_to_all(strategy: str, setting: dict[str, Any], said: str | None) -> None:
    given = {path: Setting(value, "test") for path, value in setting.items()}
    settings = merge_settings(load_strategy(strategy), given)
    if said is None:
        assert build_config(settings).attention.executor == "on_cpu"
        return
    with pytest.raises(ConfigError, match=said):
        build_config(settings)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cache.sketch_home": "gpu"}, "without a sketch"),
        ({"cache.sketch_home": "gpu", "cache.sketch": "int2", "schedule.mode": "feedback"}, "'feedback'"),
        ({"cache.sketch_home": "gpu", "cache.sketch": "int2", "schedule.mode": "paper"}, "'paper'"),
    ],
)
def test_where_the_gpu_scores_there_is_a_sketch_and_nothing_to_shorten(values: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config({path: Setting(value, "test") for path, value in values.items()})


@pytest.mark.parametrize(("short", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_dtypes(short: str, dtype: str) -> None:
    assert build_config(parse_assignment(f"model.dtype={short}")).model.dtype == dtype
