"""The model class of lm-evaluation-harness: on task files that read the same JSONL, the items of our own command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridgen import evaluate
from tests.equivalence.tiny_models import save_character_tokenizer, save_tiny_model

lm_eval = pytest.importorskip("lm_eval")

WORDS = ("stone", "water", "apple", "green bread", "salt", "an old lamp", "rain")
NARROW = {"gpu-window": "8", "keep": "0.2", "min-keep": "0"}


def task(folder: Path, name: str, file: str, metrics: list[str], **fields: Any) -> dict[str, Any]:
    """Prompts in the harness's own language."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / file)}},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        **fields,
    }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "hybridgen"])
def test_the_harness_gives_the_same_items(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.evaluator import simple_evaluate

    from hybridgen.evaluation.lm_eval_model import HybridGenLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = save_tiny_model("llama-gqa2", tmp_path)
    save_character_tokenizer(model)
    goals = [" ".join(WORDS[(number * step) % 7] for step in range(1, 12 + 3 * number)) for number in range(9)]
    piqa = [
        {"goal": goal, "choices": [WORDS[i % 7], f"{WORDS[i % 5]} "], "label": i % 2} for i, goal in enumerate(goals)
    ]
    copa = [
        {"premise": f"It was {word}. ", "question": question, "choices": ["It fell.", "We ran away."], "label": 1}
        for word in WORDS
        for question in ("cause", "effect")
    ]
    lambada = [{"text": f"{goal} lamp"} for goal in goals]
    for name, rows in (("piqa_validation", piqa), ("copa_test", copa), ("lambada_openai_test", lambada)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lower = "' ' ~ (choices[{0}][0] | lower) ~ choices[{0}][1:]"
    tasks = [
        task(
            tmp_path, "piqa", "piqa_validation.jsonl", ["acc", "acc_norm"], output_type="multiple_choice",
            doc_to_text="Question: {{goal}}\nAnswer:", doc_to_choice="{{choices}}", doc_to_target="label",
        ),
        task(
            tmp_path, "copa", "copa_test.jsonl", ["acc"], output_type="multiple_choice",
            doc_to_text="{{premise.strip()[:-1]}} {{'because' if question == 'cause' else 'therefore'}}",
            doc_to_choice=f"{{{{[{lower.format(0)}, {lower.format(1)}]}}}}", doc_to_target="label",
        ),
        task(
            tmp_path, "lambada", "lambada_openai_test.jsonl", ["acc", "perplexity"], output_type="loglikelihood",
            doc_to_text="{{text.split(' ')[:-1] | join(' ')}}", doc_to_target="{{' ' + text.split(' ')[-1]}}",
        ),
    ]  # fmt: skip
    settings = {} if strategy == "full" else NARROW
    lm = HybridGenLM(str(model), strategy, batch_size=6, decode_from=3, device="cpu", **settings)
    found = simple_evaluate(model=lm, tasks=tasks, log_samples=True, bootstrap_iters=0)

    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    argv = ["--model", str(model), "--strategy", strategy, "--data", str(tmp_path), "--tasks", "piqa,copa,lambada"]
    argv += ["--device", "cpu", "--batch", "6", "--decode-from", "3", *flags, "--out", str(tmp_path / "out")]
    assert evaluate.main(argv) == 0
    report = json.loads((tmp_path / "out" / "evaluate.json").read_text())
    for ours in report["tasks"]:
        (path,) = (tmp_path / "out").glob(f"{ours['name']}-*.jsonl")
        items = {item["id"]: item["results"][-1] for item in map(json.loads, path.read_text().splitlines()[1:])}
        samples = found["samples"][ours["name"]]
        assert len(samples) == len(items) == ours["questions"]
        for sample in samples:
            theirs = [(float(value), bool(greedy)) for value, greedy in sample["filtered_resps"]]
            pairs = items[sample["doc_id"]]
            assert [value for value, _ in theirs] == pytest.approx([pair[0] for pair in pairs], abs=1e-4)
            assert [greedy for _, greedy in theirs] == [pair[1] for pair in pairs]
        for metric in ours["metrics"]:
            value = ours["results"][-1]["metrics"][metric]["value"]
            assert found["results"][ours["name"]][f"{metric},none"] == pytest.approx(value, rel=1e-3)


def test_texts_without_a_context_and_generation(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    from hybridgen.evaluation.lm_eval_model import HybridGenLM

    model = save_tiny_model("llama-gqa2", tmp_path)
    save_character_tokenizer(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 96}))
    with_context = HybridGenLM(str(model), "full", device="cpu")

    def ask(kind: str, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    text = "salt and rain"
    ((empty, _), (spelled, _)) = with_context.loglikelihood(
        [ask("loglikelihood", "", text), ask("loglikelihood", "\n.", "x")], disable_tqdm=True
    )
    (rolling,) = with_context.loglikelihood_rolling([ask("loglikelihood_rolling", text)], disable_tqdm=True)
    assert rolling == pytest.approx(empty, abs=1e-4) and spelled < 0
    (whole,) = with_context.generate_until([ask("generate_until", text, {"until": [], "max_gen_toks": 8})])
    assert 0 < len(whole) <= 8
    (cut,) = with_context.generate_until([ask("generate_until", text, {"until": [whole[2]], "max_gen_toks": 8})])
    assert cut == whole[: whole.index(whole[2])]
