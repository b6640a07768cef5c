"""The table and the plot of a comparison, from its JSON alone; and the table of strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridgen.engine.synthetic_kv import SYNTHETIC_KV_NOTE
from hybridgen.placement.plan import GIB

SMALLEST_KL = 1e-7  # that is told from 0: exact strategies differ by rounding

_HEADER = [
    "strategy", "ms/token", "p10-p90", "tokens/s", "prefill s", "h2d MB", "d2h MB", "cpu MB", "GPU idle", "limit ms",
    "GPU GiB", "budget", "kept", "agree", "KL nats",
]  # fmt: skip


def format_comparison(content: Mapping[str, Any]) -> str:
    """A line a strategy; what is not known is `-`, what was not measured says why."""
    lines = [_HEADER]
    notes = []
    for entry in content["strategies"]:
        if entry["summary"] is not None:
            lines.append([entry["name"], *_cells(entry)])
        if entry["skipped"] is not None:
            notes.append(f"{entry['name']}: skipped, {entry['skipped']}")
        elif entry["summary"] is None:
            notes.append(f"{entry['name']}: not measured yet")
    reference = content["reference"]
    matched = "" if content["matched"] is None else f", {content['matched']}"
    title = (
        f"{content['model']} ({content['weights']} weights), {content['dtype']} on {content['device']}: "
        f"{content['batch']} x {content['prompt_tokens']} prompt tokens, {content['gen']} generated{matched}"
    )
    notes.append(
        f"agree, KL: next-token distributions against {reference['strategy']} attention along its own greedy tokens; "
        "bytes are of a token, 1 MB = 10^6"
    )
    if any(entry["attends_to_all"] and entry["summary"] is not None for entry in content["strategies"]):
        notes.append("* attends to every token: a reference, whatever is matched")
    if any(entry["split"] is not None and entry["split"]["is_bound"] for entry in content["strategies"]):
        notes.append("+ decides itself how much it attends to: what was asked for is its upper bound")
    if (content["matched"] or "").startswith("--keep") and any(
        entry["summary"] is not None and entry["config"]["attention"]["executor"] == "evicting"
        for entry in content["strategies"]
    ):
        notes.append(
            f"{content['matched']}: a cache that evicts keeps that much of the prompt as heavy tokens, and its recent "
            "tokens beside them; one that scores nothing, as recent tokens"
        )
    if content["weights"] == "random":
        notes.append("random weights: agreement and KL mean nothing for quality")
    if any((entry["config"] or {}).get("runtime", {}).get("synthetic_kv") for entry in content["strategies"]):
        notes.append(SYNTHETIC_KV_NOTE)
    return "\n".join([title, "", _align(lines), "", *notes])


def _cells(entry: Mapping[str, Any]) -> list[str]:
    summary, split = entry["summary"], entry["split"]
    decode, moved = summary["decode_ms_per_token"], summary["bytes_per_token"]
    peak, bound = summary["peak_gpu_bytes"], split is not None and split["is_bound"]
    return [
        f"{decode['median']:.1f}",
        f"{decode['p10']:.1f}-{decode['p90']:.1f}",
        f"{summary['tokens_per_s']:.2f}",
        f"{summary['prefill_s']:.2f}",
        *(f"{moved[name] / 1e6:.2f}" for name in ("h2d", "d2h", "cpu_read")),
        _number(summary["gpu_idle_fraction"], 2),
        _number(summary["limit_ms"], 1),
        _number(None if peak is None else peak / GIB, 1),
        f"{summary['budget']:.3f}{'*' if entry['attends_to_all'] else '+' if bound else ''}",
        _number(summary["kept_fraction"], 3),
        f"{summary['agreement']:.3f}",
        "<1e-7" if summary["kl_nats"] < SMALLEST_KL else f"{summary['kl_nats']:.2g}",
    ]


def format_strategies(rows: Sequence[Sequence[str]]) -> str:
    """rows: name, where attention runs, what is kept where, bytes of a step; or name and why there is none of it."""
    header = ["strategy", "attention runs", "what is kept where", "d2h MB", "h2d MB", "host memory read MB"]
    return _align([header, *rows], left=3)


def write_plot(content: Mapping[str, Any], path: Path) -> str | None:
    """KL against ms/token (p10 to p90), a labelled point a strategy. What is in the way, if it cannot be drawn.

    Those that are full attention but for rounding stand on a line of their own below the others.
    """
    points = [(entry["name"], entry["summary"]) for entry in content["strategies"] if entry["summary"] is not None]
    if not points:
        return "no strategy was measured"
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        return "matplotlib is not installed"
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    floor = min((s["kl_nats"] for _, s in points if s["kl_nats"] >= SMALLEST_KL), default=SMALLEST_KL) / 5
    at: dict[str, tuple[float, float]] = {}
    for index, (name, summary) in enumerate(points):
        decode, is_exact = summary["decode_ms_per_token"], summary["kl_nats"] < SMALLEST_KL
        at[name] = decode["median"], floor if is_exact else summary["kl_nats"]
        spread = [[decode["median"] - decode["p10"]], [decode["p90"] - decode["median"]]]
        axes.errorbar(*at[name], xerr=spread, fmt="s" if is_exact else "o", color=f"C{index % 10}", elinewidth=0.5)
    axes.axhline(floor, color="grey", linewidth=0.5, linestyle=":")
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.15, y=0.08)
    _label(axes, at)
    axes.set_xlabel(f"ms/token: median, p10 to p90 (squares on the dotted line: KL below {SMALLEST_KL:.0e})")
    axes.set_ylabel(f"KL({content['reference']['strategy']} || strategy), nats/token")
    axes.set_title(f"{content['model']}, {content['prompt_tokens']} tokens, {content['weights']} weights")
    figure.savefig(path, dpi=150)
    return None


def _label(axes: Any, at: Mapping[str, tuple[float, float]]) -> None:
    """Names beside their points, where no other one is yet."""
    taken: list[tuple[float, float, float]] = []  # left, right and height of the names so far, in pixels
    for name, point in sorted(at.items(), key=lambda item: -item[1][1]):
        x, y = axes.transData.transform(point)
        width = 6.0 * len(name)
        for right, up in ((7, 3), (7, -11), (-7 - width, 3), (-7 - width, -11), (7, 15), (7, -23)):
            left, height = x + right, y + up
            if all(left > other[1] or left + width < other[0] or abs(height - other[2]) > 11 for other in taken):
                break
        taken.append((left, left + width, height))
        axes.annotate(name, point, textcoords="offset pixels", xytext=(right, up), fontsize=8)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _align(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """left: so many columns begin at their left. The last cell of a row with fewer columns runs on."""
    whole = [row if len(row) == len(rows[0]) else row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in whole if column < len(row)) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
