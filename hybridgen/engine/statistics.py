"""What was attended: budget, kept fraction and covered mass, summed up over the steps of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch
from hybridgen.types import TokenSelection


@dataclass
class AttentionStatistics:
    """Sums stay on the device until `summary`, so that observing a step waits for nothing.

    budget: attended tokens / context length, mean over KV heads, layers and sequences (contracts.md).
    """

    steps: int = 0
    _budget: list[Tensor] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)
    _mass: list[Tensor] = field(default_factory=list)
    _least_mass: list[Tensor] = field(default_factory=list)
    _probes: list[Tensor] = field(default_factory=list)

    def observe(self, batch: Batch) -> None:
        """Call after each decode step."""
        self.steps += 1
        fixed, total = 0.0, 0  # budget of what needs no choice, and (layer, sequence) pairs
        lengths: list[int] = []
        hosts: list[int] = []
        selections: list[TokenSelection] = []
        for micro_batch in batch.micro_batches:
            for attention in micro_batch.layers:
                if attention.attended is not None:
                    fixed += sum(a / n for a, n in zip(attention.attended, micro_batch.lengths, strict=True))
                    total += len(attention.attended)
                    continue
                host = attention.host_lengths or [0] * len(micro_batch.lengths)
                fixed += sum((n - h) / n for n, h in zip(micro_batch.lengths, host, strict=True))
                total += len(host)
                if attention.selection is not None:
                    selections.append(attention.selection)
                    lengths += micro_batch.lengths
                    hosts += host
                if attention.probed_mass is not None:
                    self._probes.append(attention.probed_mass.mean())
        device = batch.micro_batches[0].device
        if not selections:
            self._budget.append(torch.tensor(fixed / total, device=device))
            return
        kept = _means([selection.counts for selection in selections])
        mass = torch.cat([selection.mass.flatten() for selection in selections])
        # One small tensor a step, not one a layer: each costs a wait on a GPU.
        known = torch.tensor([lengths, hosts], dtype=torch.float32).to(device)
        self._budget.append((kept / known[0]).sum().add_(fixed).div_(total))
        filled = sum(1 for host in hosts if host)
        if filled:
            self._kept.append((kept / known[1].clamp(min=1)).sum() / filled)
        # NaN where candidates were kept unscored: what these cover is not known.
        self._mass.append(mass.nanmean())
        self._least_mass.append(mass.nan_to_num(nan=torch.inf).min())

    def summary(self) -> dict[str, float | None]:
        """Means over all steps; None where nothing was chosen."""

        def mean(parts: list[Tensor]) -> float | None:
            value = float(torch.stack(parts).nanmean()) if parts else math.nan
            return None if math.isnan(value) else value

        least = float(torch.stack(self._least_mass).min()) if self._mass else math.inf
        return {
            "budget": mean(self._budget),
            "kept_fraction": mean(self._kept),
            "mass_mean": mean(self._mass),
            "mass_min": None if math.isinf(least) else least,
            "mass_true": mean(self._probes),
        }


def _means(counts: list[Tensor]) -> Tensor:
    """float32 [sum of B]: the mean over KV heads of counts [B, Hkv], in a few operations where all have as many."""
    if len({part.shape[1] for part in counts}) == 1:
        return torch.cat(counts).float().mean(-1)
    return torch.cat([part.float().mean(-1) for part in counts])
