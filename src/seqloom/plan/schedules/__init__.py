"""Schedules of a pipeline as values: in what order every host runs the forwards and backwards of its stages."""

from __future__ import annotations

from seqloom.plan.schedules.play import Played, Times, play
from seqloom.plan.schedules.registry import NAMES, schedule_of
from seqloom.plan.schedules.schedule import Schedule, Unit, backward_order, units_of

__all__ = ["NAMES", "Played", "Schedule", "Times", "Unit", "backward_order", "play", "schedule_of", "units_of"]
