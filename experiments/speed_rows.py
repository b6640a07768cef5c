"""Measured speeds as rows, from whatever file has them: what the experiments on speed share.

Read are a compare.json of `hybridgen.compare`, a NAME.json of an experiment whose points hold such comparisons or
reports of `hybridgen.run`, and the rows of decode_table.py as text, of which the last of a name counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decode_table

from hybridgen.config import Config, Setting, Settings, build_config, load_strategy, merge_settings, with_settings
from hybridgen.engine.build import choose_model
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.errors import ConfigError
from hybridgen.predict import planned_choice

EXACT = "exact"  # method of what attends to every token
# Decode rows whose memory plan keeps fewer of the exact layers on the device, as their reports say.
RESIDENT_BY_PLAN = {"opt-13b 16k x 4 int8 10%": 1}
_POLICIES = {"streaming_llm": "streaming-llm"}


@dataclass(frozen=True)
class SpeedRow:
    """One strategy's decode steps. ms: a step's median, beside its 10th and 90th percentile (p10 may be unknown)."""

    label: str  # its name; in an experiment's JSON, the model's before that of a comparison's strategy
    source: str  # the file's name
    config: Config
    tokens: int
    ms: float
    p10: float | None
    p90: float | None
    budget: float
    layers: int
    exact: int  # how many of them are resident
    limit_ms: float | None = None
    # How fast the CPU read keys before and after it, on average, and what that and DMA moved together, where known.
    scan_gbps: float | None = None
    beside_gbps: float | None = None

    @property
    def method(self) -> str:
        """As match_budgets.py calls it; `exact`, or a name it does not know."""
        return method_of(self.config)

    @property
    def each(self) -> float:
        """What of the context a layer attends to that is not resident."""
        others = self.layers - self.exact
        return 1.0 if others == 0 else (self.budget * self.layers - self.exact) / others

    @property
    def on_device(self) -> bool:
        """Whether all KV that is left lies there."""
        executor = self.config.attention.executor
        return executor == "full" or (executor == "evicting" and self.config.eviction.home == "device")


def method_of(config: Config) -> str:
    """Whose quality it has."""
    executor, cache = config.attention.executor, config.cache
    if executor == "evicting":
        return _POLICIES.get(config.eviction.policy, config.eviction.policy)
    if executor != "hybrid":
        return EXACT
    if cache.sketch in ("partial", "pages"):
        return {"partial": "infinigen", "pages": "quest"}[cache.sketch]
    if config.attention.lookahead != "select":
        return "hybridgen-paper" if config.attention.lookahead == "logits" else "hybridgen-off"
    return "hybridgen" if cache.sketch == "none" else f"hybridgen-{cache.sketch}"


def config_of(content: Mapping[str, Any]) -> Config:
    """Of a report; settings that it does not have yet have their defaults."""
    flat = {f"{section}.{name}": value for section, values in content.items() for name, value in values.items()}
    return build_config({path: Setting(value, "a result") for path, value in flat.items()})


def read_rows(file: Path) -> list[SpeedRow]:
    """All that a file holds; ConfigError if that is nothing."""
    text = file.read_text(encoding="utf-8")
    rows = list(_of_text(text, file.name) if file.suffix == ".txt" else _of_json(json.loads(text), file.name))
    if not rows:
        raise ConfigError(f"{file}: no measured speed in it (allowed: compare.json, an experiment's JSON, decode rows)")
    return rows


def _of_json(content: Mapping[str, Any], source: str) -> Iterator[SpeedRow]:
    if "points" in content:
        for point in content["points"]:
            yield from _of_json({"label": point["name"], **point["result"]}, source)
    elif "strategies" in content:
        for entry in content["strategies"]:
            if entry["summary"] is not None:
                label = f"{content['model']}: {entry['name']}" if "label" in content else entry["name"]
                yield _row(label, source, entry["config"], entry["summary"], content)
    elif "decode_ms_per_token" in content and "config" in content:
        yield _row(content.get("label", content["strategy"]), source, content["config"], content, content)


def _row(
    label: str, source: str, config: Mapping[str, Any], found: Mapping[str, Any], about: Mapping[str, Any]
) -> SpeedRow:
    settings, spent, limit = config_of(config), found["decode_ms_per_token"], found.get("limit_ms")
    layers, exact = _layers(settings)
    tokens = about["prompt_tokens"]
    return SpeedRow(
        label, source, settings, tokens if isinstance(tokens, int) else max(tokens), spent["median"], spent.get("p10"),
        spent["p90"], found["budget"], layers, exact, limit["limit"] if isinstance(limit, Mapping) else limit,
    )  # fmt: skip


def _of_text(text: str, source: str) -> Iterator[SpeedRow]:
    """Rows of `decode_table.py table`: the last call's of each name."""
    for row in decode_table.ROWS:
        found = re.findall(rf"^{re.escape(row.name)} +(\d.*)$", text, re.MULTILINE)
        if found:
            cells = found[-1].split()
            config = _config_of_flags(row.flags, RESIDENT_BY_PLAN.get(row.name, "resident"))
            layers, exact = _layers(config)
            assert config.run.seq is not None
            limit = None if cells[2] == "-" else float(cells[2])
            around = (*cells[11:13], "-", "-")  # older calls do not have them
            rates = [sum(map(float, cell.split("/"))) / 2 if "/" in cell else None for cell in around]
            yield SpeedRow(
                row.name, source, config, config.run.seq, float(cells[0]), None, float(cells[1]), float(cells[8]),
                layers, exact, limit, *rates[:2],
            )  # fmt: skip


def _config_of_flags(flags: tuple[str, ...], exact_layers_mode: str | int) -> Config:
    """As `hybridgen.run` has it with the flags of a row."""
    from hybridgen.cli import Parser, add_engine_flags, given_settings

    parser = Parser("decode_table")
    add_engine_flags(parser)
    arguments = parser.parse_args([*flags, "--weights", "random", "--gen", "40", "--schedule", "fixed"])
    on_gpu: Settings = {"model.exact_layers_mode": Setting(exact_layers_mode, "the plan")}
    config = build_config(merge_settings(on_gpu, load_strategy(arguments.strategy), given_settings(arguments)))
    return with_settings(config, {"model.dtype": str(planned_choice(config).dtype).removeprefix("torch.")})


def _layers(config: Config) -> tuple[int, int]:
    layers = choose_model(with_settings(config, {"runtime.device": "cpu"})).spec.num_layers
    return layers, layer_modes(config, layers).count("resident")
