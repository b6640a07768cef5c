"""Equal quality across methods: for each the smallest budget whose KL from full attention is that of hybridgen.

    python experiments/match_budgets.py --text wikitext2_raw_test.txt                 # SmolLM2, context 8k: a GPU
    python experiments/match_budgets.py --text FILE --context 2k --window 128 --passages 4 --decode 32 --budgets 4

Budget: attended tokens / context length, mean over layers (contracts.md). Targets: hybridgen (`select`) with 5 and 10 %
of the host tier, and with 95 % of the attention mass. A method's KL is measured at some budgets on the same passages,
made to fall with the budget (isotonic regression of log KL), and interpolated: log KL over the logarithm of what each
layer attends to that is not exact, which is nearly straight. Intervals: the same for passages drawn anew, 200 times.

As such shares budgets go to other models, too: SmolLM2 has 30 layers, and three exact ones are a tenth of all that it
attends to (`budget_on`). Speed runs with random weights read the result by `read_matches`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Experiment, Point, Result, align, load, main, new_figure
from quality import add_quality_flags, measure_conditions, quality_settings, strategy_settings

from hybridgen.config import build_config
from hybridgen.engine.build import choose_model
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.evaluation.budgets import BudgetError, with_budget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS: dict[str, dict[str, Any]] = {
    "keep 0.05": {"selection.keep": 0.05, "selection.keep_mass": None, "selection.min_keep": 0},
    "keep 0.1": {"selection.keep": 0.1, "selection.keep_mass": None, "selection.min_keep": 0},
    "mass 0.95": {"selection.keep": None, "selection.keep_mass": 0.95, "selection.min_keep": 0},
}
OURS = "hybridgen"
EVICTING, CHOOSING = (0.08, 0.95), (0.02, 0.6)  # least and largest budget of the layers that are not exact


@dataclass(frozen=True)
class Method:
    """A strategy with changes, and where its grid begins and ends."""

    strategy: str
    grid: tuple[float, float]
    changes: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    OURS: Method("hybridgen", CHOOSING),
    "hybridgen-int2": Method("hybridgen", CHOOSING, {"cache.sketch": "int2", "cache.sketch_home": "host"}),
    "hybridgen-paper": Method("hybridgen-paper", CHOOSING),  # `logits`
    # The cap alone decides, here as with random weights, where alpha lets everything pass.
    "infinigen": Method("infinigen", CHOOSING, {"selection.alpha": None}),
    "quest": Method("quest", CHOOSING),
    "h2o": Method("h2o", EVICTING),
    "keyformer": Method("keyformer", EVICTING),
    "snapkv": Method("snapkv", EVICTING),
    "streaming-llm": Method("streaming-llm", EVICTING),
}
SMOKE_METHODS = ("infinigen", "h2o")
LEAST_KL = 1e-9  # that is told from none
DRAWS = 200
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Match:
    """A method's smallest budget for a target's KL; low, high: of its interval. None: not reached within the grid.

    each: what a layer attends to that is not exact. of_ours: what the target itself attends to. largest: of the grid.
    """

    target: str
    method: str
    kl: float
    budget: float | None
    low: float | None
    high: float | None
    each: float | None
    largest: float
    of_ours: float


def log_spaced(least: float, largest: float, count: int) -> list[float]:
    """`count` >= 2 numbers, each by the same factor larger than the one before."""
    return [least * (largest / least) ** (index / (count - 1)) for index in range(count)]


def falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never rises, by squared distance (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def smallest_share(shares: Sequence[float], divergences: Sequence[float], kl: float) -> float | None:
    """Where a curve through measured (share of the context, KL), shares rising, first comes down to `kl`.

    The smallest measured share if its KL is as small already; None if no share comes down to it.
    """
    logs, wanted = falling([math.log(max(value, LEAST_KL)) for value in divergences]), math.log(max(kl, LEAST_KL))
    if logs[0] <= wanted:
        return shares[0]
    for at in range(1, len(logs)):
        if logs[at] <= wanted:
            part = (logs[at - 1] - wanted) / (logs[at - 1] - logs[at])
            return float(shares[at - 1] * (shares[at] / shares[at - 1]) ** part)
    return None


def each_layers(budget: float, exact: int, layers: int) -> float:
    """What of the context each layer attends to that is not exact."""
    return (budget * layers - exact) / (layers - exact)


def budget_on(each: float, exact: int, layers: int) -> float:
    """The budget of another model whose layers, but for the exact ones, attend to this share."""
    return (exact + each * (layers - exact)) / layers


def matches(points: Sequence[Mapping[str, Any]]) -> list[Match]:
    """For each target and method that was measured."""
    targets, curves = _rows(points)
    found = []
    for target, ours in targets.items():
        for method, rows in curves.items():
            shares, exact, layers = shares_of(rows), rows[0]["exact"], rows[0]["layers"]
            each = smallest_share(shares, [row["kl"]["value"] for row in rows], ours["kl"]["value"])
            value, low, high = (
                None if share is None else budget_on(share, exact, layers) for share in (each, *_interval(rows, ours))
            )
            kl, of_ours = ours["kl"]["value"], ours["budget"]
            found.append(Match(target, method, kl, value, low, high, each, rows[-1]["budget"], of_ours))
    return found


def shares_of(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """What each layer attends to that is not exact, of rows of one method."""
    return [each_layers(row["budget"], row["exact"], row["layers"]) for row in rows]


def read_matches(file: Path, target: str) -> dict[str, Match]:
    """By method, of a committed result."""
    return {match.method: match for match in matches(load(file)) if match.target == target}


def curves_of(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Result]]:
    """What was measured of each method, by rising budget: `measure_conditions`, and the model's number of layers."""
    return _rows(points)[1]


