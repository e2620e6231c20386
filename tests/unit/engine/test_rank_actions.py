"""A plan for one rank: which rounds it runs, with what, and what is refused."""

from dataclasses import replace

import pytest
import torch

from seqloom.dist import SingleRankTransport, run_ranks
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import Transformer
from seqloom.models.adapter import ModelAdapter
from seqloom.plan import Checkpoint, Group, LayerRange, Pipeline, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.schedules import build_schedule
from support.steps import one_stage_plan, tiny_spec

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
    assert [each.context is not None for each in found[1].rounds] == [True, False, True]
    assert found[1].rounds[2].context.tokens == 0 and found[1].rounds[1].context is None
    assert [each.checkpoint for each in found[0].rounds] == [Checkpoint.NONE, Checkpoint.FULL, Checkpoint.SELECTIVE]
    assert sum(each.tokens for each in found) == 19


def test_every_round_has_the_prefixes_of_its_documents():
    plan = one_stage_plan(ROUNDS, ranks=4, node_size=2, sharding=Sharding.FULL)
    found = run_ranks(4, lambda transport: bind_plan(plan, transport, prefixes={0: 7, 2: 5, 3: 1}), strict=True)
    for each in found:
        assert [round_.context.prefixes for round_ in each.rounds] == [{0: 7}, {2: 5}, {}]


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


def side_by_side():
    """Ranks 0 to 3: one stage of two tp_groups. Ranks 4 and 5: two stages, two rounds. Ranks 6 and 7: nothing."""
    plan = one_stage_plan([[Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 9),))]], ranks=8, reduce=Reduce.STEP)
    tp_group = replace(plan.pipelines[0], stages=(Stage((0, 1, 2, 3), (0, 2), 2),))
    works = [[StageMicroBatch((Group((r,), 1, 1, (Span(k, 0, 5),)),), Checkpoint.NONE) for r in (4, 5)] for k in (1, 2)]
    schedule = build_schedule("1f1b", 2, 2)
    stages = (Stage((4,), (0, 1)), Stage((5,), (1, 2)))
    line = Pipeline(stages, tuple(Round(tuple(each)) for each in works), schedule.pipeline_actions())
    plan = replace(plan, documents=(9, 5, 5), pipelines=(tp_group, line))
    plan.validate()
    return plan


def test_a_rank_runs_its_own_pipeline_or_nothing():
    plan = side_by_side()
    found = run_ranks(8, lambda transport: bind_plan(plan, transport), strict=True)
    assert [each.pipeline for each in found] == [plan.pipelines[0]] * 4 + [plan.pipelines[1]] * 2 + [None] * 2
    assert [len(each.rounds) for each in found] == [1, 1, 1, 1, 2, 2, 0, 0]
    assert [each.tokens for each in found] == [3, 2, 2, 2, 10, 10, 0, 0]
    assert [list(each.stages) for each in found[4:]] == [[0], [1], [], []]
    assert sorted(map(str, found[5].actions)) == sorted(map(str, plan.pipelines[1].actions[1]))
    assert found[6].actions == ()
    assert found[5].rounds[1].layers == LayerRange(1, 2, 2)
    assert [each.progress.describe() for each in found[3:7:3]] == [
        "rank 3 is at the end of its row of pipeline 0",
        "rank 6 is at the end of its row",
    ]
    assert found[6].progress.report() == found[6].progress.describe()


def test_teams_come_from_the_tensor_degree_of_the_stage():
    plan = side_by_side()
    found = run_ranks(8, lambda transport: bind_plan(plan, transport), strict=True)
    tp_groups = [each.rounds[0].context.tp_group for each in found[:4]]
    assert [(tp_group.ranks, tp_group.index) for tp_group in tp_groups] == [
        ((0, 1), 0),
        ((0, 1), 1),
        ((2, 3), 0),
        ((2, 3), 1),
    ]
    assert [tp_group.cp_context.groups[0].block for tp_group in tp_groups] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert all(tp_group.collective for tp_group in tp_groups)
    assert found[4].rounds[0].context.tp_group is None


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(SeqloomError, match="a plan for 4 ranks on 1: start 4"):
        bind_plan(one_stage_plan(ROUNDS, ranks=4), SingleRankTransport())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_index_work_of_every_kind_of_layer_is_done_before_the_first(dtype):
    spec = tiny_spec(layers=3, windows=(None, 3, None))
    plan = one_stage_plan(ROUNDS, ranks=4, layers=3, sharding=Sharding.FULL)

    def body(transport):
        adapter = ModelAdapter.of(Transformer(spec, dtype=dtype))
        found = bind_plan(plan, transport, prepare=lambda context: adapter.prepare(context, dtype))
        counts = []
        for each in found.rounds:
            before = set(each.context._cache)
            adapter.hidden(torch.zeros(each.context.tokens, dtype=torch.int64), each.context)
            assert set(each.context._cache) == before, "no layer had to prepare anything"
            counts.append(len(before))
        return counts

    assert run_ranks(4, body, strict=True) == [[2, 2, 2]] * 4, "one for each window"
