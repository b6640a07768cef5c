"""Model families by Hugging Face architecture name. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridgen.errors import CheckpointError
from hybridgen.models.base import DecoderModel
from hybridgen.models.llama import LlamaModel
from hybridgen.models.opt import OPTModel
from hybridgen.models.spec import ModelSpec

FAMILIES: dict[str, type[DecoderModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "OPTForCausalLM": OPTModel,
}


def family_of(name: str, config: Mapping[str, Any]) -> type[DecoderModel]:
    """The family that a Hugging Face config names; CheckpointError lists the supported ones."""
    architectures = config.get("architectures")
    architecture = next(iter(architectures), None) if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            f"model {name}: architecture {architecture!r} is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    return FAMILIES[architecture]


def spec_of(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The shape that a Hugging Face config describes."""
    return family_of(name, config).spec_from_config(name, config)
