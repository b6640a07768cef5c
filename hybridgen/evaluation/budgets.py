"""Settings that give a strategy a budget: attended tokens / context length, mean over layers (contracts.md).

Pure: a strategy's settings in, settings out. Of a budget b, the e resident ones of L layers take 1.0 each; what is left
to each other layer is b' = (b L - e) / (L - e). Sinks and window get at most half of it, the host's tokens the rest; a
cache that evicts is cut by its policy. Settings are named by their dotted paths; one that a strategy's file does not
have has its default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

from hybridgen.config import Config, Setting, Settings, merge_settings
from hybridgen.errors import ConfigError
from hybridgen.kv_cache.layout import AGEING_BLOCK, WindowLayout
from hybridgen.selection.eviction import POLICIES, EvictionPolicy

ATTENDS_TO_ALL = ("resident", "streamed", "on_cpu")  # modes of layers whose budget is 1.0 whatever is asked for
KEYFORMER_RECENT = 0.3  # of what it keeps (Keyformer, arXiv 2403.09054; algorithms.md 4)
SNAPKV_RECENT = 32  # prompt tokens that vote, and are kept (SnapKV, arXiv 2404.14469)
DEVICE_SKETCHES = ("partial", "pages")  # that lie on the device in any case
SMALLEST_KEEP = 1e-6


@dataclass(frozen=True)
class Split:
    """Of what a budget consists, as shares of the context, means over all layers and steps.

    exact: resident layers; local: sinks, window and new token of the others, or all that an evicting cache keeps;
    fetched: tokens chosen from the host. is_bound: the method decides itself, and attends to no more than this.
    """

    exact: float
    local: float
    fetched: float
    is_bound: bool = False

    @property
    def budget(self) -> float:
        return self.exact + self.local + self.fetched

    def describe(self) -> str:
        bound = "at most " if self.is_bound else ""
        return (
            f"{bound}{self.budget:.4f} = exact {self.exact:.4f} + local {self.local:.4f} + fetched {self.fetched:.4f}"
        )


ALL_TOKENS = Split(1.0, 0.0, 0.0)


class BudgetError(ConfigError):
    """Less than what a strategy attends to in any case; smallest: the least that it can have."""

    def __init__(self, message: str, smallest: float) -> None:
        super().__init__(message)
        self.smallest = smallest


def with_budget(
    name: str, settings: Settings, modes: Sequence[str], budget: float, prompt: int, steps: int
) -> tuple[Settings, Split]:
    """The settings with which strategy `name` attends to this share of the context, and of what the share consists.

    settings: the strategy's, merged; modes: of its layers; prompt, steps: tokens prefilled, and decode steps after
    them. BudgetError: less than what the method attends to in any case.
    """
    exact, count = sum(mode == "resident" for mode in modes), len(modes)
    if all(mode in ATTENDS_TO_ALL for mode in modes):
        return settings, ALL_TOKENS
    others = count - exact
    each = (budget * count - exact) / others
    solve = _evicting if _value(settings, "attention.executor") == "evicting" else _hybrid
    changes, local, fetched, least = solve(settings, each, prompt, max(1, steps), turns_of(settings, modes))
    if changes is None:
        smallest = math.ceil(1e4 * (exact + least * others) / count) / 1e4
        raise BudgetError(
            f"--budget {budget:g}: strategy {name} attends to more in any case with {prompt} prompt tokens "
            f"({exact} of {count} layers are exact, the others attend to {least:.4f} of the context at least); "
            f"the smallest possible is {smallest:.4f}",
            smallest,
        )
    given = {path: Setting(value, f"--budget {budget:g}") for path, value in changes.items()}
    is_bound = _value(settings, "selection.alpha") is not None
    return settings | given, Split(exact / count, local * others / count, fetched * others / count, is_bound)


def with_keep(settings: Settings, keep: float | int, prompt: int) -> Settings:
    """The settings with which this share of the host's tokens (a float) or as many (an int) are fetched.

    A cache that evicts keeps the same share of the prompt as its heavy tokens, and its recent ones beside them; one
    that scores nothing, as its most recent ones.
    """
    source = f"--keep {keep}"
    if _value(settings, "attention.executor") == "evicting":
        tokens = keep if isinstance(keep, int) else math.ceil(Fraction(str(keep)) * prompt)
        kept = Setting(max(1, min(tokens, prompt)), source)
        if not _policy(settings).has_scores:
            return settings | {"eviction.heavy": Setting(0, source), "eviction.recent": kept}
        recent = settings.get("eviction.recent", Setting(_value(settings, "eviction.recent"), "the default"))
        return settings | {"eviction.heavy": kept, "eviction.recent": recent}
    changes = {"selection.keep": Setting(keep, source), "selection.min_keep": Setting(0, source)}
    return merge_settings(settings, changes)


def local_share(layout: WindowLayout, prompt: int, steps: int, layer: int, num_layers: int) -> float:
    """Sinks, window and new token of a layer with a host tier, over the context length: mean over the decode steps.

    After a prefill the window holds 0 to 63 tokens more than `layout.window`. In decode it grows, and a block of 64
    leaves it, seen by the next step, when it has reached the layer's threshold.
    """
    host, threshold = layout.host_rows(prompt), layout.ageing_threshold(layer, num_layers)
    shares = []
    for length in range(prompt + 1, prompt + steps + 1):
        shares.append((length - host) / length)
        if length - layout.sinks - host >= threshold:
            host += AGEING_BLOCK
    return fmean(shares)


_Solution = tuple[dict[str, Any] | None, float, float, float]
"""Settings (None: it cannot be), local and fetched share of each layer, and the least that each can attend to."""


def _hybrid(settings: Settings, each: float, prompt: int, steps: int, layers: list[tuple[int, int]]) -> _Solution:
    sinks, window = int(_value(settings, "cache.sinks")), int(_value(settings, "cache.gpu_window"))

    def local(size: int) -> float:
        layout = WindowLayout(sinks, size)
        return fmean(local_share(layout, prompt, steps, *layer) for layer in layers)

    low, high = 1, window  # a larger window never means fewer local tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if local(middle) <= each / 2 else (low, middle - 1)
    window, held, length = low, local(low), prompt + (steps + 1) / 2
    least = min(1.0, local(1) + 1 / length)
    if held >= 1.0:  # there is no host tier to choose from
        return (None if each < 1.0 else {}), 1.0, 0.0, 1.0
    keep = min(1.0, round((each - held) / (1 - held), 6))
    if keep < SMALLEST_KEEP:
        return None, 0.0, 0.0, least
    changes = {
        "cache.gpu_window": window,
        "selection.keep": keep,
        "selection.keep_mass": None,
        "selection.min_keep": 0,
    }
    return changes, held, keep * (1 - held), least


def _evicting(settings: Settings, each: float, prompt: int, steps: int, layers: list[tuple[int, int]]) -> _Solution:
    """heavy and recent as counts, beside the sinks and the step's own token."""
    name, policy = _value(settings, "eviction.policy"), _policy(settings)
    sinks = int(_value(settings, "eviction.sinks"))
    length = prompt + (steps + 1) / 2
    new = 1 if policy.evicts_in_decode else (steps + 1) / 2  # the latter: all that were generated so far
    beside = sinks + new - policy.window_counts_new
    kept = min(prompt - sinks, round(each * length - beside))
    least = min(1.0, (beside + 2) / length)
    if kept < 2:
        return None, 0.0, 0.0, least
    if not policy.has_scores:
        recent = kept
    elif name == "keyformer":
        recent = max(1, round(KEYFORMER_RECENT * kept))
    else:
        recent = min(SNAPKV_RECENT, kept // 2) if name == "snapkv" else kept // 2
    changes = {"eviction.heavy": kept - recent, "eviction.recent": recent}
    return changes, (kept + beside) / length, 0.0, least


def _policy(settings: Settings) -> type[EvictionPolicy]:
    return POLICIES[str(_value(settings, "eviction.policy"))]


def _value(settings: Settings, path: str) -> Any:
    """What was given, else the default."""
    if path in settings:
        return settings[path].value
    section, name = path.split(".")
    return getattr(getattr(Config(), section), name)


def turns_of(settings: Settings, modes: Sequence[str]) -> list[tuple[int, int]]:
    """(turn, of how many) in which the layers that are not resident age: all in the first where the device scores."""
    in_step = _value(settings, "cache.sketch_home") == "gpu" or _value(settings, "cache.sketch") in DEVICE_SKETCHES
    return [(0 if in_step else layer, len(modes)) for layer, mode in enumerate(modes) if mode != "resident"]
