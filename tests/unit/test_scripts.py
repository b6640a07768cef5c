"""The scripts: sound bash, one line for each failure, nothing downloaded here; and what an import does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The interpreter that .venv was made with: it starts fast, having no torch as a rule.
BASE = getattr(sys, "_base_executable", sys.executable)
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the scripts need of a checkout, without a .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "cpp_ext", tmp_path / "cpp_ext")
    for name in ("pyproject.toml", "requirements-cpu.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(tree: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(tree / "scripts" / "setup.sh")]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


def stub(folder: Path, name: str, body: str) -> str:
    """A program that stands in for another; returns a PATH that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("setup: ")
    return result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    "file", [*SCRIPTS, ROOT / "pyproject.toml", ROOT / "requirements-cpu.txt"], ids=lambda p: p.name
)
def test_no_registry_is_named(file: Path) -> None:
    text = file.read_text()
    assert "://" not in text
    assert "index-url" not in text


@pytest.mark.parametrize("script", ["setup.sh", "quickstart.sh", "test.sh"])
def test_wrong_interpreter(tree: Path, script: str) -> None:
    command = ["bash", str(tree / "scripts" / script)]
    env = os.environ | {"HYBRIDGEN_PYTHON": "/bin/false"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "HYBRIDGEN_PYTHON=/bin/false" in one_line(result)
    assert not (tree / ".venv").exists()


def test_no_python(tree: Path) -> None:
    # A shim that is found but does not start must not count.
    bin_folder = tree / "bin"
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
        path = stub(bin_folder, name, "echo not here >&2; exit 127")
    assert "no Python >= 3.11" in one_line(setup(tree, PATH=path, HYBRIDGEN_PYTHON=""))


def test_no_compiler(tree: Path) -> None:
    result = setup(tree, CXX="/bin/false", HYBRIDGEN_PYTHON=BASE)
    assert "no working C++17 compiler (/bin/false)" in one_line(result)


def test_too_little_disk_space(tree: Path) -> None:
    table = "echo Filesystem 1024-blocks Used Available Capacity Mounted; echo /dev/x 9 9 102400 9% /"
    path = stub(tree / "bin", "df", table)
    assert "free disk space" in one_line(setup(tree, PATH=path, HYBRIDGEN_PYTHON=BASE))


@pytest.mark.parametrize(
    ("pip_says", "reason"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", "no network"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Something else", "ERROR: Something else"),
    ],
)
def test_pip_failure_is_one_line_and_names_the_log(tree: Path, pip_says: str, reason: str) -> None:
    if subprocess.run([BASE, "-c", "import torch"], capture_output=True).returncode == 0:
        pytest.skip("this interpreter's own torch would be reused")
    # A .venv whose pip fails as told.
    (tree / ".venv").mkdir()
    pip = f'case "$*" in "-m pip "*) echo "{pip_says}"; exit 1;; esac; exec "{BASE}" "$@"'
    stub(tree / ".venv" / "bin", "python", pip)
    message = one_line(setup(tree, HYBRIDGEN_PYTHON=BASE))
    assert reason in message
    assert str(tree / "build" / "setup.log") in message


def test_import_is_light_and_makes_openmp_wait_passively() -> None:
    code = "import hybridgen, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == ["passive", "False"], result.stderr
