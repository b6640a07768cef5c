"""The short table at the end of a run, from the report alone."""

from __future__ import annotations

from typing import Any

from hybridgen.config import Config
from hybridgen.placement.plan import format_bytes

_STAGES = (
    "predict", "qkv", "scan", "cpu_attention", "scan_wait", "choose", "fetch", "stream", "link_wait", "attention",
    "merge", "mlp",
)  # fmt: skip


def format_settings(config: Config) -> str:
    """The resolved settings, a line a section."""
    lines = []
    for section, values in config.to_dict().items():
        shown = ", ".join(f"{name}={_show(value)}" for name, value in values.items() if value is not None)
        lines.append(f"  {section}: {shown}")
    return "\n".join(["settings:", *lines])


def _show(value: Any) -> str:
    return "[" + " ".join(map(str, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def format_table(report: dict[str, Any]) -> str:
    """One line a figure; what is not known is left out."""
    decode, mass = report["decode_ms_per_token"], report["covered_mass"]
    rows: list[tuple[str, str]] = [
        (
            "model",
            f"{report['model']} ({report['weights']} weights), {report['dtype']} on {report['device']}",
        ),
        (
            "strategy",
            f"{report['strategy']}, {report['batch']} x {max(report['prompt_tokens'])} prompt tokens",
        ),
        ("prefill", f"{report['prefill_s']:.2f} s" + (" to fill synthetic KV" if report["synthetic_kv"] else "")),
    ]
    if decode["median"] is not None:
        rows += [
            ("decode", f"{decode['median']:.1f} ms/token median, {decode['p90']:.1f} p90"),
            ("throughput", f"{report['tokens_per_s']:.2f} tokens/s"),
        ]
        stages = report["stage_ms_per_layer"]
        rows.append(("ms per layer", ", ".join(f"{name} {stages[name]:.3f}" for name in _STAGES if name in stages)))
        moved = report["bytes_per_token"]
        rows.append(
            (
                "per token",
                f"{format_bytes(int(moved['cpu_read']))} of the cache read by the CPU, "
                f"{format_bytes(int(moved['h2d']))} to and {format_bytes(int(moved['d2h']))} from the device",
            )
        )
        rows += _limit_rows(report)
        rows.append(("budget", f"{report['budget']:.3f} of the context attended"))
    if mass["mean"] is not None:
        true = "" if mass["true_probe"] is None else f", by the true query {mass['true_probe']:.4f} (probes)"
        rows.append(("covered mass", f"mean {mass['mean']:.4f}, least {mass['min']:.4f} ({mass['kind']}){true}"))
    if report["kept_fraction"] is not None:
        rows.append(("kept", f"{report['kept_fraction']:.3f} of the host tier"))
    rows += _schedule_rows(report["scheduler"])
    if report["disk"]["bytes_per_s"] is not None:
        read = "" if decode["median"] is None else f", {format_bytes(int(report['bytes_per_token']['disk']))} per token"
        rows.append(("disk", f"read at {report['disk']['bytes_per_s'] / 1e9:.2f} GB/s while it was asked{read}"))
        rows += [("note", note) for note in report["disk"]["notes"]]
    if report["peak_gpu_bytes"] is not None:
        rows.append(("peak device memory", format_bytes(report["peak_gpu_bytes"])))
    rows.append(("peak host memory", format_bytes(report["peak_host_bytes"])))
    rows += _answer_rows(report.get("answer"))
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _limit_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """How near the step is to what the machine allows, and what the GPU stood for."""
    rows = []
    limit, idle, median = report["limit_ms"], report["gpu_idle_fraction"], report["decode_ms_per_token"]["median"]
    if limit is not None and limit["limit"]:
        terms = ", ".join(f"{name} {ms:.1f}" for name, ms in limit.items() if name != "limit" and ms is not None)
        rows.append(("limit", f"{limit['limit']:.1f} ms ({terms}): the step takes {median / limit['limit']:.2f} x it"))
    if idle is not None:
        causes = ", ".join(f"{name} {share:.2f}" for name, share in idle.items() if name != "total")
        rows.append(("GPU idle", f"{idle['total']:.2f} of the step ({causes})"))
    return rows


def _schedule_rows(scheduler: dict[str, Any]) -> list[tuple[str, str]]:
    """How the last step was planned, where plans may change."""
    if scheduler["mode"] in (None, "fixed") or not scheduler["steps"]:
        return []
    last = [layer for layer in scheduler["steps"][-1]["layers"] if layer["keep"] is not None]
    if not last:
        return []
    common = max(last, key=lambda layer: int(layer["count"]))
    scan = "all host tokens" if common["full_scan"] else f"{common['scan_tokens']} candidates"
    kept = "" if common["extra"] == 1.0 else f", K x {common['extra']:g}"
    return [("schedule", f"{scheduler['mode']}; at the end {scan} scored{kept}")]


def _answer_rows(answer: dict[str, Any] | None) -> list[tuple[str, str]]:
    if answer is None:
        return []
    if not answer["judged"]:
        return [("answer", answer["why"])]
    rows = []
    for index, expected in enumerate(answer["expected"]):
        verdict = "right" if answer["right"][index] else "wrong"
        tier = "host tier" if answer["fact_in_host_tier"][index] else "device window or on its edge"
        text = f"{verdict} (expected {expected}; the fact lies in the {tier})"
        if "full_attention" in answer:
            agrees = "right" if answer["full_attention_right"][index] else "wrong"
            text += f"; full attention: {agrees}"
        rows.append(("answer", text))
    return rows
