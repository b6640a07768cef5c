"""How the host's keys are described to the C++ worker: their type, addresses and strides, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridgen.offload.host_memory import HostBuffer

KEY_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SKETCH_BLOCK = 64  # tokens of a sketch's block, as in kv_cache/quantize.py and cpp_ext/kernels/scan.h
_BYTES_PER_CHANNEL = {"int4": 36, "int2": 20}  # of a sketch's block: codes, scale and zero


@dataclass(frozen=True)
class ScannedKeys:
    """Keys in fewer bits, in host memory, as `kv_cache/quantize.py` makes them.

    kind: "int8" (in place of the keys), "int4" or "int2" (a sketch of them).
    codes: int8 [B, Hkv, N, d], channels contiguous; of a sketch uint8 [B, Hkv, N / 64, bytes of a block], blocks
    contiguous. scales: float32 [B, Hkv, N], tokens contiguous, of int8 only. mean: float32 [B, Hkv, d], contiguous:
    what was taken off the keys; None: nothing was.
    """

    kind: str
    codes: HostBuffer
    scales: HostBuffer | None = None
    mean: HostBuffer | None = None


def described(query: Tensor, keys: HostBuffer | ScannedKeys, lengths: list[int]) -> tuple[Tensor, int, dict[str, Any]]:
    """The keys, how many tokens they are of, and what `hybridgen._C` wants to know of them. ValueError: what does not
    fit."""
    batch, heads, dim = query.shape
    if isinstance(keys, ScannedKeys):
        key_type, host_keys, tokens = keys.kind, keys.codes.tensor, _check_scanned(keys, query)
    else:
        host_keys = keys.tensor
        if host_keys.dim() != 4 or host_keys.shape[0] != batch or host_keys.shape[3] != dim:
            raise ValueError(f"keys: shape {tuple(host_keys.shape)} does not match query {tuple(query.shape)}")
        if host_keys.dtype not in KEY_TYPES or host_keys.stride(3) != 1:
            raise ValueError(f"keys: dtype {host_keys.dtype} (allowed: {list(KEY_TYPES)}), channels contiguous")
        key_type, tokens = KEY_TYPES[host_keys.dtype], host_keys.shape[2]
    if len(lengths) != batch or max(lengths) > tokens:
        raise ValueError(f"lengths: {lengths} do not fit keys of shape {tuple(host_keys.shape)}")
    arguments = {
        "keys": host_keys.data_ptr(),
        "key_type": key_type,
        "num_heads": heads,
        "num_kv_heads": host_keys.shape[1],
        "head_dim": dim,
        "lengths": lengths,
        "key_strides": tuple(host_keys.stride()[:3]),
        **(_quantized_arguments(keys) if isinstance(keys, ScannedKeys) else {}),
    }
    return host_keys, tokens, arguments


@dataclass(frozen=True)
class AttendedRows:
    """Keys and values of the host tier, checked, as `hybridgen._C` attends to them, all of `lengths`."""

    query_shape: torch.Size
    keys: HostBuffer | ScannedKeys
    values: HostBuffer
    lengths: list[int]
    arguments: dict[str, Any]


def attended_rows(
    query: Tensor, keys: HostBuffer | ScannedKeys, values: HostBuffer, lengths: Sequence[int]
) -> AttendedRows:
    """The first lengths[b] rows of each sequence, for queries of this one's shape [B, Hq, d].

    keys: as of a scan, no sketch; values: [B, Hkv, N, d], channels contiguous, in host memory. ValueError: what does
    not fit.
    """
    own = list(lengths)
    _, _, arguments = described(query, keys, own)
    rows = values.tensor
    if rows.dim() != 4 or rows.shape[0] != query.shape[0] or rows.shape[3] != query.shape[2]:
        raise ValueError(f"values: shape {tuple(rows.shape)} does not match query {tuple(query.shape)}")
    if rows.dtype not in KEY_TYPES or rows.stride(3) != 1 or max(own) > rows.shape[2]:
        raise ValueError(
            f"values: {rows.dtype} {tuple(rows.shape)} for lengths {own} (allowed: {list(KEY_TYPES)}, channels "
            "contiguous, a row for each token)"
        )
    of_values = {
        "values": rows.data_ptr(), "value_type": KEY_TYPES[rows.dtype], "value_strides": tuple(rows.stride()[:3]),
    }  # fmt: skip
    return AttendedRows(query.shape, keys, values, own, arguments | of_values)


def _check_scanned(keys: ScannedKeys, query: Tensor) -> int:
    """How many tokens there are. ValueError: what does not fit."""
    batch, _, dim = query.shape
    codes = keys.codes.tensor
    sketch = keys.kind in _BYTES_PER_CHANNEL
    if not sketch and keys.kind != "int8":
        raise ValueError(f"keys: kind '{keys.kind}': must be int8, int4 or int2")
    if codes.dim() != 4 or codes.shape[0] != batch:
        raise ValueError(f"keys: shape {tuple(codes.shape)} does not match query {tuple(query.shape)}")
    width, dtype = (_BYTES_PER_CHANNEL[keys.kind] * dim, torch.uint8) if sketch else (dim, torch.int8)
    if codes.dtype is not dtype or codes.shape[3] != width or codes.stride(3) != 1:
        raise ValueError(
            f"keys: codes are {codes.dtype} {tuple(codes.shape)} with strides {codes.stride()}: "
            f"must be {dtype} [B, Hkv, n, {width}], contiguous in the last dimension"
        )
    if sketch and keys.scales is not None:
        raise ValueError(f"keys: {keys.kind} takes no scales, its blocks have their own")
    if not sketch and keys.scales is None:
        raise ValueError("keys: int8 needs scales")
    if keys.scales is not None:
        scales = keys.scales.tensor
        if scales.dtype is not torch.float32 or scales.shape != codes.shape[:3] or scales.stride(2) != 1:
            raise ValueError(
                f"keys: scales are {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}: "
                f"must be torch.float32 {tuple(codes.shape[:3])}, tokens contiguous"
            )
    if keys.mean is not None:
        mean = keys.mean.tensor
        want = (*codes.shape[:2], dim)
        if mean.dtype is not torch.float32 or mean.shape != want or not mean.is_contiguous():
            raise ValueError(
                f"keys: mean is {mean.dtype} {tuple(mean.shape)} with strides {mean.stride()}: "
                f"must be torch.float32 {want}, contiguous"
            )
    return codes.shape[2] * (SKETCH_BLOCK if sketch else 1)


def _quantized_arguments(keys: ScannedKeys) -> dict[str, Any]:
    """What `hybridgen._C` wants to know of them beside the codes."""
    arguments: dict[str, Any] = {"key_mean": 0 if keys.mean is None else keys.mean.tensor.data_ptr()}
    if keys.scales is not None:
        scales = keys.scales.tensor
        arguments |= {"key_scales": scales.data_ptr(), "scale_strides": tuple(scales.stride()[:2])}
    return arguments
