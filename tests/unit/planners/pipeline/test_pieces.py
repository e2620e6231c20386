"""Planner `pieces`: valid plans within memory on one stage, for documents that no group holds whole; `auto` asks it."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model, evaluate
from seqloom.cost import MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes
from seqloom.describe import ModelSpec
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Checkpoint, Plan
from seqloom.planners import make_plan
from seqloom.planners.auto import plan_auto
from seqloom.planners.pipeline import plan_pieces
from seqloom.simulate import predicted_ns, simulate

LONG = [3_000_000, *[900] * 40]
"""Documents of which 8xL40S hold the first in pieces only, under qwen2.5-0.5b."""


@cache
def cost_of(sharding="none", offload=False, cluster="1x8xL40S", model="qwen2.5-0.5b"):
    return cost_model(cluster, model, sharding=sharding, offload=offload, max_length=4_000_000)


def checkpoints(plan):
    return [current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds]


batches = st.tuples(st.integers(100_000, 3_000_000), st.lists(st.integers(1, 200_000), max_size=8)).map(
    lambda parts: np.array([parts[0], *parts[1]])
)


@settings(max_examples=3)
@given(batches, st.sampled_from(["full", "hybrid", "none"]))
def test_plans_are_valid_repeatable_and_within_memory(lengths, sharding):
    cost = cost_of(sharding)
    plan = make_plan("pieces", lengths, cost)
    assert plan == make_plan("pieces", lengths, cost) == Plan.from_json(plan.to_json())
    assert plan.documents == tuple(lengths.tolist()) and len(plan.pipelines[0].stages) == 1
    found = simulate(plan, cost)
    assert int(found.peak_memory.max()) <= cost.budget_bytes and found.step_ns == predicted_ns(plan, cost)


def test_a_document_that_no_group_holds_is_planned_in_pieces_of_equal_tokens():
    cost, lengths = cost_of(), np.array(LONG)
    with pytest.raises(MemoryBudgetError, match="largest group"):
        make_plan("flex", lengths, cost)
    plan = make_plan("auto", lengths, cost)
    assert plan.planner == "pieces" and plan == make_plan("pieces", lengths, cost)
    long = [span for each in plan.pipelines[0].rounds for span in each.by_stage[0].spans() if span.document == 0]
    assert len(long) > 2 and len({span.tokens for span in long[:-1]}) == 1 >= long[-1].tokens / long[0].tokens
    assert evaluate(plan, cost).bound_ns is None  # which nothing is proven about


def test_the_last_pieces_keep_their_activations_and_one_more_would_not_fit():
    cost, lengths = cost_of(), np.array([3_000_000])
    plan = plan_pieces(lengths, cost)
    found = checkpoints(plan)
    again = found.index(next(each for each in found if each != found[0]))
    assert found[0] == Checkpoint.STAGE and Checkpoint.STAGE not in found[again:]
    assert simulate(plan, cost).peak_memory.max() > 0.97 * cost.budget_bytes


def peak_by_hand(plan, cost):
    """Bytes of a rank for one document in rounds of its own, summed up action by action."""
    layers, works = plan.pipelines[0].layer_ranges[0], [each.by_stage[0] for each in plan.pipelines[0].rounds]
    keys, gradients = kv_cache_bytes(cost, layers, works[0].groups[0], plan.documents[0])
    rounds = []
    for work in works:
        [group] = work.groups
        per_token = cost.memory.activation_bytes(layers, work.checkpoint, 0, work.lighter_layers)
        rounds.append([group.tokens / group.degree * each for each in per_token[:3]])
    held = [sum(each[0] for each in rounds[: number + 1]) for number in range(len(rounds))]
    forward = max(kept + each[1] for kept, each in zip(held, rounds, strict=True))
    backward = max(kept + each[2] for kept, each in zip(held, rounds, strict=True)) + gradients
    return cost.memory.fixed_bytes(MemoryPolicy(Checkpoint.NONE, plan.reduce)) + keys + max(forward, backward)


@pytest.mark.parametrize(
    ("sharding", "tokens"), [("none", 2_999_808), pytest.param("full", 3_999_744, marks=pytest.mark.slow)]
)
def test_the_peak_is_that_of_all_keys_and_of_the_activations_that_are_kept(sharding, tokens):
    cost = cost_of(sharding)
    plan = plan_pieces(np.array([tokens]), cost)
    assert simulate(plan, cost).peak_memory.max() == pytest.approx(peak_by_hand(plan, cost), rel=1e-6)
    with pytest.raises(MemoryBudgetError, match="not even in pieces: its keys and values stay"):
        plan_pieces(np.array([40_000_000]), cost)


def test_auto_takes_pieces_where_they_are_faster_and_leaves_them_where_nothing_is_recomputed():
    cost, lengths = cost_of(), np.array([2_000_000, *[900] * 40])
    whole, auto = make_plan("flex", lengths, cost), make_plan("auto", lengths, cost)
    assert auto.planner == "pieces" and predicted_ns(auto, cost) < predicted_ns(whole, cost)
    assert plan_auto(lengths, cost, pieces=False).planner != "pieces"
    short = np.array([900] * 40)
    assert not make_plan("auto", short, cost).has_pieces
    with pytest.raises(MemoryBudgetError, match="largest group"):
        plan_auto(np.array(LONG), cost, pieces=False)


@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_a_number_of_pieces_may_be_given(pieces):
    plan = plan_pieces(np.array([400_000, 5_000]), cost_of(), pieces=pieces)
    spans = [span for each in plan.pipelines[0].rounds for span in each.by_stage[0].spans() if span.document == 0]
    assert len(spans) == pieces and plan.has_pieces


def test_ranks_of_unequal_speed_run_pieces_as_long_as_the_slowest_takes():
    cost, lengths = cost_of(), np.array([3_000_000])
    slower = cost.with_speeds([1.0] * 7 + [0.5])
    plan = make_plan("auto", lengths, slower)
    assert plan.planner == "pieces" and predicted_ns(plan, slower) > 1.5 * predicted_ns(plan, cost)


def test_what_cannot_be_is_refused():
    with pytest.raises(SeqloomError, match="9 pieces of a longest sequence of 4 tokens; give 1 to 4"):
        plan_pieces(np.array([4]), cost_of(), pieces=9)
    spec = replace(ModelSpec.load("qwen2.5-0.5b"), causal=False)
    with pytest.raises(SeqloomError, match="not causal: tokens of a piece would see later pieces"):
        plan_pieces(np.array([4]), cost_model("1x8xL40S", spec))


PAGE = (Path(__file__).parents[4] / "docs" / "planning.md").read_text()
ROWS = {
    "qwen2.5-0.5b, 8xL40S, sharding none": (("1x8xL40S", "qwen2.5-0.5b", "none", "auto"), 2_000_000),
    "the same, `--offload false` | 3M": (("1x8xL40S", "qwen2.5-0.5b", "none", False), 3_000_000),
    "the same, `--offload false` | 4M": (("1x8xL40S", "qwen2.5-0.5b", "none", False), 4_000_000),
    "qwen2.5-7b, 8xH100, `--offload false`": (("1x8xH100", "qwen2.5-7b", "full", False), 1_000_000),
    "the same, activations in host memory": (("1x8xH100", "qwen2.5-7b", "full", "auto"), 1_000_000),
    "llama3-8b, 8xH100": (("1x8xH100", "llama3-8b", "full", "auto"), 400_000),
}


def seconds(planner, lengths, cost):
    try:
        return f"{predicted_ns(make_plan(planner, lengths, cost), cost) / 1e9:,.0f} s"
    except MemoryBudgetError:
        return "not held"


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_figures_of_the_page(name):
    (cluster, model, sharding, offload), longest = ROWS[name]
    cost, lengths = cost_model(cluster, model, sharding=sharding, offload=offload), np.array([longest, *[900] * 40])
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    whole, pieces = (cell.strip() for cell in row.split("|")[3:5])
    assert whole.partition(" (")[0] == seconds("flex", lengths, cost) and pieces == seconds("pieces", lengths, cost)
