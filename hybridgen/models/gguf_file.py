"""GGUF files, converted once into a Hugging Face directory that every later run opens at once.

The `gguf` library reads the file and dequantises; the directory in the cache holds exactly those
float32 values. GGUF stores the rotary rows of Q and K of Llama models in another order, its own names, a
list of RoPE factors and the tokenizer's parts: all of these are put back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hybridgen.errors import CheckpointError
from hybridgen.models.hf_directory import HFDirectory, require_disk_space
from hybridgen.models.hf_directory import read_config as read_directory_config
from hybridgen.models.tokenizer import PRE_TOKENIZERS, build_bpe

_CONVERTER = 1  # raised whenever a conversion would come out differently: old ones are then not found
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Stored:
    """One tensor of the file: its raw data (mapped), type, and shape as Hugging Face has it."""

    data: NDArray[Any]
    qtype: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Parsed:
    """Everything a file says, read once."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, _Stored]


def cache_root() -> Path:
    """Where conversions go: $HYBRIDGEN_CACHE, else $XDG_CACHE_HOME/hybridgen, else ~/.cache/hybridgen."""
    own = os.environ.get("HYBRIDGEN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hybridgen"


def read_config(path: Path) -> dict[str, Any]:
    """The model's configuration in Hugging Face field names; nothing is written.

    Beside those, `rope_factors` (head_dim/2 numbers that divide the inverse frequencies) where the file
    has them. CheckpointError if the file is no GGUF, truncated, damaged, or of an unsupported kind.
    """
    done = _cache_directory(path)
    if _is_complete(done):
        return read_directory_config(done)
    return _config(_parse(path))


def converted(path: Path) -> Path | None:
    """The directory that `convert` made of the file on an earlier call, if there is one."""
    done = _cache_directory(path)
    return done if _is_complete(done) else None


def convert(path: Path) -> Path:
    """The Hugging Face directory of a GGUF file, made on the first call, found on later ones.

    Safe to call from several processes at once: each writes its own temporary directory, and the first
    rename wins. CheckpointError as in `read_config`, and if the disk is full or cannot be written.
    """
    final = _cache_directory(path)
    if _is_complete(final):
        return final
    parsed = _parse(path)
    tensors = dict(_renamed(parsed))
    needed = 4 * sum(int(np.prod(stored.shape)) for stored in tensors.values())
    remedy = "free some, or set HYBRIDGEN_CACHE to a folder on another disk"
    require_disk_space(final.parent, needed + 64 * 2**20, f"the float32 copy of {path.name}", remedy)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=final.parent))
        try:
            _write_json(work / "config.json", _config(parsed))
            _write_tokenizer(parsed, work)
            _write_weights(parsed, tensors, work / "model.safetensors")
            work.chmod(0o755)  # mkdtemp makes it private
            _move_into_place(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {final.parent}: {error}; {remedy}") from error
    _parse_version.cache_clear()  # the file is not needed again
    return final


def _cache_directory(path: Path) -> Path:
    """Named after the file's size, time and first megabyte: a changed file is converted again."""
    try:
        stat = path.stat()
        with open(path, "rb") as stream:
            head = stream.read(2**20)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if head[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file (it begins with {head[:4]!r}, not b'GGUF')")
    identity = f"{_CONVERTER} {stat.st_size} {stat.st_mtime_ns} ".encode() + head
    return cache_root() / "gguf" / f"{path.stem}-{hashlib.sha256(identity).hexdigest()[:16]}"


def _is_complete(directory: Path) -> bool:
    """Whether a conversion lies there undamaged (the machine may have gone down while writing)."""
    try:
        HFDirectory(directory).close()
    except CheckpointError:
        return False
    return True


def _move_into_place(work: Path, final: Path) -> None:
    if final.exists() and not _is_complete(final):
        shutil.rmtree(final)
    try:
        work.rename(final)
    except OSError:
        if not _is_complete(final):  # else another process was first: its result is the same
            raise


def _parse(path: Path) -> _Parsed:
    stat = path.stat()
    return _parse_version(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)  # `read_config`, then `convert`: one pass over the file
def _parse_version(path: Path, size: int, mtime_ns: int) -> _Parsed:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs the gguf library: pip install gguf") from error

    class Reader(GGUFReader):
        """GGUFReader that notices the end of the file, and is 5 times faster: it slices an ndarray
        where GGUFReader slices a numpy.memmap, once for each of 100,000 strings.
        """

        _bytes: NDArray[np.uint8] | None = None

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            if self._bytes is None:
                self._bytes = self.data.view(np.ndarray)
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self._bytes):
                raise EOFError(f"{size:,} bytes long, at least {end:,} expected")
            return self._bytes[int(offset) : end].view(dtype)

    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: _Stored(t.data, t.tensor_type, _hf_shape(t.shape)) for t in reader.tensors}
    except EOFError as error:
        raise CheckpointError(f"{path} is truncated ({error}); fetch it again") from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise CheckpointError(f"{path}: the header is damaged or of an unknown version ({error})") from error
    for name, stored in tensors.items():
        if stored.qtype.name not in _TYPES:
            raise CheckpointError(
                f"{path}: tensor {name} is of type {stored.qtype.name}, which is not supported "
                f"(allowed: {', '.join(_TYPES)})"
            )
    return _Parsed(path, metadata, tensors)


