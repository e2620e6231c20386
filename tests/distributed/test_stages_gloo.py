"""Parameters of stages on gloo processes: what hosts hold, sums over shards, replicas and tied tables, checkpoints."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from seqloom.comm import bind_alone
from seqloom.plan import Sharding, Stage
from seqloom.runtime.placement import Placement
from seqloom.runtime.split_backward import split_weights
from seqloom.runtime.stage_sharded import StageSharded
from seqloom.testing.steps import Found, Step, tiny_spec

torch.set_num_threads(1)
STEP = Step((11, 5, 8, 3, 1, 7), tiny_spec(layers=5, hidden=12))  # rows that two ranks or four do not divide
RANKS = 8


def placed(layers, hosts, sharding=Sharding.FULL, order=None, node_size=2):
    """Stages of so many layers each; `order` names the host of each, 0 .. hosts - 1 by default."""
    each = RANKS // hosts
    ends = torch.tensor(layers).cumsum(0).tolist()
    stages = [
        Stage(tuple(range(host * each, host * each + each)), (end - count, end))
        for host, count, end in zip(order or range(hosts), layers, ends, strict=True)
    ]
    return Placement(tuple(stages), sharding, node_size)


def run_units(transport, step, placement, parameters, weights=None):
    """All forwards, then all backwards: rank i of every host has every document whose number is i in turn."""
    each = len(placement.hosts[0])
    place = placement.hosts[placement.host_of(transport.rank)].index(transport.rank)
    ids, labels = step.documents()
    numbers = range(place, len(ids), each)
    contexts = {number: bind_alone((len(ids[number]),)) for number in numbers}
    peer = lambda stage: placement.stages[stage].ranks[place]  # noqa: E731
    mine = [stage for stage in range(len(placement.stages)) if peer(stage) == transport.rank]
    parts, total = dict(zip(mine, placement.parts_of(transport.rank), strict=True)), 0.0
    open_units, kept, sent = {}, {}, []
    for stage in mine:
        parameters.acquire(parts[stage])
    for stage in range(len(placement.stages)):
        for number in numbers if stage in mine else ():
            part, given = parts[stage], ids[number]
            if stage:
                given = kept.pop((stage - 1, number), None)
                if given is None:
                    given = torch.empty(len(ids[number]), step.spec.hidden, dtype=step.dtype)
                    dist.recv(given, peer(stage - 1))
                given.requires_grad_()
            out = parameters.run(part, given, labels[number] if part.ends else None, contexts[number])
            open_units[stage, number] = given, out
            if part.ends:
                total += out.item() / step.valid
            elif stage + 1 in mine:
                kept[stage, number] = out.detach().clone()
            else:
                sent.append((out, dist.isend(out.detach(), peer(stage + 1))))
    for stage in reversed(range(len(placement.stages))):
        for number in numbers if stage in mine else ():
            given, out = open_units[stage, number]
            last = torch.tensor(1 / step.valid, dtype=step.dtype) if parts[stage].ends else None
            gradient = kept.pop((stage, number), last)
            if gradient is None:
                gradient = torch.empty_like(out)
                dist.recv(gradient, peer(stage + 1))
            if weights is None:
                parameters.backward(out, gradient, reduce=False)
            else:
                with weights.deferred((stage, number)):
                    parameters.backward(out, gradient, reduce=False)
            if stage and stage - 1 in mine:
                kept[stage - 1, number] = given.grad
            elif stage:
                sent.append((given, dist.isend(given.grad, peer(stage - 1))))
    for key in weights.waiting if weights is not None else ():
        weights.run(key)
    for _, handle in sent:
        handle.wait()
    for stage in mine:
        parameters.reduce(parts[stage])
        parameters.release(parts[stage])
    parameters.finish()
    loss = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(loss)
    return loss.item()


def one_step(transport, step, placement):
    network = step.network()
    weights = split_weights(network.layers)
    parameters = StageSharded(network, transport, placement)
    loss = run_units(transport, step, placement, parameters, weights)
    found = Found(loss, float(parameters.gradient_norm()), {k: g.clone() for k, g in parameters.gradients()})
    held = {name: tuple(master.to_local().shape) for name, master in parameters.masters().items()}
    copies = sum(each.untyped_storage().nbytes() for each in network.module.parameters() if not each.is_meta)
    return found, held, copies


CASES = {
    "four hosts, hybrid": (placed((1, 1, 2, 1), 4), False),
    "two hosts, nodes of two": (placed((3, 2), 2, Sharding.HYBRID), True),
    "two hosts in turn, none": (placed((1, 1, 1, 2), 2, Sharding.NONE, (0, 1, 0, 1)), True),
    "two hosts in a V": (placed((1, 1, 1, 2), 2, Sharding.FULL, (0, 1, 1, 0)), True),
    "one host": (placed((5,), 1), False),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_one_process(gloo_pool, name):
    placement, tied = CASES[name]
    step = replace(STEP, spec=replace(STEP.spec, tied=tied))
    results, wanted = gloo_pool.run(one_step, step, placement, ranks=RANKS), step.alone()
    assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
    assert len({found.norm for found, _, _ in results}) == 1
