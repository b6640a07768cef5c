"""The memory plan: what a job needs on the device and on the host, added up before it is allocated.

Shapes come from `kv_cache.layout`'s sister functions in the engine; this module only adds, compares
and explains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 1024**3


@dataclass
class MemoryPlan:
    """Named amounts of bytes. On a machine without a GPU the device's share is host memory too."""

    device_is_host: bool
    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    weights_on_gpu: float | None = None  # realised share of the decoder layers' weights; None: not planned
    disk: dict[str, int] = field(default_factory=dict)
    weights_on_disk: float = 0.0  # realised share

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (self.device_bytes if self.device_is_host else 0)

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def fits(self, device_limit_bytes: int | None, host_limit_bytes: int) -> bool:
        """device_limit_bytes None: no GPU, and so no limit but the host's."""
        if device_limit_bytes is not None and self.device_bytes > device_limit_bytes:
            return False
        return self.host_bytes <= host_limit_bytes

    def describe(self, device_limit_bytes: int | None, host_limit_bytes: int) -> str:
        """A small table, one line an item."""
        where = "device (host memory: no GPU)" if self.device_is_host else "device"
        lines = ["memory plan:"]
        for title, items, total, limit in (
            (where, self.device, self.device_bytes, device_limit_bytes),
            ("host", self.host, self.host_bytes, host_limit_bytes),
        ):
            allowed = "" if limit is None else f" of {format_bytes(limit)} available"
            lines.append(f"  {title}: {format_bytes(total)}{allowed}")
            lines += [f"    {name:<34} {format_bytes(size):>11}" for name, size in items.items() if size]
            if title == "host" and self.device_is_host:
                lines.append(f"    {'what the device part takes':<34} {format_bytes(self.device_bytes):>11}")
        if self.disk_bytes:
            lines.append(f"  disk: {format_bytes(self.disk_bytes)}")
            lines += [f"    {name:<34} {format_bytes(size):>11}" for name, size in self.disk.items() if size]
        if self.weights_on_gpu is not None:
            lines.append(
                f"  {100 * self.weights_on_gpu:.4g} % of the decoder layers' weights stay on the device, "
                "and all of embeddings, final norm and LM head"
            )
        if self.weights_on_disk:
            lines.append(f"  {100 * self.weights_on_disk:.4g} % of them are read from disk in every step")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "device": dict(self.device),
            "host": dict(self.host),
            "disk_bytes": self.disk_bytes,
            "disk": dict(self.disk),
        }


def format_bytes(size: int) -> str:
    """For people: GiB or MiB."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 1024**2:.1f} MiB"
