"""Moves tensors between ranks and computes nothing: transports, communicators, counting."""

from seqloom.dist.token_layout import BoundGroup
from seqloom.dist.torch_transport import Communicator
from seqloom.dist.torch_transport import Communicators
from seqloom.dist.token_layout import Context
from seqloom.dist.counting import CountingTransport
from seqloom.dist.transport import Handle
from seqloom.dist.transport import Message
from seqloom.dist.transport import P2PChannel
from seqloom.dist.transport import P2PDirection
from seqloom.dist.transport import P2PTensor
from seqloom.dist.resharding import Pending
from seqloom.dist.threads import Ranks
from seqloom.dist.resharding import Resharder
from seqloom.dist.single_rank import SingleRankTransport
from seqloom.dist.tensor_parallel import TPGroup
from seqloom.dist.torch_transport import TorchTransport
from seqloom.dist.counting import Traffic
from seqloom.dist.transport import Transport
from seqloom.dist.resharding import Volume
from seqloom.dist.tensor_parallel import all_gather_rows
from seqloom.dist.tensor_parallel import attention_context
from seqloom.dist.token_layout import bind
from seqloom.dist.single_rank import bind_single_rank
from seqloom.dist.token_layout import pieces_of_plan
from seqloom.dist.tensor_parallel import reduce_scatter_rows
from seqloom.dist.redistribute import remapped
from seqloom.dist.threads import run_ranks

__all__ = [
    "BoundGroup",
    "Communicator",
    "Communicators",
    "Context",
    "CountingTransport",
    "Handle",
    "Message",
    "P2PChannel",
    "P2PDirection",
    "P2PTensor",
    "Pending",
    "Ranks",
    "Resharder",
    "SingleRankTransport",
    "TPGroup",
    "TorchTransport",
    "Traffic",
    "Transport",
    "Volume",
    "all_gather_rows",
    "attention_context",
    "bind",
    "bind_single_rank",
    "pieces_of_plan",
    "reduce_scatter_rows",
    "remapped",
    "run_ranks",
]
