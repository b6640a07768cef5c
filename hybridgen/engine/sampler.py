"""The next token from logits: greedy, or a draw after temperature, top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.config import SamplingConfig


class Sampler:
    """Draws with its own seeded generator, so that a run repeats."""

    def __init__(self, config: SamplingConfig, device: torch.device, seed: int) -> None:
        self._config = config
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """float32 logits [B, vocab] -> token ids, int64 [B]."""
        config = self._config
        if config.temperature == 0.0:
            return logits.argmax(dim=-1)
        logits = logits / config.temperature
        if 0 < config.top_k < logits.shape[-1]:
            worst_kept = torch.topk(logits, config.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < worst_kept, -torch.inf)
        probabilities = torch.softmax(logits, dim=-1)
        if config.top_p < 1.0:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # the most likely token always stays
            ordered = ordered.masked_fill(before >= config.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(-1)
