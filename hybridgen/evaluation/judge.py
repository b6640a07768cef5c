"""Is the answer right, and what does full attention answer from the same prefill?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hybridgen.engine.batch import Batch
from hybridgen.engine.generation import generate
from hybridgen.engine.llm import LLM
from hybridgen.engine.sampler import Sampler
from hybridgen.evaluation.prompts import Prompts

MOST_CHECK_TOKENS = 16


class FullAttentionCheck:
    """Full attention over the same weights; its KV mirrors the prefill of the strategy under test."""

    def __init__(self, llm: LLM, prompts: Prompts) -> None:
        config = llm.config
        attention = replace(config.attention, executor="full")
        schedule = replace(config.schedule, mode="fixed")  # plans that are replayed are of another strategy
        self._llm = llm.sharing(replace(config, attention=attention, schedule=schedule))
        self._tokens = min(MOST_CHECK_TOKENS, llm.config.run.gen)
        self.batch: Batch = self._llm.new_batch([len(ids) + self._tokens for ids in prompts.ids])

    def answer(self, logits: Tensor) -> list[str]:
        """Continue greedily from the prefill's logits [B, vocab]."""
        greedy = Sampler(replace(self._llm.config.sampling, temperature=0.0), self._llm.device, 0)
        ids = generate(self._llm, self.batch, logits, self._tokens, greedy).output_ids
        return [self._llm.tokenizer.decode(sequence) for sequence in ids]


def judge(llm: LLM, prompts: Prompts, text: list[str], full_text: list[str] | None) -> dict[str, Any]:
    """The report's `answer`; nothing if the prompts hold no hidden fact."""
    if prompts.documents is None:
        return {}
    if llm.spec.family == "opt" and max(len(ids) for ids in prompts.ids) > llm.spec.max_positions:
        return {"answer": {"judged": False, "why": "not judged: positions interpolated"}}
    documents, cache = prompts.documents, llm.config.cache
    if max(len(llm.tokenizer.encode(f" {document.answer}")) for document in documents) > llm.config.run.gen:
        return {"answer": {"judged": False, "why": f"not judged: --gen {llm.config.run.gen} is too short for it"}}
    answer: dict[str, Any] = {
        "judged": True,
        "expected": [document.answer for document in documents],
        "right": [document.is_answered_by(said) for document, said in zip(documents, text, strict=True)],
        # At the first decode step at least window + 63 of the last tokens may still be on the device.
        "fact_in_host_tier": [
            document.fact_tokens.start >= cache.sinks and document.fact_tokens.stop <= len(ids) - cache.gpu_window - 64
            for document, ids in zip(documents, prompts.ids, strict=True)
        ],
    }
    if full_text is not None:
        answer["full_attention"] = full_text
        answer["full_attention_right"] = [
            document.is_answered_by(said) for document, said in zip(documents, full_text, strict=True)
        ]
    return {"answer": answer}
