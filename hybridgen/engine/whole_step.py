"""All layers of a decode step as one launch, where the device needs nothing of the host between them.

So it is where everything lies on the device, and where a sketch on the device chooses what is fetched. A step is
captured when the one before it was of the same structure; the structure changes as the host tier grows by a block, say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Generic, TypeVar

from hybridgen.offload.pieces import Graph, Recorder, call_by_call
from hybridgen.telemetry import Recorded, Telemetry

Result = TypeVar("Result")

WORTH = 8  # repetitions of a step, about: capturing one takes as long as they save


class WholeStep(Generic[Result]):
    """The step of one batch."""

    def __init__(self, recorder: Recorder | None, telemetry: Telemetry) -> None:
        """recorder: None where steps are always issued layer by layer."""
        self._recorder, self._telemetry = recorder, telemetry
        self._structure: Hashable = None
        # By the marks that telemetry makes within, which those of a step that is traced follow.
        self._graphs: dict[Hashable, tuple[Graph, Recorded]] = {}
        self._result: Result | None = None
        self._seen = 0  # steps of this structure
        self._short = 0  # structures one after another that did not last: the first of a request may be one

    def run(
        self, structure: Callable[[], Hashable | None], work: Callable[[], Result], host_part: Callable[[], None]
    ) -> Result:
        """work(), or the same again.

        structure: all that the device's part depends on beside tensors that lie where they lay; None if the host has a
        part in it that is more than `host_part`. host_part: what work() does to the host's state. The result lies in
        the same place in all steps of one structure.
        """
        recorder = self._recorder
        if recorder is None or not recorder.enabled:
            return work()
        now = structure()
        if now is None or (now, recorder.moved) != self._structure:
            # Where whole steps are repeated, an odd one in between is not worth a capture of its pieces.
            with call_by_call(recorder) if self._graphs or now is not None else nullcontext():
                result = work()
            # As it is afterwards: pieces may have found new places, and blocks that were on their way have arrived.
            afterwards = structure(), recorder.moved
            if afterwards[0] is not None and afterwards != self._structure:
                if self._seen:
                    self._short = 0 if self._seen > WORTH else self._short + 1
                self._structure, self._result, self._seen = afterwards, result, 1
                self._graphs.clear()
            return result
        self._seen += 1
        if self._seen <= (1 if self._short <= 2 else WORTH):
            return work()
        place = self._telemetry.place
        if place not in self._graphs:
            with self._telemetry.recording() as recorded:
                graph = recorder.capture(work)
            self._graphs[place] = graph, recorded
            graph.replay()
        else:
            graph, recorded = self._graphs[place]
            graph.replay()
            if not recorder.does_all:
                host_part()
                self._telemetry.repeat(recorded)
        assert self._result is not None
        return self._result
