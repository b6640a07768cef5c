"""The tiny models, made once a session, as directories, as transformers models and as dense ones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.equivalence.dense_simulation import DenseModel
from tests.equivalence.tiny_models import load_hf, save_tiny_model


class ModelZoo:
    """Everything the tests need of a tiny model, by its name, made at the first use."""

    def __init__(self, parent: Path) -> None:
        self.directory = lru_cache(None)(lambda name: save_tiny_model(name, parent))
        self.dense = lru_cache(None)(lambda name: DenseModel(self.directory(name)))
        self.hf = lru_cache(None)(self._hf)
        self.greedy = lru_cache(None)(self._greedy)

    def _hf(self, name: str, dtype: torch.dtype = torch.float32) -> Any:
        return load_hf(self.directory(name), dtype)

    def _greedy(self, name: str, prompt: tuple[int, ...], steps: int) -> list[int]:
        """transformers' own greedy decoding of one prompt, in float32."""
        with torch.inference_mode():
            output = self.hf(name).generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=steps,
                do_sample=False,
            )
        return [int(token) for token in output[0, len(prompt) :]]
