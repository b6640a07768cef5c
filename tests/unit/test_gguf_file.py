"""GGUF files written here, of every type and family, come out as the Hugging Face model they stand for."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hybridgen.errors import CheckpointError
from hybridgen.models import gguf_file
from hybridgen.models.checkpoint import locate, open_checkpoint
from hybridgen.models.gguf_file import cache_root, convert, read_config
from hybridgen.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")
Types = gguf.GGMLQuantizationType

HEADS, KV_HEADS, HIDDEN, VOCAB = 4, 2, 256, 300
LAYER_NAMES = {  # Hugging Face to GGUF
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIAL = ["<|end|>", "<|start|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2, vocab_size=VOCAB)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, initializer_range=0.2)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})).eval()
    for name, p in model.named_parameters():  # else biases are 0 and norms 1
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5 if "norm" in name else -0.5, 1.5)
    return model


def qwen2(**changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(2)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=2, vocab_size=VOCAB)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, initializer_range=0.2)
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **changes})).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(p, -1, 1)
    return model


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"


def gguf_order(name: str, values: np.ndarray, arch: str) -> np.ndarray:
    """Rows as GGUF stores them: for Llama's Q and K, HF row i + half * j of a head goes to 2 i + j."""
    heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else None
    if arch != "llama" or heads is None:
        return values
    out = np.empty_like(values)
    dim = len(values) // heads
    for head in range(heads):
        for i in range(dim // 2):
            for j in range(2):
                out[head * dim + 2 * i + j] = values[head * dim + i + dim // 2 * j]
    return out


def byte_tokens() -> list[str]:
    """GPT-2's names of the 256 bytes, merges of "th" and "the", and padding up to the vocabulary's size."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    tokens = [names[b] for b in range(256)] + ["th", "the", *SPECIAL]
    return tokens + [f"unused{i}" for i in range(VOCAB - len(tokens))]


Model = namedtuple("Model", "file hf")


def write(file: Path, model: Any, arch: str = "llama", qtype: Any = Types.F32, **options: Any) -> Path:
    """The model as a GGUF file; matrices of `qtype`, the rest F32.

    Options: `metadata` (function of the writer), `raw` (bytes of a type numpy cannot quantise to),
    `extra` (more tensors), `pre`, `kind`, `add_bos`, `leave_out` (names).
    """
    writer = gguf.GGUFWriter(file, arch)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if options.get("kind", "gpt2"):
        writer.add_tokenizer_model(options.get("kind", "gpt2"))
        writer.add_tokenizer_pre(options.get("pre", "smollm"))
        tokens = byte_tokens()
        writer.add_token_list(tokens)
        writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
        writer.add_token_merges(["t h", "th e"])
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_bos_token_id(tokens.index("<|start|>"))
        if "add_bos" in options:
            writer.add_add_bos_token(options["add_bos"])
    options.get("metadata", lambda _: None)(writer)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name in options.get("leave_out", ()):
            continue
        values = gguf_order(name, tensor.float().numpy(), arch)
        if values.ndim == 1 or qtype == Types.F32:
            writer.add_tensor(gguf_name(name), values)
        elif "raw" in options:
            writer.add_tensor(gguf_name(name), options["raw"](values.shape), raw_dtype=qtype)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    for name, values in options.get("extra", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# --- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "llama tied", "llama biased", "qwen2"])
def test_f32_logits_equal_the_original(tmp_path: Path, arch: str) -> None:
    if arch == "qwen2":
        original = qwen2()
    else:
        original = llama(tie_word_embeddings="tied" in arch, attention_bias="biased" in arch)
    path = write(tmp_path / "m.gguf", original, arch.split()[0])
    directory = convert(path)
    converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert type(converted) is type(original)
    ids = torch.arange(40).reshape(2, 20) * 7 % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=0)
    with open_checkpoint(directory) as checkpoint:
        expected = {n for n in original.state_dict() if n != "lm_head.weight" or "tied" not in arch}
        assert checkpoint.names() == expected
        for name in expected:
            assert torch.equal(checkpoint.tensor(name), original.state_dict()[name]), name


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_every_type_gives_the_dequantised_values(tmp_path: Path, qtype: str) -> None:
    """Q4_K and Q6_K are random bytes with sane scales, since numpy cannot quantise to them."""
    kind = Types[qtype]
    original = llama()
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)

    def raw(shape: tuple[int, ...]) -> np.ndarray:
        blocks = random.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        for at in (0, 2) if qtype == "Q4_K" else (size - 2,):
            blocks[:, :, at : at + 2] = scale
        return blocks.reshape(shape[0], -1)

    options = {"raw": raw} if qtype in ("Q4_K", "Q6_K") else {}
    path = write(tmp_path / "m.gguf", original, qtype=kind, **options)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with open_checkpoint(convert(path)) as checkpoint:
        assert checkpoint.stored_dtype == "float32"
        for name in original.state_dict():
            tensor = stored[gguf_name(name)]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.isfinite(expected).all()
            np.testing.assert_array_equal(
                gguf_order(name, checkpoint.tensor(name).numpy(), "llama"), expected
            )
            if not options:
                error = (checkpoint.tensor(name) - original.state_dict()[name]).abs().max()
                assert error < {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}.get(qtype, 0.3), name


def test_rope_factors_are_honoured(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HIDDEN // HEADS // 2, dtype=np.float32)
    path = write(tmp_path / "m.gguf", llama(), extra={"rope_freqs.weight": factors})
    assert read_config(path)["rope_factors"] == factors.tolist()
    assert locate(str(convert(path))).config == read_config(path)
    assert "rope_factors" not in read_config(write(tmp_path / "plain.gguf", llama()))


def test_linear_rope_scaling_becomes_factors(tmp_path: Path) -> None:
    def scaling(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = write(tmp_path / "m.gguf", llama(), metadata=scaling)
    assert read_config(path)["rope_factors"] == [4.0] * (HIDDEN // HEADS // 2)


def test_config(tmp_path: Path) -> None:
    original = llama(rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = read_config(write(tmp_path / "m.gguf", original))
    fields = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        vocab_size rms_norm_eps max_position_embeddings attention_bias tie_word_embeddings"""
    for field in fields.split():
        assert config[field] == getattr(original.config, field), field
    assert config["head_dim"] == HIDDEN // HEADS
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == 5e5
    assert (config["torch_dtype"], config["eos_token_id"]) == ("float32", byte_tokens().index("<|end|>"))


# --- tokenizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    """Pieces are visible through merges, which never cross a cut."""
    tokenizer = load_tokenizer(convert(write(tmp_path / "m.gguf", llama(), pre=pre, add_bos=False)))
    tokens = byte_tokens()
    text = "the 42 wörld\n\n the<|end|>"
    ids = tokenizer.encode(text)
    the = tokens.index("the")
    assert ids[0] == the and ids[-2:] == [the, tokens.index("<|end|>")]
    assert tokenizer.decode(ids) == text.removesuffix("<|end|>")
    assert tokenizer.eos_token_ids == (tokens.index("<|end|>"),)
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 12b'll  c", ["a", " ", "1", "2", "b", "'ll", " ", " c"]),
        ("gpt-2", "a 12b'll  c", ["a", " 12", "b", "'ll", " ", " c"]),
        ("llama-bpe", "a 1234b'LL (c)\n", ["a", " ", "123", "4", "b", "'LL", " (", "c", ")\n"]),
        ("qwen2", "a 12b'LL (c)\n", ["a", " ", "1", "2", "b", "'LL", " (", "c", ")\n"]),
        ("qwen2", "e\u0301", ["\u00e9"]),
    ],
)
def test_cuts(pre: str, text: str, pieces: list[str]) -> None:
    from hybridgen.models.tokenizer import build_bpe

    backend = build_bpe(byte_tokens(), [], pre)
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    cut = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


