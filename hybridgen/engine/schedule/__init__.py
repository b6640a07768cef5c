"""Plans each decode step, in pure numbers: no tensor, no device, no clock."""

from hybridgen.engine.schedule.base import Schedule, StepObservation, controlled_layers
from hybridgen.engine.schedule.feedback import FeedbackSchedule
from hybridgen.engine.schedule.fixed import FixedSchedule
from hybridgen.engine.schedule.paper import PaperSchedule
from hybridgen.engine.schedule.replay import ReplaySchedule, decode, encode, read_plans

__all__ = [
    "FeedbackSchedule",
    "FixedSchedule",
    "PaperSchedule",
    "ReplaySchedule",
    "Schedule",
    "StepObservation",
    "controlled_layers",
    "decode",
    "encode",
    "is_steered",
    "read_plans",
]


def is_steered(schedule: Schedule) -> bool:
    """Whether what a step has measured changes the plans of the next ones."""
    return not isinstance(schedule, (FixedSchedule, ReplaySchedule))
