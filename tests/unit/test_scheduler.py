"""The fixed schedule and the mode of each layer: pure numbers."""

from __future__ import annotations

import pytest

from hybridgen.config import Config, Setting, build_config
from hybridgen.engine.layer_modes import LayerMode, layer_modes
from hybridgen.engine.schedule import FixedSchedule
from hybridgen.types import KeepRule

RULE = KeepRule(0.1, None, 0)


def config(**values: object) -> Config:
    return build_config({path.replace("__", "."): Setting(value, "the test") for path, value in values.items()})


@pytest.mark.parametrize(
    ("values", "exact", "expected"),
    [
        ({}, "resident", "RRRLL"),
        ({}, "auto", "RRRLL"),
        ({}, "select", "SSSLL"),
        ({}, 0, "SSSLL"),
        ({}, 2, "RRSLL"),
        ({}, 9, "RRRLL"),
        ({"attention__lookahead": "off"}, "resident", "RRRSS"),
        ({"attention__executor": "full"}, "select", "RRRRR"),
        ({"attention__executor": "streamed"}, "resident", "AAAAA"),
        ({"attention__executor": "on_cpu", "model__exact_layers": [9]}, "select", "CCCCC"),  # no layer is exact
        ({"model__exact_layers": []}, "resident", "RLLLL"),  # layer 0 has no layer before it
        ({"model__exact_layers": [4, 2]}, "select", "SLSLS"),
        ({"model__exact_layers": [4, 2]}, 2, "RLRLS"),
        ({"model__exact_layers": [0, 1, 2, 3, 4]}, "resident", "RRRRR"),
    ],
)
def test_modes(values: dict[str, object], exact: str | int, expected: str) -> None:
    names = {"R": "resident", "A": "streamed", "C": "on_cpu", "S": "select", "L": "lookahead"}
    found = layer_modes(config(**values, model__exact_layers_mode=exact), 5)
    assert found == tuple(names[c] for c in expected)


def test_every_step_is_alike_without_probes() -> None:
    schedule = FixedSchedule(("resident", "select", "lookahead"), RULE, 0)
    plans = [schedule.plan(step) for step in range(50)]
    assert all(plan == plans[0] for plan in plans)
    first, *others = plans[0].layers
    assert first.mode == "resident" and first.keep is None
    assert all(layer.mode == "post_qkt" and layer.keep == RULE and layer.scan_tokens is None for layer in others)
    assert not any(layer.probe_mass for layer in plans[0].layers)


def test_probes_rotate_over_the_layers_that_choose() -> None:
    """contracts.md: a true-mass probe runs on one layer, in rotation, every 16 steps."""
    modes = ("resident", "lookahead", "resident", "lookahead", "select", "select")
    schedule = FixedSchedule(modes, RULE, 16)
    probed = {}
    for step in range(16 * 6):
        layers = [index for index, layer in enumerate(schedule.plan(step).layers) if layer.probe_mass]
        if layers:
            probed[step] = layers
        plain = [(layer.mode, layer.keep) for layer in schedule.plan(step).layers]
        assert plain == [("resident", None), ("post_qkt", RULE)] * 2 + [("post_qkt", RULE)] * 2
    assert probed == {0: [1], 16: [3], 32: [4], 48: [5], 64: [1], 80: [3]}


@pytest.mark.parametrize("mode", ["resident", "streamed", "on_cpu"])
def test_nothing_to_probe(mode: LayerMode) -> None:
    schedule = FixedSchedule((mode, mode), RULE, 16)
    assert {(layer.mode, layer.keep) for layer in schedule.plan(0).layers} == {
        ("resident" if mode == "resident" else "all", None)
    }
    assert not any(layer.probe_mass for step in range(40) for layer in schedule.plan(step).layers)
