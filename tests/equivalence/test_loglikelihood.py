"""Log-likelihoods of continuations: those of transformers, by prefill and by decode, and what strategies do to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.evaluation.loglikelihood import Request, Score, cut_batches, encode, make_request, score
from hybridgen.evaluation.tasks import find_task, load_task
from tests.equivalence.tiny_models import random_tokens, save_character_tokenizer
from tests.equivalence.zoo import ModelZoo

MODELS = ["opt", "llama-gqa3", "qwen2"]
EVERYTHING = {  # strategies that attend to all tokens, token by token
    "select, all kept": ("hybridgen", {"selection.keep": 1.0, "selection.keep_mass": None, "cache.gpu_window": 16}),
    "dense on the CPU": ("aoc", {"cache.gpu_window": 16}),
    "h2o, room for all": ("h2o", {"eviction.heavy": 500, "eviction.recent": 500}),
}


def reference(zoo: ModelZoo, name: str, requests: Sequence[Request]) -> list[tuple[float, bool]]:
    """By transformers, one dense pass a request."""
    results = []
    for one in requests:
        with torch.inference_mode():
            log_p = torch.log_softmax(zoo.hf(name)(torch.tensor([one.ids])).logits[0].double(), -1)
        targets = range(one.context, len(one.ids))
        greedy = all(int(log_p[at - 1].argmax()) == one.ids[at] for at in targets)
        results.append((float(sum(log_p[at - 1, one.ids[at]] for at in targets)), greedy))
    return results


def ragged(zoo: ModelZoo, name: str) -> list[Request]:
    """Two choices of one context, one that greedy decoding gives, several lengths, contexts of one token."""
    vocabulary = zoo.hf(name).config.vocab_size
    ids = [random_tokens(vocabulary, length, seed) for seed, length in enumerate((90, 40, 17, 140, 3))]
    best = zoo.greedy(name, tuple(ids[0][:70]), 5)
    return [
        make_request(ids[0][:70] + best, 70, 69, 1000),
        make_request([*ids[0][:70], *best[:2], (best[2] + 1) % vocabulary, *best[3:]], 70, 69, 1000),
        make_request(ids[1], 35, 10, 1000),
        make_request(ids[2], 16, 15, 1000),
        make_request(ids[3], 100, 99, 1000),
        make_request(ids[4], 1, 0, 1000),
        make_request(ids[4][:2], 1, 0, 1000),
    ]


def check(found: Sequence[Score], expected: Sequence[tuple[float, bool]], tolerance: float = 2e-4) -> None:
    assert [one.log_likelihood for one in found] == pytest.approx([value for value, _ in expected], abs=tolerance)
    assert [one.is_greedy for one in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_log_likelihoods_by_prefill_and_by_decode(zoo: ModelZoo, name: str) -> None:
    requests = ragged(zoo, name)
    expected = reference(zoo, name, requests)
    assert expected[0][1] and not expected[1][1]
    directory = str(zoo.directory(name))
    with ExitStack() as stack:
        llms = [stack.enter_context(LLM(directory, {"runtime.device": "cpu"}, strategy="full"))]
        for strategy, overrides in EVERYTHING.values():
            other = stack.enter_context(LLM(directory, {"runtime.device": "cpu", **overrides}, strategy=strategy))
            llms.append(stack.enter_context(llms[0].sharing(other.config)))
        for found in score(llms, requests):
            check(found, expected)
        # In a batch of its own each gives the same.
        for index, one in enumerate(requests):
            check(score(llms[:1], [one])[0], expected[index : index + 1])


def test_short_prompts_go_in_groups_and_long_ones_in_pieces(zoo: ModelZoo) -> None:
    requests = ragged(zoo, "llama-gqa2")
    expected = reference(zoo, "llama-gqa2", requests)
    for overrides in ({"runtime.prefill_chunk": 33}, {"runtime.micro_batch": 3}):
        with LLM(str(zoo.directory("llama-gqa2")), {"runtime.device": "cpu", **overrides}, strategy="full") as llm:
            check(score([llm], requests)[0], expected)


class Rows:
    """Counts the token rows that pass layer 0's projection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.seen = 0
        original = llm.model.qkv

        def qkv(layer: int, weights: Any, x: torch.Tensor, positions: Any) -> Any:
            self.seen += x.shape[0] if layer == 0 else 0
            return original(layer, weights, x, positions)

        monkeypatch.setattr(llm.model, "qkv", qkv)


@pytest.fixture
def full(zoo: ModelZoo) -> Iterator[LLM]:
    with LLM(str(zoo.directory("llama-gqa2")), {"runtime.device": "cpu"}, strategy="full") as llm:
        yield llm


