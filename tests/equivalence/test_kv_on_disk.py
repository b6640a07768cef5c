"""`placement.kv_on_disk` and `kv_on_gpu`: three tiers, whose tokens are those of full attention wherever rows lie."""

from __future__ import annotations

import gc
import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen import run
from hybridgen.config import with_settings
from hybridgen.engine import build
from hybridgen.engine.admission import admit
from hybridgen.engine.memory_plan import plan_memory
from hybridgen.errors import ConfigError, DiskError
from hybridgen.kv_cache.disk_rows import DiskTier
from hybridgen.kv_cache.layout import disk_rows
from hybridgen.offload import disk
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import Settings, prefill_host_length
from tests.equivalence.test_forgotten_wait import forget
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

SETTINGS = Settings(keep=1.0, window=16)
# The first layers age in step 13, the second sequence's rows fit into the file in part, the third has none.
LENGTHS, STEPS = (263, 135, 12), 18
MODELS = ("opt", "llama-gqa2", "qwen2")


def on_disk(folder: Path, share: float, **overrides: Any) -> dict[str, Any]:
    return {"placement__kv_on_disk": share, "placement__disk_dir": str(folder / "files"), **overrides}


def files(folder: Path) -> list[str]:
    return [path.name for path in (folder / "files").iterdir()] if (folder / "files").exists() else []


def turns(llm: Any, lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS) -> list[Tensor]:
    """Logits of a prompt, greedy steps, a further turn of 70 tokens, and steps after it."""
    batch, found = llm.new_batch([length + 70 + 2 * steps for length in lengths]), []
    for turn in range(2):
        sizes = [70] * len(lengths) if turn else lengths
        prompts = [random_tokens(90, size, seed=10 * turn + size) for size in sizes]
        found.append(llm.prefill(batch, prompts))
        for _ in range(steps):
            found.append(llm.decode(batch, found[-1].argmax(-1)))
    return found


@pytest.fixture(scope="module")
def full(zoo: ModelZoo) -> Any:
    @cache
    def logits(name: str) -> list[Tensor]:
        with engine(zoo.directory(name), SETTINGS, "full") as llm:
            return turns(llm)

    return logits


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_full_attention(zoo: ModelZoo, full: Any, tmp_path: Path, name: str, share: float, micro_batch: int
                                  ) -> None:  # fmt: skip
    overrides = on_disk(tmp_path, share, runtime__micro_batch=micro_batch)
    with engine(zoo.directory(name), SETTINGS, "aog", **overrides) as llm:
        found = turns(llm)
    for ours, expected in zip(found, full(name), strict=True):
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))
        assert (ours - expected).abs().max() < LOGITS_TOLERANCE
    assert files(tmp_path) == []


@pytest.mark.parametrize("compress", ["none", "int4"])
def test_where_rows_lie_changes_nothing(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compress: str
                                        ) -> None:  # fmt: skip
    """To the bit, packed or not; though the disk is slow, and not read ahead."""
    found = {}
    read = disk._OpenFile.read

    def slowly(self: Any, memory: memoryview, offset: int) -> int:
        time.sleep(1e-3)
        return read(self, memory, offset)

    monkeypatch.setattr(disk._OpenFile, "read", slowly)
    for share, ahead in ((0.0, True), (0.5, True), (0.9, False)):
        more = {"cache__compress": compress, "attention__stream_ahead": ahead, "placement__prefetch_depth": 1 + ahead}
        with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", **on_disk(tmp_path, share, **more)) as llm:
            found[share] = turns(llm, (263, 135), steps=14)
    for share in (0.5, 0.9):
        assert all(torch.equal(*pair) for pair in zip(found[share], found[0.0], strict=True))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("blocks", [1, 2, 7, 100])
def test_the_share_is_realised_within_a_block(share: float, blocks: int) -> None:
    rows = disk_rows(64 * blocks, share)
    assert rows % 64 == 0 and 0 <= rows <= 64 * (blocks - 1)
    assert -64 <= rows - share * 64 * blocks <= 0


