"""The next token: greedy, and the frequencies of draws against the distribution computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridgen.config import SamplingConfig
from hybridgen.engine.sampler import Sampler

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])
DRAWS = 20_000


def frequencies(seed: int = 0, **settings: Any) -> torch.Tensor:
    sampler = Sampler(SamplingConfig(**settings), CPU, seed)
    tokens = sampler(LOGITS.expand(DRAWS, -1).clone())
    assert tokens.shape == (DRAWS,) and tokens.dtype == torch.int64
    return torch.bincount(tokens, minlength=5) / DRAWS


def expected(temperature: float, allowed: list[int]) -> torch.Tensor:
    p = torch.softmax(LOGITS.double() / temperature, 0)
    mask = torch.zeros(5, dtype=torch.float64)
    mask[allowed] = 1.0
    return (p * mask / (p * mask).sum()).float()


def test_temperature_zero_takes_the_best() -> None:
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    for other in ({}, {"top_k": 3}, {"top_p": 0.5}):
        assert Sampler(SamplingConfig(temperature=0.0, **other), CPU, 0)(logits).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 1.0, "top_k": 2}, [1, 3]),
        ({"temperature": 1.0, "top_k": 1}, [1]),
        ({"temperature": 1.0, "top_k": 99}, [0, 1, 2, 3, 4]),
        ({"temperature": 1.0, "top_p": 0.5}, [1]),  # p of the best is 0.54
        ({"temperature": 1.0, "top_p": 0.6}, [1, 3]),
        ({"temperature": 1.0, "top_p": 0.01}, [1]),
        ({"temperature": 2.0, "top_p": 0.5}, [1, 3]),  # 0.38 + 0.23
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.99}, [0, 1, 3]),
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, Any], allowed: list[int]) -> None:
    """Within five standard deviations of a frequency; what is not allowed never comes."""
    found, wanted = frequencies(**settings), expected(settings["temperature"], allowed)
    assert (found[wanted == 0] == 0).all()
    assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / DRAWS).sqrt()).all()


def test_top_p_is_of_what_top_k_left() -> None:
    """Of the best two, the first alone holds 0.73: with 0.7 it is all that is left."""
    assert frequencies(temperature=1.0, top_k=2, top_p=0.7).tolist() == [0, 1, 0, 0, 0]


def test_a_seed_repeats_and_another_does_not() -> None:
    logits = torch.zeros(64, 1000)
    draws = [Sampler(SamplingConfig(temperature=1.0), CPU, seed)(logits).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_draws_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    frequencies(temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_logits_are_the_callers() -> None:
    logits = LOGITS.expand(3, -1).clone()
    Sampler(SamplingConfig(temperature=0.7, top_k=2, top_p=0.5), CPU, 0)(logits)
    assert torch.equal(logits, LOGITS.expand(3, -1))
