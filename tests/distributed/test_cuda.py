"""The transports with CUDA tensors: several ranks on one GPU, and NCCL with one rank."""

from random import Random

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import Communicators, TorchTransport, run_ranks
from seqloom.plan import GroupFamily
from support.programs import DTYPES, every_verb, expected_of, random_program, run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def check(results, program):
    for rank, received in enumerate(results):
        expected = expected_of(program, rank)
        assert len(received) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(received, expected, strict=True))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_on_one_gpu(dtype, strict):
    program = every_verb(dtype)
    check(run_ranks(4, lambda transport: run_program(transport, program, "cuda"), strict=strict), program)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gloo_processes_on_one_gpu(gloo_pool, dtype):
    program = every_verb(dtype)
    check(gloo_pool.run(run_program, program, "cuda", ranks=4, timeout_s=300), program)


class SumBothWays(torch.autograd.Function):
    """All ranks meet in forward and again in backward."""

    @staticmethod
    def forward(ctx, values, transport):
        ctx.transport = transport
        total = values.clone()
        transport.all_reduce(total, range(transport.ranks))
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        ctx.transport.all_reduce(total, range(ctx.transport.ranks))
        return total, None


def test_ranks_meet_in_backward():
    def body(transport):
        values = torch.full((4,), float(transport.rank), device="cuda", requires_grad=True)
        (SumBothWays.apply(values, transport) * (transport.rank + 1)).sum().backward()
        return values.grad.tolist()

    assert run_ranks(3, body) == [[6.0] * 4] * 3


def test_nccl_with_one_rank(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicators = Communicators(GroupFamily(1, node_size=1))
        communicators.warm_up()
        for seed in range(5):
            program = random_program(Random(seed), ranks=1)
            check([run_program(TorchTransport(communicators), program, "cuda")], program)
        communicators.close()
    finally:
        dist.destroy_process_group()
