"""`python -m hybridgen.info [--json]`: what this machine offers to the engine.

Read from /proc, /sys, nvidia-smi and package metadata: torch is not imported, so the answer is quick.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil
import yaml

from hybridgen import __version__
from hybridgen.config import configs_dir

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
_NVIDIA_SMI_FIELDS = (
    "index,name,memory.total,memory.free,compute_cap,driver_version,"
    "pcie.link.gen.max,pcie.link.width.max,pcie.link.gen.current,pcie.link.width.current"
)


@dataclass(frozen=True)
class CpuInfo:
    """Processor, and how much of it this process may use."""

    model: str
    physical_cores: int | None
    logical_cpus: int
    usable_cpus: tuple[int, ...]  # by affinity
    usable_cores: int | None  # physical cores that these CPUs belong to
    cgroup_cpus: float | None  # None: no limit


@dataclass(frozen=True)
class ExtensionInfo:
    """The compiled kernels."""

    built: bool
    isa_variants: tuple[str, ...] = ()
    selected_isa: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class NumaNode:
    """A memory node; one without CPUs is far memory (CXL, HBM, ...)."""

    node: int
    cpus: str  # as the kernel lists them: "0-15,32-47"
    memory_total: int
    memory_free: int
    memory_only: bool


@dataclass(frozen=True)
class MemoryInfo:
    """Host memory, in bytes."""

    total: int
    available: int
    cgroup_limit: int | None
    transparent_huge_pages: str | None  # "always", "madvise" or "never"
    huge_page_size: int | None
    huge_pages_total: int | None
    huge_pages_free: int | None
    locked_limit: int | None  # None: no limit


@dataclass(frozen=True)
class GpuInfo:
    """One NVIDIA GPU and its link; fields that the driver does not tell are None."""

    index: int
    name: str
    memory_total: int | None
    memory_free: int | None
    compute_capability: str | None
    driver: str | None
    pcie_generation: int | None  # what both ends can do; an idle link runs slower
    pcie_width: int | None
    pcie_generation_now: int | None
    pcie_width_now: int | None


@dataclass(frozen=True)
class StorageInfo:
    """Where models are kept."""

    cache: str  # conversions (GGUF to safetensors)
    hub_cache: str
    hub_cache_free: int  # bytes free on its disk
    local_models: dict[str, str]  # alias -> where a copy lies
    other_models: tuple[str, ...]  # aliases without a local copy


@dataclass(frozen=True)
class MachineInfo:
    """All of it."""

    system: str
    cpu: CpuInfo
    extension: ExtensionInfo
    numa: tuple[NumaNode, ...]
    memory: MemoryInfo
    gpus: tuple[GpuInfo, ...]
    versions: dict[str, str | None]
    storage: StorageInfo


def collect() -> MachineInfo:
    """Look at this machine; takes about a second and needs no GPU."""
    return MachineInfo(
        system=platform.platform(),
        cpu=cpu_info(),
        extension=extension_info(),
        numa=numa_nodes(),
        memory=memory_info(),
        gpus=gpus(),
        versions=versions(),
        storage=storage_info(),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cgroup_files(controller: str, v1_name: str, v2_name: str, root: Path) -> list[str]:
    """Contents of a control file in this process's control group and all groups above it (v1 and v2)."""
    contents = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            top, name = root / "sys/fs/cgroup", v2_name
        elif controller in controllers.split(","):
            top, name = root / "sys/fs/cgroup" / controller, v1_name
        else:
            continue
        # In a container the group's own path may not be mounted: then the top is the group.
        folder = top / group.strip("/")
        while True:
            text = _read(folder / name)
            if text is not None:
                contents.append(text)
            if folder == top:
                break
            folder = folder.parent
    return contents


def cgroup_memory_limit(root: Path = _ROOT) -> int | None:
    """The smallest memory limit of the control groups around this process, in bytes."""
    texts = _cgroup_files("memory", "memory.limit_in_bytes", "memory.max", root)
    limits = [int(text) for text in texts if text != "max"]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def cgroup_cpu_limit(root: Path = _ROOT) -> float | None:
    """The smallest CPU quota of the control groups around this process, in CPUs."""
    quotas = [text.split() for text in _cgroup_files("cpu", "cpu.cfs_quota_us", "cpu.max", root)]
    periods = _cgroup_files("cpu", "cpu.cfs_period_us", "cpu.max", root)
    # v2 has quota and period in one file, v1 in two.
    pairs = [(quota[0], period.split()[-1]) for quota, period in zip(quotas, periods, strict=True)]
    return min((int(q) / int(p) for q, p in pairs if q not in ("max", "-1")), default=None)