BOS = [
    ("smollm", None, False),
    ("smollm", True, True),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
]


@pytest.mark.parametrize(("pre", "add_bos", "expected"), BOS)
def test_bos(tmp_path: Path, pre: str, add_bos: bool | None, expected: bool) -> None:
    options = {} if add_bos is None else {"add_bos": add_bos}
    tokenizer = load_tokenizer(convert(write(tmp_path / "m.gguf", llama(), pre=pre, **options)))
    assert (tokenizer.encode("the")[0] == byte_tokens().index("<|start|>")) is expected
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_chat_template_and_transformers_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path / "m.gguf", llama(), metadata=lambda w: w.add_chat_template("{{ messages }}"))
    directory = convert(path)
    assert load_tokenizer(directory).has_chat_template
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs("the 42 of them")["input_ids"] == load_tokenizer(directory).encode("the 42 of them")
    assert theirs.eos_token == "<|end|>"


def test_file_without_tokenizer(tmp_path: Path) -> None:
    directory = convert(write(tmp_path / "m.gguf", llama(), kind=""))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(directory)


# --- the cache -------------------------------------------------------------------------------------


def test_second_conversion_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", llama())
    first = convert(path)

    def refuse(path: Path) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(gguf_file, "_parse", refuse)
    assert convert(path) == first
    assert read_config(path)["hidden_size"] == HIDDEN


