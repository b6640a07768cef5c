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
    "read_plans",
]
