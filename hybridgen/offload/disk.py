"""Files on the decode path: byte ranges read by a few threads into host memory, and files that end with their process.

Reads go past the page cache (O_DIRECT) where the file system lets them: memory then holds what the plan says and no
copy of the file beside it, and the speed is the disk's. The ends of a direct read lie on borders of 4096 bytes, in the
file as in memory, so a range is widened to them and its target has room for that (`room_for`).

A file that a process made for itself is locked (flock) as long as the process lives, however it ends. The next start
removes those whose lock is free (`sweep`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridgen.errors import DiskError
from hybridgen.models.gguf_file import cache_root
from hybridgen.models.hf_directory import free_bytes
from hybridgen.offload.transfer import Ticket
from hybridgen.telemetry import Telemetry

BORDER_BYTES = 4096  # of a direct read: no disk has larger blocks
SECTOR_BYTES = 512
PIECE_BYTES = 4 << 20  # read at a time; the pieces of a range are spread over the threads
RESERVE_BYTES = 1 << 30  # left free on a disk that we write to
_OWN = "own-"  # how names of files begin that live as long as their process


@dataclass(frozen=True)
class FileRange:
    """Bytes [offset, offset + nbytes) of a file."""

    file: Path
    offset: int
    nbytes: int


def room_for(nbytes: int) -> int:
    """Bytes of memory, from a border, that a range of `nbytes` may take: it begins anywhere in the first block."""
    return _up(nbytes) + BORDER_BYTES


class ReadTicket(Ticket):
    """A range under way into host memory."""

    def __init__(self, data: Tensor, pieces: Sequence[Future[None]]) -> None:
        self.data = data  # uint8 [nbytes]: where the range comes to lie; valid after a wait
        self._pieces = list(pieces)
        self._failed: BaseException | None = None

    def wait(self) -> None:
        """The device's streams cannot wait for a disk: the host does."""
        self.wait_host()

    def wait_host(self) -> None:
        """From now on, the host sees the range; DiskError if it could not be read."""
        for piece in self._pieces:  # all of them: none may still be writing when the caller goes on
            self._failed = piece.exception() or self._failed
        self._pieces.clear()
        if self._failed is not None:
            raise self._failed


class DiskReader:
    """Reads ranges of files by `threads` threads (`placement.disk_threads`). Used by one thread; close it."""

    def __init__(self, threads: int, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._files: dict[Path, _OpenFile] = {}
        self._busy = _BusyTime()
        self.bytes_read = 0

    def read(self, wanted: FileRange, target: Tensor, after: Sequence[Ticket] = ()) -> ReadTicket:
        """Send for a range. DiskError here if the file cannot be opened, from `wait_host` if it cannot be read.

        target: host memory, uint8, contiguous, from a border of 4096 bytes (as `HostSlab.take` gives it), of at least
        `room_for(nbytes)` bytes; all of it may be written to. after: copies out of it, which a thread waits for first.
        """
        if target.data_ptr() % BORDER_BYTES or target.numel() < room_for(wanted.nbytes):
            raise ValueError(f"{wanted}: {target.numel()} bytes at {target.data_ptr():#x} are no room for it")
        if wanted.file not in self._files:
            self._files[wanted.file] = _OpenFile(wanted.file)
        file, memory = self._files[wanted.file], target.numpy().data
        inset = wanted.offset % BORDER_BYTES
        start, needed = wanted.offset - inset, inset + wanted.nbytes
        length = _up(needed)
        self.bytes_read += length
        self._telemetry.count_bytes("disk", length)

        def piece(first: int) -> None:
            end = min(first + PIECE_BYTES, length)
            for ticket in after:
                ticket.wait_host()
            with self._busy:
                read = file.read(memory[first:end], start + first)
            if read < min(end, needed) - first:
                raise DiskError(
                    f"{wanted.file}: bytes {wanted.offset} to {wanted.offset + wanted.nbytes} are asked for, the file "
                    f"ends at {start + first + read}; it was changed since it was opened"
                )

        pieces = [self._threads.submit(piece, first) for first in range(0, length, PIECE_BYTES)]
        return ReadTicket(target[inset:needed], pieces)

    def forget(self, file: Path) -> None:
        """Close a file that will not be read again (one that is removed takes up its disk until then)."""
        if file in self._files:
            self._files.pop(file).close()

    def restart(self) -> None:
        """Forget what was counted; nothing may be under way."""
        self.bytes_read, self._busy = 0, _BusyTime()

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being read."""
        return self._busy.seconds

    @property
    def bytes_per_s(self) -> float | None:
        """What the disk gave in the time that it was asked; None: nothing was read."""
        return self.bytes_read / self.busy_s if self.busy_s else None

    @property
    def notes(self) -> list[str]:
        """What the user should know of the files, each thing once."""
        return sorted({file.note for file in self._files.values() if file.note})

    def close(self) -> None:
        """Ends the threads; what has not begun to be read is given up."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()


class _BusyTime:
    """Seconds in which at least one thread is inside."""

    def __init__(self) -> None:
        self._lock, self._inside, self._since, self._seconds = threading.Lock(), 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._inside else 0.0)


