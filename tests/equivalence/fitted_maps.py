"""Files of maps that predict queries, as `hybridgen.calibrate` writes them, with maps that are no other tensor's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridgen.models.checkpoint import checkpoint_key
from tests.equivalence.dense_simulation import DenseModel


def write_maps(directory: Path, file: Path, exact: list[int] | None = None, lookahead_layers: int = 1) -> None:
    """For a model's directory: of each layer but the first Wq and its bias, with noise added to both."""
    model, generator, tensors = DenseModel(directory), torch.Generator().manual_seed(17), {}
    for layer in range(1, model.num_layers):
        own = f"{model.prefix}.layers.{layer}.self_attn.q_proj"
        weight, bias = model.weights[f"{own}.weight"], model.weights.get(f"{own}.bias", torch.zeros(()))
        changed = weight + 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
        added = bias + 0.3 * torch.randn(weight.shape[0], generator=generator)
        tensors |= {f"layers.{layer}.query.weight": changed.float(), f"layers.{layer}.query.bias": added.float()}
    metadata = {"checkpoint": checkpoint_key(directory), "exact_layers": json.dumps(exact or [0])}
    if lookahead_layers != 1:
        metadata["lookahead_layers"] = str(lookahead_layers)
    save_file(tensors, file, metadata)
