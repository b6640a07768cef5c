"""Weights that are streamed: what stays, what the plan says of it, and that nothing is used before it is there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.engine import build, memory_plan
from hybridgen.engine.admission import admit
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_budget import settle
from hybridgen.errors import InsufficientMemoryError
from hybridgen.models import family_of, spec_of
from hybridgen.models.checkpoint import aliases
from hybridgen.models.loading import layer_shapes, weight_bytes
from hybridgen.offload import weights as weights_module
from hybridgen.offload.host_memory import HostSlab
from hybridgen.offload.transfer import ImmediateTransfer, LazyTransfer, Ticket, TransferEngine
from hybridgen.offload.weights import HostWeights, LayerWeightStore, weight_footprint
from hybridgen.placement.plan import GIB, MemoryPlan
from hybridgen.placement.weight_split import ROW_BLOCK, WeightSplit, possible_shares, split_layer
from hybridgen.telemetry import Telemetry
from tests.equivalence.tiny_models import save_tiny_model
from tests.unit.test_plan import config_of

CPU = torch.device("cpu")
SHARES = [0.0, 0.1, 0.25, 0.37, 0.5, 0.7, 0.9, 0.99, 1.0]


# The split


def shapes_of(alias: str) -> list[dict[str, tuple[int, ...]]]:
    config = aliases()[alias]["config"]
    return layer_shapes(family_of(alias, config), spec_of(alias, config))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("alias", sorted(aliases()))
def test_the_share_is_met_within_a_block_of_rows(alias: str, share: float) -> None:
    shapes = shapes_of(alias)
    split = WeightSplit(shapes, share)
    for layer, split_of_layer in zip(shapes, split.layers, strict=True):
        elements = sum(math.prod(shape) for shape in layer.values())
        block = ROW_BLOCK * max(math.prod(shape[1:]) for shape in layer.values())
        held = elements - split_of_layer.host_elements
        assert -block < held - share * elements <= (1 if share else block)
        assert all(len(layer[name]) > 1 for name in split_of_layer.host_rows), "1-D tensors stay"
        partly = [name for name, rows in split_of_layer.host_rows.items() if rows < layer[name][0]]
        assert len(partly) <= 1, "one matrix is split"
        matrices = [name for name, shape in layer.items() if len(shape) > 1]
        assert list(split_of_layer.host_rows) == matrices[len(matrices) - len(split_of_layer.host_rows) :]
        assert partly in ([], list(split_of_layer.host_rows)[:1])
        assert all(rows % ROW_BLOCK == 0 or rows == layer[name][0] for name, rows in split_of_layer.host_rows.items())
    assert len({layer.host_elements for layer in split.layers}) == 1, "every layer gives up the same"
    assert (split.host_elements == 0) == (share == 1.0)
    again = WeightSplit(shapes, split.share)
    assert [layer.host_rows for layer in again.layers] == [layer.host_rows for layer in split.layers]


def test_the_first_matrices_stay_longest() -> None:
    shapes = (("a", (128, 10)), ("bias", (40,)), ("b", (256, 10)), ("c", (128, 10)))  # 5160 elements
    assert split_layer(shapes, 1.0).host_rows == {}
    assert split_layer(shapes, 4000 / 5160).host_rows == {"c": 128}
    assert split_layer(shapes, 2600 / 5160).host_rows == {"b": 128, "c": 128}
    assert split_layer(shapes, 2200 / 5160).host_rows == {"b": 192, "c": 128}
    assert split_layer(shapes, 0.0).host_rows == {"a": 128, "b": 256, "c": 128}


def test_rows_that_are_no_whole_blocks() -> None:
    shapes = (("a", (100, 1)), ("b", (70, 1)))
    assert [split_layer(shapes, share).host_rows for share in (0.99, 0.95, 0.78, 0.4, 0.1)] == [
        {"b": 6},
        {"b": 70},
        {"b": 70},
        {"a": 36, "b": 70},
        {"a": 100, "b": 70},
    ]


@pytest.mark.parametrize("alias", ["opt-13b", "llama-3.1-8b", "smollm2-135m"])
def test_possible_shares_are_all_different_splits(alias: str) -> None:
    shapes = shapes_of(alias)
    shares = possible_shares(shapes)
    found = [WeightSplit(shapes[:1], share) for share in shares]
    assert len({split.host_elements for split in found}) == len(shares) and shares == sorted(shares, reverse=True)
    for share, split in zip(shares, found, strict=True):
        assert split.share == pytest.approx(share, abs=1e-12)
    blocks = sum(-(-shape[0] // ROW_BLOCK) for shape in shapes[0].values() if len(shape) > 1)
    assert len(shares) == blocks + 1


# The plan


@pytest.mark.parametrize("alias", ["opt-13b", "llama-3.1-8b", "qwen2.5-7b"])
def test_the_plan_is_linear_in_the_share(alias: str) -> None:
    config = aliases()[alias]["config"]
    family, spec = family_of(alias, config), spec_of(alias, config)
    total = weight_bytes(family, spec, torch.float16)
    layers = 2 * sum(math.prod(shape) for layer in layer_shapes(family, spec) for shape in layer.values())
    for share in SHARES:
        needed = weight_footprint(family, spec, torch.float16, share, 2)
        assert abs(needed.share - share) < 0.007
        assert needed.device_bytes == pytest.approx(total - (1 - needed.share) * layers, abs=1)
        assert needed.host_bytes == pytest.approx((1 - needed.share) * layers, abs=4096 * 4 * spec.num_layers)
        # What is streamed, and the resident rows of the matrix that is split.
        widest = 2 * max(math.prod(shape) for shape in layer_shapes(family, spec)[0].values())
        part = (1 - needed.share) * layers / spec.num_layers
        assert 3 * part <= needed.staging_bytes + 1 <= 3 * (part + widest) + 1024


def test_the_plan_of_a_run(tiny: Path) -> None:
    for share in SHARES:
        for depth in (1, 2, 9):
            config = config_of(tiny, placement__weights_on_gpu=share, placement__prefetch_depth=depth)
            choice = build.choose_model(config)
            modes = layer_modes(config, choice.spec.num_layers)
            plan = memory_plan.plan_memory(choice, config, modes, 1, 300)
            loaded = build.obtain_weights(choice, config, needs_text=False)
            tensors = [*loaded.tensors.shared.values(), *(t for w in loaded.tensors.layers for t in w.values())]
            assert plan.device["weights"] == sum(tensor.nbytes for tensor in tensors)
            with LLM.from_parts(config, choice, loaded, modes) as llm:
                slots = [views[0] for views in llm._machine.weights._views]
                assert len(slots) == (min(depth + 1, 6) if share < 1 else 0)
                staged = sum(tensor.nbytes for views in slots for tensor in views.values())
                assert staged <= plan.device["slots for streamed weights"] <= staged + len(slots) * 4 * 256
                assert llm.weights_on_gpu == plan.weights_on_gpu
            assert f"{100 * llm.weights_on_gpu:.4g} % of the decoder layers' weights" in plan.describe(None, GIB)
            host = 0 if loaded.host is None else sum(b.tensor.nbytes for w in loaded.host.layers for b in w.values())
            assert host <= plan.host["streamed weights"] <= host + 6 * 4 * 4096
            assert host + sum(tensor.nbytes for tensor in tensors) == weight_bytes(
                choice.family, choice.spec, choice.dtype
            )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("models"))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, alias: str, device_limit: int, host_limit: int, **values: Any) -> Any:
    """A choice and a config as if there were a GPU of this size."""
    monkeypatch.setattr(memory_plan, "memory_limits", lambda config, device: (device_limit, host_limit))
    config = config_of(alias, model__dtype="bfloat16", **values)
    choice = build.choose_model(config)
    return build.ModelChoice(choice.location, choice.spec, choice.family, torch.device("cuda", 0), choice.dtype), config


def test_auto_is_the_largest_share_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 40 * GIB, 64 * GIB)
    assert admit(choice, config, 8192, 32, 1).plan.weights_on_gpu == 1.0
    choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 64 * GIB)
    admission = admit(choice, config, 8192, 32, 1)
    share = admission.plan.weights_on_gpu
    assert share is not None and 0.2 < share < 0.8
    assert admission.config.placement.weights_on_gpu == share
    assert "select" in admission.modes, "room for resident KV is not made by streaming weights"
    assert 11.9 * GIB < admission.plan.device_bytes <= 12 * GIB
    for more in [s for s in possible_shares(layer_shapes(choice.family, choice.spec)) if s > share + 1e-9]:
        plan = memory_plan.plan_memory(choice, memory_plan.with_share(admission.config, more), admission.modes, 1, 8224)
        assert not plan.fits(12 * GIB, 64 * GIB)
    # Host memory counts as well: the share below which the host has no room is refused, too.
    choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 5 * GIB, placement__weights_on_disk=0.0)
    with pytest.raises(InsufficientMemoryError):
        admit(choice, config, 8192, 32, 1)


def test_a_refusal_names_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where no smaller --seq would do, and the dtype is a small one."""
    choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 64 * GIB, placement__weights_on_gpu=1.0)
    with pytest.raises(InsufficientMemoryError, match=r"what would fit: --weights-on-gpu 0\.\d\d$") as error:
        admit(choice, config, 8192, 32, 1)
    share = float(str(error.value).split()[-1])
    assert admit(choice, memory_plan.with_share(config, share), 8192, 32, 1).plan.fits(12 * GIB, 64 * GIB)
    choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 17 * GIB, 64 * GIB, placement__weights_on_gpu=1.0)
    with pytest.raises(InsufficientMemoryError, match=r"what would fit: --seq \d+"):
        admit(choice, config, 200_000 - 100_000, 32, 1)


