"""What tiles do in their own way: int8 keys of grouped queries, whose logits are those of VNNI."""

import numpy as np
import pytest

from hybridgen import _C
from tests.kernels.scan_case import ISAS, QuantizedCase

TILES = [isa for isa in ISAS if isa.startswith("amx")]
pytestmark = pytest.mark.skipif(not TILES, reason="this CPU has no AVX-512 VNNI, on which emulated tiles build")


def scanned(case: QuantizedCase, isa: str) -> np.ndarray:
    worker = _C.ScanWorker(0, isa=isa)
    try:
        worker.wait(case.submit(worker))
    finally:
        worker.close()
    return case.out.copy()


@pytest.mark.parametrize("tier", [0, 900])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17])
@pytest.mark.parametrize("isa", TILES)
def test_logits_are_those_of_vnni(isa: str, group: int, tier: int) -> None:
    """To the last bit: both round the query alike, and then count in integers."""
    for head_dim in (64, 72, 128, 256, 320):
        case = QuantizedCase("int8", [500, 1, 33], 2, group, head_dim, tier=tier)
        np.testing.assert_array_equal(scanned(case, isa), scanned(case, "avx512_vnni"))
