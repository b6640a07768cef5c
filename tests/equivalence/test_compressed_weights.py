"""`placement.compress_weights`: matrices in groups of 64 along a row, against dense attention in float64.

The dense model's weights are what the engine's bytes stand for, unpacked here by the definition (arXiv 2303.06865,
section 5, and the layout of a row in `offload/groupwise.py`), wherever they lie, after each number was found within
half a step of the checkpoint's.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridgen.config import Config, with_settings
from hybridgen.engine import build
from hybridgen.engine.admission import admit
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_plan import plan_memory
from hybridgen.errors import ConfigError
from hybridgen.evaluation.comparison_job import with_one_share
from hybridgen.offload.transfer import LazyTransfer, Ticket
from hybridgen.placement.plan import GIB
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import DenseModel, DenseSimulation, Settings
from tests.equivalence.test_compressed_cache import BITS, unpacked
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo
from tests.unit.test_weight_store import on_a_gpu

SETTINGS = Settings(keep=1.0, window=16, exact_layers=(0,))
FAMILIES = ["opt", "llama-gqa2", "qwen2"]
# Shares of device and disk; the rest is the host's.
EVERYTHING, MIXED = (1.0, 0.0), (0.3, 0.4)
PLACEMENTS = [EVERYTHING, (0.0, 0.0), (0.0, 1.0), MIXED, (0.6, 0.0), (0.5, 0.5)]
LENGTHS, STEPS = (60, 41, 33, 52), 3


def placed(shares: tuple[float, float], compress: str, folder: Path) -> dict[str, Any]:
    return {
        "placement__weights_on_gpu": shares[0],
        "placement__weights_on_disk": shares[1],
        "placement__compress_weights": compress,
        "placement__disk_dir": str(folder),
    }


def packed_rows(llm: LLM, layer: int, name: str) -> Tensor:
    """All rows of a matrix, uint8 [rows, row bytes]: the device's, the host's, the disk's."""
    found, host, disk = llm.weights.tensors.layers[layer].get(name), llm.weights.host, llm.weights.disk
    assert host is not None
    parts = [] if found is None else [found.cpu()]
    if name in host.layers[layer]:
        parts.append(host.layers[layer][name].tensor)
    for place in [] if disk is None else disk.layers[layer].get(name, []):
        content = place.file.read_bytes()[place.offset : place.offset + place.nbytes]
        width = host.form.stored(host.split.layers[layer].shapes[name])[0][1]
        parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, width))
    return torch.cat(parts)


def decoded_model(llm: LLM, directory: Path, bits: int) -> DenseModel:
    """The checkpoint with the numbers that the engine's bytes stand for."""
    model, matrices = DenseModel(directory), 0
    for layer in range(model.num_layers):
        for name, source in llm.choice.family.layer_tensors(llm.spec, layer).items():
            exact = torch.cat([model.weights[part] for part in source.parts])
            if len(source.shape) == 1:
                assert torch.equal(llm.weights.tensors.layers[layer][name].double().cpu(), exact), "never packed"
                continue
            made, step = unpacked(packed_rows(llm, layer, name), bits, source.shape[1])
            assert made.shape == exact.shape and ((made - exact).abs() <= 0.501 * step + 1e-6).all()
            for group, steps in zip(exact.split(64, dim=1), step.split(64, dim=1), strict=True):
                span = group.amax(1) - group.amin(1) + 2**-7 * group.amin(1).abs()  # the minimum is a bf16
                allowed = span / (2**bits - 1) * (1 + 2**-7) + 1e-6
                assert (steps <= allowed.unsqueeze(1)).all(), "a step is what the range needs"
            rows = [model.weights[part].shape[0] for part in source.parts]
            model.weights |= dict(zip(source.parts, made.split(rows), strict=True))
            matrices += len(source.parts)
    assert matrices == model.num_layers * (6 if model.opt else 7)
    return model


