"""Choosing and attention in one C++ call each, where the CPU plays the GPU's part.

What `selection/budget.py` and `attention/base.py` do in dozens of small torch operations: at batch 1 these cost more
than the memory they read. The torch code serves CUDA and is the reference. Both functions run on the calling thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen import _C
from hybridgen.selection.budget import KeepLimits
from hybridgen.types import TokenSelection

_KEY_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_NOWHERE = (0, "float32", 0, 0, 0)  # keys or values that are not there

_Rows = tuple[int, str, int, int, int]  # address, type, strides: what hybridgen._C takes for keys and values
_Heads = tuple[int, int, int]


def choose_rows(
    query: Tensor,
    keys: Tensor,
    empty: Tensor,
    host_logits: Tensor,
    limits: KeepLimits,
    scale: float,
    probabilities: Tensor | None = None,
    isa: str = "",
) -> TokenSelection:
    """`group_probabilities` and `choose` of selection/budget.py, with the local logits computed here.

    query: [B, Hq, d]; keys: [B, Hkv, R, d] on the device, channels contiguous; empty: bool [B, 1, 1, R], true where a
    slot holds no token (its key is not read). host_logits: float32 [B, Hq, N] of the scored rows, of sequence b the
    first limits.scored[b] are read. probabilities: float32 [B, Hkv, N], contiguous, gets p of every scored row, 0
    beyond. isa: kernel variant, for tests.

    The selection's rows are places among the N, its host_lengths limits.scored. ValueError: what does not fit.
    """
    batch, heads, dim = query.shape
    kv_heads, device_rows = keys.shape[1], keys.shape[2]
    if host_logits.dim() != 3 or host_logits.shape[0] != batch or host_logits.shape[1] != heads:
        raise ValueError(f"host_logits: shape {tuple(host_logits.shape)} does not match query {tuple(query.shape)}")
    if host_logits.dtype is not torch.float32 or not host_logits.is_cpu:
        raise ValueError(f"host_logits: {host_logits.dtype} on {host_logits.device}, must be float32 on the CPU")
    longest = host_logits.shape[2]
    batch_stride, head_stride, token_stride = host_logits.stride()
    if token_stride != 1 and longest > 1:
        raise ValueError(f"host_logits: strides {host_logits.stride()}, tokens must be contiguous")
    if probabilities is not None and (
        probabilities.shape != (batch, kv_heads, longest)
        or probabilities.dtype is not torch.float32
        or not (probabilities.is_cpu and probabilities.is_contiguous())
    ):
        raise ValueError(
            f"probabilities: {probabilities.dtype} {tuple(probabilities.shape)} on {probabilities.device}, must be "
            f"float32 {(batch, kv_heads, longest)} on the CPU, contiguous"
        )

    room = max(limits.widest, 0)  # _C.choose names what is out of range
    query = _prepared(query)
    rows = torch.empty(batch, kv_heads, room, dtype=torch.int64)
    padding = torch.empty(batch, kv_heads, 1, room, dtype=torch.bool)
    counts = torch.empty(batch, kv_heads, dtype=torch.int64)
    mass = query.new_empty(batch, kv_heads)
    width: int = _C.choose(
        (batch, heads, kv_heads, dim, device_rows, longest),
        _heads(query),
        _rows("keys", keys, batch, kv_heads, device_rows, dim),
        _slots(empty, batch, device_rows),
        (host_logits.data_ptr(), batch_stride, head_stride),
        scale,
        limits.scored,
        limits.least,
        limits.most,
        1.0 if limits.mass is None else limits.mass,
        limits.extra_thousandths,
        rows.data_ptr(),
        padding.data_ptr(),
        counts.data_ptr(),
        mass.data_ptr(),
        0 if probabilities is None else probabilities.data_ptr(),
        isa,
    )
    if width < room:
        step = kv_heads * width  # of the memory, the first batch * step elements are used
        rows = rows.as_strided((batch, kv_heads, width), (step, width, 1))
        padding = padding.as_strided((batch, kv_heads, 1, width), (step, width, width, 1))
    return TokenSelection(rows, counts, padding, limits.scored, mass)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    empty: Tensor,
    host_keys: Tensor | None,
    host_values: Tensor | None,
    selection: TokenSelection | None,
    scale: float,
    want_log_sum: bool = False,
    isa: str = "",
) -> tuple[Tensor, Tensor | None]:
    """Context, float32 [B, Hq, d], of one softmax over the device rows and the chosen host rows, read in place.

    query: [B, Hq, d]; keys, values: [B, Hkv, R, d] on the device; empty: bool [B, 1, 1, R], true where a slot holds no
    token (its key and value are not read); host_keys, host_values: [B, Hkv, N, d]; channels contiguous. Without a
    selection the host is left out. With `want_log_sum` also log sum exp(logit), float32 [B, Hq].
    """
    batch, heads, dim = query.shape
    kv_heads, device_rows = keys.shape[1], keys.shape[2]
    kept = rows_address = counts_address = host_rows = 0
    remote_keys = remote_values = _NOWHERE
    if selection is not None and selection.rows.shape[2]:
        if host_keys is None or host_values is None:
            raise ValueError("host_keys, host_values: needed where a selection is given")
        rows, counts = selection.rows.contiguous(), selection.counts.contiguous()
        kept = rows.shape[2]
        if rows.shape[:2] != (batch, kv_heads) or rows.dtype is not torch.int64 or not rows.is_cpu:
            raise ValueError(f"selection.rows: {rows.dtype} {tuple(rows.shape)} on {rows.device} does not match keys")
        if counts.shape != (batch, kv_heads) or counts.dtype is not torch.int64 or not counts.is_cpu:
            raise ValueError(f"selection.counts: {counts.dtype} {tuple(counts.shape)} does not match keys")
        rows_address, counts_address, host_rows = rows.data_ptr(), counts.data_ptr(), host_keys.shape[2]
        remote_keys = _rows("host_keys", host_keys, batch, kv_heads, host_rows, dim)
        remote_values = _rows("host_values", host_values, batch, kv_heads, host_rows, dim)

    query = _prepared(query)
    context = query.new_empty(batch, heads, dim)
    log_sum = query.new_empty(batch, heads) if want_log_sum else None
    _C.attend(
        (batch, heads, kv_heads, dim, device_rows, host_rows),
        _heads(query),
        _rows("keys", keys, batch, kv_heads, device_rows, dim),
        _rows("values", values, batch, kv_heads, device_rows, dim),
        _slots(empty, batch, device_rows),
        remote_keys,
        remote_values,
        kept,
        rows_address,
        counts_address,
        scale,
        context.data_ptr(),
        0 if log_sum is None else log_sum.data_ptr(),
        isa,
    )
    return context, log_sum


def _prepared(query: Tensor) -> Tensor:
    """float32 with contiguous channels: the query itself as a rule. The caller keeps it alive."""
    if not query.is_cpu:
        raise ValueError(f"query: on {query.device}, must be on the CPU")
    if query.dtype is not torch.float32:
        query = query.float()
    return query if query.stride(2) == 1 else query.contiguous()


def _heads(query: Tensor) -> _Heads:
    return query.data_ptr(), query.stride(0), query.stride(1)


def _rows(name: str, tensor: Tensor, batch: int, kv_heads: int, rows: int, dim: int) -> _Rows:
    if tensor.shape != (batch, kv_heads, rows, dim):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {(batch, kv_heads, rows, dim)}")
    batch_stride, head_stride, row_stride, channel_stride = tensor.stride()
    kind = _KEY_TYPES.get(tensor.dtype)
    if kind is None or channel_stride != 1 or not tensor.is_cpu:
        raise ValueError(
            f"{name}: {tensor.dtype} with strides {tensor.stride()} on {tensor.device}, must be one of "
            f"{', '.join(_KEY_TYPES.values())} with contiguous channels on the CPU"
        )
    return tensor.data_ptr(), kind, batch_stride, head_stride, row_stride


def _slots(empty: Tensor, batch: int, device_rows: int) -> tuple[int, int]:
    if empty.shape != (batch, 1, 1, device_rows) or empty.dtype is not torch.bool or not empty.is_cpu:
        raise ValueError(
            f"empty: {empty.dtype} {tuple(empty.shape)} on {empty.device}, must be bool {(batch, 1, 1, device_rows)} "
            "on the CPU"
        )
    batch_stride, _, _, slot_stride = empty.stride()
    if slot_stride != 1 and device_rows > 1:
        raise ValueError(f"empty: strides {empty.stride()}, slots must be contiguous")
    return empty.data_ptr(), batch_stride
