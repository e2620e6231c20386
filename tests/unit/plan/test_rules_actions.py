"""Stages that share their ranks: interleaved and V-shaped tables, and what is refused about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqloom.layout import Span
from seqloom.plan import (
    Action,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
)
from support.refusals import refused
from support.tables import completed, rows_with_messages

LOOP, VEE = ((0, 1), (2, 3), (0, 1), (2, 3)), ((0, 1), (2, 3), (2, 3), (0, 1))
INTERLEAVED = (
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)
ZERO_BUBBLE_V = (
    "0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3W0 3F2 3I2 0I1 3W1 0W0 0I2 0W1 3W2 0W2",
    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2F2 2I1 1I1 1W0 2I2 1I2 2W1 1W1 2W2 1W2",
)


def plan_of(pp_ranks: tuple[tuple[int, ...], ...], rows: tuple[str, ...], *, pieces: bool = False) -> Plan:
    """Four stages of one layer; one document per round, or one document in as many pieces."""
    stages = tuple(Stage(ranks, (s, s + 1)) for s, ranks in enumerate(pp_ranks))
    count = 1 + max(Action.parse(word).round or 0 for word in rows[0].split())
    spans = [Span(0, 6 * r, 6 * r + 6) if pieces else Span(r, 0, 6) for r in range(count)]
    rounds = tuple(
        Round(tuple(StageMicroBatch((Group(stage.ranks, 2, 1, (span,)),), Checkpoint.FULL) for stage in stages))
        for span in spans
    )
    table = completed(stages, rows_with_messages(stages, rows), Reduce.STEP)
    limits = Limits(4, 2, 4, ((Checkpoint.FULL, 3),))
    documents = (6 * count,) if pieces else (6,) * count
    return Plan(limits, Sharding.FULL, Reduce.STEP, documents, (Pipeline(stages, rounds, table),), "hand")


def row(plan: Plan, pp_rank: int, old: str, new: str) -> Plan:
    (line,) = plan.pipelines
    rows = list(line.actions)
    text = " ".join(map(str, rows[pp_rank]))
    assert old in text
    rows[pp_rank] = tuple(map(Action.parse, text.replace(old, new, 1).split()))
    return replace(plan, pipelines=(replace(line, actions=tuple(rows)),))


def test_pp_ranks_are_the_distinct_ranks_of_the_stages() -> None:
    loop, vee = plan_of(LOOP, INTERLEAVED).pipelines[0], plan_of(VEE, ZERO_BUBBLE_V).pipelines[0]
    assert loop.ranks_by_pp_rank == vee.ranks_by_pp_rank == ((0, 1), (2, 3))
    assert loop.ranks == vee.ranks == (0, 1, 2, 3)
    assert [loop.pp_rank_of(s) for s in range(4)] == [0, 1, 0, 1]
    assert [vee.pp_rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert vee.stages_of(0) == (0, 3)


@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize(("pp_ranks", "rows"), [(LOOP, INTERLEAVED), (VEE, ZERO_BUBBLE_V)])
def test_tables_over_virtual_stages_are_valid(pp_ranks, rows, sharding: Sharding) -> None:
    plan = replace(plan_of(pp_ranks, rows), sharding=sharding)
    plan.validate()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_text(plan.to_text()) == plan


def test_a_row_mixes_the_stages_of_its_pp_rank() -> None:
    lines = plan_of(VEE, ZERO_BUBBLE_V).to_text().splitlines()
    assert lines[-2].startswith("host 0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 3RECV_F0 3F0 3I0 3SEND_B0")
    assert lines[-1].startswith("host 1: 1RECV_F0 1F0 2F0 2SEND_F0")  # 1 hands over to 2 without a message


def test_pieces_flow_through_virtual_stages() -> None:
    rows = ("0F0 0F1 3F0 3F1 3B1 0B1 3B0 0B0", "1F0 2F0 1F1 2F1 2B1 1B1 2B0 1B0")
    plan_of(VEE, rows, pieces=True).validate()
    early = ("0F0 0F1 3F0 3F1 3B1 0B1 3B0 0B0", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    refused(plan_of(VEE, early, pieces=True), "order", "pp_rank 1 has 1B0 .* before 1B1 .* in reverse order")


def test_stages_share_all_ranks_or_none() -> None:
    text = "rank 1 is in pipeline 0 stage 2 and in pipeline 0 stage 0.* or give both the ranks of stage 0"
    for odd in ((1, 0), (1, 2), (1,)):
        plan = plan_of(LOOP, INTERLEAVED)
        stages = list(plan.pipelines[0].stages)
        stages[2] = replace(stages[2], ranks=odd)
        refused(replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),)), "stage-ranks", text)


def test_two_pipelines_share_no_pp_rank() -> None:
    plan = plan_of(LOOP, INTERLEAVED)
    text = "rank 0 is in pipeline 1 stage 0 and in pipeline 0 stage 0.* remove it from one of them$"
    refused(replace(plan, pipelines=plan.pipelines * 2), "stage-ranks", text)


def test_rows_belong_to_pp_ranks() -> None:
    plan = plan_of(LOOP, INTERLEAVED)
    (line,) = plan.pipelines
    four = replace(line, actions=line.actions * 2)
    refused(replace(plan, pipelines=(four,)), "table", "4 rows of actions for 2 pp_ranks.* give 2")
    swapped = replace(line, actions=line.actions[::-1])
    refused(replace(plan, pipelines=(swapped,)), "table", "pp_rank 0 has the action 1RECV_F0.* of stages 0, 2 for")
    refused(row(plan, 0, " 2F3", ""), "table", "nothing for round 3 of stage 2|2B3 for round 3 of stage 2")
    refused(row(plan, 0, " 2REDUCE", ""), "reduce", "no REDUCE for stage 2.* add 2REDUCE")


def test_stages_of_one_pp_rank_run_one_after_the_other() -> None:
    plan = plan_of(VEE, ZERO_BUBBLE_V)
    wrong = row(plan, 1, "1RECV_F0 1F0 2F0 2SEND_F0", "1RECV_F0 2F0 1F0 2SEND_F0")
    refused(wrong, "order", "2F0 .* before 1F0 .* stages 1 and 2 are on one pp_rank.* put 1F0 before 2F0")
    wrong = row(plan, 1, "2RECV_B0 2I0 1I0 1SEND_B0", "1I0 1SEND_B0 2RECV_B0 2I0")
    refused(wrong, "order", "put 2I0 before 1I0")


def test_stages_of_one_pp_rank_exchange_no_messages() -> None:
    plan = plan_of(VEE, ZERO_BUBBLE_V)
    refused(row(plan, 1, "1F0 2F0", "1F0 1SEND_F0 2F0"), "messages", "SEND_F of stage 1 .* on other pp_ranks")


def test_parameters_are_gathered_stage_by_stage() -> None:
    plan = plan_of(LOOP, INTERLEAVED)
    own = row(row(plan, 0, "0F0", "0UNSHARD 0F0"), 0, "0REDUCE", "0RESHARD 0REDUCE")
    own.validate()
    refused(row(own, 0, "2REDUCE", "2RESHARD 2REDUCE"), "shards", "put 2UNSHARD before it")


def test_the_circle_of_a_deadlock_is_named() -> None:
    """Pipeline rank 0 begins with stage 3, which needs stages 0 to 2."""
    plan = plan_of(VEE, ("3F0 0F0 3B0 0B0", "1F0 2F0 2B0 1B0"))
    text = (
        r"3RECV_F0 \(pp_rank 0, action 0\) waits for 2SEND_F0, which comes after 1RECV_F0 \(pp_rank 1, action 0\), "
        r"which waits for 0SEND_F0, which comes after 3RECV_F0 .*; move 3RECV_F0 later in its row, or 2SEND_F0 earlier"
    )
    refused(plan, "deadlock", text)


def test_interleaved_in_a_wrong_order_is_a_deadlock() -> None:
    """Pipeline rank 1 wants round 3 of stage 1 before it lets round 0 of stage 3 go back."""
    wrong = "1F0 1F1 3F0 3F1 1F2 1F3 3B0 3B1 1B0 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    text = r"2RECV_B0 \(pp_rank 0.* waits for 3SEND_B0, which comes after 1RECV_F3 \(pp_rank 1.* waits for 0SEND_F3"
    refused(plan_of(LOOP, (INTERLEAVED[0], wrong)), "deadlock", text)


def test_messages_between_two_pp_ranks_keep_their_order() -> None:
    """Pipeline rank 0 sends rounds of stages 0 and 2 to pp_rank 1, which must take them as they come."""
    plan = plan_of(LOOP, ("0F0 2F0 0F1 2F1 2B1 0B1 2B0 0B0", "1F0 1F1 3F0 3F1 3B1 1B1 3B0 1B0"))
    text = "pp_rank 0 sends 2SEND_F0 before 0SEND_F1, pp_rank 1 receives 1RECV_F1 first.* put 3RECV_F0 before 1RECV_F1"
    refused(plan, "messages", text)
    row(row(plan, 1, "3RECV_F0 ", ""), 1, "1RECV_F1", "3RECV_F0 1RECV_F1").validate()