def cpu_info(root: Path = _ROOT) -> CpuInfo:
    """The processor's name, cores, and the CPUs that this process may run on."""
    names = re.findall(r"^(?:model name|Model)\s*:\s*(.+)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    usable = tuple(sorted(os.sched_getaffinity(0)))
    topology = root / "sys/devices/system/cpu"
    siblings = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") for cpu in usable}
    return CpuInfo(
        model=names[0] if names else platform.processor() or platform.machine(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cpus=psutil.cpu_count() or len(usable),
        usable_cpus=usable,
        usable_cores=None if None in siblings else len(siblings),
        cgroup_cpus=cgroup_cpu_limit(root),
    )


def extension_info() -> ExtensionInfo:
    """The kernel variants that this CPU can run, and the one chosen (HYBRIDGEN_CPU_ISA forces one)."""
    if importlib.util.find_spec("hybridgen._C") is None:
        return ExtensionInfo(built=False, problem="not built: run `python3 setup.py build_ext --inplace`")
    try:
        import hybridgen._C as _C

        variants = tuple(str(name) for name in _C.isa_variants())
        return ExtensionInfo(built=True, isa_variants=variants, selected_isa=str(_C.selected_isa()))
    except Exception as error:  # made for another machine, or a forced variant that it lacks: say so, go on
        return ExtensionInfo(built=True, problem=f"does not work: {error}")


def numa_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """The memory nodes; empty where the kernel does not tell."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", _read(folder / "meminfo") or ""))
        cpus = _read(folder / "cpulist") or ""
        total = int(sizes.get("MemTotal", 0)) * 1024
        free = int(sizes.get("MemFree", 0)) * 1024
        nodes.append(NumaNode(int(folder.name[4:]), cpus, total, free, memory_only=not cpus))
    return tuple(sorted(nodes, key=lambda node: node.node))


def memory_info(root: Path = _ROOT) -> MemoryInfo:
    """Host memory and the settings that pinned and huge buffers depend on."""
    memory = psutil.virtual_memory()
    meminfo = _read(root / "proc/meminfo") or ""
    numbers = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", meminfo, re.MULTILINE)}
    page_kib = numbers.get("Hugepagesize")
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemoryInfo(
        total=memory.total,
        available=memory.available,
        cgroup_limit=cgroup_memory_limit(root),
        transparent_huge_pages=chosen.group(1) if chosen else None,
        huge_page_size=None if page_kib is None else page_kib * 1024,
        huge_pages_total=numbers.get("HugePages_Total"),
        huge_pages_free=numbers.get("HugePages_Free"),
        locked_limit=None if locked == resource.RLIM_INFINITY else locked,
    )


def gpus() -> tuple[GpuInfo, ...]:
    """The NVIDIA GPUs that nvidia-smi lists; none where it is missing or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=3, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> tuple[GpuInfo, ...]:
    """GPUs from nvidia-smi's table; sizes in it are MiB, unknown values are words in brackets."""

    def number(cell: str) -> int | None:
        return int(cell) if cell.isdigit() else None

    def mebibytes(cell: str) -> int | None:
        return int(cell) << 20 if cell.isdigit() else None

    def word(cell: str) -> str | None:
        return None if cell.startswith("[") else cell

    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != 10:
            continue
        index, name, total, free, capability, driver, *link = (cell.strip() for cell in row)
        generation, width, generation_now, width_now = map(number, link)
        found.append(
            GpuInfo(
                index=int(index),
                name=name,
                memory_total=mebibytes(total),
                memory_free=mebibytes(free),
                compute_capability=word(capability),
                driver=word(driver),
                pcie_generation=generation,
                pcie_width=width,
                pcie_generation_now=generation_now,
                pcie_width_now=width_now,
            )
        )
    return tuple(found)


def versions() -> dict[str, str | None]:
    """Versions of what matters, from package metadata; None: not installed."""
    found: dict[str, str | None] = {"hybridgen": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "safetensors", "triton", "gguf"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cache_root() -> Path:
    """Where conversions go: the rule of models/gguf_file.py, which needs torch (a test compares them)."""
    own = os.environ.get("HYBRIDGEN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hybridgen"


def _hub_cache() -> Path:
    """The hub's cache folder, by huggingface_hub's rules."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path(os.path.expanduser("~/.cache/huggingface/hub"))
    return Path(HF_HUB_CACHE)


def _local_copy(entry: dict[str, object], hub_cache: Path) -> str | None:
    """Where a copy of an alias's model seems to lie; loading it decides whether it is complete."""
    folder = hub_cache / f"models--{str(entry['hub_id']).replace('/', '--')}" / "snapshots"
    for pattern in ("*/*.safetensors", "*/*.bin"):
        for file in sorted(folder.glob(pattern)):
            return str(file.parent)
    package = entry.get("package")
    if isinstance(package, dict) and importlib.util.find_spec(package["module"]) is not None:
        return f"package {package['name']}"
    return None


def storage_info() -> StorageInfo:
    """Where models are kept, which aliases have a local copy, and how much room is left."""
    cache = _hub_cache()
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    local: dict[str, str] = {}
    other = []
    for file in sorted((configs_dir() / "models").glob("*.yaml")):
        copy = _local_copy(yaml.safe_load(file.read_text()), cache)
        if copy is None:
            other.append(file.stem)
        else:
            local[file.stem] = copy
    free = shutil.disk_usage(existing).free
    return StorageInfo(str(cache_root()), str(cache), free, local, tuple(other))


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def render(info: MachineInfo) -> str:
    """The text for people: one aligned line a fact."""
    rows: list[tuple[str, str]] = [("system", info.system)]

    cpu = info.cpu
    rows.append(("CPU", cpu.model))
    cores = f"{cpu.physical_cores or 'unknown'} physical, {cpu.logical_cpus} logical in the machine"
    limit = "" if cpu.cgroup_cpus is None else f", at most {cpu.cgroup_cpus:g} by control group"
    usable = f"{cpu.usable_cores or 'unknown'} physical, {len(cpu.usable_cpus)} logical"
    rows.append(("cores", cores))
    rows.append(("usable", f"{usable} (CPU {_ranges(cpu.usable_cpus)}){limit}"))

    extension = info.extension
    if extension.problem is not None:
        rows.append(("extension", extension.problem))
    else:
        rows.append(("extension", f"{', '.join(extension.isa_variants)}; in use: {extension.selected_isa}"))

    for node in info.numa:
        where = "memory only" if node.memory_only else f"CPU {node.cpus}"
        sizes = f"{_size(node.memory_total)}, {_size(node.memory_free)} free"
        rows.append((f"NUMA node {node.node}", f"{where}; {sizes}"))

    memory = info.memory
    limit = "" if memory.cgroup_limit is None else f", at most {_size(memory.cgroup_limit)} by control group"
    rows.append(("memory", f"{_size(memory.total)}, {_size(memory.available)} available{limit}"))
    page = "" if memory.huge_page_size is None else f"; {memory.huge_page_size >> 10} KiB reserved: "
    reserved = f"{page}{memory.huge_pages_total} ({memory.huge_pages_free} free)" if page else ""
    rows.append(("huge pages", f"transparent: {memory.transparent_huge_pages or 'unknown'}{reserved}"))
    lockable = "no limit" if memory.locked_limit is None else _size(memory.locked_limit)
    rows.append(("lockable memory", lockable))

    for gpu in info.gpus:
        sizes = f"{_size(gpu.memory_total)}, {_size(gpu.memory_free)} free"
        kind = f"compute capability {gpu.compute_capability or 'unknown'}; driver {gpu.driver or 'unknown'}"
        rows.append((f"GPU {gpu.index}", f"{gpu.name}; {sizes}; {kind}"))
        now = f"now {gpu.pcie_generation_now} x{gpu.pcie_width_now}"
        rows.append(("  link", f"PCIe generation {gpu.pcie_generation} x{gpu.pcie_width} ({now})"))
    if not info.gpus:
        rows.append(("GPU", "none found"))

    rows += [(name, version or "not installed") for name, version in info.versions.items()]

    storage = info.storage
    rows.append(("cache", storage.cache))
    rows.append(("hub cache", f"{storage.hub_cache} ({_size(storage.hub_cache_free)} free on its disk)"))
    rows += [(f"model {alias}", place) for alias, place in storage.local_models.items()]
    rows.append(("not local", ", ".join(storage.other_models) or "none"))

    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the facts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hybridgen.info", description="What this machine offers.")
    parser.add_argument("--json", action="store_true", help="machine readable, sizes in bytes")
    arguments = parser.parse_args(argv)
    info = collect()
    print(json.dumps(asdict(info), indent=2) if arguments.json else render(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
