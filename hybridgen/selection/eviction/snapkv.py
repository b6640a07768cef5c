"""SnapKV (Li et al., arXiv 2404.14469): the end of the prompt says what of it will be needed.

The last `recent` queries of the prompt vote: their attention probabilities on the older keys, summed over these
queries, mean over the group's query heads (the official code knows no grouped queries), and averaged over `pool`
neighbouring keys (zeros beyond the ends), so that whole passages stay. The prompt alone is evicted from: all that comes
later stays. A further turn votes afresh, on what is left and what has come since.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridgen.selection.eviction.base import EvictionPolicy, Prompt, Step, blocks_of_logits


class SnapKV(EvictionPolicy):
    """Votes of the observation window."""

    accumulates = False
    evicts_in_decode = False

    def score_prompt(self, prompt: Prompt) -> Tensor:
        heads, rows = prompt.positions.shape
        votes = prompt.keys.new_zeros((heads, rows), dtype=torch.float32)
        observers = self.budget(prompt.tokens).recent
        for queries, logits in blocks_of_logits(prompt.of_last(observers)):
            votes[:, : queries.stop] += torch.softmax(logits, dim=-1).mean(dim=1).sum(dim=1)
        # The observers themselves stay anyway; what they give each other is not to reach their neighbours.
        older = votes[:, : max(0, rows - observers)]
        votes = torch.zeros_like(votes)
        if older.shape[1]:
            pool = self.config.pool
            votes[:, : older.shape[1]] = F.avg_pool1d(older, pool, stride=1, padding=pool // 2)
        return votes

    def gain(self, step: Step) -> None:
        return None
