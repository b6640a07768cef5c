"""Errors a user can cause. The command line turns each into one message and exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HybridGenError(Exception):
    """A wrong input, said in one message: what was given, what is allowed, where it came from."""


class ConfigError(HybridGenError):
    """A setting is unknown, of the wrong type, or outside its range."""


class CheckpointError(HybridGenError):
    """A checkpoint is missing, truncated, corrupt, gated or of an unsupported kind."""


class HubUnavailableError(CheckpointError):
    """The hub gave no answer in time, or the machine is offline: random weights may stand in."""


class InsufficientMemoryError(HybridGenError):
    """The memory plan does not fit; the message holds the plan and what to change."""


class DiskError(HybridGenError):
    """A file of offloaded bytes cannot be made, written or read; or its disk has no room for it."""


class UnknownNameError(HybridGenError):
    """A name (model, strategy, selector, ...) is not known; the message names the nearest ones."""

    def __init__(self, kind: str, given: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
        message = f"unknown {kind} {given!r}"
        if near:
            message += f"; did you mean {' or '.join(repr(name) for name in near)}?"
        message += f" (known: {', '.join(names)})"
        if hint:
            message += f" {hint}"
        super().__init__(message)
