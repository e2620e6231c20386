"""Checkpoints of shards: written by some ranks, read by another number of them."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from seqloom.errors import SeqloomError
from seqloom.train.checkpoint import AtomicWriter, Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.optim import make_optimiser, state_by_name
from seqloom.train.run_folder import complete_checkpoints, latest_checkpoint

pytestmark = pytest.mark.distributed
SHAPES = {"embed": (5, 4), "norm": (7,), "out": (3, 9)}  # rows that no number of ranks divides


def mesh_of(transport):
    return DeviceMesh.from_group(transport._communicators.world, "cpu")


def checkpoints_of(transport, folder):
    """On a group of all ranks that is not the mesh's; one rank alone has no other."""
    communicators = transport._communicators
    group = communicators.group_of(tuple(range(transport.ranks))) or communicators.world
    return Checkpoints(Path(folder), group=group)


class Sharded:
    """Parameters in shards over the ranks; gradients depend on the step alone."""

    def __init__(self, transport, seed):
        self.mesh = mesh_of(transport)
        generator = torch.Generator().manual_seed(seed)
        full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.parameters = {name: nn.Parameter(self.shard(tensor)) for name, tensor in full.items()}
        self.optimiser = make_optimiser(self.parameters, Optimiser(lr=0.1))

    def shard(self, tensor):
        return distribute_tensor(tensor, self.mesh, [Shard(0)])

    def step(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in self.parameters.values():
            parameter.grad = self.shard(torch.randn(parameter.shape, generator=generator))
        self.optimiser.step()

    def state(self):
        return {"model": self.parameters, "optimiser": state_by_name(self.optimiser)}

    def full(self):
        return {name: parameter.detach().full_tensor() for name, parameter in self.parameters.items()}


def train_and_save(transport, folder):
    """Two steps, a checkpoint, a third step while it is written."""
    trainer = Sharded(transport, seed=0)
    with checkpoints_of(transport, folder) as checkpoints:
        for number in (1, 2):
            trainer.step(number)
        checkpoints.save(2, **trainer.state(), extra={"cursor": [0, 12], "rank": transport.rank})
        trainer.step(3)
    return trainer.full()


def resume(transport, folder):
    trainer = Sharded(transport, seed=1)
    with checkpoints_of(transport, folder) as checkpoints:
        manifest = checkpoints.load(checkpoints.latest, **trainer.state())
    trainer.step(manifest.step + 1)
    return trainer.full(), manifest.extra


@pytest.fixture(scope="module")
def written(gloo_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    results = gloo_pool.run(train_and_save, str(folder), ranks=4)
    return folder, results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_run_goes_on_exactly_on_another_number_of_ranks(gloo_pool, written, ranks):
    folder, results = written
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    for full, extra in gloo_pool.run(resume, str(folder), ranks=ranks):
        assert extra == {"cursor": [0, 12], "rank": 0}
        for name, tensor in full.items():
            assert torch.equal(tensor, results[0][name]), name


def test_a_process_without_torch_distributed_reads_it_too(written):
    folder, results = written
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimiser = make_optimiser(parameters, Optimiser(lr=0.1))
    with Checkpoints(folder) as checkpoints:
        checkpoints.load(latest_checkpoint(folder), model=parameters, optimiser=state_by_name(optimiser))
    generator = torch.Generator().manual_seed(103)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimiser.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), results[0][name])


def save_where_one_rank_has_no_room(transport, folder):
    trainer = Sharded(transport, seed=0)
    messages = []
    with checkpoints_of(transport, folder) as checkpoints:
        checkpoints.save(1, **trainer.state(), extra={})
        checkpoints.wait()
        for broken, where in (("write_data", 2), ("finish", 0)):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with ExitStack() as stack:
                if transport.rank == where:
                    stack.enter_context(mock.patch.object(AtomicWriter, broken, side_effect=full))
                checkpoints.save(2, **trainer.state(), extra={})
                try:
                    checkpoints.wait()
                except SeqloomError as error:
                    messages.append(str(error))
        checkpoints.save(2, **trainer.state(), extra={})
    return messages


def test_a_rank_without_room_is_named_on_all_ranks_and_nothing_is_lost(gloo_pool, tmp_path):
    for messages in gloo_pool.run(save_where_one_rank_has_no_room, str(tmp_path), ranks=3):
        assert len(messages) == 2
        for message, rank in zip(messages, (2, 0), strict=True):
            assert f"step 2 was not written (rank {rank}: [Errno 28] No space left on device)" in message
            assert "the one of step 1 is intact" in message
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def make_own_group(transport, folder):
    """A whole job: no group is given."""
    tensor = {"w": torch.full((3,), float(dist.get_rank()))}
    with Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(1, model=tensor, optimiser={}, extra={})
        checkpoints.wait()
        loaded = {"w": torch.full((3,), -1.0)}
        checkpoints.load(checkpoints.latest, model=loaded, optimiser={})
    return loaded["w"].unique().tolist()


def test_a_job_that_gives_no_group_gets_one(gloo_pool, tmp_path):
    [first, *others] = gloo_pool.run(make_own_group, str(tmp_path))
    assert len(first) == 1 and all(other == first for other in others)  # what all ranks hold is written once


def fsdp(transport, folder, mode):
    """A model sharded by FSDP2, beside a tensor that every rank has whole."""
    torch.manual_seed(0 if mode == "save" else 1)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    fully_shard(model, mesh=mesh_of(transport))
    parameters = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    optimiser = make_optimiser(parameters, Optimiser())
    whole = {"count": torch.full((2,), 7.0 if mode == "save" else 0.0)}
    with checkpoints_of(transport, folder) as checkpoints:
        if mode == "save":
            model(torch.ones(3, 6)).square().sum().backward()
            optimiser.step()
            checkpoints.save(1, model=parameters | whole, optimiser=state_by_name(optimiser), extra={})
        else:
            checkpoints.load(checkpoints.latest, model=parameters | whole, optimiser=state_by_name(optimiser))
    moments = {name: state["exp_avg"].full_tensor() for name, state in state_by_name(optimiser).items()}
    full = {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}
    return full, moments, whole["count"]


def test_fsdp_shards(gloo_pool, tmp_path):
    [saved, *_] = gloo_pool.run(fsdp, str(tmp_path), "save", ranks=4)
    for full, moments, count in gloo_pool.run(fsdp, str(tmp_path), "load", ranks=3):
        assert count.tolist() == [7.0, 7.0]
        for name in full:
            assert torch.equal(full[name], saved[0][name])
            assert torch.equal(moments[name], saved[1][name])
            assert moments[name].any()
