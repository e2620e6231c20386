"""docs/experts.md: its commands run, its figure is what EP groups do, and its line is the one that `plan` prints."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch

from seqloom.dist import run_ranks
from seqloom.dist.expert_parallel import EPGroup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "experts.md").read_text()
PLANS, RUNS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def drawing():
    """The script that draws the figure."""
    spec = importlib.util.spec_from_file_location("experts_picture", DOCS / "experts_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_and_its_text_are_what_the_script_draws(drawing):
    assert (DOCS / "experts.svg").read_text() == drawing.picture(), "run: python docs/experts_picture.py"
    assert drawing.renewed(PAGE) == PAGE, "run: python docs/experts_picture.py"
    assert "](experts.svg)" in PAGE


def test_the_rows_of_the_figure_are_those_that_ep_groups_send(drawing):
    """Every token carries its rank and number through dispatch."""

    def body(transport):
        rank, degree = transport.rank, drawing.DEGREE
        first = rank // degree * degree
        group = EPGroup(tuple(range(first, first + degree)), rank - first, transport)
        chosen = torch.tensor(drawing.CHOSEN[rank])
        route = group.route(chosen, drawing.EXPERTS)
        tokens = torch.tensor([(rank, number) for number in range(len(chosen))])
        arrived, experts = route.to_experts(tokens, chosen).wait()
        return arrived.tolist(), experts.tolist(), route.pairs

    for rank, (arrived, experts, pairs) in enumerate(run_ranks(drawing.RANKS, body)):
        own, wanted = drawing.own_experts(rank), drawing.arriving(rank)
        here = [tuple(expert for expert in every if expert in own) for every in experts]
        assert [(*token, some) for token, some in zip(arrived, here, strict=True)] == wanted
        assert pairs == sum(len(some) for *_, some in wanted)


@pytest.mark.slow
def test_the_planning_commands_run_and_print_the_line_of_the_page(run_block):
    said = " ".join(run_block("sh", PLANS).split())
    [line] = re.findall(r"^    (expert degree 8.*)$", PAGE, re.MULTILINE)
    assert line in said and "expert degree 1, 128 of 128 experts" in said
    assert "speed-up" in said


@pytest.mark.slow
def test_the_training_commands_run(run_block, tmp_path):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    said = run_block("sh", RUNS)
    assert said.count(" same ") == 1 and "differs" not in said
    assert "4 steps, loss" in said and (tmp_path / "experts" / "metrics.jsonl").exists()
