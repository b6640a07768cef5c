"""As `compact.py`, with K and V in host memory; positions and scores stay on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.kv_cache.compact import CompactKV, Held
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.host_memory import HostBuffer, HostSlab
from hybridgen.offload.transfer import Ticket, TransferEngine


class HostCompactKV(CompactKV):
    """`keys` and `values` are the host's rows as the device sees them: a new token is written there by the device."""

    def __init__(
        self,
        spec: LayerSpec,
        shape: tuple[int, int, int, int],
        device: torch.device,
        dtype: torch.dtype,
        slabs: tuple[HostSlab, HostSlab],
        transfer: TransferEngine,
    ) -> None:
        """shape: of K and V, [B, Hkv, the most slots there can be, d]."""
        super().__init__(spec, shape[0], device, dtype)
        self.buffers: list[HostBuffer] = [slab.take(shape, dtype) for slab in slabs]
        self.keys, self.values = (buffer.device_view for buffer in self.buffers)
        self._transfer = transfer
        self._arriving: list[Ticket] = []

    def settle(self) -> None:
        """What is issued from now on sees what was stored."""
        for ticket in self._arriving:
            ticket.wait()
        self._arriving.clear()

    def lengths(self) -> list[int]:
        """Slots of each sequence, from the first on, that may hold tokens."""
        return [held + (held == limit) for held, limit in zip(self.held, self.limits, strict=True)]

    def store_rows(self, sequence: int, tokens: Held) -> None:
        count = tokens.positions.shape[1]
        for rows, new in ((self.keys, tokens.keys), (self.values, tokens.values)):
            self._arriving.append(self._transfer.copy(rows[sequence, :, :count], new, "d2h"))

    def load_rows(self, sequence: int, order: Tensor) -> tuple[Tensor, Tensor]:
        self.settle()
        heads, dim, used = self.keys.shape[1], self.keys.shape[3], self.lengths()[sequence]
        pair = torch.empty((2, heads, used, dim), dtype=self.keys.dtype, device=order.device)
        tickets = [
            self._transfer.copy(target, rows[sequence, :, :used], "h2d")
            for target, rows in zip(pair, (self.keys, self.values), strict=True)
        ]
        for ticket in tickets:
            ticket.wait()
        index = order.unsqueeze(-1).expand(-1, -1, dim)
        return pair[0].gather(1, index), pair[1].gather(1, index)

    def _reserve_rows(self, slots: int) -> None:
        if slots > self.keys.shape[2]:
            raise ValueError(f"{slots} slots of each KV head are needed, the host has room for {self.keys.shape[2]}")
