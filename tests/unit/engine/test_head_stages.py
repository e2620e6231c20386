"""Steps whose head is dealt to all stages by tokens: the numbers of one process, whatever the order of the rest."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqloom.cost import CostModel
from seqloom.describe import Cluster
from seqloom.engine.stage_p2p import StageBoundary, place_messages
from seqloom.plan import Action, ActionKind, Checkpoint
from seqloom.plan.rules.actions import ActionTable
from seqloom.planners.pipeline import plan_pipeline
from support.head_stages import STEP, plan_with_head_stages
from support.steps import tiny_spec

torch.set_num_threads(1)


def worst(threads, plan, step=STEP, *, strict=True):
    wanted = step.alone()
    found = threads(plan.limits.ranks).run(lambda transport: step.spread(plan, transport), strict=strict)
    return max(each.worst(wanted) for each in found)


@pytest.mark.parametrize(
    ("name", "pp_size", "options"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 4, {"lead": 2}),
        ("1f1b", 3, {"kind": Checkpoint.STAGE}),
        ("zb-h1", 3, {"kind": Checkpoint.FULL}),
        ("seq1f1b", 2, {"pieces": 2, "width": 2}),
        ("seq1f1b-zb", 4, {"pieces": 2, "lead": 2}),
        ("1f1b", 2, {"width": 2, "shape": (1, 2)}),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_one_process(threads, name, pp_size, options, tied):
    step = replace(STEP, spec=tiny_spec(layers=4, tied=tied))
    assert worst(threads, plan_with_head_stages(name, pp_size, step=step, **options), step) < 1e-9


@pytest.mark.parametrize(("name", "pp_size", "lead"), [("1f1b", 4, 1), ("gpipe", 3, 1), ("zb-h1", 4, 2)])
def test_messages_end_even_if_every_call_blocks_until_all_other_sides_are_called(name, pp_size, lead):
    line = plan_with_head_stages(name, pp_size, lead=lead).pipelines[0]
    rows = place_messages(line, line.actions, StageBoundary(line, 0, torch.device("cpu")))
    left = [[sides(line, each) for each in row] for row in rows]
    sent = [{own for own, _ in row} for row in left]
    while any(left):
        first = {row[0][0] for row in left if row}
        first |= {row[1][0] for row in left if len(row) > 1 and row[1][0] in row[0][1]}  # a RECV behind its own SEND
        ready = [row for row in left if row and row[0][1] <= first]
        assert ready
        done = set().union(*({row[0][0], *row[0][1]} for row in ready))
        for row in left:
            while row and row[0][0] in done:
                row.pop(0)
    heads = [{str(own) for own in row if "SEND_B" in str(own)} for row in sent]
    assert all(f"{pp_size + k}SEND_B{r}" in row for k, row in enumerate(heads) for r in range(len(line.rounds)))


def sides(line, action):
    """A message with all other actions of it; of another action none."""
    table = ActionTable("rows", tuple(map(line.pp_rank_of, range(len(line.stages)))), 0, (), (), line.chain.heads)
    apart = replace(table, pp_ranks=tuple(range(len(line.stages))))  # those on the same pp_rank, too
    others = {*apart.other_sides(action)}
    return action, others.union(*(apart.other_sides(each) for each in others)) - {action}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("vocabulary", [257, 5_000])
def test_what_a_stage_uses_has_been_received(stages, vocabulary):
    """Also where one rank has its part of a head long before the others."""
    spec = tiny_spec(layers=4, hidden=128, vocabulary=vocabulary)
    cost = CostModel(Cluster.parse("1x4xCPU"), spec, max_length=512, capacity=512)
    lengths = np.array([512, 234, 401, 140, 263, 512, 512, 45, 512, 289, 171, 512, 94, 512, 512, 512])
    line = plan_pipeline(lengths, cost, stages=stages, head="all").pipelines[0]
    messages = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B, ActionKind.I: ActionKind.RECV_B}
    for row in place_messages(line, line.actions, StageBoundary(line, 0, torch.device("cpu"))):
        for index, action in enumerate(row):
            first, last = action.stage == 0, not line.chain.following(action.stage)
            if action.kind in messages and not (first if action.kind == ActionKind.F else last):
                assert Action(action.stage, messages[action.kind], action.round) in row[:index], str(action)
