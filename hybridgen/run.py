"""`python -m hybridgen.run`: continue a long prompt, say how it went, and judge the answer.

Without a prompt and with real weights the program makes a long document with a fact hidden in it and
asks for the fact; with random weights the prompt is seeded token ids and only the speed means anything.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from tqdm import tqdm

from hybridgen.cli import Parser, add_engine_flags, given_settings, run_command
from hybridgen.config import Config, build_config
from hybridgen.engine import build
from hybridgen.engine.admission import Admission, admit
from hybridgen.engine.batch import Batch
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.generation import generate, timed
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import build_report, write_report
from hybridgen.engine.sampler import Sampler
from hybridgen.errors import CheckpointError, ConfigError
from hybridgen.evaluation.document import Document, hidden_fact_document
from hybridgen.models.loading import weight_bytes
from hybridgen.models.opt import OPTModel
from hybridgen.models.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer
from hybridgen.table import format_table

CHECK_TOKENS = 16  # at most so many tokens of full attention's own answer
CHECK_CONTEXT = 8192  # longer contexts are checked only when asked for
RANDOM_KEEP = 0.1  # with random weights attention is flat and mass means nothing


@dataclass
class Prompts:
    """What the sequences start with, and how their continuations are judged."""

    ids: list[list[int]]
    documents: list[Document] | None = None


class Interruption:
    """Ctrl-C asks for the end after the running step; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


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
    arguments = parser.parse_args(argv)
    settings = given_settings(arguments)
    config = build_config(settings)
    prompt_text = _prompt_text(arguments.prompt, arguments.prompt_file)
    if arguments.report is not None and not arguments.report.resolve().parent.is_dir():
        raise ConfigError(f"--report {arguments.report}: the folder does not exist")

    choice = build.choose_model(config)
    prompt_ids = None if prompt_text is None else _encode_early(choice, config, prompt_text)
    prompt_tokens = _prompt_tokens(choice, config, prompt_ids)
    keep_given = any(settings[path].source.startswith("--") for path in _KEEP_PATHS if path in settings)
    if config.model.weights == "random" and not keep_given:
        config = _random_keep(config)
    wants_check = prompt_text is None and _wants_check(config, prompt_tokens)
    admission = admit(choice, config, prompt_tokens, config.run.gen, config.run.batch, wants_check)
    print(admission.describe())
    weights = _load(choice, config, prompt_text is not None)
    if weights.kind == "random":
        print(f"*** RANDOM WEIGHTS ({weights.random_reason}): the output is meaningless, only speed is measured ***")
        if config.model.weights != "random" and not keep_given:
            config = _random_keep(config)

    with LLM.from_parts(config, choice, weights, admission.modes) as llm:
        _extend_positions(llm, prompt_tokens + config.run.gen)
        prompts = _prompts(llm, config, prompt_text, prompt_tokens)
        return _generate(llm, prompts, admission, arguments.strategy, arguments.report)


_KEEP_PATHS = ("selection.keep", "selection.keep_mass")


def _generate(llm: LLM, prompts: Prompts, admission: Admission, strategy: str, report_path: Path | None) -> int:
    config, gen = llm.config, llm.config.run.gen
    interruption = Interruption()
    batch = llm.new_batch([len(ids) + gen for ids in prompts.ids])
    checker = _checker(llm, prompts, admission)
    mirrors = [] if checker is None else [checker.new_batch([len(ids) + CHECK_TOKENS for ids in prompts.ids])]
    layers = llm.spec.num_layers
    with tqdm(total=layers, desc="prefill", unit="layer", disable=None) as bar:
        logits, prefill_s = timed(lambda: llm.prefill(batch, prompts.ids, mirrors, progress=lambda _: _advance(bar)))

    tokenizer = llm.tokenizer if llm.weights.kind == "real" else None
    eos = set() if config.sampling.ignore_eos or tokenizer is None else _eos(llm, tokenizer)
    allocations = _allocations(llm)
    generation = generate(
        llm,
        batch,
        logits,
        gen,
        Sampler(config.sampling, llm.device, config.run.seed),
        ends=lambda ids: ids[-1] in eos or _stops(tokenizer, ids, config.sampling.stop),
        on_token=_printer(tokenizer, eos, gen),
        interrupted=lambda: interruption.asked,
    )
    if allocations is not None:
        allocations = (_allocations(llm) or 0) - allocations
    text = None if tokenizer is None else [_text(tokenizer, ids, eos) for ids in generation.output_ids]
    report = build_report(llm, generation, prompts.ids, text, prefill_s, admission.plan, strategy, allocations)
    if prompts.documents is not None and text is not None:
        report["answer"] = _judge(llm, prompts, text, checker, mirrors, logits)
    print()
    print(format_table(report))
    if report_path is not None:
        write_report(report, report_path)
        print(f"report: {report_path}")
    return 130 if generation.ended_by == "interrupt" else 0


def _judge(
    llm: LLM,
    prompts: Prompts,
    text: list[str],
    checker: LLM | None,
    mirrors: Sequence[Batch],
    logits: torch.Tensor,
) -> dict[str, object]:
    """Is the hidden fact in the answer, and what does full attention say from the same prefill?"""
    assert prompts.documents is not None
    if llm.spec.family == "opt" and max(len(ids) for ids in prompts.ids) > llm.spec.max_positions:
        return {"judged": False, "why": "not judged: positions interpolated"}
    answers = [document.answer for document in prompts.documents]
    answer: dict[str, object] = {
        "judged": True,
        "expected": answers,
        "right": [doc.is_answered_by(t) for doc, t in zip(prompts.documents, text, strict=True)],
        "fact_in_host_tier": [
            document.fact_tokens.start >= llm.config.cache.sinks
            and document.fact_tokens.stop <= len(ids) - llm.config.cache.gpu_window - 64
            for document, ids in zip(prompts.documents, prompts.ids, strict=True)
        ],
    }
    if checker is not None:
        tokenizer = llm.tokenizer
        greedy = Sampler(replace(llm.config.sampling, temperature=0.0), llm.device, 0)
        full = generate(checker, mirrors[0], logits, CHECK_TOKENS, greedy)
        full_text = [tokenizer.decode(ids) for ids in full.output_ids]
        answer["full_attention"] = full_text
        answer["full_attention_right"] = [
            doc.is_answered_by(t) for doc, t in zip(prompts.documents, full_text, strict=True)
        ]
    return answer


