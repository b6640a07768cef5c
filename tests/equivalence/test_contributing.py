"""The method that CONTRIBUTING.md writes in 40 lines, run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridgen.engine.llm import LLM
from hybridgen.selection import eviction
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## A method of your own, in 40 lines\n")[1].split("\n## ")[0]
CODE, REGISTRATION = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
NAME = "hybridgen.selection.eviction.peak"


@pytest.fixture
def strategy(tmp_path: Path) -> Iterator[Path]:
    """Everything where the text says that it goes, but for the folders."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(compile(CODE, "peak.py", "exec"), module.__dict__)
    exec(REGISTRATION, {"POLICIES": eviction.POLICIES, "Peak": module.__dict__["Peak"]})
    file = tmp_path / "peak.yaml"
    file.write_text(YAML, encoding="utf-8")
    yield file
    del sys.modules[NAME], eviction.POLICIES._entries["peak"]


def test_it_is_as_short_as_it_says() -> None:
    assert sum(len(block.splitlines()) for block in (CODE, REGISTRATION, YAML)) <= 40


@pytest.mark.parametrize("name", ["llama-gqa2", "opt"])
def test_it_runs(zoo: ModelZoo, strategy: Path, name: str) -> None:
    """With room for all it is full attention; without, it keeps what had the highest probability."""
    prompts = [random_tokens(zoo.dense(name).vocab_size, n, seed=n) for n in (90, 33)]
    full = answers(zoo, name, "full", prompts)
    assert answers(zoo, name, str(strategy), prompts, {"eviction.heavy": 200}) == full
    assert answers(zoo, name, str(strategy), prompts) != full, "it evicts, and on random models that shows"
    with LLM(str(zoo.directory(name)), strategy=str(strategy), overrides={"runtime.transfer": "lazy"}) as llm:
        batch = llm.new_batch([100, 100])
        llm.prefill(batch, prompts)
        queries, keys = prompt_of(llm, prompts[0])
        heads, new = keys.shape[0], queries.shape[0]
        grouped = queries.view(new, heads, -1, keys.shape[2]).permute(1, 2, 0, 3).double()
        scores = torch.einsum("hgqd,hkd->hgqk", grouped, keys.double()) * llm.spec.layers[0].scale
        scores = scores.masked_fill(torch.ones(new, new).triu(1).bool(), -torch.inf)
        highest = scores.softmax(-1).amax(dim=(1, 2))[:, : new - 9]
        for head, kept in enumerate(batch.kept_positions()[0][0]):
            heavy = highest[head].topk(9).indices.tolist()
            assert sorted(kept) == sorted(heavy) + list(range(new - 9, new))


def prompt_of(llm: LLM, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer 0's queries [n, Hq, d] and keys [Hkv, n, d]."""
    model, index = llm.model, torch.arange(len(prompt))
    positions = model.positions(index)
    llm._machine.weights.issue(0)
    x = model.embed(torch.tensor(prompt), positions)
    query, key, _ = model.qkv(0, llm._machine.weights.wait(0), x, positions)
    return query, key.transpose(0, 1)


def answers(
    zoo: ModelZoo, name: str, strategy: str, prompts: list[list[int]], more: dict[str, object] | None = None
) -> list[list[int]]:
    with LLM(str(zoo.directory(name)), strategy=strategy, overrides=more or {}) as llm:
        return llm.generate(prompts, max_new_tokens=24, ignore_eos=True).output_ids
