"""The accuracy table: full attention, hybridgen and the methods it is compared with, at equal budgets, on questions.

    python experiments/accuracy_table.py --data DIR [--calibrated FILE] [--tasks piqa,copa,...] [--limit N] [--out DIR]

Each task is one `hybridgen.evaluate`: examples are prefilled, the question and its continuation go through decode with
the method at work, and all methods continue from one prefill, so that differences are paired. hybridgen keeps `--keep`
of its host tier beside a window of `--window`; what it attends to that way, on average over a task's sequences, is the
budget that every other method gets, by its own rule (`hybridgen/evaluation/budgets.py`; those with a host tier have
the same window). Its exact layers count as 1.0. `perplexity` is that of the `--text`s, with a window of 128.

InfiniGen's published threshold keeps less than that budget, and has a row beside InfiniGen with all of it. `--methods`
measures some alone: then they are paired with full attention, not with hybridgen.

COPA's examples are so short that a window of 16 leaves no block of 64 tokens for the host: its window is 8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import Experiment, Point, Result, align, call, main, new_figure

from hybridgen.config import Setting, Settings, build_config, load_strategy, merge_settings
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.layer_modes import chooses, layer_modes
from hybridgen.errors import ConfigError
from hybridgen.evaluation.budgets import local_share, turns_of, with_budget
from hybridgen.evaluation.loglikelihood import cut_batches, encode
from hybridgen.evaluation.task_results import mean_of_tasks, summarise_task
from hybridgen.evaluation.tasks import find_task, load_task
from hybridgen.kv_cache.layout import WindowLayout
from hybridgen.models.tokenizer import load_tokenizer

QUESTIONS = ("piqa", "copa", "openbookqa", "rte")  # the paper's four
TASKS = (*QUESTIONS, "lambada", "hellaswag", "perplexity")
SHORT_WINDOW = {"copa": 8}
PERPLEXITY_WINDOW, CONTEXT, DECODE = 128, 2048, 64
SINKS = 4
FITTED = "the fitted file"
HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "hybridgen": {},
    "hybridgen, logits": {"attention.lookahead": "logits"},
    "hybridgen, calibrated": {"attention.predictor": FITTED},
    "hybridgen, logits, calibrated": {"attention.lookahead": "logits", "attention.predictor": FITTED},
    "hybridgen, fitted to the prompt": {"attention.predictor": "prompt"},
    "infinigen": {"selection.alpha": None},  # as many as the budget lets it have
    "infinigen, alpha 5": {"selection.alpha": 5.0},  # published, for models with RoPE: keeps less than its budget
}
EVICTING = ("h2o", "keyformer", "streaming-llm")
METHODS = (*HYBRIDS, *EVICTING)
METHODS_AND_FULL = ("full attention", *METHODS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What `run` takes beside the common flags."""
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the tasks' JSONL files")
    parser.add_argument("--text", type=Path, action="append", default=[], help="for perplexity; repeatable")
    parser.add_argument("--calibrated", type=Path, metavar="FILE", help="of hybridgen.calibrate; without: no such rows")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--num-fewshot", type=int, default=5)
    parser.add_argument("--limit", type=int, help="questions of a task (default all)")
    parser.add_argument("--passages", type=int, default=40, help="of each text")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", help=f"of {'; '.join(METHODS)} (default all; separated by ';')")


def points(arguments: argparse.Namespace) -> list[Point]:
    """One a task. With --smoke, two made-up questions."""
    if arguments.smoke:
        arguments.tasks, arguments.limit, arguments.batch, arguments.device = "rte", 2, 4, "cpu"
        arguments.data = made_up_questions((arguments.out or Path("build")) / "data")
    local = {"data": arguments.data, "texts": arguments.text, "calibrated": arguments.calibrated}
    local |= {"model": arguments.model, "items": (arguments.out or Path("build")) / "items"}
    local |= {"flags": ("--set", "runtime.torch_threads=1") if arguments.smoke else ()}
    grid = []
    for task in arguments.tasks.split(","):
        settings = {"task": task, "model": Path(arguments.model).name, "keep": arguments.keep}
        settings |= {"calibrated": arguments.calibrated is not None, "batch": arguments.batch}
        settings |= {"device": arguments.device}
        if arguments.methods is not None:
            settings["methods"] = arguments.methods.split(";")
        if task == "perplexity":
            settings |= {"texts": [text.name for text in arguments.text], "passages": arguments.passages}
            settings |= {"window": PERPLEXITY_WINDOW, "context": CONTEXT, "decode": DECODE}
        else:
            settings |= {"num_fewshot": arguments.num_fewshot, "limit": arguments.limit}
            settings |= {"window": SHORT_WINDOW.get(task, arguments.window)}
        grid.append(Point(task, settings, local))
    return grid


