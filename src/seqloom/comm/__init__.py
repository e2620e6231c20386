"""Moves tensors between ranks and computes nothing: transports, communicators, counting."""

from __future__ import annotations

from seqloom.comm.alone import Alone, bind_alone
from seqloom.comm.context import BoundGroup, Context, bind
from seqloom.comm.counting import Counting, Traffic
from seqloom.comm.distributed import Distributed
from seqloom.comm.groups import Communicator, Communicators
from seqloom.comm.in_process import Ranks, run_ranks
from seqloom.comm.lanes import Lane, Message, Way
from seqloom.comm.pending import Pending
from seqloom.comm.pieces import pieces_of_plan
from seqloom.comm.relay import Relay, Volume
from seqloom.comm.remap import remapped
from seqloom.comm.team import Team, attention_context, gathered, summed
from seqloom.comm.transport import Handle, Parcel, Transport

__all__ = [
    "Alone",
    "BoundGroup",
    "Communicator",
    "Communicators",
    "Context",
    "Counting",
    "Distributed",
    "Handle",
    "Lane",
    "Message",
    "Parcel",
    "Pending",
    "Ranks",
    "Relay",
    "Team",
    "Traffic",
    "Transport",
    "Volume",
    "Way",
    "attention_context",
    "bind",
    "bind_alone",
    "gathered",
    "pieces_of_plan",
    "remapped",
    "run_ranks",
    "summed",
]
