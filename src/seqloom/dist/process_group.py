"""Joins this process to its job: which rank it is, which device it has, then torch's process group.

The device comes first: NCCL binds a communicator to the current one, and ranks of a node that all sit on GPU 0 cannot
talk to each other. A launcher says in the environment which rank a process is: torchrun (`RANK`, `LOCAL_RANK`, ..) or
Slurm's srun (`SLURM_PROCID`, `SLURM_LOCALID`, ..).

Several ranks may share one GPU where speed means nothing (tests, small machines): see `share_gpu`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
}
"""NCCL refuses two ranks of one host on one GPU. So every rank says that it is a host of its own (`NCCL_HOSTID`), and
all of them talk through sockets."""
SHARED_HOST = "seqloom-"
SLURM_PORTS = range(20_000, 30_000)


class JobRank(NamedTuple):
    """A process of a job: its number among all ranks, and among those of its node."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def launched_rank(environment: Mapping[str, str] = os.environ) -> JobRank | None:
    """Return which rank torchrun or srun has made this process; None: neither has started it."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE", ranks))
        return JobRank(rank, ranks, int(environment.get("LOCAL_RANK", rank % max(local_ranks, 1))), local_ranks)
    if {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} <= environment.keys():
        rank, ranks, local_rank = (
            int(environment[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        )
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", str(ranks))
        return JobRank(rank, ranks, local_rank, tasks_of_node(tasks, int(environment.get("SLURM_NODEID", "0"))))
    return None


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
    return device


def check_gpus(local_ranks: int, *, share_gpu: bool = False) -> None:
    """Refuse more ranks on this node than it has GPUs, unless they may share them."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_ranks and not share_gpu:
        raise SeqloomError(
            f"{local_ranks} ranks on a node with {gpus} GPU{'s' * (gpus > 1)}: NCCL needs a GPU for every rank; start "
            f"at most {gpus} here, or add --share-gpu to try it out (ranks then share GPUs, and speed means nothing)"
        )


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
