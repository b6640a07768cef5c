"""Scans of int8 keys and of sketches: against float64 on what they stand for, for every ISA that this CPU runs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen import _C
from hybridgen.kv_cache.quantize import key_mean, make_sketch, quantize_int8
from hybridgen.offload.host_memory import HostBuffer
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.scanned_keys import ScannedKeys
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, Ticket
from hybridgen.telemetry import Telemetry
from tests.kernels.scan_case import ISAS, QUANTIZED, SKETCH_BITS, QuantizedCase


def run(case: QuantizedCase, isa: str, threads: int = 1, bytes_known: bool = True) -> None:
    worker = _C.ScanWorker(threads, isa=isa)
    try:
        _, _, read_bytes = worker.wait_and_count(case.submit(worker))
        assert worker.jobs_by_isa == {name: int(name == isa) for name in ISAS}
    finally:
        worker.close()
    case.check(isa)
    if bytes_known:  # of an unsorted list, and of one cut into chunks within a block, it may be more
        assert read_bytes == case.read_bytes()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_head_dims_and_ragged_lengths(isa, key_type, group):
    for head_dim in (8, 24, 64, 80, 96, 128, 256):
        run(QuantizedCase(key_type, [0, 1, 63, 64, 65, 451], 2, group, head_dim), isa)


@pytest.mark.parametrize("group", [5, 6, 9, 12, 17])
@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_other_groups(isa, key_type, group):
    run(QuantizedCase(key_type, [130, 17], 1, group, 72, mean=False), isa)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_strides(isa, key_type, layout):
    for gap in (1, 24, 4096):
        run(QuantizedCase(key_type, [100, 237], 3, 3, 64, layout=layout, gap=gap), isa)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_listed_rows(isa, key_type, group):
    for head_dim, tier in ((8, 5000), (24, 1), (80, 700), (128, 3000), (256, 7)):
        run(QuantizedCase(key_type, [0, 1, 64, 203], 2, group, head_dim, tier=tier), isa, bytes_known=False)


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_of_listed_rows(isa):
    """Of lists that are one chunk each."""
    for key_type in QUANTIZED:
        run(QuantizedCase(key_type, [30, 64], 2, 2, 64, tier=3000), isa)


@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_unsorted_lists_are_only_slower(isa, key_type):
    run(QuantizedCase(key_type, [300], 2, 2, 64, tier=500, shuffled=True), isa, bytes_known=False)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
@pytest.mark.parametrize("key_type", QUANTIZED)
def test_thread_counts_and_many_chunks(key_type, threads):
    for isa in ISAS:
        run(QuantizedCase(key_type, [6001, 5, 1000], 2, 2, 128), isa, threads)
        run(QuantizedCase(key_type, [5001, 5, 1000], 2, 2, 128, tier=8000), isa, threads, bytes_known=False)


@pytest.mark.parametrize("key_type", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_a_list_of_all_rows_in_order_gives_the_same_logits(isa, key_type):
    case = QuantizedCase(key_type, [512, 77], 2, 4, 128)
    run(case, isa)
    want = case.out.copy()
    case.forget()
    case.tier = 512  # the rows are 0, 1, 2, ...
    run(case, isa, bytes_known=False)
    np.testing.assert_array_equal(case.out, want)


@pytest.mark.parametrize("isa", ISAS)
def test_zero_constant_and_huge_rows_of_int8(isa):
    """As the quantiser leaves them; q times the largest stays finite."""
    keys = torch.randn(1, 1, 70, 64)
    keys[0, 0, 0], keys[0, 0, 1], keys[0, 0, 2] = 0.0, 5.0, 6e4
    keys[0, 0, 3], keys[0, 0, 4, 7], keys[0, 0, 5] = 1e30, -1e20, 1e-30
    case = QuantizedCase("int8", [70], 1, 3, 64)
    codes, scales = quantize_int8(keys, torch.zeros(1, 1, 64))
    case.keys[0, 0, :70] = codes[0, 0].numpy().view(np.uint8)
    case.key_scales[0, 0, :70] = scales[0, 0].numpy()
    run(case, isa)
    assert np.isfinite(case.out[0, :, :70]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_largest_sums_of_int8(isa):
    """Every product has the largest size and one sign: beyond a head_dim of 512 it would not fit 32 bits."""
    for head_dim in (504, 512, 520, 1024):
        for code in (-128, 127):
            case = QuantizedCase("int8", [20], 1, 2, head_dim)
            case.keys[0, 0, :20] = np.array([code], np.int8).view(np.uint8)
            case.query[0, 0], case.query[0, 1] = 3.0, -3.0
            run(case, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_int8_with_queries_that_are_small_large_or_no_numbers(isa):
    for size in (0.0, 1e-42, 1e-38):
        case = QuantizedCase("int8", [40], 1, 3, 64, mean=False)
        case.query[:] = size
        worker = _C.ScanWorker(0, isa=isa)
        worker.wait(case.submit(worker))
        assert (abs(case.out[0, :, :40]) <= 1e-35).all()
    case = QuantizedCase("int8", [40], 1, 3, 64, mean=False)
    case.query *= np.float32([1e-20, 1, 1e30])[None, :, None]
    case.query[0, 1, 5:] *= 1e-4  # one channel decides
    run(case, isa)
    for channel, value in ((3, np.nan), (63, np.inf), (0, -np.inf)):
        case = QuantizedCase("int8", [40], 1, 2, 64, mean=False)
        case.query[0, 1, channel] = value
        case.keys[0, 0, :40, channel] = 1
        worker = _C.ScanWorker(0, isa=isa)
        worker.wait(case.submit(worker))
        assert np.isfinite(case.out[0, 0, :40]).all() and not np.isfinite(case.out[0, 1, :40]).any()


@pytest.mark.parametrize("key_type", SKETCH_BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_constant_and_huge_channels_of_sketches(isa, key_type):
    keys = torch.randn(1, 1, 128, 64)
    keys[..., 0], keys[..., 1], keys[..., 2] = 0.0, -7.0, 1e6
    keys[:, :, :64, 3] *= 1e4
    keys[:, :, 64:] = 2.5  # a block without any scale
    case = QuantizedCase(key_type, [128], 1, 3, 64, mean=False)
    case.keys[0, 0, :2] = make_sketch(keys, SKETCH_BITS[key_type])[0, 0].numpy()
    worker = _C.ScanWorker(0, isa=isa)
    worker.wait(case.submit(worker))
    np.testing.assert_allclose(case.out[0, :, :128], case.logits(0, 0), rtol=1e-5, atol=1e-6 * 1e6)


@pytest.mark.parametrize("isa", ISAS)
def test_sketch_with_a_query_of_zeros_or_next_to_nothing(isa):
    for key_type in SKETCH_BITS:
        for size in (0.0, 1e-38, 1e-42):
            case = QuantizedCase(key_type, [64], 1, 2, 64, mean=False)
            case.query[:] = size
            worker = _C.ScanWorker(0, isa=isa)
            worker.wait(case.submit(worker))
            assert (abs(case.out[0, :, :64]) <= 1e-35).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("key_type", SKETCH_BITS)
def test_sketch_is_close_to_float_arithmetic(key_type, head_dim):
    """The rounding of the query takes less than 2 % of what tells logits apart; channels differ tenfold in size."""
    rng = np.random.default_rng()
    keys = torch.randn(1, 2, 4096, head_dim) * (10.0 ** torch.rand(head_dim)) + 5 * torch.randn(head_dim)
    case = QuantizedCase(key_type, [4096], 2, 4, head_dim, mean=False)
    case.keys[0, :, :64] = make_sketch(keys, SKETCH_BITS[key_type])[0].numpy()
    case.query[:] = rng.standard_normal(case.query.shape)
    for isa in ISAS:
        case.forget()
        worker = _C.ScanWorker(0, isa=isa)
        worker.wait(case.submit(worker))
        for head in range(8):
            K, _ = case.scanned(0, head // 4)
            want = case.scale * K @ case.query[0, head].astype(np.float64)
            error = case.out[0, head, :4096] - want
            assert np.sqrt((error**2).mean()) <= 0.02 * want.std(), isa


@pytest.mark.parametrize("key_type", SKETCH_BITS)
def test_isas_agree_on_sketches(key_type):
    case = QuantizedCase(key_type, [640], 2, 4, 128)
    outs = []
    for isa in ISAS:
        case.forget()
        run(case, isa)
        outs.append(case.out[0, :, :640].copy())
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    isa=st.sampled_from(ISAS),
    threads=st.integers(0, 2),
    key_type=st.sampled_from(QUANTIZED),
    lengths=st.lists(st.integers(0, 200) | st.integers(900, 1100), min_size=1, max_size=3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    head_dim=st.integers(1, 20).map(lambda n: 8 * n),
    layout=st.sampled_from(["heads", "tokens"]),
    gap=st.integers(0, 70),
    offset=st.integers(0, 33),
    scale=st.floats(-4, 4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3),
    tier=st.just(0) | st.integers(1, 2000),
    mean=st.booleans(),
)
def test_any_shape(isa, threads, **shape):
    run(QuantizedCase(**shape), isa, threads, bytes_known=not shape["tier"])


GOOD = {
    "query": 4096, "keys": 4096, "out": 4096, "key_type": "int8", "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 64, "lengths": [10, 4], "key_strides": (1280, 640, 64), "out_strides": (60, 10),
    "scale": 1.0, "hold": True, "key_scales": 4096, "scale_strides": (20, 10),
}  # fmt: skip
SKETCH = {
    "key_type": "int2", "key_scales": 0, "lengths": [128, 70], "out_strides": (800, 200),
    "key_strides": (9000, 4500, 1280),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": 0}, "key_scales=0: must be a non-null address, a multiple of 4"),
        ({"key_scales": 4098}, "key_scales=4098: must be a non-null address, a multiple of 4"),
        ({"key_mean": 4098}, "key_mean=4098: must be a non-null address, a multiple of 4"),
        ({"key_type": "float16"}, "key_scales=4096: must be 0 unless key_type is int8"),
        (
            {"key_type": "float16", "key_scales": 0, "key_mean": 4096},
            "key_mean=4096: must be 0 unless key_type is int8",
        ),
        ({"scale_strides": (-1, 10)}, r"scale_strides\[0\] \(batch\)=-1: must be 0 or more"),
        ({"scale_strides": (20, -1)}, r"scale_strides\[1\] \(head\)=-1: must be 0 or more"),
        (SKETCH | {"key_scales": 4096}, "key_scales=4096: must be 0 unless"),
        (SKETCH | {"key_strides": (9000, 4500, 1279)}, r"key_strides\[2\] \(block\)=1279: must be at least .* 1280"),
        (SKETCH | {"key_type": "int4"}, r"key_strides\[2\] \(block\)=1280: must be at least .* 2304"),
        (SKETCH | {"head_dim": 1032}, "head_dim=1032: must be at most 1024 for sketches"),
    ],
)
def test_wrong_arguments(change, message):
    worker = _C.ScanWorker(1)
    worker.submit(**GOOD)  # held, so nothing is read
    worker.submit(**(GOOD | SKETCH), key_mean=4096)
    worker.submit(**(GOOD | SKETCH | {"keys": 4097}))  # of bytes
    with pytest.raises(ValueError, match=message):
        worker.submit(**(GOOD | change))


class Layer:
    """Quantised host keys, a query and sorted lists of rows; B = 2, Hkv = 2, G = 3, d = 64, N = 320."""

    def __init__(self, kind, transfer_kind=ImmediateTransfer):
        self.telemetry = Telemetry()
        self.transfer = transfer_kind(self.telemetry)
        self.worker = LogitWorker(1, [], self.transfer, torch.device("cpu"))
        self.keys = torch.randn(2, 2, 320, 64) + 9 * torch.randn(2, 2, 1, 64)
        self.query = torch.randn(2, 6, 64)
        mean = key_mean(self.keys)
        scales = None
        if kind == "int8":
            codes, scales = quantize_int8(self.keys, mean)
        else:
            codes = make_sketch(self.keys, SKETCH_BITS[kind], mean)
        self.scanned = ScannedKeys(
            kind,
            HostBuffer(codes, codes),
            None if scales is None else HostBuffer(scales, scales),
            HostBuffer(mean, mean),
        )
        rows = torch.randint(0, 320, (2, 2, 40), dtype=torch.int32).sort(dim=-1).values
        self.rows = HostBuffer(rows, rows)

    def submit(self, **changed):
        return self.worker.submit(**({"query": self.query, "keys": self.scanned, "scale": 0.5, "layer": 0} | changed))

    def check(self, logits, lengths, tolerance, rows=None):
        assert logits.shape == (2, 6, max(lengths)) and logits.dtype == torch.float32
        for b, length in enumerate(lengths):
            for head in range(6):
                keys = self.keys[b, head // 3]
                keys = keys[:length] if rows is None else keys[rows[b, head // 3, :length].long()]
                want = 0.5 * keys @ self.query[b, head]
                error = (logits[b, head, :length] - want).square().mean().sqrt()
                assert error <= tolerance * 0.5 * self.query[b, head].norm()


TOLERANCE = {"int8": 0.03, "int4": 0.3, "int2": 1.2}  # of the query's length, for keys of unit variance


@pytest.mark.parametrize("transfer_kind", [ImmediateTransfer, LazyTransfer])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_logit_worker(kind, transfer_kind):
    layer = Layer(kind, transfer_kind)
    unit = {"int8": 64 * 68, "int4": 36 * 64, "int2": 20 * 64}[kind]  # bytes of 64 tokens of a KV head
    ticket = layer.submit(lengths=[320, 192])
    layer.check(ticket.logits().values, [320, 192], TOLERANCE[kind])
    ticket.release(Ticket())
    assert layer.telemetry.bytes_moved["cpu_read"] == 2 * (5 + 3) * unit

    listed = layer.submit(lengths=[40, 7], rows=layer.rows)
    layer.check(listed.logits().values, [40, 7], TOLERANCE[kind], layer.rows.tensor)
    listed.release(Ticket())
    if kind == "int8":
        more = 2 * (40 + 7) * 68
    else:
        heads = [(b, h, n) for b, n in ((0, 40), (1, 7)) for h in range(2)]
        more = unit * sum(len((layer.rows.tensor[b, h, :n] // 64).unique()) for b, h, n in heads)
    assert layer.telemetry.bytes_moved["cpu_read"] == 2 * (5 + 3) * unit + more
    layer.worker.close()


def test_logit_worker_names_what_does_not_fit():
    int8, int2 = Layer("int8"), Layer("int2")
    codes, scales, mean = int8.scanned.codes, int8.scanned.scales, int8.scanned.mean
    sketch = int2.scanned.codes

    def cut(buffer, *index):
        return HostBuffer(buffer.tensor[index], buffer.tensor[index])

    every = slice(None)
    for wrong, message in (
        (ScannedKeys("int3", codes, scales, mean), "keys: kind 'int3'"),
        (ScannedKeys("int8", codes, None, mean), "keys: int8 .* scales"),
        (ScannedKeys("int8", sketch, scales, mean), "keys: codes .*torch.uint8.* must be torch.int8"),
        (ScannedKeys("int8", cut(codes, slice(1)), scales, mean), "keys: shape .* does not match query"),
        (ScannedKeys("int8", codes, cut(scales, every, every, slice(319)), mean), "keys: scales .*319.* must be"),
        (ScannedKeys("int8", codes, scales, cut(mean, every, slice(1))), "keys: mean .* must be"),
        (ScannedKeys("int2", sketch, scales, mean), "keys: int2 .* no scales"),
        (ScannedKeys("int4", sketch, None, mean), "keys: codes .*1280.* must be .*2304"),
    ):
        with pytest.raises(ValueError, match=message):
            int8.submit(lengths=[300, 7], keys=wrong)
    with pytest.raises(ValueError, match=r"lengths: .* do not fit"):
        int2.submit(lengths=[321, 7])
    int8.worker.close()
    int2.worker.close()
