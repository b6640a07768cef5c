"""A Hugging Face directory: config.json, and weights as safetensors or torch's .bin, sharded or not.

Nothing is copied: tensors are views of memory-mapped files. Everything that can be wrong with a file
without reading its weights (missing shard, short file, damaged header) is found when it is opened.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from hybridgen.errors import CheckpointError

_MEND = "fetch it again, or give another directory"
# safetensors' names of the types that weights may have
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# (single file, index of shards), in order of preference
FORMATS = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}


@dataclass(frozen=True)
class StoredTensor:
    """One stored tensor: where it is and what it looks like."""

    stored_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # "float16", ..., or the format's own word for a type that weights cannot have
    nbytes: int
    offset: int | None = None  # bytes into the file, as rows one after the other; None: not stored like that


class HFDirectory:
    """Weights of a Hugging Face directory (a `Checkpoint`).

    Names are given with `model.` in front whatever the file says: some OPT checkpoints store
    `decoder.layers...` for `model.decoder.layers...`, and some Llama checkpoints `layers...`.
    """

    def __init__(self, directory: Path) -> None:
        """Read config and headers. CheckpointError says which file is missing, short or damaged."""
        self._path = Path(directory)
        self._config = read_config(self._path)
        self._entries: dict[str, StoredTensor] = {}
        self._handles: dict[Path, Any] = {}  # safetensors handles, opened when first used
        self._state_dicts: dict[Path, dict[str, torch.Tensor]] = {}
        for file in weight_files(self._path):
            entries = safetensors_entries(file) if file.suffix == ".safetensors" else self._bin_entries(file)
            self._entries.update({_canonical(entry.stored_name): entry for entry in entries})
        self._stored_dtype = self._majority_dtype()

    @property
    def config(self) -> dict[str, Any]:
        """config.json as `read_config` gives it."""
        return self._config

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def stored_dtype(self) -> str:
        """Type of most of the weights' bytes: "float16", "bfloat16" or "float32"."""
        return self._stored_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.nbytes for entry in self._entries.values())

    def names(self) -> frozenset[str]:
        """Names of all tensors, `model.` in front (except `lm_head.`)."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it. CheckpointError if it is not there."""
        return self._entry(name).shape

    def stored(self, name: str) -> StoredTensor:
        """Where one tensor lies: file, offset and bytes. CheckpointError if it is not there."""
        return self._entry(name)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in its stored dtype, a view of the mapped file (do not write to it).

        CheckpointError if it is not there or cannot be read.
        """
        entry = self._entry(name)
        if entry.file in self._state_dicts:
            return self._state_dicts[entry.file][entry.stored_name]
        try:
            if entry.file not in self._handles:
                self._handles[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._handles[entry.file].get_tensor(entry.stored_name)
        except Exception as error:  # safetensors raises its own untyped error, or OSError
            raise CheckpointError(f"{entry.file}: cannot read {name}: {error}; {_MEND}") from error
        return tensor

    def close(self) -> None:
        """Let go of the files. Tensors handed out stay valid: each keeps its mapping alive."""
        self._handles.clear()
        self._state_dicts.clear()

    def __enter__(self) -> HFDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, name: str) -> StoredTensor:
        entry = self._entries.get(_canonical(name))
        if entry is None:
            stated = ", ".join(self._config.get("architectures") or ["none"])
            example = ", ".join(sorted(self._entries)[:3])
            raise CheckpointError(
                f"{self._path}: the weights have no tensor {name!r}: the architecture in config.json "
                f"({stated}) does not match them (they hold {len(self._entries)} tensors: {example}, ...)"
            )
        return entry

    def _bin_entries(self, file: Path) -> list[StoredTensor]:
        self._state_dicts[file] = state_dict = _load_bin(file)
        return [
            StoredTensor(name, file, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes)
            for name, t in state_dict.items()
        ]

    def _majority_dtype(self) -> str:
        count: Counter[str] = Counter()
        for entry in self._entries.values():
            count[entry.dtype] += entry.nbytes
        if not count:
            raise CheckpointError(f"{self._path}: the weight files hold no tensors; {_MEND}")
        dtype = count.most_common(1)[0][0]
        if dtype not in _DTYPES.values():
            allowed = ", ".join(_DTYPES.values())
            raise CheckpointError(f"{self._path}: weights of type {dtype} are not supported (allowed: {allowed})")
        return dtype


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory, in the words of older transformers whatever wrote it.

    transformers 5 writes `dtype` and `rope_parameters`; these come back as `torch_dtype`, `rope_theta`
    and `rope_scaling`. CheckpointError if the directory or the file is missing or is not JSON.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory (a Hugging Face model directory is expected)")
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    config = _read_json(file)
    if "dtype" in config:
        config.setdefault("torch_dtype", config.pop("dtype"))
    rope = config.pop("rope_parameters", None)
    if isinstance(rope, dict):
        config.setdefault("rope_theta", rope.pop("rope_theta", 10000.0))
        plain = rope.get("rope_type", "default") == "default"
        config.setdefault("rope_scaling", None if plain else rope)
    return config


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights, of one format only (safetensors if there are any).

    CheckpointError if there are none, or if an index names files that are not there.
    """
    for single, index_name in FORMATS.values():
        if (directory / single).is_file():
            return [directory / single]
        index = directory / index_name
        if index.is_file():
            return _shards(index)
    raise CheckpointError(
        f"{directory} holds no weights (looked for {', '.join(n for pair in FORMATS.values() for n in pair)})"
        + _leftovers(directory)
    )


