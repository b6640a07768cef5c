"""What the host tier makes of keys: store, load and fetch of every type, and when a layer is not quantised."""

from __future__ import annotations

import pytest
import torch

from hybridgen.kv_cache.host_keys import (
    HostKeys,
    KeyStorage,
    key_parts,
    make_host_keys,
    make_host_values,
    value_part,
)
from hybridgen.kv_cache.partial_keys import skew_matrix
from hybridgen.kv_cache.quantize import dequantize_int8, key_mean, quantize_int8
from hybridgen.kv_cache.recall import adequate_storage, top_recall
from hybridgen.kv_cache.staging import Staging
from hybridgen.offload.host_memory import HostBuffer, HostSlab, padded_bytes
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, TransferEngine
from hybridgen.telemetry import Telemetry

CPU = torch.device("cpu")
BATCH, HEADS, ROWS, DIM = 2, 3, 256, 16
SHAPE = (BATCH, HEADS, ROWS, DIM)
STORAGES = [
    KeyStorage(torch.float32),
    KeyStorage(torch.bfloat16),
    KeyStorage(torch.int8),
    KeyStorage(torch.float16, "int4"),
    KeyStorage(torch.int8, "int2"),
    KeyStorage(torch.int8, "int2", sketch_on_device=True),
    KeyStorage(torch.float32, "partial"),
    KeyStorage(torch.float16, "pages"),
]
FLOAT = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.int8: None}


def made(storage: KeyStorage, transfer: TransferEngine) -> HostKeys:
    slab = HostSlab(sum(padded_bytes(*part) for part in key_parts(SHAPE, storage)), CPU, poison=True)
    return make_host_keys(
        SHAPE, storage, torch.float32, slab, transfer, torch.device("cpu"), lambda queries: skew_matrix(queries, HEADS)
    )


