"""Pipeline schedules: the order in which every pipeline rank runs the forwards and backwards of its stages."""

from seqloom.schedules.memory import peak_memory
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
    "peak_memory",
    "simulate_schedule",
    "units_of",
]
