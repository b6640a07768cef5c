"""`compare --budget`: what the solved settings attend to, added up by other means, is the budget that was asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen.config import EvictionConfig, Setting, Settings, build_config
from hybridgen.errors import ConfigError
from hybridgen.evaluation.budgets import ALL_TOKENS, with_budget, with_keep
from hybridgen.selection.eviction import policy_of

BLOCK = 64


def given_as(**values: Any) -> Settings:
    """`cache__sinks=4`: of a strategy file."""
    return {path.replace("__", "."): Setting(value, "a file") for path, value in values.items()}


def hybrid(sinks: int = 4, window: int = 512, **more: Any) -> Settings:
    return given_as(
        attention__executor="hybrid",
        cache__sinks=sinks,
        cache__gpu_window=window,
        selection__keep=0.3,
        selection__keep_mass=0.95,
        selection__min_keep=64,
        **more,
    )


def modes(exact: int, layers: int, other: str = "lookahead") -> list[str]:
    return ["resident"] * exact + [other] * (layers - exact)


def values(solved: Settings) -> dict[str, Any]:
    return {path: setting.value for path, setting in solved.items()}


def attended(found: dict[str, Any], exact: int, layers: int, prompt: int, steps: int) -> float:
    """Token by token: of a window that holds W to W + 63 + 64 l / L + 1 tokens, what is not on the host or is chosen.

    Each row is followed by itself: it leaves in a block of 64 once the window has grown beyond its layer's limit.
    """
    total = 0.0
    for layer in range(exact, layers):
        window: list[int] = list(range(found["cache.sinks"], prompt))
        host = 0
        while len(window) >= found["cache.gpu_window"] + BLOCK:
            window, host = window[BLOCK:], host + BLOCK
        for length in range(prompt + 1, prompt + steps + 1):
            window.append(length - 1)
            total += (found["cache.sinks"] + len(window) + found["selection.keep"] * host) / length / steps
            if len(window) >= found["cache.gpu_window"] + BLOCK + BLOCK * layer // layers:
                window, host = window[BLOCK:], host + BLOCK
    return (exact + total) / layers


@settings(max_examples=60, deadline=None)
@given(
    budget=st.floats(0.02, 1.0),
    prompt=st.integers(300, 3000),
    steps=st.integers(1, 40),
    layers=st.integers(1, 8),
    exact=st.integers(0, 3),
    sinks=st.integers(0, 8),
    window=st.integers(1, 600),
)
def test_hybrid(budget: float, prompt: int, steps: int, layers: int, exact: int, sinks: int, window: int) -> None:
    exact = min(exact, layers - 1)
    strategy, layer_modes = hybrid(sinks, window), modes(exact, layers)
    try:
        solved, split = with_budget("x", strategy, layer_modes, budget, prompt, steps)
    except ConfigError as error:
        smallest = float(str(error).rsplit(" ", 1)[1])
        assert smallest > budget
        solved, split = with_budget("x", strategy, layer_modes, min(1.0, smallest), prompt, steps)
        assert split.budget == pytest.approx(min(1.0, smallest), abs=1e-3)
        return
    found = values(solved)
    # The window's own rows aside, all that is off is a block.
    assert attended(found, exact, layers, prompt, steps) == pytest.approx(budget, abs=1e-4)
    by_hand = found["cache.sinks"] + found["cache.gpu_window"] + BLOCK
    share = by_hand / prompt + found["selection.keep"] * (1 - by_hand / prompt)
    assert (exact + (layers - exact) * min(1.0, share)) / layers == pytest.approx(budget, abs=BLOCK / prompt + 0.02)
    assert split.budget == pytest.approx(budget, abs=1e-4) and split.exact == pytest.approx(exact / layers)
    assert found["selection.keep_mass"] is None and found["selection.min_keep"] == 0
    assert 1 <= found["cache.gpu_window"] <= window and found["cache.sinks"] == sinks
    rest = (budget * layers - exact) / (layers - exact)
    if found["cache.gpu_window"] > 1:
        assert split.local <= rest / 2 * (layers - exact) / layers + 1e-9


def test_a_window_that_is_small_enough_stays() -> None:
    solved, _ = with_budget("x", hybrid(window=100), modes(0, 4), 0.5, 8192, 31)
    assert values(solved)["cache.gpu_window"] == 100


def test_a_budget_below_the_fixed_part_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"--budget 0\.1: strategy slow .*3 of 12 layers are exact") as caught:
        with_budget("slow", hybrid(), modes(3, 12), 0.1, 4096, 31)
    smallest = float(re.search(r"smallest possible is (\d\.\d+)", str(caught.value))[1])  # type: ignore[index]
    with_budget("slow", hybrid(), modes(3, 12), smallest, 4096, 31)
    with pytest.raises(ConfigError):
        with_budget("slow", hybrid(), modes(3, 12), smallest - 1e-3, 4096, 31)


@pytest.mark.parametrize("mode", ["resident", "streamed", "on_cpu"])
def test_what_attends_to_all_stays_as_it_is(mode: str) -> None:
    strategy = given_as(attention__executor="full" if mode == "resident" else mode)
    assert with_budget("x", strategy, [mode] * 4, 0.1, 2048, 31) == (strategy, ALL_TOKENS)


def test_alpha_makes_it_a_bound() -> None:
    _, split = with_budget("x", hybrid(selection__alpha=4.0), modes(2, 16), 0.3, 4096, 31)
    assert split.is_bound and split.describe().startswith("at most 0.3000 = exact 0.1250")
    _, split = with_budget("x", hybrid(selection__alpha=None), modes(2, 16), 0.3, 4096, 31)
    assert not split.is_bound


def evicting(policy: str, **more: Any) -> Settings:
    return given_as(
        attention__executor="evicting", eviction__policy=policy, eviction__heavy=0.1, eviction__recent=0.1, **more
    )


@settings(max_examples=40, deadline=None)
@given(
    budget=st.floats(0.05, 0.95),
    prompt=st.integers(400, 40000),
    steps=st.integers(1, 64),
    exact=st.integers(0, 2),
    policy=st.sampled_from(["h2o", "keyformer", "snapkv", "streaming_llm"]),
)
def test_evicting(budget: float, prompt: int, steps: int, exact: int, policy: str) -> None:
    layers, sinks = 40, 4
    strategy = evicting(policy, eviction__sinks=sinks)
    try:
        solved, split = with_budget("x", strategy, modes(exact, layers, "evicting"), budget, prompt, steps)
    except ConfigError:
        assert (budget * layers - exact) / (layers - exact) * prompt < steps + sinks + 4
        return
    found = values(solved)
    heavy, recent = found["eviction.heavy"], found["eviction.recent"]
    assert isinstance(heavy, int) and isinstance(recent, int) and recent >= 1
    kept = heavy + recent
    lengths = [prompt + step for step in range(1, steps + 1)]
    # StreamingLLM's window has the new token in it; SnapKV drops none that it generates.
    new = [{"snapkv": step, "streaming_llm": 0}.get(policy, 1) for step in range(1, steps + 1)]
    each = sum((sinks + kept + n) / length for n, length in zip(new, lengths, strict=True)) / steps
    off = 0.6 / prompt + (steps / prompt) ** 2 / 10  # a rounded count; and lengths that are not all their mean
    attends_to = (exact + (layers - exact) * each) / layers
    if sinks + kept == prompt:  # there is no more to keep
        assert attends_to < budget + off and split.budget == pytest.approx(attends_to, abs=off)
    else:
        assert attends_to == pytest.approx(budget, abs=off)
        assert split.budget == pytest.approx(budget, abs=0.6 / prompt)
    assert build_config(solved).eviction.policy == policy
    if policy == "h2o":
        assert abs(heavy - recent) <= 1
    elif policy == "keyformer":
        assert recent == pytest.approx(0.3 * kept, abs=1)
    elif policy == "snapkv":
        assert recent == min(32, kept // 2)
    else:
        assert heavy == 0


@pytest.mark.parametrize("policy", ["h2o", "keyformer", "snapkv", "streaming_llm"])
def test_a_file_with_the_policy_alone(policy: str) -> None:
    """Both settings are made in any case; what the file leaves out has its default, and the policy accepts it."""
    strategy = given_as(attention__executor="evicting", eviction__policy=policy)
    solved, split = with_budget("x", strategy, modes(0, 4, "evicting"), 0.25, 2048, 31)
    kept = with_keep(strategy, 0.1, 2048)
    for found in (solved, kept):
        assert set(found) == set(strategy) | {"eviction.heavy", "eviction.recent"}
        policy_of(build_config(found).eviction)
    new = {"streaming_llm": 0, "snapkv": 16}.get(policy, 1)
    total = solved["eviction.heavy"].value + solved["eviction.recent"].value
    assert (total + new) / (2048 + 16) == pytest.approx(0.25, abs=1e-3) == split.budget
    assert solved["eviction.recent"].source == "--budget 0.25"
    assert [kept[f"eviction.{name}"].value for name in ("heavy", "recent")] == (
        [0, 205] if policy == "streaming_llm" else [205, EvictionConfig().recent]
    )


def test_no_heavy_tokens_yet() -> None:
    """What a policy scores is not told by the file's numbers."""
    strategy = evicting("h2o") | given_as(eviction__heavy=0)
    solved, _ = with_budget("x", strategy, modes(0, 4, "evicting"), 0.25, 2048, 31)
    assert values(solved)["eviction.heavy"] == pytest.approx(values(solved)["eviction.recent"], abs=1)


def test_keep_is_the_same_share_for_all() -> None:
    found = values(with_keep(hybrid(), 0.1, 2000))
    assert (found["selection.keep"], found["selection.keep_mass"], found["selection.min_keep"]) == (0.1, None, 0)
    assert found["cache.gpu_window"] == 512
    assert values(with_keep(evicting("h2o"), 0.1, 2000))["eviction.heavy"] == 200
    assert values(with_keep(evicting("snapkv"), 300, 2000))["eviction.heavy"] == 300
    streaming = given_as(attention__executor="evicting", eviction__policy="streaming_llm", eviction__recent=512)
    assert values(with_keep(streaming, 0.1, 2000))["eviction.recent"] == 200
    assert values(with_keep(evicting("h2o"), 0.07, 6400))["eviction.heavy"] == 448
