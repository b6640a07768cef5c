"""Policies that evict tokens for good, by their name in `eviction.policy`."""

from __future__ import annotations

from hybridgen.config import EvictionConfig
from hybridgen.registry import Registry
from hybridgen.selection.eviction.base import Budget, EvictionPolicy, Prompt, Step, blocks_of_logits, kept_rows
from hybridgen.selection.eviction.h2o import H2O
from hybridgen.selection.eviction.keyformer import Keyformer
from hybridgen.selection.eviction.snapkv import SnapKV
from hybridgen.selection.eviction.streaming_llm import StreamingLLM

__all__ = ["POLICIES", "Budget", "EvictionPolicy", "Prompt", "Step", "blocks_of_logits", "kept_rows", "policy_of"]

POLICIES: Registry[type[EvictionPolicy]] = Registry("eviction.policy")
POLICIES.register("h2o")(H2O)
POLICIES.register("keyformer")(Keyformer)
POLICIES.register("streaming_llm")(StreamingLLM)
POLICIES.register("snapkv")(SnapKV)


def policy_of(config: EvictionConfig) -> type[EvictionPolicy]:
    """The class; an error for an unknown name, and for settings that it has no use for."""
    policy = POLICIES[config.policy]
    policy.check(config)
    return policy
