"""Where a model's weights come from: an alias, a directory, a GGUF file or the hub.

Resolution has two phases, so that the memory plan is made before any byte is fetched:

    location = locate("smollm2-135m")          # no network, nothing written; location.config is the shape
    # ... plan memory from location.config ...
    directory = download(location) if location.needs_download else location.prepare()
    with open_checkpoint(directory) as checkpoint:
        checkpoint.tensor("model.norm.weight")

A hub id whose shape is not known (`location.config is None`) needs `fetch_config` before the plan. The
model is built from `checkpoint.config`: it may know more than `location.config` (a GGUF file's RoPE factors).
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import yaml

from hybridgen.errors import CheckpointError, UnknownNameError
from hybridgen.models import gguf_file, hub
from hybridgen.models.hf_directory import HFDirectory, StoredTensor, read_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Checkpoint(Protocol):
    """Weights on disk. Names are Hugging Face's, always with `model.` in front (see `HFDirectory`)."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json, with the fields of older transformers (`torch_dtype`, `rope_theta`, ...)."""

    @property
    def path(self) -> Path:
        """The directory."""

    @property
    def stored_dtype(self) -> str:
        """Type of most of the weights' bytes: "float16", "bfloat16" or "float32"."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""

    def names(self) -> frozenset[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it. CheckpointError if it is not there."""

    def stored(self, name: str) -> StoredTensor:
        """Where one tensor lies: file, offset and bytes. CheckpointError if not there."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in its stored dtype, memory-mapped. CheckpointError if not there."""

    def close(self) -> None:
        """Let go of the files. Tensors handed out stay valid."""

    def __enter__(self) -> Checkpoint: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class ModelLocation:
    """Where a model is. Exactly one of three holds: `directory`, `gguf`, or `needs_download`."""

    name: str  # as the user gave it
    origin: Literal["directory", "hub cache", "gguf", "package", "hub"]
    alias: str | None = None
    hub_id: str | None = None
    gated: bool = False  # the hub asks for an accepted licence
    config: dict[str, Any] | None = None  # HF field names; None: only the hub knows it
    directory: Path | None = None  # a complete local Hugging Face directory
    gguf: Path | None = None  # converted by `prepare`

    @property
    def needs_download(self) -> bool:
        """True if no local copy exists."""
        return self.directory is None and self.gguf is None

    def prepare(self) -> Path:
        """The local directory; a GGUF file is converted into the cache first (seconds, once).

        CheckpointError if the file is damaged, the disk is full, or there is no local copy.
        """
        if self.directory is not None:
            return self.directory
        if self.gguf is not None:
            return gguf_file.convert(self.gguf)
        raise CheckpointError(f"{self.name} has no local copy yet: download it first")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a Hugging Face directory (what `ModelLocation.prepare` and `download` return)."""
    return HFDirectory(directory)


def checkpoint_key(directory: Path) -> str:
    """Tells a checkpoint's weights from others by each tensor's first numbers.

    As they are stored: the dtype that they are run in does not matter.
    """
    digest = hashlib.sha256()
    with open_checkpoint(directory) as checkpoint:
        for name in sorted(checkpoint.names()):
            tensor = checkpoint.tensor(name)
            some = tensor.reshape(-1)[:1024].float()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def models_dir() -> Path:
    """The folder of the aliases' files: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for root in (package.parent, package):
        if (root / "configs" / "models").is_dir():
            return root / "configs" / "models"
    raise CheckpointError(f"no configs/models beside or inside {package}: the installation is damaged")


@cache
def aliases() -> dict[str, dict[str, Any]]:
    """All aliases: the contents of configs/models/<alias>.yaml by alias."""
    return {file.stem: yaml.safe_load(file.read_text()) for file in sorted(models_dir().glob("*.yaml"))}


def locate(model: str) -> ModelLocation:
    """Find a model without any network access and without writing anything.

    `model` is an alias, a directory, a .gguf file, or a hub id `org/name`. An alias is looked for as
    a local path of that name, in the hub's cache, in its Python package, and is else on the hub.

    Raises UnknownNameError for a name that is none of these, CheckpointError for a path that does
    not exist or is no model.
    """
    entry = aliases().get(model)
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, no such user
        raise CheckpointError(f"the model's name is no path and no alias: {error}") from None
    # A folder that merely shares an alias's name (results, say) is not the model.
    if path.is_dir() and (entry is None or (path / "config.json").is_file()):
        return ModelLocation(model, "directory", config=read_config(path), directory=path)
    if path.is_file() and (entry is None or path.suffix == ".gguf"):
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is a file; a model is a Hugging Face directory or a .gguf file")
        return ModelLocation(model, "gguf", config=gguf_file.read_config(path), gguf=path)
    if entry is not None:
        return _locate_alias(model, entry)
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise CheckpointError(f"{path} does not exist (given as a model)")
    if not _HUB_ID.fullmatch(model):
        hint = "Or give a Hugging Face directory, a .gguf file, or a hub id such as org/name."
        raise UnknownNameError("model", model, aliases(), hint)
    return _locate_on_hub(ModelLocation(model, "hub", hub_id=model), _entry_of(model))


def fetch_config(location: ModelLocation, deadline_s: float = hub.DEADLINE_S) -> ModelLocation:
    """The same location with `config` from the hub, if it is not known yet (a few kilobytes).

    HubUnavailableError if the hub does not answer within `deadline_s` in all, or offline mode is on;
    CheckpointError if the repository does not exist or is gated.
    """
    if location.config is not None or location.hub_id is None:
        return location
    return replace(location, config=read_config(hub.fetch_config(location.hub_id, deadline_s)))


def download(location: ModelLocation, deadline_s: float = hub.DEADLINE_S) -> Path:
    """Fetch weights (one format), config and tokenizer into the hub's cache; returns the directory.

    Errors as for `fetch_config`, and CheckpointError if the disk is too full (checked before).
    """
    if not location.needs_download or location.hub_id is None:
        return location.prepare()
    return hub.download(location.hub_id, deadline_s)


def _entry_of(hub_id: str) -> dict[str, Any] | None:
    return next((entry for entry in aliases().values() if entry["hub_id"] == hub_id), None)


def _locate_on_hub(location: ModelLocation, entry: dict[str, Any] | None) -> ModelLocation:
    """`location` completed from the hub's cache, or from what is known of the repository."""
    assert location.hub_id is not None
    snapshot = hub.cached_snapshot(location.hub_id)
    if snapshot is not None:
        return replace(location, origin="hub cache", config=read_config(snapshot), directory=snapshot)
    if entry is not None:
        location = replace(location, gated=bool(entry["gated"]), config=dict(entry["config"]))
    return location


def _locate_alias(alias: str, entry: dict[str, Any]) -> ModelLocation:
    location = _locate_on_hub(ModelLocation(alias, "hub", alias=alias, hub_id=entry["hub_id"]), entry)
    if location.needs_download and "package" in entry:
        file = _package_file(entry["package"])
        if file is not None:
            # Not from the file: this needs no gguf library and no second, so random weights do not either.
            config = {**entry["config"], "torch_dtype": "float32"}
            return replace(location, origin="package", config=config, gguf=file)
    return location


def _package_file(package: dict[str, str]) -> Path | None:
    """The model file that an installed Python package carries; the package is not imported."""
    spec = importlib.util.find_spec(package["module"])
    for folder in (spec.submodule_search_locations if spec else None) or ():
        found = sorted(Path(folder).glob(package["files"]))
        if found:
            return found[0]
    return None
