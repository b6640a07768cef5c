"""The kernel variant: chosen, forced, refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridgen import _C
from tests.kernels.scan_case import ISAS, ScanCase

ROOT = Path(__file__).parents[2]
FORCED = """
from hybridgen import _C
from tests.kernels.scan_case import QUANTIZED, QuantizedCase, ScanCase
worker = _C.ScanWorker(1)
plain = ScanCase("float16", [100], 2, 2, 64)
worker.wait(plain.submit(worker))
plain.check()
for kind in QUANTIZED:
    case = QuantizedCase(kind, [100], 2, 2, 64)
    worker.wait(case.submit(worker))
    case.check(worker.isa)
print("selected", _C.selected_isa(), worker.isa, sorted(worker.jobs_by_isa.items()))
"""


def python(code: str, isa: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "HYBRIDGEN_CPU_ISA"}
    if isa is not None:
        env["HYBRIDGEN_CPU_ISA"] = isa
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def test_variants_are_what_the_cpu_has():
    assert ISAS[-1] == "scalar"
    flags = cpu_flags()
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert ("avx2" in ISAS) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512" in ISAS) == (avx512 <= flags)
    assert ("avx512_vnni" in ISAS) == (avx512 | {"avx512_vnni"} <= flags)
    assert ("amx_emulated" in ISAS) == ("avx512_vnni" in ISAS)  # asked for in conftest.py
    assert "amx" not in ISAS or {"amx_tile", "amx_int8"} <= flags  # some systems have it and forbid it
    known = ("amx", "avx512_vnni", "avx512", "avx2", "amx_emulated", "scalar")
    assert [name for name in known if name in ISAS] == list(ISAS)  # best first
    assert len(set(ISAS)) == len(ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_forced_isa_runs(isa):
    result = python(FORCED, isa)
    assert result.returncode == 0, result.stderr
    counts = sorted((name, 4 * (name == isa)) for name in ISAS)
    assert f"selected {isa} {isa} {counts}" in result.stdout


@pytest.mark.parametrize("isa", [None, ""])
def test_best_isa_without_force(isa):
    result = python("from hybridgen import _C; print(_C.selected_isa(), _C.ScanWorker(0).isa)", isa)
    assert result.stdout.split() == [ISAS[0], ISAS[0]], result.stderr


@pytest.mark.parametrize("call", ["selected_isa()", "ScanWorker(1)"])
def test_unknown_forced_isa_is_an_error(call):
    result = python(f"from hybridgen import _C; _C.{call}", "avx1024")
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ValueError: HYBRIDGEN_CPU_ISA='avx1024'")
    assert message.endswith("available: " + ", ".join(ISAS))


def test_argument_beats_the_variable(monkeypatch):
    monkeypatch.setenv("HYBRIDGEN_CPU_ISA", "avx1024")
    worker = _C.ScanWorker(0, isa="scalar")
    case = ScanCase("bfloat16", [20], 1, 1, 64)
    worker.wait(case.submit(worker))
    case.check()
    assert worker.jobs_by_isa["scalar"] == 1
    with pytest.raises(ValueError, match=r"isa='mmx' is unknown .* available: .*scalar"):
        _C.ScanWorker(0, isa="mmx")