def test_what_sequences_have_in_common_is_computed_once(
    zoo: ModelZoo, full: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix of all, then of each question a context and choices, the first token of which is the same."""
    prefix, *contexts = (random_tokens(113, length, seed) for seed, length in enumerate((50, 20, 25)))
    prompts = [prefix + context + end for context in contexts for end in ([7, 8, 9], [7, 9, 3])]
    rows, batch = Rows(monkeypatch, full), full.new_batch([100] * 4)
    full.prefill(batch, [prefix] * 4)
    assert rows.seen == 50
    full.prefill(batch, [prompt[50:-3] for prompt in prompts])
    assert rows.seen == 50 + 20 + 25
    full.prefill(batch, [prompt[-3:] for prompt in prompts])
    assert rows.seen == 50 + 20 + 25 + 4 * 3
    # The rest of all four is the same, but no longer what stands before it.
    logits = full.prefill(batch, [[5, 6]] * 4)
    assert rows.seen == 50 + 20 + 25 + 4 * 3 + 4 * 2
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = zoo.hf("llama-gqa2")(torch.tensor([[*prompt, 5, 6]])).logits[0, -1]
        torch.testing.assert_close(logits[index], expected, atol=2e-4, rtol=1e-4)


def test_after_a_decode_step_nothing_is_held_in_common(full: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, batch, prompt = Rows(monkeypatch, full), full.new_batch([30] * 2), random_tokens(113, 10, 0)
    full.prefill(batch, [prompt] * 2)
    full.decode(batch, [4, 5])
    logits = full.prefill(batch, [[6, 7]] * 2)
    assert rows.seen == 10 + 2 + 2 * 2
    assert not torch.equal(logits[0], logits[1])


def test_where_tokens_were_evicted_each_sequence_goes_by_itself(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"runtime.device": "cpu", "eviction.heavy": 4, "eviction.recent": 8}
    prompt = random_tokens(113, 40, 0)
    with LLM(str(zoo.directory("llama-gqa2")), overrides, strategy="keyformer") as llm:
        rows, batch = Rows(monkeypatch, llm), llm.new_batch([60] * 2)
        llm.prefill(batch, [prompt] * 2)
        llm.prefill(batch, [[6, 7]] * 2)
        assert rows.seen == 40 + 2 * 2


def test_scores_of_a_prefill_need_tokens_that_were_given(full: LLM) -> None:
    with pytest.raises(ValueError, match=r"targets\[1\]: 3 tokens cannot follow those of 2"):
        full.prefill_scored(full.new_batch([9, 9]), [[1, 2], [3, 4]], [[2], [4, 5, 6]])


@pytest.fixture(scope="module")
def talker(zoo: ModelZoo) -> Path:
    """A model with a tokenizer of one character an id."""
    directory = zoo.directory("llama-gqa2")
    save_character_tokenizer(directory)
    return directory


@pytest.mark.parametrize("shots", [0, 1])
def test_streaming_llm_with_a_window_of_4_changes_rte_scores(talker: Path, shared_data: Path, shots: int) -> None:
    """The strategy acts on the question, though the prompt is prefilled: with a large window nothing changes."""
    data = load_task(find_task("rte"), shared_data, limit=2, num_fewshot=shots)
    with ExitStack() as stack:
        full = stack.enter_context(LLM(str(talker), {"runtime.device": "cpu"}, strategy="full"))
        llms = [full]
        for recent in (4, 2000):
            overrides = {"runtime.device": "cpu", "eviction.recent": recent}
            other = stack.enter_context(LLM(str(talker), overrides, strategy="streaming-llm"))
            llms.append(stack.enter_context(full.sharing(other.config)))
        requests = [
            encode(full.tokenizer, prefix, question.context, choice, None, 1024)
            for question, prefix in zip(data.questions, data.prefixes, strict=True)
            for choice in question.continuations
        ]
        assert all((one.prefilled < one.context - 50) == bool(shots) for one in requests)
        exact, narrow, wide = (
            [one.log_likelihood for one in scores] for scores in score(llms, requests)
        )
    assert wide == pytest.approx(exact, abs=1e-3)
    assert all(abs(one - other) > 0.01 for one, other in zip(exact, narrow, strict=True))


def test_encoding_follows_the_harness(talker: Path) -> None:
    with LLM(str(talker), {"runtime.device": "cpu"}, strategy="full") as llm:
        tokenizer = llm.tokenizer
    ids = tuple(tokenizer.encode("a shot.\n\nQ: why A: so"))
    shots = "a shot.\n\n"
    # Spaces at the end of the context are the continuation's.
    assert encode(tokenizer, shots, "Q: why A: ", "so", None, 99) == Request(ids, 18, 9)
    assert encode(tokenizer, shots, "Q: why A:", " so", 5, 99) == Request(ids, 18, 13)
    assert encode(tokenizer, "", "Q: why A:", " so", None, 99) == Request(ids[9:], 9, 8)
    assert encode(tokenizer, "", "Q: why A:", " so", 50, 99) == Request(ids[9:], 9, 1)
    # Too long for the model: the beginning goes.
    assert encode(tokenizer, shots, "Q: why A:", " so", None, 15) == Request(ids[5:], 13, 4, cut=5)
    assert encode(tokenizer, shots, "Q: why A:", " so", None, 5) == Request(ids[15:], 3, 1, cut=15)
    one = encode(tokenizer, shots, "Q: why A:", " so", 5, 99)
    assert (one.steps, one.targets) == (7, ids[18:])


def test_batches_keep_the_choices_of_a_question_together() -> None:
    shapes = [(5, 2), (30, 2), (7, 4), (31, 2), (6, 7), (29, 1)]  # tokens of a continuation, choices
    groups = [[make_request(range(20 + tokens), 20, 19, 99)] * choices for tokens, choices in shapes]
    batches = cut_batches(groups, 5)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert batches == [[3, 1, 5], [2], [4], [0]]
