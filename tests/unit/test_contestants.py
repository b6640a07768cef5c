"""experiments/contestants.py and speed_rows.py: who is compared, at which budget, and what files say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from contestants import CLAIMED, CONTESTANTS, OURS, ratios, read_budgets, strategy_file
from match_budgets import METHODS
from overall_speedup import mean_ratios
from speed_rows import EXACT, method_of, read_rows

from hybridgen.config import Setting, build_config, load_strategy
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
TOKENS, LAYERS, GEN = 8192, 40, 24


def test_every_method_of_the_paper_is_there() -> None:
    named = {some.of for some in CONTESTANTS.values()}
    assert {*CLAIMED, "H2O", "StreamingLLM"} <= named


def test_how_many_times_longer() -> None:
    ms = {"aog": 480.0, "infinigen": 60.0, "hybridgen": 120.0, "hybridgen-int2-gpu": 30.0}
    assert ratios(ms, "hybridgen-int2-gpu") == {"FlexGen": 16.0, "InfiniGen": 2.0}
    assert ratios(ms, "hybridgen") == {"FlexGen": 4.0, "InfiniGen": 0.5}
    assert ratios({"aog": 480.0}, "hybridgen") == {}


def test_means_over_models_are_geometric() -> None:
    def point(**ms: float) -> dict[str, Any]:
        return {"result": {"predictions": {name: {"ms_per_token": value} for name, value in ms.items()}}}

    found = mean_ratios([point(aog=20.0, hybridgen=10.0), point(aog=80.0, hybridgen=10.0, infinigen=5.0)], "hybridgen")
    assert found == pytest.approx({"FlexGen": 4.0, "InfiniGen": 0.5})


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_has_its_budget(name: str, tmp_path: Path) -> None:
    """What its layers attend to that are not exact, counted from the settings in its file."""
    each = 0.3
    model = {"model.name": Setting("opt-13b", "test")}
    file = strategy_file(tmp_path, name, model, {method: {"each": each} for method in METHODS}, TOKENS, GEN)
    config, some = build_config(load_strategy(str(file))), CONTESTANTS[name]
    assert file.stem == name and method_of(config) == (some.method or EXACT)
    modes = layer_modes(config, LAYERS)
    if config.attention.executor == "evicting":
        eviction = config.eviction
        assert isinstance(eviction.heavy, int) and isinstance(eviction.recent, int)
        kept = eviction.heavy + eviction.recent + eviction.sinks
        assert kept / (TOKENS + GEN / 2) == pytest.approx(each, rel=0.01) and set(modes) == {"evicting"}
        assert eviction.home == ("host" if name.endswith("-host") else "device")
    elif some.method is not None:
        assert isinstance(config.selection.keep, float)
        local = config.cache.sinks + config.cache.gpu_window + 32 + 1  # half a block, and the new token
        attended = local + config.selection.keep * (TOKENS + GEN / 2 - local)
        assert attended / (TOKENS + GEN / 2) == pytest.approx(each, rel=0.02)
        assert config.selection.keep_mass is None and config.selection.min_keep == 0


def test_budgets_of_the_committed_result() -> None:
    budgets = read_budgets(RESULTS / "match_budgets_smollm2_2k.json", "keep 0.1")
    assert set(budgets) == set(METHODS)
    assert all(0 < some["each"] <= 1 for some in budgets.values())
    assert not budgets["hybridgen-paper"]["reached"], "weighing by predicted queries costs more, however much is kept"


def test_rows_of_a_comparison() -> None:
    file = RESULTS / "compare_opt13b_32k_h200.json"
    content = json.loads(file.read_text())
    rows = {row.label: row for row in read_rows(file)}
    assert list(rows) == [entry["name"] for entry in content["strategies"]]
    ours, whole = rows["hybridgen"], rows["full"]
    assert (ours.method, ours.tokens, ours.layers, ours.exact, ours.on_device) == ("hybridgen", 32768, 40, 3, False)
    of_ours = next(entry for entry in content["strategies"] if entry["name"] == "hybridgen")
    assert ours.each == pytest.approx((ours.budget * 40 - 3) / 37)
    assert ours.ms == of_ours["summary"]["decode_ms_per_token"]["median"]
    assert (whole.method, whole.each, whole.on_device, whole.exact) == (EXACT, 1.0, True, 40)
    assert [rows[name].method for name in ("infinigen", "quest", "streaming-llm", "hybridgen-paper", "aog")] == [
        "infinigen", "quest", "streaming-llm", "hybridgen-paper", EXACT,
    ]  # fmt: skip


def test_rows_of_the_decode_table_are_the_last_of_their_name() -> None:
    rows = {row.label: row for row in read_rows(RESULTS / "decode_rows_h200.txt")}
    row = rows["opt-13b 32k gpu int2 2%"]
    assert (row.ms, row.limit_ms, row.method, row.exact) == (17.2, 16.1, "hybridgen-int2", 3)
    assert rows["opt-13b 32k host int2 10%"].config.cache.sketch_home == "host"
    assert rows["opt-13b 4k x 8 aoc"].config.run.batch == 8


def test_a_file_without_speeds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="no measured speed"):
        read_rows(tmp_path / "x.json")


def test_ours_are_named() -> None:
    assert OURS == ("hybridgen", "hybridgen-int8", "hybridgen-int2", "hybridgen-int2-gpu")
