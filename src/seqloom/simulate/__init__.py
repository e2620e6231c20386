"""Plan -> actions on ranks and links -> events -> step time, waiting, communication, memory."""

from seqloom.simulate.engine import DeadlockError, Engine
from seqloom.simulate.events import EventKind, EventTable, NicTable
from seqloom.simulate.simulation import RoundSummary, Simulation, predicted_ns, simulate

__all__ = [
    "DeadlockError",
    "Engine",
    "EventKind",
    "EventTable",
    "NicTable",
    "RoundSummary",
    "Simulation",
    "predicted_ns",
    "simulate",
]
