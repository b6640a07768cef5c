"""Weights on disk: which rows, in whose files, in how much memory; and that no file is half written."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridgen.config import Setting, build_config
from hybridgen.engine import build, memory_plan
from hybridgen.engine.admission import admit
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError, DiskError, InsufficientMemoryError
from hybridgen.models import family_of, spec_of
from hybridgen.models.checkpoint import aliases, open_checkpoint
from hybridgen.models.hf_directory import safetensors_entries
from hybridgen.models.loading import layer_shapes, weight_bytes
from hybridgen.models.stored_rows import last_rows, read_blocks
from hybridgen.offload import disk
from hybridgen.offload.disk import FileRange, sweep
from hybridgen.offload.weights import HostWeights, weight_footprint
from hybridgen.placement.plan import GIB
from hybridgen.placement.weight_split import ROW_BLOCK, WeightSplit, split_layer
from hybridgen.run import main
from tests.equivalence.tiny_models import save_tiny_model
from tests.unit.test_disk import run_script
from tests.unit.test_plan import config_of
from tests.unit.test_weight_store import on_a_gpu, shapes_of

BLOCK = 0.013  # 64 rows of the wide model's widest matrix, as a share of a layer
TENTHS = [tenths / 10 for tenths in range(1, 10)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-gqa2", tmp_path_factory.mktemp("models"))


# The split


@pytest.mark.parametrize("alias", sorted(aliases()))
def test_both_shares_are_met_within_a_block_of_rows(alias: str) -> None:
    draw, shapes = random.Random(alias), shapes_of(alias)
    layer = shapes[0]
    elements = sum(math.prod(shape) for shape in layer.values())
    small = sum(math.prod(shape) for shape in layer.values() if len(shape) == 1)
    block = ROW_BLOCK * max(math.prod(shape[1:]) for shape in layer.values())
    cuts = [sorted((draw.random(), draw.random())) for _ in range(20)]
    for low, high in [*cuts, (0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.4, 0.4)]:
        split = WeightSplit(shapes, low, 1.0 - high)
        found = split.layers[0]
        assert abs(split.disk_share - (1.0 - high)) * elements <= block + small
        assert abs(split.share - low) * elements <= block + small
        assert len({(tuple(some.host_rows.items()), tuple(some.disk_rows.items())) for some in split.layers}) == 1
        assert low < high or not found.host_rows
        order: list[int] = []  # the tier of each block of rows, in the order of use: never back to a nearer one
        for name, shape in layer.items():
            if len(shape) > 1:
                host, on_disk = found.host_rows.get(name, 0), found.disk_rows.get(name, 0)
                rows = (found.staying_rows(name), host, on_disk)
                assert sum(rows) == shape[0] and min(rows) >= 0
                assert all(part % ROW_BLOCK == 0 or part in (0, shape[0]) for part in rows[:1])
                order += [tier for tier, part in enumerate(rows) if part]
        assert order == sorted(order)
        again = WeightSplit(shapes, split.share, split.disk_share)
        assert (again.layers[0].host_rows, again.layers[0].disk_rows) == (found.host_rows, found.disk_rows)


def test_without_disk_it_is_the_split_of_two_tiers() -> None:
    shapes = (("a", (128, 10)), ("bias", (40,)), ("b", (256, 10)), ("c", (128, 10)))
    assert split_layer(shapes, 2200 / 5160).disk_rows == {}
    three = split_layer(shapes, 1340 / 5160, 1280 / 5160)
    assert (three.host_rows, three.disk_rows) == ({"b": 256}, {"c": 128})
    three = split_layer(shapes, 1990 / 5160, 2600 / 5160)
    assert (three.host_rows, three.disk_rows) == ({}, {"b": 192, "c": 128}), "what is between two blocks is on disk"


def test_more_than_everything_is_refused() -> None:
    given = {"placement.weights_on_gpu": 0.7, "placement.weights_on_disk": 0.4}
    with pytest.raises(ConfigError, match=r"weights_on_gpu = 0\.7 and placement\.weights_on_disk = 0\.4: together"):
        build_config({path: Setting(value, "the test") for path, value in given.items()})
    with pytest.raises(ConfigError, match="a fraction in"):
        build_config({"placement.weights_on_disk": Setting(1.5, "the test")})
    given["placement.weights_on_gpu"] = 0.6
    build_config({path: Setting(value, "the test") for path, value in given.items()})


# FlexLLMGen#108: "percent" of the weights on the GPU, and what the GPU then holds


@pytest.mark.parametrize("disk_share", [0.0, 0.05])
@pytest.mark.parametrize("alias", ["opt-13b", "llama-3.1-8b", "qwen2.5-7b"])
def test_planned_device_bytes_are_linear_in_the_share(alias: str, disk_share: float) -> None:
    config = aliases()[alias]["config"]
    family, spec = family_of(alias, config), spec_of(alias, config)
    layers = 2 * sum(math.prod(shape) for layer in layer_shapes(family, spec) for shape in layer.values())
    shared = weight_bytes(family, spec, torch.bfloat16) - layers
    for share in TENTHS:
        needed = weight_footprint(family, spec, torch.bfloat16, share, 2, min(disk_share, 1 - share))
        assert needed.device_bytes == pytest.approx(shared + share * layers, abs=0.007 * layers)


def test_allocated_device_bytes_are_linear_in_the_share(tmp_path: Path) -> None:
    """What lies on the device after loading, of a model whose layers have some hundred blocks of rows."""
    model = save_wide_model(tmp_path)
    held: dict[float, int] = {}
    for share in [0.0, *TENTHS, 1.0]:
        config = config_of(model, placement__weights_on_gpu=share, placement__weights_on_disk=(1 - share) / 2)
        choice = build.choose_model(config)
        loaded = build.obtain_weights(choice, config, needs_text=False)
        held[share] = sum(tensor.nbytes for layer in loaded.tensors.layers for tensor in layer.values())
        if loaded.host is not None:
            assert loaded.host.split.disk_share == pytest.approx((1 - share) / 2, abs=BLOCK)
    for share, size in held.items():
        assert size == pytest.approx(share * held[1.0], abs=BLOCK * held[1.0]), share


def save_wide_model(parent: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(parent / "wide")
    return parent / "wide"


# The plan


def test_auto_puts_on_disk_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10**12)
    free = {"placement__disk_dir": str(tmp_path)}
    before = admit(*on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 64 * GIB, placement__weights_on_disk=0.0, **free),
                   8192, 32, 1)  # fmt: skip
    fits = admit(*on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, 64 * GIB, **free), 8192, 32, 1)
    assert fits.plan == before.plan and fits.chosen == before.chosen and fits.modes == before.modes
    shares = []
    for host in (7, 6, 5, 4):
        choice, config = on_a_gpu(monkeypatch, "llama-3.1-8b", 12 * GIB, host * GIB, **free)
        admission = admit(choice, config, 8192, 32, 1)
        assert admission.plan.device_bytes <= 12 * GIB and admission.plan.host_bytes <= host * GIB
        assert admission.plan.weights_on_gpu == pytest.approx(before.plan.weights_on_gpu, abs=0.05)
        shares.append(admission.plan.weights_on_disk)
        if shares[-1]:
            assert admission.plan.host_bytes > (host - 0.1) * GIB, "no more of it than has to be"
            assert f"{100 * shares[-1]:.4g} % of them are read from disk" in admission.describe()
            assert "weights_on_disk" in admission.describe()
    assert shares == sorted(shares) and 0 < shares[-1] < 0.6


def test_without_a_gpu_nothing_is_in_the_host_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10**12)
    for limit in (30, 20, 8, 6):
        given = {"placement__host_memory_bytes": limit * GIB, "placement__disk_dir": str(tmp_path)}
        config = config_of("opt-13b", model__dtype="bfloat16", model__weights="random", **given)
        plan = admit(build.choose_model(config), config, 64, 2, 1).plan
        assert (plan.weights_on_disk > 0) == (limit < 30)
        assert plan.weights_on_gpu == pytest.approx(1 - plan.weights_on_disk) and plan.host["streamed weights"] == 0
        assert plan.host_bytes <= limit * GIB and (limit == 30 or plan.host_bytes > (limit - 0.1) * GIB)
    config = config_of("opt-13b", model__dtype="bfloat16", placement__host_memory_bytes=2 * GIB)
    with pytest.raises(InsufficientMemoryError):
        admit(build.choose_model(config), config, 64, 2, 1)


def test_a_full_disk_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 20 * 10**9)
    given = {"placement__host_memory_bytes": 8 * GIB, "placement__disk_dir": str(tmp_path / "offload")}
    config = config_of("opt-13b", model__dtype="bfloat16", model__weights="random", **given)
    with pytest.raises(DiskError, match=r"needs 25\.\d\d GB in .*offload, 20\.00 GB are free.*placement\.disk_dir"):
        admit(build.choose_model(config), config, 64, 2, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_read_in_place_needs_no_disk(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    given = {"placement__weights_on_disk": 0.5, "placement__disk_dir": str(tmp_path)}
    config = config_of(tiny, **given)
    choice = build.choose_model(config)
    assert admit(choice, config, 64, 2, 1).plan.weights_on_disk > 0.3
    build.obtain_weights(choice, config, needs_text=False)
    with pytest.raises(DiskError, match="not enough disk space"):
        admit(choice.with_dtype(torch.bfloat16), config, 64, 2, 1)
    with pytest.raises(DiskError, match="not enough disk space"):  # nor without a plan
        build.obtain_weights(choice.with_dtype(torch.bfloat16), config, needs_text=False)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_what_the_plan_says(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device tensors, host rows, slots and buffers."""
    for gpu, on_disk in ((0.0, 1.0), (0.3, 0.3), (0.5, 0.5)):
        config = config_of(tiny, placement__weights_on_gpu=gpu, placement__weights_on_disk=on_disk)
        choice = build.choose_model(config)
        needed = memory_plan.footprint(choice, config, gpu, on_disk)
        loaded = build.obtain_weights(choice, config, needs_text=False)
        tensors = [*loaded.tensors.shared.values(), *(t for w in loaded.tensors.layers for t in w.values())]
        assert needed.device_bytes == sum(tensor.nbytes for tensor in tensors)
        assert loaded.host is not None and loaded.disk is not None
        host = sum(buffer.tensor.nbytes for layer in loaded.host.layers for buffer in layer.values())
        assert host <= needed.host_bytes <= host + 6 * 4 * 4096
        with LLM.from_parts(config, choice, loaded) as llm:
            stages = llm._machine.weights._stages
            assert stages is not None and len(stages._stages) == 3
            assert needed.stages_bytes == sum(stage.memory.numel() for stage in stages._stages)
            assert llm.placement["weights"]["disk"] == needed.disk_share


