"""Scan kernels against float64, for every ISA that this CPU runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen import _C
from tests.kernels.scan_case import ISAS, KEY_TYPES, ScanCase, exact


def run(case: ScanCase, isa: str, threads: int = 1) -> None:
    worker = _C.ScanWorker(threads, isa=isa)
    try:
        worker.wait(case.submit(worker))
        assert worker.jobs_by_isa == {name: int(name == isa) for name in ISAS}
    finally:
        worker.close()
    case.check()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_head_dims_and_ragged_lengths(isa, key_type, group):
    for head_dim in (8, 40, 64, 80, 96, 128, 256):
        run(ScanCase(key_type, [0, 1, 63, 64, 65, 1003], 2, group, head_dim), isa)


@pytest.mark.parametrize("group", [6, 9, 12, 16, 17, 33])
@pytest.mark.parametrize("isa", ISAS)
def test_large_groups(isa, group):
    for key_type in KEY_TYPES:
        run(ScanCase(key_type, [130, 17], 1, group, 72), isa)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_strided_keys(isa, key_type, layout):
    for gap in (1, 24, 4096):
        run(ScanCase(key_type, [100, 37], 3, 3, 64, layout=layout, gap=gap), isa)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_thread_counts_and_many_chunks(threads):
    for isa in ISAS:
        run(ScanCase("float16", [9001, 5, 4000], 3, 2, 128), isa, threads)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 17])
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_listed_rows(isa, key_type, group):
    for head_dim, tier in ((8, 5000), (40, 1), (80, 700), (128, 3000), (256, 7)):
        run(ScanCase(key_type, [0, 1, 63, 64, 65, 1003], 2, group, head_dim, tier=tier), isa)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("key_type", KEY_TYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_listed_rows_of_strided_keys(isa, key_type, layout):
    for gap in (1, 24, 4096):
        run(ScanCase(key_type, [100, 37], 3, 3, 64, layout=layout, gap=gap, tier=150), isa)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_lists_of_many_chunks(threads):
    for isa in ISAS:
        run(ScanCase("float16", [9001, 5, 4000], 3, 2, 128, tier=12000), isa, threads)


@pytest.mark.parametrize("isa", ISAS)
def test_a_list_of_all_rows_in_order_gives_the_same_logits(isa):
    case = ScanCase("bfloat16", [500, 77], 2, 4, 128)
    run(case, isa)
    want = case.out.copy()
    case.forget()
    case.tier = 500  # the rows are 0, 1, 2, ...
    run(case, isa)
    np.testing.assert_array_equal(case.out, want)


@pytest.mark.parametrize("isa", ISAS)
def test_sequences_may_share_keys(isa):
    case = ScanCase("float32", [50, 50], 2, 2, 64)
    case.key_strides = (0, *case.key_strides[1:])
    case.keys[1] = case.keys[0]
    run(case, isa)


@pytest.mark.parametrize("key_type", ["float16", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_16_bit_key_is_converted_exactly(isa, key_type):
    """Subnormals, infinities and NaN, too: row j has pattern j in one channel, zeros in the others."""
    case = ScanCase(key_type, [1 << 16], 1, 1, 8, scale=1.0)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    rows = np.zeros((1 << 16, 8), np.uint16)
    rows[patterns, patterns % 8] = patterns
    case.keys[0, 0, : 1 << 16] = rows.view(case.keys.dtype)
    case.query[:] = 1.0
    worker = _C.ScanWorker(1, isa=isa)
    worker.wait(case.submit(worker))
    worker.close()
    want = exact(patterns.view(case.keys.dtype), key_type)
    np.testing.assert_array_equal(case.out[0, 0, : 1 << 16].astype(np.float64), want)


@settings(max_examples=150, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    threads=st.integers(0, 2),
    key_type=st.sampled_from(KEY_TYPES),
    lengths=st.lists(st.integers(0, 200) | st.integers(900, 1100), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 17),
    head_dim=st.integers(1, 20).map(lambda n: 8 * n),
    layout=st.sampled_from(["heads", "tokens"]),
    gap=st.integers(0, 70),
    offset=st.integers(0, 33),
    scale=st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3),
    tier=st.just(0) | st.integers(1, 2000),
)
def test_any_shape(isa, threads, **shape):
    run(ScanCase(**shape), isa, threads)


@pytest.mark.parametrize("isa", ISAS)
def test_one_row_may_have_any_stride(isa):
    query, key, out = (np.ones(n, np.float32) for n in (8, 8, 1))
    worker = _C.ScanWorker(0, isa=isa)
    job = worker.submit(
        query=query.ctypes.data, keys=key.ctypes.data, out=out.ctypes.data, key_type="float32", num_heads=1,
        num_kv_heads=1, head_dim=8, lengths=[1], key_strides=(0, 0, 0), out_strides=(1, 1), scale=2.0,
    )  # fmt: skip
    worker.wait(job)
    worker.close()
    assert out[0] == 16.0
