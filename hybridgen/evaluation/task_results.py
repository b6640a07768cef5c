"""From items to figures: metrics with standard errors, differences from full attention, a mean over tasks, a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridgen.evaluation import paired
from hybridgen.evaluation.item_store import Item
from hybridgen.evaluation.paired import Estimate
from hybridgen.evaluation.tasks import Metric, Question, Task, judge


def summarise_task(task: Task, questions: Sequence[Question], items: Mapping[int, Item]) -> list[dict[str, Any]]:
    """One result a condition, over the questions that have an item; the first condition is full attention.

    Accuracies in [0, 1]; standard errors are those of a mean over questions. against_full: differences of metrics,
    paired by question. same_choice: share of the questions for which the likeliest choice (without choices: whether
    greedy decoding is right) is full attention's.
    """
    done = [question for question in questions if question.id in items]
    if not done:
        return []
    conditions = len(items[done[0].id]["results"])
    values = [[_judged(task, question, items[question.id], index) for question in done] for index in range(conditions)]
    results = []
    for index, ours in enumerate(values):
        chosen, full_chosen = ([_choice(task, items[one.id], which) for one in done] for which in (index, 0))
        same = [float(one == other) for one, other in zip(chosen, full_chosen, strict=True)]
        against = {metric: _difference(metric, ours, values[0]) for metric in task.metrics} if index else None
        results.append(
            {
                "questions": len(done),
                "metrics": {metric: asdict(_estimate(metric, ours)) for metric in task.metrics},
                "against_full": against,
                "same_choice": asdict(paired.mean(same)) if index else None,
                "budget": _mean_of("budget", done, items, index),
                "kept_fraction": _mean_of("kept_fraction", done, items, index),
                "covered_mass": _mean_of("mass_mean", done, items, index),
            }
        )
    return results


def mean_of_tasks(tasks: Sequence[tuple[Task, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]] | None:
    """The unweighted mean of the tasks' main accuracies, a condition each, and its difference from full attention.

    Tasks are independent: squares of standard errors add up. Limits by the t of the smallest task. None for one task.
    """
    started = [(task, results) for task, results in tasks if results]
    if len(started) < 2:
        return None
    least = min(int(results[0]["questions"]) for _, results in started)
    means = []
    for index in range(len(started[0][1])):
        rows = [(task, results[index]) for task, results in started]
        accuracy = _mean_estimate([row["metrics"][task.main] for task, row in rows], least)
        against = _mean_estimate([row["against_full"][task.main] for task, row in rows], least) if index else None
        means.append({"accuracy": asdict(accuracy), "against_full": None if against is None else asdict(against)})
    return means


def format_tasks(report: Mapping[str, Any]) -> str:
    """The table at the end, from the report alone. Accuracies in percent, differences in percentage points."""
    names = [condition["name"] for condition in report["conditions"]]
    rows = [["task", "questions", "metric", "condition", "value", "SE", "against full", "same choice", "budget"]]
    for task in report["tasks"]:
        for place, metric in enumerate(task["metrics"] if task["results"] else ()):
            for index, (name, result) in enumerate(zip(names, task["results"], strict=True)):
                first = not place and not index
                rows.append([task["name"] if first else "", str(result["questions"]) if first else ""])
                rows[-1] += [metric if not index else "", name, *_cells(metric, result, is_first=not place)]
    for index, mean in enumerate(report["mean"] or ()):
        cells = [*_value("acc", mean["accuracy"]), _change("acc", mean["against_full"]), "", ""]
        rows.append(["mean" if not index else "", "", "main" if not index else "", names[index], *cells])
    done = "" if report["complete"] else " (not complete)"
    title = f"{report['model']}, {report['dtype']}, {report['num_fewshot']}-shot{done}; [ ]: 95 % interval, paired"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([title, "", *lines])


def _judged(task: Task, question: Question, item: Item, index: int) -> dict[str, float]:
    pairs = item["results"][index]
    return judge(task, question, [pair[0] for pair in pairs], [bool(pair[1]) for pair in pairs])


def _choice(task: Task, item: Item, index: int) -> int:
    pairs = item["results"][index]
    values = [pair[0] for pair in pairs]
    return max(range(len(values)), key=values.__getitem__) if task.is_choice else int(pairs[0][1])


def _estimate(metric: Metric, values: Sequence[Mapping[str, float]]) -> Estimate:
    numbers = [value[metric] for value in values]
    return paired.perplexity([-number for number in numbers]) if metric == "perplexity" else paired.mean(numbers)


def _difference(
    metric: Metric, ours: Sequence[Mapping[str, float]], full: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    pairs = [(one[metric], other[metric]) for one, other in zip(ours, full, strict=True)]
    if metric == "perplexity":
        return asdict(paired.perplexity_difference([-one for one, _ in pairs], [-other for _, other in pairs]))
    return asdict(paired.mean([one - other for one, other in pairs]))


def _mean_of(name: str, done: Sequence[Question], items: Mapping[int, Item], index: int) -> float | None:
    known = [items[one.id]["attended"][index] for one in done]
    values = [one[name] for one in known if one is not None and one[name] is not None]
    return sum(values) / len(values) if values else None


def _mean_estimate(estimates: Sequence[Mapping[str, Any]], least: int) -> Estimate:
    value = sum(one["value"] for one in estimates) / len(estimates)
    errors = [one["standard_error"] for one in estimates]
    if None in errors:
        return Estimate(value, None, None, None)
    error = math.sqrt(sum(one * one for one in errors)) / len(estimates)
    reach = paired.student_t(least - 1) * error
    return Estimate(value, error, value - reach, value + reach)


def _cells(metric: str, result: Mapping[str, Any], is_first: bool) -> list[str]:
    against, same = result["against_full"], result["same_choice"]
    cells = [*_value(metric, result["metrics"][metric]), _change(metric, None if against is None else against[metric])]
    cells.append("" if same is None or not is_first else f"{100 * same['value']:.1f}")
    return [*cells, "" if result["budget"] is None or not is_first else f"{result['budget']:.3f}"]


def _value(metric: str, estimate: Mapping[str, Any]) -> list[str]:
    error = estimate["standard_error"]
    return [_number(metric, estimate["value"]), "" if error is None else _number(metric, error)]


def _change(metric: str, estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return ""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if low is None:
        return _number(metric, value, "+")
    return f"{_number(metric, value, '+')} [{_number(metric, low, '+')}, {_number(metric, high, '+')}]"


def _number(metric: str, value: float, sign: str = "") -> str:
    """Accuracies in percent; a perplexity may be anything."""
    return f"{value:{sign}.5g}" if metric == "perplexity" else f"{100 * value:{sign}.2f}"
