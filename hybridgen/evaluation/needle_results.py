"""From cells to figures: how many each condition gets right, a table, a heat map over length and depth."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from hybridgen.evaluation import paired
from hybridgen.evaluation.item_store import Item
from hybridgen.output import write_whole

PANELS_ACROSS = 3  # of the heat map


def summarise_needle(items: Sequence[Item]) -> list[dict[str, Any]]:
    """One result a condition, over these cells, which come by length; the first condition is full attention.

    of_full: of those cells that full attention gets right, how many this condition does; of_full_beyond_window: of
    those among them whose fact has left the window, but for what lies in the sinks, when the question begins.
    """
    if not items:
        return []
    return [
        {
            "cells": len(items),
            "right": sum(item["right"][index] for item in items),
            "of_full": _of_full(items, index),
            "of_full_beyond_window": _of_full([item for item in items if item["beyond_window"]], index),
            "by_length": [
                {"length": length, **_of_full(list(group), index)}
                for length, group in groupby(items, key=lambda item: item["length"])
            ],
            "budget": _mean_of("budget", items, index),
            "kept_fraction": _mean_of("kept_fraction", items, index),
            "covered_mass": _mean_of("mass_mean", items, index),
        }
        for index in range(len(items[0]["right"]))
    ]


def format_needle(report: Mapping[str, Any]) -> str:
    """The tables at the end, from the report alone."""
    results = report["results"]
    if not results:
        return "no cell was finished"
    names = [condition["name"] for condition in report["conditions"]]
    lengths = [part["length"] for part in results[0]["by_length"]]
    rows = [["condition", "right", "of full's", "share %", "beyond the window", "share %", "budget"]]
    by_length = [["of full's, by length", *map(str, lengths)]]
    for name, result in zip(names, results, strict=True):
        cells = [f"{result['right']}/{result['cells']}"]
        for part in (result["of_full"], result["of_full_beyond_window"]):
            cells += [f"{part['right']}/{part['cells']}", _interval(part["share"])]
        rows.append([name, *cells, "" if result["budget"] is None else f"{result['budget']:.3f}"])
        by_length.append([name, *(f"{part['right']}/{part['cells']}" for part in result["by_length"])])
    done = "" if report["complete"] else " (not complete)"
    title = (
        f"{report['model']}, {report['dtype']}: a fact hidden in each of {results[0]['cells']} documents of "
        f"{lengths[0]} to {lengths[-1]} tokens, at {len(report['depths'])} depths{done}\n"
        "of full's: of the facts that full attention finds; beyond the window: of those among them that had left the "
        "strategy's window when the question began\n[ ]: 95 % interval, Wilson's"
    )
    return "\n\n".join([title, _align(rows), _align(by_length)])


def write_heat_map(report: Mapping[str, Any], path: Path) -> str | None:
    """A panel a condition: length across, depth downwards, colour: share of right answers. What is in the way, if so.

    Crosses: cells where no fact had left the window of the strategy when the question began.
    """
    if not report["cells"]:
        return "no cell was finished"
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        return "matplotlib is not installed"
    names = [condition["name"] for condition in report["conditions"]]
    grid, shape = _grid(report), (len(report["depths"]), len(report["lengths"]))
    near = [place for place, items in grid.items() if not any(item["beyond_window"] for item in items)]
    columns = min(len(names), PANELS_ACROSS)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(1.5 + 3.4 * columns, 1.0 + 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for index, (axes, name, result) in enumerate(zip(panels, names, report["results"], strict=False)):
        shares = [[math.nan] * shape[1] for _ in range(shape[0])]
        for (row, column), items in grid.items():
            shares[row][column] = sum(item["right"][index] for item in items) / len(items)
        image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for row, column in near:
            axes.plot(column, row, "x", color="tab:red", markersize=4, markeredgewidth=0.8)
        budget = "" if result["budget"] is None else f", budget {result['budget']:.2f}"
        said = [*textwrap.wrap(name, 44), f"{result['right']} of {result['cells']} right{budget}"]
        axes.set_title("\n".join(said), fontsize=8)
        axes.set_facecolor("lightgrey")
        axes.set_xticks(range(shape[1]), report["lengths"], rotation=60, fontsize=7)
        axes.set_yticks(range(shape[0]), [f"{depth:.2f}" for depth in report["depths"]], fontsize=7)
        axes.set_xticks([place - 0.5 for place in range(1, shape[1])], minor=True)
        axes.set_yticks([place - 0.5 for place in range(1, shape[0])], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
    for unused in panels[len(names) :]:
        unused.set_axis_off()
    figure.colorbar(image, ax=panels.tolist(), label="share of right answers (grey: not measured)", shrink=0.8)
    crosses = "x: the fact had not left the first strategy's window when the question began"
    figure.supxlabel(f"tokens of the document; {crosses}", fontsize=9)
    figure.supylabel("depth of the fact, from the document's start (0) to its end (1)", fontsize=9)
    figure.suptitle(f"A fact hidden in a document: {report['model']}, {report['dtype']}", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    write_whole("--out", path, content.getvalue())
    return None


def _grid(report: Mapping[str, Any]) -> dict[tuple[int, int], list[Item]]:
    """Cells by the place of their depth and of their length."""
    grid: dict[tuple[int, int], list[Item]] = {}
    for item in report["cells"]:
        place = report["depths"].index(item["depth"]), report["lengths"].index(item["length"])
        grid.setdefault(place, []).append(item)
    return grid


def _of_full(items: Sequence[Item], index: int) -> dict[str, Any]:
    """Of the cells that full attention gets right: how many, how many this condition does, and the share of these."""
    right = [bool(item["right"][index]) for item in items if item["right"][0]]
    share = asdict(paired.share(sum(right), len(right))) if right and index else None
    return {"cells": len(right), "right": sum(right), "share": share}


def _mean_of(name: str, items: Sequence[Item], index: int) -> float | None:
    values = [item["attended"][index][name] for item in items]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _interval(share: Mapping[str, float] | None) -> str:
    if share is None:
        return ""
    return f"{100 * share['value']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
