"""What executors with a host tier have in common: the cache, and attention over what of it is on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridgen.attention import native
from hybridgen.attention.base import LayerAttention, attention_logits, group_by_kv_head, joint_attention
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.transfer import Ticket, TransferEngine

_log = logging.getLogger(__name__)

Kernels = Literal["torch", "native", "triton"]
"""Of attention on the device: torch's operations, C++ where the CPU is the device, Triton on a GPU."""

Partial = tuple[Tensor, Tensor]
"""Attention over some of the rows: context [B, Hq, d] and log sum exp(logit), float32 [B, Hq]."""


class TieredAttention(LayerAttention):
    """A layer over `TieredKV`, up to its decode attention."""

    def __init__(self, layer: int, spec: LayerSpec, kv: TieredKV, transfer: TransferEngine) -> None:
        self._layer, self._spec, self._kv, self._transfer = layer, spec, kv, transfer
        self._telemetry = transfer.telemetry

    def age(self) -> None:
        self._kv.age()

    def tiers(self, lengths: Sequence[int]) -> tuple[int, int, int] | None:
        most = 0 if self._kv.disk is None else self._kv.disk.rows
        host = sum(self._kv.host_lengths)
        disk = sum(min(length, most) for length in self._kv.host_lengths)
        return sum(lengths) - host, host - disk, disk

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self._kv.load_past(sequence, keys, values)

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> list[Ticket]:
        self._kv.store(sequence, keys, values, queries, first_piece)
        self.key_kind = self._kv.host_keys.kind
        while self._kv.notes:
            _log.warning("layer %d keeps %s: %s", self._layer, self.key_kind, self._kv.notes.pop(0))
        return self._kv.pending()


@dataclass(frozen=True)
class HostRows:
    """Rows of the host tier that have come to the device, whole, in order.

    keys, values: contiguous [B, Hkv, n, d], of which each sequence's first lengths[b] rows hold something; counts: the
    lengths again, int64 [B, Hkv] on the device.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    counts: Tensor


def attend_device_rows(kernels: Kernels, query: Tensor, kv: TieredKV, rows: HostRows | None, scale: float) -> Partial:
    """Attention of query [B, Hq, d] over sinks, window and, if any, `rows`."""
    if kernels == "triton":
        from hybridgen.attention.decode_kernel import attend_rows  # Triton: only where there is a GPU

        if rows is None:
            none = torch.zeros(kv.keys.shape[:2], dtype=torch.int64, device=query.device)
            return attend_rows(query, kv.keys, kv.values, kv.empty, None, None, none, scale)
        return attend_rows(query, kv.keys, kv.values, kv.empty, rows.keys, rows.values, rows.counts, scale)
    if kernels == "native":
        return _attend_natively(query, kv, rows, scale)
    return _attend_in_torch(query, kv, rows, scale)


def merge(one: Partial, other: Partial) -> Tensor:
    """Attention over the rows of both, float32 [B, Hq, d]. `one` has a row in every sequence."""
    share = torch.sigmoid(other[1] - one[1]).unsqueeze(-1)
    return torch.lerp(one[0].float(), other[0], share)


def _attend_natively(query: Tensor, kv: TieredKV, rows: HostRows | None, scale: float) -> Partial:
    context, log_sum = native.attend_rows(query, kv.keys, kv.values, kv.empty, None, None, None, scale, True)
    assert log_sum is not None
    for b, length in enumerate([] if rows is None else rows.lengths):
        assert rows is not None
        one, all_hold = slice(b, b + 1), torch.zeros(1, 1, 1, length, dtype=torch.bool)
        keys, values = rows.keys[one, :, :length], rows.values[one, :, :length]
        host, host_sum = native.attend_rows(query[one], keys, values, all_hold, None, None, None, scale, True)
        assert host_sum is not None
        context[one] = merge((context[one], log_sum[one]), (host, host_sum))
        log_sum[one] = torch.logaddexp(log_sum[one], host_sum)
    return context, log_sum


def _attend_in_torch(query: Tensor, kv: TieredKV, rows: HostRows | None, scale: float) -> Partial:
    grouped = group_by_kv_head(query, kv.keys.shape[1])
    local = attention_logits(grouped, kv.keys, kv.empty, scale)
    parts: list[Partial] = []
    # Sequence by sequence: what lies beyond a length need not be finite, and a weight of zero would not hide it.
    for b, length in enumerate([0] * len(kv.lengths) if rows is None else rows.lengths):
        one = slice(b, b + 1)
        logits, values = [local[one]], [kv.values[one]]
        if rows is not None and length:
            logits.append(attention_logits(grouped[one], rows.keys[one, :, :length], None, scale))
            values.append(rows.values[one, :, :length])
        parts.append((joint_attention(logits, values), torch.logsumexp(torch.cat(logits, dim=-1), dim=-1)))
    context, log_sum = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return context.flatten(1, 2), log_sum.flatten(1)
