"""Files of the disk tier: every byte of a range, errors that name it, and no stray file after a kill."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridgen.errors import DiskError
from hybridgen.offload import disk
from hybridgen.offload.disk import BORDER_BYTES, DiskFile, DiskReader, FileRange, disk_folder, room_for, sweep
from hybridgen.offload.host_memory import HostSlab
from hybridgen.telemetry import Telemetry

CPU = torch.device("cpu")
SIZE = 3 * (1 << 16) + 1234  # no whole block


@pytest.fixture
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    reader = DiskReader(3, Telemetry())
    yield reader
    reader.close()


def target(nbytes: int) -> Tensor:
    """Room for a range, filled with something else."""
    memory = HostSlab(room_for(nbytes), CPU).take((room_for(nbytes),), torch.uint8).tensor
    return memory.fill_(0xA5)


def save(folder: Path, content: bytes) -> Path:
    path = folder / "file.bin"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("piece", [BORDER_BYTES, 5 * BORDER_BYTES, 4 << 20])
def test_ranges_anywhere(
    tmp_path: Path, content: bytes, reader: DiskReader, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", piece)
    path, draw = save(tmp_path, content), random.Random(1)
    borders = [0, 1, 511, 512, 4095, 4096, 4097, 65536, SIZE - 4097, SIZE - 1, SIZE]
    drawn = [(draw.randrange(SIZE), draw.randrange(SIZE + 1)) for _ in range(40)]
    ranges = [sorted(pair) for pair in [*drawn, *((a, b) for a in borders for b in borders)]]
    tickets = [
        (start, end, reader.read(FileRange(path, start, end - start), target(end - start))) for start, end in ranges
    ]
    for start, end, ticket in tickets:
        ticket.wait_host()
        assert bytes(ticket.data.numpy()) == content[start:end]
    assert reader.notes == [] or "O_DIRECT" in reader.notes[0]


def test_what_is_read_is_counted(tmp_path: Path, content: bytes) -> None:
    telemetry = Telemetry()
    reader = DiskReader(2, telemetry)
    assert reader.bytes_per_s is None
    telemetry.begin_step()
    reader.read(FileRange(save(tmp_path, content), 4000, 200), target(200)).wait_host()
    assert telemetry.end_step().bytes_moved == {"disk": 2 * 4096}, "whole blocks, as the disk gives them"
    assert reader.bytes_read == 8192 and 0 < reader.busy_s < 60
    assert reader.bytes_per_s == pytest.approx(8192 / reader.busy_s)
    reader.close()


def test_without_direct_reads(
    tmp_path: Path, content: bytes, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when the file is opened, as tmpfs does, or when it is read."""
    path, opened, read = save(tmp_path, content), os.open, os.preadv
    direct: set[int] = set()

    def refusing(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(22, "Invalid argument")
        descriptor = opened(path, flags, *mode)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refusing_read(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return read(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "preadv", refusing_read)
    for at in ("open", "read"):  # noqa: B007
        ticket = reader.read(FileRange(path, 100, 9000), target(9000))
        ticket.wait_host()
        assert bytes(ticket.data.numpy()) == content[100:9100]
        assert len(reader.notes) == 1 and "no direct reads" in reader.notes[0]
        reader.forget(path)


def test_a_range_beyond_the_end(tmp_path: Path, content: bytes, reader: DiskReader) -> None:
    path = save(tmp_path, content)
    ticket = reader.read(FileRange(path, SIZE - 10, 11), target(11))
    with pytest.raises(DiskError, match=rf"file\.bin: bytes {SIZE - 10} to {SIZE + 1} .* ends at {SIZE}"):
        ticket.wait_host()
    with pytest.raises(DiskError, match=r"nothing\.bin cannot be opened: No such file"):
        reader.read(FileRange(tmp_path / "nothing.bin", 0, 1), target(1))
    with pytest.raises(ValueError, match="no room"):
        reader.read(FileRange(path, 0, 4096), target(4096)[1:])


def test_an_error_of_a_thread_is_the_waiters(
    tmp_path: Path, content: bytes, reader: DiskReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, content)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    ticket = reader.read(FileRange(path, 0, 10), target(10))
    with pytest.raises(DiskError, match=r"file\.bin cannot be read at 0 .*Input/output error"):
        ticket.wait_host()


# Files of our own


def test_a_file_is_there_until_it_is_closed(tmp_path: Path, reader: DiskReader) -> None:
    folder = tmp_path / "a" / "b"
    values = torch.randn(300, 7)
    with DiskFile(folder, "kv", values.nbytes + 100, "a test") as file:
        assert file.path.parent == folder and file.path.stat().st_size == values.nbytes + 100
        assert sweep(folder) == [] and file.path.exists()
        file.write(100, values)
        for _ in range(2):  # from the page cache, and from the disk
            ticket = reader.read(FileRange(file.path, 100, values.nbytes), target(values.nbytes))
            ticket.wait_host()
            assert torch.equal(ticket.data.view(torch.float32).view(values.shape), values)
            file.drop_cached()
        with pytest.raises(ValueError, match="of a file of"):
            file.write(101, values)
    assert list(folder.iterdir()) == []


def test_a_finished_file_stays(tmp_path: Path) -> None:
    with DiskFile(tmp_path, "w", 8, "a test") as file:
        file.write(0, torch.arange(8, dtype=torch.uint8))
        file.keep_as(tmp_path / "kept")
    assert sweep(tmp_path) == [] and (tmp_path / "kept").read_bytes() == bytes(range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not there"
    monkeypatch.setattr(disk, "free_bytes", lambda _: 5 * 10**9)
    with pytest.raises(DiskError, match=r"the KV needs 4\.50 GB in .*not there, 5\.00 GB are free, of which 1\.07"):
        DiskFile(folder, "kv", 4_500_000_000, "the KV")
    assert not folder.exists()
    DiskFile(folder, "kv", 1000, "the KV").close()


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDGEN_CACHE", str(tmp_path))
    assert disk_folder(None) == tmp_path / "offload" and disk_folder("~/x") == Path.home() / "x"
    assert sweep(tmp_path / "offload") == [], "not there"


BEGIN = """
import os, sys, torch
from pathlib import Path
from hybridgen.offload.disk import DiskFile, sweep
folder = Path(sys.argv[1])
"""
# Ten processes (torch is imported once) make files, write to them, keep some and close some until they are killed.
CHILDREN = """
for _ in range(10):
    if os.fork() == 0:
        break
else:
    for _ in range(10):
        os.write(1, b"%d\\n" % os.wait()[0])
    file = DiskFile(folder, "last", 10, "a test")
    raise KeyboardInterrupt  # nobody closes it, and no start has to sweep it
sweep(folder)
files = []
os.write(1, b"%d\\n" % os.getpid())
while True:
    file = DiskFile(folder, "kv", 1 << 20, "a test")
    file.write(4096, torch.ones(1 << 18, dtype=torch.uint8))
    files.append(file)
    if len(files) == 5:
        files[0].keep_as(folder / "kept")
    if len(files) > 10:
        files.pop(3).close()
"""


def threads_of(process: int) -> list[Path]:
    """What the system says of each of its threads; the first word after the name is the state, T for stopped."""
    return list(Path(f"/proc/{process}/task").glob("*/stat"))


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run_script(script: str, folder: Path | str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_killed_processes_leave_nothing_behind(tmp_path: Path) -> None:
    """Nine at random points; files of two that live, this process and another, stay."""
    draw, ours, left = random.Random(2), DiskFile(tmp_path, "ours", 100, "a test"), 0
    parent = run_script(BEGIN + CHILDREN, tmp_path)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(10)]
    live = children.pop()
    try:
        for child in draw.sample(children, len(children)):
            time.sleep(draw.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            assert int(parent.stdout.readline()) == child
            left += len(list(tmp_path.glob(f"own-{child}-*")))
        os.kill(live, signal.SIGSTOP)  # it lives, and makes no new files, once it has heard of it
        until = time.monotonic() + 20
        while any("T" not in stat.read_text().rpartition(")")[2].split()[0] for stat in threads_of(live)):
            assert time.monotonic() < until
            time.sleep(0.001)
        # One that it had made and not yet locked may go: it then makes another (`_make_own`).
        of_live = {path for path in tmp_path.glob(f"own-{live}-*") if is_locked(path)}
        removed = sweep(tmp_path)
        assert left > 0 and of_live
        assert {path for path in tmp_path.iterdir() if path.name != "kept"} == {ours.path, *of_live}
        assert not {ours.path, *of_live} & set(removed)
    finally:
        for child in (live, *children):
            if Path(f"/proc/{child}").exists():
                os.kill(child, signal.SIGKILL)
        _, told = parent.communicate()
    assert "KeyboardInterrupt" in told and not list(tmp_path.glob("own-*-last"))
    sweep(tmp_path)
    ours.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
