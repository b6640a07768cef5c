"""What a run starts from: the user's text, a document with a hidden fact, or seeded token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybridgen.config import Config
from hybridgen.engine.build import ModelChoice
from hybridgen.engine.llm import LLM
from hybridgen.errors import CheckpointError, ConfigError
from hybridgen.evaluation.document import Document, hidden_fact_document
from hybridgen.models.tokenizer import load_tokenizer

DEFAULT_TOKENS_CUDA = 32 * 1024
DEFAULT_TOKENS_CPU = 2 * 1024


@dataclass
class Prompts:
    """Token ids by sequence, and the documents they come from if they can be judged."""

    ids: list[list[int]]
    documents: list[Document] | None = None


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """The user's prompt, if one was given; ConfigError if it is empty or cannot be read."""
    source = "--prompt" if file is None else f"--prompt-file {file}"
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
        if text is not None:
            text.encode("utf-8")  # an argument with bytes that are no text comes as lone surrogates
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{source} is not UTF-8 text: {error}") from None
    if text is not None and not text.strip():
        raise ConfigError(f"the prompt is empty (from {source})")
    return text


def encode_if_local(choice: ModelChoice, config: Config, text: str) -> list[int] | None:
    """The prompt's ids if the tokenizer is here already; None if it has yet to be downloaded."""
    if choice.location.needs_download:
        if config.model.weights == "random":
            raise CheckpointError(
                f"--prompt with --weights random needs {choice.spec.name}'s tokenizer, and no local copy exists: "
                "leave the prompt out, or give a local directory as --model"
            )
        return None
    return load_tokenizer(choice.location.prepare()).encode(text)


def planned_tokens(choice: ModelChoice, config: Config, prompt_ids: list[int] | None) -> int:
    """Prompt tokens to plan for: the prompt's own, at most --seq of them; or --seq, or its default."""
    if prompt_ids is not None:
        return min(len(prompt_ids), config.run.seq or len(prompt_ids))
    if config.run.seq is not None:
        return config.run.seq
    room = choice.spec.max_positions - config.run.gen
    if room < 1:
        raise ConfigError(
            f"--gen {config.run.gen} leaves no room for a prompt in {choice.spec.name}'s "
            f"{choice.spec.max_positions} positions"
        )
    return min(DEFAULT_TOKENS_CUDA if choice.device.type == "cuda" else DEFAULT_TOKENS_CPU, room)


def make_prompts(llm: LLM, text: str | None, tokens: int) -> Prompts:
    """`config.run.batch` prompts: the text for each, or a document each, or seeded ids for random weights."""
    batch, seed = llm.config.run.batch, llm.config.run.seed
    if text is not None:
        ids = llm.tokenizer.encode(text)
        if len(ids) > tokens:
            print(f"the prompt has {len(ids)} tokens; the first {tokens} are used (--seq)")
        return Prompts([ids[:tokens]] * batch)
    if llm.weights.kind == "random":
        generator = torch.Generator().manual_seed(seed)
        return Prompts(torch.randint(llm.spec.vocab_size, (batch, tokens), generator=generator).tolist())
    documents = [hidden_fact_document(llm.tokenizer, tokens, seed + index) for index in range(batch)]
    return Prompts([document.ids for document in documents], documents)
