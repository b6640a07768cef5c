"""A machine that need not be at hand, in numbers: what a user knows of it, or what `hybridgen.bench` measured there.

Files are YAML or JSON, named by path or by their name in configs/hardware; `example.yaml` there explains every field.
A file of `hybridgen.bench` (machine.py) says nothing of the GPU's memory and arithmetic: these come from the data sheet
of the GPU that it names, and the host's memory is not known.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hybridgen.config import configs_dir
from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.machine import MachineCeilings, read_ceilings
from hybridgen.placement.plan import GIB

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """One GPU, its host, and a disk. 1 GB/s = 10^9 bytes a second; None: not known, or not there."""

    name: str
    gpu_memory_gib: float
    gpu_memory_gb_per_s: float  # of the data sheet: machine_model.py says how much of it is reached
    gpu_tflops: float  # of dense half-precision products, of the data sheet
    h2d_gb_per_s: float  # copies from pinned memory
    cpu_scan_gb_per_s: float  # the CPU reads host memory and scores or attends to it
    host_memory_gib: float | None = None
    d2h_gb_per_s: float | None = None  # default: h2d
    zero_copy_gb_per_s: float | None = None  # kernels that read rows of pinned memory; default: 0.9 of h2d
    host_dram_gb_per_s: float | None = None  # CPU and link together; default: cpu_scan
    cpu_scan_by_key_type_gb_per_s: Mapping[str, float] = field(default_factory=dict)  # fp16, int8, int2, ...
    disk_gib: float | None = None  # free; None: there is no disk tier
    disk_read_gb_per_s: float | None = None
    disk_write_gb_per_s: float | None = None  # default: half of disk_read
    source: str = ""  # the file

    @property
    def gpu_memory_bytes(self) -> int:
        return int(self.gpu_memory_gib * GIB)

    @property
    def host_memory_bytes(self) -> int | None:
        return None if self.host_memory_gib is None else int(self.host_memory_gib * GIB)

    @property
    def disk_bytes(self) -> int:
        return 0 if self.disk_gib is None else int(self.disk_gib * GIB)

    @property
    def h2d(self) -> float:
        """Bytes a second, as all that follow."""
        return GB * self.h2d_gb_per_s

    @property
    def d2h(self) -> float:
        return GB * (self.d2h_gb_per_s or self.h2d_gb_per_s)

    @property
    def zero_copy(self) -> float:
        return GB * (self.zero_copy_gb_per_s or 0.9 * self.h2d_gb_per_s)

    @property
    def host_dram(self) -> float:
        return GB * (self.host_dram_gb_per_s or self.cpu_scan_gb_per_s)

    def cpu_scan(self, key_type: str) -> float:
        return GB * self.cpu_scan_by_key_type_gb_per_s.get(key_type, self.cpu_scan_gb_per_s)

    @property
    def disk_read(self) -> float:
        """ConfigError where it is needed and not known."""
        if self.disk_read_gb_per_s is None:
            raise ConfigError(
                f"hardware file {self.source}: disk_read_gb_per_s is null, but something lies on the disk (allowed: a "
                "number > 0); give it, or leave out disk_gib"
            )
        return GB * self.disk_read_gb_per_s

    @property
    def disk_write(self) -> float:
        return self.disk_read / 2 if self.disk_write_gb_per_s is None else GB * self.disk_write_gb_per_s


@dataclass(frozen=True)
class DataSheet:
    """What a maker says of a GPU."""

    memory_gib: float  # what programs see of it
    memory_gb_per_s: float
    tflops: float  # dense half-precision products, accumulated in single precision


#: By the name that torch gives the device.
DATA_SHEETS = {
    "NVIDIA H200": DataSheet(139.8, 4800, 989),
    "NVIDIA H100 80GB HBM3": DataSheet(79.2, 3350, 989),
    "NVIDIA A100-SXM4-80GB": DataSheet(79.2, 2039, 312),
    "NVIDIA RTX A6000": DataSheet(47.4, 768, 155),
    "NVIDIA GeForce RTX 4090": DataSheet(23.6, 1008, 165),
    "NVIDIA L4": DataSheet(22.0, 300, 121),
    "Tesla T4": DataSheet(14.6, 320, 65),
}

_REQUIRED = (
    "gpu_memory_gib", "host_memory_gib", "gpu_memory_gb_per_s", "gpu_tflops", "h2d_gb_per_s", "cpu_scan_gb_per_s",
)  # fmt: skip
_NUMBERS = tuple(part.name for part in fields(Hardware) if part.name.endswith(("_gib", "_gb_per_s", "_tflops")))
_BY_KEY_TYPE = "cpu_scan_by_key_type_gb_per_s"


def hardware_names() -> list[str]:
    """The machines with a GPU that ship in configs/hardware."""
    folder = configs_dir() / "hardware"
    measured = [path for path in folder.glob("*.json") if json.loads(path.read_text(encoding="utf-8")).get("gpu")]
    return sorted(path.stem for path in (*folder.glob("*.yaml"), *measured))


def load_hardware(name_or_file: str) -> Hardware:
    """A machine by its name in configs/hardware, or by a file; ConfigError names file and field."""
    path = _path_of(name_or_file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML, too
    except OSError as error:
        raise ConfigError(f"hardware file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware file {path} is neither YAML nor JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"hardware file {path} must map fields to values, got {type(content).__name__}")
    if "scan_bytes_per_s" in content:
        ceilings = read_ceilings(path, any_machine=True)
        assert ceilings is not None
        return _measured(ceilings, path)
    return _given(content, path)


def _path_of(name_or_file: str) -> Path:
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml", ".json"):
        return path
    for suffix in (".yaml", ".json"):
        shipped = configs_dir() / "hardware" / f"{name_or_file}{suffix}"
        if shipped.is_file():
            return shipped
    raise UnknownNameError("hardware", name_or_file, hardware_names(), "or give a .yaml or .json file")


def _given(content: Mapping[Any, Any], path: Path) -> Hardware:
    """What a user wrote."""
    known = ["name", *_NUMBERS]
    for name in content:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"hardware file {path}: unknown field {name!r}{hint} (known: {', '.join(known)})")
    for name in known[1:]:
        value, optional = content.get(name), name not in _REQUIRED
        allowed = "a number > 0" + (", or null" if optional else "")
        if name == _BY_KEY_TYPE:
            rates = {} if value is None else value
            if not isinstance(rates, dict) or not all(map(_is_number, rates.values())):
                raise ConfigError(f"hardware file {path}: {name} is {value!r} (allowed: key types and numbers > 0)")
        elif not (_is_number(value) or (optional and value is None)):
            given = repr(value) if name in content else "missing"
            raise ConfigError(f"hardware file {path}: {name} is {given} (allowed: {allowed})")
    numbers = {name: value for name in _NUMBERS if (value := content.get(name)) is not None}
    return Hardware(name=str(content.get("name", path.stem)), source=str(path), **numbers)


def _measured(ceilings: MachineCeilings, path: Path) -> Hardware:
    """What `hybridgen.bench` wrote."""
    if ceilings.gpu is None:
        raise ConfigError(
            f"hardware file {path}: gpu is null, it was measured without one; what lies where is decided between a GPU "
            "and its host (allowed: a machine with a GPU)"
        )
    sheet = DATA_SHEETS.get(ceilings.gpu)
    if sheet is None:
        raise ConfigError(
            f"hardware file {path}: gpu is {ceilings.gpu!r}, whose data sheet is not known here (known: "
            f"{', '.join(DATA_SHEETS)}); write the figures into a file as configs/hardware/example.yaml"
        )
    if ceilings.dma_h2d_bytes_per_s is None:
        raise ConfigError(
            f"hardware file {path}: dma_h2d_bytes_per_s is null (allowed: a number > 0); `hybridgen.bench link` "
            "measures it"
        )

    def gb(rate: float | None) -> float | None:
        return None if rate is None else rate / GB

    return Hardware(
        name=path.stem,
        gpu_memory_gib=sheet.memory_gib,
        gpu_memory_gb_per_s=sheet.memory_gb_per_s,
        gpu_tflops=sheet.tflops,
        h2d_gb_per_s=ceilings.dma_h2d_bytes_per_s / GB,
        cpu_scan_gb_per_s=ceilings.scan_bytes_per_s / GB,
        d2h_gb_per_s=gb(ceilings.dma_d2h_bytes_per_s),
        zero_copy_gb_per_s=gb(ceilings.zero_copy_bytes_per_s),
        host_dram_gb_per_s=gb(ceilings.scan_with_dma_bytes_per_s),
        cpu_scan_by_key_type_gb_per_s={kind: rate / GB for kind, rate in ceilings.scan_by_key_type.items()},
        source=str(path),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
