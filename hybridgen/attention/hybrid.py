"""HybridGen's attention of one layer (paper section 4; contracts.md `select` and `off`).

The CPU scores the host's keys while the device is elsewhere; the device chooses, fetches K and V of
the chosen rows, and runs one softmax of the true query over sinks, window, new token and fetched rows.
With lookahead the choosing query is the one predicted from the previous layer's input, so that scan
and fetch are over when the layer begins; without, the layer waits for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.base import (
    DecodePlace,
    LayerAttention,
    attention_logits,
    group_by_kv_head,
    joint_attention,
)
from hybridgen.kv_cache.staging import Staging
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.logit_worker import LogitWorker, ScanTicket
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine
from hybridgen.selection.budget import choose, group_probabilities, mask_beyond, nothing_to_choose
from hybridgen.types import LayerPlan


class HybridAttention(LayerAttention):
    """State of one layer between `submit`, `choose` and `attend`."""

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: TieredKV,
        staging: Staging,
        worker: LogitWorker,
        transfer: TransferEngine,
        predicts: bool,
    ) -> None:
        self.predicts = predicts
        self.host_lengths: list[int] = [0] * len(kv.lengths)
        self._kv, self._staging = kv, staging
        self._layer, self._spec = layer, spec
        self._worker, self._transfer = worker, transfer
        self._telemetry = transfer.telemetry
        self._plan: LayerPlan | None = None
        self._local_logits: Tensor | None = None
        self._scan: ScanTicket | None = None
        self._fetch: FetchTicket | None = None
        self._submitted = Ticket()

    def submit(self, query: Tensor, plan: LayerPlan) -> None:
        self._plan = plan
        self.selection = self._fetch = self.probed_mass = None
        self.host_lengths = self._kv.admit()
        if max(self.host_lengths) == 0:
            self.selection = nothing_to_choose(query.shape[0], self._spec.num_kv_heads, query.device)
            return
        self._scan = self._worker.submit(query, self._kv.host_keys, self.host_lengths, self._spec.scale, self._layer)
        self._local_logits = self._local_scores(group_by_kv_head(query, self._spec.num_kv_heads))
        self._submitted = self._transfer.mark()

    def choose(self) -> None:
        if self._scan is None or self._plan is None or self._plan.keep is None:
            return
        assert self._local_logits is not None
        host_logits = group_by_kv_head(self._scan.logits(), self._spec.num_kv_heads)
        with self._transfer.beside(self._submitted):
            self._transfer.hand_over(self._local_logits)
            with self._telemetry.span("choose", self._layer):
                host_p, local_p = group_probabilities(self._local_logits, host_logits, self.host_lengths)
                self._scan.release(self._transfer.mark())
                self.selection = choose(self._plan.keep, host_p, local_p, self.host_lengths)
            with self._telemetry.span("fetch", self._layer):
                self._fetch = self._transfer.fetch_rows(
                    self._kv.host_keys,
                    self._kv.host_values,
                    self.selection.rows,
                    self.selection.counts,
                    self._staging.slot(self._layer, self.selection.rows.shape[2]),
                )
        self._scan = self._local_logits = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        if not self.predicts:
            self.submit(query, plan)
            self.choose()
        self._kv.append(key, value, place.slots)
        with self._telemetry.span("attention", self._layer):
            grouped = group_by_kv_head(query, self._spec.num_kv_heads)
            logits, values = [self._local_scores(grouped)], [self._kv.values]
            if self._fetch is not None and self.selection is not None:
                keys, fetched_values = self._fetch.rows()
                chosen = self.selection
                self._transfer.hand_over(chosen.rows, chosen.counts, chosen.padding, chosen.mass)
                logits.append(attention_logits(grouped, keys, self.selection.padding, self._spec.scale))
                values.append(fetched_values)
            context = joint_attention(logits, values)
        if plan.probe_mass:
            self._probe(query, logits)
        return context.to(query.dtype).reshape(query.shape[0], -1)

    def age(self) -> None:
        self._kv.age()

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self._kv.load_past(sequence, keys, values)

    def store(self, sequence: int, keys: Tensor, values: Tensor) -> list[Ticket]:
        self._kv.store(sequence, keys, values)
        return self._kv.pending()

    def _local_scores(self, grouped: Tensor) -> Tensor:
        """Logits of sinks and window: float32 [B, Hkv, G, device rows], -inf where there is no token."""
        return attention_logits(grouped, self._kv.keys, self._kv.empty, self._spec.scale)

    def _probe(self, query: Tensor, attended: list[Tensor]) -> None:
        """Compare what was attended (its logits) with all there is, by the true query."""
        assert self.selection is not None
        lengths = self.selection.host_lengths
        if max(lengths) == 0:
            return
        scan = self._worker.submit(query, self._kv.host_keys, lengths, self._spec.scale, self._layer)
        host = mask_beyond(group_by_kv_head(scan.logits(), self._spec.num_kv_heads), lengths)
        total = torch.logsumexp(torch.cat((attended[0], host), dim=-1), dim=-1)
        scan.release(self._transfer.mark())
        self.probed_mass = torch.exp(torch.logsumexp(torch.cat(attended, dim=-1), dim=-1) - total).mean(-1)
