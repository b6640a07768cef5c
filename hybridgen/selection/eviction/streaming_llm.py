"""StreamingLLM, attention sinks (Xiao et al., arXiv 2309.17453): the first tokens and a window, and no scores.

`recent` is the paper's window: a step attends to sinks + `recent` tokens, the new one included, so that its place is
made before it comes. The rest lies in how positions are counted (`attention/reindexed.py`).
"""

from __future__ import annotations

from hybridgen.selection.eviction.base import EvictionPolicy, Prompt, Step


class StreamingLLM(EvictionPolicy):
    """Whatever leaves the window is gone."""

    has_scores = False
    window_counts_new = True
    reindexes = True
    prompt_copies = 0

    def score_prompt(self, prompt: Prompt) -> None:
        return None

    def gain(self, step: Step) -> None:
        return None
