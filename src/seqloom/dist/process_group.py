"""Joins this process to its job: which rank it is, which device it has, then torch's process group.

The device comes first: NCCL binds a communicator to the current one, and ranks of a node that all sit on GPU 0 cannot
talk to each other. A launcher says in the environment which rank a process is: torchrun and Ray Train (`RANK`,
`LOCAL_RANK`, ..), Kubeflow's PyTorchJob (`RANK`, `PET_NNODES`, ..) or Slurm's srun (`SLURM_PROCID`, `SLURM_LOCALID`,
..). Ray Train also makes the process group: `joined_rank` takes it as it is.

Several ranks may share one GPU where speed means nothing (tests, small machines): see `share_gpu`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from seqloom.errors import SeqloomError

SHARED_GPU_ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_BUFFSIZE": "1048576",
}
"""NCCL refuses two ranks of one host on one GPU. So every rank says that it is a host of its own (`NCCL_HOSTID`), and
all of them talk through sockets. What NCCL would take for speed, buffers above all, is multiplied by the ranks, so that
many communicators exhaust the memory of the machine: there is one channel, with buffers of 1 MiB."""
SHARED_HOST = "seqloom-"
SLURM_PORTS = range(20_000, 30_000)


class JobRank(NamedTuple):
    """A process of a job: its number among all ranks, and among those of its node."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def launched_rank(environment: Mapping[str, str] = os.environ) -> JobRank | None:
    """Return which rank a launcher has made this process; None: none has started it."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if "PET_NNODES" in environment and "LOCAL_RANK" not in environment:
            return pytorchjob_rank(rank, ranks, environment["PET_NNODES"])
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", ranks))
        return JobRank(rank, ranks, int(environment.get("LOCAL_RANK", rank % max(local_ranks, 1))), local_ranks)
    if {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} <= environment.keys():
        rank, ranks, local_rank = (
            int(environment[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        )
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", str(ranks))
        return JobRank(rank, ranks, local_rank, tasks_of_node(tasks, int(environment.get("SLURM_NODEID", "0"))))
    return None


def pytorchjob_rank(rank: int, ranks: int, nodes: str) -> JobRank:
    """Return the rank of a PyTorchJob's container that starts no torchrun: it is a node with one process."""
    if nodes != str(ranks):
        raise SeqloomError(
            f"WORLD_SIZE = {ranks} with PET_NNODES = {nodes}, and no torchrun has started this process: a container "
            "is then one rank; let it run `torchrun -m seqloom ..`, or set nprocPerNode of the PyTorchJob to 1"
        )
    return JobRank(rank, ranks, 0, 1)


def node_size(job_ranks: Sequence[JobRank]) -> int:
    """Return how many ranks every node has, given those of the whole job in order."""
    sizes = list(dict.fromkeys(each.local_ranks for each in job_ranks))
    if len(sizes) > 1:
        raise SeqloomError(
            f"nodes with different numbers of ranks ({' and '.join(map(str, sizes))}): start equally many on every "
            "node, or name the cluster to plan for in plan.cluster"
        )
    for each in job_ranks:
        if each.local_rank != each.rank % sizes[0]:
            raise SeqloomError(
                f"rank {each.rank} is number {each.local_rank} of its node, so the {sizes[0]} ranks of a node do not "
                "follow each other; number them node by node (srun --distribution=block), or name the cluster to plan "
                "for in plan.cluster"
            )
    return sizes[0]


def init_process_group(
    job_rank: JobRank,
    *,
    share_gpu: bool = False,
    on_cpu: bool = False,
    store: dist.Store | None = None,
    timeout: timedelta | None = None,
) -> torch.device:
    """Take this rank's device, connect to the other ranks and return the device.

    Tensors on a GPU travel by NCCL, those of the host by gloo.

    Args:
        share_gpu: let ranks of a node share its GPUs where there are more ranks than GPUs.
        on_cpu: use no GPU, also where there is one.
        store: where ranks find each other; None: at the address that the launcher has set.
        timeout: how long messages wait; None: torch's default.
    """
    rank, ranks = job_rank.rank, job_rank.ranks
    device = torch.device("cpu") if on_cpu else take_device(job_rank, share_gpu=share_gpu)
    if store is None and "MASTER_ADDR" not in os.environ:
        os.environ |= slurm_address(os.environ)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    return device


def joined_rank() -> tuple[JobRank, torch.device]:
    """Return rank and device of this process in the process group that another library has made of it."""
    job_rank = launched_rank()
    found = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if found is None or job_rank is None or found != (job_rank.rank, job_rank.ranks):
        raise SeqloomError(
            f"torch.distributed has rank and world size {found}, the environment {job_rank and job_rank[:2]}; both "
            "have to be set, and be equal, before Seqloom joins: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR, and torch.distributed.init_process_group"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    backends, wanted = dist.get_backend_config(), "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    if not all(each in backends for each in wanted.split(",")):
        raise SeqloomError(
            f"the process group has backends {backends}; Seqloom needs {wanted}: make it with backend={wanted!r}"
        )
    return job_rank, device


def take_device(job_rank: JobRank, *, share_gpu: bool = False) -> torch.device:
    """Make a GPU of this node the current device and return it; "cpu" where there is none."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu")
    bound = gpus == 1 and "SLURM_STEP_ID" in os.environ  # Slurm may show a task the one GPU that is its own
    if not bound:
        check_gpus(job_rank.local_ranks, share_gpu=share_gpu)
    if share_gpu and job_rank.local_ranks > gpus:
        os.environ |= SHARED_GPU_ENVIRONMENT | {"NCCL_HOSTID": f"{SHARED_HOST}{job_rank.rank}"}
    device = torch.device("cuda", job_rank.local_rank % gpus)
    torch.cuda.set_device(device)
    # autograd's thread says so before its first matrix product, and then sets the context
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    return device


def check_gpus(local_ranks: int, *, share_gpu: bool = False) -> None:
    """Refuse more ranks on this node than it has GPUs, unless they may share them."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_ranks and not share_gpu:
        raise SeqloomError(
            f"{local_ranks} ranks on a node with {gpus} GPU{'s' * (gpus > 1)}: NCCL needs a GPU for every rank; start "
            f"at most {gpus} here, or add --share-gpu to try it out (ranks then share GPUs, and speed means nothing)"
        )


def shares_gpu() -> bool:
    """Whether `take_device` has given this rank a GPU that other ranks have too."""
    return os.environ.get("NCCL_HOSTID", "").startswith(SHARED_HOST)


def ranks_per_gpu(local_ranks: int) -> int:
    """Return how many of a node's ranks have the same GPU, where they may share."""
    gpus = torch.cuda.device_count()
    return -(-local_ranks // gpus) if gpus else 1


def slurm_address(environment: Mapping[str, str]) -> dict[str, str]:
    """Return where the ranks of a Slurm step meet: on its first host, at a port that its job has to itself."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if first is None:
        raise SeqloomError(
            "no MASTER_ADDR, and no SLURM_STEP_NODELIST to take it from; start ranks with torchrun or srun"
        )
    port = SLURM_PORTS[int(environment.get("SLURM_JOB_ID", "0")) % len(SLURM_PORTS)]
    return {"MASTER_ADDR": first[1] + (first[2] or ""), "MASTER_PORT": str(port)}


def tasks_of_node(text: str, node: int) -> int:
    """Return the tasks of a node from Slurm's list, such as 8(x3),4."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks[min(node, len(tasks) - 1)]
