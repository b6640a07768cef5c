"""Pieces that are replayed as CUDA graphs do what they do call by call, and are captured again when that is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.offload.pieces import CudaRecorder
from tests.equivalence.tiny_models import save_tiny_model

PROMPTS = [list(range(90)) * 3, list(range(80)), list(range(60)) * 4]
STEPS = 140  # two blocks of each sequence age


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each capture."""
    made: list[int] = []
    capture = CudaRecorder.capture

    def counted(self: CudaRecorder, work: Callable[[], object]) -> object:
        made.append(len(made))
        return capture(self, work)

    monkeypatch.setattr(CudaRecorder, "capture", counted)
    return made


def decode(llm: LLM) -> list[list[int]]:
    """Greedy ids of each step of a fresh request."""
    batch = llm.new_batch([len(prompt) + STEPS for prompt in PROMPTS])
    tokens = llm.prefill(batch, PROMPTS).argmax(-1)
    ids = []
    for _ in range(STEPS):
        tokens = llm.decode(batch, tokens).argmax(-1)
        ids.append(tokens.tolist())
    return ids


@pytest.mark.parametrize("sketch", [{}, {"cache.sketch": "int2", "cache.sketch_home": "gpu"}], ids=["host", "gpu"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa3"])
def test_replayed_and_call_by_call(
    name: str, sketch: dict[str, object], directory: Path, captures: list[int]
) -> None:
    settings = {
        "runtime.device": "cuda", "model.dtype": "float32", "cache.gpu_window": 64, "selection.keep": 0.2,
        "model.exact_layers": [0], "runtime.micro_batch": 2, **sketch,
    }  # fmt: skip
    with LLM(str(save_tiny_model(name, directory)), settings) as llm:
        with llm.call_by_call():
            expected = decode(llm)
        assert not captures
        assert decode(llm) == expected
        # Of a layer's pieces, five a micro-batch, each is captured once; choice and attention again as a sequence's
        # host tier grows, three times at most.
        layers, sequences = llm.spec.num_layers, len(PROMPTS)
        assert 2 * layers < len(captures) <= layers * (2 * 5 + sequences * 3 * 2) + 1


def test_a_second_request_allocates_nothing(directory: Path) -> None:
    settings = {"runtime.device": "cuda", "cache.gpu_window": 64, "selection.keep": 0.2}
    with LLM(str(save_tiny_model("llama-mha", directory)), settings) as llm:
        decode(llm)
        decode(llm)  # the first one's cache went when the second one's was there
        slabs, before = llm.host_memory["slabs_allocated"], torch.cuda.memory_stats()["num_device_alloc"]
        decode(llm)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        assert llm.host_memory["slabs_allocated"] == slabs
