"""Quest's bounds: against plain loops, never below a token's own score; and K in whole pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridgen.config import Setting, build_config, load_strategy, merge_settings
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.scheduling import keep_rule, most_fetched
from hybridgen.errors import ConfigError
from hybridgen.kv_cache.page_bounds import PAGE, PageBounds, bounds_part
from hybridgen.selection.budget import choose, keep_limits
from hybridgen.types import KeepRule

BATCH, HEADS, GROUP, ROWS, DIM = 2, 2, 3, 192, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_by_hand(dtype: torch.dtype) -> None:
    shape, kind = bounds_part((BATCH, HEADS, ROWS, DIM), dtype)
    assert kind is dtype
    made = PageBounds(torch.zeros(shape, dtype=dtype))
    keys = torch.randn(BATCH, HEADS, ROWS, DIM).to(dtype)
    for sequence in range(BATCH):
        for first, last in ((0, 64), (64, 192)):
            made.store(sequence, first, keys[sequence, :, first:last])
    query = torch.randn(BATCH, HEADS * GROUP, DIM).to(dtype)
    found = made.score(query, [192, 128], 0.5)
    assert found.shape == (BATCH, HEADS * GROUP, 192) and found.is_contiguous() and found.dtype is torch.float32
    for b in range(BATCH):
        for head in range(HEADS * GROUP):
            q, k = query[b, head].double(), keys[b, head // GROUP].double()
            for first in range(0, ROWS, PAGE):
                page = k[first : first + PAGE]
                ends = [(q[c] * page[:, c].min(), q[c] * page[:, c].max()) for c in range(DIM)]
                bound = 0.5 * sum(float(max(pair)) for pair in ends)
                scores = found[b, head, first : first + PAGE]
                assert len(set(scores.tolist())) == 1 and float(scores[0]) == pytest.approx(bound, rel=1e-4, abs=1e-4)
                assert bound >= float(0.5 * (page @ q).max()) - 1e-9


@pytest.mark.parametrize(
    ("rule", "host", "extra", "expected"),
    [
        (KeepRule(0.1, None, 0, multiple=PAGE), 640, 1.0, 64),
        (KeepRule(0.11, None, 0, multiple=PAGE), 640, 1.0, 80),  # 70.4
        (KeepRule(1, None, 0, multiple=PAGE), 640, 1.0, 16),
        (KeepRule(100, None, 0, multiple=PAGE), 64, 1.0, 64),
        (KeepRule(0.1, None, 65, multiple=PAGE), 640, 1.0, 80),
        (KeepRule(0.1, None, 0, multiple=PAGE), 640, 1.3, 96),  # 83.2
        (KeepRule(0.1, None, 0, multiple=PAGE), 0, 1.0, 0),
    ],
)
def test_whole_pages_are_kept(rule: KeepRule, host: int, extra: float, expected: int) -> None:
    limits = keep_limits(rule, [host], extra=extra)
    assert limits.widest == expected
    p = torch.rand(1, 1, host // PAGE).repeat_interleave(PAGE, dim=2)
    rows = choose(limits, p, torch.zeros(1, 1)).rows[0, 0].tolist()
    pages = {row // PAGE for row in rows}
    assert len(rows) == expected == PAGE * len(pages)


def test_equal_pages_go_to_the_lower_ones() -> None:
    limits = keep_limits(KeepRule(48, None, 0, multiple=PAGE), [256])
    p = torch.zeros(1, 1, 256)
    p[..., 160:176] = 0.01
    rows = choose(limits, p, torch.zeros(1, 1)).rows[0, 0].tolist()
    assert rows == [*range(160, 176), *range(32)]


def config(**values: Any) -> Any:
    given = {path.replace("__", "."): Setting(value, "the test") for path, value in values.items()}
    return build_config(merge_settings(load_strategy("quest"), given))


def test_the_strategy() -> None:
    quest = config()
    assert keep_rule(quest) == KeepRule(0.1, None, 0, None, PAGE)
    assert layer_modes(quest, 4) == ("resident", "resident", "select", "select")
    assert quest.cache.sketch_home == "gpu" and most_fetched(quest, 704) == 80  # 70.4


def test_a_mass_of_bounds_means_nothing() -> None:
    with pytest.raises(ConfigError, match=r"keep_mass = 0\.9 with cache\.sketch = 'pages'"):
        config(selection__keep_mass=0.9)
    with pytest.raises(ConfigError, match=r"selection\.alpha = 4\.0 with cache\.sketch = 'pages'"):
        config(selection__alpha=4.0)
