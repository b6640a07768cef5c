"""How near CUDA comes to the CPU on a real text: next-token logits, teacher-forced through the decode path.

    python experiments/cuda_agreement.py --model DIR --text FILE [--context 1024] [--steps 500] [--passages 2]
        [--report F] [--set a.b=c ...] [--weights random] [--cpu-only]

The CPU in float32 is the reference; CUDA in float32 (TF32 off) and in float16 feed the same tokens to the same weights.
Bounds: float32's argmax agrees in 99.9 % of the steps, and where it does not the reference's two best logits lie less
than 1e-3 apart; float16's mean KL(reference || float16) is below 1e-3 nats. Exit status 1 if one is missed.

The strategy is hybridgen's with a window of 64, a tenth kept and --schedule fixed; `--set` changes it. Each run chooses
tokens by its own scores: where two of them nearly tie at the last place, runs may attend to different tokens, and what
that does to the logits is part of what is measured. Where there is no GPU, `--cpu-only` puts torch's kernels with the
lazy transfer engine in CUDA's place. Random weights need no text: their tokens are drawn.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hybridgen.cli import Parser, run_command
from hybridgen.config import Config, Setting, Settings, build_config, load_strategy, merge_settings, parse_assignment
from hybridgen.engine import build
from hybridgen.engine.batch import Batch
from hybridgen.engine.build import ModelChoice, ObtainedWeights
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import current_commit, describe_machine, write_report
from hybridgen.engine.statistics import AttentionStatistics
from hybridgen.errors import ConfigError
from hybridgen.evaluation.perplexity import cut_passages
from hybridgen.models.loading import ModelWeights
from hybridgen.models.tokenizer import load_tokenizer
from hybridgen.output import check_output_path
from hybridgen.quantities import parse_tokens

LEAST_AGREEMENT = 0.999  # float32: share of steps with the reference's argmax
GAP_BOUND = 1e-3  # float32: a differing step's two best reference logits lie closer together than this
KL_BOUND = 1e-3  # float16: nats a step, mean

DEFAULTS: dict[str, Any] = {
    "attention.lookahead": "select",
    "cache.gpu_window": 64,
    "selection.keep": 0.1,
    "schedule.mode": "fixed",
}


@dataclass(frozen=True)
class Difference:
    """A step at which another token has the largest logit."""

    passage: int
    step: int
    reference: int  # token id
    other: int  # token id
    gap: float  # between the reference's two largest logits


@dataclass
class Agreement:
    """One run beside the reference, over the steps of some passages."""

    steps: int = 0
    differences: list[Difference] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)  # KL(reference || other) of each step, nats
    largest_logit_error: float = 0.0

    @property
    def share(self) -> float:
        """Of the steps, those with the reference's argmax."""
        return (self.steps - len(self.differences)) / self.steps if self.steps else float("nan")

    @property
    def mean_kl(self) -> float:
        return sum(self.divergences) / len(self.divergences) if self.divergences else float("nan")

    def extend(self, other: Agreement) -> None:
        """Append the other's steps."""
        self.steps += other.steps
        self.differences += other.differences
        self.divergences += other.divergences
        self.largest_logit_error = max(self.largest_logit_error, other.largest_logit_error)


@dataclass(frozen=True)
class Run:
    """Where and how the engine runs; `settings` are over the strategy's and the command line's."""

    name: str
    settings: dict[str, Any]

    @property
    def dtype(self) -> str:
        return str(self.settings["model.dtype"])


@dataclass
class Measured:
    """What a run has given: its logits [steps, vocab], passage by passage, and what it took and attended."""

    logits: list[Tensor]
    seconds: float
    attended: dict[str, float | None]
    machine: dict[str, Any]


def planned_runs(cpu_only: bool) -> list[Run]:
    """The reference first."""

    def run(name: str, device: str, dtype: str, **more: object) -> Run:
        return Run(name, {"runtime.device": device, "model.dtype": dtype, **more})

    reference = run("cpu float32", "cpu", "float32")
    if cpu_only:
        lazy = {"runtime.transfer": "lazy"}
        return [reference, run("lazy float32", "cpu", "float32", **lazy), run("lazy float16", "cpu", "float16", **lazy)]
    return [reference, run("cuda float32", "cuda", "float32"), run("cuda float16", "cuda", "float16")]


def teacher_forced(
    llm: LLM, tokens: Sequence[int], context: int, on_step: Callable[[Batch], None] = lambda batch: None
) -> Tensor:
    """Prefill tokens[:context], then feed the others one by one: float32 logits [others, vocab] on the CPU.

    on_step: called with the batch after each decode step.
    """
    fed = tokens[context:]
    logits = torch.empty(len(fed), llm.spec.vocab_size)
    batch = llm.new_batch([len(tokens)])
    llm.prefill(batch, [tokens[:context]])
    for step, token in enumerate(fed):
        logits[step] = llm.decode(batch, [token])[0]
        on_step(batch)
    return logits


