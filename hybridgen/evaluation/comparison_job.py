"""What `hybridgen.compare` compares: strategies settled on one job, at equal budgets, and admitted to memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hybridgen.config import Config, Setting, Settings, build_config, load_strategy, merge_settings, with_settings
from hybridgen.engine import memory_plan
from hybridgen.engine.admission import Admission, admit
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.errors import ConfigError, HybridGenError
from hybridgen.evaluation.budgets import ATTENDS_TO_ALL, BudgetError, Split, with_budget, with_keep

FULL, EXACT_OFFLOADED = "full", "aog"  # the reference, and what takes its place where all KV does not fit
RANDOM_KEEP = 0.1  # with random weights attention is flat and mass means nothing
DEFAULTS: dict[str, Any] = {
    "model.exact_layers_mode": "resident",
    "runtime.mass_probe_interval": 0,  # a probe is one more scan: steps would not be alike
}


@dataclass
class Contestant:
    """A strategy with its settings, or why it does not take part; and the reports of its rounds so far."""

    name: str
    config: Config | None = None
    split: Split | None = None
    admission: Admission | None = None
    error: HybridGenError | None = None
    skipped: str | None = None
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def attends_to_all(self) -> bool:
        return self.admission is not None and all(mode in ATTENDS_TO_ALL for mode in self.admission.modes)

    def skip(self, error: HybridGenError) -> None:
        self.error, self.skipped = error, short_reason(error)


@dataclass
class ComparisonJob:
    """What is compared: the same for all strategies."""

    choice: ModelChoice
    tokens: int
    gen: int
    batch: int
    rounds: int
    budget: float | None
    keep: float | int | None
    assigned: Settings
    given: bool  # whether what is kept of the host is among those

    @property
    def synthetic_kv(self) -> bool:
        return "runtime.synthetic_kv" in self.assigned and bool(self.assigned["runtime.synthetic_kv"].value)

    @property
    def matched(self) -> str | None:
        """What was made equal."""
        if self.budget is not None:
            return f"--budget {self.budget:g}"
        return None if self.keep is None else f"--keep {self.keep}"


def over_defaults(*layers: Settings) -> Settings:
    """What a comparison has where nothing else was given, below these."""
    return merge_settings({path: Setting(value, "the default") for path, value in DEFAULTS.items()}, *layers)


def settings_of(job: ComparisonJob, file: str) -> Settings:
    """A strategy's, with what was given beside it."""
    return over_defaults(load_strategy(file), job.assigned)


def matched_config(job: ComparisonJob, name: str, settings: Settings) -> tuple[Config, Split | None]:
    """The config with the budget, or the share of the host, that all are to have."""
    split = None
    modes = layer_modes(build_config(settings), job.choice.spec.num_layers)
    if job.budget is not None:
        settings, split = with_budget(name, settings, modes, job.budget, job.tokens, job.gen - 1)
    elif job.keep is not None and not all(mode in ATTENDS_TO_ALL for mode in modes):
        settings = with_keep(settings, job.keep, job.tokens)
    config = build_config(settings)
    dtype: Any = str(job.choice.dtype).removeprefix("torch.")
    resolved = {"model.dtype": dtype, "runtime.device": job.choice.device.type, "run.seq": job.tokens}
    return with_settings(config, resolved), split


def prepare(job: ComparisonJob, name: str, settings: Settings) -> Contestant:
    """Settle its settings and see whether it fits. BudgetError: a budget that it cannot have."""
    contestant = Contestant(name)
    try:
        layer_modes(build_config(settings), job.choice.spec.num_layers)  # a flag that the strategy cannot have
    except HybridGenError as error:
        contestant.skip(error)
        return contestant
    contestant.config, contestant.split = matched_config(job, name, settings)
    _admit(job, contestant)
    return contestant


