"""Joining a job: which rank a launcher has made a process, where ranks meet, and who gets which GPU."""

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import JobRank, joined_rank, launched_rank
from seqloom.dist.process_group import (
    SHARED_GPU_ENVIRONMENT,
    SLURM_PORTS,
    check_gpus,
    node_size,
    slurm_address,
    take_device,
    tasks_of_node,
)
from seqloom.errors import SeqloomError

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a"}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "13",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "14",
    "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3),2",
    "SLURM_JOB_ID": "123456",
}


def test_launchers_say_which_rank_a_process_is():
    assert launched_rank(TORCHRUN) == JobRank(9, 16, 1, 8)
    assert launched_rank(SRUN) == JobRank(13, 14, 1, 2)
    assert launched_rank(SRUN | TORCHRUN) == JobRank(9, 16, 1, 8), "torchrun inside of a Slurm step"
    assert launched_rank({}) is None
    assert launched_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "a batch script is no rank"


def test_a_container_of_a_pytorchjob_is_a_node():
    operator = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "PET_NNODES": "3", "PET_NODE_RANK": "2"}
    assert launched_rank(operator) == JobRank(2, 3, 0, 1)
    assert launched_rank(operator | TORCHRUN) == JobRank(9, 16, 1, 8), "torchrun in the container"
    with pytest.raises(SeqloomError, match=r"WORLD_SIZE = 24 with PET_NNODES = 3.* run `torchrun -m seqloom \.\.`, or"):
        launched_rank(operator | {"WORLD_SIZE": "24"})


def test_ranks_of_a_node_follow_each_other():
    assert node_size([JobRank(rank, 4, rank % 2, 2) for rank in range(4)]) == 2
    assert node_size([JobRank(rank, 4, rank, 4) for rank in range(4)]) == 4
    with pytest.raises(SeqloomError, match=r"rank 1 is number 0 of its node.*srun --distribution=block"):
        node_size([JobRank(rank, 4, rank // 2, 2) for rank in range(4)])
    with pytest.raises(SeqloomError, match=r"different numbers of ranks \(2 and 1\)"):
        node_size([JobRank(0, 3, 0, 2), JobRank(1, 3, 1, 2), JobRank(2, 3, 0, 1)])


@pytest.mark.parametrize(("text", "tasks"), [("8(x2),4", [8, 8, 4]), ("2", [2]), ("3,1(x2)", [3, 1, 1])])
def test_tasks_of_slurm_nodes(text, tasks):
    assert [tasks_of_node(text, node) for node in range(len(tasks))] == tasks


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[03-06]", "gpu03"), ("n7", "n7"), ("a-1,b[2-3]", "a-1"), ("rack2n[10,12]", "rack2n10")]
)
def test_slurm_ranks_meet_on_the_first_host(nodes, first):
    found = slurm_address({"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "123456"})
    assert found["MASTER_ADDR"] == first and int(found["MASTER_PORT"]) in SLURM_PORTS
    with pytest.raises(SeqloomError, match="start ranks with torchrun or srun"):
        slurm_address({})


def test_a_process_group_of_another_library_is_joined_as_it_is(monkeypatch):
    with pytest.raises(SeqloomError, match=r"rank and world size None, the environment None; both have to be set"):
        joined_rank()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = {"is_initialized": True, "get_rank": 9, "get_world_size": 16, "get_backend_config": "cpu:gloo,cuda:gloo"}
    for name, value in found.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert joined_rank() == (JobRank(9, 16, 1, 8), torch.device("cpu"))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(SeqloomError, match=r"rank and world size \(3, 16\), the environment \(9, 16\)"):
        joined_rank()


@pytest.mark.parametrize(("backends", "enough"), [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", False)])
def test_on_gpus_it_needs_gloo_and_nccl(monkeypatch, backends, enough):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = {"is_initialized": True, "get_rank": 9, "get_world_size": 16, "get_backend_config": backends}
    for name, value in found.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if enough:
        assert joined_rank()[1] == torch.device("cuda", 1)
    else:
        with pytest.raises(SeqloomError, match="make it with backend='cpu:gloo,cuda:nccl'"):
            joined_rank()


def test_every_rank_of_a_node_has_its_own_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert take_device(JobRank(5, 8, 1, 2)) == torch.device("cuda", 1) == taken[0]
    with pytest.raises(SeqloomError, match=r"8 ranks on a node with 2 GPUs: .* at most 2 here, or add --share-gpu"):
        take_device(JobRank(5, 8, 5, 8))
    check_gpus(8, share_gpu=True)


def test_slurm_may_show_every_task_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert take_device(JobRank(5, 8, 5, 8)) == torch.device("cuda", 0)


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(monkeypatch):
    for name in ("NCCL_HOSTID", *SHARED_GPU_ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    environment = {}
    monkeypatch.setattr("seqloom.dist.process_group.os.environ", environment)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert take_device(JobRank(3, 4, 3, 4), share_gpu=True) == torch.device("cuda", 0)
    assert environment == SHARED_GPU_ENVIRONMENT | {"NCCL_HOSTID": "seqloom-3"}


def test_without_gpus_ranks_are_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert take_device(JobRank(3, 4, 3, 4)) == torch.device("cpu")
    check_gpus(64)
