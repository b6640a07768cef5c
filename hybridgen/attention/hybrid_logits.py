"""`--lookahead logits`: the paper's scheme as written (HybridGen section 4; contracts.md).

The CPU's logits of the predicted query enter one softmax with the device's exact ones, so only V of the
chosen rows crosses the link. Chosen rows are those of `select`. The scored rows that are dropped keep their share
of the denominator, or (an ablation) the softmax is renormalised over what is attended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridgen.attention.base import group_by_kv_head, joint_attention
from hybridgen.attention.hybrid import HybridAttention
from hybridgen.selection.budget import KeepLimits, mask_beyond
from hybridgen.selection.host_logits import HostLogits
from hybridgen.types import TokenSelection


class LogitsHybridAttention(HybridAttention):
    """`HybridAttention` that weighs host tokens by the predicted query."""

    weighs_by_scores = True
    renormalise = False
    _host_logits: Tensor  # float32 [B, Hkv, G, K], of the chosen rows by the predicted query
    _dropped_log_sum: Tensor | None = None  # float32 [B, Hkv, G], log-sum-exp of the other host rows

    def _select(
        self, query: Tensor, host_logits: HostLogits, limits: KeepLimits, want_p: bool
    ) -> tuple[TokenSelection, Tensor | None]:
        host_logits = host_logits.on(query.device)
        chosen, p = super()._select(query, host_logits, limits, want_p)
        host = mask_beyond(group_by_kv_head(host_logits.values, self._spec.num_kv_heads), limits.scored)
        rows = chosen.rows.unsqueeze(2).expand(-1, -1, host.shape[2], -1)
        self._host_logits = host.gather(-1, rows).masked_fill_(chosen.padding, -torch.inf)
        self._dropped_log_sum = None
        if not self.renormalise:
            # Padding points to row 0, kept or not, so rows are counted rather than marked.
            times_kept = torch.zeros(host.shape, dtype=torch.int32, device=host.device)
            times_kept.scatter_add_(-1, rows, (~chosen.padding).expand(rows.shape).to(torch.int32))
            self._dropped_log_sum = torch.logsumexp(host.masked_fill(times_kept > 0, -torch.inf), dim=-1)
        return chosen, p

    def _bring(self, chosen: TokenSelection) -> None:
        assert self._staging is not None
        targets = self._staging.slot(self._layer, chosen.rows.shape[2])[1:]
        self._fetch = self._transfer.fetch_rows([self._kv.host_values], chosen.rows, chosen.counts, targets)

    def _attend(self, query: Tensor, chosen: TokenSelection, want_log_sum: bool) -> tuple[Tensor, Tensor | None]:
        logits, values = [self._local_scores(query)], [self._kv.values]
        if self._fetch is None:
            return joint_attention(logits, values), None
        values += self._fetch.targets
        self._transfer.hand_over(chosen.counts, chosen.mass, self._host_logits)
        logits.append(self._host_logits)
        context = joint_attention(logits, values)
        if self._dropped_log_sum is not None:
            self._transfer.hand_over(self._dropped_log_sum)
            attended = torch.logsumexp(torch.cat(logits, dim=-1), dim=-1)
            share = torch.sigmoid(attended - self._dropped_log_sum)  # attended / (attended + dropped)
            context = context * share.unsqueeze(-1)
        self._fetch = None
        # No log-sum-exp: it mixes two queries, so a probe could not compare it with the true one.
        return context, None
