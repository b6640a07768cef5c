"""Keyformer (Adnan et al., arXiv 2403.09054): as H2O, but the scores see what attention would be if it were sharper or
blunter here and there.

f = softmax((x + g) / tau) of the masked logits x, with g of a standard Gumbel distribution for each query head, query
and key; a token's score is the sum of its f. tau = tau_init + t x (tau_end - tau_init) / T, where T is `run.gen`, and t
is 0 in a prompt, 1 in the first decode step, and T at most. Attention itself is the plain softmax. Sum over the group,
as in H2O.

The noise is a hash of seed, layer, head, position of the query and of the key: it repeats, whatever lies beside it in
a block or a batch. The official code draws anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.config import EvictionConfig
from hybridgen.selection.eviction.base import EvictionPolicy, Prompt, Step, blocks_of_logits


class Keyformer(EvictionPolicy):
    """Sums of a noisy softmax."""

    prompt_copies = 6
    prompt_kernel = True

    def __init__(self, config: EvictionConfig, layer: int, seed: int, gen: int) -> None:
        super().__init__(config, layer, seed, gen)
        self._slope, self._gen = (config.tau_end - config.tau_init) / gen, gen
        self._key = _mixed_seed(seed, layer)

    def score_prompt(self, prompt: Prompt) -> Tensor:
        query_bits, key_bits = prompt_bits(self._key, prompt)
        if prompt.keys.is_cuda:
            from hybridgen.selection.eviction.prompt_scores_kernel import column_sums  # Triton: only where a GPU is

            return column_sums(prompt, (query_bits, key_bits, self.config.tau_init))
        return noisy_sums(prompt, query_bits, key_bits, self.config.tau_init)

    def gain(self, step: Step) -> Tensor:
        noise = gumbel(self._key, _heads(step.logits[0]), step.index.view(-1, 1, 1, 1), step.positions.unsqueeze(2))
        tau = self.config.tau_init + self._slope * (step.steps + 1).clamp(max=self._gen).float().view(-1, 1, 1, 1)
        return torch.softmax((step.logits + noise) / tau, dim=-1).sum(dim=2)


def gumbel(key: int, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Noise, float32, of query heads, positions of queries and of keys, integers that are broadcast with each other.

    key: what tells seeds and layers apart. Whole numbers up to the uniform draw, which has 23 bits: the same anywhere.
    """
    return gumbel_of(_query_bits(key, heads, queries) + _mixed(keys.int()))


def gumbel_of(bits: Tensor) -> Tensor:
    """Noise, float32, of int32 numbers, the sums of those that stand for a query head's query and for a key."""
    uniform = (_mixed(bits) & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)  # exact, and neither 0 nor 1
    return uniform.log_().neg_().log_().neg_()


def prompt_bits(key: int, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Numbers for `gumbel_of` of a prompt's queries, int32 [Hq, m], and of its keys, int32 [Hkv, n]."""
    new, heads = prompt.queries.shape[:2]
    numbers = torch.arange(heads, device=prompt.positions.device).unsqueeze(-1)
    return _query_bits(key, numbers, prompt.positions[0, -new:]), _mixed(prompt.positions.int())


def noisy_sums(prompt: Prompt, query_bits: Tensor, key_bits: Tensor, tau: float) -> Tensor:
    """Scores of a prompt, float32 [Hkv, n]; query_bits, key_bits: `prompt_bits`."""
    scores = prompt.keys.new_zeros(prompt.positions.shape, dtype=torch.float32)
    heads, rows = scores.shape
    query_bits = query_bits.view(heads, -1, query_bits.shape[1], 1)
    for queries, logits in blocks_of_logits(prompt):
        past = rows - query_bits.shape[2]
        bits = query_bits[:, :, queries.start - past : queries.stop - past] + key_bits[:, None, None, : queries.stop]
        f = torch.softmax(logits.add_(gumbel_of(bits)).div_(tau), dim=-1)
        scores[:, : queries.stop] += f.sum(dim=(1, 2))
    return scores


def _query_bits(key: int, heads: Tensor, queries: Tensor) -> Tensor:
    return _mixed(_mixed(queries.int() + key) + heads.int())


def _heads(logits: Tensor) -> Tensor:
    """Numbers of the query heads of logits [Hkv, G, ...]: [Hkv, G, 1]."""
    heads, group = logits.shape[:2]
    return torch.arange(heads * group, device=logits.device).view(heads, group, 1)


def _mixed(x: Tensor) -> Tensor:
    """int32 numbers scrambled (the finaliser of MurmurHash3); products wrap around, shifts bring no signs along."""
    x = x ^ (x >> 16).bitwise_and_(0xFFFF)
    x.mul_(_signed(0x85EBCA6B))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF))
    x.mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(bits: int) -> int:
    """32 bits as the int32 that they are."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def _mixed_seed(seed: int, layer: int) -> int:
    words = torch.tensor([_signed(seed & 0xFFFFFFFF), _signed(seed >> 32), layer], dtype=torch.int32)
    mixed = torch.zeros(1, dtype=torch.int32)
    for word in words:
        mixed = _mixed(mixed + word + _signed(0x9E3779B9))
    return int(mixed)
