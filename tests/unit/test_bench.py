"""`hybridgen.bench` on little memory: the right rows and files, keys that are what the kernels take them for."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from hybridgen import _C, bench, machine
from hybridgen.benchmarks import cpu
from hybridgen.benchmarks.link import Link, link_steps, measure_link, scan_threads
from hybridgen.benchmarks.rows import Row, Scanner, Span, rate, rates_together
from hybridgen.errors import ConfigError
from hybridgen.kv_cache.quantize import dequantize_int8, read_sketch
from hybridgen.machine import read_ceilings, this_cores
from hybridgen.selection.host_logits import HostLogits

WALK_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDGEN_MACHINE_FILE", str(tmp_path / "machine.json"))
    (tmp_path / "configs" / "hardware").mkdir(parents=True)
    monkeypatch.setattr(machine, "configs_dir", lambda: tmp_path / "configs")
    monkeypatch.setattr(cpu, "SHAPES", [replace(shape, tokens=512) for shape in cpu.SHAPES])


def run(tmp_path: Path, *flags: str) -> dict[str, object]:
    report = tmp_path / "report.json"
    assert bench.main(["cpu", "--gib", "0.05", "--quick", *flags, "--report", str(report)]) == 0
    content: dict[str, object] = json.loads(report.read_text())
    return content


def test_rows_of_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "this_gpu", lambda: None)  # for which logits are float16
    report = run(tmp_path)
    rows = [Row(**row) for row in report["rows"]]  # type: ignore[attr-defined]
    assert set(report["rows"][0]) == {  # type: ignore[index]
        "kernel", "key_type", "shape", "threads", "isa", "ms", "gbps", "fraction_of_ceiling", "fraction_beside",
        "torch_gbps", "written_per_read",
    }  # fmt: skip
    counts = cpu.thread_counts(this_cores(), quick=True)
    names = [shape.name for shape in cpu.SHAPES]
    scans = [row for row in rows if row.kernel != "read"]
    expected = [(key_type, name, n) for key_type in cpu.KEY_TYPES for name in names for n in counts]
    assert [(row.key_type, row.shape, row.threads) for row in scans] == expected
    assert {row.isa for row in scans} == {_C.selected_isa()}
    assert all(row.kernel == ("scan_rows" if " of " in row.shape else "scan") for row in scans)
    assert all(row.ms > 0 and row.gbps > 0 for row in rows)
    for row in scans:
        assert (row.torch_gbps is not None) == (row.key_type in ("fp32", "fp16", "bf16"))
    written = {row.key_type: row.written_per_read for row in scans if row.shape == names[1]}
    assert report["logits"] == "fp32" and written["fp16"] == 4 * 4 / 256  # four queries a KV head of 128 channels
    halves = [Row(**row) for row in run(tmp_path, "--logits", "fp16")["rows"]]  # type: ignore[attr-defined]
    written = {row.key_type: row.written_per_read for row in halves if row.shape == names[1]}
    assert written["fp16"] == 4 * (2 + 4 / 256) / 256
    # The best read is the ceiling, and every fraction is of it.
    ceiling = max(row.gbps for row in rows if row.kernel == "read")
    assert report["ceiling"]["gbps"] == ceiling  # type: ignore[index]
    assert all(row.fraction_of_ceiling == pytest.approx(row.gbps / ceiling) for row in rows)
    assert {row.threads for row in rows if row.kernel == "read"} == set(counts)
    assert all((row.fraction_beside is not None) == (row.kernel != "read") for row in rows)
    assert all(0 < row.fraction_beside < 10 for row in scans if row.fraction_beside is not None)
    shown = capsys.readouterr().out
    assert "walks of 0.05 GiB, less than 4" in shown and "read ceiling" in shown
    # From caches, in part: no ceilings of a machine.
    assert "no machine file" in shown and not (tmp_path / "machine.json").exists()


def test_every_isa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHAPES", cpu.SHAPES[:1])
    monkeypatch.setattr(cpu, "KEY_TYPES", {"fp16": "float16"})
    report = run(tmp_path, "--isa", "all")
    scans = [row for row in report["rows"] if row["kernel"] == "scan"]  # type: ignore[attr-defined]
    assert {row["isa"] for row in scans} == set(_C.isa_variants())


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "LEAST_GIB_OF_A_CEILING", 0.0)
    monkeypatch.setattr(cpu, "SHAPES", cpu.SHAPES[:1])
    report = run(tmp_path, "--save", "box")
    ceilings = read_ceilings()
    assert ceilings is not None and ceilings.cores == this_cores() and ceilings.dma_h2d_bytes_per_s is None
    assert ceilings.read_bytes_per_s == pytest.approx(1e9 * report["ceiling"]["gbps"])  # type: ignore[index]
    assert set(ceilings.scan_by_key_type) == set(cpu.KEY_TYPES)
    assert ceilings.scan_bytes_per_s == max(ceilings.scan_by_key_type.values())
    saved = machine.hardware_file("box")
    assert saved.parent == tmp_path / "configs" / "hardware"
    assert replace(read_ceilings(saved), measured_at="") == replace(ceilings, measured_at="")  # type: ignore[type-var]
    capsys.readouterr()
    assert bench.main(["hardware"]) == 0
    assert "`box`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["gpu"],
        ["cpu", "--gib", "0"],
        ["cpu", "--gib", "nan"],
        ["cpu", "--gib", "much"],
        ["cpu", "--gib", "1000000"],
        ["cpu", "--isa", "mmx"],
        ["cpu", "--save", "../x"],
        ["cpu", "--report", "/no/such/folder/r.json"],
        ["link", "--isa", "scalar"],
    ],
)
def test_bad_input(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["link"]) == 2
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("key_type", list(cpu.KEY_TYPES))
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("in_half", [False, True])
def test_what_is_scanned(key_type: str, index: int, in_half: bool) -> None:
    """Every scan of a walk reads its own layer (and list), within the pool."""
    shape = cpu.SHAPES[index]
    case = cpu.Case(shape, cpu.row_lists(shape), key_type, WALK_BYTES)
    pool = cpu.KeyPool([case], in_half=in_half)
    pool.fill(key_type)
    assert case.layers * case.layer_bytes <= pool.keys.numel()
    jobs = list(case.jobs(pool))
    assert len(jobs) == case.layers * case.scans_a_layer
    assert len({(job["keys"], job.get("rows")) for job in jobs}) == len(jobs)
    scanner = Scanner(1)
    spans = scanner.spans(scanner.submit(jobs))
    assert sum(span.moved_bytes for span in spans) >= WALK_BYTES
    scanner.close()

    group = shape.heads // shape.kv_heads
    last = case.layers - 1
    stored = case.keys(pool, last)
    if case.bits is not None:
        keys = read_sketch(stored.unsqueeze(0), case.bits, cpu.DIM)[0]
    elif key_type == "int8":
        keys = dequantize_int8(stored, case.scales(pool, last), None, torch.float32)
    else:
        keys = stored.float()
    if key_type in ("int8", "int4", "int2"):
        keys = keys + pool.mean[: shape.kv_heads].unsqueeze(1)
    if case.lists is not None:
        rows = case.lists[case.scans_a_layer - 1].long().unsqueeze(-1).expand(-1, -1, cpu.DIM)
        keys = keys.gather(1, rows)
    query = pool.query[: shape.heads].view(shape.kv_heads, group, cpu.DIM)
    expected = query @ keys.transpose(1, 2)
    written, maxima = pool.logits[(len(jobs) - 1) % 2], pool.maxima[(len(jobs) - 1) % 2]
    written = written[: shape.heads * shape.logits].view(1, shape.heads, -1)[:, :, : shape.rows]
    if maxima is not None:
        maxima = maxima[: shape.heads * shape.logits // 256].view(1, shape.heads, -1)
    found = HostLogits(written, maxima).float().view(shape.kv_heads, group, shape.rows)
    exactly = case.bits is None
    nearly = (0.1 if in_half else 0.01) if exactly else 1.0
    torch.testing.assert_close(found, expected, rtol=1e-3 if exactly else 0.1, atol=nearly)
    for way in cpu.torch_ways(case).values():
        scored = way(cpu.torch_query(case, pool), cpu.torch_keys(case, pool, last, case.scans_a_layer - 1))
        torch.testing.assert_close(scored.float(), expected, rtol=0.05, atol=0.5)


def test_row_lists_name_no_row_twice() -> None:
    lists = cpu.row_lists(cpu.SHAPES[2])
    assert lists is not None and lists.dtype is torch.int32
    assert bool((lists.diff(dim=-1) > 0).all())
    for head in range(lists.shape[1]):
        named = lists[:, head].flatten()
        assert len(named.unique()) == len(named)


def test_threads() -> None:
    assert cpu.thread_counts(1, quick=False) == [1]
    assert cpu.thread_counts(2, quick=True) == [1, 2]
    assert cpu.thread_counts(16, quick=True) == [1, 15, 16]
    assert cpu.thread_counts(16, quick=False) == [1, 2, 4, 8, 12, 15, 16]


def test_a_read_walks_what_it_says() -> None:
    memory = torch.zeros(3 << 20, dtype=torch.uint8)
    cores = os.sched_getaffinity(0)
    seconds, walked = _C.read_seconds(memory.data_ptr(), memory.numel(), 2, sorted(cores), 4, 1024, 1 << 20)
    assert seconds > 0 and walked == 6 << 20
    with pytest.raises(ValueError, match="streams=3"):
        _C.read_seconds(memory.data_ptr(), memory.numel(), 1, [min(cores)], 3, 0, 1 << 20)
    with pytest.raises(ValueError, match="chunk_bytes"):
        _C.read_seconds(memory.data_ptr(), 1000, 1, [min(cores)], 1, 0, 1 << 20)
    with pytest.raises(ValueError, match="cores"):
        _C.read_seconds(memory.data_ptr(), memory.numel(), 1, [100_000], 1, 0, 1 << 20)


def test_a_ceiling_that_is_none() -> None:
    read, scan = Row("read", None, "r", 1, None, 1.0, 10.0), Row("scan", "int8", "s", 2, "scalar", 1.0, 11.0)
    assert bench._above([read, replace(scan, gbps=10.0)]) is None
    assert "too low" in (bench._above([read, scan]) or "")


def test_rates_for_the_machine_file() -> None:
    def row(kernel: str, gbps: float, key_type: str | None = None) -> Row:
        return Row(kernel, key_type, "", None, None, 1.0, gbps)

    rows = [row("read", 9.0), row("read", 10.0), row("scan", 7.0, "fp16"), row("scan", 8.0, "fp16")]
    rows += [row("scan", 5.0, "int8"), row("scan_rows", 30.0, "int8"), row("h2d", 50.0), row("d2h", 51.0)]
    rows += [row("h2d+d2h", 90.0), row("zero_copy", 45.0), row("scan beside h2d", 70.0), row("h2d beside scan", 40.0)]
    rates, scans = bench.found_rates(rows)
    assert scans == {"fp16": 8e9, "int8": 5e9}
    assert rates == {
        "read_bytes_per_s": 10e9,
        "dma_h2d_bytes_per_s": 50e9,
        "dma_d2h_bytes_per_s": 51e9,
        "dma_both_bytes_per_s": 90e9,
        "zero_copy_bytes_per_s": 45e9,
        "scan_with_dma_bytes_per_s": 110e9,
    }
    assert set(rates) < {field.name for field in fields(machine.MachineCeilings)}


def test_rates_by_hand() -> None:
    first = [Span(0.0, 1.0, 100.0), Span(1.0, 2.0, 100.0)]
    second = [Span(0.5, 1.5, 30.0)]
    assert rate(first) == 100.0
    assert rates_together(first, second) == pytest.approx((100.0, 30.0))
    with pytest.raises(ConfigError, match="--gib"):
        rates_together(first, [Span(3.0, 4.0, 1.0)])


def test_the_link_where_the_cpu_plays_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are synchronous here, so two ways at once are not; everything else runs."""
    link = Link(torch.device("cpu"), gib=0.2, rounds=1, tokens=4096, block_bytes=4 << 20)
    with pytest.raises(ConfigError, match="together"):
        link.both()
    monkeypatch.setattr(link, "both", link.h2d)
    fetch, slab = link.zero_copy, link.slab
    monkeypatch.setattr(link, "zero_copy", lambda: fetch(64))
    monkeypatch.setattr(link, "slab", lambda: slab(4 << 20))
    beside = [replace(link.h2d(), kernel=kernel) for kernel in ("scan beside h2d", "h2d beside scan")]
    monkeypatch.setattr(link, "scan_with_dma", lambda threads: tuple(beside))
    steps: list[str] = []
    rows = measure_link(link, this_cores(), steps.append)
    assert len(steps) == link_steps(this_cores())
    kernels = [row.kernel for row in rows]
    expected = ["zero_copy", "h2d", "d2h", "h2d", "slab", "scan beside h2d", "h2d beside scan"]
    assert kernels == ["scan"] * len(scan_threads(this_cores())) + expected
    assert all(row.gbps > 0 and row.ms > 0 for row in rows)
    assert all(row.kernel in bench.link_table(rows) for row in rows)