@pytest.mark.parametrize("strategy", ["full", "hybridgen"])
@pytest.mark.parametrize("compress", ["int4", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_dense_attention_with_the_same_weights(
    zoo: ModelZoo, name: str, compress: str, strategy: str, tmp_path: Path
) -> None:
    """Rows in all tiers. hybridgen: with a predicted query, which needs a layer's matrices early."""
    directory, more = zoo.directory(name), {"runtime__micro_batch": 1} if compress == "int8" else {}
    with engine(directory, SETTINGS, strategy, **placed(MIXED, compress, tmp_path), **more) as llm:
        model = decoded_model(llm, directory, BITS[compress])
        lengths = (150, 41)
        sequences = [DenseSimulation(model, SETTINGS) for _ in lengths]
        prompts = [random_tokens(model.vocab_size, length, seed=length) for length in lengths]
        batch = llm.new_batch([length + STEPS for length in lengths])
        ours = llm.prefill(batch, prompts)
        wanted = [one.prefill(prompt) for one, prompt in zip(sequences, prompts, strict=True)]
        assert (ours.double() - torch.stack(wanted)).abs().max() < LOGITS_TOLERANCE
        for step in range(STEPS):
            ours = llm.decode(batch, [step + 3] * len(lengths))
            wanted = [one.decode(step + 3).logits for one in sequences]
            assert (ours.double() - torch.stack(wanted)).abs().max() < LOGITS_TOLERANCE, step
        exact = [DenseSimulation(DenseModel(directory), SETTINGS).prefill(prompt) for prompt in prompts[:1]]
        rounded = DenseSimulation(model, SETTINGS).prefill(prompts[0])
        assert (exact[0] - rounded).abs().max() > 10 * LOGITS_TOLERANCE, "rounding matters"


def run(zoo: ModelZoo, name: str, **overrides: Any) -> list[Tensor]:
    """Logits of four prompts and decode steps."""
    vocab_size = zoo.dense(name).vocab_size
    with engine(zoo.directory(name), Settings(keep=0.3, window=16, exact_layers=(0,)), **overrides) as llm:
        batch = llm.new_batch([length + STEPS for length in LENGTHS])
        found = [llm.prefill(batch, [random_tokens(vocab_size, length, seed=length) for length in LENGTHS])]
        for _ in range(STEPS):
            found.append(llm.decode(batch, found[-1].argmax(1)))
        return found


@pytest.mark.parametrize(
    ("name", "compress", "overrides"),
    [
        ("opt", "int4", {"runtime__micro_batch": 3}),
        ("llama-gqa2", "int8", {"runtime__transfer": "immediate", "placement__prefetch_depth": 1}),
        ("llama-gqa2", "int4", {"model__weights": "random", "placement__prefetch_depth": 9}),
        ("qwen2", "int4", {"model__weights": "random", "model__dtype": "bfloat16", "runtime__micro_batch": 1}),
        ("qwen2", "int8", {"model__dtype": "float16", "runtime__transfer": "immediate", "attention__lookahead": "off"}),
    ],
)
def test_where_they_lie_changes_nothing(
    zoo: ModelZoo, name: str, compress: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Not a bit of the logits. Our file of packed rows is written once, by the first placement that needs it."""
    expected = run(zoo, name, **placed(EVERYTHING, compress, tmp_path), **overrides)
    for shares in PLACEMENTS[1:]:
        found = run(zoo, name, **placed(shares, compress, tmp_path), **overrides)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), shares
    (file,) = tmp_path.glob("*")
    written = file.stat().st_mtime_ns
    run(zoo, name, **placed(MIXED, "none", tmp_path), **overrides)
    other = "int8" if compress == "int4" else "int4"
    run(zoo, name, **placed(MIXED, other, tmp_path), **overrides)
    names = [path.name for path in tmp_path.glob("*")]
    assert sum(f"-{other}-" in name for name in names) == sum(f"-{compress}-" in name for name in names) == 1
    assert file.stat().st_mtime_ns == written
    kinds = {tensor.dtype for tensor in load_file(file).values() if tensor.dim() == 2}
    assert kinds == {torch.uint8}


@pytest.mark.parametrize("shares", PLACEMENTS)
@pytest.mark.parametrize("compress", ["int4", "int8"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2"])
def test_bytes_and_memory(
    zoo: ModelZoo, name: str, compress: str, shares: tuple[float, float], tmp_path: Path
) -> None:
    """Packed on every way and in every place; the plan is what is allocated."""
    with engine(zoo.directory(name), SETTINGS, "full", **placed(shares, compress, tmp_path)) as llm:
        host, disk, store = llm.weights.host, llm.weights.disk, llm._machine.weights
        assert host is not None and llm.weights_packed == f"{compress} in groups of 64"
        held = {"device": 0, "host": 0, "disk": 0}
        for layer in host.split.layers:
            for matrix, shape in layer.shapes.items():
                rows = {"host": layer.host_rows.get(matrix, 0), "disk": layer.disk_rows.get(matrix, 0)}
                rows["device"] = shape[0] - sum(rows.values())
                row = 4  # of a tensor with one dimension; else two 16-bit numbers a group, and codes in whole words
                if len(shape) == 2:
                    row = 4 * math.ceil(shape[1] / 64) + 4 * math.ceil(shape[1] * BITS[compress] / 32)
                for tier, count in rows.items():
                    held[tier] += count * row
        batch = llm.new_batch([40])
        llm.prefill(batch, [random_tokens(90, 30, seed=2)])
        llm.telemetry.begin_step()
        llm.decode(batch, [3])
        moved = llm.telemetry.end_step().bytes_moved
        assert moved.get("h2d", 0) == held["host"] + held["disk"]
        assert (moved.get("disk", 0) >= held["disk"]) and (moved.get("disk", 0) > 0) == (shares[1] > 0)

        plan = plan_memory(build.choose_model(llm.config), llm.config, llm.modes, 1, 40)
        shared = sum(tensor.nbytes for tensor in llm.weights.tensors.shared.values())
        layers = sum(tensor.nbytes for layer in llm.weights.tensors.layers for tensor in layer.values())
        assert layers == held["device"] and plan.device["weights"] == shared + layers
        slots = {views[0][next(iter(views[0]))].untyped_storage() for views in store._views}
        assert len(slots) == 3, "for the layer that runs and two on their way, wherever they lie"
        allocated = sum(slot.nbytes() for slot in slots) + store._arrival.nbytes
        assert plan.device["slots for streamed weights"] == allocated
        assert store._arrival.nbytes == max(
            [buffer.tensor.nbytes for layer in host.layers for buffer in layer.values()]
            + ([] if disk is None else [sum(p.nbytes for p in ranges) for at in disk.layers for ranges in at.values()]),
            default=0,
        )
        padded = [-(-b.tensor.nbytes // 4096) * 4096 for layer in host.layers for b in layer.values()]
        assert sum(b.tensor.nbytes for layer in host.layers for b in layer.values()) == held["host"]
        assert plan.host["streamed weights"] == sum(padded) and plan.disk["weights"] == held["disk"]
        stages = 0 if store._stages is None else sum(stage.memory.nbytes for stage in store._stages._stages)
        assert plan.host["buffers for weights from disk"] == stages
        usual = plan_memory(build.choose_model(llm.config), plain(llm.config), llm.modes, 1, 40)
        assert (plan.weights_on_gpu, plan.weights_on_disk) == (usual.weights_on_gpu, usual.weights_on_disk)
        assert llm.placement["weights"]["gpu"] == plan.weights_on_gpu


def plain(config: Config) -> Config:
    return with_settings(config, {"placement.compress_weights": "none"})


def test_auto_counts_packed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B in 12 GiB: 16-bit layers do not fit, those of 4 bits do, with slots for three whole layers."""
    shares = {}
    for compress in ("none", "int4"):
        given = {"placement__compress_weights": compress}
        choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 64 * GIB, **given)
        plan = admit(choice, config, 8192, 32, 1).plan
        shares[compress] = plan.weights_on_gpu
    assert shares["none"] is not None and shares["none"] < 0.8 and shares["int4"] == 1.0
    matrices, norms = (2 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 14336, 2 * 4096  # numbers in a layer
    shared = 2 * 128_256 * 4096 + 4096
    assert plan.device["weights"] == 32 * (matrices * 9 // 16 + 2 * norms) + 2 * shared  # 64 numbers in 36 bytes
    assert plan.device["slots for streamed weights"] == 3 * 2 * matrices


@pytest.mark.parametrize("forgotten", [0, 3, 7, 11, 17])
def test_a_forgotten_wait_is_caught(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgotten: int
) -> None:
    """For any one matrix part on its way, from wherever."""
    bring, copies = LazyTransfer.bring_packed, 0

    def careless(self: LazyTransfer, *args: Any) -> Ticket:
        nonlocal copies
        ticket, copies = bring(self, *args), copies + 1
        return Ticket() if copies == forgotten else ticket

    monkeypatch.setattr(LazyTransfer, "bring_packed", careless)
    found = run(zoo, "llama-gqa2", **placed(MIXED, "int4", tmp_path))
    assert copies > 17
    assert bool(found[0].isnan().any()) == (forgotten > 0)


def test_strategies_beside_each_other_have_the_same_weights() -> None:
    def contestant(compress: str) -> Any:
        config = with_settings(Config(), {"placement.compress_weights": compress})
        return SimpleNamespace(admission=SimpleNamespace(config=config), config=config)

    job: Any = None
    assert with_one_share(job, [contestant("int4")], reference := contestant("int4")) is reference
    with pytest.raises(ConfigError, match=r"compress_weights = 'int4' and 'none': all strategies .*one value for all"):
        with_one_share(job, [contestant("int4")], contestant("none"))
