"""The oracle's own arithmetic of stored keys and sketches, and that it would notice other ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.kv_cache.host_keys import KeyStorage as EngineStorage
from hybridgen.kv_cache.quantize import make_sketch, quantize_int8
from hybridgen.kv_cache.recall import adequate_storage
from tests.equivalence.dense_keys import (
    Encoded,
    KeyStorage,
    Sketch,
    StoredKeys,
    half_spacing,
    named_otherwise,
    problem_of_query,
    settle,
    sketch_logits,
    unpack_sketch,
)
from tests.equivalence.dense_simulation import DenseSimulation, Settings
from tests.equivalence.tiny_models import ROTATING, random_tokens
from tests.equivalence.zoo import ModelZoo

KV_HEADS, ROWS, DIM = 2, 128, 16


def some_keys(seed: int = 0, rows: int = ROWS) -> Tensor:
    """With channels of different size and place."""
    generator = torch.Generator().manual_seed(seed)
    keys, size, place = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((KV_HEADS, rows, DIM), (KV_HEADS, 1, DIM), (KV_HEADS, 1, DIM))
    )
    return keys * size.exp() + 3 * place


def stored(storage: KeyStorage, keys: Tensor) -> StoredKeys:
    made = StoredKeys(storage, keys.mean(1))
    made.add(keys[:, :64])
    made.add(keys[:, 64:])
    return made


def by_engine(storage: KeyStorage, keys: Tensor) -> Encoded:
    """What the engine would keep of these keys."""
    keys = keys.float()
    bits = {"int4": 4, "int2": 2, "none": 0}[storage.sketch]
    sketch = make_sketch(keys[None], bits)[0] if bits else None
    if storage.key_type != "int8":
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[storage.key_type]
        return Encoded(keys.to(dtype), sketch=sketch)
    mean = keys.double().mean(1).float()
    codes, scales = quantize_int8(keys[None], mean[None])
    return Encoded(codes[0], scales[0], mean, sketch)


STORAGES: list[Any] = [
    pytest.param(KeyStorage(key_type, sketch), id=f"{key_type} {sketch}")
    for key_type in ("fp32", "fp16", "bf16", "int8")
    for sketch in ("none", "int4", "int2")
]


@pytest.mark.parametrize("storage", STORAGES)
def test_the_engines_own_functions_are_right(storage: KeyStorage) -> None:
    """In two parts, as rows come; what was followed is what is used."""
    for seed in range(20):
        keys = some_keys(seed)
        mine, theirs = stored(storage, keys), by_engine(storage, keys)
        before = mine.rows, mine.sketched() if mine.bits else mine.rows
        for part in (slice(0, 64), slice(64, 128)):
            sketch = None if theirs.sketch is None else theirs.sketch[:, part.start // 64 : part.stop // 64]
            scales = None if theirs.scales is None else theirs.scales[:, part]
            assert mine.follow(Encoded(theirs.rows[:, part], scales, theirs.mean, sketch)) == []
        after = mine.rows, mine.sketched() if mine.bits else mine.rows
        for mean_difference in ((a - b).abs().mean() for a, b in zip(after, before, strict=True)):
            assert mean_difference < 1e-3  # codes may differ here and there


@pytest.mark.parametrize("storage", [each for each in STORAGES if each.values[0] != KeyStorage()])
def test_a_wrong_code_is_noticed(storage: KeyStorage) -> None:
    keys = some_keys()
    right = by_engine(storage, keys)
    wrong = [dataclasses.replace(right, rows=right.rows.flip(1)), dataclasses.replace(right, rows=right.rows.flip(2))]
    if storage.key_type != "fp32":
        one = right.rows.clone()  # one code's neighbour, or one number's
        bits = one.view(torch.int8) if storage.key_type == "int8" else one.view(torch.int16)
        bits[1, 5, 3] -= 2
        wrong.append(dataclasses.replace(right, rows=one))
    if storage.key_type == "int8":
        assert right.scales is not None and right.mean is not None
        wrong.append(dataclasses.replace(right, scales=right.scales * 1.01))
        wrong.append(dataclasses.replace(right, mean=right.mean + 0.01))
    if right.sketch is not None:
        for byte in (7, right.sketch.shape[2] - 3 * DIM, right.sketch.shape[2] - DIM):  # a code, a scale, a zero
            sketch = right.sketch.clone()
            sketch[0, 1, byte] ^= 12 if byte == 7 else 2
            wrong.append(dataclasses.replace(right, sketch=sketch))
        wrong.append(dataclasses.replace(right, sketch=right.sketch.flip(1)))
    assert stored(storage, keys).follow(right) == []
    for each in wrong:
        assert stored(storage, keys).follow(each) != []


def test_half_spacing() -> None:
    numbers = torch.tensor([1.0, -1.5, 2.0, 1e-6, 0.0], dtype=torch.float64)
    assert half_spacing(numbers, 10).tolist() == [2**-11, 2**-11, 2**-10, 2**-25, 2**-25]


def test_int8_by_hand() -> None:
    """A row about a mean: the farthest channel has code 127."""
    keys = torch.zeros(1, 64, 4, dtype=torch.float64)
    keys[0, 3] = torch.tensor([11.27, 9.0, 10.004, 10.0])
    made = StoredKeys(KeyStorage("int8"), torch.full((1, 4), 10.0, dtype=torch.float64))
    made.add(keys)
    assert torch.allclose(made.rows[0, 3], torch.tensor([11.27, 9.0, 10.0, 10.0], dtype=torch.float64))
    assert torch.allclose(made.rows[0, 0], torch.zeros(4, dtype=torch.float64))


def test_sketch_by_hand() -> None:
    """Four numbers 3 apart whose deviation is sqrt(11.25); a channel without range is its zero."""
    keys = torch.zeros(1, 64, 8, dtype=torch.float64)
    keys[0, :, 0] = torch.arange(64) % 4 * 3 + 1
    keys[0, :, 1] = 7.0
    ends: list[tuple[Sketch, float]] = [("int2", 9 / 4 + 1.8 * 11.25**0.5), ("int4", 9.0)]
    for sketch, length in ends:
        made = StoredKeys(KeyStorage("fp32", sketch), keys.mean(1))
        made.add(keys)
        assert torch.equal(made.sketched()[..., 1:], keys[..., 1:]) and not made.codes[0, 0, :, 1].any()
        assert made.zero[0, 0, 0] == pytest.approx(5.5 - length / 2, rel=2**-11)
        assert made.scale[0, 0, 0] == pytest.approx(length / (3 if sketch == "int2" else 15), rel=2**-10)
        steps = torch.tensor([0.0, 1.0, 2.0, 3.0] if sketch == "int2" else [0.0, 5.0, 10.0, 15.0])
        assert made.codes[0, 0, :, 0].tolist() == steps.tolist() * 16


def test_int2_leaves_out_the_ends() -> None:
    keys = torch.randn(1, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys[0, 5, 2] = 100.0
    made = StoredKeys(KeyStorage("fp32", "int2"), keys.mean(1))
    made.add(keys)
    assert made.codes[0, 0, 5, 2] == 3 and 40 < made.sketched()[0, 5, 2] < 60


@pytest.mark.parametrize(("bits", "byte", "token"), [(2, 0, 0), (2, 64, 0), (4, 0, 0), (4, 64, 32)])
def test_layout_by_hand(bits: int, byte: int, token: int) -> None:
    """The first byte's low bits are token 0's for channel 0; scan.h says where the next vector begins."""
    sketch = torch.zeros(1, 1, 64 * 8 * bits // 8 + 32, dtype=torch.uint8)
    sketch[0, 0, byte] = 1
    sketch[0, 0, byte + 6] = 1 << bits  # lane 1, k 2, the second place: 16 tokens on
    codes = unpack_sketch(sketch, bits, 8)[0][0, 0]
    channel = 4 if bits == 2 and byte else 0
    assert codes.nonzero().tolist() == [[token, channel], [token + 17, channel + 2]]


@pytest.mark.parametrize("sketch", ["int4", "int2"])
def test_sketch_logits_are_nearly_those_of_its_keys(sketch: Any) -> None:
    made = stored(KeyStorage("fp32", sketch), some_keys())
    queries = torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for kv_head in range(KV_HEADS):
        exact = queries @ made.sketched()[kv_head].T
        found = made.logits(kv_head, queries)
        off = (found - exact).std() / exact.std()
        assert 1e-5 < off < 0.02
        # Whole steps: nothing is rounded.
        whole = torch.zeros(1, DIM, dtype=torch.float64)
        whole[0, 4] = 1.5
        assert torch.allclose(made.logits(kv_head, whole), whole @ made.sketched()[kv_head].T, atol=1e-6)


def test_what_rounding_takes_is_made_good_in_the_middle() -> None:
    """Of two weights 127 and 0.5 the second is rounded to 0, half to even; a code of 1.5 loses nothing by it."""
    scale, zero = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    query = torch.tensor([[127.0, 0.5]], dtype=torch.float64)
    codes = torch.zeros(1, 64, 2, dtype=torch.float64)
    codes[0, 1], codes[0, 2] = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
    found = sketch_logits(query, query, codes, scale, zero, 2)[0, :3]
    assert found.tolist() == [0.75, 127.75, 0.75]


def test_following_a_query_and_a_list() -> None:
    query = torch.ones(3, DIM, dtype=torch.float64)
    assert problem_of_query((query + 1e-5).float(), query) is None
    assert problem_of_query((query + 1e-3).float(), query) is not None
    lately = [0.0, 0.5, 0.3, 0.3 - 1e-6, 0.2, 0.0, 0.0]
    for other, right in (([1, 2, 5, 6], True), ([1, 3, 6, 5], True), ([1, 4, 5, 6], False), ([1, 2, 3, 5], False)):
        assert (named_otherwise(lately, [1, 2, 5, 6], other, [5, 6], 1e-4) is None) == right
    for other in ([1, 2, 5], [1, 2, 5, 5]):
        assert named_otherwise(lately, [1, 2, 5, 6], other, [5, 6], 1e-4) is not None


@pytest.mark.parametrize("key_type", ["fp32", "int8"])
@pytest.mark.parametrize("sketch", ["none", "int4", "int2"])
@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("rows", [127, 128, 200, 360])
def test_settle_is_what_recall_py_does(rows: int, huge: bool, sketch: Any, key_type: Any) -> None:
    keys = some_keys(rows=rows)
    queries = torch.randn(64, 4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if huge:
        turn = torch.arange(rows, dtype=torch.float64)
        keys[..., 0], keys[..., 8] = 300 * turn.cos(), 300 * turn.sin()
        queries[..., [0, 8]] = 0
    asked = EngineStorage(torch.int8 if key_type == "int8" else torch.float32, None if sketch == "none" else sketch)
    theirs, notes = adequate_storage(asked, torch.float32, queries.float(), keys.float())
    mine, close = settle(KeyStorage(key_type, sketch), queries.transpose(0, 1), keys)
    if not close:
        assert (mine.key_type == "int8", mine.sketch != "none") == (
            theirs.stored is torch.int8,
            theirs.sketch is not None,
        )
        assert bool(notes) == (mine != KeyStorage(key_type, sketch))
    if rows < 128:
        assert mine == KeyStorage(key_type, sketch)
    elif huge:
        assert mine.key_type == "fp32"


@pytest.mark.parametrize("keys_as", [{"key_type": "int8"}, {"sketch": "int4"}, {"key_type": "int8", "sketch": "int2"}])
def test_rows_are_stored_when_they_enter_the_host(zoo: ModelZoo, keys_as: dict[str, Any]) -> None:
    settings = Settings(window=16, keep=0.1, exact_layers=(0,), **keys_as)
    model = zoo.dense("llama-gqa2")
    simulation = DenseSimulation(model, settings)
    simulation.keys_as = [settings.keys_as] * model.num_layers
    text = random_tokens(model.vocab_size, 250, seed=3)
    simulation.prefill(text[:200])  # attends to keys as they are
    plain = DenseSimulation(model, Settings(window=16, keep=0.1))
    plain.prefill(text[:200])
    for layer in range(model.num_layers):
        assert torch.equal(simulation.keys[layer], plain.keys[layer])
    assert simulation.stored[0] is None  # a resident layer
    for token in text[200:]:
        simulation.decode(token)
        for layer in range(1, model.num_layers):
            host, made = simulation.host_lengths[layer], simulation.stored[layer]
            assert made is not None and made.rows.shape[1] == host
            cached, keys = simulation._cached(layer), simulation.keys[layer]
            inside = slice(4, 4 + host)
            same = (cached == keys).all(-1).all(0)
            assert same[:4].all() and same[4 + host :].all()
            assert same[inside].any() == (settings.key_type == "fp32")
            assert torch.equal(made.original, keys[:, inside])
    before = simulation._cached(1)
    simulation.prefill(text[:60])
    assert torch.equal(simulation._cached(1)[:, : 4 + 128], before[:, : 4 + 128])  # stored once


def test_the_mean_is_of_the_first_piece(zoo: ModelZoo) -> None:
    model = zoo.dense("qwen2")
    for chunk, rows in ((2048, slice(4, 150)), (50, slice(4, 50)), (3, slice(4, 4))):
        simulation = DenseSimulation(model, Settings(window=16, key_type="int8", prefill_chunk=chunk))
        simulation.keys_as = [KeyStorage("int8")] * model.num_layers
        simulation.prefill(random_tokens(model.vocab_size, 150, seed=1))
        made = simulation.stored[2]
        assert made is not None
        expected = simulation.keys[2][:, rows].mean(1) if chunk > 3 else torch.zeros_like(made.mean)
        assert torch.equal(made.mean, expected)


def test_a_rotating_channel_is_why_a_layer_falls_back(zoo: ModelZoo) -> None:
    simulation = DenseSimulation(zoo.dense(ROTATING.name), Settings(window=16, key_type="int8"))
    simulation.prefill(random_tokens(simulation.model.vocab_size, 300, seed=1))
    assert simulation.keys_as is not None and not simulation.close_recalls
    assert [each.key_type for each in simulation.keys_as] == ["int8", "fp32", "int8", "fp32", "int8"]
