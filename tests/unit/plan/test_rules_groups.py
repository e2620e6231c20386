"""Rules about order, methods, routes and pairs: broken one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqloom.errors import PlanError
from seqloom.layout import Route, Span
from seqloom.plan import (
    RULES,
    Checkpoint,
    Group,
    Limits,
    Method,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    StageMicroBatch,
    sort_groups,
)
from seqloom.plan.rules import groups as groups_rules
from support.refusals import refused

LONG = Group((0, 1, 4, 5), 2, 2, (Span(0, 0, 100),), route=Route((0, 1, 4, 5), 2))
SHORT = Group((0, 1), 2, 1, (Span(1, 0, 60),))
ALONE = Group((2,), 1, 1, (Span(2, 0, 40),))


def plan(*groups: Group, sharding: Sharding = Sharding.NONE, documents: tuple[int, ...] = (100, 60, 40)) -> Plan:
    """Three nodes of four ranks; group 0 over two nodes, group 1 inside one, group 2 alone; one round."""
    limits = Limits(12, 4, 8, ((Checkpoint.FULL, 400),))
    rounds = (Round((StageMicroBatch(groups or (LONG, SHORT, ALONE), Checkpoint.FULL),)),)
    return Plan(limits, sharding, Reduce.STEP, documents, (Pipeline.single(range(12), 2, rounds, Reduce.STEP),))


def test_the_plan_to_break_is_valid() -> None:
    plan().validate()
    plan(replace(LONG, method=Method.GATHER), SHORT, ALONE).validate()


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ((SHORT, LONG, ALONE), "group 1, between nodes, after group 0, inside a node.* before group 0"),
        ((LONG, ALONE, SHORT), "group 2, inside a node, after group 1, of one rank.* before group 1"),
    ],
)
def test_slow_links_come_first(groups: tuple[Group, ...], text: str) -> None:
    refused(plan(*groups), "group-order", text)
    plan(*sort_groups(groups, 4)).validate()


def test_gathering_needs_a_ring() -> None:
    refused(plan(LONG, replace(SHORT, method=Method.GATHER), ALONE), "methods", "use method ring")
    unknown = replace(LONG, method="tree")  # type: ignore[arg-type]
    refused(plan(unknown, SHORT, ALONE), "methods", "'tree'.*choose among ring, gather")


@pytest.mark.parametrize(
    ("proxies", "slices", "text"),
    [
        ((0, 1, 5, 4), 1, r"use \[0, 1, 4, 5\]"),
        ((0, 0, 4, 4), 1, r"use \[0, 4\]"),
        ((0, "4"), 1, "use integers"),
        ((0, 4), 0, "0 slices.*use 1 or more"),
        ((0, 4), 1.5, "1.5 slices"),
        ((0, 16), 1, "proxy 16, which is not in the stage"),
        ((), 1, "none in node 0.*add a rank of 0-3"),
        ((0, 1), 1, "none in node 1.*add a rank of 4-7"),
        ((0, 5), 1, r"places \[0\] of node 0, \[1\] of node 1.*use \[4\]"),
        ((0, 1, 4), 1, r"use \[4, 5\]"),
        ((0, 4, 8), 1, r"proxy 8 in node 2.*use ranks of nodes \[0, 1\]"),
        ((2, 6), 1, r"proxy 6, whose shard group has no tokens.*use ranks among \[0, 1, 2, 4, 5\]"),
    ],
)
def test_routes_that_cannot_be_taken_are_refused(proxies: tuple[int, ...], slices: int, text: str) -> None:
    refused(plan(replace(LONG, route=Route(proxies, slices)), SHORT, ALONE), "routes", text)


def test_a_proxy_takes_part_through_its_island() -> None:
    away = replace(LONG, route=Route((2, 6)))
    plan(away, SHORT, ALONE, sharding=Sharding.HYBRID).validate()
    plan(away, SHORT, ALONE, sharding=Sharding.FULL).validate()


def test_a_route_is_for_rings_between_nodes() -> None:
    inside = Group((0, 1, 2, 3), 2, 2, SHORT.spans, route=Route((0,)))
    refused(plan(LONG, inside, ALONE), "routes", "all ranks in one node.*leave the route out")
    heads = Group(tuple(range(8)), 8, 1, LONG.spans, route=Route((0, 4)))
    refused(plan(heads, SHORT, ALONE), "routes", "no ring.*leave the route out")


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ((Span(0, 0, 99),), "document 0 has 4950 pairs.*100 tokens have 5050"),
        ((Span(0, 1, 100),), "document 0 has 5049 pairs"),
        ((Span(0, 0, 60), Span(0, 50, 100)), r"document 0 \[50:60\) are computed twice.*continue.*at token 60"),
    ],
)
def test_pairs_are_counted(spans: tuple[Span, ...], text: str) -> None:
    """Other rules refuse such plans first; this one stands on its own feet."""
    with pytest.raises(PlanError, match=text) as caught:
        RULES["pairs"](plan(replace(LONG, spans=spans), SHORT, ALONE))
    assert caught.value.rule == "pairs"


def test_a_schedule_with_a_hole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_rules, "wrong_chunks", lambda ring, method: (3, 1) if ring == 2 else None)
    refused(plan(), "pairs", "ring 2 with method ring computes query chunk 3 x key chunk 1")
