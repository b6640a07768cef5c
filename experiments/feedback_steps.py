"""The feedback scheduler over decode steps: what it plans, and what the stages then take (paper, figures 21-22).

    python experiments/feedback_steps.py --model opt-13b --weights random --seq 32k --keep 0.1 --out DIR
    python experiments/feedback_steps.py plot DIR/feedback_steps.json

Phases: alone; with half of the cores kept busy by other processes; alone again; then turns of 2k tokens, each followed
by decode steps. The table says when the plan settled in each phase, and the least K.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Experiment, Point, Result, main, new_figure
from tqdm import tqdm

from hybridgen.engine.llm import LLM
from hybridgen.engine.report import describe_machine
from hybridgen.engine.sampler import Sampler
from hybridgen.engine.schedule import Schedule, StepObservation, controlled_layers
from hybridgen.engine.scheduling import keep_rule, make_schedule
from hybridgen.evaluation.document import hidden_fact_document
from hybridgen.quantities import parse_keep, parse_tokens
from hybridgen.types import KeepRule, StepPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUSY = "half of the cores busy"


class Recorder:
    """Writes down what the schedule is told, and hands it on."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.observed: list[StepObservation] = []

    def plan(self, step: int) -> StepPlan:
        return self.schedule.plan(step)

    def observe(self, observation: StepObservation) -> None:
        self.observed.append(observation)
        self.schedule.observe(observation)


_BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@contextmanager
def half_of_the_cores_busy() -> Iterator[None]:
    """One endless loop on each core of the upper half."""
    cores = sorted(os.sched_getaffinity(0))
    loops = [
        subprocess.Popen([sys.executable, "-c", _BURN, str(core)], stdout=subprocess.PIPE)
        for core in cores[len(cores) // 2 :]
    ]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()  # it burns
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside those of every experiment."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", choices=("auto", "real", "random"))
    parser.add_argument("--seq", type=parse_tokens, default=4096)
    parser.add_argument("--keep", type=parse_keep)
    parser.add_argument("--keep-mass", type=float)
    parser.add_argument("--min-keep", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48, help="of each of the first three phases")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--turn", type=parse_tokens, default=2048, help="tokens of a turn")
    parser.add_argument("--turn-steps", type=int, default=32, help="after each turn")


def points(arguments: argparse.Namespace) -> list[Point]:
    """A single one: phases follow each other in one live batch."""
    names = ("weights", "seq", "keep", "keep_mass", "min_keep", "steps", "turns", "turn", "turn_steps")
    settings = {"model": Path(arguments.model).name, **{name: getattr(arguments, name) for name in names}}
    if arguments.smoke:
        settings |= {"model": "smollm2-135m", "weights": "random", "seq": 320, "keep": 0.2, "min_keep": 8}
        settings |= {"steps": 4, "turns": 1, "turn": 64, "turn_steps": 3}
        settings["set"] = {"runtime.device": "cpu", "runtime.torch_threads": 1, "cache.gpu_window": 64}
    model = settings["model"] if arguments.smoke else arguments.model
    return [Point(f"{settings['model']} {settings['seq']}", settings, {"model": model})]


def measure(point: Point) -> Result:
    """Decode through all phases."""
    settings = point.settings
    overrides: dict[str, Any] = {
        "model.weights": settings["weights"],
        "schedule.mode": "feedback",
        "selection.keep": settings["keep"],
        "selection.keep_mass": settings["keep_mass"],
        "selection.min_keep": settings["min_keep"],
        **settings.get("set", {}),
    }
    phases = [
        *((name, 0, settings["steps"]) for name in ("alone", BUSY, "alone again")),
        *((f"after turn {turn + 1}", settings["turn"], settings["turn_steps"]) for turn in range(settings["turns"])),
    ]
    total = settings["seq"] + sum(tokens + steps for _, tokens, steps in phases)
    with LLM(point.local["model"], overrides) as llm:
        guarded = llm.weights.kind != "random"
        recorder = Recorder(make_schedule(llm.config, llm.modes, not guarded))
        batch = llm.new_batch([total], recorder)
        generator = random.Random(0)

        def prompt(tokens: int) -> list[int]:
            if guarded:
                return hidden_fact_document(llm.tokenizer, tokens, seed=generator.randrange(1000)).ids
            return [generator.randrange(llm.spec.vocab_size) for _ in range(tokens)]

        sampler = Sampler(llm.config.sampling, llm.device, 0)
        tokens = sampler(llm.prefill(batch, [prompt(settings["seq"])]))
        of_phase: list[str] = []
        with tqdm(total=sum(steps for *_, steps in phases), desc="decode", unit="step", disable=None) as bar:

            def decode(name: str, steps: int) -> None:
                nonlocal tokens
                for _ in range(steps):
                    llm.telemetry.begin_step()
                    tokens = sampler(llm.decode(batch, tokens))
                    tokens.tolist()  # waits
                    llm.observe(batch, llm.telemetry.end_step())
                    of_phase.append(name)
                    bar.update(1)

            for name, turn, steps in phases:
                if turn:
                    tokens = sampler(llm.prefill(batch, [prompt(turn)]))
                with half_of_the_cores_busy() if name == BUSY else nullcontext():
                    decode(name, steps)
        layer = controlled_layers(llm.modes)
        steps_out = []
        for name, observed, plan in zip(of_phase, recorder.observed, batch.plans, strict=True):
            common = next((p for p in (plan.layers[i] for i in layer) if not p.trial_tokens), plan.layers[layer[0]])
            steps_out.append(
                {"phase": name, "mode": common.mode, "scan_tokens": common.scan_tokens, "extra": common.extra,
                 "floor_of_rule": _floor(keep_rule(llm.config), observed.host_tokens), **asdict(observed)}
            )  # fmt: skip
        return {
            "model": settings["model"], "weights": llm.weights.kind, "seq": settings["seq"],
            "config": llm.config.to_dict(), "machine": describe_machine(llm), "steps": steps_out,
        }  # fmt: skip