def _rows(points: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Result], dict[str, list[Result]]]:
    """Targets by name; methods' rows by rising budget."""
    targets: dict[str, Result] = {}
    curves: dict[str, list[Result]] = {}
    for point in points:
        result = point["result"]
        for condition, row in zip(point["settings"]["conditions"], result["conditions"], strict=True):
            row = {**row, "layers": result["layers"]}
            if "target" in condition:
                targets[condition["target"]] = row
            else:
                curves.setdefault(condition["method"], []).append(row)
    return targets, {name: sorted(rows, key=lambda row: float(row["budget"])) for name, rows in curves.items()}


def _interval(rows: Sequence[Result], ours: Result) -> tuple[float | None, float | None]:
    """Of the matched share, over passages; None: beyond the grid."""
    count, draw = len(ours["kl_of_passages"]), random.Random(0)
    if count < 2:
        return None, None
    shares, found = shares_of(rows), []
    for _ in range(DRAWS):
        drawn = [draw.randrange(count) for _ in range(count)]
        means = [statistics.fmean(row["kl_of_passages"][index] for index in drawn) for row in (*rows, ours)]
        found.append(smallest_share(shares, means[:-1], means[-1]))
    found.sort(key=lambda value: math.inf if value is None else value)
    outside = round((1 - CONFIDENCE) / 2 * (DRAWS - 1))
    return found[outside], found[-1 - outside]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    add_quality_flags(parser)
    parser.add_argument("--budgets", type=int, default=7, metavar="N", help="of each method's grid (default 7)")


def points(arguments: argparse.Namespace) -> list[Point]:
    """The targets, then a point a method: its conditions share a prefill."""
    settings, local = quality_settings(arguments)
    count, methods = (3, SMOKE_METHODS) if arguments.smoke else (arguments.budgets, tuple(METHODS))
    targets = [{"target": name, "strategy": OURS, "settings": changes} for name, changes in TARGETS.items()]
    found = [Point("targets", {**settings, "conditions": targets}, local)]
    for name in methods:
        conditions = _conditions(name, log_spaced(*METHODS[name].grid, count), settings, local)
        found.append(Point(name, {**settings, "conditions": conditions}, local))
    return found