def compare(reference: Tensor, other: Tensor, passage: int = 0) -> Agreement:
    """Two runs' float32 logits [steps, vocab] of the same passage; computed in float64."""
    if reference.shape != other.shape:
        raise ValueError(f"logits of shape {tuple(reference.shape)} and {tuple(other.shape)}")
    found = Agreement(steps=len(reference))
    for step, (expected, given) in enumerate(zip(reference.double(), other.double(), strict=True)):
        best, second = expected.topk(2).values.tolist()
        tokens = int(expected.argmax()), int(given.argmax())
        if tokens[0] != tokens[1]:
            found.differences.append(Difference(passage, step, *tokens, best - second))
        log_p, log_q = expected.log_softmax(-1), given.log_softmax(-1)
        found.divergences.append(float((log_p.exp() * (log_p - log_q)).sum()))
        found.largest_logit_error = max(found.largest_logit_error, float((given - expected).abs().max()))
    return found


def compare_all(reference: Sequence[Tensor], other: Sequence[Tensor]) -> Agreement:
    """Of all passages, each [steps, vocab]."""
    found = Agreement()
    for passage, (expected, given) in enumerate(zip(reference, other, strict=True)):
        found.extend(compare(expected, given, passage))
    return found


def missed_bounds(dtype: str, found: Agreement) -> list[str]:
    """Which bounds of this dtype do not hold, in words. What is not a number holds none."""
    missed = []
    if dtype == "float32":
        if not found.share >= LEAST_AGREEMENT:
            missed.append(f"argmax agreement {found.share:.5f} < {LEAST_AGREEMENT}")
        wide = [difference for difference in found.differences if not difference.gap < GAP_BOUND]
        if wide:
            missed.append(f"{len(wide)} differences at a top-2 gap >= {GAP_BOUND:g}")
    elif not found.mean_kl < KL_BOUND:
        missed.append(f"mean KL {found.mean_kl:.3g} >= {KL_BOUND:g}")
    return missed


def config_of(arguments: argparse.Namespace, run: Run) -> Config:
    """Run's settings > `--set` > this experiment's > the strategy's."""
    own: Settings = {path: Setting(value, "this experiment") for path, value in DEFAULTS.items()}
    own["model.name"] = Setting(arguments.model, "--model")
    own["model.weights"] = Setting(arguments.weights, "--weights")
    assigned: Settings = {}
    for text in arguments.set:
        assigned |= parse_assignment(text)
    fixed: Settings = {path: Setting(value, f"the run {run.name}") for path, value in run.settings.items()}
    return build_config(merge_settings(load_strategy("hybridgen"), own, assigned, fixed))


def converted(weights: ObtainedWeights, choice: ModelChoice) -> ObtainedWeights:
    """The same weights on another device, in another type: random ones too are those of the reference."""

    def all_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(choice.device, choice.dtype) for name, tensor in tensors.items()}

    layers = [all_of(layer) for layer in weights.tensors.layers]
    return replace(weights, tensors=ModelWeights(all_of(weights.tensors.shared), layers))


def read_passages(arguments: argparse.Namespace, weights: ObtainedWeights) -> list[list[int]]:
    """Token ids of each passage, context + steps of them; drawn where random weights have no text."""
    length = arguments.context + arguments.steps
    if arguments.text is None:
        if weights.kind != "random":
            raise ConfigError("real weights need a text: --text FILE")
        generator = random.Random(0)
        return [generator.choices(range(weights.spec.vocab_size), k=length) for _ in range(arguments.passages)]
    if not weights.has_tokenizer or weights.directory is None:
        raise ConfigError(f"--text {arguments.text}: {arguments.model} has no local tokenizer to read it with")
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {arguments.text}: {getattr(error, 'strerror', None) or error}") from None
    tokenizer = load_tokenizer(weights.directory)
    start = tokenizer.encode("")  # BOS, where the model wants one
    ids = tokenizer.encode(text)[len(start) :]
    # One token fewer than `cut_passages` thinks of: the last one's successor is not scored here.
    passages = cut_passages(ids, start, arguments.context, arguments.steps - 1, arguments.passages)
    return [passage.ids for passage in passages]


