"""HybridGen's attention of one layer (paper section 4; contracts.md `select` and `off`).

The CPU scores the host's keys while the device is elsewhere; the device chooses, fetches K and V of
the chosen rows, and runs one softmax of the true query over sinks, window, new token and fetched rows.
With lookahead the choosing query is the one predicted from the previous layer's input: the scan is over,
or nearly so, when the layer begins, and the next layer's scan runs beside choice, fetch and attention.
Without, the layer waits for its own scan. Where the plan says `pre_qkt`, candidates alone are scored.
Where a sketch lies on the device, the device scores by it; choice and fetch then follow at once, beside the layer
before.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from hybridgen.attention.base import (
    DecodePlace,
    attention_logits,
    group_by_kv_head,
    joint_attention,
)
from hybridgen.attention.tiered import TieredAttention
from hybridgen.kv_cache.device_sketch import DeviceScan
from hybridgen.kv_cache.staging import Staging
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.spec import LayerSpec
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.logit_worker import LogitWorker, ScanTicket
from hybridgen.offload.scanned_keys import ScannedKeys
from hybridgen.offload.transfer import FetchTicket, Ticket, TransferEngine
from hybridgen.selection.budget import (
    KeepLimits,
    choose,
    group_probabilities,
    keep_all,
    keep_limits,
    mask_beyond,
    most_by_alpha,
    nothing_to_choose,
)
from hybridgen.selection.candidates import Candidates, all_are_kept, candidate_sizes, trial_mass
from hybridgen.selection.host_logits import HostLogits
from hybridgen.types import LayerPlan, TokenSelection

Scores = HostLogits | DeviceScan | None  # logits, or a scan that will run in the stream of whoever asks for them


class HybridAttention(TieredAttention):
    """State of one layer between `submit`, `choose` and `attend`; choice and attention in torch."""

    weighs_by_scores = False  # `logits`: what is kept has to be scored
    in_pieces = False  # what it makes lies in the same place each time

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        kv: TieredKV,
        worker: LogitWorker,
        transfer: TransferEngine,
        predicts: bool,
        staging: Staging | None,
        candidates: Candidates | None = None,
        listed_rows: HostBuffer | None = None,
    ) -> None:
        """staging: where fetched rows go; None for an executor that reads them in place.

        candidates, listed_rows (int32, a row number for each host row of each KV head): None where no plan will ask
        for `pre_qkt`.
        """
        super().__init__(layer, spec, kv, transfer)
        self.predicts = predicts
        #: `choose` is called when an earlier layer begins, which does not wait for this one's rows.
        self.chooses_early = False
        self.host_lengths: list[int] = [0] * len(kv.lengths)
        self.scored = list(self.host_lengths)
        self._staging = staging
        self._candidates, self._listed_rows = candidates, listed_rows
        self._worker = worker
        self._plan: LayerPlan | None = None
        self._limits: KeepLimits | None = None  # of a choice that is to be made
        self._listed = False  # whether only candidates are scored
        self._query: Tensor | None = None
        self._scan: ScanTicket | None = None
        self._fetch: FetchTicket | None = None
        self._submitted = self._chosen = self._listed_copy = Ticket()
        self._rows_are_there = False

    def submit(self, query: Tensor, plan: LayerPlan) -> None:
        assert plan.keep is not None
        self._plan, self._query, self._rows_are_there = plan, query, False
        self.selection = self._fetch = self._scan = self.probed_mass = None
        self.trial_masses = []
        self.host_lengths = self._kv.admit()
        self.scored = [0] * len(self.host_lengths)
        if max(self.host_lengths) == 0:
            self.selection = nothing_to_choose(query.shape[0], self._spec.num_kv_heads, query.device)
            return
        sizes = candidate_sizes(plan, self.host_lengths)
        self._listed = sizes is not None
        self._limits = keep_limits(plan.keep, self.host_lengths, sizes, plan.extra, self._kv.host_keys.alive())
        if sizes is None:
            self.scored = self.host_lengths
            self._scan = self._kv.host_keys.device_scan(query, self.host_lengths, self._spec.scale)
            if self._scan is None:
                self._scan = self._scan_host(query, self._kv.host_keys.scanned())
        else:
            rows = self._name_candidates(sizes)
            if self.weighs_by_scores or not all_are_kept(self._limits):
                self.scored = sizes
                scale = self._spec.scale
                keys = self._kv.host_keys.scanned()
                self._scan = self._worker.submit(query, keys, sizes, scale, self._layer, rows, self._listed_copy)
        self._submitted = self._transfer.mark(self._submitted)
        if isinstance(self._scan, DeviceScan):
            self.choose()  # at once: choice and fetch run beside the layer before

    def choose(self) -> None:
        if self._limits is None:
            return
        assert self._query is not None
        scan = self._scan
        # In a stream of its own: a choice does not wait for the fetch of the layer before.
        with self._transfer.beside(self._submitted, "choice"):
            self._transfer.hand_over(self._query)
            scores = None if scan is None else scan if isinstance(scan, DeviceScan) else scan.logits()
            with self._telemetry.span("choose", self._layer, row="choice"):
                self.selection = self._selected(self._query, scores, self._limits)
                self._chosen = self._transfer.mark(self._chosen)
                if scan is not None:
                    scan.release(self._chosen)
        with self._transfer.beside(self._chosen):
            self._transfer.hand_over(self.selection.rows, self.selection.counts)
            with self._telemetry.span("fetch", self._layer, row="beside"):
                self._bring(self.selection)
        self._scan = self._query = self._limits = None
        if not (self.chooses_early or scan is None or self._listed or self._kv.host_keys.sketched):
            # The scan is what a step takes longest for: all of the device's work of the layer runs beside the next one.
            self._wait_for_rows()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, place: DecodePlace, plan: LayerPlan) -> Tensor:
        if not self.predicts:
            self.submit(query, plan)
            self.choose()
        assert self.selection is not None
        self._wait_for_rows()
        with self._telemetry.span("attention", self._layer):
            context, log_sum = self._write_and_attend(query, key, value, place.slots, plan.probe_mass)
        self._kv.grow()
        if log_sum is not None and max(self.host_lengths):
            self._probe(query, log_sum)
        return context.to(query.dtype).reshape(query.shape[0], -1)

    def structure(self, place: DecodePlace, plan: LayerPlan) -> Hashable | None:
        """A sketch on the device leaves the host nothing to do, but while a block moves to the host."""
        lengths = self._kv.steady_host_lengths()
        if self._kv.keys.is_cuda and not self.in_pieces:
            return None
        if lengths is None or plan.probe_mass or self._candidates is not None or not self._kv.host_keys.on_device:
            return None
        return plan, tuple(lengths)

    def repeated(self) -> None:
        self._kv.grow()
        self.probed_mass = None

    def _wait_for_rows(self) -> None:
        """In the device's stream, until fetch and choice are done: choosing reads the window without the new token."""
        if not self._rows_are_there:
            with self._telemetry.span("link_wait", self._layer):
                (self._fetch or self._chosen).wait()
            self._rows_are_there = True

    def _selected(self, query: Tensor, scores: Scores, limits: KeepLimits) -> TokenSelection:
        """The choice in rows of the host tier, from logits [B, Hq, n] of the scored ones (None: all are kept)."""
        candidates = self._candidates
        if scores is None:
            assert candidates is not None
            return keep_all(candidates.rows.to(torch.int64), limits.scored, self.host_lengths)
        logits = HostLogits(scores.device_logits()) if isinstance(scores, DeviceScan) else scores
        chosen, p = self._select(query, logits, limits, want_p=candidates is not None)
        if candidates is not None:
            assert self._plan is not None and p is not None
            if not self._listed:
                self.trial_masses = [
                    trial_mass(candidates, p, chosen, size, self.host_lengths) for size in self._plan.trial_tokens
                ]
            candidates.learn(p, self._listed, limits.scored)
            if self._listed:
                rows = candidates.rows.gather(-1, chosen.rows).to(torch.int64)
                chosen = replace(chosen, rows=rows.masked_fill_(chosen.padding.squeeze(2), 0))
        if isinstance(scores, DeviceScan):
            scores.fetched(chosen)
        return replace(chosen, host_lengths=self.host_lengths)

    # What `attention/native.py` and the GPU's kernels do in their own way

    def _write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, want_log_sum: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The new token into the window, then `_attend`."""
        assert self.selection is not None
        self._kv.write(key, value, slots)
        return self._attend(query, self.selection, want_log_sum)

    def _select(
        self, query: Tensor, host_logits: HostLogits, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        """Choose from host_logits [B, Hq, n] and, by the same query [B, Hq, d], sinks and window.

        Rows are places among the n; p, where wanted, is float32 [B, Hkv, n].
        """
        host, local = group_by_kv_head(host_logits.float(), self._spec.num_kv_heads), self._local_scores(query)
        host_p, local_p = group_probabilities(local, host, limits.scored)
        most = None if limits.alpha is None else most_by_alpha(limits, local, host)
        return choose(limits, host_p, local_p, most), host_p

    def _most_by_alpha(self, query: Tensor, host_logits: HostLogits, limits: KeepLimits) -> Tensor | None:
        """For choosing kernels, which see the logits later: int64 [B, 1] in place of `limits.most`; None: no alpha."""
        if limits.alpha is None:
            return None
        host = group_by_kv_head(host_logits.float(), self._spec.num_kv_heads)
        return most_by_alpha(limits, self._local_scores(query), host)

    def _bring(self, chosen: TokenSelection) -> None:
        """Have K and V of the chosen rows on the device when `_attend` wants them."""
        assert self._staging is not None
        self._fetch = self._kv.host_keys.fetch(
            self._kv.host_values, chosen.rows, chosen.counts, self._staging, self._layer
        )

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        """Context of query [B, Hq, d] over sinks, window, new token and chosen rows, and its log-sum-exp [B, Hq]."""
        logits, values = [self._local_scores(query)], [self._kv.values]
        if self._fetch is not None:
            keys, fetched_values = self._fetch.targets
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

    def _scan_host(self, query: Tensor, keys: HostBuffer | ScannedKeys) -> ScanTicket:
        return self._worker.submit(query, keys, self.host_lengths, self._spec.scale, self._layer)

    def _name_candidates(self, sizes: list[int]) -> HostBuffer:
        """The list where the scan reads it: int32 [B, Hkv, longest size]; on its way there if it is new."""
        assert self._candidates is not None and self._listed_rows is not None
        self._listed_copy.wait()  # of the list before
        self._listed_copy = Ticket()
        is_new = self._candidates.name(sizes, self.host_lengths)
        shape = self._candidates.rows.shape
        host, seen = self._listed_rows.tensor.view(-1), self._listed_rows.device_view.view(-1)
        rows = HostBuffer(host[: shape.numel()].view(shape), seen[: shape.numel()].view(shape))
        if is_new:
            self._listed_copy = self._transfer.copy(rows.device_view, self._candidates.rows, "d2h")
        return rows

    def _probe(self, query: Tensor, attended: Tensor) -> None:
        """Compare what was attended, log-sum-exp [B, Hq], with all there is, by the true query."""
        scan = self._scan_host(query, self._kv.host_keys.exact())
        host = mask_beyond(group_by_kv_head(scan.logits().float(), self._spec.num_kv_heads), self.host_lengths)
        total = torch.logsumexp(torch.cat((self._local_scores(query), host), dim=-1), dim=-1)
        scan.release(self._transfer.mark())
        covered = torch.exp(attended.view(total.shape) - total)
        self.probed_mass = covered.mean(-1)
