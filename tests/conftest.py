"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hybridgen  # noqa: F401  # before torch: it makes OpenMP wait passively

# The suite needs no network; a test of the hub's absence takes this away again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Its threads would come on top of torch's and the worker's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One more variant of the CPU kernels, for tests of kernels alone: nothing selects it by itself.
os.environ.setdefault("HYBRIDGEN_EMULATE_AMX", "1")
# What was once measured on this machine is not a test's business.
os.environ["HYBRIDGEN_MACHINE_FILE"] = os.devnull + ".json"

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in tests/gpu is a gpu test; where there is no CUDA device, these are skipped."""
    gpu_tests = []
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "gpu"):
            item.add_marker("gpu")
        if item.get_closest_marker("gpu"):
            gpu_tests.append(item)
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the texts and tasks that are too large for the repository."""
    for folder in (ROOT.parent / "shared" / "data", ROOT / "shared" / "data"):
        if folder.is_dir():
            return folder
    pytest.skip(f"no {ROOT.parent / 'shared' / 'data'}")
