"""A plan for one rank: which rounds it runs, with what, and what is refused."""

from dataclasses import replace

import pytest
import torch

from seqloom.comm import Alone, run_ranks
from seqloom.errors import SeqloomError
from seqloom.models import Transformer
from seqloom.plan import Checkpoint, Group, Reduce, Sharding, Span, Stage
from seqloom.runtime.bind import bind_plan
from seqloom.runtime.network import Network
from seqloom.testing.steps import one_stage_plan, tiny_spec

torch.set_num_threads(1)
ROUNDS = [
    [Group((0, 1), 1, 2, (Span(0, 0, 9),)), Group((2,), 1, 1, (Span(1, 0, 4),))],
    [Group((3,), 1, 1, (Span(2, 0, 5),))],
    [Group((0, 1), 2, 1, (Span(3, 0, 1),))],  # rank 1 holds nothing of it
]


def bound(sharding, **options):
    plan = one_stage_plan(ROUNDS, ranks=4, node_size=2, sharding=sharding, **options)
    return run_ranks(4, lambda transport: bind_plan(plan, transport), strict=True)


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        (Sharding.NONE, ["0F0 0B0 0F2 0B2", "0F0 0B0 0F2 0B2", "0F0 0B0", "0F1 0B1"]),
        (Sharding.HYBRID, ["0F0 0B0 0F2 0B2", "0F0 0B0 0F2 0B2", "0F0 0B0 0F1 0B1", "0F0 0B0 0F1 0B1"]),
        (Sharding.FULL, ["0F0 0B0 0F1 0B1 0F2 0B2"] * 4),
    ],
)
def test_a_rank_runs_the_rounds_of_its_island(sharding, parts):
    found = bound(sharding, reduce=Reduce.STEP)
    assert [" ".join(map(str, each.actions)) for each in found] == [f"{part} 0REDUCE" for part in parts]


def test_reductions_of_skipped_rounds_are_skipped():
    assert " ".join(map(str, bound(Sharding.NONE)[2].actions)) == "0F0 0B0 0REDUCE0"


def test_rounds_have_contexts_where_the_rank_takes_part():
    found = bound(Sharding.NONE, checkpoint=[Checkpoint.NONE, Checkpoint.FULL, Checkpoint.SELECTIVE])
    assert [each.takes_part for each in found[1].rounds] == [True, False, True]
    assert found[1].rounds[2].context.tokens == 0 and found[1].rounds[1].context is None
    assert [each.checkpoint for each in found[0].rounds] == [Checkpoint.NONE, Checkpoint.FULL, Checkpoint.SELECTIVE]
    assert sum(each.tokens for each in found) == 19


def test_all_ranks_refuse_a_plan_that_another_does_not_have():
    plans = [one_stage_plan(ROUNDS, ranks=4, reduce=Reduce(kind)) for kind in ("round", "step")]
    messages = []

    def body(transport):
        try:
            bind_plan(plans[transport.rank == 2], transport)
        except SeqloomError as error:
            messages.append(str(error))

    run_ranks(4, body)
    assert len(messages) == 4 and all("another one" in message for message in messages)
    run_ranks(4, lambda transport: bind_plan(plans[transport.rank == 2], transport, check=False))


def test_what_the_runtime_cannot_run_is_refused_by_name():
    plan = one_stage_plan([[Group((0,), 1, 1, (Span(0, 0, 4),))]], ranks=1)
    one = plan.pipelines[0]
    with pytest.raises(SeqloomError, match="tensor degree 2"):
        bind_plan(replace(plan, pipelines=(replace(one, stages=(Stage((0,), (0, 2), 2),)),)), Alone())
    with pytest.raises(SeqloomError, match="2 pipelines"):
        bind_plan(replace(plan, pipelines=(one, one)), Alone())


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(SeqloomError, match="a plan for 4 ranks on 1: start 4"):
        bind_plan(one_stage_plan(ROUNDS, ranks=4), Alone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_index_work_of_every_kind_of_layer_is_done_before_the_first(dtype):
    spec = tiny_spec(layers=3, windows=(None, 3, None))
    plan = one_stage_plan(ROUNDS, ranks=4, layers=3, sharding=Sharding.FULL)

    def body(transport):
        network = Network.of(Transformer(spec, dtype=dtype))
        found = bind_plan(plan, transport, prepare=lambda context: network.prepare(context, dtype))
        counts = []
        for each in found.rounds:
            before = set(each.context._kept)
            network.hidden(torch.zeros(each.context.tokens, dtype=torch.int64), each.context)
            assert set(each.context._kept) == before, "no layer had to prepare anything"
            counts.append(len(before))
        return counts

    assert run_ranks(4, body, strict=True) == [[2, 2, 2]] * 4, "one for each window"