def test_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama())
    first = convert(path)
    changed = llama()
    torch.nn.init.ones_(changed.lm_head.weight)
    write(path, changed)
    os.utime(path, ns=(1, 1))
    second = convert(path)
    assert second != first
    with open_checkpoint(second) as checkpoint:
        assert (checkpoint.tensor("lm_head.weight") == 1).all()


def test_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama())
    weights = convert(path) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    convert(path)
    assert weights.read_bytes() == content


def test_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", llama(), pre="no-such-rules")
    with pytest.raises(CheckpointError):
        convert(path)
    assert list((cache / "gguf").iterdir()) == []


def _convert_in_child(path: str, cache: str, start: Any) -> None:
    os.environ["HYBRIDGEN_CACHE"] = cache
    start.wait()
    convert(Path(path))


def test_concurrent_conversions(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", llama())
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    children = [
        context.Process(target=_convert_in_child, args=(str(path), str(cache), start)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [folder.name for folder in (cache / "gguf").iterdir()] == [convert(path).name]


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("HYBRIDGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "hybridgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "hybridgen"


# --- errors ----------------------------------------------------------------------------------------


def refused(path: Path, *said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(path)
    for words in (path.name, *said):
        assert words in str(caught.value)


def test_wrong_magic(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGML" + b"\0" * 100)
    refused(tmp_path / "m.gguf", "not a GGUF file", "GGML")


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.5, 0.9999])
def test_truncated(tmp_path: Path, share: float) -> None:
    path = write(tmp_path / "m.gguf", llama())
    content = path.read_bytes()
    path.write_bytes(content[: max(5, int(share * len(content)))])
    refused(path, "truncated", "fetch it again")


def test_damaged_header(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama())
    content = path.read_bytes()
    path.write_bytes(content[:4] + (99).to_bytes(4, "little") + content[8:])
    refused(path, "damaged or of an unknown version", "99")
    path.write_bytes(content.replace(b"general.architecture", b"general.\xff\xfechitecture", 1))
    refused(path, "damaged")


def test_type_that_is_not_supported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama(), qtype=Types.Q5_0)
    refused(
        path, "token_embd.weight is of type Q5_0", "allowed: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K"
    )


def test_architecture_that_is_not_supported(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.gguf", llama(), "gemma"), "'gemma'", "allowed: llama, qwen2")


def test_tensor_that_is_not_known(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}
    refused(write(tmp_path / "m.gguf", llama(), extra=extra), "blk.0.ffn_gate_inp.weight", "not known")


def test_tensor_that_is_missing(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.gguf", llama(), leave_out=["model.embed_tokens.weight"]), "token_embd.weight")


def test_rope_that_is_not_supported(tmp_path: Path) -> None:
    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    refused(write(tmp_path / "m.gguf", llama(), metadata=yarn), "'yarn'")
    partial = write(tmp_path / "p.gguf", llama(), metadata=lambda w: w.add_rope_dimension_count(32))
    refused(partial, "part of the head")
    short = write(tmp_path / "s.gguf", llama(), extra={"rope_freqs.weight": np.ones(3, np.float32)})
    refused(short, "rope_freqs.weight", "(3,)")


def test_tokenizers_that_are_not_supported(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.gguf", llama(), kind="llama"), "'llama'", "allowed: gpt2")
    refused(write(tmp_path / "p.gguf", llama(), pre="deepseek-llm"), "'deepseek-llm'", "smollm", "qwen2")


def test_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", llama())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(100, 99, 1))
    refused(path, "not enough disk space", "HYBRIDGEN_CACHE")


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", llama())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="HYBRIDGEN_CACHE"):
        convert(path)


def test_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write(tmp_path / "m.gguf", llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "pip install gguf")


def test_generation_config(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama(), metadata=lambda w: w.add_eot_token_id(7))
    content = json.loads((convert(path) / "generation_config.json").read_text())
    assert content == {"eos_token_id": [7, byte_tokens().index("<|end|>")]}
    assert load_tokenizer(convert(path)).eos_token_ids == (7, byte_tokens().index("<|end|>"))
