"""Moves tensors between ranks and computes nothing.

`transport` is what the engine asks of a network, `torch_transport` runs it on torch.distributed, `thread_transport` on
threads of one process (`strict_transport` enforces NCCL's rules there). `rank_tokens` tells a rank which tokens it
holds and moves them between layouts, `tensor_parallel` gathers them for ranks that share weights, `resharding` moves
weights between layouts, `routed` sends messages between nodes over all NICs. `layer_times` measures what layers spend
their time on. `process_group` joins a process to its job.
"""

from seqloom.dist.process_group import JobRank, init_process_group, joined_rank, launched_rank
from seqloom.dist.rank_tokens import Context, bind, bind_single_rank, pieces_of_plan, run_in_mlp_layout
from seqloom.dist.resharding import Resharder
from seqloom.dist.tensor_parallel import all_gather_rows, attention_context, reduce_scatter_rows
from seqloom.dist.thread_transport import Ranks, SingleRankTransport, run_ranks
from seqloom.dist.torch_transport import Communicators, TorchTransport
from seqloom.dist.transport import Channel, P2PTensor, Transport

__all__ = [
    "Channel",
    "Communicators",
    "Context",
    "JobRank",
    "P2PTensor",
    "Ranks",
    "Resharder",
    "SingleRankTransport",
    "TorchTransport",
    "Transport",
    "all_gather_rows",
    "attention_context",
    "bind",
    "bind_single_rank",
    "init_process_group",
    "joined_rank",
    "launched_rank",
    "pieces_of_plan",
    "reduce_scatter_rows",
    "run_in_mlp_layout",
    "run_ranks",
]