def expected(keys: torch.Tensor, mean: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    if stored is torch.int8:
        return dequantize_int8(*quantize_int8(keys, mean), mean, torch.float32)
    return keys.to(stored).float()


@pytest.mark.parametrize("engine", [ImmediateTransfer, LazyTransfer])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_what_is_stored_comes_back(storage: KeyStorage, engine: type[TransferEngine]) -> None:
    transfer = engine(Telemetry())
    host, generator = made(storage, transfer), torch.Generator().manual_seed(3)
    keys = torch.randn(BATCH, HEADS, 192, DIM, generator=generator) + 5 * torch.randn(1, HEADS, 1, DIM)
    means, queries = key_mean(keys[:, :, :100]), torch.randn(100, 2 * HEADS, DIM, generator=generator)
    for sequence in range(BATCH):
        host.begin(sequence, keys[sequence, :, :100], queries)
        for first, last in ((0, 128), (128, 192)):
            for ticket in host.store(sequence, first, keys[sequence, :, first:last]):
                ticket.wait()
    wanted = expected(keys, means, storage.stored)
    loaded = torch.full((HEADS, 150, DIM), torch.nan)
    host.load(1, 150, loaded)
    torch.testing.assert_close(loaded, wanted[1, :, :150], rtol=1e-6, atol=1e-6)

    values = HostBuffer(*[torch.randn(SHAPE, generator=generator)] * 2)
    rows = torch.randint(192, (BATCH, HEADS, 7), generator=generator)
    counts = torch.full((BATCH, HEADS), 7)
    staging = Staging(BATCH, HEADS, 9, DIM, CPU, torch.float32, storage.stored)
    fetched = host.fetch(values, rows, counts, staging, layer=4)
    fetched.wait()
    got_keys, got_values = fetched.targets
    for b in range(BATCH):
        for head in range(HEADS):
            torch.testing.assert_close(got_keys[b, head], wanted[b, head, rows[b, head]], rtol=1e-6, atol=1e-6)
            assert torch.equal(got_values[b, head], values.tensor[b, head, rows[b, head]])


def test_kinds() -> None:
    transfer = ImmediateTransfer(Telemetry())
    kinds = [made(storage, transfer).kind for storage in STORAGES]
    assert kinds[:5] == ["float32", "bfloat16", "int8", "float16+int4", "int8+int2"]
    assert kinds[5:] == ["int8+int2", "float32+partial", "float16+pages"]


def queries_and_keys(kv_heads: int, group: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys mostly of a few directions, which queries ask for, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(8, 64, generator=generator)
    keys = torch.randn(kv_heads, tokens, 8, generator=generator) @ directions
    queries = torch.randn(64, kv_heads * group, 8, generator=generator) @ directions
    return queries, keys + torch.randn(keys.shape, generator=generator)


def test_recall_by_the_definition() -> None:
    queries, keys = queries_and_keys(2, 3, 300, seed=1)
    noisy = keys + 0.2 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(2))
    shares = []
    for number, query in enumerate(queries):
        for head in range(6):
            true, found = (set((some[head // 3] @ query[head]).topk(30).indices.tolist()) for some in (keys, noisy))
            shares.append(len(true & found) / 30)
        assert number < 64
    assert top_recall(queries, keys, lambda heads: noisy[heads]) == pytest.approx(sum(shares) / len(shares))
    assert top_recall(queries, keys, lambda heads: keys[heads]) == 1.0
    assert top_recall(queries, keys[:, :127], lambda heads: keys[heads, :127]) is None, "too few keys to tell"


def test_ordinary_keys_are_quantised() -> None:
    queries, keys = queries_and_keys(2, 2, 512, seed=4)
    for storage in (KeyStorage(torch.int8), KeyStorage(torch.float32, "int4"), KeyStorage(torch.int8, "int2")):
        assert adequate_storage(storage, torch.float32, queries, keys) == (storage, [])


def test_a_large_bias_is_taken_off_by_the_mean() -> None:
    queries, keys = queries_and_keys(2, 2, 512, seed=5)
    keys[..., :3] += 100.0
    storage = KeyStorage(torch.int8, "int2")
    assert adequate_storage(storage, torch.float32, queries, keys) == (storage, [])


def test_what_rotates_is_not_and_the_layer_keeps_its_type() -> None:
    """Three channels that swing by a hundred: int8 has no codes left for the others."""
    queries, keys = queries_and_keys(2, 2, 512, seed=6)
    queries[..., :3] = 0.0  # nothing is asked of them
    keys[..., :3] = 400.0 * torch.sin(torch.arange(512) / 9.0).view(1, -1, 1)
    kept, notes = adequate_storage(KeyStorage(torch.int8, "int4"), torch.bfloat16, queries, keys)
    assert kept == KeyStorage(torch.bfloat16, "int4"), "a sketch has a scale for each channel"
    assert len(notes) == 1 and "no int8 keys" in notes[0] and "0.95" in notes[0]


def test_a_sketch_that_finds_too_little_is_left_out() -> None:
    queries, keys = queries_and_keys(2, 2, 512, seed=7)
    keys[:, ::64] *= 300.0  # one token a block takes all of the range
    kept, notes = adequate_storage(KeyStorage(torch.float16, "int2"), torch.float32, queries, keys)
    assert kept == KeyStorage(torch.float16) and "no int2 keys" in notes[0]


@pytest.mark.parametrize("engine", [ImmediateTransfer, LazyTransfer])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_come_back_within_half_a_step(bits: int, engine: type[TransferEngine]) -> None:
    """Keys or values of two groups a row, the second one short; a view of a larger tensor, as the window gives them."""
    shape, storage = (BATCH, HEADS, 256, 80), KeyStorage(torch.float16, packed_bits=bits)
    parts = [*key_parts(shape, storage), value_part(shape, storage, torch.float16)]
    assert parts[0] == parts[1]
    slab, transfer = HostSlab(2 * padded_bytes(*parts[0]), CPU, poison=True), engine(Telemetry())
    keys = make_host_keys(shape, storage, torch.float16, slab, transfer, CPU)
    values = make_host_values(shape, storage, torch.float16, slab, transfer)
    for rows in (keys, values):
        made = torch.randn(HEADS, 300, 80).half()
        made[..., 64:] *= 20
        for first, last in ((0, 128), (128, 192)):
            for ticket in rows.store(1, first, made[:, first:last]):
                ticket.wait()
        loaded = torch.full((HEADS, 200, 80), torch.nan).half()
        rows.load(1, 192, loaded[:, 8:])
        error = (loaded[:, 8:].float() - made[:, :192].float()).abs().unflatten(2, (5, 16))
        groups = (made[:, :192, :64], made[:, :192, 64:])
        steps = [(group.amax(2) - group.amin(2)).float() / (2**bits - 1) for group in groups]
        for some, step in zip((error[:, :, :4], error[:, :, 4:]), steps, strict=True):
            assert (some.amax((2, 3)) <= 0.51 * step + 0.04).all()
        with pytest.raises(RuntimeError, match="scores"):
            rows.scanned()