def _prompt_text(text: str | None, file: Path | None) -> str | None:
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {file}: {getattr(error, 'strerror', None) or error}") from None
    if text is not None and not text.strip():
        raise ConfigError(f"the prompt is empty (from {'--prompt' if file is None else f'--prompt-file {file}'})")
    return text


def _encode_early(choice: ModelChoice, config: Config, text: str) -> list[int] | None:
    """The prompt's ids if the tokenizer is here already; None if it has yet to be downloaded."""
    if choice.location.needs_download:
        if config.model.weights == "random":
            raise CheckpointError(
                f"--prompt with --weights random needs {choice.spec.name}'s tokenizer, and no local copy exists: "
                "leave the prompt out, or give a local directory as --model"
            )
        return None
    return load_tokenizer(choice.location.prepare()).encode(text)


def _prompt_tokens(choice: ModelChoice, config: Config, prompt_ids: list[int] | None) -> int:
    """Tokens to plan for: the prompt's own, at most --seq of them; or --seq, or its default."""
    room = choice.spec.max_positions - config.run.gen
    default = min(32 * 1024, room) if choice.device.type == "cuda" else min(2048, room)
    if default < 1:
        raise ConfigError(
            f"--gen {config.run.gen} leaves no room for a prompt in {choice.spec.max_positions} positions"
        )
    if prompt_ids is None:
        return config.run.seq or default
    return min(len(prompt_ids), config.run.seq or len(prompt_ids))


def _wants_check(config: Config, prompt_tokens: int) -> bool:
    if config.attention.executor == "full":
        return False
    return prompt_tokens <= CHECK_CONTEXT if config.run.check_answer is None else config.run.check_answer


def _random_keep(config: Config) -> Config:
    print(f"random weights: attention mass means nothing, so --keep {RANDOM_KEEP} is used")
    return replace(config, selection=replace(config.selection, keep=RANDOM_KEEP, keep_mass=None))


def _load(choice: ModelChoice, config: Config, has_prompt: bool) -> build.ObtainedWeights:
    total = weight_bytes(choice.family, choice.spec, choice.dtype)
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None) as bar:
        return build.obtain_weights(choice, config, has_prompt, progress=lambda count: _advance(bar, count))


def _prompts(llm: LLM, config: Config, text: str | None, tokens: int) -> Prompts:
    """The same text for each sequence, a document each, or seeded ids for random weights."""
    batch, seed = config.run.batch, config.run.seed
    if text is not None:
        ids = llm.tokenizer.encode(text)
        if len(ids) > tokens:
            print(f"the prompt has {len(ids)} tokens; the first {tokens} are used (--seq)")
        return Prompts([ids[:tokens]] * batch)
    if llm.weights.kind == "random":
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(llm.spec.vocab_size, (batch, tokens), generator=generator)
        return Prompts(drawn.tolist())
    documents = [hidden_fact_document(llm.tokenizer, tokens, seed + index) for index in range(batch)]
    return Prompts([document.ids for document in documents], documents)


def _checker(llm: LLM, prompts: Prompts, admission: Admission) -> LLM | None:
    """Full attention over the same weights, to continue from the same prefill."""
    if prompts.documents is None or not admission.check_fits:
        return None
    config = replace(llm.config, attention=replace(llm.config.attention, executor="full"))
    return LLM.from_parts(config, llm.choice, llm.weights)


def _eos(llm: LLM, tokenizer: Tokenizer) -> set[int]:
    return {*llm.spec.eos_token_ids, *tokenizer.eos_token_ids}


def _stops(tokenizer: Tokenizer | None, ids: list[int], stop: tuple[str, ...]) -> bool:
    if not stop or tokenizer is None:
        return False
    text = tokenizer.decode(ids)
    return any(word in text for word in stop)


def _text(tokenizer: Tokenizer, ids: list[int], eos: set[int]) -> str:
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in eos else ids)


def _printer(tokenizer: Tokenizer | None, eos: set[int], gen: int) -> Callable[[list[int]], None]:
    """Streams the first sequence's text; without a tokenizer, a progress bar."""
    if tokenizer is None:
        bar = tqdm(total=gen, desc="decode", unit="token", disable=None)
        return lambda ids: _advance(bar)
    decoder, ended = IncrementalDecoder(tokenizer), False

    def show(ids: list[int]) -> None:
        nonlocal ended
        ended = ended or ids[0] in eos
        if not ended:
            print(decoder.push(ids[0]), end="", flush=True)

    return show


def _advance(bar: tqdm[NoReturn], count: int = 1) -> None:
    bar.update(count)


def _allocations(llm: LLM) -> int | None:
    """Device allocations so far (calls that reached the driver); None without a GPU."""
    if llm.device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(llm.device)["num_device_alloc"])


def _extend_positions(llm: LLM, tokens: int) -> None:
    if isinstance(llm.model, OPTModel):
        llm.model.extend_positions(tokens)


if __name__ == "__main__":
    sys.exit(main())
