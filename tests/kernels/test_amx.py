"""What tiles do otherwise than other kernels: quantised keys exactly as VNNI, fp16 keys in three parts."""

import numpy as np
import pytest

from hybridgen import _C
from tests.kernels.scan_case import ISAS, QUANTIZED, QuantizedCase, ScanCase

TILES = [isa for isa in ISAS if isa.startswith("amx")]
pytestmark = pytest.mark.skipif(not TILES, reason="this CPU has no AVX-512 VNNI, on which emulated tiles build")


def scanned(case: ScanCase | QuantizedCase, isa: str) -> np.ndarray:
    worker = _C.ScanWorker(0, isa=isa)
    try:
        worker.wait(case.submit(worker))
    finally:
        worker.close()
    return case.out.copy()


@pytest.mark.parametrize("tier", [0, 900])
@pytest.mark.parametrize("group", [2, 3, 4, 5, 7, 8, 13, 16])
@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", TILES)
def test_logits_are_those_of_vnni(isa: str, key_type: str, group: int, tier: int) -> None:
    """To the last bit: both round the query alike, and then count in integers."""
    for head_dim in (64, 72, 128, 256):
        case = QuantizedCase(key_type, [500, 1, 33], 2, group, head_dim, tier=tier)
        np.testing.assert_array_equal(scanned(case, isa), scanned(case, "avx512_vnni"))


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("isa", TILES)
def test_fp16_keys_that_are_not_finite(isa: str, number: float) -> None:
    """Their rows' logits are not finite either, and those of other rows are what they are without, to the last bit."""
    case = ScanCase("float16", [100, 33], 2, 4, 128)
    want = scanned(case, isa)
    case.keys[0, 1, 40, 7] = case.keys[1, 0, 32, 127] = number
    got = scanned(case, isa)
    hit = np.zeros_like(got, bool)
    hit[0, 4:, 40] = hit[1, :4, 32] = True
    assert not np.isfinite(got[hit]).any()
    np.testing.assert_array_equal(got[~hit], want[~hit])
    assert np.isfinite(want[0, :, :100]).all()


@pytest.mark.parametrize("size", [20000.0, 1e30])
@pytest.mark.parametrize("isa", TILES)
def test_queries_beyond_the_range_of_the_parts(isa: str, size: float) -> None:
    """For fp16 keys a query grows by 2^112 before it is split."""
    case = ScanCase("float16", [70], 1, 4, 64)
    case.query *= size / abs(case.query).max()
    scanned(case, isa)
    case.check(isa)


@pytest.mark.parametrize("isa", TILES)
def test_every_fp16_number(isa: str) -> None:
    """Each finite one that is not subnormal, times one: itself, and nothing of its neighbours."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    bits = bits[np.isfinite(bits.view(np.float16).astype(np.float32)).all(1)]
    case = ScanCase("float16", [len(bits)], 1, 2, 64, scale=1.0, offset=0)
    case.keys[0, 0, : len(bits)] = bits.view(np.float16)
    for channel in (0, 1, 31, 63):
        case.query[:] = 0
        case.query[0, 1, channel] = 1
        want = bits.view(np.float16)[:, channel].astype(np.float32)
        want[abs(want) < 2.0**-14] = 0
        got = scanned(case, isa)
        np.testing.assert_array_equal(got[0, 1, : len(bits)], want)
        np.testing.assert_array_equal(got[0, 0, : len(bits)], 0)
