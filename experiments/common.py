"""What the experiments share: a grid of points, one JSON file a point, and one style of picture.

An experiment is a file that declares an `Experiment`, as EXPERIMENT, and hands it to `main`:

    python experiments/NAME.py [run] [--out DIR] [--smoke] [--part 1/2]   # measures what has no file in DIR yet
    python experiments/NAME.py plot FILE ... [--png PICTURE]              # table and picture, from JSON alone

A point's file is named by a hash of its settings, and written whole; a run that was killed goes on where it was. `run`
ends by writing all points of the grid to DIR/NAME.json, which is what lies in experiments/results, and the picture
beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from hybridgen.engine.report import current_commit
from hybridgen.errors import ConfigError, HybridGenError
from hybridgen.info import cpu_info, versions
from hybridgen.machine import this_cores, this_gpu
from hybridgen.output import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = Mapping[str, Any]
Result = dict[str, Any]
# One thread: where other tests run beside it, threads of torch that wait for each other take minutes.
SMOKE_MODEL = (
    "--model", "smollm2-135m", "--weights", "random", "--device", "cpu", "--set", "runtime.torch_threads=1",
)  # fmt: skip
RESULTS = Path("build/experiments")
WIDTH, HEIGHT = 7.0, 4.2  # inches, of one panel


@dataclass(frozen=True)
class Point:
    """One measurement. settings: all that its result depends on, but the code and the machine; JSON values.

    local: what `measure` needs beside them and no result depends on, such as the path of a file (settings tell which
    file it is: `fingerprint`); nothing of it is written down.
    """

    name: str
    settings: Settings
    local: Settings = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        key = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:10]
        return f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in self.name)}-{key}.json"


@dataclass(frozen=True)
class Experiment:
    """name: of its results. measure: a point's result, as JSON values. table, draw: from the points of a JSON file.

    points: of the flags, among which `out` is the folder of the points' files.
    """

    name: str
    about: str
    points: Callable[[argparse.Namespace], Sequence[Point]]
    measure: Callable[[Point], Result]
    table: Callable[[Sequence[Result]], str]
    draw: Callable[[Sequence[Result]], Figure] | None = None
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 if a point could not be measured (the others are all the same), 2 for a wrong input.

    Flags without a command are those of `run`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "run")
    parser = argparse.ArgumentParser(description=experiment.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="measure the points that have no file yet, then table and picture")
    runs.add_argument("--out", type=Path, metavar="DIR", help=f"where the points' files lie (default {RESULTS}/NAME)")
    runs.add_argument("--smoke", action="store_true", help="a small grid on a tiny or small model, for a test")
    runs.add_argument("--part", type=parse_part, default=(1, 1), metavar="n/N", help="the n-th of N parts of the grid")
    runs.add_argument("--minutes", type=float, help="begin no point after so many: a later call measures the rest")
    experiment.add_flags(runs)
    plots = commands.add_parser("plot", help="table and picture of what was measured")
    plots.add_argument("files", type=Path, nargs="+", metavar="FILE", help="NAME.json of one or more runs")
    plots.add_argument("--png", type=Path, metavar="FILE", help="the picture (default: beside the first file)")
    arguments = parser.parse_args(words)
    try:
        if arguments.command == "run":
            return _run(experiment, arguments)
        points = [point for file in arguments.files for point in load(file, experiment.name)]
    except (HybridGenError, OSError) as error:
        print(f"{experiment.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{experiment.name}: interrupted; started again, it measures what is missing", file=sys.stderr)
        return 130
    _show(experiment, points, arguments.png or arguments.files[0].with_suffix(".png"))
    return 0


def load(file: Path, name: str | None = None) -> list[Result]:
    """The points of a NAME.json: name, settings, result, provenance. ConfigError: it is none, or not of `name`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        of, found = content["experiment"], content["points"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is no result of an experiment (allowed: NAME.json of a run)") from None
    if name not in (None, of):
        raise ConfigError(f"{file} is a result of {of} (allowed: {name}.json of a run)")
    points: list[Result] = found
    return points


def fingerprint(file: Path) -> str:
    """Tells a file's content from another's, for a point's settings."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def call(command: str, *flags: str | int | float) -> Result:
    """The report of `python -m hybridgen.COMMAND FLAGS`, as `command_run` does it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command_run(command, *flags, "--report", str(path))
        report: Result = json.loads(path.read_text(encoding="utf-8"))
        return report


def command_run(command: str, *flags: str | int | float) -> None:
    """`python -m hybridgen.COMMAND FLAGS`, in this process; what it prints is kept for an error."""
    gc.collect()  # what the call before held of the GPU: the next one plans with what is free, and reports a peak
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    printed = io.StringIO()
    module, words = importlib.import_module(f"hybridgen.{command}"), [str(flag) for flag in flags]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = module.main(words)
    if status == 130:
        raise KeyboardInterrupt
    if status != 0:
        raise RuntimeError(f"hybridgen.{command} {' '.join(words)}: status {status}\n{printed.getvalue()[-2000:]}")


def provenance() -> Result:
    """By what, where and when something was measured."""
    return {
        "commit": current_commit(),
        "machine": {"cpu": cpu_info().model, "cores": this_cores(), "gpu": this_gpu()},
        "versions": versions(),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def new_figure(rows: int = 1, columns: int = 1, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure and its panels (a 2-D array of axes), in the one style of all experiments."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def shared_legend(figure: Figure, panels: Any, columns: int) -> None:
    """One legend below all panels, each name once."""
    found = (zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels.flat)
    handles = {label: handle for of_panel in found for handle, label in of_panel}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines: the first column begins at its left, the others end at their right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(row[at].rjust(width) if at else row[at].ljust(width) for at, width in enumerate(widths)).rstrip()
        for row in rows
    )


def declared_in(module: ModuleType) -> Experiment:
    """The experiment of a module of this folder."""
    found = [value for value in vars(module).values() if isinstance(value, Experiment)]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} declares {len(found)} experiments: it must have one, as EXPERIMENT")
    return found[0]


def parse_part(text: str) -> tuple[int, int]:
    """`2/3`: the second of three."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part, such as 1/2")
    return int(number), int(count)


def _run(experiment: Experiment, arguments: argparse.Namespace) -> int:
    out: Path = arguments.out or RESULTS / (f"{experiment.name}-smoke" if arguments.smoke else experiment.name)
    arguments.out = out
    out.mkdir(parents=True, exist_ok=True)
    grid = experiment.points(arguments)
    number, count = arguments.part
    mine = [point for index, point in enumerate(grid) if index % count == number - 1]
    left = [point for point in mine if not (out / point.file_name).exists()]
    failed, start = 0, time.monotonic()
    with tqdm(total=len(mine), initial=len(mine) - len(left), desc=experiment.name, unit="point") as bar:
        for point in left:
            if arguments.minutes is not None and time.monotonic() - start > 60 * arguments.minutes:
                bar.write("no more time: run it again for the rest", file=sys.stderr)
                break
            bar.set_postfix_str(point.name)
            try:
                result = experiment.measure(point)
            except Exception as error:
                failed += 1
                traceback.print_exc()
                bar.write(f"{point.name}: {error}", file=sys.stderr)
                continue
            content = {
                "name": point.name,
                "settings": dict(point.settings),
                "result": result,
                "provenance": provenance(),
            }
            write_whole("--out", out / point.file_name, json.dumps(content, indent=1))
            bar.update()
    files = (out / point.file_name for point in grid)
    points = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    whole = out / f"{experiment.name}.json"
    write_whole("--out", whole, json.dumps({"experiment": experiment.name, "points": points}, indent=1))
    _show(experiment, points, whole.with_suffix(".png"))
    return 1 if failed else 0


def _show(experiment: Experiment, points: Sequence[Result], picture: Path) -> None:
    """The table; the picture as PNG and PDF, where there is a matplotlib."""
    if not points:
        print("nothing was measured yet")
        return
    print(experiment.table(points))
    if experiment.draw is None:
        return
    try:
        import matplotlib  # noqa: F401  (extra `plots`)
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = experiment.draw(points)
    figure.savefig(picture, dpi=150)
    figure.savefig(picture.with_suffix(".pdf"), metadata={"CreationDate": None})
    print(f"picture: {picture}")