class _OpenFile:
    """A file that is read past the page cache, or else leaves nothing in there. Read by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.note: str | None = None
        self._direct: int | None = None
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self._buffered = os.open(path, flags)
        except OSError as error:
            raise DiskError(f"{path} cannot be opened: {os.strerror(error.errno or 0)}") from None
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._say()

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill memory from there on; how many bytes there were: fewer than asked for at the end of the file."""
        try:
            if self._direct is not None:
                try:
                    return _read_all(self._direct, memory, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._say()  # it opens such files and does not read them
            done = _read_all(self._buffered, memory, offset)
            os.posix_fadvise(self._buffered, offset, len(memory), os.POSIX_FADV_DONTNEED)
            return done
        except OSError as error:
            what = os.strerror(error.errno or 0)
            raise DiskError(f"{self._path} cannot be read at {offset} ({len(memory)} bytes): {what}") from None

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def _say(self) -> None:
        self.note = (
            f"the file system of {self._path.parent} has no direct reads (O_DIRECT): they pass through the page cache, "
            "and the bandwidth seen may be the memory's"
        )


def _read_all(descriptor: int, memory: memoryview, offset: int) -> int:
    """As much as there is up to the end of the file. preadv releases the GIL."""
    done = 0
    while done < len(memory):
        read = os.preadv(descriptor, [memory[done:]], offset + done)
        done += read
        if read == 0 or done % SECTOR_BYTES:  # only a file's end lies within a sector
            break
    return done


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """DiskError if the folder's disk has no room for so many bytes and a reserve."""
    free = free_bytes(folder)
    if needed + RESERVE_BYTES > free:
        raise DiskError(
            f"not enough disk space: {purpose} needs {needed / 1e9:.2f} GB in {folder}, {free / 1e9:.2f} GB are free, "
            f"of which {RESERVE_BYTES / 1e9:.2f} GB are left alone; free some, or give a folder on another disk: "
            "--set placement.disk_dir=FOLDER"
        )


def disk_folder(named: str | None) -> Path:
    """Where our files go: `placement.disk_dir`, else `offload` in the cache folder."""
    return Path(named).expanduser() if named else cache_root() / "offload"


class DiskFile:
    """A file of `nbytes` that this process made: there until `close`, or until the next start if it was killed."""

    def __init__(self, folder: Path, name: str, nbytes: int, purpose: str) -> None:
        """name: to tell files apart by eye. DiskError before a byte is written if there is no room for it."""
        require_space(folder, nbytes, purpose)
        self.nbytes, self._purpose = nbytes, purpose
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = _make_own(folder, name)
        except OSError as error:
            raise self._failed("made", folder, error) from None
        self._finalizer = weakref.finalize(self, _remove, self.path, self._descriptor, os.getpid())
        try:
            if nbytes:
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            self.close()
            raise self._failed("made", self.path, error) from None

    def write(self, offset: int, source: Tensor) -> None:
        """The bytes of a contiguous host tensor, from there on; they are in the page cache, see `drop_cached`."""
        data = source.detach().reshape(-1).view(torch.uint8)
        if offset < 0 or offset + data.numel() > self.nbytes:
            raise ValueError(f"{data.numel()} bytes at {offset} of a file of {self.nbytes}")
        memory, done = data.numpy().data, 0
        try:
            while done < len(memory):
                done += os.pwrite(self._descriptor, memory[done:], offset + done)
        except OSError as error:
            raise self._failed("written", self.path, error) from None

    def drop_cached(self) -> None:
        """Once what was written is on the disk, nothing of it stays in memory. Waits for the disk."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise self._failed("written", self.path, error) from None
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def keep_as(self, path: Path) -> None:
        """The finished file stays, under this name, whole or not at all; of two that are made at once, either."""
        self.drop_cached()
        self.path.rename(path)
        self.path = path
        self._finalizer.detach()
        os.close(self._descriptor)

    def close(self) -> None:
        """Remove it."""
        self._finalizer()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, what: str, where: Path, error: OSError) -> DiskError:
        reason = os.strerror(error.errno or 0)
        return DiskError(f"{where}: the file for {self._purpose} ({self.nbytes} bytes) cannot be {what}: {reason}")


def sweep(folder: Path) -> list[Path]:
    """Remove files of processes that are no longer alive; those removed."""
    removed = []
    for path in sorted(folder.glob(f"{_OWN}*")) if folder.is_dir() else ():
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or somebody else's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            pass  # its process lives
        finally:
            os.close(descriptor)
    return removed


def _make_own(folder: Path, name: str) -> tuple[Path, int]:
    """A new file that is locked. A sweep may come between the two and take it away: then another one."""
    while True:
        path = folder / f"{_OWN}{os.getpid()}-{secrets.token_hex(4)}-{name}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        except BlockingIOError:
            pass  # being swept
        os.close(descriptor)


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked does not take the file away
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _up(size: int) -> int:
    return -(-size // BORDER_BYTES) * BORDER_BYTES
