"""The built-in document: exact length, a fact at its place, and a fair judgement."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import pre_tokenizers

from hybridgen.errors import ConfigError
from hybridgen.evaluation.document import Document, hidden_fact_document
from hybridgen.models.tokenizer import Tokenizer, build_bpe


@cache
def tokenizer(bos: str | None = None) -> Tokenizer:
    """Bytes, with a few merges, so that tokens of neighbouring pieces could merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "Ġ a", "i n", ". Ġ"]
    tokens = [*alphabet, "<s>", *(merge.replace(" ", "") for merge in merges)]
    special = ["<s>"]
    return Tokenizer(build_bpe(tokens, merges, "gpt-2", special, bos=bos), [], has_chat_template=False)


def document(tokens: int = 2000, seed: int = 0, depth: float = 0.4, bos: str | None = None) -> Document:
    return hidden_fact_document(tokenizer(bos), tokens, seed, depth)


@pytest.mark.parametrize("tokens", [400, 401, 1234, 5000])
@pytest.mark.parametrize("bos", [None, "<s>"])
def test_the_length_is_exact(tokens: int, bos: str | None) -> None:
    assert len(document(tokens, bos=bos).ids) == tokens


def test_bos_comes_once() -> None:
    ids = document(bos="<s>").ids
    (marker,) = tokenizer("<s>").encode("")
    assert ids[0] == marker and ids.count(marker) == 1
    assert marker not in document().ids


def test_a_seed_is_a_document() -> None:
    assert document(seed=3) == document(seed=3)
    answers = {document(seed=seed).answer for seed in range(10)}
    assert len(answers) == 10
    assert document(seed=3).ids != document(seed=4).ids


@pytest.mark.parametrize("seed", range(5))
def test_the_fact_is_hidden_once_and_asked_for(seed: int) -> None:
    made = document(seed=seed)
    text = tokenizer().decode(made.ids)
    fact = tokenizer().decode(made.ids[made.fact_tokens.start : made.fact_tokens.stop])
    assert f"{made.question} {made.answer}." in fact
    assert text.endswith(made.question), "the continuation is the answer"
    outside = text.replace(fact, "")
    assert made.answer not in outside
    asked = tokenizer().decode(made.ids[made.question_tokens.start :])
    assert asked.startswith("\n\nNow answer the question. ") and asked.endswith(made.question)
    assert made.question_tokens.stop == len(made.ids) and made.fact_tokens.stop <= made.question_tokens.start
    assert fact in text and len(outside) == len(text) - len(fact)
    assert made.answer.isdigit() and len(made.answer) == 5


def test_depth() -> None:
    """The fact is where it was asked to be, as a share of what is not fact and question."""
    for depth in (0.0, 0.25, 0.5, 1.0):
        made = document(4000, depth=depth)
        question_tokens = len(tokenizer().encode("\n\nNow answer the question. " + made.question)) + 50
        share = made.fact_tokens.start / (4000 - len(made.fact_tokens))
        assert share == pytest.approx(depth, abs=(question_tokens + 10) / 4000)
    assert document(4000, depth=0.0).fact_tokens.start == 0


def test_sentences_differ() -> None:
    """No filler that a model could take for a pattern to copy."""
    sentences = tokenizer().decode(document(6000).ids).replace("\n", " ").split(". ")
    assert len(set(sentences)) > 0.9 * len(sentences) > 30


def test_too_short_says_how_long_it_must_be() -> None:
    with pytest.raises(ConfigError, match="--seq gives 100") as error:
        document(100)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert len(document(least).ids) == least
    with pytest.raises(ConfigError, match=f"at least {least}"):
        document(least - 1)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 12345.", True),
        ("12345", True),
        ("\n12345 is", True),
        (" 1234", False),
        (" the number 12345", False),
        ("", False),
    ],
)
def test_judgement(text: str, right: bool) -> None:
    assert Document([], "", "12345", range(0)).is_answered_by(text) is right


def test_a_longer_number_is_not_the_answer() -> None:
    assert not Document([], "", "12345", range(0)).is_answered_by(" 123456.")
