"""Schedules of a pipeline as values: in what order every host runs the forwards and backwards of its stages."""

from seqloom.schedules.registry import SCHEDULE_NAMES, build_schedule
from seqloom.schedules.schedule import Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import ScheduleTiming, Times, simulate_schedule

__all__ = [
    "SCHEDULE_NAMES",
    "Schedule",
    "ScheduleTiming",
    "Times",
    "Unit",
    "backward_order",
    "build_schedule",
    "simulate_schedule",
    "units_of",
]
