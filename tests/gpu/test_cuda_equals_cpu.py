"""On CUDA the same tokens as on the CPU: float32 with TF32 off, every family, both lookahead modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from tests.equivalence.fitted_maps import write_maps
from tests.equivalence.tiny_models import TINY_MODELS, save_tiny_model

PROMPT_LENGTHS = (230, 97, 180)
STEPS = 40
POOL = {"cache.sketch": "partial", "cache.partial_ratio": 0.5, "cache.pool_capacity": 0.5}


def generate(model: Path, device: str, **overrides: object) -> list[list[int]]:
    settings = {
        "runtime.device": device,
        "model.dtype": "float32",
        "cache.gpu_window": 64,
        "model.exact_layers": [0],
        "selection.min_keep": 8,
        **overrides,
    }
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    with LLM(str(model), settings) as llm:
        return llm.generate(prompts, STEPS, ignore_eos=True).output_ids


@pytest.mark.parametrize("exact_mode", ["resident", "select"])
@pytest.mark.parametrize("lookahead", ["select", "off"])
@pytest.mark.parametrize("keep", [{"selection.keep": 1.0}, {"selection.keep": 0.2}, {"selection.keep_mass": 0.9}])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_greedy_tokens(
    name: str, keep: dict[str, object], lookahead: str, exact_mode: str, directory: Path
) -> None:
    model = save_tiny_model(name, directory)
    overrides = {"attention.lookahead": lookahead, "model.exact_layers_mode": exact_mode, **keep}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("sketch", ["int2", "int4"])
@pytest.mark.parametrize("keys", ["fp32", "int8"])
@pytest.mark.parametrize("home", ["host", "gpu"])
@pytest.mark.parametrize("name", ["llama-gqa3", "opt"])
def test_greedy_tokens_with_a_sketch(name: str, home: str, keys: str, sketch: str, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    overrides = {
        "selection.keep": 0.2, "cache.key_type": keys, "cache.sketch": sketch, "cache.sketch_home": home,
    }  # fmt: skip
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("lookahead", ["select", "off"])
@pytest.mark.parametrize(
    "scores",
    [
        {"cache.sketch": "partial", "cache.partial_ratio": 0.5, "selection.alpha": 4.0, "selection.keep": 0.4},
        {"cache.sketch": "partial", "cache.partial_ratio": 0.3, "selection.keep": 0.2},
        {**POOL, "selection.alpha": 4.0, "selection.keep": 0.4, "cache.pool_policy": "counter"},
        {**POOL, "selection.keep": 0.2, "cache.pool_policy": "lru"},
        {"cache.sketch": "pages", "selection.keep": 0.2},
        {"cache.sketch": "pages", "selection.keep": 0.2, "cache.key_type": "int8"},
    ],
    ids=["alpha", "partial", "pool, counter", "pool, lru", "pages", "int8 pages"],
)
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_greedy_tokens_by_partial_keys_and_pages(
    name: str, scores: dict[str, object], lookahead: str, directory: Path
) -> None:
    model = save_tiny_model(name, directory)
    overrides = {"attention.lookahead": lookahead, **scores}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("lookahead", ["select", "logits"])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("name", ["llama-gqa3", "opt"])
def test_greedy_tokens_by_fitted_maps(name: str, share: float, lookahead: str, directory: Path) -> None:
    model, maps = save_tiny_model(name, directory), directory / "maps.safetensors"
    write_maps(model, maps)
    overrides: dict[str, object] = {"selection.keep": 0.2, "attention.lookahead": lookahead}
    overrides |= {"attention.predictor": str(maps), "placement.weights_on_gpu": share}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("lookahead", ["select", "logits"])
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("name", ["llama-gqa3", "opt"])
def test_greedy_tokens_by_maps_of_the_prompt(name: str, share: float, lookahead: str, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    overrides: dict[str, object] = {"selection.keep": 0.2, "attention.lookahead": lookahead}
    overrides |= {"attention.predictor": "prompt", "placement.weights_on_gpu": share}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"cache.key_type": "int8"},
        {"cache.sketch": "int2", "cache.sketch_home": "host"},
        {"cache.sketch": "int2", "cache.sketch_home": "gpu"},
        {"attention.lookahead": "logits"},
        {"attention.predictor": "delta", "runtime.micro_batch": 2},
        {"attention.predictor": "prompt"},
        {"placement.weights_on_gpu": 0.3, "runtime.cuda_graphs": False},
    ],
    ids=["select", "int8", "host int2", "gpu int2", "logits", "delta, micro-batches", "prompt", "streamed weights"],
)
@pytest.mark.parametrize("keep", [1.0, 0.2])
@pytest.mark.parametrize("name", ["llama-gqa2", "opt"])
def test_greedy_tokens_two_layers_ahead(name: str, keep: float, way: dict[str, object], directory: Path) -> None:
    model = save_tiny_model(name, directory)
    overrides = {"selection.keep": keep, "attention.lookahead_layers": 2, **way}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("keep", [1.0, 0.2])
@pytest.mark.parametrize("lookahead", ["select", "off"])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_greedy_tokens_call_by_call(name: str, lookahead: str, keep: float, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    overrides = {"selection.keep": keep, "attention.lookahead": lookahead}
    assert generate(model, "cuda", **overrides, **{"runtime.cuda_graphs": False}) == generate(model, "cpu", **overrides)


def test_micro_batches_and_prefill_pieces(directory: Path) -> None:
    model = save_tiny_model(sorted(TINY_MODELS)[0], directory)
    overrides = {"selection.keep": 0.2, "runtime.micro_batch": 2, "runtime.prefill_chunk": 50}
    assert generate(model, "cuda", **overrides) == generate(model, "cpu", **overrides)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_decode_allocates_no_device_memory(share: float, directory: Path) -> None:
    """After a few steps the caching allocator asks the driver for nothing more, streamed weights or not."""
    settings = {
        "runtime.device": "cuda", "cache.gpu_window": 64, "selection.keep": 0.2, "placement.weights_on_gpu": share,
    }  # fmt: skip
    with LLM(str(save_tiny_model("llama-mha", directory)), settings) as llm:
        batch = llm.new_batch([400])
        token = llm.prefill(batch, [list(range(90)) * 3]).argmax(-1)

        def step() -> None:
            nonlocal token
            token = llm.decode(batch, token).argmax(-1)
            token.tolist()  # as every loop does: else the host is steps ahead, by more memory the busier the GPU is

        for _ in range(8):
            step()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(60):
            step()
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
