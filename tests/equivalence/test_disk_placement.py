"""Weights over device, host and disk: not a bit of the logits changes, and memory is what the shares say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.errors import DiskError
from hybridgen.offload.disk import _OpenFile
from hybridgen.offload.transfer import LazyTransfer, Ticket
from tests.equivalence.against_engine import engine
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

SETTINGS = Settings(keep=0.3, window=16, exact_layers=(0,))
LENGTHS, STEPS = (60, 41, 33, 52), 3
# Shares of device and disk; the rest is the host's.
PLACEMENTS = [(0.0, 1.0), (0.0, 0.5), (0.3, 0.7), (0.3, 0.3), (0.6, 0.2), (0.8, 0.2)]
FAMILIES = ["opt", "llama-gqa2", "qwen2"]
KINDS = {"in place": {}, "random": {"model__weights": "random"}, "another dtype": {"model__dtype": "bfloat16"}}


def run(zoo: ModelZoo, name: str, **overrides: Any) -> tuple[list[Tensor], dict[str, float], dict[str, Any]]:
    """Logits of four prompts and decode steps; the realised shares; what was read."""
    vocab_size = zoo.dense(name).vocab_size
    with engine(zoo.directory(name), SETTINGS, **overrides) as llm:
        batch = llm.new_batch([length + STEPS for length in LENGTHS])
        found = [llm.prefill(batch, [random_tokens(vocab_size, length, seed=length) for length in LENGTHS])]
        for _ in range(STEPS):
            found.append(llm.decode(batch, found[-1].argmax(1)))
        return found, llm.placement["weights"], llm.disk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_grid_over_three_tiers(zoo: ModelZoo, name: str, kind: str, tmp_path: Path) -> None:
    overrides = KINDS[kind] | {"placement__disk_dir": str(tmp_path / "offload")}
    for micro_batch in (1, 2, 3, 4) if kind == "in place" else (2,):
        overrides["runtime__micro_batch"] = micro_batch
        expected, _, nothing = run(zoo, name, placement__weights_on_gpu=1.0, **overrides)
        assert nothing == {"bytes_read": 0, "bytes_per_s": None, "notes": []}
        for gpu, disk in PLACEMENTS:
            shares = {"placement__weights_on_gpu": gpu, "placement__weights_on_disk": disk}
            found, realised, read = run(zoo, name, **shares, **overrides)
            assert realised["disk"] > 0.05 and sum(realised.values()) == pytest.approx(1.0)
            assert (realised["host"] > 0.05) == (gpu + disk < 0.9) or gpu + disk == 1.0
            assert read["bytes_read"] > 0 and read["bytes_per_s"] > 0
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), (micro_batch, gpu, disk)
    files = list((tmp_path / "offload").glob("*"))
    assert len(files) == (0 if kind == "in place" else 1), "written once, or not at all"


@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
@pytest.mark.parametrize("nth", [1, 9, 20, 41, 55])
def test_a_read_that_fails_once(zoo: ModelZoo, nth: int, transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is lost; the next one gets the right weights, whichever slot was being filled."""
    shares = {"placement__weights_on_gpu": 0.3, "placement__weights_on_disk": 0.5, "runtime__transfer": transfer}
    prompts = [random_tokens(zoo.dense("llama-gqa2").vocab_size, 60, seed=1)]
    with engine(zoo.directory("llama-gqa2"), SETTINGS, placement__weights_on_gpu=1.0) as llm:
        expected = llm.generate(prompts, 4, ignore_eos=True).output_ids
    read, reads = _OpenFile.read, 0

    def flaky(self: Any, memory: memoryview, offset: int) -> int:
        nonlocal reads
        reads += 1
        if reads == nth:
            raise DiskError("once")
        return read(self, memory, offset)

    monkeypatch.setattr(_OpenFile, "read", flaky)
    with engine(zoo.directory("llama-gqa2"), SETTINGS, **shares) as llm:
        with pytest.raises(DiskError, match="once"):
            for _ in range(3):
                llm.generate(prompts, 4, ignore_eos=True)
        for _ in range(2):
            assert llm.generate(prompts, 4, ignore_eos=True).output_ids == expected


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
def test_depth_and_transfer(zoo: ModelZoo, transfer: str, depth: int) -> None:
    """More slots than layers, too: then nothing is read again."""
    overrides = {"placement__prefetch_depth": depth, "runtime__transfer": transfer}
    expected, _, _ = run(zoo, "llama-gqa2", placement__weights_on_gpu=1.0, **overrides)
    placed = {"placement__weights_on_gpu": 0.2, "placement__weights_on_disk": 0.5}
    found, _, read = run(zoo, "llama-gqa2", **placed, **overrides)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    once, _, read_9 = run(zoo, "llama-gqa2", **placed, **overrides | {"placement__prefetch_depth": 9})
    assert read["bytes_read"] == read_9["bytes_read"] if depth == 9 else read["bytes_read"] > 2 * read_9["bytes_read"]
    assert torch.equal(once[-1], expected[-1])


@pytest.mark.parametrize("forgotten", [0, 3, 7, 11, 17])
def test_a_forgotten_copy_is_caught(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, forgotten: int) -> None:
    """Of any one copy out of a buffer or from the host."""
    bring, copies = LazyTransfer.bring, 0

    def careless(self: LazyTransfer, *args: Any) -> Ticket:
        nonlocal copies
        ticket, copies = bring(self, *args), copies + 1
        return Ticket() if copies == forgotten else ticket

    with monkeypatch.context() as patch:
        patch.setattr(LazyTransfer, "bring", careless)
        placed = {"placement__weights_on_gpu": 0.2, "placement__weights_on_disk": 0.5}
        found, _, _ = run(zoo, "llama-gqa2", **placed)
    assert copies > 17
    assert bool(found[0].isnan().any()) == (forgotten > 0)