def test_without_a_gpu_auto_is_everything(tiny: Path) -> None:
    config = config_of(tiny, placement__host_memory_bytes=1)
    choice = build.choose_model(config)
    plan = settle(choice, config, 1, 300, memory_plan.memory_limits(config, choice.device)).plan
    assert plan.weights_on_gpu == 1.0 and plan.host["streamed weights"] == 0


def test_a_plan_without_weights_says_nothing_of_them() -> None:
    assert "decoder layers" not in MemoryPlan(False).describe(None, GIB)


# Loading


@pytest.mark.parametrize("kind", ["real", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa3", "qwen2"])
def test_the_values_do_not_depend_on_the_share(name: str, dtype: str, kind: str, tmp_path: Path) -> None:
    model = save_tiny_model(name, tmp_path)

    def load(share: float) -> list[dict[str, Tensor]]:
        config = config_of(model, model__weights=kind, model__dtype=dtype, placement__weights_on_gpu=share)
        choice = build.choose_model(config)
        loaded = build.obtain_weights(choice, config, needs_text=False)
        if loaded.host is not None:
            for layer, buffers in zip(loaded.tensors.layers, loaded.host.layers, strict=True):
                for key, buffer in buffers.items():
                    layer[key] = torch.cat([layer[key], buffer.tensor]) if key in layer else buffer.tensor
        return [loaded.tensors.shared, *loaded.tensors.layers]

    expected = load(1.0)
    for share in SHARES:
        for found, wanted in zip(load(share), expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_large_random_matrices_are_made_in_blocks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU block by block is the same as at once."""
    config = config_of(tiny, model__weights="random")
    choice = build.choose_model(config)
    at_once = build.obtain_weights(choice, config, needs_text=False).tensors
    monkeypatch.setattr("hybridgen.models.loading.RANDOM_BLOCK_ELEMENTS", 64 * 70)
    in_blocks = build.obtain_weights(choice, config, needs_text=False).tensors
    for one, other in zip([at_once.shared, *at_once.layers], [in_blocks.shared, *in_blocks.layers], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_host_parts_are_never_whole_on_the_device(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors that are made while loading are what the plan says, or a block of random numbers."""
    made: list[int] = []
    empty = torch.empty

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    config = config_of(tiny, placement__weights_on_gpu=0.0)
    choice = build.choose_model(config)
    monkeypatch.setattr(torch, "empty", recording)
    loaded = build.obtain_weights(choice, config, needs_text=False)
    assert sum(made) == sum(t.nbytes for w in [loaded.tensors.shared, *loaded.tensors.layers] for t in w.values())
    assert all(tensor.dim() == 1 for layer in loaded.tensors.layers for tensor in layer.values())


# The store

LAYERS = 5
SHAPES: dict[str, tuple[int, ...]] = {"a": (128, 4), "bias": (8,), "b": (192, 4), "c": (64, 8)}


def make_store(
    share: float, depth: int, kind: type[TransferEngine] = LazyTransfer, layers: int = LAYERS
) -> tuple[LayerWeightStore, list[dict[str, Tensor]]]:
    """A store of random layers, and the layers."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(layers)
    ]  # fmt: skip
    split = WeightSplit([SHAPES] * layers, share)
    host = HostWeights(split, CPU, torch.float32) if split.host_elements else None
    resident: list[dict[str, Tensor]] = []
    for number, tensors in enumerate(whole):
        resident.append({})
        for name, tensor in tensors.items():
            rows = split.layers[number].host_rows.get(name, 0)
            staying = tensor.shape[0] - rows
            if staying:
                resident[-1][name] = tensor[:staying].clone()
            if host is not None and rows:
                leaving = host.take(number, name)
                assert leaving is not None
                leaving.copy_(tensor[staying:])
    return LayerWeightStore(resident, host, depth, kind(Telemetry()), CPU), whole


@pytest.mark.parametrize("kind", [LazyTransfer, ImmediateTransfer])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("share", SHARES)
def test_each_layer_is_there_when_it_runs(share: float, depth: int, kind: type[TransferEngine]) -> None:
    store, whole = make_store(share, depth, kind)
    for _ in range(3):
        for layer in range(LAYERS):
            store.issue(layer)
            for number in (layer, layer + 1):  # the next one, for the predicted query
                if number < LAYERS:
                    found = store.wait(number)
                    assert set(found) == set(SHAPES) and len(found) == len(SHAPES)
                    assert all(torch.equal(found[name], whole[number][name]) for name in SHAPES)
                    assert found.get("nothing") is None
    store.close()


def test_everything_on_the_device_is_the_dicts_themselves() -> None:
    store, _ = make_store(1.0, 2)
    store.issue(3)
    assert store.wait(3) is store._resident[3] and store.share == 1.0
    assert not store._slots and not store._transfer.telemetry.bytes_moved


@pytest.mark.parametrize("depth", [1, 2])
def test_each_layer_crosses_the_link_once_a_step(depth: int) -> None:
    store, _ = make_store(0.3, depth)
    moved = store._transfer.telemetry.bytes_moved
    assert store._host is not None
    of_layer = sum(buffer.tensor.nbytes for buffer in store._host.layers[0].values())
    for step in range(3):
        for layer in range(LAYERS):
            store.issue(layer)
            assert moved == {"h2d": (step * LAYERS + layer + depth + 1) * of_layer}, "rows that stay are not counted"


def test_few_layers_stay_in_their_slots() -> None:
    store, whole = make_store(0.0, 2, layers=2)
    for _ in range(4):
        for layer in range(2):
            store.issue(layer)
            assert torch.equal(store.wait(layer)["c"], whole[layer]["c"])
    assert store._host is not None
    assert store._transfer.telemetry.bytes_moved["h2d"] == sum(
        buffer.tensor.nbytes for layer in store._host.layers for buffer in layer.values()
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stopped_at", range(LAYERS))
def test_a_step_that_was_broken_off(stopped_at: int, depth: int) -> None:
    """The next one begins at layer 0, whatever lies in the slots."""
    store, whole = make_store(0.4, depth)
    for last in (LAYERS, stopped_at + 1, LAYERS, LAYERS):
        for layer in range(last):
            store.issue(layer)
            assert all(torch.equal(store.wait(layer)[name], whole[layer][name]) for name in SHAPES)


def test_a_layer_that_was_not_issued_is_an_error() -> None:
    store, _ = make_store(0.5, 1)
    store.issue(0)
    store.wait(1)
    with pytest.raises(RuntimeError, match="layer 2 are waited for"):
        store.wait(2)


@pytest.mark.parametrize("forgotten", range(3))
def test_a_forgotten_wait_shows(forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of the three copies of a layer: two matrices from the host, and one's rows that stay."""
    bring = LazyTransfer.bring
    number = -1

    def careless(self: LazyTransfer, *args: Any) -> Ticket:
        nonlocal number
        ticket, number = bring(self, *args), number + 1
        return Ticket() if number % 3 == forgotten else ticket

    monkeypatch.setattr(LazyTransfer, "bring", careless)
    store, _ = make_store(0.5, 2)
    store.issue(0)
    assert number == 8
    assert sum(bool(store.wait(0)[name].isnan().any()) for name in SHAPES) == 1


def test_a_slot_is_overwritten_only_when_its_layer_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a layer come after a mark that was taken when the slot's last layer had been issued."""
    marks: list[int] = []
    after: dict[str, list[int]] = {"weights": [], "assembly": []}
    running = -1

    class _Mark(Ticket):
        def __init__(self) -> None:
            self.layer = running

    class Recording(LazyTransfer):
        def mark(self) -> Ticket:
            marks.append(running)
            return _Mark()

        def beside(self, after_: Ticket, stream: str = "beside") -> Any:
            assert isinstance(after_, _Mark)
            after[stream].append(after_.layer)
            return super().beside(after_, stream)

    store, _ = make_store(0.5, 2, Recording)
    marks.clear()
    after = {stream: [] for stream in after}
    for layer in range(LAYERS):
        replaced = [number for number in store._slots if number is not None and number not in range(layer, layer + 3)]
        store.issue(layer)
        assert all(number < layer for number in replaced)
        running = layer
    assert marks == [-1, -1, -1, 0, 1, 2, 3], "each waits for the layer before the running one, no later"
    assert after == {"weights": marks, "assembly": marks}


def test_host_memory_is_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering memory with CUDA is slow: once for all layers."""
    slabs: list[int] = []

    class Counted(HostSlab):
        def __init__(self, size_bytes: int, *args: Any) -> None:
            slabs.append(size_bytes)
            super().__init__(size_bytes, *args)

    monkeypatch.setattr(weights_module, "HostSlab", Counted)
    make_store(0.2, 2)
    assert len(slabs) == 1
