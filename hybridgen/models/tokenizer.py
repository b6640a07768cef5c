"""Text to token ids and back, from the files of a local model directory.

`tokenizers` (Rust) is used directly: it loads in a tenth of a second, where importing transformers
takes seconds. Only a directory without tokenizer.json and without GPT-2 files goes through transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hybridgen.errors import CheckpointError

_MEND = "fetch it again"
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before the merges. `pattern` None means GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False  # each digit apart, before anything else
    nfc: bool = False
    whole_words_first: bool = False  # a piece that is a token is taken as it is, without the merges


# The names of `tokenizer.ggml.pre` in GGUF files.
PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _PreTokenizer("|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _REST)), whole_words_first=True),
    "qwen2": _PreTokenizer("|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _REST)), nfc=True),
}


class Tokenizer:
    """A model's tokenizer; `load_tokenizer` makes it."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int], has_chat_template: bool) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)  # any of these ends the text
        self.has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        """Token ids, with BOS in front if this model's tokenizer adds one."""
        return list(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


class IncrementalDecoder:
    """Text of a stream of tokens, piece by piece; never half a character.

    The pieces (with the last `flush`) add up to the text of the whole stream. Tokens are decoded
    behind the last complete piece, since some tokenizers treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens whose text is out
        self._pending: list[int] = []  # tokens since then
        self._shown = ""  # text of context and pending that is out

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._context + self._pending)
        # A character has at most 4 bytes, so at most 4 tokens: after more, the bytes are no character.
        complete = not text.endswith(_REPLACEMENT) or len(self._pending) > 4
        stable = text if complete else text[:-1]
        piece = stable[len(self._shown) :]
        self._shown = stable
        if complete:
            self._context, self._pending = self._pending, []
            self._shown = self._tokenizer.decode(self._context)
        return piece

    def flush(self) -> str:
        """What was held back, when no token follows."""
        text = self._tokenizer.decode(self._context + self._pending)
        piece = text[len(self._shown) :]
        self._context, self._pending, self._shown = [], [], ""
        return piece


def has_tokenizer_files(directory: Path) -> bool:
    """Whether `load_tokenizer` finds something to load."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a local model directory; no network.

    CheckpointError if there is none or it cannot be read.
    """
    config = _optional_json(directory / "tokenizer_config.json")
    backend = _load_backend(directory, config)
    template = "chat_template" in config or (directory / "chat_template.jinja").is_file()
    return Tokenizer(backend, _eos_token_ids(directory, config, backend), template)


def build_bpe(
    tokens: Sequence[str],
    merges: Iterable[str],
    pre: str,
    special: Iterable[str] = (),
    user_defined: Iterable[str] = (),
    bos: str | None = None,
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer from its lists: tokens by id, merges ("left right") by rank.

    `pre` is a key of PRE_TOKENIZERS; `special` tokens (control) and `user_defined` ones are never
    split; `bos`, if given, is put in front of every text.
    """
    rules = PRE_TOKENIZERS[pre]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rules.whole_words_first))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = []
    if rules.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])
    if bos is not None:
        _add_bos(backend, bos)
    return backend


def _add_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    index = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, index)]
    )


def _load_backend(directory: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    bos = _content(config.get("bos_token")) if config.get("add_bos_token") else None
    try:
        if (directory / "tokenizer.json").is_file():
            backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            # Some conversions say add_bos_token and forget it in tokenizer.json.
            if bos is not None and backend.token_to_id(bos) not in backend.encode("").ids:
                _add_bos(backend, bos)
            return backend
        is_gpt2 = config.get("tokenizer_class", "GPT2Tokenizer") in ("GPT2Tokenizer", "GPT2TokenizerFast")
        if is_gpt2 and all((directory / name).is_file() for name in ("vocab.json", "merges.txt")):
            return _gpt2_files(directory, config, bos)
        if any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
            return _through_transformers(directory)
    except Exception as error:  # tokenizers raises bare Exception, transformers several kinds
        raise CheckpointError(f"{directory}: the tokenizer cannot be read ({error}); {_MEND}") from error
    raise CheckpointError(
        f"{directory} holds no tokenizer (tokenizer.json, or vocab.json and merges.txt, or tokenizer.model)"
    )


def _gpt2_files(directory: Path, config: dict[str, Any], bos: str | None) -> tokenizers.Tokenizer:
    """GPT-2's two files, as OPT has them."""
    vocabulary: dict[str, int] = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    special_map = _optional_json(directory / "special_tokens_map.json")
    names = [f"{kind}_token" for kind in ("bos", "eos", "unk", "pad")]
    special = {_content(source.get(name)) for source in (config, special_map) for name in names}
    known = [token for token in special if token in vocabulary]
    return build_bpe(sorted(vocabulary, key=vocabulary.__getitem__), merges, "gpt-2", known, bos=bos)


def _through_transformers(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # seconds: only where nothing lighter will do

    wrapped: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    backend = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"{type(wrapped).__name__} is not a fast tokenizer")
    return backend


def _eos_token_ids(directory: Path, config: dict[str, Any], backend: tokenizers.Tokenizer) -> list[int]:
    """As transformers' generate decides: generation_config.json, else config.json; else the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(directory / name).get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [int(ids)]
    eos = _content(config.get("eos_token"))
    index = backend.token_to_id(eos) if eos is not None else None
    return [] if index is None else [index]


def _content(token: Any) -> str | None:
    """A token in a config is a string, or an object that holds one."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _optional_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}; {_MEND}") from error
    return content if isinstance(content, dict) else {}
