"""A model and a config as if there were a GPU: what a memory budget is given."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hybridgen.config import Config, Setting, build_config
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice


@lru_cache(maxsize=32)
def choice_of(alias: str, device: str = "cuda", dtype: torch.dtype = torch.float16) -> ModelChoice:
    choice = build.choose_model(config_of(**{"model.name": alias, "runtime.device": "cpu"}))
    return ModelChoice(choice.location, choice.spec, choice.family, torch.device(device, 0), dtype)


def config_of(**values: Any) -> Config:
    """values: by dotted path."""
    return build_config({path: Setting(value, "the test") for path, value in values.items()})
