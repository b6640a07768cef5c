"""The machine file, and the limit of a step."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridgen import info, machine
from hybridgen.errors import ConfigError
from hybridgen.machine import (
    MachineCeilings,
    hardware_file,
    hardware_files,
    limit_ms,
    machine_file,
    read_ceilings,
    record_rates,
    write_ceilings,
)

CEILINGS = MachineCeilings(
    scan_bytes_per_s=100e9,
    scan_with_dma_bytes_per_s=120e9,
    dma_h2d_bytes_per_s=50e9,
    zero_copy_bytes_per_s=40e9,
    gpu="NVIDIA H200",
    cores=16,
    measured_at="2026-11-29T10:00:00+00:00",
    versions={"torch": "2.11.0", "triton": None},
)


@pytest.fixture(autouse=True)
def same_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "this_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(machine, "this_cores", lambda: 16)
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYBRIDGEN_MACHINE_FILE", raising=False)


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine_file() == info.cache_root() / "machine.json" == tmp_path / "cache" / "machine.json"
    monkeypatch.setenv("HYBRIDGEN_MACHINE_FILE", str(tmp_path / "other.json"))
    assert machine_file() == tmp_path / "other.json"


def test_there_and_back(tmp_path: Path) -> None:
    assert read_ceilings() is None
    assert write_ceilings(None, CEILINGS) == machine_file()
    assert read_ceilings() == CEILINGS
    slower = replace(CEILINGS, scan_bytes_per_s=90e9)
    assert write_ceilings(machine_file(), slower) == machine_file()  # over the first
    assert read_ceilings(machine_file()) == slower
    assert [file.name for file in machine_file().parent.iterdir()] == ["machine.json"]


def test_of_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = replace(
        CEILINGS, gpu=None, scan_with_dma_bytes_per_s=None, dma_h2d_bytes_per_s=None, zero_copy_bytes_per_s=None
    )
    monkeypatch.setattr(machine, "this_gpu", lambda: None)
    path = write_ceilings(tmp_path / "m.json", alone)
    assert json.loads(path.read_text())["zero_copy_bytes_per_s"] is None
    assert read_ceilings(path) == alone


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA L4"}, {"gpu": None}, {"cores": 8}])
def test_another_machine(change: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_ceilings(tmp_path / "m.json", replace(CEILINGS, **change))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert read_ceilings(path) is None
        assert read_ceilings(path) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "NVIDIA H200 and 16 cores" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scan_bytes_per_s", None),
        ("scan_bytes_per_s", 0),
        ("scan_bytes_per_s", "fast"),
        ("scan_with_dma_bytes_per_s", float("nan")),
        ("dma_h2d_bytes_per_s", -1.0),
        ("zero_copy_bytes_per_s", True),
        ("gpu", 3),
        ("scan_by_key_type", {"fp16": 0}),
        ("scan_by_key_type", None),
        ("read_bytes_per_s", -1.0),
        ("cpu", 5),
        ("cores", 1.5),
        ("cores", 0),
        ("measured_at", 2026),
        ("versions", ["2.11"]),
        ("versions", {"torch": 2}),
    ],
)
def test_a_damaged_field(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**asdict(CEILINGS), name: value}))
    with pytest.raises(ConfigError, match=name) as caught:
        read_ceilings(path)
    assert str(path) in str(caught.value)


LATER = ("read_bytes_per_s", "dma_d2h_bytes_per_s", "dma_both_bytes_per_s", "scan_by_key_type", "cpu")


@pytest.mark.parametrize("name", [name for name in asdict(CEILINGS) if name not in LATER])
def test_a_missing_field(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({key: value for key, value in asdict(CEILINGS).items() if key != name}))
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_ceilings(path)


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({key: value for key, value in asdict(CEILINGS).items() if key not in LATER}))
    assert read_ceilings(path) == CEILINGS


def test_parts_are_put_together() -> None:
    path = machine_file()
    record_rates(path, {"read_bytes_per_s": 11e9}, {"fp16": 9e9, "int8": 10e9})
    first = read_ceilings()
    assert first is not None and (first.scan_bytes_per_s, first.dma_h2d_bytes_per_s) == (10e9, None)
    record_rates(path, {"dma_h2d_bytes_per_s": 50e9}, {"fp16": 9.5e9})
    both = read_ceilings()
    assert both is not None
    assert (both.read_bytes_per_s, both.scan_bytes_per_s, both.dma_h2d_bytes_per_s) == (11e9, 10e9, 50e9)
    assert both.scan_by_key_type == {"fp16": 9.5e9, "int8": 10e9} and both.cpu == info.cpu_info().model


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA L4"}, {"cores": 8}, {"cpu": "another"}])
def test_rates_of_another_machine_go(change: dict[str, object]) -> None:
    record_rates(machine_file(), {"read_bytes_per_s": 11e9, "zero_copy_bytes_per_s": 40e9}, {"int8": 10e9})
    before = read_ceilings()
    assert before is not None
    write_ceilings(machine_file(), replace(before, **change))  # type: ignore[arg-type]
    after = record_rates(machine_file(), {"read_bytes_per_s": 5e9}, {"fp16": 4e9})
    assert (after.read_bytes_per_s, after.zero_copy_bytes_per_s) == (5e9, None)
    assert after.scan_by_key_type == {"fp16": 4e9} and after == read_ceilings()


def test_a_damaged_file_is_written_anew() -> None:
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text("{")
    record_rates(machine_file(), {}, {"fp16": 4e9})
    assert read_ceilings() is not None


def test_files_of_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "configs_dir", lambda: tmp_path)
    assert hardware_files() == []
    path = write_ceilings(hardware_file("h200-x1"), replace(CEILINGS, cores=8))
    assert hardware_files() == [path] == [tmp_path / "hardware" / "h200-x1.json"]
    assert read_ceilings(path) is None
    assert read_ceilings(path, any_machine=True) == replace(CEILINGS, cores=8)
    for name in ("", "a/b", "..", ".x", "a b"):
        with pytest.raises(ConfigError, match="machine name"):
            hardware_file(name)


def test_shipped_files() -> None:
    for path in hardware_files():
        assert read_ceilings(path, any_machine=True) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe"])
def test_no_machine_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.json"):
        read_ceilings(path)


def test_what_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_ceilings(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="machine file"):
        write_ceilings(tmp_path / "file" / "m.json", CEILINGS)
    with pytest.raises(ConfigError, match="machine file"):
        write_ceilings(tmp_path, CEILINGS)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_limit_by_hand() -> None:
    terms = limit_ms(CEILINGS, scan_bytes=10e9, logits_bytes=1e9, fetched_bytes=3e9, streamed_bytes=5e9, gpu_ms=30.0)
    # dram: scan + logits written + logits read + fetched + streamed
    expected = {"scan": 100.0, "dram": 20e9 / 120e9 * 1e3, "link": 100.0 + 100.0, "gpu": 30.0, "limit": 200.0}
    assert terms == pytest.approx(expected)


@pytest.mark.parametrize("largest", ["scan", "dram", "link", "gpu"])
def test_the_limit_is_the_largest(largest: str) -> None:
    moved = {"scan_bytes": 1e9, "logits_bytes": 0.0, "fetched_bytes": 1e6, "streamed_bytes": 1e6}
    ceilings, gpu_ms = CEILINGS, 1.0
    if largest == "scan":
        moved["scan_bytes"] = 1e11
    elif largest == "dram":
        ceilings = replace(CEILINGS, scan_with_dma_bytes_per_s=1e9)
    elif largest == "link":
        moved["streamed_bytes"] = 1e12
    else:
        gpu_ms = 1e6
    terms = limit_ms(ceilings, **moved, gpu_ms=gpu_ms)
    assert terms["limit"] == terms[largest] == max(term for term in terms.values() if term is not None)


def test_the_unknown_is_left_out() -> None:
    alone = replace(CEILINGS, scan_with_dma_bytes_per_s=None, dma_h2d_bytes_per_s=None, zero_copy_bytes_per_s=None)
    moved = {"scan_bytes": 1e9, "logits_bytes": 1e9, "fetched_bytes": 1e9, "streamed_bytes": 1e9}
    terms = limit_ms(alone, **moved, gpu_ms=None)
    assert terms == pytest.approx({"scan": 10.0, "dram": None, "link": None, "gpu": None, "limit": 10.0})
    assert limit_ms(alone, **moved, gpu_ms=11.0)["limit"] == 11.0
    assert limit_ms(replace(alone, zero_copy_bytes_per_s=1e9), **moved, gpu_ms=None)["link"] is None
