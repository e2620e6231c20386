"""Schedules of a pipeline as values: in what order every host runs the forwards and backwards of its stages."""

from seqloom.schedules.registry import NAMES, schedule_of
from seqloom.schedules.schedule import Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import Played, Times, play

__all__ = [
    "NAMES",
    "Played",
    "Schedule",
    "Times",
    "Unit",
    "backward_order",
    "play",
    "schedule_of",
    "units_of",
]
