"""K and V of one layer, all on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import device_shape
from hybridgen.models.spec import LayerSpec


class ResidentKV:
    """[B, Hkv, capacity, head_dim] on the device; rows beyond a sequence's length are zero and masked."""

    def __init__(self, spec: LayerSpec, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = device_shape(spec, batch, capacity)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch
        self._rows = torch.arange(batch, device=device)

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """One token a sequence: key, value [B, Hkv, d] at positions `index` [B] (int64, on the device)."""
        if self.keys.is_cuda:
            from hybridgen.kv_cache.write_kernel import write_token  # Triton: only where there is a GPU

            write_token(key, value, index, self.keys, self.values)
            return
        self.keys[self._rows, :, index] = key
        self.values[self._rows, :, index] = value

    def grow(self) -> None:
        """The sequences have the tokens that were written."""
        self.lengths = [length + 1 for length in self.lengths]

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Copy the tokens so far into the first rows of keys, values [Hkv, n, d]."""
        length = self.lengths[sequence]
        keys[:, :length] = self.keys[sequence, :, :length]
        values[:, :length] = self.values[sequence, :, :length]

    def store(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Take over a prefilled sequence: keys, values [Hkv, n, d], of which those beyond the length are new."""
        past, length = self.lengths[sequence], keys.shape[1]
        self.keys[sequence, :, past:length] = keys[:, past:]
        self.values[sequence, :, past:length] = values[:, past:]
        self.lengths[sequence] = length
