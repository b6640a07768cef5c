"""The README's commands parse, and its tree names what is there."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from hybridgen import cli
from hybridgen.__main__ import available_commands
from hybridgen.errors import HybridGenError

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "experiments" / "RESULTS.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="the README is not written yet")


def code_blocks(file: Path = README) -> list[str]:
    return re.findall(r"^ *```[^\n]*\n(.*?)^ *```", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Words of each command of hybridgen in a code block; continued lines joined, comments left out."""
    found = []
    for block in code_blocks() + code_blocks(RESULTS):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True) if "hybridgen" in line else []
            words = words[: next((i for i, word in enumerate(words) if word in ("|", "&&", ">", ";")), None)]
            for start, word in enumerate(words):
                if word == "-m" and start + 1 < len(words) and words[start + 1].startswith("hybridgen."):
                    found.append([words[start + 1].removeprefix("hybridgen."), *words[start + 2 :]])
            if words and words[0] == "hybridgen":
                found.append(words[1:])
    return found


class Parsed(Exception):  # noqa: N818
    """The arguments were good: nothing more is wanted."""


def test_every_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = cli.Parser.parse_args

    def only_parse(self: cli.Parser, *args: object, **kwargs: object) -> None:
        arguments = parse(self, *args, **kwargs)  # type: ignore[call-overload]
        if hasattr(arguments, "set") and hasattr(arguments, "strategy"):
            for text in arguments.set:
                cli.build_config(cli.parse_assignment(text))
        raise Parsed

    monkeypatch.setattr(cli.Parser, "parse_args", only_parse)
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", only_parse)
    found = commands()
    assert found, "the README shows no command"
    assert any(words[0] == "run" for words in found)
    faults = []
    for words in found:
        name, *rest = words
        if name not in available_commands():
            faults.append(f"{shlex.join(words)}: no such command")
            continue
        rest = ["x" if re.fullmatch(r"[A-Z]|<.*>", word) else word for word in rest]
        module = importlib.import_module(f"hybridgen.{name}")
        monkeypatch.setattr(module, "run_command", lambda command, argv: command(list(argv)), raising=False)
        try:
            module.main(rest)
            faults.append(f"{shlex.join(words)}: was run, not parsed")
        except Parsed:
            pass
        except (HybridGenError, SystemExit) as error:
            faults.append(f"{shlex.join(words)}: {error}")
    assert not faults, "\n".join(faults)


def tree_paths() -> list[str]:
    """Paths that the annotated tree names: folders by their indentation, and every file on a line."""
    tree = next((block for block in code_blocks() if re.search(r"^\W*hybridgen/", block, re.MULTILINE)), "")
    paths: list[str] = []
    folders: list[tuple[int, str]] = []  # those that the running line lies in, with their indentation
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip("│├└─ "))
        while folders and folders[-1][0] >= indent:
            folders.pop()
        entry = line[indent:].split(" ")[0]
        if entry.endswith("/"):
            folders.append((indent, entry))
            paths.append("".join(name for _, name in folders))
        base = "".join(name for _, name in folders)
        paths += [base + name for name in re.findall(r"[\w/-]+\.(?:py|sh|yaml|cpp|toml|md)\b", line)]
    return paths


def test_the_tree_names_what_is_there() -> None:
    paths = tree_paths()
    assert len(paths) > 5, "the README has no annotated tree"
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_files_named_in_the_text_exist() -> None:
    """`scripts/x.sh`, `hybridgen/...`, `configs/...` in backticks or links."""
    missing = []
    for file in (README, RESULTS):
        text = file.read_text(encoding="utf-8")
        named = set(re.findall(r"`((?:scripts|hybridgen|configs|cpp_ext|experiments|tests)/[\w./-]+)`", text))
        links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
        missing += [name for name in named if not (ROOT / name).exists()]
        missing += [link for link in links if not (file.parent / link).exists()]
    assert not missing