def table(points: Sequence[Result]) -> str:
    """A line a phase."""
    return "\n\n".join(f"{_title(point['result'])}\n{summary(point['result'])}" for point in points)


def summary(result: Mapping[str, Any]) -> str:
    """Per phase: the steps after which the plan did not change any more, medians before and after, the least K."""
    heading = f"{'phase':<24} {'steps':>5} {'settled after':>13} {'ms/token first 8':>17} {'last 8':>8}"
    lines = [f"{heading}  plan at the end"]
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for step in result["steps"]:
        by_phase.setdefault(step["phase"], []).append(step)
    for name, steps in by_phase.items():
        last = steps[-1]
        settled = len(steps)
        while settled and _is_planned_alike(steps[settled - 1], last):
            settled -= 1
        first, end = (statistics.median(s["step_ms"] for s in part) for part in (steps[:8], steps[-8:]))
        scan = "full scan" if last["scan_tokens"] is None else f"{last['scan_tokens']} candidates"
        lines.append(
            f"{name:<24} {len(steps):>5} {settled:>13} {first:>17.1f} {end:>8.1f}  {scan}, K x {last['extra']:g}"
        )
    steps = result["steps"]
    by_mass = result["config"]["selection"]["keep_mass"] is not None
    if not by_mass:
        least = min(step["kept_tokens"] / step["floor_of_rule"] for step in steps if step["floor_of_rule"])
        lines.append(f"least K over the floor's: {least:.4f}")
    tried = [step for step in steps if step["covered_mass"] is not None and step["scan_tokens"] is not None]
    if tried:
        covered, full = (statistics.fmean(s[name] for s in tried) for name in ("covered_mass", "full_scan_mass"))
        lines.append(f"mass covered by candidates, mean over tried layers: {covered:.4f}, by a full scan {full:.4f}")
    return "\n".join(lines)


def _floor(rule: KeepRule, host_tokens: float) -> float:
    """K of `fixed` without a mass, mean over layers like host_tokens, and so not rounded."""
    if isinstance(rule.keep, float):
        return min(host_tokens, max(rule.min_keep, rule.keep * host_tokens))
    return min(host_tokens, max(rule.min_keep, rule.keep or host_tokens))


def _is_planned_alike(step: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same level and K; the number of candidates follows the growing host."""
    shares = [(s["scan_tokens"] or s["host_tokens"]) / s["host_tokens"] for s in (step, other)]
    return step["extra"] == other["extra"] and abs(shares[0] - shares[1]) < 0.05


def draw(points: Sequence[Result]) -> Figure:
    """Scan size, K, stage times and step time over steps; a column a run."""
    figure, panels = new_figure(3, len(points), width=9.0, height=2.7)
    for (above, middle, below), point in zip(panels.T, points, strict=True):
        steps = point["result"]["steps"]
        x = range(len(steps))
        above.plot(x, [s["host_tokens"] for s in steps], color="0.6", label="host tier")
        above.step(x, [s["scanned_tokens"] for s in steps], where="mid", label="scored (full scan: Post-QKT)")
        above.step(x, [s["kept_tokens"] for s in steps], where="mid", label="kept, K")
        above.set_ylabel("tokens a KV head")
        for name, label in (("scan_ms", "CPU: scan"), ("link_ms", "link: fetch"), ("gpu_ms", "GPU: own work"),
                            ("scan_wait_ms", "wait for the scan")):  # fmt: skip
            middle.plot(x, [s[name] for s in steps], label=label)
        middle.set_ylabel("ms a layer")
        middle.set_ylim(0, _most([s["scan_ms"] for s in steps]))
        below.plot(x, [s["step_ms"] for s in steps], color="black")
        below.set_ylim(0, _most([s["step_ms"] for s in steps]))
        below.set_ylabel("ms a token")
        below.set_xlabel("decode step")
        names = [s["phase"] for s in steps]
        for panel in (above, middle, below):
            for start in (i for i in x if i == 0 or names[i] != names[i - 1]):
                panel.axvline(start, color="0.8", linewidth=0.8)
                if panel is above:
                    panel.text(start, panel.get_ylim()[1], " " + names[start], fontsize=7, va="top")
            panel.set_xlim(0, len(steps) - 1)
        above.legend(fontsize=7, loc="center right")
        middle.legend(fontsize=7, loc="upper right")
        above.set_title(_title(point["result"]), fontsize=10)
    return figure


def _title(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['cores']} CPU cores"
    return f"{result['model']} ({result['weights']} weights), {result['seq']} tokens, {where}"


def _most(values: Sequence[float]) -> float:
    """The end of an axis: a few outliers may lie beyond it."""
    return 1.5 * statistics.quantiles(values, n=20)[-1]


EXPERIMENT = Experiment("feedback_steps", __doc__, points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