def measure(
    config: Config, choice: ModelChoice, weights: ObtainedWeights, passages: Sequence[list[int]], context: int, bar: Any
) -> Measured:
    """One run over all passages, in turn."""
    statistics = AttentionStatistics()

    def on_step(batch: Batch) -> None:
        statistics.observe(batch)
        bar.update(1)

    with LLM.from_parts(config, choice, weights) as llm:
        llm.telemetry.enabled = False
        start = time.perf_counter()
        logits = [teacher_forced(llm, tokens, context, on_step) for tokens in passages]
        return Measured(logits, time.perf_counter() - start, statistics.summary(), describe_machine(llm))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Of the command line."""
    parser = Parser("cuda_agreement.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", metavar="M")
    parser.add_argument("--weights", default="real", choices=("real", "random"))
    parser.add_argument("--text", type=Path, metavar="F", help="UTF-8; passages are cut from all over it")
    parser.add_argument("--context", type=parse_tokens, default=1024, metavar="N", help="tokens prefilled")
    parser.add_argument("--steps", type=parse_tokens, default=500, metavar="N", help="tokens fed one by one")
    parser.add_argument("--passages", type=parse_tokens, default=2, metavar="N")
    parser.add_argument("--report", type=Path, metavar="F", help="write a JSON report")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="any setting; repeatable")
    parser.add_argument("--cpu-only", action="store_true", help="other kernels on the CPU in place of CUDA")
    arguments = parser.parse_args(argv)
    for name in ("context", "steps", "passages"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    check_output_path("--report", arguments.report)
    return arguments


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every run, and how the others agree with the first: the report."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    runs = planned_runs(arguments.cpu_only)
    configs = [config_of(arguments, run) for run in runs]
    choices = [build.choose_model(config) for config in configs]
    weights = build.obtain_weights(choices[0], configs[0], needs_text=arguments.text is not None)
    if weights.host is not None:
        raise ConfigError("placement.weights_on_gpu: all weights stay on the device here (allowed: 'auto', 1.0)")
    passages = read_passages(arguments, weights)
    warning = build.check_positions(choices[0], len(passages[0]), configs[0].model.extend_positions)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    reference: list[Tensor] = []
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(runs) * arguments.passages * arguments.steps, unit="step", disable=None) as bar:
        for run, config, choice in zip(runs, configs, choices, strict=True):
            bar.set_description(run.name)
            measured = measure(config, choice, converted(weights, choice), passages, arguments.context, bar)
            rows.append(_row(run, config, measured, compare_all(reference, measured.logits) if reference else None))
            reference = reference or measured.logits
    shape = {name: getattr(arguments, name) for name in ("context", "steps", "passages")}
    text = None if arguments.text is None else str(arguments.text)
    return {
        "model": weights.spec.name, "weights": weights.kind, "text": text, **shape, "runs": rows,
        "commit": current_commit(),
    }  # fmt: skip


def _row(run: Run, config: Config, measured: Measured, found: Agreement | None) -> dict[str, Any]:
    """found: None for the reference itself."""
    against = found and {
        "argmax_agreement": found.share,
        "differences": [asdict(difference) for difference in found.differences],
        "kl_nats": {"mean": found.mean_kl, "max": max(found.divergences)},
        "largest_logit_error": found.largest_logit_error,
        "missed": missed_bounds(run.dtype, found),
    }
    return {
        "name": run.name,
        "dtype": run.dtype,
        "seconds": measured.seconds,
        "budget": measured.attended["budget"],
        "kept_fraction": measured.attended["kept_fraction"],
        "against_reference": against,
        "machine": measured.machine,
        "config": config.to_dict(),
    }


def summary(report: dict[str, Any]) -> str:
    """A line for each run, each difference in float32 and each missed bound."""
    lines = [
        f"{report['model']} ({report['weights']} weights), {report['passages']} passages: {report['context']} tokens "
        f"prefilled, {report['steps']} teacher-forced steps each",
        f"{'run':<13} {'seconds':>8} {'budget':>7} {'kept':>6} {'agreement':>10} {'mean KL':>10} {'max KL':>10} "
        f"{'logit error':>12}",
    ]
    differences, missed = [], []
    for run in report["runs"]:
        kept = "-" if run["kept_fraction"] is None else f"{run['kept_fraction']:.3f}"
        line = f"{run['name']:<13} {run['seconds']:>8.1f} {run['budget']:>7.3f} {kept:>6}"
        against = run["against_reference"]
        if against is None:
            lines.append(f"{line} {'reference':>10}")
            continue
        kl = against["kl_nats"]
        lines.append(
            f"{line} {against['argmax_agreement']:>10.5f} {kl['mean']:>10.2e} {kl['max']:>10.2e} "
            f"{against['largest_logit_error']:>12.2e}"
        )
        missed += [f"MISSED, {run['name']}: {text}" for text in against["missed"]]
        if run["dtype"] == "float32":
            differences += [
                f"{run['name']}, passage {found['passage']}, step {found['step']}: token {found['other']}, not "
                f"{found['reference']}; the reference's top-2 gap is {found['gap']:.2e}"
                for found in against["differences"]
            ]
    return "\n".join([*lines, *differences, *(missed or ["all bounds hold"])])


def command(argv: list[str]) -> int:
    """Measure, print, write; 1 if a bound is missed."""
    arguments = parse_arguments(argv)
    report = measure_all(arguments)
    print(summary(report))
    if arguments.report is not None:
        write_report(report, arguments.report)
    return int(any(run["against_reference"] and run["against_reference"]["missed"] for run in report["runs"]))


def main(argv: Sequence[str] | None = None) -> int:
    """As every command: a wrong input is one line and exit status 2."""
    return run_command(command, argv)


if __name__ == "__main__":
    sys.exit(main())