def test_memory_files_and_bytes(zoo: ModelZoo, tmp_path: Path) -> None:
    """Of equal prompts: the plan is what is taken, each row is read once a step, whole and from borders."""
    folder, sequences, length = zoo.directory("llama-gqa2"), 2, 400
    with engine(folder, SETTINGS, "aog", run__batch=sequences, **on_disk(tmp_path, 0.5)) as llm:
        choice, spec = build.choose_model(llm.config), llm.spec.layers[0]
        row, layers = spec.num_kv_heads * spec.head_dim * 4, llm.spec.num_layers
        host = prefill_host_length(length + 20, 4, 16)
        there = host // 2 // 64 * 64
        layout = build.kv_disk_layout(llm.config, llm.spec, sequences, length + 20, torch.float32)
        assert layout is not None and layout.rows == there
        assert layout.file_bytes == layers * sequences * 2 * there * row, "a multiple of 4096"
        batch = llm.new_batch([length + 20] * sequences)
        llm.prefill(batch, [random_tokens(90, length, seed=seed) for seed in range(sequences)])
        assert len(files(tmp_path)) == 1
        assert (tmp_path / "files" / files(tmp_path)[0]).stat().st_size == layout.file_bytes

        plan = plan_memory(choice, llm.config, llm.modes, sequences, length + 20)
        held = [kv for layer in batch.all_layers() for kv in (layer._kv.host_values, *layer._kv.host_keys.buffers())]
        assert plan.host["KV host tier"] == sum(kv.tensor.nbytes for kv in held)
        tier = batch.all_layers()[0]._kv.disk.tier
        taken = sum(place.tensor.nbytes for place in tier._places) + tier._single.tensor.nbytes
        assert taken <= plan.host["KV on its way to and from disk"] < taken + 4096
        without = with_settings(llm.config, {"placement.kv_on_disk": 0.0})
        usual = plan_memory(choice, without, llm.modes, sequences, length + 20)
        assert usual.host["KV host tier"] - plan.host["KV host tier"] == layout.file_bytes
        assert usual.device == plan.device

        held_now = prefill_host_length(length, 4, 16)
        now = sequences * held_now * row * 2 * layers
        for step in range(3):
            llm.telemetry.begin_step()
            llm.decode(batch, [3, 4])
            moved = llm.telemetry.end_step().bytes_moved
            ahead = 2 * layout.file_bytes // layers  # the first step also reads for the next one
            assert moved == {"h2d": now, "disk": layout.file_bytes + (0 if step else ahead)}
        for layer in batch.all_layers():
            tiers = (sum(batch.lengths) - 2 * held_now, 2 * (held_now - there), 2 * there)
            assert layer.tiers(batch.lengths) == tiers
        assert layer._kv.host_keys.kind == "float32"
        # A file goes with its batch, or with the engine.
        del batch, layer, held, tier
        gc.collect()
        assert files(tmp_path) == []
        batch = llm.new_batch([400])
        assert len(files(tmp_path)) == 1
    assert files(tmp_path) == [] and batch.lengths == [0]


