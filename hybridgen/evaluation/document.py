"""The built-in long document: plain sentences, a fact hidden among them, and a question about it.

`hybridgen.run` uses it when no prompt is given, so that the output of a long-context run can be judged
rather than admired. The same seed gives the same document.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hybridgen.errors import ConfigError
from hybridgen.models.tokenizer import Tokenizer

_PEOPLE = (
    "the baker", "a tall gardener", "the old sailor", "my neighbour", "the postman", "a young teacher",
    "the carpenter", "her cousin", "the night watchman", "a travelling painter", "the clockmaker",
    "the doctor's son", "a quiet librarian", "the miller", "their uncle", "the ferryman",
)  # fmt: skip
_DEEDS = (
    "carried a basket of apples", "read a long letter", "repaired the wooden gate", "looked for a lost umbrella",
    "told a story about the sea", "counted the boats", "bought a loaf of warm bread", "drew a map of the valley",
    "waited for the evening train", "planted a row of beans", "sang an old song", "painted the garden wall",
    "borrowed a lantern", "fed the grey horses", "wrote a note to a friend", "swept the leaves away",
)  # fmt: skip
_PLACES = (
    "near the market square", "behind the church", "on the narrow bridge", "at the edge of the forest",
    "beside the river", "in front of the school", "under the chestnut trees", "at the harbour",
    "along the dusty road", "in the small orchard", "by the stone well", "on top of the hill",
)  # fmt: skip
_TIMES = (
    "early in the morning", "after the rain had stopped", "before supper", "on a cold Tuesday",
    "while the bells were ringing", "late in the summer", "as the fog came in", "just before noon",
    "when the lamps were lit", "during the harvest", "on the first day of spring", "in the quiet of the night",
)  # fmt: skip
_TOWNS = (
    "Ashford", "Brightwater", "Coldbrook", "Dunmore", "Eastwick", "Fernhill", "Greystone", "Hollowell",
    "Ironbridge", "Kingsport", "Larkspur", "Millbrook", "Northgate", "Oakham", "Pinecrest", "Redcliff",
)  # fmt: skip
_SENTENCES_PER_PARAGRAPH = 6


@dataclass(frozen=True)
class Document:
    """Prompt ids, exactly as many as asked for, and what the continuation must begin with."""

    ids: list[int]
    question: str  # the prompt's last words: the beginning of the answer's sentence
    answer: str
    fact_tokens: range  # where the fact stands in ids
    question_tokens: range = range(0)  # and where the document ends and the question begins, which is the rest

    def is_answered_by(self, text: str) -> bool:
        """Whether generated text begins with the answer."""
        rest = text.lstrip()
        return rest.startswith(self.answer) and not rest[len(self.answer) :][:1].isdigit()


def hidden_fact_document(
    tokenizer: Tokenizer, tokens: int, seed: int, depth: float = 0.4, flag: str = "--seq"
) -> Document:
    """A document of exactly `tokens` ids whose fact lies at about `depth` of it (0: start, 1: end).

    It begins in the middle of a sentence, as an excerpt does: that is how the length comes out exact.
    ConfigError if `tokens`, which `flag` gave, leaves no room for the fact and the question.
    """
    draw = random.Random(seed)
    start = tokenizer.encode("")  # BOS, where the model wants one

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)[len(start) :]

    town, number = draw.choice(_TOWNS), str(draw.randrange(10_000, 100_000))
    question = f"The secret number of the town of {town} is"
    fact = f" {question} {number}. Remember it: the secret number of {town} is {number}."
    ending = encode(f"\n\nNow answer the question. What is the secret number of the town of {town}?\n\n{question}")
    fact_ids = encode(fact)
    filler = tokens - len(start) - len(ending) - len(fact_ids)
    if filler < 0:
        raise ConfigError(f"the built-in document needs at least {tokens - filler} tokens, {flag} gives {tokens}")
    after = int(filler * (1.0 - depth))
    before = start + _filler(draw, encode, filler - after)
    ids = before + fact_ids + _filler(draw, encode, after) + ending
    fact_tokens = range(len(before), len(before) + len(fact_ids))
    return Document(ids, question, number, fact_tokens, range(tokens - len(ending), tokens))


def _filler(draw: random.Random, encode: Callable[[str], list[int]], tokens: int) -> list[int]:
    """Exactly `tokens` ids of plain sentences; the first one lacks its beginning."""
    ids: list[int] = []
    while len(ids) < tokens:
        sentences = [_sentence(draw) for _ in range(_SENTENCES_PER_PARAGRAPH)]
        ids += encode("\n\n" + " ".join(sentences))
    return ids[len(ids) - tokens :]


def _sentence(draw: random.Random) -> str:
    who, deed, place, time = (draw.choice(words) for words in (_PEOPLE, _DEEDS, _PLACES, _TIMES))
    sentence = draw.choice((f"{time}, {who} {deed} {place}", f"{who} {deed} {place} {time}"))
    return sentence[0].upper() + sentence[1:] + "."
