"""SmolLM2 itself: the tokens of transformers' greedy decoding, on a real text, at full budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridgen import run
from hybridgen.models.checkpoint import locate

GENERATED = 64


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", ["off", "select"])
def test_full_budget_equals_transformers(lookahead: str, tmp_path: Path, shared_data: Path) -> None:
    location = locate("smollm2-135m")
    if location.needs_download:
        pytest.skip("SmolLM2 is not on this machine")
    from transformers import AutoModelForCausalLM

    prompt, report = tmp_path / "prompt.txt", tmp_path / "report.json"
    prompt.write_text((shared_data / "emma.txt").read_text()[20_000:26_000])
    flags = ["--prompt-file", str(prompt), "--gen", str(GENERATED), "--keep", "1.0", "--gpu-window", "128"]
    assert run.main(["--device", "cpu", *flags, "--lookahead", lookahead, "--report", str(report)]) == 0

    found = json.loads(report.read_text())
    ids = torch.tensor(found["prompt_ids"])
    model = AutoModelForCausalLM.from_pretrained(location.prepare(), dtype=torch.float32)
    with torch.inference_mode():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=GENERATED, do_sample=False
        )[0, ids.shape[1] :].tolist()
    assert found["output_ids"][0] == expected
    assert found["prompt_tokens"][0] > 1000 and found["kept_fraction"] == 1.0