def free_bytes(folder: Path) -> int:
    """Free on the disk of a folder that need not exist yet."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def require_disk_space(folder: Path, needed: int, purpose: str, remedy: str) -> None:
    """CheckpointError if the disk of `folder` (which need not exist yet) has no `needed` bytes free."""
    free = free_bytes(folder)
    if needed > free:
        raise CheckpointError(
            f"not enough disk space: {purpose} needs {needed / 1e9:.1f} GB in {folder}, "
            f"{free / 1e9:.1f} GB are free; {remedy}"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}; {_MEND}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object; {_MEND}")
    return content


def _canonical(name: str) -> str:
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _shards(index: Path) -> list[Path]:
    mapping = _read_json(index).get("weight_map")
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{index} has no weight_map; {_MEND}")
    names = sorted({str(name) for name in mapping.values()})
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} is incomplete: {len(missing)} of {len(names)} weight files are missing "
            f"({', '.join(missing)}); finish the download" + _leftovers(index.parent)
        )
    return [index.parent / name for name in names]


def _leftovers(directory: Path) -> str:
    found = [*directory.glob("*.incomplete"), *directory.glob(".cache/huggingface/download/*.incomplete")]
    return f" ({len(found)} interrupted downloads lie there: *.incomplete)" if found else ""


def safetensors_entries(file: Path) -> list[StoredTensor]:
    """Entries of a safetensors header, checked against the length of the file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            # A truncated header and a damaged length look alike.
            raise CheckpointError(f"{file} is truncated, or its header damaged ({size:,} bytes); {_MEND}")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_safetensors_entry(file, name, fields, 8 + length) for name, fields in header.items()]
        end = max((fields["data_offsets"][1] for fields in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: the header is damaged ({error}); {_MEND}") from error
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "damaged"
        raise CheckpointError(f"{file} is {state}: {size:,} bytes instead of {8 + length + end:,}; {_MEND}")
    return entries


def _safetensors_entry(file: Path, name: str, fields: dict[str, Any], data: int) -> StoredTensor:
    begin, end = fields["data_offsets"]
    shape = tuple(int(n) for n in fields["shape"])
    nbytes = _ITEM_BYTES.get(fields["dtype"])
    for n in shape:
        nbytes = None if nbytes is None else nbytes * n
    if nbytes is not None and nbytes != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, its shape needs {nbytes}")
    return StoredTensor(
        name, file, shape, _DTYPES.get(fields["dtype"], fields["dtype"]), end - begin, data + begin
    )


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    """A .bin file through torch's safe loader, mapped if it is of the zip format."""
    try:
        with open(file, "rb") as stream:
            is_zip = stream.read(4) == b"PK\x03\x04"  # older files are bare pickles, which cannot be mapped
        state_dict = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors and is refused by torch's safe loader; "
            f"{_MEND} (safetensors if there is one)"
        ) from error
    except Exception as error:  # torch raises RuntimeError, EOFError, OSError, ... for damaged files
        raise CheckpointError(f"{file} cannot be read ({error}); {_MEND}") from error
    if not isinstance(state_dict, dict) or not all(isinstance(v, torch.Tensor) for v in state_dict.values()):
        raise CheckpointError(f"{file} does not hold a dictionary of tensors")
    return state_dict
