"""How well quantised keys find what full ones find: decides whether a layer's keys are quantised at all.

contracts.md, "Quantised keys": what rotates with the position is not removed by the mean, and can drown the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hybridgen.kv_cache.host_keys import KeyStorage
from hybridgen.kv_cache.layout import AGEING_BLOCK
from hybridgen.kv_cache.quantize import (
    dequantize_int8,
    head_groups,
    key_mean,
    make_sketch,
    quantize_int8,
    read_sketch,
)

QUERIES = 64  # the last ones of the prompt
TOP = 0.1  # of the keys
LEAST_KEYS = 128  # with fewer nothing is measured
# int8 keys are attended to; a sketch only chooses. Keys without any structure (random weights) give int2 0.75 to 0.77,
# the worst of SmolLM2's layers 0.75 at 2,048 tokens and 0.70 at 300 (their mean 0.81 and 0.79).
LEAST_RECALL = {"int8": 0.95, "int4": 0.9, "int2": 0.7}


def adequate_storage(
    storage: KeyStorage, dtype: torch.dtype, queries: Tensor, keys: Tensor
) -> tuple[KeyStorage, list[str]]:
    """`storage` without what finds too little, and a line for each thing left out.

    Not so `partial` and `pages`: these are others' methods as they stand, however well they find.

    queries: [n, Hq, d], the prompt's last; keys: [Hkv, m, d], without sinks; dtype: what int8 falls back to.
    """
    notes: list[str] = []
    stored, sketch, bits = storage.stored, storage.sketch, storage.bits

    def finds_enough(kind: str, some: Tensor, made: Callable[[slice], Tensor]) -> bool:
        recall = top_recall(queries, some, made)
        if recall is None or recall >= LEAST_RECALL[kind]:
            return True
        notes.append(
            f"no {kind} keys: they find {recall:.2f} of the true top tenth, {LEAST_RECALL[kind]} are asked for"
        )
        return False

    if stored is torch.int8:
        mean = key_mean(keys.unsqueeze(0))

        def as_int8(heads: slice) -> Tensor:
            some = mean[:, heads]
            return dequantize_int8(*quantize_int8(keys[heads].unsqueeze(0), some), some, torch.float32)[0]

        if not finds_enough("int8", keys, as_int8):
            stored = dtype
    if bits is not None:
        blocks, kept = keys[:, : keys.shape[1] // AGEING_BLOCK * AGEING_BLOCK], bits

        def as_sketched(heads: slice) -> Tensor:
            return read_sketch(make_sketch(blocks[heads].unsqueeze(0), kept), kept, keys.shape[2])[0]

        if not finds_enough(f"int{bits}", blocks, as_sketched):
            sketch = None
    return replace(storage, stored=stored, sketch=sketch), notes


def top_recall(queries: Tensor, keys: Tensor, stored: Callable[[slice], Tensor]) -> float | None:
    """The share of the true top tenth that the stored keys find, mean over queries and query heads.

    queries: [n, Hq, d]; keys: [Hkv, m, d]; stored: what is made of the keys of some heads, [h, m, d]. None where there
    are too few keys. Waits for the device.
    """
    kv_heads, count, dim = keys.shape
    if count < LEAST_KEYS:
        return None
    grouped = queries.float().transpose(0, 1).reshape(kv_heads, -1, dim)  # [Hkv, G * n, d]
    top = max(1, int(TOP * count))
    common = torch.zeros((), dtype=torch.int64, device=keys.device)
    for heads in head_groups(keys):
        made = stored(heads)
        for place, head in enumerate(range(*heads.indices(kv_heads))):  # all heads' scores would take gigabytes, too
            true, found = (
                torch.zeros(grouped.shape[1], count, dtype=torch.bool, device=keys.device).scatter_(
                    -1, (grouped[head] @ some.float().T).topk(top, dim=-1).indices, True
                )
                for some in (keys[head], made[place])
            )
            common += (true & found).sum()
    return int(common) / (top * grouped.shape[0] * grouped.shape[1])