def prepare_all(job: ComparisonJob, settings: dict[str, Settings]) -> list[Contestant]:
    """All of them. ConfigError: a budget that some cannot have, with the smallest for each and for all."""
    contestants: list[Contestant] = []
    refused: dict[str, BudgetError] = {}
    for name, given in settings.items():
        try:
            contestants.append(prepare(job, name, given))
        except BudgetError as error:
            refused[name] = error
    if len(refused) == 1:
        raise next(iter(refused.values()))
    if refused:
        each = ", ".join(f"{name} {error.smallest:.4f}" for name, error in refused.items())
        raise ConfigError(
            f"--budget {job.budget:g}: {len(refused)} strategies attend to more in any case; the smallest possible: "
            f"{each}; the smallest possible for all is {max(error.smallest for error in refused.values()):.4f}"
        )
    return contestants


def _admit(job: ComparisonJob, contestant: Contestant, limits: tuple[int | None, int] | None = None) -> None:
    """limits: of the admission before the weights were loaded."""
    assert contestant.config is not None
    more: dict[str, Any] = {} if limits is None else {"limits": limits}
    try:
        admission = admit(job.choice, contestant.config, job.tokens, job.gen, job.batch, **more)
    except HybridGenError as error:
        contestant.skip(error)
        return
    contestant.admission, contestant.config = admission, admission.config


def exact_reference(job: ComparisonJob) -> Contestant:
    """Full attention, or what is as exact and fits."""
    for name in (FULL, EXACT_OFFLOADED):
        plain = replace(job, budget=None, keep=None)
        reference = prepare(plain, name, settings_of(job, name))
        if reference.skipped is None:
            break
        print(f"reference: {name} does not do, {reference.skipped}")
    if reference.error is not None:
        raise reference.error
    assert reference.attends_to_all
    return reference


def with_one_share(job: ComparisonJob, contestants: list[Contestant], reference: Contestant) -> Contestant:
    """All have the same weights loaded: where nobody said how much of them is on the device, the largest share.

    Returns the reference that fits then.
    """
    admitted = [some.admission for some in (reference, *contestants) if some.admission is not None]
    placed = [admission.config.placement for admission in admitted]
    packed = sorted({placement.compress_weights for placement in placed})
    if len(packed) > 1:
        raise ConfigError(
            f"placement.compress_weights = {' and '.join(map(repr, packed))}: all strategies of a comparison have the "
            "same weights loaded (allowed: one value for all)"
        )
    shares = {(placement.weights_on_gpu, placement.weights_on_disk) for placement in placed}
    if len(shares) < 2:
        return reference
    numbers = [share for share, _ in shares if not isinstance(share, str)]
    disk = min(0.0 if isinstance(share, str) else share for _, share in shares)
    job.assigned |= {
        "placement.weights_on_gpu": Setting(max(numbers), "the largest that one of the strategies allows"),
        "placement.weights_on_disk": Setting(disk, "the smallest that one of the strategies allows"),
    }
    print(f"weights: {max(numbers):.4g} of the layers' on the device, {disk:.4g} on disk, for all strategies")
    for contestant in contestants:
        if contestant.admission is not None and contestant.config is not None:
            contestant.config = with_settings(
                memory_plan.with_share(contestant.config, max(numbers)), {"placement.weights_on_disk": disk}
            )
            _admit(job, contestant)
    return exact_reference(job)


def keep_by_count(job: ComparisonJob, contestants: list[Contestant], settings: dict[str, Settings]) -> None:
    """The weights came out random: what is kept, is so by count. That may be more than was admitted."""
    print(f"random weights: attention mass means nothing, so --keep {RANDOM_KEEP} is used")
    for contestant in contestants:
        if contestant.admission is not None and contestant.config is not None:
            placed = contestant.config
            changed, _ = matched_config(job, contestant.name, settings[contestant.name])
            contestant.config = replace(
                changed, model=placed.model, placement=placed.placement, cache=placed.cache, runtime=placed.runtime
            )
            _admit(job, contestant, contestant.admission.limits)


def short_reason(error: Exception) -> str:
    """One line: what, and what would fit."""
    lines = [line.strip() for line in str(error).splitlines()]
    more = [line for line in lines[1:] if line.startswith("what would fit")]
    return "; ".join(lines[:1] + more)
