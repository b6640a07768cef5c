"""Files that a command leaves behind: refused before the work if they cannot be, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from hybridgen.errors import ConfigError


def check_output_path(flag: str, path: Path | None) -> None:
    """ConfigError before the work, not after it, if no file can be written there."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; give a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder does not exist")


def write_whole(what: str, path: Path, content: str | bytes) -> None:
    """Written beside the target and renamed, so that a killed run never leaves half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{what} {path}: {error.strerror or error}") from None
