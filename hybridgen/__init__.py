"""hybridgen: long-context LLM inference with a KV cache that does not fit the GPU (arXiv 2604.18529)."""

from __future__ import annotations

import os
import sys

if "torch" not in sys.modules:
    # A pool that spins while it waits starves every other thread of the machine (the logit worker,
    # the thread that feeds the GPU); OpenMP reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
