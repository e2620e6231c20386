"""Plan -> actions on ranks and links -> events -> step time, waiting, communication, memory."""

from __future__ import annotations

from seqloom.simulate.cards import CardTable
from seqloom.simulate.engine import DeadlockError, Engine
from seqloom.simulate.events import EventKind, EventTable
from seqloom.simulate.predicted import predicted_ns
from seqloom.simulate.simulation import RoundTime, Simulation, simulate

__all__ = [
    "CardTable",
    "DeadlockError",
    "Engine",
    "EventKind",
    "EventTable",
    "RoundTime",
    "Simulation",
    "predicted_ns",
    "simulate",
]
