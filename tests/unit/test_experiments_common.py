"""What the experiments share: points have files, a run goes on where it was, a fault costs one point."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import pytest
from common import Experiment, Point, Result, load, main

from hybridgen.errors import ConfigError

GRID = tuple(range(7))


class Toy:
    """Squares numbers, and remembers which; `fails`: those for which it does not work out."""

    def __init__(self, *fails: int) -> None:
        self.measured: list[int] = []
        self.fails = set(fails)
        self.experiment = Experiment("toy", "squares", self._points, self._measure, self._table)

    def _points(self, arguments: argparse.Namespace) -> list[Point]:
        return [Point(f"no. {n}", {"n": n}, {"seen": n}) for n in (GRID[:2] if arguments.smoke else GRID)]

    def _measure(self, point: Point) -> Result:
        number = point.settings["n"]
        assert point.local["seen"] == number
        if number in self.fails:
            raise RuntimeError(f"{number} does not work out")
        self.measured.append(number)
        return {"square": number**2}

    def _table(self, points: Sequence[Result]) -> str:
        return "squares: " + " ".join(str(point["result"]["square"]) for point in points)


def squares(out: Path) -> dict[int, int]:
    return {point["settings"]["n"]: point["result"]["square"] for point in load(out / "toy.json")}


def test_a_run_measures_all_and_writes_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy()
    assert main(toy.experiment, ["--out", str(tmp_path)]) == 0  # flags alone: run
    assert toy.measured == list(GRID) and squares(tmp_path) == {n: n * n for n in GRID}
    assert "squares: 0 1 4 9 16 25 36" in capsys.readouterr().out
    whole = json.loads((tmp_path / "toy.json").read_text())
    assert whole["experiment"] == "toy"
    for point in whole["points"]:
        assert set(point) == {"name", "settings", "result", "provenance"}
        assert set(point["provenance"]) == {"commit", "machine", "versions", "measured_at"}
        assert "seen" not in json.dumps(point)  # local
    assert str(tmp_path) not in json.dumps(whole)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    assert main(Toy().experiment, ["run", "--out", str(tmp_path)]) == 0
    lost = [path for path in tmp_path.glob("no*.json") if "no._3-" in path.name or "no._5-" in path.name]
    assert len(lost) == 2
    for path in lost:
        path.unlink()
    again = Toy()
    assert main(again.experiment, ["run", "--out", str(tmp_path)]) == 0
    assert again.measured == [3, 5] and len(squares(tmp_path)) == len(GRID)
    third = Toy(*GRID)
    assert main(third.experiment, ["run", "--out", str(tmp_path)]) == 0
    assert third.measured == [] and len(squares(tmp_path)) == len(GRID)


def test_a_point_that_fails_loses_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy(0, 4)
    assert main(toy.experiment, ["run", "--out", str(tmp_path)]) == 1
    assert sorted(squares(tmp_path)) == [1, 2, 3, 5, 6]
    assert "4 does not work out" in capsys.readouterr().err
    mended = Toy()
    assert main(mended.experiment, ["run", "--out", str(tmp_path)]) == 0
    assert mended.measured == [0, 4]


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_are_the_grid_and_share_nothing(tmp_path: Path, parts: int) -> None:
    measured = []
    for number in range(1, parts + 1):
        toy = Toy()
        assert main(toy.experiment, ["run", "--out", str(tmp_path), "--part", f"{number}/{parts}"]) == 0
        assert parts > len(GRID) or toy.measured
        measured += toy.measured
    assert sorted(measured) == list(GRID)
    assert len(squares(tmp_path)) == len(GRID)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "a/b"])
def test_no_such_part(text: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(Toy().experiment, ["run", "--out", str(tmp_path), "--part", text])
    assert caught.value.code == 2


def test_no_point_begins_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 60))  # a minute a look
    monkeypatch.setattr(common.time, "monotonic", lambda: next(now))
    toy = Toy()
    assert main(toy.experiment, ["run", "--out", str(tmp_path), "--minutes", "3"]) == 0
    assert toy.measured == [0, 1, 2]
    assert main(toy.experiment, ["run", "--out", str(tmp_path)]) == 0
    assert toy.measured == list(GRID)


def test_a_file_is_named_by_all_settings_and_by_nothing_else() -> None:
    base: dict[str, Any] = {"model": "opt-13b", "flags": ("--seq", "4k"), "keep": 0.1}
    name = Point("a b/c", base).file_name
    assert name.startswith("a_b_c-") and name.endswith(".json")
    assert Point("a b/c", dict(reversed(base.items()))).file_name == name  # order does not count
    assert Point("a b/c", base, {"path": "/somewhere"}).file_name == name
    for changed in ({"keep": 0.2}, {"flags": ("--seq", "8k")}, {"more": None}):
        assert Point("a b/c", base | changed).file_name != name


def test_a_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def points(arguments: argparse.Namespace) -> list[Point]:
        raise ConfigError("give a text")

    toy = Toy().experiment
    assert main(Experiment("toy", "", points, toy.measure, toy.table), ["run", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "toy: give a text\n"
    assert main(toy, ["plot", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_several_runs_are_plotted_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number in (1, 2):
        out = tmp_path / str(number)
        main(Toy().experiment, ["run", "--out", str(out), "--part", f"{number}/2"])
        files.append(str(out / "toy.json"))
    capsys.readouterr()
    assert main(Toy().experiment, ["plot", *files]) == 0
    assert capsys.readouterr().out == "squares: 0 4 16 36 1 9 25\n"


def test_a_command_of_hybridgen_gives_its_report_or_says_what_it_printed() -> None:
    with pytest.raises(RuntimeError, match="no-such-model"):
        common.call("run", "--model", "no-such-model")
