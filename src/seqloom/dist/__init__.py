"""Moves tensors between ranks and computes nothing: transports, communicators, counting."""

from seqloom.dist.single_rank import Alone
from seqloom.dist.token_layout import BoundGroup
from seqloom.dist.torch_transport import Communicator
from seqloom.dist.torch_transport import Communicators
from seqloom.dist.token_layout import Context
from seqloom.dist.counting import Counting
from seqloom.dist.torch_transport import Distributed
from seqloom.dist.transport import Handle
from seqloom.dist.transport import Lane
from seqloom.dist.transport import Message
from seqloom.dist.transport import Parcel
from seqloom.dist.resharding import Pending
from seqloom.dist.threads import Ranks
from seqloom.dist.resharding import Relay
from seqloom.dist.tensor_parallel import Team
from seqloom.dist.counting import Traffic
from seqloom.dist.transport import Transport
from seqloom.dist.resharding import Volume
from seqloom.dist.transport import Way
from seqloom.dist.tensor_parallel import attention_context
from seqloom.dist.token_layout import bind
from seqloom.dist.single_rank import bind_alone
from seqloom.dist.tensor_parallel import gathered
from seqloom.dist.token_layout import pieces_of_plan
from seqloom.dist.redistribute import remapped
from seqloom.dist.threads import run_ranks
from seqloom.dist.tensor_parallel import summed

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
