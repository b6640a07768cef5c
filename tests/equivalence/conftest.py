"""Fixtures of the equivalence tests."""

from __future__ import annotations

import pytest

from tests.equivalence.zoo import ModelZoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    return ModelZoo(tmp_path_factory.mktemp("tiny-models"))
