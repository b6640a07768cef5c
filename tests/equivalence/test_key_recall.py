"""Which layers' keys are quantised: synthetic outliers, a random Qwen2 with and without large key biases, SmolLM2."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridgen import run
from hybridgen.engine.report import _key_types
from hybridgen.kv_cache.host_keys import KeyStorage
from hybridgen.kv_cache.recall import adequate_storage
from hybridgen.models.checkpoint import locate
from tests.equivalence.against_engine import engine
from tests.equivalence.dense_keys import KeyStorage as OracleStorage
from tests.equivalence.dense_keys import StoredKeys, recall
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.tiny_models import NO_TOKENS, ROTATING, random_tokens
from tests.equivalence.zoo import ModelZoo

Kind = Literal["int8", "int2"]
Outliers = Literal["none", "constant", "random", "turning"]
KINDS: tuple[Kind, ...] = ("int8", "int2")
LEAST = {"int8": 0.95, "int2": 0.7}
TOKENS = 1024


def found(kind: Kind, queries: Tensor, keys: Tensor) -> float:
    """Recall by the oracle. queries: [n, heads, d]; keys: [kv_heads, m, d]."""
    keys = keys.double()
    stored = StoredKeys(OracleStorage("int8") if kind == "int8" else OracleStorage("fp32", "int2"), keys.mean(1))
    stored.add(keys)
    return recall(queries.double().transpose(0, 1), keys, stored.rows if kind == "int8" else stored.sketched())


def queries_and_keys(outliers: Outliers, asked_of: bool) -> tuple[Tensor, Tensor]:
    """Normal ones, but for three channels of a hundred times the size; asked_of: whether queries look at them."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(64, 4, 64, generator=generator)
    keys = torch.randn(2, TOKENS, 64, generator=generator)
    three = [3, 17, 40]
    if outliers == "constant":
        keys[..., three] += 100
    elif outliers == "random":
        keys[..., three] *= 100
    elif outliers == "turning":
        keys[..., three] += 100 * torch.sin(torch.arange(TOKENS)[:, None] / torch.tensor([3.0, 9.0, 40.0]))
    if not asked_of:
        queries[..., three] = 0
    return queries, keys


@pytest.mark.parametrize("asked_of", [True, False])
@pytest.mark.parametrize("outliers", ["constant", "random", "turning"])
@pytest.mark.parametrize("kind", KINDS)
def test_outliers_are_found_or_the_layer_falls_back(kind: Kind, outliers: Outliers, asked_of: bool) -> None:
    """int8 has one scale for all channels: outliers that nothing is asked of leave the others no codes."""
    queries, keys = queries_and_keys(outliers, asked_of)
    asked = KeyStorage(torch.int8) if kind == "int8" else KeyStorage(torch.float16, 2)
    kept, notes = adequate_storage(asked, torch.float16, queries, keys)
    share = found(kind, queries, keys)
    assert (share < LEAST[kind]) == (kind == "int8" and outliers != "constant" and not asked_of), share
    if share >= LEAST[kind]:
        assert (kept, notes) == (asked, [])
    else:
        assert kept == KeyStorage(torch.float16)
        assert [f"no {kind} keys" in note and f"{share:.2f}" in note for note in notes] == [True]


def test_two_bits_find_three_quarters_of_what_has_no_structure() -> None:
    """Why no more is asked of int2: the best four levels for a normal number are off by a third of its size."""
    assert 0.75 < found("int2", *queries_and_keys("none", asked_of=True)) < 0.8


def test_two_bits_find_more_of_what_turns() -> None:
    assert found("int2", *queries_and_keys("turning", asked_of=True)) > 0.8


# Models


Biases = Literal["none", "few", "all", "first and last"]
LAYERS = 6


def random_qwen2(biases: Biases, directory: Path) -> Path:
    """With key biases of 30 on some channels or on all, or in size and place like Qwen2.5-7B's."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            **NO_TOKENS,
        )
    )
    generator = torch.Generator().manual_seed(1)
    for number, layer in enumerate(model.model.layers):
        noise = torch.randn(128, generator=generator)
        some = noise * (torch.rand(128, generator=generator) < 0.05)
        largest = number in (1, LAYERS - 1)  # layer 0 has no host tier
        layer.self_attn.k_proj.bias.data = {
            "none": torch.zeros(128),
            "few": 30 * some,
            "all": 30 * noise,
            "first and last": 700 * some / some.norm() if largest else 22 * noise / noise.norm(),
        }[biases]
    model.save_pretrained(directory)
    return directory


def quantised(directory: Path, kind: Kind, caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Of each layer but the first, which lies on the device; that log and report say the same is checked here."""
    settings = Settings(
        window=16,
        exact_layers=(),
        key_type="int8" if kind == "int8" else "fp32",
        sketch="none" if kind == "int8" else kind,
    )
    with engine(directory, settings) as llm, caplog.at_level(logging.WARNING):
        batch = llm.new_batch([700])
        llm.prefill(batch, [random_tokens(llm.spec.vocab_size, 700, seed=5)])
        layers, reported = batch.micro_batches[0].layers[1:], _key_types(batch)
    fallen = [index for index, layer in enumerate(layers, 1) if layer.key_kind != settings.keys_as.kind]
    assert [index for index, name in reported.items() if name == "float32"] == [str(index) for index in fallen]
    lines = [record.getMessage() for record in caplog.records if "keys: they find" in record.getMessage()]
    assert len(lines) == len(fallen)
    for index, line in zip(fallen, lines, strict=True):
        assert line.startswith(f"layer {index} keeps float32: no {kind} keys")
    return [index not in fallen for index in range(1, len(layers) + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_without_biases(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert all(quantised(random_qwen2("none", tmp_path / "qwen2"), kind, caplog))


@pytest.mark.parametrize("biases", ["few", "all", "first and last"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_two_layers_with_biases(
    kind: Kind, biases: Biases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert quantised(random_qwen2(biases, tmp_path / "qwen2"), kind, caplog).count(False) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_biases_that_no_query_looks_at(kind: Kind, zoo: ModelZoo, caplog: pytest.LogCaptureFixture) -> None:
    expected = [False, True, False, True] if kind == "int8" else [True] * 4
    assert quantised(zoo.directory(ROTATING.name), kind, caplog) == expected


@pytest.mark.slow
def test_every_layer_of_smollm2(tmp_path: Path, shared_data: Path) -> None:
    if locate("smollm2-135m").needs_download:
        pytest.skip("SmolLM2 is not on this machine")
    prompt, report = tmp_path / "prompt.txt", tmp_path / "report.json"
    prompt.write_text((shared_data / "emma.txt").read_text()[20_000:34_000])
    flags = ["--device", "cpu", "--dtype", "float32", "--prompt-file", str(prompt), "--seq", "2k", "--gen", "2"]
    keys = ["--key-type", "int8", "--sketch", "int2", "--set", "model.exact_layers=[]"]
    assert run.main([*flags, *keys, "--report", str(report)]) == 0
    reported = json.loads(report.read_text())
    assert reported["prompt_tokens"] == [2048]
    assert reported["key_types"] == {str(layer): "int8+int2" for layer in range(1, 30)}
