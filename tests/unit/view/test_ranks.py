"""The chart of ranks: a letter per config, capital and small in turn, nodes apart; and the table of balance."""

from io import StringIO

from rich.console import Console

from seqloom.packing import Balance
from seqloom.planners.hydraulis import ParallelConfig, PipelineConfig, Strategy
from seqloom.view import balance_table, rank_chart

WIDE, PAIR, ONE = ParallelConfig(2, 2), ParallelConfig(1, 1, 2), ParallelConfig(1, 1, 1, 1)


def strategy(*pipes):
    return Strategy(tuple(PipelineConfig(config, tuple(ranks), 100) for config, ranks in pipes))


def lines_of(renderable, width=80):
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_letters_of_ranks_and_their_legend():
    mixed = strategy((WIDE, range(4)), (PAIR, (6, 7)), (ONE, (4,)))
    others = strategy((PAIR, (0, 1)), (PAIR, (2, 3)), (WIDE, range(4, 8)))
    assert lines_of(rank_chart([mixed, others], node_size=4)) == [
        "0  AAAA c.BB",  # rank 5 is in no pipeline
        "1  BBbb AAAA",
        "",
        "A  2x2: tensor 2, 2 stages",
        "B  1x1u2: tensor 1, 1 stage, Ulysses 2",
        "C  1x1: tensor 1, 1 stage",
    ]


def test_as_many_whole_nodes_in_a_line_as_fit():
    many = strategy(*((PAIR, (k, k + 1)) for k in range(0, 12, 2)))
    assert lines_of(rank_chart([many], node_size=4), width=14)[:3] == ["0  AAaa AAaa", "   AAaa", ""]
    assert lines_of(rank_chart([many], node_size=4), width=12)[:3] == ["0  AAaa", "   AAaa", "   AAaa"]


def test_figures_of_balance():
    rows = lines_of(balance_table({"hbp": Balance(0.001, 0.02, 0.5, 1, 4, 2.5e6), "flex": Balance(0, 0, 0, 0, 1, 1e6)}))
    cells = [line.split() for line in rows if line.split()[:1] in (["hbp"], ["flex"])]
    assert cells == [
        ["hbp", "0.1", "2.0", "50.0", "100.0", "4", "2.500", "10.00"],
        ["flex", "0.0", "0.0", "0.0", "0.0", "1", "1.000", "1.000"],
    ]
