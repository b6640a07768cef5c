"""Cosines of layer inputs and of predicted queries, beside those of transformers' hidden states."""

from __future__ import annotations

import random
from pathlib import Path

import layer_similarity
import pytest
import torch
import torch.nn.functional as F
from common import Point

from tests.equivalence.tiny_models import load_hf, save_tiny_model

CONTEXT, SEQUENCES = 40, 2


@torch.inference_mode()
def test_cosines_are_those_of_the_hidden_states(tmp_path: Path) -> None:
    """Rotary positions turn predicted and true query alike, so a cosine is the same before them."""
    folder = save_tiny_model("llama-gqa2", tmp_path)
    settings = {"model": "tiny", "weights": "real", "sequences": SEQUENCES, "context": CONTEXT}
    found = layer_similarity.measure(Point("tiny", settings, {"model": str(folder)}))["cosines"]
    assert set(found) == {"inputs", "x", "delta"}

    model, ids = load_hf(folder), random.Random(0)
    vocabulary, heads = model.config.vocab_size, model.config.num_attention_heads
    for sequence in range(SEQUENCES):
        tokens = torch.tensor([[ids.randrange(vocabulary) for _ in range(CONTEXT)]])
        states = [state[0] for state in model(tokens, output_hidden_states=True).hidden_states]
        for number, layer in enumerate(model.model.layers[1:], start=1):
            x, before = states[number], states[number - 1]

            def query(state: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
                return layer.self_attn.q_proj(layer.input_layernorm(state)).view(CONTEXT, heads, -1)

            change = torch.cat([torch.zeros_like(x[:1]), (x - before)[:-1]])  # of the token before
            cosines = {
                "inputs": (before, x),
                "x": (query(before), query(x)),
                "delta": (query(before + change), query(x)),
            }
            for name, (predicted, true) in cosines.items():
                expected = float(F.cosine_similarity(predicted, true, dim=-1).mean())
                assert found[name][number - 1][sequence] == pytest.approx(expected, abs=1e-4), (name, number)
    assert all(len(rows) == len(model.model.layers) - 1 for rows in found.values())