def made_up_questions(folder: Path) -> Path:
    """The folder, in which there is a small file of the task rte now."""
    folder.mkdir(parents=True, exist_ok=True)
    things = ("bridge", "lantern", "garden", "harbour", "orchard", "mill", "tower", "ferry")
    rows = [
        {"premise": f"The old {thing} was built of {what} before the war and is still in use today.",
         "hypothesis": f"The {thing} is made of {what}.", "label": 0}
        for thing, what in zip(things, ("stone", "brass", "clay", "wood") * 2, strict=True)
    ]  # fmt: skip
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "rte_glue_validation.jsonl").write_text(lines, encoding="utf-8")
    return folder


def measure(point: Point) -> Result:
    """One evaluation with all methods: results by method, against full attention and against hybridgen."""
    asked, local = point.settings, point.local
    task = asked["task"]
    choice = build.choose_model(build_config({"model.name": Setting(local["model"], "--model")}))
    flags = ["--model", local["model"], "--device", asked["device"], "--dtype", "float32", "--batch", asked["batch"]]
    flags += ["--tasks", task, *local["flags"]]
    if task == "perplexity":
        prompt, steps = asked["context"], asked["decode"]
        flags += ["--context", prompt, "--decode", steps, "--passages", asked["passages"]]
        flags += [word for text in local["texts"] for word in ("--text", text)]
    else:
        prompt, steps = lengths(choice, asked, local["data"])
        flags += ["--data", local["data"], "--num-fewshot", asked["num_fewshot"], "--out", local["items"]]
        flags += [] if asked["limit"] is None else ["--limit", asked["limit"]]
    conditions = matched(asked, local["calibrated"], choice.spec.num_layers, prompt, steps)
    conditions = {name: some for name, some in conditions.items() if name in asked.get("methods", conditions)}
    if not conditions:
        raise ConfigError(f"--methods {';'.join(asked['methods'])}: none of {'; '.join(METHODS)}")
    first, *others = (dict(one) for one in conditions.values())
    flags += ["--strategy", first.pop("strategy")]
    flags += [word for one in first.items() for word in ("--set", _pair(one))]
    flags += [word for one in others for word in ("--also", ",".join(map(_pair, one.items())))]
    report = call("evaluate", *flags)
    result = {"prompt_tokens": prompt, "steps": steps, "methods": ["full attention", *conditions]}
    if task == "perplexity":
        results = report["pooled"] or report["texts"][0]["results"]
        return {**result, "results": results, "by_text": [one["results"] for one in report["texts"]]}
    found = report["tasks"][0]
    data = load_task(find_task(task), local["data"], asked["limit"], asked["num_fewshot"])
    items = _items(local["items"] / found["items"])
    turned = {
        number: {**item, "results": item["results"][1:], "attended": item["attended"][1:]}
        for number, item in items.items()
    }
    against_first = [one["against_full"] for one in summarise_task(data.task, data.questions, turned)]
    results = [
        {**one, "against_first": other} for one, other in zip(found["results"], [None, *against_first], strict=True)
    ]
    return {**result, "main_metric": found["main_metric"], "metrics": found["metrics"], "results": results}


