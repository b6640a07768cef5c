"""`hybridgen NAME ...` (or `python -m hybridgen NAME ...`): the same as `python -m hybridgen.NAME ...`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from hybridgen import __version__
from hybridgen.errors import HybridGenError, UnknownNameError

# Each is a module of the package with `main(argv) -> exit status`; one that is not there is not offered.
_SUMMARIES = {
    "run": "generate from a long prompt, with attention split between host and device",
    "evaluate": "measure quality against full attention",
    "bench": "measure what this machine can do",
    "compare": "run several strategies on the same prompt",
    "calibrate": "fit what predicts a model's queries, and choose its exact layers",
    "predict": "predict speed without the machine",
    "info": "what this machine offers",
}


def available_commands() -> list[str]:
    """The commands whose modules exist, the main job first."""
    return [name for name in _SUMMARIES if importlib.util.find_spec(f"hybridgen.{name}") is not None]


def _usage() -> str:
    lines = ["usage: hybridgen COMMAND [options]    (hybridgen COMMAND --help tells the options)", ""]
    lines += [f"  {name:<10} {_SUMMARIES[name]}" for name in available_commands()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the named command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"hybridgen {__version__}")
        return 0
    try:
        if name not in available_commands():
            raise UnknownNameError("command", name, available_commands())
        status: int = importlib.import_module(f"hybridgen.{name}").main(rest)
        return status
    except HybridGenError as error:
        print(f"hybridgen: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
