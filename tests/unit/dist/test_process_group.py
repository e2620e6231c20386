"""Joining a job: which rank a launcher has made a process, where ranks meet, and who gets which GPU."""

import pytest
import torch

from seqloom.dist import JobRank, launched_rank
from seqloom.dist.process_group import (
    SHARED_GPU_ENVIRONMENT,
    SLURM_PORTS,
    check_gpus,
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
