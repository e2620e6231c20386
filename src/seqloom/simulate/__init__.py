"""Plan -> actions on ranks and links -> events -> step time, waiting, communication, memory."""

from seqloom.simulate.engine import DeadlockError, Engine
from seqloom.simulate.events import CardTable, EventKind, EventTable
from seqloom.simulate.simulation import RoundTime, Simulation, predicted_ns, simulate

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
