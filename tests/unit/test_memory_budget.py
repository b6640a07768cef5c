"""What a memory budget chooses, by the plan's numbers; tests/property has what holds for all budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.cli import Parser, add_engine_flags, given_settings
from hybridgen.config import Config, with_settings
from hybridgen.engine import memory_plan
from hybridgen.engine.admission import Admission, admit
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.memory_budget import WITHOUT_AUTO, Settled, settle
from hybridgen.errors import InsufficientMemoryError
from hybridgen.placement.plan import GIB
from hybridgen.run import left_open
from tests.unit.budget_case import choice_of, config_of

HOST = 256 * GIB
FEEDBACK: dict[str, Any] = {"selection.keep": 0.1, "selection.keep_mass": None, "schedule.mode": "feedback"}
INT2: dict[str, Any] = {"cache.sketch": "int2"}


def settled(alias: str, tokens: int, device_gib: float, free: Any = WITHOUT_AUTO, **values: Any) -> Settled:
    found = settle(choice_of(alias), config_of(**values), 1, tokens + 32, (int(device_gib * GIB), HOST), free)
    assert found.plan == memory_plan.plan_memory(choice_of(alias), found.config, found.modes, 1, tokens + 32)
    return found


def values(found: Settled) -> dict[str, Any]:
    return {chosen.path.partition(".")[2]: chosen.value for chosen in found.chosen}


PLENTY = {
    "weights_on_gpu": 1.0, "gpu_window": 512, "exact_layers_mode": "resident", "most_extra": 2.0, "prefill_chunk": 4096,
}  # fmt: skip


def test_llama_with_24_gib_needs_no_sacrifice() -> None:
    """Weights 15 GiB, KV 8 GiB on the host."""
    found = settled("llama-3.1-8b", 65536, 24, **FEEDBACK)
    assert values(found) == PLENTY
    assert all(chosen.value == chosen.best and "instead" not in chosen.describe() for chosen in found.chosen)
    assert 14.9 * GIB < found.plan.device["weights"] < 15 * GIB
    assert 7 * GIB < found.plan.host["KV host tier"] < 8 * GIB


def test_llama_with_16_gib_streams_a_part_of_its_weights() -> None:
    found = settled("llama-3.1-8b", 65536, 16, **FEEDBACK)
    chosen = values(found)
    assert 0.8 < chosen["weights_on_gpu"] < 0.95
    assert (chosen["exact_layers_mode"], chosen["most_extra"], chosen["prefill_chunk"]) == ("select", 1.0, 512)
    assert 15.9 * GIB < found.plan.device_bytes <= 16 * GIB
    assert found.plan.host["streamed weights"] > GIB
    assert {"resident"} & set(found.modes) == set()
    text = "\n".join(some.describe() for some in found.chosen)
    assert "model.exact_layers_mode    select  instead of resident, to fit" in text


def test_opt_gives_up_one_thing_after_the_other() -> None:
    """At 32k, weights 24 GiB, 0.63 GiB a resident layer. The first line is what 32 GiB give."""
    steps = [
        (32, {}),
        (30.5, {"prefill_chunk": 2048}),
        (30.1, {"prefill_chunk": 512}),
        (30, {"prefill_chunk": 1024, "most_extra": 1.0}),
        (29.8, {"prefill_chunk": 2048, "exact_layers_mode": 2}),
        (29.4, {"prefill_chunk": 1024, "most_extra": 1.0, "exact_layers_mode": 2}),
        (29, {"prefill_chunk": 1024, "exact_layers_mode": 1}),
        (28.4, {"prefill_chunk": 1024, "exact_layers_mode": "select"}),
        (28.1, {"prefill_chunk": 1024, "most_extra": 1.0, "exact_layers_mode": "select"}),
        (28, {"prefill_chunk": 1024, "most_extra": 1.0, "exact_layers_mode": "select", "gpu_window": 384}),
        (27.85, {"prefill_chunk": 512, "most_extra": 1.0, "exact_layers_mode": "select", "gpu_window": 256}),
    ]
    for gib, less in steps:
        assert values(settled("opt-13b", 32768, gib, **FEEDBACK)) == PLENTY | less, gib
    streaming = settled("opt-13b", 32768, 27.5, **FEEDBACK)
    assert 0.9 < values(streaming)["weights_on_gpu"] < 1
    assert streaming.modes[:3] == ("select",) * 3
    layers = settled("opt-13b", 32768, 28.8, **FEEDBACK).modes
    assert layers[:3] == ("resident", "select", "select") and set(layers[3:]) == {"lookahead"}


def test_a_sketch_lies_on_the_gpu_if_it_fits() -> None:
    on_gpu = settled("opt-13b", 32768, 32, **INT2, **FEEDBACK)
    assert on_gpu.config.cache.sketch_home == "gpu" and on_gpu.config.schedule.mode == "fixed"
    assert on_gpu.plan.device["sketches of the host's keys"] > 1.7 * GIB
    assert values(on_gpu)["weights_on_gpu"] == 1.0 and "most_extra" not in values(on_gpu)
    on_host = settled("opt-13b", 32768, 29, **INT2, **FEEDBACK)
    assert on_host.config.cache.sketch_home == "host" and on_host.config.schedule.mode == "feedback"
    assert on_host.plan.device["sketches of the host's keys"] == 0
    assert values(on_host)["weights_on_gpu"] == 1.0, "the sketch leaves before any weights do"
    # A schedule that was asked for decides; without a GPU the host's CPU scores.
    free = [path for path in WITHOUT_AUTO if path != "schedule.mode"]
    assert settled("opt-13b", 32768, 100, free, **INT2, **FEEDBACK).config.cache.sketch_home == "host"
    fixed: dict[str, Any] = {**FEEDBACK, "schedule.mode": "fixed"}
    assert settled("opt-13b", 32768, 100, free, **INT2, **fixed).config.cache.sketch_home == "gpu"
    config = config_of(**INT2, **FEEDBACK)
    cpu = settle(choice_of("opt-13b", "cpu"), config, 1, 4096, (None, HOST), WITHOUT_AUTO).config
    assert cpu.cache.sketch_home == "host" and cpu.schedule.mode == "feedback"


def test_a_sketch_asked_for_on_the_gpu_stays_there() -> None:
    asked: dict[str, Any] = {**INT2, "cache.sketch_home": "gpu"}
    for gib in (32, 12):
        found = settled("opt-13b", 32768, gib, **asked)
        assert found.plan.fits(gib * GIB, HOST)
        assert found.plan.device["sketches of the host's keys"] > 1.7 * GIB
        assert "sketch_home" not in values(found)
    assert values(found)["weights_on_gpu"] < 0.2


@pytest.mark.parametrize(
    ("sketch", "share"),
    [
        # Of the keys' bytes: columns, A[:, columns], A in float32.
        ("partial", 25 / 128 + 25 / 32768 + 2 * 128 / 32768),
        ("pages", 2 / 16),
    ],
)
def test_partial_keys_and_pages_never_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch, sketch: str, share: float
) -> None:
    asked: dict[str, Any] = {"cache.sketch": sketch, "selection.keep": 0.1, "selection.keep_mass": None}
    asked |= {"cache.partial_ratio": 0.2}
    for gib in (40, 12):
        found = settled("opt-13b", 32768, gib, **asked)
        assert found.plan.fits(gib * GIB, HOST) and "sketch_home" not in values(found)
        assert found.config.cache.sketch_home == "gpu" and found.config.schedule.mode == "fixed"
        tiered = sum(mode != "resident" for mode in found.modes)
        keys = tiered * 2 * 40 * 128 * 32768  # bytes, but for what sinks and window have of them
        assert found.plan.device["sketches of the host's keys"] == pytest.approx(share * keys, rel=0.03)
    with pytest.raises(InsufficientMemoryError) as error:
        admitted(monkeypatch, 140, **asked, **{"placement.gpu_memory_bytes": 2 * GIB})
    assert "sketch_home" not in str(error.value)


def test_what_is_given_is_not_changed() -> None:
    given: dict[str, Any] = {
        "cache.gpu_window": 1024, "model.exact_layers_mode": "resident", "runtime.prefill_chunk": 3000,
        "schedule.most_extra": 3.0,
    }  # fmt: skip
    found = settled("opt-13b", 32768, 24, ["schedule.mode"], **(FEEDBACK | given))
    assert [chosen.path for chosen in found.chosen] == ["placement.weights_on_gpu"]
    assert found.plan.fits(24 * GIB, HOST)
    for path, value in given.items():
        section, name = path.split(".")
        assert getattr(getattr(found.config, section), name) == value
    everything = settled("opt-13b", 32768, 24, (), **(FEEDBACK | given), **{"placement.weights_on_gpu": 1.0})
    assert everything.chosen == () and not everything.plan.fits(24 * GIB, HOST)


def test_run_leaves_open_what_nobody_gave(tmp_path: Path) -> None:
    def open_with(*argv: str) -> set[str]:
        parser = Parser("test")
        add_engine_flags(parser)
        return set(left_open(given_settings(parser.parse_args(list(argv)))))

    assert open_with() == set(WITHOUT_AUTO)
    assert open_with("--gpu-window", "512") == {"schedule.most_extra", "schedule.mode"}, "given, if only the default"
    assert open_with("--target-ms", "50") == {"cache.gpu_window", "schedule.most_extra"}
    (tmp_path / "mine.yaml").write_text("schedule: {mode: feedback, most_extra: 2.0}\n")
    assert open_with("--strategy", str(tmp_path / "mine.yaml")) == {"cache.gpu_window"}


def test_the_default_window_alone_is_no_leave_to_change_it() -> None:
    """evaluate compares windows: they are what was asked for, unless a caller says otherwise."""
    assert settled("opt-13b", 32768, 20, (), **FEEDBACK).config.cache.gpu_window == 512


def test_full_attention_has_pieces_and_weights_to_choose() -> None:
    found = settled("llama-3.1-8b", 8192, 12, **{"attention.executor": "full"})
    assert set(values(found)) == {"weights_on_gpu", "prefill_chunk"}
    assert found.plan.fits(12 * GIB, HOST)


def test_without_a_gpu_only_what_the_cpu_has_is_chosen() -> None:
    choice = choice_of("smollm2-135m", "cpu", torch.float32)
    found = settle(choice, config_of(**FEEDBACK), 1, 4096, (None, 8 * GIB), WITHOUT_AUTO)
    assert values(found) == {name: value for name, value in PLENTY.items() if name != "gpu_window"} | {
        "prefill_chunk": 2048
    }


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int, **given: Any) -> tuple[ModelChoice, Config]:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_bytes, 141 * GIB))
    return choice_of("opt-13b"), with_settings(config_of(**given), {"placement.host_memory_bytes": HOST})


def admitted(monkeypatch: pytest.MonkeyPatch, free_gib: int, **given: Any) -> Admission:
    choice, config = on_a_gpu(monkeypatch, free_gib * GIB, **given)
    return admit(choice, config, 32768, 32, 1, free=[path for path in WITHOUT_AUTO if path not in given])


def test_the_budget_is_what_was_asked_for_or_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = admitted(monkeypatch, 140, **FEEDBACK, **{"placement.gpu_memory_bytes": 28 * GIB})
    assert asked.plan.device_bytes <= asked.limits[0] == int(0.98 * 28 * GIB)  # type: ignore[operator]
    assert any("98%" in note for note in asked.notes) and not any("more than is free" in note for note in asked.notes)
    assert "exact_layers_mode    select  instead of resident, to fit" in asked.describe()
    assert asked.to_dict()["chosen"] == {chosen.path: chosen.value for chosen in asked.chosen}
    assert asked.to_dict()["device_limit_bytes"] == asked.limits[0]
    free = admitted(monkeypatch, 30, **FEEDBACK)
    assert free.plan.device_bytes <= free.limits[0] == int(0.9 * 30 * GIB)  # type: ignore[operator]
    more = admitted(monkeypatch, 20, **FEEDBACK, **{"placement.gpu_memory_bytes": 28 * GIB})
    assert more.limits[0] == int(0.98 * 20 * GIB)
    assert any("28.00 GiB is more than is free: 20.00 GiB" in note for note in more.notes)


def test_a_refusal_says_what_was_asked_and_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sketch: dict[str, Any] = {
        **INT2, "cache.sketch_home": "gpu", "placement.gpu_memory_bytes": 8 * GIB, "selection.keep": 0.1,
    }  # fmt: skip
    with pytest.raises(InsufficientMemoryError) as error:
        admitted(monkeypatch, 140, **sketch)
    text = str(error.value)
    assert re.search(r"sketches of the host's keys +1\.94 GiB\n", text)
    assert "it fits without cache.sketch_home = gpu, which was asked for" in text
    assert "\nwhat would fit: --seq" in text
    least = float(text.partition("it fits with --gpu-memory ")[2].partition("GiB")[0])
    sketch["placement.gpu_memory_bytes"] = int(least * GIB)
    admitted(monkeypatch, 140, **sketch)
    sketch["placement.gpu_memory_bytes"] = int((least - 0.05) * GIB)
    with pytest.raises(InsufficientMemoryError):
        admitted(monkeypatch, 140, **sketch)


def test_a_refusal_names_each_thing_that_was_asked_for_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"placement.gpu_memory_bytes": 24 * GIB, "placement.weights_on_gpu": 1.0}
    with pytest.raises(InsufficientMemoryError, match=r"it fits without placement\.weights_on_gpu = 1\.0") as error:
        admitted(monkeypatch, 30, **given, **{"cache.gpu_window": 8192})
    assert "cache.gpu_window" not in str(error.value), "without that alone it does not fit"
    assert "--gpu-memory" not in str(error.value), "so much is not free"