def _hf_shape(dimensions: NDArray[Any]) -> tuple[int, ...]:
    """GGUF gives the fastest dimension first."""
    return tuple(int(n) for n in reversed(dimensions))


def _dequantise(stored: _Stored) -> NDArray[np.float32]:
    from gguf import quants

    values: NDArray[np.float32] = np.asarray(quants.dequantize(stored.data, stored.qtype), dtype=np.float32)
    return values.reshape(stored.shape)


def _config(parsed: _Parsed) -> dict[str, Any]:
    """Hugging Face's config.json for this file."""
    metadata, tensors = parsed.metadata, parsed.tensors
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        allowed = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"{parsed.path}: architecture {arch!r} is not supported (allowed: {allowed})")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if found is None:
            raise CheckpointError(f"{parsed.path}: the metadata has no {arch}.{key}; the file is damaged")
        return found

    heads = int(value("attention.head_count"))
    hidden = int(value("embedding_length"))
    head_dim = int(value("attention.key_length", hidden // heads))
    if value("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{parsed.path}: RoPE on a part of the head's channels is not supported")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{parsed.path}: there is no tensor token_embd.weight; the file is damaged")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": int(value("feed_forward_length")),
        "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": int(value("context_length")),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(value("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    else:
        config["use_sliding_window"] = False
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{kind}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    factors = _rope_factors(parsed, arch, head_dim // 2)
    if factors is not None:
        config["rope_factors"] = factors
    return config


def _shortest(number: float) -> float:
    """A float32 as the decimal it was written from: 1e-05 rather than 9.99999974e-06."""
    return float(str(np.float32(number)))


def _rope_factors(parsed: _Parsed, arch: str, count: int) -> list[float] | None:
    """Divisors of the inverse frequencies: the file's own (Llama 3's scaling), times a linear scaling."""
    factors = np.ones(count)
    if _ROPE_FACTORS in parsed.tensors:
        own = _dequantise(parsed.tensors[_ROPE_FACTORS])
        if own.shape != (count,):
            raise CheckpointError(f"{parsed.path}: {_ROPE_FACTORS} has shape {own.shape}, not {(count,)}")
        factors = factors * own
    kind = parsed.metadata.get(f"{arch}.rope.scaling.type", "none")
    # Files from before `rope.scaling` hold `rope.scale_linear`.
    linear = parsed.metadata.get(f"{arch}.rope.scale_linear", 1.0)
    if kind == "linear":
        linear = parsed.metadata.get(f"{arch}.rope.scaling.factor", linear)
    elif kind != "none":
        raise CheckpointError(f"{parsed.path}: RoPE scaling {kind!r} is not supported (none and linear are)")
    factors = factors * linear
    return None if np.all(factors == 1.0) else [float(f) for f in factors]


def _renamed(parsed: _Parsed) -> Iterator[tuple[str, _Stored]]:
    """Tensors by their Hugging Face names. CheckpointError for one that these families do not have."""
    for name, stored in parsed.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        hf_name = _GLOBAL_NAMES.get(name)
        parts = name.split(".")  # blk.<layer>.<what>.<weight or bias>
        if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
            hf_name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        if hf_name is None:
            raise CheckpointError(f"{parsed.path}: tensor {name} is not known in a Llama or Qwen2 model")
        yield hf_name, stored


def _restore_rotary_rows(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of Q or K in Hugging Face's order.

    Within a head GGUF (Llama) pairs channel 2i with 2i + 1; Hugging Face pairs i with i + head_dim/2.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _write_weights(parsed: _Parsed, tensors: dict[str, _Stored], file: Path) -> None:
    """model.safetensors, tensor by tensor: an 8B model must not need 32 GB of memory to be converted."""
    config = _config(parsed)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in tensors.items():
        end = offset + 4 * int(np.prod(stored.shape))
        header[name] = {"dtype": "F32", "shape": list(stored.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned
    with open(file, "wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, stored in tqdm(tensors.items(), f"converting {parsed.path.name}", disable=None):
            values = _dequantise(stored)
            projection = name.split(".")[-2]
            if config["model_type"] == "llama" and projection in heads:
                values = _restore_rotary_rows(values, heads[projection])
            stream.write(np.ascontiguousarray(values).data)


def _write_tokenizer(parsed: _Parsed, directory: Path) -> None:
    """tokenizer.json and its configs, from the file's lists; nothing if the file has no tokenizer."""
    metadata = parsed.metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return
    if kind != "gpt2":
        raise CheckpointError(f"{parsed.path}: tokenizer kind {kind!r} is not supported (allowed: gpt2)")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        allowed = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{parsed.path}: pre-tokenizer {pre!r} is not supported (allowed: {allowed})")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)

    def token(name: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None or index >= len(tokens) else tokens[index]

    # Llama 3 files do not always say it: their tokenizer adds BOS.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and token("bos"))
    tokenizer = build_bpe(
        tokens,
        metadata.get("tokenizer.ggml.merges") or [],
        pre,
        special=[t for t, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL],
        user_defined=[t for t, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED],
        bos=token("bos") if add_bos else None,
    )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    _write_json(directory / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})
    ends = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    if ends:
        _write_json(directory / "generation_config.json", {"eos_token_id": sorted(ends)})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
