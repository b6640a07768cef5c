"""The memory plan: sums, limits, and that it says what the engine then allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.config import Setting, build_config
from hybridgen.engine import build, memory_plan
from hybridgen.engine.admission import admit
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.errors import InsufficientMemoryError
from hybridgen.placement.plan import GIB, MemoryPlan, format_bytes
from tests.equivalence.tiny_models import save_tiny_model


def test_sums() -> None:
    plan = MemoryPlan(device_is_host=False, device={"a": 3, "b": 4}, host={"c": 5})
    assert (plan.device_bytes, plan.host_bytes) == (7, 5)
    shared = MemoryPlan(device_is_host=True, device={"a": 3, "b": 4}, host={"c": 5})
    assert (shared.device_bytes, shared.host_bytes) == (7, 12)
    assert shared.to_dict() == {
        "device_bytes": 7,
        "host_bytes": 12,
        "device": {"a": 3, "b": 4},
        "host": {"c": 5},
        "disk_bytes": 0,
        "disk": {},
    }


@pytest.mark.parametrize(
    ("device_is_host", "device_limit", "host_limit", "fits"),
    [
        (False, 7, 5, True),
        (False, 6, 5, False),
        (False, 7, 4, False),
        (False, None, 5, True),
        (True, None, 12, True),
        (True, None, 11, False),
    ],
)
def test_limits(device_is_host: bool, device_limit: int | None, host_limit: int, fits: bool) -> None:
    plan = MemoryPlan(device_is_host, device={"a": 3, "b": 4}, host={"c": 5})
    assert plan.fits(device_limit, host_limit) is fits


def test_the_table_names_every_item() -> None:
    plan = MemoryPlan(False, device={"weights": 3 * GIB, "nothing": 0}, host={"KV host tier": GIB // 2})
    text = plan.describe(4 * GIB, 8 * GIB)
    assert "device: 3.00 GiB of 4.00 GiB available" in text
    assert "host: 512.0 MiB of 8.00 GiB available" in text
    assert "weights" in text and "KV host tier" in text and "nothing" not in text
    shared = MemoryPlan(True, plan.device, plan.host).describe(None, 8 * GIB)
    assert "no GPU" in shared and "host: 3.50 GiB of 8.00 GiB" in shared
    assert "what the device part takes" in shared


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MiB"), (1536 * 1024, "1.5 MiB"), (GIB, "1.00 GiB"), (GIB - 1, "1024.0 MiB")]
)
def test_format(size: int, text: str) -> None:
    assert format_bytes(size) == text


# Against what is allocated


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("models"))


def config_of(model: Path | str, **values: Any) -> Any:
    given = {path.replace("__", "."): value for path, value in values.items()}
    given |= {"model.name": str(model), "runtime.device": "cpu"}
    return build_config({path: Setting(value, "the test") for path, value in given.items()})


@pytest.mark.parametrize(
    ("dtype", "key_type", "sketch"),
    [
        ("float32", "auto", "none"),
        ("bfloat16", "auto", "none"),
        ("float32", "int8", "none"),
        ("bfloat16", "fp32", "int2"),
        ("float32", "int8", "int4"),
    ],
)
@pytest.mark.parametrize("mode", ["resident", "select"])
def test_the_plan_is_what_is_allocated(tiny: Path, dtype: str, key_type: str, sketch: str, mode: str) -> None:
    config = config_of(
        tiny, model__dtype=dtype, model__exact_layers_mode=mode, model__exact_layers=[0, 3], cache__gpu_window=50,
        cache__key_type=key_type, cache__sketch=sketch,
    )  # fmt: skip
    batch, capacity = 3, 500
    choice = build.choose_model(config)
    modes = layer_modes(config, choice.spec.num_layers)
    plan = memory_plan.plan_memory(choice, config, modes, batch, capacity)
    weights = build.obtain_weights(choice, config, needs_text=False)
    tensors = [*weights.tensors.shared.values(), *(t for w in weights.tensors.layers for t in w.values())]
    assert plan.device["weights"] == sum(tensor.nbytes for tensor in tensors)
    with LLM.from_parts(config, choice, weights, modes) as llm:
        (micro_batch,) = llm.new_batch([capacity] * batch).micro_batches
        found = {"KV of resident layers": 0, "KV of sinks and windows": 0, "KV host tier": 0}
        for layer in micro_batch.layers:
            kv: Any = layer._kv  # type: ignore[attr-defined]
            local = kv.keys.nbytes + kv.values.nbytes
            if hasattr(kv, "host_keys"):
                found["KV of sinks and windows"] += local
                buffers = (*kv.host_keys.buffers(), kv.host_values)
                found["KV host tier"] += sum(buffer.tensor.nbytes for buffer in buffers)
            else:
                found["KV of resident layers"] += local
    planned = plan.device | plan.host
    assert found == {name: planned[name] for name in found}
    assert (found["KV of resident layers"] > 0) == (mode == "resident")


@pytest.mark.parametrize("sketch", ["int2", "partial", "pages"])
def test_the_plan_of_sketches_on_the_device(tiny: Path, sketch: str) -> None:
    config = config_of(
        tiny, model__dtype="bfloat16", model__exact_layers=[0, 3], cache__gpu_window=50, cache__sketch=sketch,
        cache__sketch_home="gpu", selection__keep_mass=None,
    )  # fmt: skip
    batch, capacity = 3, 500
    choice = build.choose_model(config)
    modes = layer_modes(config, choice.spec.num_layers)
    plan = memory_plan.plan_memory(choice, config, modes, batch, capacity)
    with LLM.from_parts(config, choice, build.obtain_weights(choice, config, needs_text=False), modes) as llm:
        new = llm.new_batch([capacity] * batch)
        llm.prefill(new, [[5, 6, 7]] * batch)  # which makes the skewing matrices
        found = 0
        for layer, mode in zip(new.micro_batches[0].layers, modes, strict=True):
            if mode != "resident":
                made: Any = layer._kv.host_keys.sketch  # type: ignore[attr-defined]
                found += sum(tensor.nbytes for tensor in made.tensors())
        skews: Any = llm._layers._skews
        found += sum(matrix.nbytes for matrix in skews._matrices.values()) if skews is not None else 0
    assert found == plan.device["sketches of the host's keys"] > 0


@pytest.mark.parametrize("executor", ["streamed", "on_cpu"])
@pytest.mark.parametrize("capacity", [500, 60])
def test_the_plan_of_strategies_that_attend_to_all(tiny: Path, executor: str, capacity: int) -> None:
    config = config_of(tiny, attention__executor=executor, cache__gpu_window=50, model__dtype="bfloat16")
    batch, choice = 3, build.choose_model(config)
    modes = layer_modes(config, choice.spec.num_layers)
    plan = memory_plan.plan_memory(choice, config, modes, batch, capacity)
    with LLM.from_parts(config, choice, build.obtain_weights(choice, config, needs_text=False), modes) as llm:
        (micro_batch,) = llm.new_batch([capacity] * batch).micro_batches
        kvs: list[Any] = [layer._kv for layer in micro_batch.layers]  # type: ignore[attr-defined]
        staging: Any = getattr(micro_batch.layers[0], "_staging", None)
    window = sum(kv.keys.nbytes + kv.values.nbytes for kv in kvs)
    host = sum(kv.host_keys.in_place.tensor.nbytes + kv.host_values.tensor.nbytes for kv in kvs)
    assert plan.device["KV of sinks and windows"] == window and plan.host["KV host tier"] == host
    assert plan.device["KV of resident layers"] == plan.device["fetched rows"] == plan.device["logits and choice"] == 0
    streamed = plan.device["streamed KV of two layers"]
    if executor == "on_cpu":
        assert streamed == 0 and plan.host["query and context for the CPU"] > 0
    else:
        slots = staging._slots.nbytes
        assert slots == 2 * host // len(kvs) <= streamed < 1.5 * slots


def test_a_strategy_that_attends_to_all_says_what_has_no_effect(tiny: Path) -> None:
    choice = build.choose_model(config_of(tiny))
    for executor in ("hybrid", "full", "streamed", "on_cpu"):
        notes = admit(choice, config_of(tiny, attention__executor=executor), 900, 10, 1).notes
        assert any("--keep" in note for note in notes) == (executor != "hybrid")


def test_admission_to_the_byte(tiny: Path) -> None:
    config = config_of(tiny, model__exact_layers_mode="select")
    choice = build.choose_model(config)
    admission = admit(choice, config, 900, 10, 1)
    needed = admission.plan.host_bytes
    assert not admission.check_fits
    fitting = config_of(tiny, model__exact_layers_mode="select", placement__host_memory_bytes=needed)
    assert admit(choice, fitting, 900, 10, 1).plan.host_bytes == needed
    checked = admit(choice, fitting, 900, 10, 1, wants_check=True)
    assert not checked.check_fits and any("not checked" in note for note in checked.notes)
    with pytest.raises(InsufficientMemoryError, match="--seq 768"):
        short = config_of(tiny, model__exact_layers_mode="select", placement__host_memory_bytes=needed - 1)
        admit(choice, short, 900, 10, 1)


def test_random_weights_are_seeded(tiny: Path) -> None:
    choice = build.choose_model(config_of(tiny))

    def embed(seed: int) -> torch.Tensor:
        config = config_of(tiny, model__weights="random", run__seed=seed)
        return build.obtain_weights(choice, config, needs_text=False).tensors.shared["embed"]

    assert torch.equal(embed(1), embed(1)) and not torch.equal(embed(1), embed(2))
