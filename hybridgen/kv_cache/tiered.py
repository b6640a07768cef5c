"""K and V of one layer in two tiers: sinks and a window on the device, what lies between on the host.

Of a sequence of n tokens, with S sinks and h host rows: tokens [0, S) are sinks, [S, S + h) lie on the
host in row (position - S), [S + h, n) lie in the window. No token is in two tiers or in none. A block
that ages is copied while it still belongs to the window, and changes sides in `admit`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.kv_cache.disk_rows import LayerOnDisk, RowsOnDisk
from hybridgen.kv_cache.host_keys import (
    HostKeys,
    KeyStorage,
    PackedRows,
    PlainKeys,
    SketchedKeys,
    key_parts,
    make_host_keys,
    make_host_values,
)
from hybridgen.kv_cache.layout import AGEING_BLOCK, WindowLayout, device_shape, host_shape
from hybridgen.kv_cache.partial_keys import Skewing
from hybridgen.kv_cache.recall import QUERIES, adequate_storage
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.host_memory import HostSlab, padded_bytes
from hybridgen.offload.transfer import Ticket, TransferEngine


class TieredKV:
    """State of one layer for the sequences of one micro-batch."""

    def __init__(
        self,
        spec: LayerSpec,
        batch: int,
        capacity: int,
        layout: WindowLayout,
        ageing_threshold: int,
        device: torch.device,
        dtype: torch.dtype,
        keys_slab: HostSlab,
        values_slab: HostSlab,
        transfer: TransferEngine,
        keys_as: KeyStorage | None = None,
        skewing: Skewing | None = None,
        disk: LayerOnDisk | None = None,
    ) -> None:
        """The slabs have room for `host_keys.key_parts` and `value_part`; keys_as: how the host keeps keys, and packs
        values; None for `dtype`.

        skewing: of this layer, for partial keys. disk: where the first host rows lie; the slabs have none for these.
        """
        self.layout = layout
        self.lengths = [0] * batch
        self.host_lengths = [0] * batch
        # Zeroed, so that a slot without a token is finite and its weight of zero really is nothing.
        self.keys = torch.zeros(device_shape(spec, batch, layout.rows), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.empty = torch.ones((batch, 1, 1, layout.rows), dtype=torch.bool, device=device)  # slots without a token
        shape = host_shape(spec, batch, layout, capacity)
        self.host_capacity, self.disk = shape[2], disk
        if disk is not None:
            shape = (*shape[:2], shape[2] - disk.rows, shape[3])
        keys_as = keys_as or KeyStorage(dtype)
        self.host_keys: HostKeys = make_host_keys(shape, keys_as, dtype, keys_slab, transfer, device, skewing)
        value_rows = make_host_values(shape, keys_as, dtype, values_slab, transfer)
        self.host_values = value_rows.in_place  # uint8 [B, Hkv, N, bytes] where they are packed
        self._value_rows: HostKeys = value_rows
        if disk is not None:
            assert isinstance(self.host_keys, PlainKeys | PackedRows)
            self.host_keys = RowsOnDisk(self.host_keys, disk, 0)
            self._value_rows = RowsOnDisk(value_rows, disk, 1)
            disk.tier.attach(disk.layer, self.disk_lengths)
        self.notes: list[str] = []  # on keys that are not stored as was asked for
        self._keys_as, self._shape, self._dtype, self._device = keys_as, shape, dtype, device
        self._skewing = skewing
        self._ageing_threshold = ageing_threshold
        self._transfer = transfer
        self._arriving: list[Ticket] = []
        self._ageing: list[int] = []  # sequences whose oldest window block is on its way
        self._rows = torch.arange(batch, device=device)

    def window_length(self, sequence: int) -> int:
        return max(0, self.lengths[sequence] - self.layout.sinks) - self.host_lengths[sequence]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """One token a sequence: key, value [B, Hkv, d] into `slots` [B] (layout.slot of its position)."""
        if self.keys.is_cuda:
            from hybridgen.kv_cache.write_kernel import write_token  # Triton: only where there is a GPU

            write_token(key, value, slots, self.keys, self.values, self.empty)
            return
        self.keys[self._rows, :, slots] = key
        self.values[self._rows, :, slots] = value
        self.empty.view(len(self.lengths), -1).scatter_(1, slots.unsqueeze(1), False)

    def grow(self) -> None:
        """The sequences have the tokens that were written."""
        self.lengths = [length + 1 for length in self.lengths]

    def age(self) -> None:
        """Send the oldest block of each window that is full to the host; it stays in the window until `admit`."""
        for sequence in range(len(self.lengths)):
            if sequence not in self._ageing and self.window_length(sequence) >= self._ageing_threshold:
                self._ageing.append(sequence)
                self._copy_block_out(sequence)

    def admit(self) -> list[int]:
        """Blocks on their way join the host now; returns the host lengths, frozen for the scan that follows."""
        for ticket in self._arriving:
            ticket.wait_host()
        self._arriving.clear()
        for sequence in self._ageing:
            for slots in self._ring_slices(self.host_lengths[sequence], AGEING_BLOCK):
                self.empty[sequence, 0, 0, slots] = True
            self.host_lengths[sequence] += AGEING_BLOCK
        self._ageing.clear()
        return list(self.host_lengths)

    def disk_lengths(self) -> list[int]:
        """Rows of each sequence in the file once `admit` is called."""
        most = 0 if self.disk is None else self.disk.rows
        coming = [AGEING_BLOCK * (sequence in self._ageing) for sequence in range(len(self.lengths))]
        return [min(most, length + more) for length, more in zip(self.host_lengths, coming, strict=True)]

    def steady_host_lengths(self) -> list[int] | None:
        """The host lengths, where a token more leaves them and the host alone: no block ages, and there are rows."""
        if self._arriving or self._ageing or max(self.host_lengths) == 0:
            return None
        if any(self.window_length(b) + 1 >= self._ageing_threshold for b in range(len(self.lengths))):
            return None
        return self.host_lengths

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Copy the tokens so far, in order, into the first rows of keys, values [Hkv, n, d]."""
        self.admit()
        length, sinks, host = self.lengths[sequence], self.layout.sinks, self.host_lengths[sequence]
        for out, local in ((keys, self.keys), (values, self.values)):
            out[:, : min(sinks, length)] = local[sequence, :, : min(sinks, length)]
            row = sinks + host
            for slots in self._ring_slices(host, self.window_length(sequence)):
                out[:, row : row + slots.stop - slots.start] = local[sequence, :, slots]
                row += slots.stop - slots.start
        if host:
            self.host_keys.load(sequence, host, keys[:, sinks : sinks + host])
            self._value_rows.load(sequence, host, values[:, sinks : sinks + host])

    def store(self, sequence: int, keys: Tensor, values: Tensor, queries: Tensor, first_piece: int) -> None:
        """Take over a prefilled sequence: keys, values [Hkv, n, d], those beyond the length are new.

        queries: [m, Hq, d], those of the prompt; first_piece: tokens that the first prefill piece had.
        The host rows that are new are under way when this returns; `admit` waits for them.
        """
        self.admit()
        length, sinks = keys.shape[1], self.layout.sinks
        held = self.host_lengths[sequence]
        host = self.layout.host_rows(length)
        if not self.lengths[sequence]:
            if not any(self.lengths):
                self._settle_keys(queries[-QUERIES:], keys[:, sinks:])
            self.host_keys.begin(sequence, keys[:, sinks:first_piece], queries)
        for new, local in ((keys, self.keys), (values, self.values)):
            local[sequence, :, :sinks][:, :length] = new[:, :sinks]
            row = sinks + host
            for slots in self._ring_slices(host, max(0, length - sinks - host)):
                local[sequence, :, slots] = new[:, row : row + slots.stop - slots.start]
                row += slots.stop - slots.start
        self.host_keys.prompted(sequence, host)
        if host > held:
            rows = slice(sinks + held, sinks + host)
            self._arriving += self.host_keys.store(sequence, held, keys[:, rows])
            self._arriving += self._value_rows.store(sequence, held, values[:, rows])
        self.empty[sequence] = True
        self.empty[sequence, 0, 0, : min(sinks, length)] = False
        for slots in self._ring_slices(host, max(0, length - sinks - host)):
            self.empty[sequence, 0, 0, slots] = False
        self.lengths[sequence], self.host_lengths[sequence] = length, host

    def pending(self) -> list[Ticket]:
        """Copies to the host that still read what `store` was given."""
        return list(self._arriving)

    def _copy_block_out(self, sequence: int) -> None:
        host = self.host_lengths[sequence]
        slots = self._ring_slices(host, AGEING_BLOCK)
        keys, values = (
            torch.cat([local[sequence, :, some] for some in slots], dim=1)
            if len(slots) > 1
            else local[sequence, :, slots[0]]
            for local in (self.keys, self.values)
        )
        self._arriving += self.host_keys.store(sequence, host, keys)
        self._arriving += self._value_rows.store(sequence, host, values)

    def _settle_keys(self, queries: Tensor, keys: Tensor) -> None:
        """Before the first row is stored: what quantising would spoil, by the first sequence's keys, stays whole."""
        settled, self.notes = adequate_storage(self._keys_as, self._dtype, queries, keys)
        if settled == self._keys_as:
            return
        if settled.stored == self._keys_as.stored and isinstance(self.host_keys, SketchedKeys):
            self.host_keys = self.host_keys.plain
        else:  # larger than what the slab has for them
            parts = key_parts(self._shape, settled)
            slab = HostSlab(sum(padded_bytes(*part) for part in parts), self._device)
            self.host_keys = make_host_keys(
                self._shape, settled, self._dtype, slab, self._transfer, self._device, self._skewing
            )
        self._keys_as = settled

    def _ring_slices(self, start: int, count: int) -> list[slice]:
        """Device slots of `count` tokens from position sinks + start on: one slice, or two around the end."""
        if count <= 0:
            return []
        ring, sinks = self.layout.ring, self.layout.sinks
        first = start % ring
        until_end = min(count, ring - first)
        slices = [slice(sinks + first, sinks + first + until_end)]
        if until_end < count:
            slices.append(slice(sinks, sinks + count - until_end))
        return slices
