"""What attends to everything on CUDA: `aog` and `aoc`, and the others where nothing is left out.

The tokens of full attention, the bytes of the formulas, no allocations.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.offload.host_memory import HostSlab
from hybridgen.offload.transfer import make_transfer
from hybridgen.telemetry import Telemetry
from tests.equivalence.tiny_models import TINY_MODELS, save_tiny_model

PROMPT_LENGTHS = (230, 12, 180)
STEPS = 70  # every layer ages a block of the longer two
EVERYTHING = {"eviction.recent": 1000}
ROOM_FOR_ALL: dict[str, dict[str, object]] = {
    "h2o": {"strategy": "h2o", "eviction.heavy": 1000, "eviction.recent": 1},
    "h2o, host": {"strategy": "h2o", "eviction.heavy": 1000, "eviction.recent": 1, "eviction.home": "host"},
    "keyformer": {"strategy": "keyformer", "eviction.heavy": 1000, "eviction.recent": 1},
    "snapkv": {"strategy": "snapkv", "eviction.heavy": 1000},
    "streaming-llm": {"strategy": "streaming-llm", **EVERYTHING},
    "streaming-llm-original": {"strategy": "streaming-llm-original", **EVERYTHING},
    "infinigen": {"strategy": "infinigen", "selection.alpha": 1e9, "selection.keep": 1.0, "cache.partial_ratio": 0.5},
    "quest": {"strategy": "quest", "selection.keep": 1.0},
    "hybridgen, true query": {"strategy": "hybridgen", "attention.lookahead": "off", "selection.keep": 1.0},
}


def generate(model: Path, strategy: str, device: str = "cuda", **overrides: object) -> list[list[int]]:
    settings = {"runtime.device": device, "model.dtype": "float32", "cache.gpu_window": 32, **overrides}
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    with LLM(str(model), settings, strategy) as llm:
        return llm.generate(prompts, STEPS, ignore_eos=True).output_ids


@pytest.mark.parametrize("strategy", ["aog", "aoc"])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_tokens_of_full_attention(name: str, strategy: str, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    assert generate(model, strategy) == generate(model, "full", "cpu")


@pytest.mark.parametrize("overrides", ROOM_FOR_ALL.values(), ids=ROOM_FOR_ALL)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_tokens_of_full_attention_with_room_for_all(name: str, overrides: dict[str, object], directory: Path) -> None:
    """algorithms.md, 9: the oracles of the other methods."""
    model, settings = save_tiny_model(name, directory), dict(overrides)
    strategy = str(settings.pop("strategy"))
    assert generate(model, strategy, **settings) == generate(model, "full", "cpu")


@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_tokens_of_full_attention_by_torch(strategy: str, directory: Path) -> None:
    model = save_tiny_model("llama-gqa3", directory)
    assert generate(model, strategy, **{"runtime.kernels": "torch"}) == generate(model, "full", "cpu")


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_micro_batches_and_streamed_weights(strategy: str, micro_batch: int, directory: Path) -> None:
    model = save_tiny_model("llama-gqa3", directory)
    overrides = {"runtime.micro_batch": micro_batch, "runtime.prefill_chunk": 50, "placement.weights_on_gpu": 0.3}
    assert generate(model, strategy, **overrides) == generate(model, "full", "cpu")


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_staggered_micro_batches(name: str, micro_batch: int, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    assert generate(model, "moe-lightning", **{"runtime.micro_batch": micro_batch}) == generate(model, "full", "cpu")


def test_int8_keys_for_the_cpu(directory: Path) -> None:
    model = save_tiny_model("llama-gqa2", directory)
    overrides = {"cache.key_type": "int8"}
    assert generate(model, "aoc", **overrides) == generate(model, "aoc", "cpu", **overrides)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_half_precision_is_near_full_attention(strategy: str, dtype: str, directory: Path) -> None:
    model = save_tiny_model("llama-gqa4", directory)
    logits = []
    for name in ("full", strategy):
        settings = {"runtime.device": "cuda", "model.dtype": dtype, "cache.gpu_window": 32}
        with LLM(str(model), settings, name) as llm:
            batch = llm.new_batch([300, 300])
            llm.prefill(batch, [list(range(90)) * 2, list(range(50))])
            logits.append(torch.stack([llm.decode(batch, [3 + step, 4]) for step in range(60)]))
    full, other = logits
    assert (full - other).abs().max() < 0.05 * full.abs().max()


@pytest.mark.parametrize("strategy", ["aog", "aoc"])
def test_bytes_and_no_device_allocations(strategy: str, directory: Path) -> None:
    """Two KV heads of 16 float32 in 6 layers; 192 and 128 host rows until a block ages."""
    settings = {"runtime.device": "cuda", "model.dtype": "float32", "cache.gpu_window": 64}
    with LLM(str(save_tiny_model("llama-gqa2", directory)), settings, strategy) as llm:
        batch = llm.new_batch([400, 400])
        tokens = llm.prefill(batch, [(list(range(90)) * 3)[:261], list(range(100)) * 2]).argmax(-1)
        llm.telemetry.begin_step()
        tokens = llm.decode(batch, tokens).argmax(-1)
        tokens.tolist()
        kv, heads = 6 * 2 * (192 + 128) * 2 * 16 * 4, 6 * 2 * 4
        moved = {"h2d": kv} if strategy == "aog" else {"cpu_read": kv, "d2h": heads * 16 * 4, "h2d": heads * 17 * 4}
        assert llm.telemetry.end_step().bytes_moved == moved
        for _ in range(8):
            tokens = llm.decode(batch, tokens).argmax(-1)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(100):
            tokens = llm.decode(batch, tokens).argmax(-1)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_in_use_are_streamed(dtype: torch.dtype) -> None:
    """Ragged, from a tier with room to spare, into slots of the longest; other rows stay as they are."""
    device = torch.device("cuda", 0)
    transfer = make_transfer("auto", device, Telemetry())
    shape = (3, 5, 640, 80)
    slab = HostSlab(2 * torch.Size(shape).numel() * dtype.itemsize + 8192, device)
    sources = [slab.take(shape, dtype) for _ in range(2)]
    for source in sources:
        source.tensor.normal_()
    lengths = [512, 0, 64]
    targets = [torch.full((3, 5, 512, 80), 7.0, dtype=dtype, device=device) for _ in range(2)]
    with transfer.beside(transfer.mark(), "h2d"):
        ticket = transfer.stream_rows(sources, lengths, targets)
    ticket.wait()
    for source, target in zip(sources, targets, strict=True):
        found = target.cpu()
        for b, length in enumerate(lengths):
            assert torch.equal(found[b, :, :length], source.tensor[b, :, :length])
            assert (found[b, :, length:] == 7).all()
    assert transfer.telemetry.bytes_moved["h2d"] == 2 * 576 * 5 * 80 * dtype.itemsize
