"""`hybridgen.info`: what it says of this machine, and of machines made up in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybridgen import __main__ as cli
from hybridgen import info


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_json_is_plausible(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"system", "cpu", "extension", "numa", "memory", "gpus", "versions", "storage"}
    assert facts["cpu"]["logical_cpus"] == psutil.cpu_count()
    assert facts["cpu"]["usable_cpus"] == sorted(os.sched_getaffinity(0))
    assert 1 <= (facts["cpu"]["usable_cores"] or 1) <= len(facts["cpu"]["usable_cpus"])
    assert facts["memory"]["total"] == psutil.virtual_memory().total
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["memory"]["cgroup_limit"] is None or facts["memory"]["cgroup_limit"] > 0
    assert all(node["memory_total"] >= node["memory_free"] for node in facts["numa"])
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["torch"]
    assert facts["storage"]["hub_cache_free"] > 0
    assert "smollm2-135m" in {*facts["storage"]["local_models"], *facts["storage"]["other_models"]}


def test_text_is_aligned_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [line.split("  ")[0] for line in lines]
    assert {"CPU", "usable", "extension", "memory", "huge pages", "torch", "hub cache"} <= set(labels)
    column = lines[0].index(info.platform.platform())
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)


def test_extension_is_named_or_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = info.extension_info()
    if found.built:
        assert found.problem is None
        assert "scalar" in found.isa_variants
        assert found.selected_isa in found.isa_variants
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    missing = info.extension_info()
    assert not missing.built
    assert "setup.py build_ext --inplace" in (missing.problem or "")


def test_a_forced_variant_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if not info.extension_info().built:
        pytest.skip("the extension is not built")
    monkeypatch.setenv("HYBRIDGEN_CPU_ISA", "nonsense")
    assert "nonsense" in (info.extension_info().problem or "")


def test_memory_only_node(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node"
    write(
        tmp_path,
        {
            f"{node}0/cpulist": "0-3\n",
            f"{node}0/meminfo": "Node 0 MemTotal:  2048 kB\nNode 0 MemFree:  1024 kB\n",
            f"{node}10/cpulist": "\n",
            f"{node}10/meminfo": "Node 10 MemTotal:  4096 kB\nNode 10 MemFree:  4096 kB\n",
        },
    )
    assert info.numa_nodes(tmp_path) == (
        info.NumaNode(0, "0-3", 2 << 20, 1 << 20, memory_only=False),
        info.NumaNode(10, "", 4 << 20, 4 << 20, memory_only=True),
    )
    assert info.numa_nodes(tmp_path / "absent") == ()


def test_limits_of_cgroup_v2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        "sys/fs/cgroup/outer/memory.max": "1073741824\n",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
    }
    write(tmp_path, files)
    assert info.cgroup_memory_limit(tmp_path) == 1 << 30
    assert info.cgroup_cpu_limit(tmp_path) == 1.5


def test_limits_of_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/not/mounted/here\n3:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    write(tmp_path, files)
    assert info.cgroup_memory_limit(tmp_path) == 2 << 30
    assert info.cgroup_cpu_limit(tmp_path) == 0.5
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert info.cgroup_memory_limit(tmp_path) is None
    assert info.cgroup_cpu_limit(tmp_path) is None


def test_gpus_from_nvidia_smi() -> None:
    text = "0, NVIDIA H200, 143771, 143000, 9.0, 580.95, 5, 16, 1, [N/A]\nnot a row\n"
    (gpu,) = info.parse_nvidia_smi(text)
    assert (gpu.index, gpu.name, gpu.compute_capability, gpu.driver) == (0, "NVIDIA H200", "9.0", "580.95")
    assert gpu.memory_total == 143771 << 20
    assert (gpu.pcie_generation, gpu.pcie_width) == (5, 16)
    assert (gpu.pcie_generation_now, gpu.pcie_width_now) == (1, None)


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert info.gpus() == ()


def test_local_models_are_found_in_the_hub_cache(tmp_path: Path) -> None:
    entry: dict[str, object] = {"hub_id": "facebook/opt-1.3b"}
    assert info._local_copy(entry, tmp_path) is None
    snapshot = "models--facebook--opt-1.3b/snapshots/abc"
    write(tmp_path, {f"{snapshot}/pytorch_model.bin": ""})
    assert info._local_copy(entry, tmp_path) == str(tmp_path / snapshot)


def test_cache_folder_is_the_converters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hybridgen.models import gguf_file

    for name in ("HYBRIDGEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert info.cache_root() == gguf_file.cache_root()
    for name in ("XDG_CACHE_HOME", "HYBRIDGEN_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert info.cache_root() == gguf_file.cache_root()


def test_info_leaves_torch_alone() -> None:
    code = "import sys; from hybridgen import info; info.collect(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_commands_are_listed_and_handed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in cli.available_commands())
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["hybridgen"]


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inof"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'inof'" in error
    assert "did you mean 'info'" in error


def test_a_command_that_is_not_there_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.available_commands() == []
    assert cli.main(["info"]) == 2
