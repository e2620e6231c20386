"""Every rule refuses a plan that breaks it, and says which rule that is, what was found and what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from seqloom.errors import PlanError
from seqloom.layout import Layout, Route, Span
from seqloom.plan import (
    RULES,
    Action,
    Checkpoint,
    Group,
    Method,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
)
from support.refusals import refused


def pipelines(plan: Plan, **changes: object) -> Plan:
    return replace(plan, pipelines=(replace(plan.pipelines[0], **changes),))


def work(plan: Plan, round_: int, stage: int, **changes: object) -> Plan:
    rounds = list(plan.pipelines[0].rounds)
    shares = list(rounds[round_].by_stage)
    shares[stage] = replace(shares[stage], **changes)
    rounds[round_] = Round(tuple(shares))
    return pipelines(plan, rounds=tuple(rounds))


def group(plan: Plan, round_: int, stage: int, index: int, **changes: object) -> Plan:
    groups = list(plan.pipelines[0].rounds[round_].by_stage[stage].groups)
    groups[index] = replace(groups[index], **changes)
    return work(plan, round_, stage, groups=tuple(groups))


def stage(plan: Plan, index: int, **changes: object) -> Plan:
    stages = list(plan.pipelines[0].stages)
    stages[index] = replace(stages[index], **changes)
    return pipelines(plan, stages=tuple(stages))


def limit(plan: Plan, **changes: object) -> Plan:
    return replace(plan, limits=replace(plan.limits, **changes))


def row(plan: Plan, index: int, words: str) -> Plan:
    rows = list(plan.pipelines[0].actions)
    rows[index] = tuple(Action.parse(word) for word in words.split())
    return pipelines(plan, actions=tuple(rows))


def words(plan: Plan, index: int = 0) -> str:
    return " ".join(map(str, plan.pipelines[0].actions[index]))


def exchanged(text: str, first: str, second: str) -> str:
    return text.replace(first, "?").replace(second, first).replace("?", second)


def linear(plan: Plan, change: Callable[[np.ndarray], np.ndarray]) -> Plan:
    layout = plan.pipelines[0].rounds[1].by_stage[0].linear_layout()
    moved = Layout(change(layout.rank), layout.item, layout.start, layout.stop)
    return work(plan, 1, 0, linear=moved)


def first_stage_only(plan: Plan) -> Plan:
    return pipelines(plan, rounds=tuple(Round(current.by_stage[:1]) for current in plan.pipelines[0].rounds))


def without_document_3(plan: Plan) -> Plan:
    spans = plan.pipelines[0].rounds[1].by_stage[1].groups[0].spans
    return group(plan, 1, 1, 0, spans=tuple(span for span in spans if span.document != 3))


ON_ONE_STAGE: list[tuple[str, str, Callable[[Plan], Plan]]] = [
    ("documents", "no documents", lambda p: replace(p, documents=())),
    ("documents", "document 1 has length 0", lambda p: replace(p, documents=(100, 0, 40, 8))),
    ("documents", "document 1 has length 60.5", lambda p: replace(p, documents=(100, 60.5, 40, 8))),
    ("limits", "pad_multiple is 0", lambda p: limit(p, pad_multiple=0)),
    ("limits", "or fewer", lambda p: limit(p, ranks=4 * 10**12)),
    ("limits", "use 9 ranks", lambda p: limit(p, node_size=3)),
    ("limits", "capacity is given for", lambda p: limit(p, capacity=())),
    ("limits", "raise the memory budget", lambda p: limit(p, capacity=((Checkpoint.FULL, 0),))),
    ("limits", "choose among full, hybrid, none", lambda p: replace(p, sharding="fully")),
    ("stage-ranks", "no pipelines", lambda p: replace(p, pipelines=())),
    ("stage-ranks", "uses rank 8", lambda p: stage(p, 0, ranks=(*range(7), 8))),
    ("stage-ranks", "rank 3 is in", lambda p: stage(p, 0, ranks=(*range(8), 3))),
    ("stage-ranks", "has no ranks", lambda p: stage(p, 0, ranks=())),
    ("stage-ranks", "remove it from one", lambda p: replace(p, pipelines=p.pipelines * 2)),
    ("layers", r"use \[0:4\)", lambda p: stage(p, 0, layers=(1, 4))),
    ("work", "0 shares for 1 stages", lambda p: pipelines(p, rounds=(Round(()), *p.pipelines[0].rounds[1:]))),
    ("work", "no groups", lambda p: work(p, 0, 0, groups=())),
    ("work", "group without documents", lambda p: group(p, 1, 0, 2, spans=())),
    ("limits", "offload_capacity is given for", lambda p: limit(p, offload_capacity=((Checkpoint.FULL, 9),) * 2)),
    ("limits", "offload_capacity of .* is 0", lambda p: limit(p, offload_capacity=((Checkpoint.FULL, 0),))),
    ("offload", "use 0 to 4", lambda p: work(p, 0, 0, offloaded_layers=5)),
    ("offload", "use 0 to 4", lambda p: work(p, 0, 0, offloaded_layers=-1)),
    ("offload", "use 0 to 4", lambda p: work(p, 0, 0, offloaded_layers=1.0)),
    ("offload", "use 0 or 4", lambda p: work(p, 0, 0, checkpoint=Checkpoint.STAGE, offloaded_layers=3)),
    ("lighter", "use 0 to 3", lambda p: work(p, 0, 0, lighter_layers=4)),
    ("lighter", "use 0 to 3", lambda p: work(p, 0, 0, lighter_layers=-1)),
    ("lighter", "use 0 to 3", lambda p: work(p, 0, 0, lighter_layers=1.0)),
    ("lighter", "only full and selective", lambda p: work(p, 0, 0, checkpoint=Checkpoint.NONE, lighter_layers=1)),
    ("lighter", "that stays on the GPU", lambda p: work(p, 0, 0, offloaded_layers=2, lighter_layers=1)),
    ("group-ranks", "each once", lambda p: group(p, 0, 0, 0, ranks=(0, 1, 2, 2))),
    ("group-ranks", "rank 9", lambda p: group(p, 0, 0, 0, ranks=(0, 1, 2, 9))),
    ("group-ranks", "distinct", lambda p: group(p, 0, 0, 0, ranks=())),
    ("group-shape", "use ulysses 2 x ring 2", lambda p: group(p, 0, 0, 0, ulysses=3)),
    ("group-shape", "use ulysses 4 x ring 1", lambda p: group(p, 0, 0, 0, ulysses=4, ring=2)),
    ("heads", "use ulysses 2 x ring 2", lambda p: limit(p, heads=3)),
    ("family", "use ranks 0 to 3 in order", lambda p: group(p, 0, 0, 0, ranks=(0, 1, 3, 2))),
    ("family", r"block \[1, 2\]", lambda p: group(p, 1, 0, 1, ranks=(1, 2))),
    ("family", "group family", lambda p: limit(p, communicators=1)),
    ("tensor", "degree 3 on 8 ranks of the stage; .* use 2", lambda p: stage(p, 0, tensor=3)),
    ("tensor", "degree 0 on 8 ranks of the stage; .* use 1", lambda p: stage(p, 0, tensor=0)),
    ("tensor", "ulysses 1, tensor degree 2", lambda p: stage(p, 0, tensor=2)),
    ("expert", "expert degree 3; it divides the 8 ranks .* use 2", lambda p: stage(p, 0, expert=3)),
    ("expert", "expert degree 0; .* use 1", lambda p: stage(p, 0, expert=0)),
    (
        "expert",
        "under hybrid sharding ranks of one node run the same rounds",
        lambda p: replace(stage(p, 0, expert=8), sharding=Sharding.HYBRID),
    ),
    ("spans", "use 0 to 3", lambda p: group(p, 1, 0, 2, spans=(Span(4, 0, 8),))),
    ("spans", r"use \[0:8\)", lambda p: group(p, 1, 0, 2, spans=(Span(3, 0, 9),))),
    ("spans", r"use \[4:5\)", lambda p: group(p, 1, 0, 2, spans=(Span(3, 4, 4),))),
    ("spans", "use integers", lambda p: group(p, 1, 0, 2, spans=(Span(3, 0, 8.0),))),
    ("coverage", r"add document 3 \[4:8\)", lambda p: group(p, 1, 0, 2, spans=(Span(3, 0, 4),))),
    ("coverage", "again", lambda p: group(p, 1, 0, 2, spans=(Span(3, 0, 8), Span(0, 0, 100)))),
    (
        "coverage",
        "continue document 3 at token 0",
        lambda p: group(p, 1, 0, 2, spans=(Span(3, 4, 8), Span(3, 0, 4))),
    ),
    (
        "pieces",
        "second piece in this round",
        lambda p: group(p, 1, 0, 2, spans=(Span(3, 0, 4), Span(3, 4, 8))),
    ),
    (
        "capacity",
        "puts 25 tokens on rank 0",
        lambda p: limit(p, capacity=((Checkpoint.SELECTIVE, 24), (Checkpoint.FULL, 99))),
    ),
    (
        "capacity",
        "puts 35 tokens on rank 4",
        lambda p: limit(p, capacity=((Checkpoint.SELECTIVE, 25), (Checkpoint.FULL, 34))),
    ),
    (
        "capacity",
        "with 2 layers offloaded, allows 13 tokens",
        lambda p: limit(
            work(p, 0, 0, offloaded_layers=2),
            capacity=((Checkpoint.SELECTIVE, 10), (Checkpoint.FULL, 128)),
            offload_capacity=((Checkpoint.SELECTIVE, 20),),
        ),
    ),
    ("capacity", "puts 128 tokens on rank 0", lambda p: limit(p, pad_multiple=512)),
    ("capacity", "choose among selective, full", lambda p: work(p, 0, 0, checkpoint=Checkpoint.NONE)),
    (
        "capacity",
        "puts 108 tokens on rank 0",
        lambda p: limit(linear(p, np.zeros_like), capacity=((Checkpoint.SELECTIVE, 64), (Checkpoint.FULL, 107))),
    ),
    (
        "layouts",
        "has 2 axes",
        lambda p: work(p, 0, 0, linear=p.pipelines[0].rounds[0].by_stage[0].linear_layout().with_axis(0, 2)),
    ),
    (
        "layouts",
        "99 tokens of 100",
        lambda p: work(p, 0, 0, linear=Layout.of([(0, 0, 0, 50), (1, 0, 51, 100)])),
    ),
    (
        "layouts",
        "exactly one rank",
        lambda p: work(p, 0, 0, linear=Layout.of([(0, 0, 0, 50), (1, 0, 49, 100)])),
    ),
    (
        "layouts",
        "ranks of its group",
        lambda p: work(p, 0, 0, attention=Layout.of([(0, 0, 0, 50), (4, 0, 50, 100)])),
    ),
    (
        "remap",
        r"use ranks among \[0, 1, 2, 3\]",
        lambda p: replace(linear(p, lambda rank: 7 - rank), sharding=Sharding.HYBRID),
    ),
    ("table", "give 1", lambda p: pipelines(p, actions=())),
    ("table", "0F5", lambda p: row(p, 0, words(p) + " 0F5")),
    ("table", "1F0", lambda p: row(p, 0, words(p).replace("0F0", "1F0"))),
    ("table", "0F0 2 times", lambda p: row(p, 0, words(p) + " 0F0")),
    ("table", "use 0F1 and 0B1", lambda p: row(p, 0, words(p).replace("0B1", ""))),
    ("table", "0F1 0I1", lambda p: row(p, 0, words(p).replace("0B1", "0I1"))),
    ("table", "one F and one B", lambda p: row(p, 0, words(p).replace("0B1", "0B1 0W1"))),
    ("order", "sort them", lambda p: row(p, 0, "0F1 0B1 0F0 0B0 0REDUCE")),
    ("order", "put 0F0 before 0B0", lambda p: row(p, 0, "0B0 0F0 0F1 0B1 0REDUCE")),
    ("order", "put 0I0 before 0W0", lambda p: row(p, 0, "0F0 0W0 0I0 0F1 0B1 0REDUCE")),
    ("reduce", "add 0REDUCE", lambda p: row(p, 0, "0F0 0B0 0F1 0B1")),
    ("reduce", "remove 0REDUCE0", lambda p: row(p, 0, "0F0 0B0 0REDUCE0 0F1 0B1 0REDUCE")),
    ("reduce", "one REDUCE per round", lambda p: replace(p, reduce=Reduce.ROUND)),
    ("reduce", "put 0B1 before 0REDUCE", lambda p: row(p, 0, "0F0 0B0 0F1 0REDUCE 0B1")),
    ("shards", "put 0UNSHARD before it", lambda p: row(p, 0, "0F0 0UNSHARD 0B0 0F1 0B1 0RESHARD 0REDUCE")),
    ("shards", "put 0RESHARD before it", lambda p: row(p, 0, "0UNSHARD 0F0 0B0 0UNSHARD 0F1 0B1 0REDUCE")),
    ("messages", "remove SEND_F", lambda p: row(p, 0, words(p) + " 0SEND_F0")),
]

ON_TWO_STAGES: list[tuple[str, str, Callable[[Plan], Plan]]] = [
    ("stage-ranks", "rank 3 is in", lambda p: stage(p, 1, ranks=(3, 4, 5, 6))),
    ("layers", r"use \[2:4\)", lambda p: stage(p, 1, layers=(3, 4))),
    ("layers", r"use \[2:3\)", lambda p: stage(p, 1, layers=(2, 2))),
    ("work", "1 shares for 2 stages", first_stage_only),
    ("group-ranks", "rank 4, which is not in the stage", lambda p: group(p, 0, 0, 0, ranks=(4, 5, 6, 7))),
    ("tensor", "use ulysses 2", lambda p: group(p, 0, 1, 0, ulysses=1, ring=4)),
    ("tensor", "degree 2 for 7 query heads; .* use 1", lambda p: limit(p, heads=7)),
    (
        "tensor",
        "round 1 stage 1 has a linear layout",
        lambda p: work(p, 1, 1, linear=p.pipelines[0].rounds[1].by_stage[1].linear_layout()),
    ),
    ("tensor", "has a route; .* use tensor degree 1", lambda p: group(p, 1, 1, 0, route=Route((4, 5)))),
    ("tensor", r"has \[4, 5\] as tensor ranks.* use \[5, 4\]", lambda p: stage(p, 1, ranks=(5, 4, 6, 7))),
    ("expert", "TP group divide the experts already; .* tensor degree 1", lambda p: stage(p, 1, expert=2)),
    ("pieces", r"use ranks \(0, 1, 2, 3\)", lambda p: group(p, 1, 0, 0, ranks=(2, 3, 0, 1))),
    ("pieces", "ulysses 2 x ring 2", lambda p: group(p, 1, 1, 0, ulysses=4, ring=1)),
    ("pieces", "use method ring and no route", lambda p: group(p, 1, 1, 0, method=Method.GATHER)),
    ("stage-spans", "lacks document 3", without_document_3),
    ("stage-spans", "adds document 2", lambda p: group(p, 0, 1, 0, spans=(Span(0, 0, 70), Span(2, 0, 40)))),
    ("layouts", "not in the stage", lambda p: work(p, 0, 0, linear=Layout.of([(4, 0, 0, 70)]))),
    ("order", "backward in reverse", lambda p: row(p, 0, exchanged(words(p), "0B0", "0B1"))),
    ("messages", "add or remove RECV_F", lambda p: row(p, 1, words(p, 1).replace("1RECV_F0", ""))),
    ("messages", "put 0F0 before 0SEND_F0", lambda p: row(p, 0, exchanged(words(p), "0F0", "0SEND_F0"))),
    ("messages", "put 1RECV_F1 before 1F1", lambda p: row(p, 1, exchanged(words(p, 1), "1RECV_F1", "1F1"))),
    ("messages", "put 0RECV_B1 before 0B1", lambda p: row(p, 0, exchanged(words(p), "0RECV_B1", "0B1"))),
    (
        "messages",
        "put 0RECV_B1 before 0RECV_B0",
        lambda p: row(p, 0, "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B1 0B0 0REDUCE"),
    ),
]


@pytest.mark.parametrize(("rule", "text", "change"), ON_ONE_STAGE)
def test_a_broken_plan_is_refused(plain: Plan, rule: str, text: str, change: Callable[[Plan], Plan]) -> None:
    refused(change(plain), rule, text)


@pytest.mark.parametrize(("rule", "text", "change"), ON_TWO_STAGES)
def test_a_broken_pipeline_is_refused(staged: Plan, rule: str, text: str, change: Callable[[Plan], Plan]) -> None:
    refused(change(staged), rule, text)


def test_the_plans_to_break_are_valid(plain: Plan, staged: Plan) -> None:
    plain.validate()
    staged.validate()


def test_every_rule_is_broken_by_a_test() -> None:
    elsewhere = {"deadlock", "group-order", "methods", "routes", "pairs"}  # below, and in test_rules_groups.py
    tested = {rule for rule, _, _ in (*ON_ONE_STAGE, *ON_TWO_STAGES)} | elsewhere
    assert tested == set(RULES)


CIRCLE = (
    r"stops: 0RECV_B0 \(pp_rank 0, action 2\) waits for 1SEND_B0, which comes after 1RECV_F1 \(pp_rank 1, action 2\), "
    r"which waits for 0SEND_F1, which comes after 0RECV_B0"
)


def test_deadlock_is_seen_across_stages(staged: Plan) -> None:
    """Stage 0 wants a gradient back before it sends round 1, stage 1 wants round 1 before it sends one."""
    whole = [Span(k, 0, n) for k, n in enumerate(staged.documents)]
    shares = [
        Round(
            tuple(StageMicroBatch((Group(s.ranks, 2, 2, spans),), Checkpoint.FULL) for s in staged.pipelines[0].stages)
        )
        for spans in ((whole[0],), tuple(whole[1:]))
    ]
    plan = pipelines(staged, rounds=tuple(shares))
    plan = row(plan, 0, "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0REDUCE")
    good = row(plan, 1, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE")
    good.validate()
    bad = row(plan, 1, "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE")
    refused(bad, "deadlock", CIRCLE)


def test_pieces_stay_on_one_pipeline(staged: Plan) -> None:
    halves = []
    for ranks, span in (((0, 1, 2, 3), Span(0, 0, 5)), ((4, 5, 6, 7), Span(0, 5, 9))):
        current = Round((StageMicroBatch((Group(ranks, 4, 1, (span,)),), Checkpoint.FULL),))
        halves.append(Pipeline.single(ranks, 4, (current,), Reduce.STEP))
    refused(replace(staged, documents=(9,), pipelines=tuple(halves)), "pieces", "began in pipeline 0")


def test_pipelines_of_different_depth_are_refused(staged: Plan) -> None:
    lines = []
    for ranks, document, layers in (((0, 1, 2, 3), 0, 4), ((4, 5, 6, 7), 1, 5)):
        current = Round((StageMicroBatch((Group(ranks, 4, 1, (Span(document, 0, 9),)),), Checkpoint.FULL),))
        lines.append(Pipeline.single(ranks, layers, (current,), Reduce.STEP))
    refused(replace(staged, documents=(9, 9), pipelines=tuple(lines)), "layers", "use 5 layers in each")


def test_sharing_ranks_and_idle_ranks_are_legal(plain: Plan) -> None:
    free = replace(plain, sharding=Sharding.NONE)
    free.validate()
    stages = (Stage(tuple(range(8)), (0, 4)),)
    pipelines(free, stages=stages).validate()
    bigger = limit(free, ranks=16)
    bigger.validate()


@pytest.mark.parametrize("sharding", Sharding)
def test_every_sharding_goes_with_stages(staged: Plan, sharding: Sharding) -> None:
    replace(staged, sharding=sharding).validate()


def test_capacity_is_exact(plain: Plan) -> None:
    limit(plain, capacity=((Checkpoint.SELECTIVE, 25), (Checkpoint.FULL, 35))).validate()


def test_errors_survive_pickling(plain: Plan) -> None:
    with pytest.raises(PlanError) as caught:
        replace(plain, documents=()).validate()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.rule) == (str(caught.value), "documents")
