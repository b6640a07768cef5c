"""The folder of a comparison: a JSON file a strategy and round, the reference, and the table, all written whole."""

from __future__ import annotations

import json
import statistics
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridgen.errors import ConfigError
from hybridgen.evaluation.comparison import Reference, summarise
from hybridgen.evaluation.comparison_table import format_comparison, write_plot
from hybridgen.output import write_whole

_NEEDED = ("model", "weights", "device", "dtype", "batch", "machine")  # what compare.json has of a round's report
_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, statistics.StatisticsError,
)  # fmt: skip


class ComparisonStore:
    """`STRATEGY-rROUND-KEY.json` and `reference-KEY.npz`, where KEY stands for all that a result depends on."""

    def __init__(self, folder: Path | None) -> None:
        """folder: made if it is not there; None: nothing is kept."""
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out {folder}: {error.strerror or error}") from None

    def rounds(self, strategy: str, key: str, count: int) -> dict[int, dict[str, Any]]:
        """Those of the first `count` rounds that are there, sound."""
        found = {}
        for index in range(count):
            path = self._path(strategy, key, index)
            if path is None or not path.is_file():
                continue
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                _check(content)
            except _DAMAGED as error:
                print(f"{path} is damaged ({_reason(error)}) and is measured again")
                continue
            found[index] = content
        return found

    def save(self, strategy: str, key: str, index: int, report: Mapping[str, Any]) -> None:
        path = self._path(strategy, key, index)
        if path is not None:
            write_whole("--out", path, json.dumps(report, indent=1))

    def reference(self, key: str) -> Reference | None:
        """The one that is there; None if it has to be made."""
        if self._folder is None or not (path := self._reference_path(key)).is_file():
            return None
        try:
            return Reference.load(path)
        except (*_DAMAGED, IndexError, EOFError, zipfile.BadZipFile) as error:
            print(f"{path} is damaged ({_reason(error)}) and is made again")
            return None

    def save_reference(self, key: str, reference: Reference) -> None:
        if self._folder is not None:
            reference.save(self._reference_path(key))

    def save_content(self, content: Mapping[str, Any] | None, plot: bool = False) -> list[str]:
        """compare.json, compare.txt and, if asked for, compare.png; what the user should be told."""
        if self._folder is None or content is None:
            return []
        write_whole("--out", self._folder / "compare.json", json.dumps(content, indent=1))
        write_whole("--out", self._folder / "compare.txt", format_comparison(content) + "\n")
        said = [f"table and JSON: {self._folder / 'compare.txt'}, {self._folder / 'compare.json'}"]
        if plot:
            missing = write_plot(content, self._folder / "compare.png")
            path = self._folder / "compare.png"
            said.append(f"plot: {path}" if missing is None else f"no {path}: {missing}")
        return said

    def _path(self, strategy: str, key: str, index: int) -> Path | None:
        return None if self._folder is None else self._folder / f"{strategy}-r{index}-{key}.json"

    def _reference_path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"reference-{key}.npz"


def _check(content: Any) -> None:
    """Whether it is a report of a round, with all that is read of it; one of _DAMAGED if not."""
    summary, comparison = summarise([content]), content["comparison"]
    names = [comparison[name] for name in ("reference", "reference_name")]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("no reference is named")
    if None in (summary["budget"], *summary["bytes_per_token"].values()):
        raise ValueError("budget or bytes are missing")
    for name in _NEEDED:
        content[name]


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
