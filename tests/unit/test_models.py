"""Families against transformers on tiny random models, and the shapes of all aliases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.errors import HybridGenError
from hybridgen.models import FAMILIES, family_of, spec_of
from hybridgen.models.checkpoint import aliases, locate
from hybridgen.models.loading import random_weights, weight_bytes
from hybridgen.models.opt import OPTModel
from hybridgen.models.spec import ModelSpec
from hybridgen.types import Positions
from tests.equivalence.tiny_models import TINY_MODELS, load_hf, random_tokens, save_tiny_model

CPU = torch.device("cpu")
# A prompt, and tokens to generate: the device window of 40 and sinks leave most of the prompt to the host.
PROMPT, STEPS = 230, 12


@pytest.fixture(scope="module", params=TINY_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp("models"))


def engine(directory: Path, **values: object) -> LLM:
    given = {"cache.gpu_window": 40, "runtime.worker_threads": 1, "selection.keep": 1.0, "selection.keep_mass": None}
    given |= {path.replace("__", "."): value for path, value in values.items()}
    return LLM(str(directory), overrides={**given, "model.dtype": "float32", "runtime.device": "cpu"})


@pytest.mark.parametrize("chunk", [0, 50])
def test_prefill_logits(directory: Path, chunk: int) -> None:
    """Of a ragged batch, in one piece and in several; two more turns through the same cache."""
    hf = load_hf(directory)
    prompts = [random_tokens(hf.config.vocab_size, length, seed=length) for length in (PROMPT, 1, 131)]
    with engine(directory, runtime__prefill_chunk=chunk) as llm, torch.inference_mode():
        batch = llm.new_batch([len(prompt) for prompt in prompts])
        found = llm.prefill(batch, prompts)
        expected = torch.stack([hf(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-4)

        turns = llm.new_batch([PROMPT])
        for start, end in ((0, 150), (150, 151), (151, PROMPT)):
            last = llm.prefill(turns, [prompts[0][start:end]])
        torch.testing.assert_close(last[0], expected[0], rtol=0, atol=3e-4)


def test_greedy_tokens(directory: Path) -> None:
    """With every host token kept, decoding is transformers' own, select and off alike."""
    hf = load_hf(directory)
    prompt = random_tokens(hf.config.vocab_size, PROMPT, seed=5)
    with torch.inference_mode():
        expected = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
            max_new_tokens=STEPS,
            do_sample=False,
        )[0, PROMPT:].tolist()
    assert len(expected) == STEPS
    for lookahead in ("select", "off"):
        with engine(directory, attention__lookahead=lookahead) as llm:
            assert llm.generate([prompt], STEPS).output_ids == [expected]


