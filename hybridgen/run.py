"""`python -m hybridgen.run`: continue a long prompt, say how it went, and judge the answer.

Without a prompt and with real weights the program makes a long document with a fact hidden in it and
asks for the fact; with random weights the prompt is seeded token ids and only the speed means anything.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from hybridgen.cli import SYNTHETIC_KV, Parser, add_engine_flags, given_settings, run_command
from hybridgen.config import Config, Settings, build_config, configs_dir
from hybridgen.engine import build
from hybridgen.engine.admission import Admission, admit
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.generation import generate, timed
from hybridgen.engine.limits import kernel_ms, limits
from hybridgen.engine.llm import LLM
from hybridgen.engine.memory_budget import WITHOUT_AUTO
from hybridgen.engine.report import build_report, write_report
from hybridgen.engine.sampler import Sampler
from hybridgen.engine.synthetic_kv import SYNTHETIC_KV_NOTE
from hybridgen.engine.trace import TRACED_STEPS, build_trace, write_trace
from hybridgen.errors import ConfigError
from hybridgen.evaluation.judge import FullAttentionCheck, judge
from hybridgen.evaluation.prompts import Prompts, encode_if_local, make_prompts, planned_tokens, read_prompt
from hybridgen.machine import read_ceilings
from hybridgen.models.loading import weight_bytes
from hybridgen.models.tokenizer import IncrementalDecoder, Tokenizer
from hybridgen.output import check_output_path
from hybridgen.table import format_settings, format_table

CHECK_CONTEXT = 8192  # longer contexts are checked against full attention only when asked for
RANDOM_KEEP = 0.1  # with random weights attention is flat and mass means nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a wrong input, 130 after Ctrl-C."""
    return run_command(_run, argv)


def _run(argv: list[str]) -> int:
    parser = Parser("hybridgen.run", description="Generate from a long prompt; KV beyond the window on the host.")
    add_engine_flags(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompt.add_argument("--prompt-file", type=Path, metavar="F", help="continue the text of this file")
    parser.add_argument("--report", type=Path, metavar="F", help="write a JSON report")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="F",
        help=f"write what ran when in the first {TRACED_STEPS} decode steps, for Perfetto (Chrome trace format)",
    )
    arguments = parser.parse_args(argv)
    settings = given_settings(arguments)
    config = _default_schedule(build_config(settings), given="schedule.mode" in settings)
    text = read_prompt(arguments.prompt, arguments.prompt_file)
    if text is not None and config.runtime.synthetic_kv:
        raise ConfigError(f"{SYNTHETIC_KV} with a prompt, whose K and V are computed (allowed: one of the two)")
    report_path, trace_path = arguments.report, arguments.trace
    check_output_path("--report", report_path)
    check_output_path("--trace", trace_path)
    if trace_path is not None and report_path is not None and trace_path.absolute() == report_path.absolute():
        raise ConfigError(f"--trace {trace_path}: this is the report's file, too; give another")

    choice = build.choose_model(config)
    prompt_ids = None if text is None else encode_if_local(choice, config, text)
    tokens = planned_tokens(choice, config, prompt_ids)
    pair = ("selection.keep", "selection.keep_mass")
    shipped = str(configs_dir())
    keep_given = any(shipped not in settings[path].source for path in pair if path in settings)
    if config.model.weights == "random" and not keep_given:
        config = _random_keep(config)
    wants_check = text is None and _wants_check(config, tokens)
    admission = admit(choice, config, tokens, config.run.gen, config.run.batch, wants_check, left_open(settings))
    config = _resolved(admission, choice, tokens)
    print(format_settings(config))
    print(admission.describe())
    weights = _load(choice, config, text is not None)
    if weights.kind == "random":
        print(f"*** RANDOM WEIGHTS ({weights.random_reason}): the output is meaningless, only speed is measured ***")
        if config.runtime.synthetic_kv:
            print(f"*** {SYNTHETIC_KV_NOTE} ***")
        if config.model.weights != "random" and not keep_given:
            config = _random_keep(config)
        if config.schedule.mode == "feedback":
            print("random weights: attention mass means nothing, so feedback's floor is K alone")

    with LLM.from_parts(config, choice, weights, admission.modes) as llm:
        prompts = make_prompts(llm, text, tokens)
        with _interruption() as interrupted:
            return _generate(llm, prompts, admission, arguments.strategy, report_path, trace_path, interrupted)


