"""The proof of the memory placement, in a guest with three memory nodes; skipped where its parts are not installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = 77


def test_pages_lie_where_each_policy_puts_them() -> None:
    command = ["bash", str(ROOT / "scripts" / "guest_test.sh")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if result.returncode == NOT_RUN:
        pytest.skip(result.stdout.strip().splitlines()[-1])
    assert result.returncode == 0, result.stdout + result.stderr
    passed = [line for line in result.stdout.splitlines() if line.startswith("guest: PASS ")]
    for policy in ("local", "semantic", "inverse", "interleave"):
        for part in ("keys", "values"):
            assert sum(f" pages, {policy}, {part}: " in line for line in passed) == 2, "on huge and on small pages"
    before_the_bind = [line for line in passed if "touched before the bind to node 2" in line]
    assert len(before_the_bind) == 2 and all(line.endswith(" on node 0") for line in before_the_bind)
