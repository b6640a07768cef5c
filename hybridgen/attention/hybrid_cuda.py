"""HybridGen's attention on a GPU: choice and attention in a few Triton kernels instead of dozens of launches.

Choice and attention are pieces (offload/pieces.py): on replay they cost the host one launch each.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hybridgen.attention.decode_kernel import attend_rows
from hybridgen.attention.hybrid import HybridAttention, Scores
from hybridgen.kv_cache.device_sketch import DeviceScan
from hybridgen.selection.budget import KeepLimits, per_sequence
from hybridgen.selection.choose_kernel import choose_rows
from hybridgen.selection.host_logits import HostLogits
from hybridgen.types import TokenSelection


class CudaHybridAttention(HybridAttention):
    """`HybridAttention` with the kernels of `selection/choose_kernel.py` and `attention/decode_kernel.py`."""

    in_pieces = True

    def _selected(self, query: Tensor, scores: Scores, limits: KeepLimits) -> TokenSelection:
        if self._candidates is not None:  # which are learned from every choice, by the host's leave
            return super()._selected(query, scores, limits)
        # What depends on the step is put on the device here: in a piece it would be what the capture saw.
        sizes = (limits.widest, limits.mass, limits.extra_thousandths, limits.alpha, *limits.scored)
        inputs: tuple[object, ...] = (query, limits.on(query.device), *sizes)
        if limits.alive is not None:
            inputs += (per_sequence(limits.alive, query.device), *limits.alive)
        if isinstance(scores, DeviceScan):
            inputs += scores.inputs()
        elif scores is not None:
            inputs += (scores.values, scores.maxima)
        # It lasts: statistics and whoever counts bytes read it when the step is over.
        return self.pieces.run("choose", inputs, partial(super()._selected, query, scores, limits))

    def _select(
        self, query: Tensor, host_logits: HostLogits, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        kv = self._kv
        most = self._most_by_alpha(query, host_logits, limits)
        chosen, p = choose_rows(query, kv.keys, kv.empty, host_logits, limits, self._spec.scale, most)
        return chosen, p if want_p else None

    def _write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, want_log_sum: bool
    ) -> tuple[Tensor, Tensor | None]:
        chosen, kv, fetched = self.selection, self._kv, None
        assert chosen is not None
        if self._fetch is not None:
            fetched = self._fetch.targets
            self._transfer.hand_over(chosen.rows, chosen.counts, chosen.padding, chosen.mass)
            self._fetch = None

        def work() -> tuple[Tensor, Tensor]:
            kv.write(key, value, slots)
            host_keys, host_values = fetched or (None, None)
            return attend_rows(
                query, kv.keys, kv.values, kv.empty, host_keys, host_values, chosen.counts, self._spec.scale
            )

        inputs = (query, key, value, slots, chosen.counts, *(fetched or ()))
        context, log_sum = self.pieces.run("attend", inputs, work, lasts=False)
        return context, log_sum if want_log_sum else None
