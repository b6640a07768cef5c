"""Rows in one process of `hybridgen.compare`, over the same weights and host memory, which are made once.

A comparison keeps each row in a folder as soon as it is done; its point is written when all are. So a comparison that
was ended goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from common import Point, Result, Settings, command_run

SPEED_ONLY = ("--weights", "random", "--synthetic-kv")  # flags of a comparison whose quality nobody looks at


def write_strategy(folder: Path, name: str, settings: Settings) -> Path:
    """A strategy file, NAME.yaml; settings: by their dotted paths."""
    content: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        section, word = path.split(".")
        content.setdefault(section, {})[word] = value
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def comparison_point(name: str, settings: Settings, out: Path) -> Point:
    """A point with a folder of its own below `out`, for `compare`."""
    stem = Path(Point(name, settings).file_name).stem
    return Point(name, settings, {"folder": out / f"rows-{stem}"})


def compare(folder: Path, strategies: Sequence[str | Path], *flags: str | int | float) -> Result:
    """compare.json of `hybridgen.compare`, of strategies by name or file; what the folder has is not measured again."""
    folder.mkdir(parents=True, exist_ok=True)
    command_run("compare", *flags, "--strategies", ",".join(map(str, strategies)), "--out", str(folder))
    found: Result = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    return found