def _items(file: Path) -> dict[int, Any]:
    """Of a finished evaluation: a line that says what it is, then a line an item."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    return {item["id"]: item for item in map(json.loads, lines)}


def lengths(choice: ModelChoice, asked: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    """Tokens prefilled and decode steps, means over the sequences of a task's batches."""
    tokenizer, most = load_tokenizer(choice.location.prepare()), choice.spec.max_positions
    data = load_task(find_task(asked["task"]), folder, asked["limit"], asked["num_fewshot"])
    groups = [
        [encode(tokenizer, prefix, question.context, text, None, most) for text in question.continuations]
        for question, prefix in zip(data.questions, data.prefixes, strict=True)
    ]
    batches = [[one for at in batch for one in groups[at]] for batch in cut_batches(groups, asked["batch"])]
    fed = [max(one.steps for one in batch) for batch in batches for _ in batch]
    return round(fmean(one.prefilled for batch in batches for one in batch)), round(fmean(fed))


def matched(
    asked: Mapping[str, Any], calibrated: Path | None, num_layers: int, prompt: int, steps: int
) -> dict[str, dict[str, Any]]:
    """By method: `strategy`, and the settings that give it hybridgen's budget."""
    found: dict[str, dict[str, Any]] = {}
    budget = None
    for method, own in HYBRIDS.items():
        if FITTED in own.values() and calibrated is None:
            continue
        changes = {path: str(calibrated) if value == FITTED else value for path, value in own.items()}
        changes |= {"cache.sinks": SINKS, "cache.gpu_window": asked["window"]}
        changes |= {"selection.min_keep": 0, "selection.keep": asked["keep"]}
        strategy = method.split(",")[0]
        settings = _settings(strategy, changes)
        modes, layout = layer_modes(build_config(settings), num_layers), WindowLayout(SINKS, asked["window"])
        exact = fmean(not chooses(mode) for mode in modes)
        beside = fmean(local_share(layout, prompt, steps, *turn) for turn in turns_of(settings, modes))
        if beside == 1.0:
            raise ValueError(
                f"{asked['task']}: {prompt} tokens leave nothing for the host beside a window of {asked['window']}"
            )
        if budget is None:
            budget = exact + (1 - exact) * (beside + asked["keep"] * (1 - beside))
        each = (budget - exact) / (1 - exact)
        changes["selection.keep"] = round((each - beside) / (1 - beside), 6)
        found[method] = {"strategy": strategy, **changes}
    assert budget is not None
    for method in EVICTING:
        settings = _settings(method, {"eviction.sinks": SINKS})
        modes = layer_modes(build_config(settings), num_layers)
        with_it, _ = with_budget(method, settings, modes, budget, prompt, steps)
        cut = {path: with_it[path].value for path in ("eviction.heavy", "eviction.recent")}
        found[method] = {"strategy": method, "eviction.sinks": SINKS, **cut}
    return found


def _settings(strategy: str, changes: Mapping[str, Any]) -> Settings:
    given = {path: Setting(value, "accuracy_table") for path, value in changes.items()}
    given["model.exact_layers_mode"] = Setting("resident", "accuracy_table")
    if strategy == "hybridgen":  # whose cap of 0.3 goes with a mass
        given["selection.keep_mass"] = Setting(None, "accuracy_table")
    return merge_settings(load_strategy(strategy), given)


def _pair(one: tuple[str, Any]) -> str:
    return f"{one[0]}={'null' if one[1] is None else one[1]}"