def test_the_query_alone_is_that_of_qkv(directory: Path) -> None:
    """`query` predicts the next layer's query: it must be the very same function."""
    with engine(directory) as llm:
        x = torch.randn(7, llm.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        positions = llm.model.positions(torch.tensor([0, 1, 5, 9, 100, 500, 900]))
        for layer, weights in enumerate(llm.weights.tensors.layers):
            query, key, value = llm.model.qkv(layer, weights, x, positions)
            at = llm.spec.layers[layer]
            assert query.shape == (7, at.num_heads, at.head_dim)
            assert key.shape == value.shape == (7, at.num_kv_heads, at.head_dim)
            torch.testing.assert_close(llm.model.query(layer, weights, x, positions), query, rtol=1e-5, atol=1e-5)


# Aliases

PARAMETERS = {  # of the published models, in millions
    "opt-1.3b": 1315.8,
    "opt-2.7b": 2651.6,
    "opt-6.7b": 6658.5,
    "opt-13b": 12853.0,
    "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
    "llama-3.1-8b": 8030.3,
    "smollm2-135m": 134.5,
    "qwen2.5-0.5b": 494.0,
    "qwen2.5-1.5b": 1543.7,
    "qwen2.5-3b": 3085.9,
    "qwen2.5-7b": 7615.6,
    "qwen2.5-14b": 14770.0,
}
# layers, query heads, KV heads, head dim, positions
SHAPES = {
    "opt-1.3b": (24, 32, 32, 64, 2048),
    "opt-2.7b": (32, 32, 32, 80, 2048),
    "opt-6.7b": (32, 32, 32, 128, 2048),
    "opt-13b": (40, 40, 40, 128, 2048),
    "llama-3.2-1b": (16, 32, 8, 64, 131072),
    "llama-3.2-3b": (28, 24, 8, 128, 131072),
    "llama-3.1-8b": (32, 32, 8, 128, 131072),
    "smollm2-135m": (30, 9, 3, 64, 8192),
    "qwen2.5-0.5b": (24, 14, 2, 64, 32768),
    "qwen2.5-1.5b": (28, 12, 2, 128, 131072),
    "qwen2.5-3b": (36, 16, 2, 128, 32768),
    "qwen2.5-7b": (28, 28, 4, 128, 131072),
    "qwen2.5-14b": (48, 40, 8, 128, 131072),
}


def alias_spec(alias: str) -> ModelSpec:
    return spec_of(alias, aliases()[alias]["config"])


def test_these_are_all_aliases() -> None:
    assert set(aliases()) == set(PARAMETERS) == set(SHAPES)


@pytest.mark.parametrize("alias", PARAMETERS)
def test_an_alias_has_the_published_shape(alias: str) -> None:
    spec = alias_spec(alias)
    family = family_of(alias, aliases()[alias]["config"])
    count = weight_bytes(family, spec, torch.bfloat16) / 2
    assert count == pytest.approx(1e6 * PARAMETERS[alias], rel=1e-3)
    assert weight_bytes(family, spec, torch.float32) == 4 * count
    layers, heads, kv_heads, head_dim, positions = SHAPES[alias]
    assert spec.num_layers == layers and spec.max_positions == positions
    assert {(at.num_heads, at.num_kv_heads, at.head_dim) for at in spec.layers} == {(heads, kv_heads, head_dim)}
    assert spec.torch_dtype in ("float16", "bfloat16")
    assert spec.qkv_bias == (not alias.startswith(("llama", "smollm2")))
    assert spec.tie_word_embeddings == (alias not in ("llama-3.1-8b", "qwen2.5-7b", "qwen2.5-14b"))
    rope = spec.layers[0].rope
    assert (rope is None) == alias.startswith("opt")
    assert (rope is not None and rope.scaling is not None) == alias.startswith("llama")


def test_rope_of_the_llamas() -> None:
    for alias, factor in (("llama-3.1-8b", 8.0), ("llama-3.2-1b", 32.0), ("llama-3.2-3b", 32.0)):
        rope = alias_spec(alias).layers[0].rope
        assert rope is not None and rope.theta == 500_000.0 and rope.scaling is not None
        assert rope.scaling.factor == factor
        assert (rope.scaling.low_freq_factor, rope.scaling.high_freq_factor) == (1.0, 4.0)
        assert rope.scaling.original_max_positions == 8192


def test_gated_aliases_are_the_llamas() -> None:
    gated = {alias for alias, entry in aliases().items() if entry["gated"]}
    assert gated == {"llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"}
    assert locate("llama-3.2-1b").gated or not locate("llama-3.2-1b").needs_download


@pytest.mark.parametrize("model", TINY_MODELS)
def test_random_weights_have_the_planned_bytes(model: str, tmp_path: Path) -> None:
    location = locate(str(save_tiny_model(model, tmp_path)))
    assert location.config is not None
    family, spec = family_of(model, location.config), spec_of(model, location.config)
    for dtype in (torch.float32, torch.bfloat16):
        made = random_weights(family, spec, CPU, dtype, seed=3)
        tensors = {**made.shared, **{f"{i}.{n}": t for i, w in enumerate(made.layers) for n, t in w.items()}}
        assert sum(tensor.nbytes for tensor in tensors.values()) == weight_bytes(family, spec, dtype)
        for name, tensor in tensors.items():
            assert tensor.dtype == dtype
            if name.endswith("bias"):
                assert (tensor == 0).all()
            elif "norm" in name:
                assert (tensor == 1).all()
            else:
                assert float(tensor.float().std()) == pytest.approx(0.02, rel=0.1)


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(HybridGenError) as error:
        family_of("m", {"architectures": ["GPT2LMHeadModel"]})
    assert all(name in str(error.value) for name in ("'GPT2LMHeadModel'", "model m", *FAMILIES))


# OPT beyond its positions


def test_interpolated_positions(tmp_path: Path) -> None:
    """Twice as many tokens: every second one has its old row, those between the mean of two."""
    with engine(save_tiny_model("opt", tmp_path)) as llm:
        model = llm.model
        assert isinstance(model, OPTModel)
        limit = llm.spec.max_positions
        tokens = torch.zeros(9, dtype=torch.int64)
        index = torch.tensor([0, 1, 2, 3, 4, 500, 501, 502, limit - 1])
        before = model.embed(tokens, Positions(index))
        model.extend_positions(2 * limit)
        after = model.embed(tokens, Positions(2 * index))
        torch.testing.assert_close(after, before)
        between = model.embed(tokens[:3], Positions(torch.tensor([1, 3, 1001])))
        expected = (before[[0, 1, 5]] + before[[1, 2, 6]]) / 2
        torch.testing.assert_close(between, expected)
        model.embed(tokens[:1], Positions(torch.tensor([2 * limit - 1])))  # the last one has a row, too
        model.extend_positions(limit // 2)  # a shorter batch does not move the rows of the longer one
        torch.testing.assert_close(model.embed(tokens, Positions(2 * index)), before)


def test_decode_checks_before_it_changes_anything(tmp_path: Path) -> None:
    """A full sequence, or too few tokens, leaves the batch as it was."""
    with engine(save_tiny_model("opt", tmp_path)) as llm:
        batch = llm.new_batch([4, 8])
        llm.prefill(batch, [[1, 2, 3], [1, 2, 3]])
        with pytest.raises(ValueError, match="one a sequence"):
            llm.decode(batch, [1])
        llm.decode(batch, [1, 1])
        with pytest.raises(ValueError, match="sequence 0 has reached its capacity of 4"):
            llm.decode(batch, [1, 1])
        assert batch.lengths == [4, 4] and len(batch.plans) == 1
