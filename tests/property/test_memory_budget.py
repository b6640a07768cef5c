"""What holds for every memory budget: it is kept, more is never worse, what was given stays, and twice is once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen.config import Config
from hybridgen.engine import memory_plan
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.memory_budget import WITHOUT_AUTO, Settled, settle
from hybridgen.placement.plan import GIB
from tests.unit.budget_case import choice_of, config_of

MIB = 1024**2
#: Dotted setting, and what a user may give; left out: open.
GIVEN: dict[str, list[Any]] = {
    "runtime.prefill_chunk": [300, 4096],
    "schedule.most_extra": [1.0, 3.0],
    "model.exact_layers_mode": ["resident", "select", 1],
    "cache.gpu_window": [64, 300, 4096],
    "cache.sketch_home": ["host", "gpu"],
    "placement.weights_on_gpu": [0.0, 0.37, 1.0],
    "schedule.mode": ["fixed", "feedback"],
}


@dataclass(frozen=True)
class Job:
    alias: str
    device: str
    given: dict[str, Any]
    others: dict[str, Any]
    batch: int
    capacity: int
    host_bytes: int

    def settle(self, device_bytes: int, config: Config | None = None) -> Settled:
        limits = (None if self.device == "cpu" else device_bytes, self.host_bytes)
        choice, config = choice_of(self.alias, self.device), config or self.config
        return settle(choice, config, self.batch, self.capacity, limits, self.free)

    @property
    def config(self) -> Config:
        mode = "fixed" if self.given.get("cache.sketch_home") == "gpu" else "feedback"  # as `run` does
        return config_of(**({"schedule.mode": mode} | self.given | self.others))

    @property
    def free(self) -> list[str]:
        return [path for path in WITHOUT_AUTO if path not in self.given]

    def fits(self, found: Settled, device_bytes: int) -> bool:
        return found.plan.fits(None if self.device == "cpu" else device_bytes, self.host_bytes)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    paths = draw(st.sets(st.sampled_from(sorted(GIVEN))))
    chosen = {path: draw(st.sampled_from(GIVEN[path])) for path in sorted(paths)}
    others = {
        "cache.sketch": draw(st.sampled_from(["none", "int2", "int4"])),
        "cache.key_type": draw(st.sampled_from(["auto", "int8"])),
        "selection.keep": draw(st.sampled_from([0.02, 0.3])),
        "attention.executor": draw(st.sampled_from(["hybrid", "hybrid", "hybrid", "full"])),
        "attention.lookahead": draw(st.sampled_from(["select", "off"])),
    }
    if chosen.get("cache.sketch_home") == "gpu" and (
        others["cache.sketch"] == "none" or chosen.get("schedule.mode") == "feedback"
    ):
        del chosen["cache.sketch_home"]  # these exclude each other
    return Job(
        draw(st.sampled_from(["smollm2-135m", "opt-1.3b", "llama-3.2-1b", "qwen2.5-0.5b"])),
        draw(st.sampled_from(["cuda", "cuda", "cuda", "cpu"])),
        chosen,
        others,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 40_000)),
        draw(st.sampled_from([GIB, 4 * GIB, 64 * GIB])),
    )


budgets = st.integers(700 * MIB, 12 * GIB)


def value(config: Config, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def quality(found: Settled) -> tuple[Any, ...]:
    """The dearest first: larger is better."""
    config = found.config
    return (
        found.plan.weights_on_gpu,
        config.cache.sketch_home == "gpu",
        config.cache.gpu_window,
        found.modes.count("resident"),
        config.schedule.most_extra,
        config.runtime.prefill_chunk,
    )


@settings(deadline=None)
@given(jobs(), budgets)
def test_what_is_chosen_is_planned_and_kept(job: Job, budget: int) -> None:
    found = job.settle(budget)
    choice = choice_of(job.alias, job.device)
    assert found.modes == layer_modes(found.config, choice.spec.num_layers)
    assert found.plan == memory_plan.plan_memory(choice, found.config, found.modes, job.batch, job.capacity)
    assert found.config.placement.weights_on_gpu != "auto" and found.config.runtime.prefill_chunk > 0
    for chosen in found.chosen:
        assert value(found.config, chosen.path) == chosen.value
    if job.fits(found, budget):
        assert job.device == "cpu" or found.plan.device_bytes <= budget
        assert found.plan.host_bytes <= job.host_bytes
    else:  # no choice that is worth less fits: the plainest one does not
        least = {"runtime.prefill_chunk": 512, "schedule.most_extra": 1.0, "model.exact_layers_mode": "select"}
        least |= {"cache.sketch_home": "host", "placement.weights_on_gpu": 0.0, "cache.gpu_window": 256}
        plain = config_of(**({"schedule.mode": job.config.schedule.mode} | least | job.given | job.others))
        modes = layer_modes(plain, choice.spec.num_layers)
        plan = memory_plan.plan_memory(choice, plain, modes, job.batch, job.capacity)
        assert job.device == "cpu" or not plan.fits(budget, job.host_bytes)


@settings(deadline=None)
@given(jobs(), budgets, budgets)
def test_more_memory_is_never_worse(job: Job, one: int, other: int) -> None:
    less, more = (job.settle(budget) for budget in sorted((one, other)))
    if job.fits(less, min(one, other)):
        assert job.fits(more, max(one, other))
        assert quality(more) >= quality(less)


@settings(deadline=None)
@given(jobs(), budgets)
def test_what_was_given_is_not_changed(job: Job, budget: int) -> None:
    found = job.settle(budget)
    for path, asked in job.given.items():
        assert value(found.config, path) == asked
    assert not {chosen.path for chosen in found.chosen} & job.given.keys()
    chosen = {chosen.path for chosen in found.chosen} | {"schedule.most_extra"}  # not told where it means nothing
    for section, fields in found.config.to_dict().items():
        for name, now in fields.items():
            assert f"{section}.{name}" in chosen or now == value(job.config, f"{section}.{name}")


@settings(deadline=None)
@given(jobs(), budgets)
def test_twice_is_once(job: Job, budget: int) -> None:
    found = job.settle(budget)
    if job.fits(found, budget):
        again = job.settle(budget, found.config)
        assert (again.config, again.modes, again.plan) == (found.config, found.modes, found.plan)
