"""Tables: what stands in which row and column, and that columns line up."""

from io import StringIO

import pytest
from rich.console import Console

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, StageMicroBatch
from seqloom.simulate import simulate
from seqloom.view import comparison_table, plan_table
from seqloom.view.format import duration, milliseconds, percent, tokens
from seqloom.view.tables import degree_text, groups_of_round

VARIANT = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)
DOCUMENTS = [60000, 1000, 30000]


class Ascii(StringIO):
    encoding = "ascii"


def text_of(renderable, width=80, file=StringIO):
    console = Console(file=file(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    return console.file.getvalue()


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


@pytest.mark.parametrize("file", [StringIO, Ascii])
def test_plan_table(file):
    plan, simulation = small()
    text = text_of(plan_table(plan, simulation), file=file)
    lines = [line for line in text.splitlines() if line.strip("|+-─ ")]
    header, *rows = lines
    names = header.replace("|", " ").split()
    assert " ".join(names) == "round groups tokens longest ms idle % comm %"
    assert [row.replace("|", " ").split()[0] for row in rows] == ["0", "1", "step"]
    first = rows[0].replace("|", " ").split()
    assert first[1:5] == ["1x4", "1x1", "61,000", "60,000"]
    assert first[5] == milliseconds(simulation.rounds[0].time_ns)
    assert rows[2].replace("|", " ").split()[-3:] == [
        milliseconds(simulation.step_ns),
        percent(simulation.idle_share),
        percent(simulation.comm_share),
    ]
    aligned(rows, header)
    if file is Ascii:
        assert text.isascii()


def test_a_narrow_terminal_folds_the_groups_only():
    plan, simulation = small()
    text = text_of(plan_table(plan, simulation), width=50)
    assert max(map(len, text.splitlines())) <= 50
    assert "61,000" in text and "comm %" in text


def test_groups_are_counted_by_degree_the_widest_first():
    span = (Span(0, 0, 10),)
    groups = [Group((0,), 1, 1, span), Group((1, 2), 2, 1, span), Group((3, 4), 1, 2, span)]
    assert degree_text(groups) == "2x2 1x1"
    work = StageMicroBatch(tuple(groups), Checkpoint.NONE)
    other = StageMicroBatch((groups[0],), Checkpoint.NONE)
    assert groups_of_round(Round((work, work))) == "2x2 1x1"
    assert groups_of_round(Round((work, other))) == "2x2 1x1 | 1x1"


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


def test_numbers():
    assert [milliseconds(ns) for ns in (0, 1.5e6, 12.345e6, 123.45e6, 1234.5e6)] == [
        "0.000",
        "1.500",
        "12.35",
        "123.5",
        "1,234",
    ]
    assert [duration(ns) for ns in (5, 1500, 1.5e6, 1.48e9, 4e12)] == [
        "5 ns",
        "1.5 us",
        "1.5 ms",
        "1.48 s",
        "4,000 s",
    ]
    assert [tokens(n) for n in (512, 1024, 1536, 131072, 1 << 20)] == ["512", "1K", "1536", "128K", "1M"]
    assert percent(0.1234) == "12.3"
