"""What the device scores the host's tokens by, in place of keys that it does not have: `DeviceSketch`, one a kind.

codes of 4 or 2 bits (here); a share of the columns of skewed keys (`partial_keys.py`); bounds of pages
(`page_bounds.py`). The whole path after scoring is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hybridgen.kv_cache.layout import AGEING_BLOCK
from hybridgen.kv_cache.quantize import head_groups, make_sketch, sketch_logits
from hybridgen.offload.logit_worker import ScanTicket
from hybridgen.offload.transfer import Ticket
from hybridgen.selection.budget import per_sequence
from hybridgen.selection.host_logits import HostLogits
from hybridgen.types import TokenSelection


class DeviceSketch(ABC):
    """Of the host rows of one layer and micro-batch."""

    #: What the report says after the type of the keys: `int2`, `partial`, ...
    name: str

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that scores depend on beside the query; they lie in the same place for good."""

    def begin(self, sequence: int, queries: Tensor) -> None:  # noqa: B027 - not abstract: most ask nothing of queries
        """Before `store`: the queries [m, Hq, d] of the sequence's first prompt."""

    @abstractmethod
    def store(self, sequence: int, row: int, keys: Tensor) -> None:
        """Take in whole blocks of keys [Hkv, 64 * m, d], the host's rows from `row` on."""

    @abstractmethod
    def score(self, query: Tensor, lengths: list[int], scale: float) -> Tensor:
        """Of query [B, Hq, d], in the stream of whoever calls: float32 [B, Hq, n], contiguous.

        n is the longest of the lengths, which are multiples of 64; beyond a sequence's own there may be anything.
        """

    # Of a pool whose rows may die (`row_pool.py`); most have none.

    def prompted(self, sequence: int, rows: int) -> None:  # noqa: B027
        """Before `store`: with the prompt that is taken in, the sequence has so many host rows."""

    def alive(self) -> list[int] | None:
        """How many rows of each sequence may be chosen; None: all. The scores of the others are -inf."""
        return None

    def fetched(self, chosen: TokenSelection) -> None:  # noqa: B027
        """What was chosen by these scores; in the stream of whoever calls."""


class IntSketch(DeviceSketch):
    """Codes of `bits` bits, asymmetric per channel, in blocks of 64 tokens: `quantize.py`."""

    def __init__(self, bits: int, tensor: Tensor) -> None:
        """tensor: uint8 [B, Hkv, N / 64, bytes of a block]."""
        self.name, self.tensor, self._bits = f"int{bits}", tensor, bits

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def store(self, sequence: int, row: int, keys: Tensor) -> None:
        first, blocks = row // AGEING_BLOCK, keys.shape[1] // AGEING_BLOCK
        for heads in head_groups(keys):
            made = make_sketch(keys[heads].unsqueeze(0), self._bits)[0]
            self.tensor[sequence, heads, first : first + blocks] = made

    def score(self, query: Tensor, lengths: list[int], scale: float) -> Tensor:
        if query.is_cuda:
            from hybridgen.kv_cache.sketch_kernel import score_sketch  # Triton: only where there is a GPU

            return score_sketch(query, self.tensor, self._bits, lengths, scale)
        return sketch_logits(query, self.tensor, self._bits, max(lengths), scale)


class DeviceScan(ScanTicket):
    """A scan by the device: it runs in the stream of whoever asks for the logits."""

    def __init__(self, query: Tensor, sketch: DeviceSketch, lengths: list[int], scale: float) -> None:
        self._query, self._sketch, self._lengths, self._scale = query, sketch, lengths, scale

    def inputs(self) -> tuple[object, ...]:
        """All that the logits depend on beside the query, on the device already."""
        return *self._sketch.tensors(), per_sequence(self._lengths, self._query.device), max(self._lengths)

    def logits(self) -> HostLogits:
        return HostLogits(self.device_logits())

    def device_logits(self) -> Tensor:
        """float32 [B, Hq, n]."""
        return self._sketch.score(self._query, self._lengths, self._scale)

    def fetched(self, chosen: TokenSelection) -> None:
        """What was chosen by the logits: rows of the host tier."""
        self._sketch.fetched(chosen)

    def release(self, after: Ticket) -> None:
        pass


def product_to_float32(query: Tensor, keys: Tensor) -> Tensor:
    """query [B, Hkv, G, c] @ keys [B, Hkv, c, n], accumulated and returned in float32: [B, Hkv, G, n].

    A GPU's matrix units do it from half-precision operands; elsewhere these are converted first.
    """
    if query.is_cuda and query.dtype != torch.float32:
        product = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1), out_dtype=torch.float32)
        return product.view(*query.shape[:-1], keys.shape[-1])
    return torch.matmul(query.float(), keys.float())
