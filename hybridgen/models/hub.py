"""The Hugging Face hub: its local cache (no network), and bounded, checked downloads.

The hub must answer within a deadline in all: name resolution, connection attempts and retries
included. Timeouts of a single request do not give that, so the question is asked in a thread.
"""

from __future__ import annotations

import fnmatch
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hybridgen.errors import CheckpointError, HubUnavailableError
from hybridgen.models.hf_directory import FORMATS, require_disk_space, weight_files

T = TypeVar("T")

DEADLINE_S = 10.0
_SMALL_FILES = ("*config.json", "*token*.json", "*.jinja", "vocab.json", "merges.txt", "tokenizer.model")
_ALTERNATIVES = "give a local directory as the model, or --weights random"


def offline_mode() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def cached_snapshot(hub_id: str) -> Path | None:
    """A snapshot in the hub's cache whose weights are all there, or None; no network.

    The one that `main` points to comes first. Weights are fetched last (`download`), so a snapshot
    with complete weights has its small files too.
    """
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    main = repository / "refs" / "main"
    commit = main.read_text().strip() if main.is_file() else ""
    snapshots = sorted(repository.glob("snapshots/*"), key=lambda folder: folder.name != commit)
    return next((folder for folder in snapshots if _is_complete(folder)), None)


def fetch_config(hub_id: str, deadline_s: float = DEADLINE_S) -> Path:
    """Fetch config.json alone; returns the directory it is in.

    HubUnavailableError without an answer in `deadline_s`, or in offline mode; CheckpointError if the
    repository does not exist or is gated.
    """

    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        _file_sizes(hub_id)  # fails at once where there is no network; a download would retry, noisily
        return Path(hf_hub_download(hub_id, "config.json")).parent

    return _ask(hub_id, fetch, deadline_s)


def download(hub_id: str, deadline_s: float = DEADLINE_S) -> Path:
    """Fetch config, tokenizer and the weights in one format; returns the snapshot's directory.

    The deadline is for the hub's answer, not for the transfer. Errors as in `fetch_config`, and
    CheckpointError if the disk is too full (checked before), no weights are there, or the transfer stops.
    """
    sizes = _ask(hub_id, lambda: _file_sizes(hub_id), deadline_s)
    weights = choose_weights(hub_id, sizes)
    small = [name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in _SMALL_FILES)]
    _check_space(hub_id, {name: sizes[name] for name in small + weights})

    from huggingface_hub import snapshot_download

    try:
        snapshot_download(hub_id, allow_patterns=small)
        directory = Path(snapshot_download(hub_id, allow_patterns=weights))
    except Exception as error:
        refusal = _refusal(hub_id, error)
        if refusal is not None:
            raise refusal from error
        raise CheckpointError(
            f"the download of {hub_id} stopped ({_first_line(error)}); run the same command to go on"
        ) from error
    weight_files(directory)  # CheckpointError if any is missing
    return directory


def choose_weights(hub_id: str, files: dict[str, int]) -> list[str]:
    """The weight files to fetch, of one format: safetensors if there are any, else .bin."""
    for kind, (single, index) in FORMATS.items():
        if single in files:
            return [single]
        if index in files:
            shards = (name for name in files if "/" not in name and fnmatch.fnmatch(name, f"*-of-*.{kind}"))
            return [index, *shards]
    raise CheckpointError(f"{hub_id} on the hub holds no safetensors or .bin weights; {_ALTERNATIVES}")


def _is_complete(snapshot: Path) -> bool:
    try:
        return (snapshot / "config.json").is_file() and bool(weight_files(snapshot))
    except CheckpointError:
        return False


def _file_sizes(hub_id: str) -> dict[str, int]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _check_space(hub_id: str, sizes: dict[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    missing = sum(n for name, n in sizes.items() if not isinstance(try_to_load_from_cache(hub_id, name), str))
    remedy = f"free some, set HF_HOME to a folder on another disk, or {_ALTERNATIVES}"
    require_disk_space(Path(constants.HF_HUB_CACHE), missing, f"the download of {hub_id}", remedy)


def _ask(hub_id: str, question: Callable[[], T], deadline_s: float) -> T:
    """The answer of the hub to one question, within the deadline."""
    if offline_mode():
        raise HubUnavailableError(
            f"{hub_id} has no complete local copy, and offline mode is on (HF_HUB_OFFLINE); {_ALTERNATIVES}"
        )
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["answer"] = question()
        except BaseException as error:  # handed to the caller's thread below
            outcome["error"] = error

    thread = threading.Thread(target=run, name="hub", daemon=True)  # may hang: never waited for at exit
    thread.start()
    thread.join(deadline_s)
    if "answer" in outcome:
        answer: T = outcome["answer"]
        return answer
    if "error" not in outcome:
        raise HubUnavailableError(f"the hub gave no answer for {hub_id} within {deadline_s:g} s; {_ALTERNATIVES}")
    error = outcome["error"]
    refusal = _refusal(hub_id, error)
    if refusal is not None:
        raise refusal from error
    raise HubUnavailableError(
        f"the hub cannot be reached for {hub_id} ({_first_line(error)}); {_ALTERNATIVES}"
    ) from error


def _refusal(hub_id: str, error: BaseException) -> CheckpointError | None:
    """The error to raise if the hub answered, and said no; None if it did not answer."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return CheckpointError(
            f"{hub_id} is gated: accept its licence on the model's page of the hub and log in with "
            f"`hf auth login` (or set HF_TOKEN), or {_ALTERNATIVES}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return CheckpointError(
            f"{hub_id} does not exist on the hub, or is private (then `hf auth login`); or {_ALTERNATIVES}"
        )
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        return CheckpointError(f"{hub_id} on the hub is no transformers model: {_first_line(error)}")
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
