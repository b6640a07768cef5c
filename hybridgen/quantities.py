"""Token counts and sizes as people write them: on the command line, in `--set` and in strategy files."""

from __future__ import annotations

import argparse
import math
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_tokens(text: str) -> int:
    """`2048`, `2k`, `32k` (k = 1024)."""
    number, unit = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    if not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 2048 or 32k")
    return int(number) * unit


def parse_keep(text: str) -> float | int:
    """A fraction if there is a decimal point, a count otherwise."""
    try:
        number: float | int = float(text) if "." in text else int(text)
        return number
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction such as 0.1 nor a count") from None


def parse_size(text: str) -> int:
    """Bytes: `24GiB`, `500MiB`, `24g` (powers of 1024; `GB` is 1000**3)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 24GiB")
    unit = (match[3] or "").lower()
    base = 1000 if unit == "b" and match[2] else 1024
    return math.floor(float(match[1]) * float(base ** _POWERS[match[2].lower()]))
