"""What the rooms hand each other. Pure data: no logic, no device, no thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeepRule:
    """How many host tokens are kept (contracts.md, "What is kept").

    keep: a fraction of the host length in (0, 1] (float), a number of tokens (int), or None: no cap.
    mass: the share of attention probability that sinks, window and kept tokens must hold, or None.
    min_keep: never fewer than this many, as long as the host holds them.
    alpha: InfiniGen's rule (`budget.most_by_alpha`) in place of a mass, in units of logits, or None.
    multiple: K is rounded up to one of this, which divides every host length; not together with a mass or alpha.
    """

    keep: float | int | None
    mass: float | None
    min_keep: int
    alpha: float | None = None
    multiple: int = 1


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does in one decode step, as the scheduler planned it.

    resident, all: nothing is chosen; every token is attended to, on the device or wherever it lies.
    post_qkt: every host token is scored by its stored key. pre_qkt: candidates are named first, and
    only they are scored; K is what `keep` gives for the whole host tier, not for the candidates.
    keep, extra: K = min(host, ceil(extra x the K that `keep` gives)). `keep` is the floor; its cap
        does not bind what `extra` (>= 1) adds.
    scan_tokens: the number of candidates of a pre_qkt layer, the most recent and the heavy ones, and
        never fewer than K; None: every host token.
    trial_tokens: scan sizes to try on a fully scanned layer. Nothing is attended by them: for each, the
        mass is measured that the best K of as many candidates would have covered.
    """

    mode: Literal["resident", "all", "post_qkt", "pre_qkt"]
    keep: KeepRule | None
    scan_tokens: int | None = None
    probe_mass: bool = False  # measure by the true query what the attended tokens cover
    extra: float = 1.0
    trial_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """One decode step: a plan a layer."""

    layers: tuple[LayerPlan, ...]


@dataclass
class TokenSelection:
    """The host tokens chosen for one layer and micro-batch.

    rows: int64 [B, Hkv, K], rows of the host tier (token position - sinks); best first, but for the GPU's kernel.
    counts: int64 [B, Hkv], how many of them are kept; the rest of `rows` is padding (valid rows).
    padding: bool [B, Hkv, 1, K], true where `rows` is padding.
    host_lengths: rows of each sequence that were in the host tier when the scan was submitted.
    mass: float32 [B, Hkv], share of the choosing query's probability that sinks, window and the
        kept tokens hold.
    """

    rows: Tensor
    counts: Tensor
    padding: Tensor
    host_lengths: list[int]
    mass: Tensor


@dataclass(frozen=True)
class Positions:
    """Token positions of one model call, with the rotary tables of each distinct RoPE.

    index: int64 [T]. rotary: per RopeSpec id, (cos, sin), each [T, 1, head_dim].
    """

    index: Tensor
    rotary: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return [self.index, *(table for tables in self.rotary.values() for table in tables)]

    def held(self, hold: Callable[[Hashable, Tensor], Tensor]) -> Positions:
        """The same ones, each where `hold(name, tensor)` puts it."""
        rotary = {}
        for rope, (cos, sin) in self.rotary.items():
            rotary[rope] = hold(("cos", rope), cos), hold(("sin", rope), sin)
        return Positions(hold("positions", self.index), rotary)


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
