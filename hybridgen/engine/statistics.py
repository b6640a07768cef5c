"""What was attended: budget, kept fraction and covered mass, summed up over the steps of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridgen.engine.batch import Batch


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
        budgets: list[Tensor] = []
        kept: list[Tensor] = []
        masses: list[Tensor] = []
        for micro_batch in batch.micro_batches:
            device = micro_batch.device
            lengths = torch.tensor(micro_batch.lengths, dtype=torch.float32, device=device)
            for attention in micro_batch.layers:
                if attention.host_lengths is None:
                    budgets.append(torch.ones_like(lengths))
                    continue
                host = torch.tensor(attention.host_lengths, dtype=torch.float32, device=device)
                chosen = torch.zeros_like(host)
                if attention.selection is not None:
                    chosen = attention.selection.counts.float().mean(-1)
                    masses.append(attention.selection.mass.flatten())
                    filled = [index for index, rows in enumerate(attention.host_lengths) if rows]
                    if filled:
                        kept.append((chosen / host)[filled])
                budgets.append((lengths - host + chosen) / lengths)
                if attention.probed_mass is not None:
                    self._probes.append(attention.probed_mass.mean())
        self._budget.append(torch.cat(budgets).mean())
        if masses:
            mass = torch.cat(masses)
            self._mass.append(mass.mean())
            self._least_mass.append(mass.min())
        if kept:
            self._kept.append(torch.cat(kept).mean())

    def summary(self) -> dict[str, float | None]:
        """Means over all steps; None where nothing was chosen."""

        def mean(parts: list[Tensor]) -> float | None:
            return float(torch.stack(parts).mean()) if parts else None

        return {
            "budget": mean(self._budget),
            "kept_fraction": mean(self._kept),
            "mass_mean": mean(self._mass),
            "mass_min": float(torch.stack(self._least_mass).min()) if self._mass else None,
            "mass_true": mean(self._probes),
        }
