"""Keys that the host keeps in fewer bits: the engine stores, scores, fetches and attends to what the oracle says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hybridgen.offload.pieces import Graph, RepeatRecorder
from tests.equivalence.against_engine import Case, SideBySide, Turns
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.simulated_batch import Plans
from tests.equivalence.test_plans import FEEDBACK_ROOM, MIX, NATIVE, like, like_feedback, mixed, steady
from tests.equivalence.tiny_models import ROTATING
from tests.equivalence.zoo import ModelZoo

# The first sequence is too short for its recall to be measured: all layers are stored as was asked for.
RAGGED_64: Turns = (((50, 386, 236), 32),)
RAGGED_16: Turns = (((12, 338, 210), 32),)
MEASURED: Turns = (((386, 50, 236), 20),)
TURNS: Turns = (((20, 250, 330), 14), ((70, 60, 1), 0), ((30, 1, 65), 10), ((1, 1, 1), 6), ((20, 1, 3), 7))

WHOLE: Turns = (((50, 386, 236), 90),)  # of which the first is short at first, as above

KEEP = Settings(window=64, keep=0.1)
MASS = Settings(window=64, keep=None, keep_mass=0.9)
NONE_RESIDENT: Any = {"window": 16, "exact_layers": (), "exact_mode": "select"}
PAIR = Settings(window=16, keep=0.1, keep_mass=0.9, min_keep=8)


def logits(settings: Settings, **changes: Any) -> Settings:
    return like(settings, lookahead="logits", **changes)


def off(settings: Settings, **changes: Any) -> Settings:
    return like(settings, lookahead="off", **changes)


def case(
    model: str,
    settings: Settings,
    keys: str,
    turns: Turns = RAGGED_64,
    plans: Plans | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Case:
    """keys: the key type, the sketch or both, and where it lies if not on the host: `int8+int4@gpu`."""
    keys, _, home = keys.partition("@")
    parts = keys.split("+")
    key_type: Any = next((part for part in parts if part in ("fp16", "bf16", "int8")), "fp32")
    sketch: Any = next((part for part in parts if part in ("int4", "int2")), "none")
    settings = dataclasses.replace(settings, key_type=key_type, sketch=sketch, sketch_home=home or "host")
    return Case(model, settings, turns, {**(FEEDBACK_ROOM if plans else {}), **overrides}, seed, plans)


CASES = {
    # Of a floating type, which no kernel has to learn
    "fp16, opt keep": case("opt", KEEP, "fp16"),
    "fp16, gqa2 pair": case("llama-gqa2", PAIR, "fp16", RAGGED_16),
    "fp16, logits, qwen2 mass": case("qwen2", logits(MASS), "fp16"),
    "fp16, append, mha": case("llama-mha", like(KEEP, window=16), "fp16", TURNS),
    "fp16, gqa3 mixed keep": case("llama-gqa3", KEEP, "fp16", plans=mixed(KEEP, MIX, (1.0, 1.5))),
    "bf16, mha mass": case("llama-mha", MASS, "bf16"),
    "bf16, gqa3 keep, off": case("llama-gqa3", off(KEEP), "bf16"),
    "bf16, delta, llama3 pair": case("llama3-rope", like(PAIR, predictor="delta"), "bf16", RAGGED_16),
    "bf16, append in chunks, qwen2": case("qwen2", like(MASS, window=16, prefill_chunk=29), "bf16", TURNS),
    "bf16, select 0 2, opt": case("opt", like(KEEP, exact_layers=(0, 2), exact_mode="select"), "bf16"),
    "bf16, opt feedback mass": case("opt", MASS, "bf16", plans=like_feedback(MASS)),
    # int8: scanned, fetched and attended to as they are stored
    "int8, opt keep": case("opt", KEEP, "int8"),
    "int8, mha mass": case("llama-mha", MASS, "int8"),
    "int8, gqa2 pair": case("llama-gqa2", PAIR, "int8", RAGGED_16),
    "int8, gqa4 count 1": case("llama-gqa4", like(KEEP, keep=1), "int8"),
    "int8, qwen2 keep, off": case("qwen2", off(KEEP), "int8"),
    "int8, logits, gqa3 keep": case("llama-gqa3", logits(KEEP), "int8"),
    "int8, logits delta, llama3 mass": case("llama3-rope", logits(MASS, predictor="delta"), "int8"),
    "int8, renormalise, opt pair": case("opt", logits(PAIR, dropped="renormalise"), "int8", RAGGED_16),
    "int8, delta, gqa3 mass": case("llama-gqa3", like(MASS, predictor="delta"), "int8"),
    "int8, select 0 2, qwen2": case("qwen2", like(KEEP, exact_layers=(0, 2), exact_mode="select"), "int8"),
    "int8, first pieces, mha": case("llama-mha", like(KEEP, prefill_chunk=70), "int8"),
    "int8, first piece of sinks, opt": case("opt", like(KEEP, prefill_chunk=4), "int8", (((50, 386), 20),)),
    "int8, no sinks, window 1": case("opt", Settings(window=1, sinks=0, keep=0.1), "int8", (((1, 127, 190), 36),)),
    "int8, filling": case("llama-gqa4", like(KEEP, window=16, exact_mode="select"), "int8", (((10, 130), 100),)),
    "int8, full budget": case("llama-gqa2", like(KEEP, keep=1.0), "int8"),
    "int8, append, opt": case("opt", like(KEEP, window=16), "int8", TURNS),
    "int8, append in chunks, gqa2": case("llama-gqa2", like(MASS, window=16, prefill_chunk=29), "int8", TURNS),
    "int8, append, logits, qwen2": case("qwen2", logits(PAIR), "int8", TURNS, runtime__micro_batch=2),
    "int8, micro-batches of 1": case("llama-gqa2", MASS, "int8", (((130, 50, 120), 32),), runtime__micro_batch=1),
    "int8, no scan thread": case("llama-gqa3", PAIR, "int8", RAGGED_16, runtime__worker_threads=0),
    "int8, immediate, logits": case("llama-gqa2", logits(PAIR), "int8", RAGGED_16, runtime__transfer="immediate"),
    "int8, opt mixed keep": case("opt", KEEP, "int8", plans=mixed(KEEP, MIX, (1.0, 1.5, 2.25))),
    "int8, gqa2 feedback mass": case("llama-gqa2", MASS, "int8", plans=like_feedback(MASS)),
    "int8, unscored at times, qwen2": case("qwen2", KEEP, "int8", plans=mixed(KEEP, (1, 64, 1, None), (1.0, 2.0))),
    "int8, logits, gqa3 mixed mass": case("llama-gqa3", logits(MASS), "int8", plans=mixed(MASS, MIX)),
    "int8, append, mixed": case("llama-gqa2", PAIR, "int8", TURNS, mixed(PAIR, MIX, (1.0, 1.5))),
    # Sketches: only what is kept depends on them, and what is fetched is the key itself
    "int4, opt keep": case("opt", KEEP, "int4"),
    "int4, gqa2 pair": case("llama-gqa2", PAIR, "int4", RAGGED_16),
    "int4, qwen2 mass, off": case("qwen2", off(MASS), "int4"),
    "int4, logits, mha keep": case("llama-mha", logits(KEEP), "int4"),
    "int4, renormalise delta, gqa3": case("llama-gqa3", logits(MASS, predictor="delta", dropped="renormalise"), "int4"),
    "int4, select 0 2, gqa4": case("llama-gqa4", like(KEEP, exact_layers=(0, 2), exact_mode="select"), "int4"),
    "int4, append, opt": case("opt", like(KEEP, window=16), "int4", TURNS),
    "int4, gqa2 mixed pair": case("llama-gqa2", PAIR, "int4", RAGGED_16, mixed(PAIR, MIX, (1.0, 1.5))),
    "int4, opt feedback mass": case("opt", MASS, "int4", plans=like_feedback(MASS)),
    "int2, opt mass": case("opt", MASS, "int2"),
    "int2, gqa3 keep": case("llama-gqa3", KEEP, "int2"),
    "int2, mha pair, off": case("llama-mha", off(PAIR), "int2", RAGGED_16),
    "int2, logits, gqa2 mass": case("llama-gqa2", logits(MASS), "int2"),
    "int2, delta, llama3 keep": case("llama3-rope", like(KEEP, predictor="delta"), "int2"),
    "int2, append, qwen2": case("qwen2", like(MASS, window=16), "int2", TURNS),
    "int2, opt mixed keep": case("opt", KEEP, "int2", plans=mixed(KEEP, MIX, (1.0, 1.5))),
    "int2, no scan thread": case("llama-gqa3", PAIR, "int2", RAGGED_16, runtime__worker_threads=0),
    # Both
    "int8+int4, opt keep": case("opt", KEEP, "int8+int4"),
    "int8+int4, qwen2 pair": case("qwen2", PAIR, "int8+int4", RAGGED_16),
    "int8+int4, logits, gqa2 keep": case("llama-gqa2", logits(KEEP), "int8+int4"),
    "int8+int4, append, off, mha": case("llama-mha", off(KEEP, window=16), "int8+int4", TURNS),
    "int8+int4, gqa3 mixed mass": case("llama-gqa3", MASS, "int8+int4", plans=mixed(MASS, MIX, (1.0, 1.5))),
    # A sketch where the GPU's part is played: it scores, and nothing is scanned
    "int2 at home, opt mass": case("opt", MASS, "int2@gpu"),
    "int2 at home, gqa3 keep": case("llama-gqa3", KEEP, "int2@gpu"),
    "int2 at home, mha pair, off": case("llama-mha", off(PAIR), "int2@gpu", RAGGED_16),
    "int2 at home, torch kernels": case("llama-gqa2", PAIR, "int2@gpu", RAGGED_16, runtime__kernels="torch"),
    "int4 at home, delta, llama3": case("llama3-rope", like(KEEP, predictor="delta"), "int4@gpu"),
    "int8+int2 at home, append, qwen2": case("qwen2", like(MASS, window=16), "int8+int2@gpu", TURNS),
    "int2 at home, select 0 2, qwen2": case("qwen2", like(KEEP, exact_layers=(0, 2), exact_mode="select"), "int2@gpu"),
    # Every layer: nothing in a step needs the host, until a block ages
    "int4 at home, whole steps": case("llama-gqa2", like(KEEP, **NONE_RESIDENT), "int4@gpu", WHOLE),
    "int2 at home, whole steps, off": case("opt", off(PAIR, **NONE_RESIDENT), "int2@gpu", WHOLE),
    "int8+int4 at home, whole steps": case(
        "qwen2", like(MASS, **NONE_RESIDENT), "int8+int4@gpu", WHOLE, runtime__micro_batch=1
    ),
    "int2 at home, whole steps, two ahead": case(
        "llama-gqa2", like(KEEP, lookahead_layers=2, **NONE_RESIDENT), "int2@gpu", WHOLE
    ),
    "int8+int2, gqa2 mass": case("llama-gqa2", MASS, "int8+int2"),
    "int8+int2, logits, opt pair": case("opt", logits(PAIR), "int8+int2", RAGGED_16, seed=2),
    "int8+int2, append, delta": case("llama3-rope", like(PAIR, predictor="delta"), "int8+int2", TURNS),
    "int8+int2, qwen2 feedback keep": case("qwen2", KEEP, "int8+int2", plans=like_feedback(KEEP)),
    "fp16+int4, mha pair": case("llama-mha", PAIR, "fp16+int4", RAGGED_16),
    "bf16+int2, qwen2 list": case("qwen2", KEEP, "bf16+int2", plans=steady(KEEP, 60)),
}

# Where the first sequence is long enough; how often a layer must have kept what, at least.
SETTLED = {
    "int8, none falls back": (case("llama-gqa2", KEEP, "int8", MEASURED), {"int8": 5}),
    "int4, none falls back": (case("llama-gqa4", KEEP, "int4", MEASURED), {"float32+int4": 3}),
    "int8, rotating": (case(ROTATING.name, KEEP, "int8", MEASURED), {"int8": 2, "float32": 2}),
    "int8+int4, rotating": (
        case(ROTATING.name, logits(PAIR), "int8+int4", (((250, 20, 330), 14), ((70, 60, 1), 9))),
        {"int8+int4": 1, "float32+int4": 2},
    ),
    "int8+int2, rotating": (case(ROTATING.name, MASS, "int8+int2", MEASURED), {"float32+int2": 1}),
    "int8, rotating, micro-batches of 1": (
        case(ROTATING.name, KEEP, "int8", MEASURED, runtime__micro_batch=1),
        {"int8": 2 + 4 + 2, "float32": 2 + 2},
    ),
    "int8, rotating, mixed": (
        case(ROTATING.name, PAIR, "int8", MEASURED, mixed(PAIR, MIX)),
        {"int8": 2, "float32": 2},
    ),
}


def check(zoo: ModelZoo, some: Case) -> SideBySide:
    run = some.run(zoo)
    assert run.simulated.ageings()  # the steps do cross ageing blocks
    assert some.plans is None or some.settings.lookahead == "logits" or run.probes > 20
    return run


@pytest.mark.parametrize("name", CASES)
def test_stored_keys_kept_sets_and_logits(zoo: ModelZoo, name: str) -> None:
    run = check(zoo, CASES[name])
    kinds = {kind for kinds in run.kinds for kind in kinds if kind is not None}
    assert kinds == {CASES[name].settings.keys_as.kind}


@pytest.mark.parametrize("name", [name for name in CASES if "whole steps" in name])
def test_whole_steps_are_repeated(zoo: ModelZoo, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one graph on a GPU; here the layers are gone through once more with what was there when it was recorded."""
    recorded: list[object] = []
    capture = RepeatRecorder.capture

    def counted(self: RepeatRecorder, work: Callable[[], object]) -> Graph:
        if "decode_step" in work.__qualname__:  # type: ignore[attr-defined]
            recorded.append(work)
        return capture(self, work)

    monkeypatch.setattr(RepeatRecorder, "capture", counted)
    check(zoo, CASES[name])
    assert 2 <= len(recorded) <= 8  # again for each block that has aged


# Of `select` and `off`, for `logits` has no kernel of its own.
NATIVE_TOO = [name for name, some in CASES.items() if some.settings.lookahead != "logits"][::2]


@pytest.mark.parametrize("name", NATIVE_TOO)
def test_in_the_native_kernels(zoo: ModelZoo, name: str) -> None:
    check(zoo, dataclasses.replace(CASES[name], overrides={**CASES[name].overrides, **NATIVE}))


@pytest.mark.parametrize("transfer", ["lazy", "immediate"])
@pytest.mark.parametrize("name", SETTLED)
def test_layers_that_quantising_would_spoil(zoo: ModelZoo, name: str, transfer: str) -> None:
    """Immediate transfers come with the native kernels where there are any."""
    some, expected = SETTLED[name]
    run = dataclasses.replace(some, overrides={**some.overrides, "runtime__transfer": transfer}).run(zoo)
    kinds = [kind for kinds in run.kinds for kind in kinds]
    assert all(kinds.count(kind) >= count for kind, count in expected.items()), kinds
