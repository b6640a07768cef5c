"""The machine file: what this machine reaches at best, measured once, and the limit of a step that follows from it.

`hybridgen.bench` writes it, in parts: `bench cpu` what the CPU reaches, `bench link` what the GPU's link does.
configs/hardware has files of the same form, for machines that are not at hand.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridgen.config import configs_dir
from hybridgen.errors import ConfigError
from hybridgen.info import cache_root, cpu_info, versions
from hybridgen.output import write_whole

FILE_VARIABLE = "HYBRIDGEN_MACHINE_FILE"

# A run may ask for the file more than once; the user is told once.
_warn_once = functools.cache(logging.getLogger(__name__).warning)


@dataclass(frozen=True)
class MachineCeilings:
    """The best rates of one machine, in bytes a second; None where they were not measured, or need a GPU.

    scan: the CPU reads keys and scores them, at best; scan_by_key_type: the same of each key type that was
    measured. scan_with_dma: scan and DMA at once, both rates added up: what the host's memory gives. dma_h2d,
    dma_d2h: copies from and to pinned memory; dma_both: at once, added up. zero_copy: a kernel that reads rows
    of it. read: the CPU reads memory and does nothing else. gpu: its name, or None. cores: how many the process
    could use. measured_at: ISO 8601, UTC.
    """

    scan_bytes_per_s: float
    scan_with_dma_bytes_per_s: float | None
    dma_h2d_bytes_per_s: float | None
    zero_copy_bytes_per_s: float | None
    gpu: str | None
    cores: int
    measured_at: str
    versions: dict[str, str | None]
    # Not in files of earlier versions.
    read_bytes_per_s: float | None = None
    dma_d2h_bytes_per_s: float | None = None
    dma_both_bytes_per_s: float | None = None
    scan_by_key_type: dict[str, float] = field(default_factory=dict)
    cpu: str | None = None


def this_gpu() -> str | None:
    """The name of the first CUDA device, None without one."""
    import torch  # here, for those who only want `limit_ms`

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def this_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_file() -> Path:
    """$HYBRIDGEN_MACHINE_FILE, else machine.json where conversions are kept (info.cache_root)."""
    named = os.environ.get(FILE_VARIABLE)
    return Path(named).expanduser() if named else cache_root() / "machine.json"


def hardware_files() -> list[Path]:
    """The machines that were measured before: configs/hardware."""
    return sorted((configs_dir() / "hardware").glob("*.json"))


def hardware_file(name: str) -> Path:
    """configs/hardware/NAME.json. ConfigError: not a plain name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"machine name {name!r}: letters, digits, '.', '_' and '-' only")
    return configs_dir() / "hardware" / f"{name}.json"


def record_rates(path: Path, rates: dict[str, float | None], scan_by_key_type: dict[str, float]) -> MachineCeilings:
    """Write what was measured on this machine, now; what its file says of other rates stays.

    rates: fields of MachineCeilings, by name. scan_by_key_type: at least one type is known, from here or the file.
    """
    gpu, cores, cpu = this_gpu(), this_cores(), cpu_info().model
    kept: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # a damaged file is written anew
        before = read_ceilings(path, any_machine=True)
        if before is not None and (before.gpu, before.cores, before.cpu) == (gpu, cores, cpu):
            kept = asdict(before)
    scans = {**kept.get("scan_by_key_type", {}), **scan_by_key_type}
    unknown = dict.fromkeys(name for name in _FIELDS if name.endswith("_bytes_per_s"))
    ceilings = MachineCeilings(
        **{
            **unknown,
            **kept,
            **rates,
            "scan_bytes_per_s": max(scans.values()),
            "scan_by_key_type": scans,
            "gpu": gpu,
            "cores": cores,
            "cpu": cpu,
            "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
        }
    )
    write_ceilings(path, ceilings)
    return ceilings


def write_ceilings(path: Path | None, ceilings: MachineCeilings) -> Path:
    """Write the machine file, whole or not at all, and its folder if there is none; returns where it lies.

    path: None for `machine_file()`. ConfigError if it cannot be written.
    """
    path = machine_file() if path is None else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"machine file {path}: {error.strerror or error}") from None
    write_whole("machine file", path, json.dumps(asdict(ceilings), indent=1) + "\n")
    return path


