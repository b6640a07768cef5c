"""Hardware files: what is read, what follows from it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridgen.config import configs_dir
from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.placement.hardware import hardware_names, load_hardware

NEEDED: dict[str, Any] = {
    "gpu_memory_gib": 24,
    "host_memory_gib": 100,
    "gpu_memory_gb_per_s": 1000,
    "gpu_tflops": 150,
    "h2d_gb_per_s": 25,
    "cpu_scan_gb_per_s": 60,
}


def written(path: Path, **changes: Any) -> str:
    content = {name: value for name, value in (NEEDED | changes).items() if value != "left out"}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_what_is_left_out_follows_from_the_rest(tmp_path: Path) -> None:
    made = load_hardware(written(tmp_path / "mine.yaml"))
    assert made.name == "mine" and made.gpu_memory_bytes == 24 * 2**30 and made.host_memory_bytes == 100 * 2**30
    assert made.h2d == made.d2h == 25e9 and made.zero_copy == pytest.approx(22.5e9)
    assert made.host_dram == made.cpu_scan("int8") == 60e9 and made.disk_bytes == 0
    given = load_hardware(
        written(
            tmp_path / "more.yaml", name="M", d2h_gb_per_s=20, host_dram_gb_per_s=70, disk_gib=5, disk_read_gb_per_s=4,
            cpu_scan_by_key_type_gb_per_s={"int8": 50},
        )
    )  # fmt: skip
    assert given.name == "M" and given.d2h == 20e9 and given.host_dram == 70e9
    assert given.cpu_scan("int8") == 50e9 and given.cpu_scan("fp16") == 60e9
    assert given.disk_bytes == 5 * 2**30 and given.disk_read == 4e9 and given.disk_write == 2e9


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(NEEDED))
    assert load_hardware(str(tmp_path / "mine.json")).h2d == 25e9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h2d_gb_per_s": "left out"}, r"h2d_gb_per_s is missing \(allowed: a number > 0\)"),
        ({"gpu_tflops": None}, r"gpu_tflops is None \(allowed: a number > 0\)"),
        ({"gpu_memory_gib": "24GiB"}, r"gpu_memory_gib is '24GiB' \(allowed: a number > 0\)"),
        ({"cpu_scan_gb_per_s": -1}, r"cpu_scan_gb_per_s is -1"),
        ({"host_memory_gib": True}, r"host_memory_gib is True"),
        ({"disk_gib": 0}, r"disk_gib is 0 \(allowed: a number > 0, or null\)"),
        ({"cpu_scan_by_key_type_gb_per_s": {"int8": "x"}}, r"cpu_scan.* \(allowed: key types and numbers > 0\)"),
        ({"h2d_gbps": 25}, r"unknown field 'h2d_gbps'; did you mean h2d_gb_per_s\? \(known: name, gpu_memory_gib"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: " + words):
        load_hardware(written(tmp_path / "mine.yaml", **changes))


def test_a_disk_without_a_rate_is_an_error_where_it_is_used(tmp_path: Path) -> None:
    made = load_hardware(written(tmp_path / "mine.yaml", disk_gib=100))
    with pytest.raises(ConfigError, match=r"mine\.yaml: disk_read_gb_per_s is null"):
        _ = made.disk_read


def test_what_is_no_file_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, words in (("list", "must map fields"), ("bad", "neither YAML nor JSON"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=words):
            load_hardware(str(tmp_path / f"{name}.yaml"))
    with pytest.raises(UnknownNameError, match="rtx-4090"):
        load_hardware("rtx-409")


def test_the_files_that_ship() -> None:
    for name in hardware_names():
        if name == "ci-2-cores":
            with pytest.raises(ConfigError, match=r"ci-2-cores\.json: gpu is null"):
                load_hardware(name)
        else:
            assert load_hardware(name).h2d > 1e9


def test_a_measured_machine_has_its_data_sheet(tmp_path: Path) -> None:
    source = configs_dir() / "hardware" / "h200-16-cores.json"
    content = json.loads(source.read_text())
    made = load_hardware("h200-16-cores")
    assert made.h2d == pytest.approx(content["dma_h2d_bytes_per_s"])
    assert made.cpu_scan("fp16") == pytest.approx(content["scan_by_key_type"]["fp16"])
    assert made.host_memory_bytes is None and made.gpu_memory_gb_per_s == 4800
    for field, value, words in (
        ("gpu", "Some GPU", "gpu is 'Some GPU', whose data sheet is not known here"),
        ("dma_h2d_bytes_per_s", None, "dma_h2d_bytes_per_s is null"),
        ("cores", 0, "cores is 0"),
    ):
        (tmp_path / "other.json").write_text(json.dumps({**content, field: value}))
        with pytest.raises(ConfigError, match=words):
            load_hardware(str(tmp_path / "other.json"))
