"""A model of 26 GB in 8 GiB of memory: the weights that do not fit are read from disk in every step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybridgen.offload.disk import RESERVE_BYTES, free_bytes
from hybridgen.placement.plan import GIB

LAYERS_BYTES = 25_200_000_000  # of OPT-13B, in bfloat16
# Python, torch and its libraries take the rest; on a machine without a GPU a plan does not count them.
PLANNED = "7GiB"


@pytest.mark.slow
def test_opt_13b_in_8_gib_of_memory(tmp_path: Path) -> None:
    """Minutes: 25 GB are written once, then read three times. Mapped pages count as memory."""
    folder = tmp_path / "offload"
    if free_bytes(folder) < LAYERS_BYTES + 2 * RESERVE_BYTES:
        pytest.skip(f"{free_bytes(folder) / 1e9:.0f} GB are free in {tmp_path}, 28 are needed")
    if psutil.virtual_memory().available < 9 * GIB:
        pytest.skip("less than 9 GiB of memory are available")
    report = tmp_path / "report.json"
    job = ["--model", "opt-13b", "--weights", "random", "--dtype", "bfloat16", "--seq", "64", "--gen", "2"]
    settings = [f"placement.host_memory_bytes={PLANNED}", f"placement.disk_dir={folder}", "runtime.device=cpu"]
    command = [sys.executable, "-m", "hybridgen.run", *job, "--report", str(report)]
    command += [word for setting in settings for word in ("--set", setting)]
    try:
        subprocess.run(command, check=True)
        files = [file.stat().st_size for file in folder.iterdir()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(report.read_text())
    assert len(files) == 1 and files[0] > LAYERS_BYTES * 0.99
    assert found["generated_tokens"] == [2] and found["placement"]["weights"]["disk"] > 0.8
    assert found["bytes_per_token"]["disk"] > 0.8 * 25.1e9
    assert found["peak_host_bytes"] <= 8 * GIB
