"""Results item by item, in a file that grows: what a killed evaluation had finished is there for the next one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridgen.errors import ConfigError
from hybridgen.output import write_whole

Item = dict[str, Any]
"""A question's results: at least its `id`."""


class ItemStore:
    """`NAME-KEY.jsonl`: a line that says what was measured how, then a line an item.

    KEY stands for all that a result depends on, but the code. Items come in batches, each by one write; of a batch
    that was not wholly written nothing is kept, as what is computed together is computed together again.
    """

    def __init__(self, folder: Path | None, name: str, identity: Mapping[str, Any]) -> None:
        """folder: made if it is not there; None: nothing is kept."""
        text = json.dumps(identity, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        self._head = json.dumps({"task": name, "key": key, "identity": identity}, sort_keys=True)
        self.path = None if folder is None else folder / f"{name}-{key}.jsonl"
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--out {folder}: {error.strerror or error}") from None

    def load(self, batches: Iterable[Sequence[int]]) -> dict[int, Item]:
        """By their id, the items of those batches that are there whole; the rest is removed from the file."""
        if self.path is None:
            return {}
        found, lines = self._read()
        kept = {}
        for batch in batches:
            if all(index in found for index in batch):
                kept.update({index: found[index] for index in batch})
        content = [self._head, *(json.dumps(item) for item in kept.values())]
        if lines != content:
            write_whole("--out", self.path, "".join(f"{line}\n" for line in content))
        return kept

    def append(self, items: Sequence[Item]) -> None:
        """A batch. Once this returns, it outlives the process."""
        if self.path is None:
            return
        try:
            with open(self.path, "ab") as file:
                file.write("".join(f"{json.dumps(item)}\n" for item in items).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"--out {self.path}: {error.strerror or error}") from None

    def _read(self) -> tuple[dict[int, Item], list[str]]:
        """Sound items, and all lines. A file with another head holds nothing of use."""
        assert self.path is not None
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return {}, []
        except OSError as error:
            raise ConfigError(f"--out {self.path}: {error.strerror or error}") from None
        found: dict[int, Item] = {}
        if lines[0] != self._head:
            print(f"{self.path} is damaged and is measured again")
            return {}, []
        for line in lines[1:-1]:  # what follows the last line break is nothing, or half a line
            try:
                item = json.loads(line)
                found[int(item["id"])] = item
            except (ValueError, KeyError, TypeError):
                print(f"{self.path}: a damaged line is measured again")
        return found, lines[:-1] if lines[-1] == "" else lines