def test_layers_are_read_ahead(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When a layer's rows are asked for, its own reads and those of the next `prefetch_depth` - 1 are under way."""
    seen: list[tuple[int, list[int]]] = []
    bring = DiskTier.bring

    def noted(self: DiskTier, layer: int, lengths: list[int]) -> Any:
        seen.append((layer, sorted(self._flights)))
        return bring(self, layer, lengths)

    with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", **on_disk(tmp_path, 0.5)) as llm:
        batch = llm.new_batch([420])
        llm.prefill(batch, [random_tokens(90, 400, seed=1)])
        llm.decode(batch, [3])
        monkeypatch.setattr(DiskTier, "bring", noted)
        llm.decode(batch, [3])
        layers = llm.spec.num_layers
    assert seen == [(layer, sorted({layer, (layer + 1) % layers})) for layer in range(layers)]


def test_a_forgotten_wait_shows(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", **on_disk(tmp_path, 0.5)) as llm:
        batch = llm.new_batch([420])
        llm.prefill(batch, [random_tokens(90, 400, seed=1)])
        assert llm.decode(batch, [3]).isfinite().all()
        forgotten = forget(monkeypatch, lambda targets, direction: direction == "h2d" and len(targets) == 2)
        assert llm.decode(batch, [3]).isnan().any() and forgotten


def test_a_file_that_cannot_be_read(zoo: ModelZoo, tmp_path: Path) -> None:
    with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", **on_disk(tmp_path, 0.5)) as llm:
        batch = llm.new_batch([420])
        llm.prefill(batch, [random_tokens(90, 400, seed=1)])
        (path,) = (tmp_path / "files").iterdir()
        with open(path, "r+b") as file:
            file.truncate(4096)
        with pytest.raises(DiskError, match="the file ends at"):
            for _ in range(2):
                llm.decode(batch, [3])
    assert files(tmp_path) == []


def test_a_full_disk_is_refused_before_the_run(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: disk.RESERVE_BYTES + 10**6)
    with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", **on_disk(tmp_path, 0.5)) as llm:
        choice = build.choose_model(llm.config)
        admit(choice, llm.config, 400, 20, 2)
        with pytest.raises(DiskError, match=r"the KV cache's share on disk needs 0\.0. GB in .*files.*disk_dir"):
            admit(choice, llm.config, 900, 20, 20)
        with pytest.raises(DiskError, match="not enough disk space"):
            llm.new_batch([920] * 20)
    assert files(tmp_path) == []


@pytest.mark.parametrize("executor", ["aog", "aoc", "hybridgen"])
def test_a_run_with_a_share_on_each_tier(zoo: ModelZoo, tmp_path: Path, executor: str) -> None:
    """FlexGen's percentages; what comes of them is in the report."""
    report, seq, gen = tmp_path / "report.json", 700, 12
    flags = ["--model", str(zoo.directory("opt")), "--weights", "random", "--seq", str(seq), "--gen", str(gen)]
    flags += ["--strategy", executor, "--device", "cpu", "--set", "placement.kv_on_gpu=0.3", "--report", str(report)]
    if executor == "aog":
        flags += ["--set", "placement.kv_on_disk=0.5", "--set", f"placement.disk_dir={tmp_path / 'files'}"]
    assert run.main(flags) == 0
    found = json.loads(report.read_text())
    assert found["config"]["cache"]["gpu_window"] == math.floor(0.3 * (seq + gen)) - 4
    shares = found["placement"]["kv"]
    total = seq + gen - 1
    layers = 5
    resident = 0 if executor != "hybridgen" else 3
    host = prefill_host_length(seq, 4, found["config"]["cache"]["gpu_window"])
    there = host // 2 // 64 * 64 if executor == "aog" else 0
    tiers = {"gpu": total - host, "host": host - there, "disk": there}
    wanted = {tier: count * (layers - resident) / (total * layers) for tier, count in tiers.items()}
    wanted["gpu"] += resident / layers
    assert shares == pytest.approx(wanted)
    if not resident:
        assert 0 <= shares["gpu"] - 0.3 <= 64 / total
    assert files(tmp_path) == []


def test_what_does_not_go_together(zoo: ModelZoo) -> None:
    model = zoo.directory("opt")
    for strategy, path, value, says in (
        ("aoc", "placement__kv_on_disk", 0.5, r"kv_on_disk = 0\.5 with .*'on_cpu'.*allowed: 0; or .*'streamed'"),
        ("aog", "placement__kv_on_disk", 1.5, r"kv_on_disk = 1\.5 .*a fraction in \[0, 1\]"),
        ("full", "placement__kv_on_gpu", 0.5, r"kv_on_gpu = 0\.5 with .*'full'.*allowed: null"),
        ("aog", "placement__kv_on_gpu", 0.5, r"kv_on_gpu = 0\.5 and cache\.gpu_window = 16 .*give one"),
    ):
        with pytest.raises(ConfigError, match=says):
            engine(model, SETTINGS, strategy, **{path: value})
