"""H2O, heavy hitters (Zhang et al., arXiv 2306.14048).

A token's score is the attention probability that it has had from all queries so far, its own included; tokens that had
much go on having much. algorithms.md, 3, says how the published codes differ. Here:
* scores are per KV head, the sum over the query heads of its group (the official code has none of grouped queries);
* the token that has just left the window competes with the heavy ones, as in a prefill; the FlexGen variant lets it in
  unseen;
* keys keep their original positions; scores are float32, the official ones in FlexGen float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.selection.eviction.base import EvictionPolicy, Prompt, Step, blocks_of_logits


class H2O(EvictionPolicy):
    """Column sums of the probabilities."""

    prompt_kernel = True

    def score_prompt(self, prompt: Prompt) -> Tensor:
        if prompt.keys.is_cuda:
            from hybridgen.selection.eviction.prompt_scores_kernel import column_sums  # Triton: only where a GPU is

            return column_sums(prompt)
        return summed_probabilities(prompt)

    def gain(self, step: Step) -> Tensor:
        return step.probabilities.sum(dim=2)


def summed_probabilities(prompt: Prompt) -> Tensor:
    """Scores of a prompt, float32 [Hkv, n]."""
    scores = prompt.keys.new_zeros(prompt.positions.shape, dtype=torch.float32)
    for queries, logits in blocks_of_logits(prompt):
        scores[:, : queries.stop] += torch.softmax(logits, dim=-1).sum(dim=(1, 2))
    return scores