def test_the_report(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares, and bytes that are the blocks of 4096 in which the disk's rows lie, once a step."""
    reports = []
    for gpu, on_disk in (("1.0", 0.0), ("0.3", 0.4)):
        arguments = ["--model", str(tiny), "--weights", "random", "--seq", "64", "--gen", "4", "--device", "cpu"]
        arguments += ["--weights-on-gpu", gpu, "--set", f"placement.weights_on_disk={on_disk}"]
        arguments += ["--set", f"placement.disk_dir={tmp_path}", "--report", str(tmp_path / "report.json")]
        assert main(arguments) == 0
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    without, report = reports
    assert report["output_ids"] == without["output_ids"]
    assert without["placement"]["weights"] == {"gpu": 1.0, "host": 0.0, "disk": 0.0}
    assert without["disk"]["bytes_per_s"] is None and without["bytes_per_token"]["disk"] == 0
    shares = report["placement"]["weights"]
    assert report["weights_on_gpu"] == shares["gpu"] and sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) > 0.1
    split = WeightSplit(layer_shapes(*tiny_shape(tiny)), shares["gpu"], shares["disk"])
    (file,) = tmp_path.glob("*.safetensors")
    read = 0
    for entry in safetensors_entries(file):
        layer, name = entry.stored_name.split(".", 1)
        rows, size = split.layers[int(layer)].disk_rows.get(name, 0), entry.nbytes // entry.shape[0]
        if rows:
            assert entry.offset is not None
            end = entry.offset + entry.nbytes
            read += -(-end // 4096) * 4096 - (end - rows * size) // 4096 * 4096
    assert report["bytes_per_token"]["disk"] == read > 0
    assert report["memory_plan"]["disk"]["weights"] == 4 * split.disk_elements
    assert report["disk"]["bytes_per_s"] > 0
    assert "GB/s while it was asked" in capsys.readouterr().out


def tiny_shape(directory: Path) -> tuple[Any, Any]:
    with open_checkpoint(directory) as checkpoint:
        return family_of("tiny", checkpoint.config), spec_of("tiny", checkpoint.config)


# Files


def test_the_last_rows_of_stacked_parts(tmp_path: Path) -> None:
    tensors = {name: torch.randn(rows, 5) for name, rows in (("q", 7), ("k", 3), ("v", 4))}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        parts = [checkpoint.stored(name) for name in ("q", "k", "v")]
    whole, content = torch.cat([tensors[name] for name in "qkv"]), (tmp_path / "model.safetensors").read_bytes()
    for rows in range(1, 15):
        found = b"".join(content[offset : offset + size] for _, offset, size in last_rows(parts, rows))
        assert found == whole[14 - rows :].numpy().tobytes()
    assert torch.equal(torch.cat([block.clone() for block in read_blocks(parts)]), whole)


def test_our_file_is_a_safetensors_file(tiny: Path, tmp_path: Path) -> None:
    """Of all the layers' tensors, with the values that loading without disk gives."""
    values = {"model__weights": "random", "placement__disk_dir": str(tmp_path)}
    choice = build.choose_model(config_of(tiny))
    expected = build.obtain_weights(choice, config_of(tiny, **values), needs_text=False).tensors.layers
    assert list(tmp_path.iterdir()) == []
    for seed in (0, 0, 1):
        config = config_of(tiny, placement__weights_on_disk=0.5, run__seed=seed, **values)
        build.obtain_weights(choice, config, needs_text=False)
    files = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2, "one for each seed"
    found = load_file(files[0])
    assert found.keys() == {f"{layer}.{name}" for layer, tensors in enumerate(expected) for name in tensors}
    for layer, tensors in enumerate(expected):
        assert all(torch.equal(found[f"{layer}.{name}"], tensor) for name, tensor in tensors.items())


def test_a_file_that_was_cut_is_written_again(tiny: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"placement__weights_on_disk": 1.0, "placement__disk_dir": str(tmp_path)}
    config = config_of(tiny, model__weights="random", **given)
    choice = build.choose_model(config)
    build.obtain_weights(choice, config, needs_text=False)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    build.obtain_weights(choice, config, needs_text=False)
    assert file.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_unaligned_tensors_are_not_read_in_place(tiny: Path, tmp_path: Path) -> None:
    """A header of one more byte: no element lies on a multiple of its size. They are copied, and the same."""
    model, folder = tmp_path / "model", tmp_path / "offload"
    shutil.copytree(tiny, model)
    content = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    (model / "model.safetensors").write_bytes((length + 1).to_bytes(8, "little") + header + content[8 + length :])
    config = config_of(model, placement__weights_on_disk=1.0, placement__disk_dir=str(folder))
    loaded = build.obtain_weights(build.choose_model(config), config, needs_text=False)
    (file,) = folder.iterdir()
    assert loaded.disk is not None and {part.file for part in loaded.disk.layers[0]["qkv"]} == {file}
    in_place = config_of(tiny, placement__weights_on_disk=1.0, placement__disk_dir=str(folder))
    expected = build.obtain_weights(build.choose_model(in_place), in_place, needs_text=False).disk
    assert expected is not None and {part.file for part in expected.layers[0]["qkv"]} == {tiny / "model.safetensors"}
    for ours, theirs in zip(loaded.disk.layers, expected.layers, strict=True):
        for name in theirs:
            assert _content(ours[name]) == _content(theirs[name])


def _content(ranges: list[FileRange]) -> bytes:
    return b"".join(part.file.read_bytes()[part.offset :][: part.nbytes] for part in ranges)


WRITER = """
import os, sys, torch
from hybridgen.config import Setting, build_config
from hybridgen.engine import build
folder, model = sys.argv[1].split("|")
given = {"model.name": model, "model.weights": "random", "model.dtype": "float32", "runtime.device": "cpu",
         "placement.weights_on_disk": 1.0, "placement.disk_dir": folder}
config = build_config({path: Setting(value, "the test") for path, value in given.items()})
choice = build.choose_model(config)
for _ in range(4):
    if os.fork() == 0:
        break
else:
    for _ in range(4):
        os.wait()
    sys.exit()
os.write(1, b"%d\\n" % os.getpid())
while True:
    build.obtain_weights(choice, config, needs_text=False)
    for file in os.listdir(folder):
        if file.endswith(".safetensors"):
            try:
                os.unlink(os.path.join(folder, file))
            except FileNotFoundError:
                pass
"""


def test_killed_writers_leave_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    folder.mkdir()
    parent = run_script(WRITER, f"{folder}|{tiny}")
    assert parent.stdout is not None
    draw, left = random.Random(3), 0
    children = [int(parent.stdout.readline()) for _ in range(4)]
    for child in children:
        time.sleep(0.05 + draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
    parent.communicate()
    left = len(list(folder.glob("own-*")))
    assert left > 0
    assert len(sweep(folder)) == left
    assert all(file.suffix == ".safetensors" and load_file(file) for file in folder.iterdir())


def test_host_weights_say_what_is_on_disk() -> None:
    split = WeightSplit([{"a": (128, 4), "b": (192, 4)}], 0.2, 0.5)
    host = HostWeights(split, torch.device("cpu"), torch.float32)
    assert host.on_disk(0, "b") == 192 and host.take(0, "b") is None
    assert host.on_disk(0, "a") == split.layers[0].disk_rows.get("a", 0)
