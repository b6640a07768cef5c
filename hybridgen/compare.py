"""`python -m hybridgen.compare`: several strategies on the same prompt, in speed, bytes and quality.

All decode full attention's own continuation of one prompt, in turn and over the same weights; the second round runs in
reverse order, so that drift of the machine cancels. With --out, what is done is kept, and a later run goes on with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hybridgen import __version__
from hybridgen.cli import Parser, add_engine_flags, assigned_settings, run_command
from hybridgen.config import (
    Config,
    Setting,
    Settings,
    build_config,
    strategy_names,
)
from hybridgen.engine import build
from hybridgen.engine.build import ModelChoice, ObtainedWeights
from hybridgen.engine.layer_modes import layer_modes
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import current_commit
from hybridgen.engine.synthetic_kv import SYNTHETIC_KV_NOTE
from hybridgen.errors import ConfigError, HybridGenError
from hybridgen.evaluation.comparison import (
    UNTIMED_STEPS,
    Reference,
    free_memory,
    make_reference,
    measure,
    summarise,
)
from hybridgen.evaluation.comparison_job import (
    FULL,
    RANDOM_KEEP,
    ComparisonJob,
    Contestant,
    exact_reference,
    keep_by_count,
    matched_config,
    over_defaults,
    prepare_all,
    settings_of,
    short_reason,
    with_one_share,
)
from hybridgen.evaluation.comparison_store import ComparisonStore
from hybridgen.evaluation.comparison_table import format_comparison, format_strategies
from hybridgen.evaluation.prompts import make_prompts, planned_tokens
from hybridgen.evaluation.strategy_list import describe_strategy
from hybridgen.machine import this_cores, this_gpu
from hybridgen.models.loading import weight_bytes
from hybridgen.quantities import parse_keep

ROUNDS = 2
_FLAGS_OF_RUN = (
    "--keep", "--keep-mass", "--min-keep", "--lookahead", "--key-type", "--sketch", "--sketch-home", "--schedule",
    "--target-ms", "--strategy",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a wrong input, 130 after Ctrl-C."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    files = _strategies(arguments.strategies)
    job = _job(arguments)
    settings = {name: settings_of(job, file) for name, file in files.items()}
    if arguments.list_strategies:
        print(_strategy_table(job, settings))
        return 0
    if job.gen < UNTIMED_STEPS + 2:
        raise ConfigError(
            f"--gen {job.gen}: the first {UNTIMED_STEPS} steps are not timed, allowed is >= {UNTIMED_STEPS + 2}"
        )
    store = ComparisonStore(arguments.out)
    contestants = prepare_all(job, settings)
    reference = exact_reference(job)
    reference = with_one_share(job, contestants, reference)
    if all(contestant.skipped for contestant in contestants):
        assert contestants[0].error is not None
        raise contestants[0].error
    print(_head(job, contestants, reference))
    keys = _load_done(job, store, contestants)
    if _is_complete(job, contestants) and len(_reference_names(contestants)) == 1:
        print(f"all of it is in {arguments.out} already")
        return _finish(job, store, contestants, 0)
    weights = _load(job.choice, reference.config)
    if weights.kind == "random":
        print(f"*** RANDOM WEIGHTS ({weights.random_reason}): agreement and KL mean nothing for quality ***")
        if job.synthetic_kv:
            print(f"*** {SYNTHETIC_KV_NOTE} ***")
        if job.budget is None and job.keep is None and not job.given:
            job.keep = RANDOM_KEEP
            keep_by_count(job, contestants, settings)
            keys = _load_done(job, store, contestants)
    status = _measure_all(job, store, contestants, reference, weights, keys)
    return _finish(job, store, contestants, status)


def _parser() -> Parser:
    parser = Parser("hybridgen.compare", description="Strategies beside full attention, on the same prompt.")
    parser.add_argument(
        "--strategies",
        default="all",
        metavar="A,B,...",
        help=f"all (default), or some of {', '.join(strategy_names())}, or YAML files",
    )
    parser.add_argument("--budget", type=float, metavar="F", help="share of the context that each attends to")
    parser.add_argument("--keep", type=parse_keep, metavar="F|N", help="instead: host tokens that each fetches")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of all strategies (default {ROUNDS})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="JSON, table and plot; what is there is not run again")
    parser.add_argument("--list-strategies", action="store_true", help="what each does and moves; nothing is run")
    add_engine_flags(parser, leave_out=_FLAGS_OF_RUN)
    return parser


def _strategies(text: str) -> dict[str, str]:
    """Name -> name or file, full attention first of `all`."""
    if text == "all":
        return {name: name for name in sorted(strategy_names(), key=lambda name: (name != FULL, name))}
    files = [part.strip() for part in text.split(",") if part.strip()]
    if not files:
        raise ConfigError(f"--strategies {text!r}: give names, files, or all")
    named = {Path(file).stem if file.endswith((".yaml", ".yml")) else file: file for file in files}
    if len(named) < len(files):
        raise ConfigError(f"--strategies {text}: two of them have the same name")
    return named


def _job(arguments: argparse.Namespace) -> ComparisonJob:
    budget, keep, assigned = arguments.budget, arguments.keep, assigned_settings(arguments)
    if budget is not None and keep is not None:
        raise ConfigError(f"--budget {budget:g} and --keep {keep}: give one of them, they match different things")
    if budget is not None and not 0 < budget <= 1:
        raise ConfigError(f"--budget {budget:g}: allowed is a fraction in (0, 1]")
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: allowed is a number >= 1")
    if "attention.executor" in assigned:
        raise ConfigError(
            f"{assigned['attention.executor'].source}: the strategies decide that, and full attention is the "
            "reference; name the strategy among --strategies"
        )
    given = [path for path in assigned if path.startswith(("selection.keep", "selection.min_keep"))]
    if given and (budget is not None or keep is not None):
        flag = "--keep" if budget is None else "--budget"
        raise ConfigError(f"{assigned[given[0]].source}: {flag} decides that for all strategies; leave out one of them")
    if keep is not None:  # its range
        build_config({"selection.keep": Setting(keep, f"--keep {keep}")})
    config = build_config(over_defaults(assigned))
    choice = build.choose_model(config)
    tokens = planned_tokens(choice, config, None)
    run = config.run
    job = ComparisonJob(choice, tokens, run.gen, run.batch, arguments.rounds, budget, keep, assigned, bool(given))
    if config.model.weights == "random" and budget is None and keep is None and not given:
        print(f"random weights: attention mass means nothing, so --keep {RANDOM_KEEP} is used")
        job.keep = RANDOM_KEEP
    if budget is not None and config.model.exact_layers_mode == "auto":
        raise ConfigError(
            "model.exact_layers_mode = 'auto' with --budget, which counts the exact layers: allowed are resident, "
            "select or a number"
        )
    return job


def _load_done(job: ComparisonJob, store: ComparisonStore, contestants: list[Contestant]) -> dict[str, str]:
    """What is there already goes to the contestants; the keys that their files are named by."""
    keys = {}
    for contestant in contestants:
        if contestant.skipped is None and contestant.config is not None:
            keys[contestant.name] = _key(job, contestant.config)
            contestant.rounds = store.rounds(contestant.name, keys[contestant.name], job.rounds)
    return keys


def _key(job: ComparisonJob, config: Config) -> str:
    """Of all that a result depends on, but the code."""
    content = config.to_dict()
    content["runtime"].pop("prefill_chunk")  # follows the memory that is free
    identity = [content, job.choice.spec.name, job.tokens, job.gen, job.batch, this_gpu(), this_cores()]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def _is_complete(job: ComparisonJob, contestants: Sequence[Contestant]) -> bool:
    return all(some.skipped is not None or len(some.rounds) == job.rounds for some in contestants)


def _reference_names(contestants: Sequence[Contestant]) -> set[str]:
    return {report["comparison"]["reference_name"] for some in contestants for report in some.rounds.values()}


def _load(choice: ModelChoice, config: Config | None) -> ObtainedWeights:
    assert config is not None
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:

        def progress(count: int) -> None:
            bar.update(count)

        return build.obtain_weights(choice, config, needs_text=False, progress=progress)


def _measure_all(
    job: ComparisonJob,
    store: ComparisonStore,
    contestants: list[Contestant],
    exact: Contestant,
    weights: ObtainedWeights,
    keys: dict[str, str],
) -> int:
    """Round by round what is not there yet; what is done is written. Returns the exit status."""
    assert exact.config is not None and exact.admission is not None
    taking_part = [some for some in contestants if some.skipped is None]
    try:
        with LLM.from_parts(exact.config, job.choice, weights, exact.admission.modes) as llm:
            prompts = make_prompts(llm, None, job.tokens).ids
            key = _key(job, exact.config)
            reference = store.reference(key)
            if reference is None:
                reference = make_reference(llm, prompts, job.gen, exact.name)
                store.save_reference(key, reference)
                free_memory(llm)
            _drop_others(taking_part, reference)
            bar = tqdm(total=len(taking_part) * job.rounds, desc="compare", unit="run", disable=None)
            with bar:
                for index in range(job.rounds):
                    for some in taking_part if index % 2 == 0 else taking_part[::-1]:
                        bar.set_postfix_str(some.name)
                        if index not in some.rounds and some.skipped is None:
                            _measure(llm, prompts, reference, some, index)
                            free_memory(llm)
                            if index in some.rounds:
                                store.save(some.name, keys[some.name], index, some.rounds[index])
                        bar.update(1)
                    store.save_content(_content(job, contestants))
    except KeyboardInterrupt:
        return 130
    return 0


def _measure(llm: LLM, prompts: list[list[int]], reference: Reference, contestant: Contestant, index: int) -> None:
    """One round of one strategy; if it cannot be done, the contestant says why."""
    assert contestant.config is not None and contestant.admission is not None
    planned = contestant.admission.to_dict()
    try:
        with llm.sharing(contestant.config, contestant.admission.modes) as own:
            contestant.rounds[index] = measure(own, prompts, reference, contestant.name, planned)
    except HybridGenError as error:
        contestant.skip(error)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "out of memory" in str(error)):
            raise
        contestant.skipped = f"out of memory in spite of the plan: {str(error).splitlines()[0]}"


def _drop_others(contestants: Sequence[Contestant], reference: Reference) -> None:
    """What was measured along another continuation is measured again."""
    for some in contestants:
        for index, report in list(some.rounds.items()):
            if report["comparison"]["reference_name"] != reference.name:
                print(f"{some.name}, round {index}: of another continuation, is measured again")
                del some.rounds[index]


def _content(job: ComparisonJob, contestants: Sequence[Contestant]) -> dict[str, Any] | None:
    """compare.json; None if nothing was measured."""
    reports = [report for some in contestants for report in some.rounds.values()]
    if not reports:
        return None
    some_report = reports[0]
    return {
        "complete": _is_complete(job, contestants),
        **{name: some_report[name] for name in ("model", "weights", "device", "dtype", "batch", "machine")},
        "prompt_tokens": job.tokens,
        "gen": job.gen,
        "rounds": job.rounds,
        "untimed_steps": UNTIMED_STEPS,
        "matched": job.matched,
        "reference": {
            "strategy": some_report["comparison"]["reference"],
            "reference_name": some_report["comparison"]["reference_name"],
        },
        "strategies": [
            {
                "name": some.name,
                "skipped": some.skipped,
                "attends_to_all": some.attends_to_all,
                "split": None if some.split is None else asdict(some.split),
                "summary": summarise(list(some.rounds.values())) if some.rounds else None,
                "config": None if some.config is None else some.config.to_dict(),
            }
            for some in contestants
        ],
        "versions": {"hybridgen": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": current_commit(),
    }


def _finish(job: ComparisonJob, store: ComparisonStore, contestants: Sequence[Contestant], status: int) -> int:
    """Print and write what there is. Returns the exit status."""
    content = _content(job, contestants)
    if content is None:
        skipped = [f"{some.name}: {some.skipped}" for some in contestants if some.skipped is not None]
        print("nothing was measured", *skipped, sep="\n")
        return status or 2
    print("\n" + format_comparison(content))
    for line in store.save_content(content, plot=True):
        print(line)
    return status


def _head(job: ComparisonJob, contestants: Sequence[Contestant], reference: Contestant) -> str:
    """What will be run, and what not."""
    lines = [
        f"{job.choice.spec.name}: {job.batch} x {job.tokens} prompt tokens, {job.gen} generated, {job.rounds} rounds; "
        f"reference: {reference.name}"
    ]
    width = max(len(some.name) for some in contestants)
    for some in contestants:
        if some.skipped is not None:
            words = f"skipped, {some.skipped}"
        elif some.attends_to_all:
            words = "attends to all tokens: budget 1.0" + (", whatever is asked for" if job.budget is not None else "")
        elif some.split is not None:
            words = f"budget {some.split.describe()}"
        else:
            words = "as its file says" if job.matched is None else job.matched
        lines.append(f"  {some.name:<{width}}  {words}")
    return "\n".join(lines)


def _strategy_table(job: ComparisonJob, settings: dict[str, Settings]) -> str:
    choice, on_cuda = job.choice, job.choice.device.type == "cuda"
    rows = []
    for name, given in settings.items():
        try:
            config, _ = matched_config(job, name, given)
            modes = layer_modes(config, choice.spec.num_layers)
            rows.append(describe_strategy(name, config, modes, choice.spec, choice.dtype, job.tokens, on_cuda))
        except HybridGenError as error:
            rows.append([name, f"refused: {short_reason(error)}"])
    dtype = str(choice.dtype).removeprefix("torch.")
    title = f"{choice.spec.name}, {dtype}, {job.batch} x {job.tokens} tokens; bytes of a decode step, 1 MB = 10^6"
    return f"{title}\n\n{format_strategies(rows)}"


if __name__ == "__main__":
    sys.exit(main())
