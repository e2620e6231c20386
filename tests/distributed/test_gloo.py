"""The torch.distributed transport on real processes, with gloo."""

import subprocess
import sys
from random import Random

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import Channel, Communicators, P2PTensor, Resharder, TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily, Pipeline, Stage, Weight, compute_layout, optimiser_layout
from support.programs import DTYPES, every_verb, expected_of, random_program, run_program
from support.resharding import ReshardCase
from support.transports import CountingTransport


def check(results, program):
    for rank, received in enumerate(results):
        expected = expected_of(program, rank)
        assert len(received) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(received, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_verb_moves_what_it_says(gloo_pool, dtype):
    program = every_verb(dtype)
    check(gloo_pool.run(run_program, program, ranks=4), program)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_random_programs_give_what_they_must(gloo_pool, ranks):
    for seed in range(3):
        program = random_program(Random(seed), ranks, steps=12)
        check(gloo_pool.run(run_program, program, ranks=ranks), program)


def reduce_random(transport):
    own = torch.randn(1000, generator=torch.Generator().manual_seed(transport.rank)) * 10.0**transport.rank
    transport.all_reduce(own, range(transport.ranks))
    return own


def test_all_reduce_is_the_same_to_the_bit_on_all_ranks(gloo_pool):
    first, *others = gloo_pool.run(reduce_random, ranks=4)
    assert all(torch.equal(first, other) for other in others)


def count(transport):
    counting = CountingTransport(transport)
    run_program(counting, every_verb("float32"))
    return counting.traffic("exchange").bytes, counting.traffic("all_to_all").calls


def test_counting_works_on_any_transport(gloo_pool):
    assert gloo_pool.run(count, ranks=4) == [(2 * 44, 1), (2 * 8, 2), (0, 2), (2 * 4, 2)]


def on_two_channels(transport):
    """Tensors of two channels between the same ranks, started in different orders."""
    peer, received = transport.rank ^ 1, [torch.zeros(3), torch.zeros(3)]
    given = [torch.full((3,), 1.0 + transport.rank), torch.full((3,), -1.0 - transport.rank)]
    channels = [transport, transport.on(Channel.BACKWARD_ODD)]
    order = (0, 1) if transport.rank % 2 else (1, 0)
    for handle in [channels[k].exchange([P2PTensor(peer, given[k])], [P2PTensor(peer, received[k])]) for k in order]:
        handle.wait()
    return [each[0].item() for each in received]


def test_channels_do_not_mix(gloo_pool):
    assert gloo_pool.run(on_two_channels, ranks=4) == [[1.0 + (rank ^ 1), -1.0 - (rank ^ 1)] for rank in range(4)]


def refusals(transport):
    """Return what every bad call says; none of them sends anything."""
    calls = [
        lambda: transport.all_reduce(torch.ones(1), (1, 2)),
        lambda: transport.all_reduce(torch.ones(1), (2, 3)),
        lambda: transport.exchange([P2PTensor(transport.rank, torch.ones(2))], []),
        lambda: transport.exchange(
            [P2PTensor(transport.rank, torch.ones(2))], [P2PTensor(transport.rank, torch.ones(2).long())]
        ),
    ]
    said = []
    for call in calls:
        try:
            call()
        except SeqloomError as error:
            said.append(str(error))
    return said


def test_bad_calls_are_refused(gloo_pool):
    outside, foreign, own_size, own_type = gloo_pool.run(refusals, ranks=4)[1]
    assert "block (1, 2) is not in the family of 4 ranks" in outside
    assert "the nearest is (0, 1)" in outside
    assert "block (2, 3) called by rank 1 of 4" in foreign
    assert "rank 1 sends itself [(2, torch.float32)] and receives []" in own_size
    assert "torch.int64" in own_type


def life_of_communicators(transport):
    """Make, use, close and make again the communicators of a family in nodes of two."""
    family = GroupFamily(8, node_size=2)
    heard = []
    for _ in range(2):
        communicators = Communicators(family)
        communicators.warm_up()
        listed = [(block, len(block)) for block in communicators.groups]
        mine = [len(block) for block, group in communicators.groups.items() if group is not None]
        total = torch.ones(1)
        TorchTransport(communicators).all_reduce(total, list(communicators.groups)[-1])
        heard.append((listed, mine, total.item()))
        communicators.close()
        communicators.close()  # again is fine
        try:
            communicators.group_of((0, 1) if transport.rank < 2 else tuple(range(8)))
        except SeqloomError as error:
            heard.append(str(error))
    return heard


def test_communicators_are_made_listed_and_closed(gloo_pool):
    family = GroupFamily(8, node_size=2)
    blocks = [(tuple(block), len(block)) for size in family.sizes[1:] for block in family.blocks(size)]
    for rank, (first, closed, second, _) in enumerate(gloo_pool.run(life_of_communicators)):
        assert first == second
        listed, mine, total = first
        assert listed == blocks
        assert mine == [size for block, size in blocks if rank in block]
        assert len(mine) <= family.budget
        assert total == 8
        assert "these communicators are closed" in closed


def outsiders(transport):
    """Make a family of fewer ranks than the job, and one of more."""
    communicators = Communicators(GroupFamily(6, node_size=6))
    said = []
    communicators.warm_up()
    try:
        received = torch.zeros(1)
        inner = TorchTransport(communicators)
        peers = (inner.rank + 1) % inner.ranks, (inner.rank - 1) % inner.ranks
        inner.exchange(
            [P2PTensor(peers[0], torch.full((1,), float(inner.rank)))], [P2PTensor(peers[1], received)]
        ).wait()
        said.append(received.item())
    except SeqloomError as error:
        said.append(str(error))
    communicators.close()
    try:
        Communicators(GroupFamily(9, node_size=9))
    except SeqloomError as error:
        said.append(str(error))
    return said


def test_a_family_may_leave_ranks_out_but_not_invent_them(gloo_pool):
    results = gloo_pool.run(outsiders)
    assert [first for first, _ in results[:6]] == [5, 0, 1, 2, 3, 4]
    assert "rank 7 is outside the family of 6 ranks" in results[7][0]
    assert "a family of 9 ranks in a job of 8" in results[0][1]


def test_communicators_need_torch_distributed():
    assert not dist.is_initialized()
    with pytest.raises(SeqloomError, match=r"call torch\.distributed\.init_process_group first"):
        Communicators(GroupFamily(2, node_size=2))


def reshard_case():
    """Two stages, the first one a tp_group of 2, beside a stage of 2 ranks; rank 5 is idle; the table is tied."""
    weights = (
        Weight("table", 11, 3, ("embedding", "head")),
        Weight("0.q", 8, 5, (0,), 0),
        Weight("0.o", 5, 8, (0,), 1),
        Weight("1.norm", 7, 1, (1,)),
        Weight("norm", 3, 1, ("head",)),
    )
    deep = Pipeline((Stage((0, 1), (0, 1), 2), Stage((2,), (1, 2))), (), ())
    return ReshardCase(6, weights, (deep, Pipeline((Stage((3, 4), (0, 2)),), (), ())))


def reshard_all(transport):
    case = reshard_case()
    layouts = optimiser_layout(case.weights, case.ranks), compute_layout(case.weights, case.pipelines)
    resharder = Resharder(case.weights, *layouts, transport, device="cpu", node_size=3)
    copies, sums = {}, {}
    for flight in [
        resharder.start_copy(k, case.kept(case.wholes(0), transport.rank), torch.bfloat16) for k in range(4)
    ]:
        copies |= flight.wait()
    given = {weight: torch.full(each.shape, 2.0**transport.rank) for weight, each in copies.items()}
    for flight in [resharder.start_reduce(k, given, torch.float32) for k in reversed(range(4))]:
        sums |= flight.wait()
    return copies, sums


def test_a_resharder_brings_values_and_sums_gradients(gloo_pool):
    case, results = reshard_case(), gloo_pool.run(reshard_all, ranks=6)
    totals = [torch.zeros(weight.rows, weight.columns) for weight in case.weights]
    for rank in range(6):
        for weight, numbers in case.used(case.numbers(), rank).items():
            totals[weight].view(-1)[numbers.flatten()] += 2.0**rank
    for rank, (copies, sums) in enumerate(results):
        values = case.used([each.bfloat16() for each in case.wholes(0)], rank)
        for found, wanted in ((copies, values), (sums, case.kept(totals, rank))):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[weight], wanted[weight]) for weight in wanted)


AT_ITS_END = """
import atexit, os, time
threads = lambda: [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
atexit.register(lambda: print(*threads()))  # after what is registered later
import torch.distributed as dist
from seqloom.dist import Communicators, TorchTransport
from seqloom.plan import GroupFamily
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
transport = TorchTransport(Communicators(GroupFamily(1, node_size=1)))
dist.destroy_process_group()
until = time.monotonic() + 20
while "gloo" not in " ".join(threads()) and time.monotonic() < until:  # a thread names itself when it first runs
    time.sleep(0.01)
print(*threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by /proc")
def test_no_thread_of_a_group_is_left_when_a_process_ends():
    """One that was might abort it: communicators that are still referenced let go of their groups before."""
    run = subprocess.run([sys.executable, "-c", AT_ITS_END], capture_output=True, text=True, timeout=60, check=True)
    before, after = run.stdout.splitlines()
    assert "gloo" in before and "gloo" not in after
