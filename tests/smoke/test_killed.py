"""A comparison with weights and KV on disk, killed at ten random points: no stray file, what is done is readable."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridgen.offload.disk import sweep

KILLS, LONGEST_S = 10, 14.0
AOG_ON_DISK = """
attention: {executor: streamed}
cache: {gpu_window: 64}
placement: {kv_on_disk: 0.5}
"""


@pytest.mark.slow
def test_killed_at_ten_random_points(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=100_000, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    strategy, disk, out = tmp_path / "aog-disk.yaml", tmp_path / "disk", tmp_path / "out"
    strategy.write_text(AOG_ON_DISK)
    command = [
        sys.executable, "-m", "hybridgen.compare", "--model", str(tmp_path / "model"), "--weights", "random",
        "--seq", "2k", "--gen", "40", "--rounds", "4", "--strategies", f"aog,{strategy}", "--gpu-window", "64",
        "--set", "placement.weights_on_disk=0.5", "--set", f"placement.disk_dir={disk}", "--keep", "0.5",
        "--out", str(out),
    ]  # fmt: skip
    draw, finished, found_own = random.Random(time.time_ns()), 0, 0
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        time.sleep(draw.uniform(1.0, LONGEST_S))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        found_own += len(list(disk.glob("own-*")))
        rounds = sorted(out.glob("*-r*-*.json"))
        for path in (*rounds, *out.glob("compare.json")):
            json.loads(path.read_text(encoding="utf-8"))
        assert len(rounds) >= finished, "what was finished before is still there"
        finished = len(rounds)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(disk.glob("own-*")) and not sweep(disk)
    found = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert found["complete"] and found["rounds"] == 4 and len(found["strategies"]) == 2
    print(f"{found_own} files were left by the kills, {finished} rounds were finished between them")
