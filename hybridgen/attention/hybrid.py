"""HybridGen's attention of one layer (paper section 4; contracts.md `select` and `off`).

The CPU scores the host's keys while the device is elsewhere; the device chooses, fetches K and V of
the chosen rows, and runs one softmax of the true query over sinks, window, new token and fetched rows.
With lookahead the choosing query is the one predicted from the previous layer's input: the scan is over,
or nearly so, when the layer begins, and the next layer's scan runs beside choice, fetch and attention.
Without, the layer waits for its own scan.
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
from hybridgen.types import KeepRule, LayerPlan, TokenSelection


class HybridAttention(LayerAttention):
    """State of one layer between `submit`, `choose` and `attend`; choice and attention in torch."""

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: TieredKV,
        worker: LogitWorker,
        transfer: TransferEngine,
        predicts: bool,
        staging: Staging | None,
    ) -> None:
        """staging: where fetched rows go; None for an executor that reads them in place."""
        self.predicts = predicts
        self.host_lengths: list[int] = [0] * len(kv.lengths)
        self._kv, self._staging = kv, staging
        self._layer, self._spec = layer, spec
        self._worker, self._transfer = worker, transfer
        self._telemetry = transfer.telemetry
        self._rule: KeepRule | None = None
        self._query: Tensor | None = None
        self._scan: ScanTicket | None = None
        self._fetch: FetchTicket | None = None
        self._submitted = self._chosen = Ticket()

    def submit(self, query: Tensor, plan: LayerPlan) -> None:
        self._rule = plan.keep
        self.selection = self._fetch = self.probed_mass = None
        self.host_lengths = self._kv.admit()
        if max(self.host_lengths) == 0:
            self.selection = nothing_to_choose(query.shape[0], self._spec.num_kv_heads, query.device)
            return
        self._query = query
        self._scan = self._scan_host(query)
        self._submitted = self._transfer.mark()

    def choose(self) -> None:
        if self._scan is None:
            return
        assert self._query is not None and self._rule is not None
        logits = self._scan.logits()
        with self._transfer.beside(self._submitted):
            self._transfer.hand_over(self._query)
            with self._telemetry.span("choose", self._layer, row="beside"):
                self.selection = self._select(self._query, logits, self._rule)
                self._chosen = self._transfer.mark()
                self._scan.release(self._chosen)
            with self._telemetry.span("fetch", self._layer, row="beside"):
                self._bring(self.selection)
        self._scan = self._query = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        if not self.predicts:
            self.submit(query, plan)
            self.choose()
        assert self.selection is not None
        self._chosen.wait()  # the choice reads the window, and the new token is not in it
        self._kv.append(key, value, place.slots)
        with self._telemetry.span("attention", self._layer):
            context, log_sum = self._attend(query, self.selection, want_log_sum=plan.probe_mass)
        if log_sum is not None and max(self.host_lengths):
            self._probe(query, log_sum)
        return context.to(query.dtype).reshape(query.shape[0], -1)

    def age(self) -> None:
        self._kv.age()

    def load_past(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self._kv.load_past(sequence, keys, values)

    def store(self, sequence: int, keys: Tensor, values: Tensor) -> list[Ticket]:
        self._kv.store(sequence, keys, values)
        return self._kv.pending()

    # What `attention/native.py` does in its own way

    def _select(self, query: Tensor, host_logits: Tensor, rule: KeepRule) -> TokenSelection:
        """Choose from host_logits [B, Hq, N] and, by the same query [B, Hq, d], sinks and window."""
        host = group_by_kv_head(host_logits, self._spec.num_kv_heads)
        host_p, local_p = group_probabilities(self._local_scores(query), host, self.host_lengths)
        return choose(rule, host_p, local_p, self.host_lengths)

    def _bring(self, chosen: TokenSelection) -> None:
        """Have K and V of the chosen rows on the device when `_attend` wants them."""
        assert self._staging is not None
        targets = self._staging.slot(self._layer, chosen.rows.shape[2])
        sources = [self._kv.host_keys, self._kv.host_values]
        self._fetch = self._transfer.fetch_rows(sources, chosen.rows, chosen.counts, targets)

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        """Context of query [B, Hq, d] over sinks, window, new token and chosen rows, and its log-sum-exp [B, Hq]."""
        logits, values = [self._local_scores(query)], [self._kv.values]
        if self._fetch is not None:
            keys, fetched_values = self._fetch.rows()
            self._transfer.hand_over(chosen.rows, chosen.counts, chosen.padding, chosen.mass)
            grouped = group_by_kv_head(query, self._spec.num_kv_heads)
            logits.append(attention_logits(grouped, keys, chosen.padding, self._spec.scale))
            values.append(fetched_values)
            self._fetch = None
        context = joint_attention(logits, values)
        log_sum = torch.logsumexp(torch.cat(logits, dim=-1), dim=-1).flatten(1) if want_log_sum else None
        return context, log_sum

    def _local_scores(self, query: Tensor) -> Tensor:
        """Logits of sinks and window: float32 [B, Hkv, G, device rows], -inf where there is no token."""
        grouped = group_by_kv_head(query, self._spec.num_kv_heads)
        return attention_logits(grouped, self._kv.keys, self._kv.empty, self._spec.scale)

    def _scan_host(self, query: Tensor) -> ScanTicket:
        return self._worker.submit(query, self._kv.host_keys, self.host_lengths, self._spec.scale, self._layer)

    def _probe(self, query: Tensor, attended: Tensor) -> None:
        """Compare what was attended, log-sum-exp [B, Hq], with all there is, by the true query."""
        scan = self._scan_host(query)
        host = mask_beyond(group_by_kv_head(scan.logits(), self._spec.num_kv_heads), self.host_lengths)
        total = torch.logsumexp(torch.cat((self._local_scores(query), host), dim=-1), dim=-1)
        scan.release(self._transfer.mark())
        covered = torch.exp(attended.view(total.shape) - total)
        self.probed_mass = covered.mean(-1)
