"""Positions in the cache instead of true ones: StreamingLLM (arXiv 2309.17453, section 3.2).

The paper caches keys before rotation and rotates each, at every step, by its index in the cache, and the query by its
own. Of E tokens evicted, all that is behind them has moved up by E, the query too: from a query to a key of the window
the distance is the true one. Only sinks have come nearer, by E. Rotary attention knows distances alone, so keys may be
cached as they are rotated, at their true positions, and the paper's logits are those of the window by the query as it
is, and of the sinks by the query turned back by E positions (or of sinks turned forward by E). Nothing is rotated anew
but one query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.base import attention_logits, weighted_sum
from hybridgen.models.layers import rotary_tables, rotate
from hybridgen.models.spec import LayerSpec
from hybridgen.selection.eviction.base import SCORED_AT_ONCE


def turned(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, heads, d], rotated, as if it stood `positions` [T] later: in float32, and back."""
    return rotate(x.float(), rotary_tables(positions, frequencies, torch.float32)).to(x.dtype)


def windowed_attention(
    query: Tensor, keys: Tensor, values: Tensor, spec: LayerSpec, sinks: int, window: int, frequencies: Tensor | None
) -> Tensor:
    """Each of the T newest of n tokens attends to the first `sinks` and the last `window`, itself included.

    query [T, Hq, d]; keys, values [Hkv, n, d], the T newest rows last; frequencies: of RoPE, where positions are those
    in a cache of sinks + window. Returns [T, Hq * d].
    """
    new, (heads, length, dim) = query.shape[0], keys.shape
    block = max(1, min(sinks + window, SCORED_AT_ONCE // (2 * spec.num_heads * (sinks + window))))
    rows, out = torch.arange(length, device=keys.device), torch.empty_like(query)
    for first in range(0, new, block):
        some = query[first : first + block]
        asking = rows[length - new + first :][: some.shape[0]]
        begin, end = length - new + first, length - new + first + some.shape[0]
        near, far = slice(min(end, max(sinks, begin - window + 1)), end), slice(0, min(sinks, end))
        gap = asking.unsqueeze(1) - rows[near]
        logits = [_logits(some, keys[:, near], spec).masked_fill_((gap < 0) | (gap >= window), -torch.inf)]
        if frequencies is not None:
            some = turned(some, -(asking + 1 - sinks - window).clamp(min=0), frequencies)
        logits.append(_logits(some, keys[:, far], spec).masked_fill_(asking.unsqueeze(1) < rows[far], -torch.inf))
        weights = torch.softmax(torch.cat(logits, dim=-1), dim=-1).flatten(1, 2)
        joined = torch.cat((values[:, near], values[:, far]), dim=1)
        context = weighted_sum(weights.unsqueeze(0), joined.unsqueeze(0))
        context = context.view(heads, spec.group_size, -1, dim).permute(2, 0, 1, 3)
        out[first : first + block] = context.reshape(-1, spec.num_heads, dim)
    return out.flatten(1)


def _logits(query: Tensor, keys: Tensor, spec: LayerSpec) -> Tensor:
    """float32 [Hkv, G, T, n] of query [T, Hq, d] and keys [Hkv, n, d]."""
    heads, dim = spec.num_kv_heads, spec.head_dim
    grouped = query.view(-1, heads, spec.group_size, dim).permute(1, 2, 0, 3).reshape(1, heads, -1, dim)
    logits = attention_logits(grouped, keys.unsqueeze(0), None, spec.scale)
    return logits.view(heads, spec.group_size, query.shape[0], keys.shape[1])
