"""The Triton kernels in Triton's interpreter, on the CPU, against their torch twins.

In a process of their own: the interpreter is chosen when Triton is imported. The checks are the program that
NVIDIA's sanitizer runs on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize_kernels.py"


def test_kernels_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.endswith("OK\n"), done.stderr[-2000:]
