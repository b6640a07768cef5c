"""On CUDA the same tokens wherever the weights lie, and the memory that the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.config import Setting, build_config
from hybridgen.engine import build, memory_plan
from hybridgen.engine.llm import LLM
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import DenseSimulation
from tests.equivalence.test_compressed_cache import BITS
from tests.equivalence.test_compressed_weights import MIXED, SETTINGS, decoded_model, placed
from tests.equivalence.tiny_models import TINY_MODELS, random_tokens, save_tiny_model

STEPS = 12
SHARES = [0.0, 0.1, 0.37, 0.5, 0.9, 1.0]
CUDA: dict[str, Any] = {"runtime__device": "cuda", "runtime__transfer": "auto", "runtime__worker_threads": "auto"}


def generate(model: str, share: float, dtype: str, **overrides: object) -> list[list[int]]:
    settings = {
        "runtime.device": "cuda",
        "model.dtype": dtype,
        "cache.gpu_window": 64,
        "model.exact_layers": [0],
        "selection.keep": 0.2,
        "selection.min_keep": 8,
        "placement.weights_on_gpu": share,
        **overrides,
    }
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in (230, 97, 180)]
    with LLM(model, settings) as llm:
        first = llm.generate(prompts, STEPS, ignore_eos=True).output_ids
        assert llm.generate(prompts, STEPS, ignore_eos=True).output_ids == first
        assert (llm.weights_on_gpu < 1) == (share < 1)
        return first


@pytest.mark.parametrize(("dtype", "depth"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_tokens_do_not_depend_on_the_share(name: str, dtype: str, depth: int, directory: Path) -> None:
    model = str(save_tiny_model(name, directory))
    expected = generate(model, 1.0, dtype)
    for share in SHARES[:-1]:
        assert generate(model, share, dtype, **{"placement.prefetch_depth": depth}) == expected, share


@pytest.mark.parametrize("lookahead", ["select", "logits", "off"])
def test_micro_batches_pieces_and_lookahead(lookahead: str, directory: Path) -> None:
    model = str(save_tiny_model("llama-gqa2", directory))
    overrides = {"attention.lookahead": lookahead, "runtime.micro_batch": 2, "runtime.prefill_chunk": 50}
    expected = generate(model, 1.0, "float32", **overrides)
    for share in SHARES[:-1]:
        assert generate(model, share, "float32", **overrides) == expected, share


PLACEMENTS = [(0.0, 1.0), (0.0, 0.5), (0.3, 0.7), (0.3, 0.3), (0.6, 0.2), (0.8, 0.2)]


@pytest.mark.parametrize("kind", ["real", "random"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "qwen2"])
def test_a_grid_over_three_tiers(name: str, kind: str, directory: Path, tmp_path: Path) -> None:
    """In place (real, as float32), or written once by this process (random): the values depend on the device."""
    model = str(save_tiny_model(name, directory))
    for micro_batch in (1, 2, 3):
        overrides = {
            "model.weights": kind,
            "runtime.micro_batch": micro_batch,
            "placement.disk_dir": str(tmp_path),
        }
        expected = generate(model, 1.0, "float32", **overrides)
        for share, disk in PLACEMENTS:
            placed = overrides | {"placement.weights_on_disk": disk}
            assert generate(model, share, "float32", **placed) == expected, (micro_batch, share, disk)
    assert len(list(tmp_path.iterdir())) == (kind == "random")


@pytest.mark.parametrize("compress", ["int4", "int8"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "qwen2"])
def test_packed_matrices_equal_dense_attention(name: str, compress: str, directory: Path, tmp_path: Path) -> None:
    """With the numbers that the bytes in all three tiers stand for, as tests/equivalence/test_compressed_weights.py."""
    model = save_tiny_model(name, directory)
    with engine(model, SETTINGS, **placed(MIXED, compress, tmp_path), **CUDA) as llm:
        dense = decoded_model(llm, model, BITS[compress])
        simulated = DenseSimulation(dense, SETTINGS)
        batch, prompt = llm.new_batch([170]), random_tokens(dense.vocab_size, 150, seed=1)
        ours, wanted = llm.prefill(batch, [prompt]), simulated.prefill(prompt)
        assert (ours[0].double().cpu() - wanted).abs().max() < LOGITS_TOLERANCE
        for token in range(3, 18):
            ours, wanted = llm.decode(batch, [token]), simulated.decode(token).logits
            assert (ours[0].double().cpu() - wanted).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["real", "random"])
def test_packed_tokens_do_not_depend_on_the_tiers(kind: str, dtype: str, directory: Path, tmp_path: Path) -> None:
    model = str(save_tiny_model("llama-gqa2", directory))
    for depth, micro_batch, compress in ((1, 1, "int4"), (2, 2, "int8")):
        overrides = {
            "model.weights": kind,
            "runtime.micro_batch": micro_batch,
            "placement.prefetch_depth": depth,
            "placement.compress_weights": compress,
            "placement.disk_dir": str(tmp_path),
        }
        expected = generate(model, 1.0, dtype, **overrides)
        for share, disk in [(0.0, 0.0), (0.37, 0.0), *PLACEMENTS]:
            found = generate(model, share, dtype, **overrides, **{"placement.weights_on_disk": disk})
            assert found == expected, (compress, share, disk)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("compress", ["none", "int4"])
def test_matrices_large_enough_to_be_under_way_when_they_are_wanted(compress: str, tmp_path: Path) -> None:
    """OPT-1.3B, random weights: a layer's copies take longer than the layer itself, so a missing wait would show.

    From disk, too (2.4 GB are written), by way of buffers that are read into again as soon as they are copied.
    """

    def run(share: float, disk: float = 0.0) -> tuple[list[torch.Tensor], int]:
        given = {
            "placement.weights_on_disk": disk,
            "placement.compress_weights": compress,
            "placement.disk_dir": str(tmp_path),
            "model.name": "opt-1.3b",
            "model.weights": "random",
            "runtime.device": "cuda",
            "model.dtype": "float16",
            "selection.keep": 0.1,
            "selection.keep_mass": None,
            "placement.weights_on_gpu": share,
        }
        config = build_config({path: Setting(value, "the test") for path, value in given.items()})
        choice = build.choose_model(config)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        weights = build.obtain_weights(choice, config, needs_text=False)
        loading = torch.cuda.max_memory_allocated() - before
        with LLM.from_parts(config, choice, weights) as llm:
            batch = llm.new_batch([1600])
            logits = [llm.prefill(batch, [[7 + i % 900 for i in range(1500)]])]
            for _ in range(12):
                logits.append(llm.decode(batch, logits[-1].argmax(-1)))
            planned = memory_plan.plan_memory(choice, config, llm.modes, 1, 1600)
            beside = 2**26 if compress == "none" else 2**28  # a block of random numbers; what packing takes
            assert loading <= planned.device["weights"] + beside
            assert (llm.placement["weights"]["disk"] > 0) == (disk > 0)
            return [some.cpu() for some in logits], loading

    expected, whole = run(1.0)
    for share, disk in ((0.0, 0.0), (0.3, 0.0), (0.8, 0.0), (0.0, 1.0), (0.3, 0.4), (0.8, 0.2)):
        found, part = run(share, disk)
        assert part < (0.35 + 0.65 * share + 0.1) * whole or compress != "none"
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), share