def table(results: Sequence[Result]) -> str:
    """Percent, and points against full attention with the 95 % interval; of perplexity, the change in percent."""
    rows = [["method", *(str(one["name"]) for one in results)]]
    for method in METHODS_AND_FULL:
        rows.append([method])
        for one in results:
            at = _place(one, method)
            rows[-1].append("" if at is None else _cell(one["result"], at))
    shots = {one["settings"].get("num_fewshot") for one in results} - {None}
    head = f"{results[0]['settings']['model']}, {', '.join(map(str, shots))}-shot; budgets: " + ", ".join(
        f"{one['name']} {one['result']['results'][1]['budget']:.3f}" for one in results
    )
    lines = [head, align(rows)]
    asked = [one["name"] for one in results if "main_metric" in one["result"]]
    for tasks in dict.fromkeys((tuple(asked), QUESTIONS)):
        if len(tasks) > 1 and set(tasks) <= set(asked):
            lines.append(f"mean of {', '.join(tasks)} against full attention, points:")
            means = mean_differences(results, tasks)
            lines += [f"  {method:<30} {_interval(estimate, 100)}" for method, estimate in means.items()]
    lines.append("against hybridgen, points (perplexity: percent):")
    for method in METHODS[1:]:
        cells = [
            f"{one['name']} {_interval(*_against_first(one['result'], at))}"
            for one in results
            if (at := _place(one, method)) is not None and one["result"]["results"][at]["against_first"] is not None
        ]
        lines += [f"  {method:<30} {'; '.join(cells)}"] if cells else []
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Any:
    """Differences from full attention with their intervals, a panel a task."""
    columns = min(4, len(results))
    figure, panels = new_figure(-(-len(results) // columns), columns, width=2.6, height=3.4)
    for panel in panels.flat[len(results) :]:
        panel.set_axis_off()
    for panel, one in zip(panels.flat, results, strict=False):
        result = one["result"]
        for row, method in enumerate(reversed(METHODS)):
            if (at := _place(one, method)) is None:
                continue
            estimate, scale = _against_full(result, at)
            value, low, high = (scale * (estimate[name] or 0.0) for name in ("value", "low", "high"))
            panel.errorbar(
                value, row, xerr=[[value - low], [high - value]], fmt="o", color="C0" if "hybridgen" in method else "C1"
            )
        panel.axvline(0.0, color="0.4", linewidth=0.8)
        panel.set_title(one["name"])
        panel.set_yticks(
            range(len(METHODS)), list(reversed(METHODS)) if panel in panels[:, 0] else [""] * len(METHODS)
        )
        panel.set_xlabel(
            "perplexity, change in %" if "main_metric" not in result else f"{result['main_metric']}, points"
        )
        if "main_metric" not in result:  # from a tenth of a percent to a hundred percent
            panel.set_xscale("symlog", linthresh=1.0)
    model = results[0]["settings"]["model"]
    figure.suptitle(f"{model} against full attention at equal budgets; paired, 95 % intervals", fontsize=10)
    return figure


def _place(one: Result, method: str) -> int | None:
    methods = one["result"]["methods"]
    return methods.index(method) if method in methods else None


def _against_full(result: Result, at: int) -> tuple[Any, float]:
    """The estimate, and what makes points or percent of it."""
    against = result["results"][at]["against_full"]
    return (against[result["main_metric"]], 100.0) if "main_metric" in result else (against["percent"], 1.0)


def _against_first(result: Result, at: int) -> tuple[Any, float]:
    against = result["results"][at]["against_first"]
    return (against[result["main_metric"]], 100.0) if "main_metric" in result else (against["percent"], 1.0)


def _cell(result: Result, at: int) -> str:
    own = result["results"][at]
    value = (
        f"{100 * own['metrics'][result['main_metric']]['value']:.1f}"
        if "main_metric" in result
        else f"{own['perplexity']['value']:.2f}"
    )
    return value if at == 0 else f"{value} ({_interval(*_against_full(result, at))})"


def _interval(estimate: Mapping[str, Any], scale: float) -> str:
    """Of one passage or question there is no interval."""
    if estimate["low"] is None:
        return f"{scale * estimate['value']:+.1f}"
    value, low, high = (scale * estimate[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def mean_differences(results: Sequence[Result], tasks: Sequence[str]) -> dict[str, Any]:
    """By method that all of these tasks have, the mean difference from full attention."""
    by_task = {one["name"]: one for one in results}
    found = {}
    for method in METHODS:
        places = [_place(by_task[task], method) for task in tasks]
        if None not in places:
            pairs = [
                (find_task(task), [by_task[task]["result"]["results"][at] for at in (0, place)])
                for task, place in zip(tasks, places, strict=True)
                if place is not None
            ]
            found[method] = (mean_of_tasks(pairs) or [])[1]["against_full"]
    return found


EXPERIMENT = Experiment("accuracy_table", __doc__ or "", points, measure, table, draw, add_flags)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
