"""`python -m tests.equivalence.find_seeds [CASE ...]`: the first seed of a case with no choice near a tie.

For whoever adds a case or changes a tiny model: put the printed number into the case. All take a minute.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch

from tests.equivalence import test_append, test_forgotten_wait, test_lookahead, test_partial_budget, test_plans
from tests.equivalence.zoo import ModelZoo

TRIES = 300


def main() -> None:
    """Print a line for every case, or for the named ones."""
    torch.set_num_threads(1)
    cases = {
        **test_partial_budget.CASES,
        **test_append.CASES,
        **test_forgotten_wait.CASES,
        **{f"lookahead: {name}": case for name, case in {**test_lookahead.CASES, **test_lookahead.FULL_BUDGET}.items()},
        **{f"plans: {name}": case for name, case in test_plans.CASES.items()},
    }
    with tempfile.TemporaryDirectory() as parent:
        zoo = ModelZoo(Path(parent))
        for name in sys.argv[1:] or cases:
            case = cases[name]
            seeds = (case.seed, *range(TRIES))
            found = (seed for seed in seeds if dataclasses.replace(case, seed=seed).is_clear(zoo))
            print(f"{name}: seed={next(found, None)} (was {case.seed})", flush=True)


if __name__ == "__main__":
    main()
