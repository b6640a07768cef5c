"""The table at the end of an evaluation, from its report alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def format_table(report: dict[str, Any]) -> str:
    """A row a text and condition, then pooled ones; from the report alone."""
    groups = [(Path(text["file"]).name, text["results"]) for text in report["texts"] if text["results"]]
    if report["pooled"] is not None:
        groups.append(("pooled", report["pooled"]))
    if not groups:
        return "no passage was finished"
    names = [condition["name"] for condition in report["conditions"]]
    main_rows, against_first = [_MAIN_HEADER], [_FIRST_HEADER]
    for text, rows in groups:
        for index, (name, row) in enumerate(zip(names, rows, strict=True)):
            label = [text if index == 0 else "", name]
            main_rows.append([*label, *_main_cells(row)])
            if row["against_first"] is not None:
                label[0] = text if index == 2 else ""
                changes = row["against_first"]
                against_first.append([*label, *(_interval(changes[k], d) for k, d in _FIRST_CHANGES.items())])
    passages = ", ".join(f"{rows[0]['passages']} of {text}" for text, rows in groups)
    title = (
        f"{report['model']}, {report['dtype']}: {report['decode']} tokens after {report['context']}, "
        f"passages: {passages}{'' if report['complete'] else ' (not complete)'}\n"
        "[ ]: 95 % interval, paired by passage"
    )
    blocks = [title, _align(main_rows)]
    if len(against_first) > 1:
        blocks.append(f"against {names[1]}:\n{_align(against_first)}")
    return "\n\n".join(blocks)


_MAIN_HEADER = [
    "text", "condition", "perplexity", "change %", "SE", "in perplexity", "same token", "KL nats",
    "budget", "kept", "mass", "true mass",
]  # fmt: skip
_FIRST_HEADER = ["text", "condition", "change %", "percentage points of full", "in perplexity"]
_FIRST_CHANGES = {"percent": 2, "percentage_points": 2, "perplexity": 3}  # and their decimals


def _main_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['perplexity']['value']:.3f}"]
    if row["against_full"] is None:
        return [*cells, *[""] * 5, _number(row["budget"], 3), "", "", ""]
    changes = row["against_full"]
    return [
        *cells,
        _interval(changes["percent"], 2),
        _number(changes["percent"]["standard_error"], 2),
        _interval(changes["perplexity"], 3),
        _number(row["argmax_agreement"]["value"], 4),
        _number(row["kl_nats_per_token"]["value"], 5),
        _number(row["budget"], 3),
        _number(row["kept_fraction"], 3),
        _number(row["covered_mass"]["mean"], 4),
        _number(row["covered_mass"]["true_probe"], 4),
    ]


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _interval(estimate: dict[str, float | None], decimals: int) -> str:
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if low is None or high is None:
        return f"{value:+.{decimals}f}"
    return f"{value:+.{decimals}f} [{low:+.{decimals}f}, {high:+.{decimals}f}]"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