def read_ceilings(path: Path | None = None, any_machine: bool = False) -> MachineCeilings | None:
    """The ceilings of this machine; None if there is no file, or, with a warning, if it is another machine's.

    path: None for `machine_file()`; any_machine: another machine's will do. ConfigError, with file and field, if it is
    damaged.
    """
    path = machine_file() if path is None else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"machine file {path}: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ConfigError(f"machine file {path}: not JSON ({error}); measure again, or remove it") from None
    ceilings = _parse(path, content)
    if any_machine:
        return ceilings
    here = (this_gpu(), this_cores())
    if (ceilings.gpu, ceilings.cores) != here:
        _warn_once(
            f"machine file {path} is not used: it was measured with GPU {ceilings.gpu or 'none'} and "
            f"{ceilings.cores} cores, here are GPU {here[0] or 'none'} and {here[1]} cores"
        )
        return None
    return ceilings


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(version is None or isinstance(version, str) for version in value.values())


def _is_rates(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_rate, value.values()))


_RATE_OR_NULL = ("a number > 0, or null", lambda v: v is None or _is_rate(v))
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "scan_bytes_per_s": ("a number > 0", _is_rate),
    "scan_with_dma_bytes_per_s": _RATE_OR_NULL,
    "dma_h2d_bytes_per_s": _RATE_OR_NULL,
    "zero_copy_bytes_per_s": _RATE_OR_NULL,
    "gpu": ("a name, or null", lambda v: v is None or isinstance(v, str)),
    "cores": ("a whole number > 0", _is_count),
    "measured_at": ("a date", lambda v: isinstance(v, str)),
    "versions": ("an object of names and versions", _is_versions),
}
_LATER_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "read_bytes_per_s": _RATE_OR_NULL,
    "dma_d2h_bytes_per_s": _RATE_OR_NULL,
    "dma_both_bytes_per_s": _RATE_OR_NULL,
    "scan_by_key_type": ("an object of key types and numbers > 0", _is_rates),
    "cpu": ("a name, or null", lambda v: v is None or isinstance(v, str)),
}


def _parse(path: Path, content: Any) -> MachineCeilings:
    if not isinstance(content, dict):
        raise ConfigError(f"machine file {path}: not a JSON object; measure again, or remove it")
    known = _FIELDS | {name: rule for name, rule in _LATER_FIELDS.items() if name in content}
    for name, (allowed, is_allowed) in known.items():
        given = repr(content[name]) if name in content else "missing"
        if name not in content or not is_allowed(content[name]):
            raise ConfigError(
                f"machine file {path}: {name} is {given} (allowed: {allowed}); measure again, or remove the file"
            )
    return MachineCeilings(**{name: content[name] for name in known})


def limit_ms(
    ceilings: MachineCeilings,
    *,
    scan_bytes: float,
    logits_bytes: float,
    fetched_bytes: float,
    streamed_bytes: float,
    gpu_ms: float | None,
) -> dict[str, float | None]:
    """The least milliseconds that a step can take, by what it moves: contracts.md, "limit_ms".

    scan_bytes: keys that the CPU reads; logits_bytes: the scores it writes, which the GPU reads over the link;
    fetched_bytes: rows that kernels read over the link; streamed_bytes: weights and KV copied to the device;
    gpu_ms: the step's kernels with all rows in device memory and no waiting, None if unknown.
    Keys: `scan`, `dram`, `link`, `gpu`, each None where unknown, and `limit`, the largest of the known ones.
    """
    link_bytes = fetched_bytes + logits_bytes + streamed_bytes
    zero_copy_ms = _ms(fetched_bytes + logits_bytes, ceilings.zero_copy_bytes_per_s)
    dma_ms = _ms(streamed_bytes, ceilings.dma_h2d_bytes_per_s)
    terms = {
        "scan": _ms(scan_bytes, ceilings.scan_bytes_per_s),
        # The logits count twice: the CPU writes them, the link reads them.
        "dram": _ms(scan_bytes + logits_bytes + link_bytes, ceilings.scan_with_dma_bytes_per_s),
        "link": None if zero_copy_ms is None or dma_ms is None else zero_copy_ms + dma_ms,
        "gpu": gpu_ms,
    }
    return {**terms, "limit": max((term for term in terms.values() if term is not None), default=None)}


def _ms(moved_bytes: float, bytes_per_s: float | None) -> float | None:
    return None if bytes_per_s is None else 1e3 * moved_bytes / bytes_per_s
