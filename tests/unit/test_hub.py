"""The hub answers in time or not at all; what it refuses is said clearly; one format is fetched."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from hybridgen.errors import CheckpointError, HubUnavailableError
from hybridgen.models import hub
from hybridgen.models.checkpoint import ModelLocation, download, fetch_config, locate

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"]
OTHER = ["README.md", "flax_model.msgpack", "tf_model.h5", "original/consolidated.00.pth", "LICENSE.txt"]
HUB_ID = "some/model"
LOCATION = ModelLocation(HUB_ID, "hub", hub_id=HUB_ID)


class TransportError(Exception):
    """As the HTTP library raises them: not an OSError, not one of huggingface_hub's."""


class FakeHub:
    """A repository behind the three functions of huggingface_hub that the package calls."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.sizes = dict.fromkeys(SMALL + OTHER, 10)
        self.error: Exception | None = None  # raised by each call of a kind in `failing`
        self.failing: set[str] = {"info", "file", "snapshot"}
        self.fetched: list[str] = []
        self.calls: list[str] = []

    def called(self, kind: str) -> None:
        self.calls.append(kind)
        if self.error is not None and kind in self.failing:
            raise self.error

    def model_info(self, hub_id: str, files_metadata: bool) -> Any:
        self.called("info")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=s) for n, s in self.sizes.items()])

    def hf_hub_download(self, hub_id: str, name: str) -> str:
        self.called("file")
        return str(self._write(name))

    def snapshot_download(self, hub_id: str, allow_patterns: list[str]) -> str:
        self.called("snapshot")
        for name in allow_patterns:
            self._write(name)
        return str(self.snapshot)

    @property
    def snapshot(self) -> Path:
        return self.cache / f"models--{HUB_ID.replace('/', '--')}" / "snapshots" / "c0ffee"

    def _write(self, name: str) -> Path:
        self.fetched.append(name)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"hidden_size": 8}
        if name.endswith("index.json"):
            kind = name.split(".")[1]
            content = {"weight_map": {n: n for n in self.sizes if "-of-0000" in n and n.endswith(kind)}}
        (self.snapshot / name).write_text(json.dumps(content))
        return self.snapshot / name


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    fake = FakeHub(tmp_path)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, *a, **k: fake.model_info(*a, **k))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture
def hang() -> Iterator[Callable[..., Any]]:
    """A call that does not return before the test is over."""
    over = threading.Event()
    yield lambda *args, **kwargs: over.wait(60)
    over.set()


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status}\nmore lines", response=response)


# --- in time, or not at all ------------------------------------------------------------------------


@pytest.mark.parametrize("act", [fetch_config, download])
def test_hub_that_hangs(
    fake: FakeHub, hang: Any, monkeypatch: pytest.MonkeyPatch, act: Callable[[ModelLocation, float], Any]
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hang)
    start = time.monotonic()
    with pytest.raises(HubUnavailableError, match=r"no answer for some/model within 0\.2 s"):
        act(LOCATION, 0.2)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("act", [fetch_config, download])
@pytest.mark.parametrize(
    "error",
    [
        TransportError("Name or service not known"),
        OSError("Network is unreachable"),
        errors.LocalEntryNotFoundError("cannot find the file, nor the hub"),
        http_error(errors.HfHubHTTPError, 503),
    ],
)
def test_hub_that_cannot_be_reached(fake: FakeHub, error: Exception, act: Callable[..., Any]) -> None:
    fake.error = error
    with pytest.raises(HubUnavailableError) as caught:
        act(LOCATION)
    assert str(error).splitlines()[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--weights random" in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize("act", [fetch_config, download])
def test_offline_mode_asks_nobody(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, act: Callable[..., Any], variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(HubUnavailableError, match="offline mode"):
        act(LOCATION)
    assert fake.calls == []


# --- what the hub refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "failing"), [(fetch_config, "file"), (download, "info"), (download, "snapshot")]
)
@pytest.mark.parametrize(
    "error", [http_error(errors.GatedRepoError, 401), http_error(errors.HfHubHTTPError, 403)]
)
def test_gated(fake: FakeHub, error: Exception, act: Callable[..., Any], failing: str) -> None:
    fake.error, fake.failing = error, {failing}
    fake.sizes["model.safetensors"] = 10
    with pytest.raises(CheckpointError) as caught:
        act(LOCATION)
    assert not isinstance(caught.value, HubUnavailableError)
    for words in ("gated", "licence", "hf auth login", "local directory", "--weights random"):
        assert words in str(caught.value)


@pytest.mark.parametrize("act", [fetch_config, download])
def test_repository_that_does_not_exist(fake: FakeHub, act: Callable[..., Any]) -> None:
    fake.error = http_error(errors.RepositoryNotFoundError, 404)
    with pytest.raises(CheckpointError, match="does not exist on the hub") as caught:
        act(LOCATION)
    assert not isinstance(caught.value, HubUnavailableError)


def test_repository_without_config(fake: FakeHub) -> None:
    fake.error, fake.failing = http_error(errors.RemoteEntryNotFoundError, 404), {"file"}
    with pytest.raises(CheckpointError, match="no transformers model") as caught:
        fetch_config(LOCATION)
    assert not isinstance(caught.value, HubUnavailableError)


def test_repository_without_weights(fake: FakeHub) -> None:
    with pytest.raises(CheckpointError, match=r"no safetensors or \.bin weights"):
        download(LOCATION)
    assert fake.fetched == []


# --- what is fetched -------------------------------------------------------------------------------

BIN_SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
SAFE_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            [*SAFE_SHARDS, "model.safetensors.index.json", "pytorch_model.bin"],
            [*SAFE_SHARDS, "model.safetensors.index.json"],
        ),
        (
            [*BIN_SHARDS, "pytorch_model.bin.index.json", "onnx/model-1-of-1.bin"],
            [*BIN_SHARDS, "pytorch_model.bin.index.json"],
        ),
    ],
)
def test_one_format_only(fake: FakeHub, there: list[str], wanted: list[str]) -> None:
    fake.sizes |= dict.fromkeys(there, 10)
    assert download(LOCATION) == fake.snapshot
    assert sorted(fake.fetched) == sorted(SMALL + wanted)
    assert set(fake.fetched[: len(SMALL)]) == set(SMALL), "complete weights imply a complete snapshot"
    assert locate(HUB_ID).directory == fake.snapshot


def test_download_of_what_is_local_asks_nobody(fake: FakeHub, tmp_path: Path) -> None:
    local = ModelLocation("x", "directory", hub_id=HUB_ID, directory=tmp_path)
    assert download(local) == tmp_path
    assert fake.calls == []


def test_config_is_fetched_once_and_alone(fake: FakeHub) -> None:
    location = fetch_config(LOCATION)
    assert location.config == {"hidden_size": 8}
    assert fake.fetched == ["config.json"]
    assert fetch_config(location) is location
    assert fake.calls == ["info", "file"]


def test_full_disk_is_noticed_before_anything_is_fetched(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.sizes["model.safetensors"] = 26_000_000_000
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**11, 10**11 - 10**9, 10**9))
    with pytest.raises(CheckpointError) as caught:
        download(LOCATION)
    for words in ("disk space", "26.0 GB", "1.0 GB are free", "HF_HOME", "--weights random"):
        assert words in str(caught.value)
    assert fake.fetched == []


def test_download_that_stops(fake: FakeHub) -> None:
    fake.sizes["model.safetensors"] = 10
    fake.error, fake.failing = TransportError("connection reset"), {"snapshot"}
    with pytest.raises(
        CheckpointError, match=r"stopped \(connection reset\); run the same command"
    ) as caught:
        download(LOCATION)
    assert not isinstance(caught.value, HubUnavailableError)


def test_offline_mode_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    for value, expected in (("1", True), ("true", True), ("ON", True), ("0", False), ("", False)):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        assert hub.offline_mode() is expected
