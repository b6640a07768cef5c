"""Tasks from JSONL: prompts as written by hand, metrics, and files that are not sound."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hybridgen.errors import ConfigError, UnknownNameError
from hybridgen.evaluation.tasks import TASKS, find_task, judge, load_task

# The first question of each task, from the file itself: context, continuations, characters, answer.
FIRST: dict[str, tuple[str, list[str], list[int], int]] = {
    "copa": ("The item was packaged in bubble wrap because", ["  it was fragile.", "  it was small."], [16, 14], 0),
    "copa_one_space": (
        "The item was packaged in bubble wrap because", [" it was fragile.", " it was small."], [15, 13], 0
    ),
    "openbookqa": (
        "A person wants to start saving money so that they can afford a nice vacation at the end of the year. After "
        "looking over their budget and expenses, they decide the best way to save money is to",
        [
            " make more phone calls", " quit eating lunch out", " buy less with monopoly money",
            " have lunch with friends",
        ],
        [21, 21, 28, 23],
        1,
    ),
    "rte": (
        "Dana Reeve, the widow of the actor Christopher Reeve, has died of lung cancer at age 44, according to the "
        "Christopher Reeve Foundation.\nQuestion: Christopher Reeve had an accident. True or False?\nAnswer:",
        [" True", " False"],
        [4, 5],
        1,
    ),
    "hellaswag": (
        "Roof shingle removal: A man is sitting on a roof. he",
        [
            " is using wrap to wrap a pair of skis.", " is ripping level tiles off.", " is holding a rubik's cube.",
            " starts pulling up roofing on a roof.",
        ],
        [37, 27, 26, 36],
        3,
    ),
    "lambada": (
        "In my palm is a clear stone, and inside it is a small ivory statuette. A guardian angel.\n\n\"Figured if "
        "you're going to be out at night getting hit by cars, you might as well have some backup.\"\n\nI look at him, "
        "feeling stunned. Like this is some sort of sign. But as I stare at Harlin, his mouth curved in a confident "
        "grin, I don't care about",
        [" signs"],
        [6],
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_first_question(name: str, shared_data: Path) -> None:
    question = load_task(find_task(name), shared_data, limit=1).questions[0]
    assert (question.context, list(question.continuations), list(question.characters), question.answer) == FIRST[name]


def test_second_question_of_piqa_keeps_the_source_s_spaces(shared_data: Path) -> None:
    data = load_task(find_task("piqa"), shared_data)
    assert len(data.questions) == 1838 and data.questions[1].context == "Question: dresser\nAnswer:"
    assert data.questions[1].continuations == (
        " replace drawer with bobby pin ", " finish, woodgrain with  bobby pin "
    )  # fmt: skip
    assert data.questions[1].characters == (30, 34)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": i, "goal": f"goal {i}", "choices": [f"no {i}", f"yes {i}"], "label": 1} for i in range(count)]


def write(folder: Path, name: str, content: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in content)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["piqa_validation.jsonl", "piqa_validation.jsonl.gz"])
def test_few_shot_examples_are_seeded_and_never_the_question_itself(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, rows(6))
    data = load_task(find_task("piqa"), tmp_path, num_fewshot=3, seed=5)
    shots = [f"Question: goal {i}\nAnswer: yes {i}\n\n" for i in range(6)]
    drawn = [[i for i in range(6) if shots[i] in prefix] for prefix in data.prefixes]
    assert all(len(some) == 3 and question not in some for question, some in enumerate(drawn))
    assert all(sorted(map(len, shots)) and sum(map(len, (shots[i] for i in some))) == len(prefix)
               for some, prefix in zip(drawn, data.prefixes, strict=True))  # fmt: skip
    assert len(set(data.prefixes)) == 4  # one for all that were not drawn, others for the three that were
    assert load_task(find_task("piqa"), tmp_path, num_fewshot=3, seed=5).prefixes == data.prefixes
    assert load_task(find_task("piqa"), tmp_path, num_fewshot=3, seed=6).prefixes != data.prefixes
    assert load_task(find_task("piqa"), tmp_path, limit=2, num_fewshot=3, seed=5).prefixes == data.prefixes[:2]
    assert load_task(find_task("piqa"), tmp_path).prefixes == [""] * 6


def test_examples_come_from_the_training_split_where_there_is_one(tmp_path: Path) -> None:
    def copa(word: str) -> list[dict[str, Any]]:
        return [
            {"premise": f"{word} {i}.", "question": "effect", "choices": ["It is.", "It was."], "label": 0}
            for i in range(4)
        ]

    write(tmp_path, "copa_validation.jsonl", copa("Validation"))
    with pytest.raises(ConfigError, match=r"--num-fewshot 2: .* has no copa_train\.jsonl .*copa_validation\.jsonl"):
        load_task(find_task("copa"), tmp_path, num_fewshot=2)
    without = load_task(find_task("copa"), tmp_path)
    write(tmp_path, "copa_train.jsonl", copa("Train"))
    data = load_task(find_task("copa"), tmp_path, num_fewshot=2)
    assert data.examples_file == tmp_path / "copa_train.jsonl" and data.digest != without.digest
    assert len(set(data.prefixes)) == 1 and data.prefixes[0].count(" therefore  it is.\n\n") == 2
    assert "Validation" not in data.prefixes[0]
    write(tmp_path, "copa_test.jsonl", copa("Test"))
    assert load_task(find_task("copa"), tmp_path).file.name == "copa_test.jsonl"


def test_metrics(tmp_path: Path) -> None:
    write(tmp_path, "piqa_validation.jsonl", [{"goal": "g", "choices": ["a", "bcd"], "label": 1}])
    task = find_task("piqa")
    (question,) = load_task(task, tmp_path).questions
    # The separating space is no character of the choice: -1 and -2.5 / 3.
    assert judge(task, question, [-1.0, -2.5], [False, False]) == {"acc": 0, "acc_norm": 1}
    assert judge(task, question, [-1.0, -3.1], [False, False]) == {"acc": 0, "acc_norm": 0}
    assert judge(task, question, [-2.0, -2.0], [False, False])["acc"] == 0  # the first of equal ones
    lambada = find_task("lambada")
    word = lambada.question(0, {"text": "one two"})
    assert judge(lambada, word, [-1.5], [True]) == {"acc": 1, "perplexity": -1.5}


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown task 'piqua'; did you mean 'piqa'\?"):
        find_task("piqua")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"goal": "g", "choices": ["a"]}', "line 1: not a row of task piqa: 'label' is missing"),
        ('{"goal": "g", "choices": ["a"], "label": 1}', "line 1: not a row of task piqa: label 1 is no index into 1"),
        ('{"goal": "g", "choices": ["a"], "label": 0}\n{', "line 2: not a row of task piqa"),
        ("[]", "line 1: not a row of task piqa"),
        ("\n", "holds no row of task piqa"),
    ],
)
def test_files_that_are_not_sound(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "piqa_validation.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"piqa_validation\.jsonl") as caught:
        load_task(find_task("piqa"), tmp_path)
    assert message in str(caught.value)


def test_missing_files_and_too_many_shots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"looked for copa_test.jsonl, copa_validation.jsonl, also with .gz"):
        load_task(find_task("copa"), tmp_path)
    with pytest.raises(ConfigError, match="this is no folder"):
        load_task(find_task("copa"), tmp_path / "nothing")
    write(tmp_path, "piqa_validation.jsonl", rows(3))
    with pytest.raises(ConfigError, match=r"--num-fewshot 3: .* has 3 rows"):
        load_task(find_task("piqa"), tmp_path, num_fewshot=3)
    (tmp_path / "rte_validation.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"rte_validation\.jsonl\.gz"):
        load_task(find_task("sglue_rte"), tmp_path)


def test_every_task_can_be_read(shared_data: Path) -> None:
    counts = {name: len(load_task(task, shared_data).questions) for name, task in TASKS.items()}
    assert counts == {
        "piqa": 1838, "copa": 500, "copa_one_space": 500, "openbookqa": 500, "rte": 277, "sglue_rte": 277,
        "lambada": 5153, "hellaswag": 10042,
    }  # fmt: skip