def _generate(
    llm: LLM,
    prompts: Prompts,
    admission: Admission,
    strategy: str,
    report_path: Path | None,
    trace_path: Path | None,
    interrupted: Callable[[], bool],
) -> int:
    config = llm.config
    batch = llm.new_batch([len(ids) + config.run.gen for ids in prompts.ids])
    check = FullAttentionCheck(llm, prompts) if prompts.documents is not None and admission.check_fits else None
    mirrors = [] if check is None else [check.batch]
    with tqdm(total=llm.spec.num_layers, desc="prefill", unit="layer", disable=None) as bar:

        def progress(layer: int) -> None:
            bar.update(1)
            if interrupted():
                raise KeyboardInterrupt

        logits, prefill_s = timed(lambda: llm.prefill(batch, prompts.ids, mirrors, progress))

    tokenizer = llm.tokenizer if llm.weights.kind == "real" else None
    eos = set() if config.sampling.ignore_eos or tokenizer is None else llm.eos_token_ids
    allocations = _allocations(llm)
    llm.telemetry.trace_steps = 0 if trace_path is None else TRACED_STEPS
    with _printer(tokenizer, eos, config.run.gen) as show:
        generation = generate(
            llm,
            batch,
            logits,
            config.run.gen,
            Sampler(config.sampling, llm.device, config.run.seed),
            ends=llm.ends(ignore_eos=tokenizer is None),
            on_token=show,
            interrupted=interrupted,
        )
    llm.telemetry.trace_steps = 0
    if allocations is not None:
        allocations = (_allocations(llm) or 0) - allocations
    text = None if tokenizer is None else [_text(tokenizer, ids, eos) for ids in generation.output_ids]
    planned = admission.to_dict()
    report = build_report(llm, batch, generation, prompts.ids, text, prefill_s, planned, strategy, allocations)
    if generation.ended_by == "length" and generation.steps:  # room for one more token is left
        last = torch.tensor([ids[-1] for ids in generation.output_ids])
        report |= limits(report, kernel_ms(llm, batch, last), read_ceilings())
    if text is not None and generation.ended_by != "interrupt":
        report |= judge(llm, prompts, text, None if check is None else check.answer(logits))
    print("\n" + format_table(report))
    if report["scheduler"]["target_missed"]:
        print(f"warning: --target-ms {config.schedule.target_ms:g} is not reached: the floor of what is kept wins")
    if report_path is not None:
        write_report(report, report_path)
        print(f"report: {report_path}")
    if trace_path is not None:
        about = {name: report[name] for name in ("model", "weights", "device", "dtype", "strategy", "batch", "commit")}
        trace = build_trace(generation.steps, about)
        write_trace(trace, trace_path)
        print(f"trace: {trace_path} ({trace['otherData']['steps_traced']} of {len(generation.steps)} decode steps)")
    return 130 if generation.ended_by == "interrupt" else 0


def _resolved(admission: Admission, choice: ModelChoice, tokens: int) -> Config:
    """The settings with what `auto` and the defaults came out as."""
    config = admission.config
    dtype: Any = str(choice.dtype).removeprefix("torch.")
    device: Any = choice.device.type
    return replace(
        config,
        model=replace(config.model, dtype=dtype),
        runtime=replace(config.runtime, device=device),
        run=replace(config.run, seq=tokens),
    )


def _default_schedule(config: Config, given: bool) -> Config:
    """`feedback` where the CPU scores and nothing else was asked for."""
    if given or config.attention.executor != "hybrid" or config.cache.sketch_home == "gpu":
        return config
    return replace(config, schedule=replace(config.schedule, mode="feedback"))


def left_open(settings: Settings) -> list[str]:
    """What the memory budget may choose though it has no `auto`, as nobody gave it. Only feedback aims at a time."""
    given = settings.keys() | ({"schedule.mode"} if "schedule.target_ms" in settings else set())
    return [path for path in WITHOUT_AUTO if path not in given]


def _wants_check(config: Config, tokens: int) -> bool:
    if config.attention.executor == "full" or config.model.weights == "random":
        return False
    windowed = config.attention.executor == "evicting" and config.eviction.prefill == "windowed"
    if windowed and config.run.check_answer is None:
        return False  # full attention cannot go on from that prefill
    return tokens <= CHECK_CONTEXT if config.run.check_answer is None else config.run.check_answer


def _random_keep(config: Config) -> Config:
    if config.attention.executor != "hybrid":
        return config
    print(f"random weights: attention mass means nothing, so --keep {RANDOM_KEEP} is used")
    return replace(config, selection=replace(config.selection, keep=RANDOM_KEEP, keep_mass=None))


def _load(choice: ModelChoice, config: Config, has_prompt: bool) -> build.ObtainedWeights:
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    bar: tqdm[NoReturn]
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:

        def progress(count: int) -> None:
            bar.update(count)

        return build.obtain_weights(choice, config, needs_text=has_prompt, progress=progress)


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for the end after the running step; a second one ends at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _printer(tokenizer: Tokenizer | None, eos: set[int], gen: int) -> Iterator[Callable[[list[int]], None]]:
    """Streams the first sequence's text; without a tokenizer, a progress bar."""
    if tokenizer is None:
        bar: tqdm[NoReturn]
        with tqdm(total=gen, desc="decode", unit="token", disable=None) as bar:

            def advance(ids: list[int]) -> None:
                bar.update(1)

            yield advance
        return
    decoder, ended = IncrementalDecoder(tokenizer), False

    def show(ids: list[int]) -> None:
        nonlocal ended
        ended = ended or ids[0] in eos
        if not ended:
            print(decoder.push(ids[0]), end="", flush=True)

    yield show
    print(decoder.flush(), flush=True)


def _text(tokenizer: Tokenizer, ids: list[int], eos: set[int]) -> str:
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in eos else ids)


def _allocations(llm: LLM) -> int | None:
    """Device allocations so far (calls that reached the driver); None without a GPU."""
    if llm.device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(llm.device)["num_device_alloc"])


if __name__ == "__main__":
    sys.exit(main())