def _conditions(
    name: str, each: Sequence[float], settings: Mapping[str, Any], local: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """With these shares for the layers that are not exact; those that the method cannot have are left out."""
    method, model = METHODS[name], {"model.name": str(local.get("model", settings["model"]))}
    given = strategy_settings(method.strategy, settings, {**model, **method.changes})
    layers = choose_model(build_config(given)).spec.num_layers
    modes = layer_modes(build_config(given), layers)
    found = []
    for share in each:
        budget = budget_on(share, modes.count("resident"), layers)
        try:
            solved, _ = with_budget(name, given, modes, budget, settings["context"], settings["decode"])
        except BudgetError:
            continue
        changes = {path: setting.value for path, setting in solved.items() if setting.source.startswith("--budget")}
        asked = {"method": name, "strategy": method.strategy, "asked": round(budget, 6)}
        found.append({**asked, "settings": {**method.changes, **changes}})
    return found


def table(points: Sequence[Result]) -> str:
    """Matched budgets by method and target, then what was measured."""
    targets, curves = _rows(points)
    found = matches(points)
    rows = [["method", *(f"{name}: KL {row['kl']['value']:.4f}" for name, row in targets.items())]]
    rows.append(["hybridgen, its own budget", *(f"{row['budget']:.3f}" for row in targets.values())])
    for method in curves:
        rows.append([method, *(_cell(match) for match in found if match.method == method)])
    measured = [["measured", "budget", "kept", "KL", "95 %", "perplexity, %"]]
    measured += [_line(f"target {name}", row) for name, row in targets.items()]
    measured += [_line(name, row) for name, rows in curves.items() for row in rows]
    about = points[0]["settings"]
    title = f"{about['model']}: {about['passages']} x {about['decode']} tokens after {about['context']}"
    if about["weights"] == "random":
        title += "; RANDOM WEIGHTS: means nothing"
    return "\n\n".join((title, align(rows), align(measured)))


def _cell(match: Match) -> str:
    if match.budget is None:
        return f"not reached up to {match.largest:.2f}"
    low = "" if match.low is None else f"{match.low:.3f}"
    high = f">{match.largest:.2f}" if match.high is None else f"{match.high:.3f}"
    return f"{match.budget:.3f} [{low}, {high}]"


def _line(name: str, row: Mapping[str, Any]) -> list[str]:
    kl, kept = row["kl"], row["kept_fraction"]
    limits = "" if kl["low"] is None else f"{kl['low']:.4f}-{kl['high']:.4f}"
    kept = "-" if kept is None else f"{kept:.3f}"
    return [name, f"{row['budget']:.3f}", kept, f"{kl['value']:.4f}", limits, f"{row['percent']['value']:+.2f}"]


def draw(points: Sequence[Result]) -> Figure:
    """KL over budget, a line a method; the targets as dotted lines, and where each is met."""
    targets, curves = _rows(points)
    figure, panels = new_figure(width=8.0, height=5.0)
    panel = panels[0, 0]
    for index, (method, rows) in enumerate(curves.items()):
        values = [row["kl"]["value"] for row in rows]
        low = [max(0.0, row["kl"]["value"] - max(row["kl"]["low"] or 0.0, row["kl"]["value"] / 10)) for row in rows]
        high = [(row["kl"]["high"] or row["kl"]["value"]) - row["kl"]["value"] for row in rows]
        style = {"color": f"C{index}", "marker": "o", "markersize": 4, "capsize": 2, "elinewidth": 0.6}
        panel.errorbar([row["budget"] for row in rows], values, yerr=[low, high], label=method, **style)
    for name, row in targets.items():
        panel.axhline(row["kl"]["value"], color="black", linewidth=0.7, linestyle=":")
        panel.annotate(f"hybridgen, {name}", (0.995, row["kl"]["value"]), xycoords=("axes fraction", "data"),
                       ha="right", va="bottom", fontsize=8)  # fmt: skip
        panel.plot(row["budget"], row["kl"]["value"], "*", color="black", markersize=9)
    for match in matches(points):
        if match.budget is not None and match.method != OURS:
            colour = f"C{list(curves).index(match.method)}"
            panel.plot(match.budget, match.kl, "D", color=colour, markeredgecolor="black", markersize=5)
    panel.set_yscale("log")
    panel.set_xlabel("budget: attended tokens / context length, mean over layers")
    panel.set_ylabel("KL from full attention, nats a token")
    about = points[0]["settings"]
    warning = "RANDOM WEIGHTS, means nothing; " if about["weights"] == "random" else ""
    panel.set_title(
        f"{warning}{about['model']}: {about['passages']} x {about['decode']} tokens after {about['context']}, window "
        f"{about['window']}\nstars: targets; diamonds: the budgets that match them; bars: 95 %",
        fontsize=9,
    )
    panel.legend(fontsize=8, frameon=False)
    return figure


EXPERIMENT = Experiment("match_budgets", __doc__, points, measure_conditions, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
