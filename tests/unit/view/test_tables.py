"""Tables: what stands in which row and column, and that columns line up; histogram of lengths and chart of ranks."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.packing import Balance
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, StageMicroBatch
from seqloom.planners.hydraulis import ParallelConfig, PipelineConfig, Strategy
from seqloom.simulate import simulate
from seqloom.view import LengthHistogram, RankChart, balance_table, comparison_table, plan_table
from seqloom.view.format import milliseconds, percent
from seqloom.view.tables import buckets, degree_text, groups_of_round
from support.console import text_of

VARIANT = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)
DOCUMENTS = [60000, 1000, 30000]


def small():
    cost = CostModel(Cluster.parse("2x4xH200"), ModelSpec.load("qwen3-4b"))
    rounds = []
    for entries in ([(0, 4, 0), (4, 1, 1)], [(4, 4, 2)]):
        groups = tuple(Group(tuple(range(a, a + d)), d, 1, (Span(k, 0, DOCUMENTS[k]),)) for a, d, k in entries)
        rounds.append(Round((StageMicroBatch(groups, VARIANT.checkpoint),)))
    pipeline = Pipeline.single(range(8), cost.model.layers, rounds, VARIANT.reduce)
    plan = Plan(cost.limits(VARIANT.reduce), cost.sharding, VARIANT.reduce, tuple(DOCUMENTS), (pipeline,), "test")
    return plan, simulate(plan, cost)


def aligned(lines, header):
    """Numbers end where their heading ends."""
    ends = {name: header.index(name) + len(name) for name in ("tokens", "longest", "ms", "idle %", "comm %")}
    for line in lines:
        for name, end in ends.items():
            assert line[end - 1].isdigit(), (name, line)
            assert end == len(line.rstrip("| ")) or line[end] in " |", (name, line)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_plan_table(ascii_only):
    plan, simulation = small()
    text = text_of(plan_table(plan, simulation), ascii_only=ascii_only)
    lines = [line for line in text.splitlines() if line.strip("|+-─ ")]
    header, *rows, legend, below = lines
    assert legend.strip() == "groups: 2 of 4 are two groups of four ranks each"
    assert below.strip() == "recomputed: round 0 to 1 selective"
    names = header.replace("|", " ").split()
    assert " ".join(names) == "round groups tokens longest ms idle % comm %"
    assert [row.replace("|", " ").split()[0] for row in rows] == ["0", "1", "step"]
    first = rows[0].replace("|", " ").replace("1 of 4, 1 of 1", "groups").split()
    assert first[1:4] == ["groups", "61,000", "60,000"]
    assert first[4] == milliseconds(simulation.rounds[0].time_ns)
    assert rows[2].replace("|", " ").split()[-3:] == [
        milliseconds(simulation.step_ns),
        percent(simulation.idle_share),
        percent(simulation.comm_share),
    ]
    aligned(rows, header)
    assert text.isascii() == ascii_only


def test_a_narrow_terminal_folds_the_groups_only():
    plan, simulation = small()
    text = text_of(plan_table(plan, simulation), width=50)
    assert max(map(len, text.splitlines())) <= 50
    assert "61,000" in text and "comm %" in text


def test_what_rounds_recompute_stands_below():
    plan, simulation = small()
    first, second = (current.by_stage[0] for current in plan.pipelines[0].rounds)

    def below(*works):
        changed = replace(plan.pipelines[0], rounds=tuple(Round((work,)) for work in works))
        legend, _, lines = plan_table(replace(plan, pipelines=(changed,)), simulation).caption.partition("\n")
        assert legend == "groups: 2 of 4 are two groups of four ranks each"
        return lines

    none, full = (
        replace(first, checkpoint=Checkpoint.NONE),
        replace(second, checkpoint=Checkpoint.FULL, offloaded_layers=2),
    )
    assert below(none, replace(second, checkpoint=Checkpoint.NONE)) == ""
    assert below(none, full) == "recomputed: round 1 full, 2 layers offloaded"
    mixed = "recomputed: round 0 selective, 5 layers none; round 1 full, 2 layers offloaded"
    assert below(replace(first, lighter_layers=5), full) == mixed


def test_groups_are_counted_by_degree_the_widest_first():
    span = (Span(0, 0, 10),)
    groups = [Group((0,), 1, 1, span), Group((1, 2), 2, 1, span), Group((3, 4), 1, 2, span)]
    assert degree_text(groups) == "2 of 2, 1 of 1"
    work = StageMicroBatch(tuple(groups), Checkpoint.NONE)
    other = StageMicroBatch((groups[0],), Checkpoint.NONE)
    assert groups_of_round(Round((work, work))) == "2 of 2, 1 of 1"
    assert groups_of_round(Round((work, other))) == "2 of 2, 1 of 1 | 1 of 1"


def figures(step, plan_ms):
    return {
        "step_ms": step,
        "bound_ms": [80.0, 160.0],
        "plan_ms": plan_ms,
        "rounds": [3, 4],
        "comm_share": [0.1, 0.2],
        "idle_share": [0.3, 0.1],
        "peak_memory_gib": [20.0, 25.25],
        "plan_hash": ["a", "b"],
    }


def test_comparison_table():
    results = {"static": figures([100.0, 200.0], [1.0, 3.0]), "flex": figures([80.0, 168.0], [None, None])}
    text = text_of(comparison_table(results))
    header, _, static, flex = [line for line in text.splitlines() if line.strip()]
    names = "planner step ms speed-up gap % rounds comm % idle % peak GiB plan ms"
    assert " ".join(header.split()) == names
    assert static.split() == ["static", "150.0", "1.00x", "25.0", "3.5", "15.0", "20.0", "25.2", "2.000"]
    assert flex.split() == ["flex", "124.0", "1.21x", "2.5", "3.5", "15.0", "20.0", "25.2", "-"]
    for name in ("step ms", "speed-up", "gap %", "peak GiB", "plan ms"):
        end = header.index(name) + len(name)
        assert static[end - 1] != " " and flex[end - 1] != " "
    assert max(map(len, text.splitlines())) <= 80
    starred = text_of(comparison_table(results, ["flex"]))
    assert "flex *" in starred and "static *" not in starred


def test_buckets_are_powers_of_two_without_holes():
    found = buckets([1, 1024, 1025, 2047, 4096])
    assert [bucket.low for bucket in found] == [1 << k for k in range(13)]
    by_low = {bucket.low: bucket for bucket in found}
    assert by_low[1024].sequences == pytest.approx(0.6) and by_low[2048].sequences == 0
    assert sum(bucket.sequences for bucket in found) == pytest.approx(1)
    assert sum(bucket.tokens for bucket in found) == pytest.approx(1)
    assert by_low[4096].tokens == pytest.approx(4096 / (1 + 1024 + 1025 + 2047 + 4096))


def test_histogram():
    text = text_of(LengthHistogram(np.array([600] * 9 + [60000])))
    header, _, *rows = [line for line in text.splitlines() if line.strip()]
    assert header.split() == ["length", "sequences", "%", "tokens", "%"]
    labels = ["512-1K", "1K-2K", "2K-4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K"]
    assert [row.split()[0] for row in rows] == labels
    assert rows[0].split()[1] == "90.0" and rows[-1].split()[1] == "10.0"
    assert rows[-1].count("█") > rows[0].split()[-1].count("█")
    ends = {row.index(".") for row in rows}
    assert len(ends) == 1  # decimal points line up


@pytest.mark.parametrize("width", [50, 80, 200])
def test_histogram_in_any_width_and_ascii(width):
    text = text_of(LengthHistogram([100, 5000, 131072]), width=width, ascii_only=True)
    assert text.isascii() and "#" in text and "128K-256K" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_histogram_of_no_lengths():
    assert "tokens" in text_of(LengthHistogram([]))


WIDE, PAIR, ONE = ParallelConfig(2, 2), ParallelConfig(1, 1, 2), ParallelConfig(1, 1, 1, 1)


def strategy(*pipes):
    return Strategy(tuple(PipelineConfig(config, tuple(ranks), 100) for config, ranks in pipes))


def lines_of(renderable, width=80):
    return [line.rstrip() for line in text_of(renderable, width).splitlines()]


def test_letters_of_ranks_and_their_legend():
    mixed = strategy((WIDE, range(4)), (PAIR, (6, 7)), (ONE, (4,)))
    others = strategy((PAIR, (0, 1)), (PAIR, (2, 3)), (WIDE, range(4, 8)))
    assert lines_of(RankChart([mixed, others], node_size=4)) == [
        "0  AAAA c.BB",  # rank 5 is in no pipeline
        "1  BBbb AAAA",
        "",
        "A  t2p2: tensor 2, 2 stages",
        "B  t1p1u2: tensor 1, 1 stage, Ulysses 2",
        "C  t1p1: tensor 1, 1 stage",
    ]


def test_as_many_whole_nodes_in_a_line_as_fit():
    many = strategy(*((PAIR, (k, k + 1)) for k in range(0, 12, 2)))
    assert lines_of(RankChart([many], node_size=4), width=14)[:3] == ["0  AAaa AAaa", "   AAaa", ""]
    assert lines_of(RankChart([many], node_size=4), width=12)[:3] == ["0  AAaa", "   AAaa", "   AAaa"]


def test_figures_of_balance():
    rows = lines_of(balance_table({"hbp": Balance(0.001, 0.02, 0.5, 1, 4, 2.5e6), "flex": Balance(0, 0, 0, 0, 1, 1e6)}))
    cells = [line.split() for line in rows if line.split()[:1] in (["hbp"], ["flex"])]
    assert cells == [
        ["hbp", "0.1", "2.0", "50.0", "100.0", "4", "2.500", "10.00"],
        ["flex", "0.0", "0.0", "0.0", "0.0", "1", "1.000", "1.000"],
    ]
