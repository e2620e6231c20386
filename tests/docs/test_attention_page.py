"""docs/attention.md says what the engine does: figures, traffic, kernels and the example are checked against it."""

import importlib.util
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from seqloom.attention import attention
from seqloom.attention.kernels.dispatch import KERNELS
from seqloom.attention.tiles import ZigzagChunks, ring_tiles
from seqloom.cost import Profile
from seqloom.cost.communication import Communication
from seqloom.cost.shapes import GroupShape
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import run_ranks
from seqloom.dist.rank_tokens import bind
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch
from support.transports import CountingTransport

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "attention.md").read_text()
HEADS, KV_HEADS, DIM = 4, 2, 64


def between(marker: str) -> str:
    """The text of the page between `<!-- marker -->` and `<!-- /marker -->`."""
    return PAGE.split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0]


@pytest.fixture(scope="module")
def drawing():
    """The script that draws who holds what."""
    spec = importlib.util.spec_from_file_location("attention_2x2", DOCS / "attention_2x2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- who holds what -----------------------------------------------------------------------------------------------


def test_figures_and_support_matrix_are_those_of_the_code(drawing):
    assert drawing.renewed(PAGE) == PAGE, "run: python docs/attention_2x2.py"
    assert drawing.holdings().splitlines()[1].strip() in between("holdings")
    assert drawing.tiles().splitlines()[2].strip() in between("tiles")


def test_the_picture_is_what_its_script_draws(drawing):
    assert (DOCS / "attention-2x2.svg").read_text() == drawing.picture(), "run: python docs/attention_2x2.py"
    assert "](attention-2x2.svg)" in PAGE


def test_the_steps_of_the_figure_are_those_of_the_ring(drawing):
    """Every pair of tokens of document A that the ring computes, by the step in which it does."""
    group = Group(drawing.GROUP.ranks, drawing.GROUP.ulysses, drawing.GROUP.ring, drawing.GROUP.spans[:1])
    chunks = [ZigzagChunks.of(group, index) for index in range(group.ring)]
    tokens = [
        [t for _, start, stop in group.ring_spans(index) for t in range(start, stop)] for index in range(group.ring)
    ]
    found = {}
    for index, step in product(range(group.ring), repeat=2):
        other = (index - step) % group.ring
        for tile in ring_tiles(chunks[index], chunks[other], causal=True, window=None):
            queries, keys = tokens[index][tile.queries], tokens[other][tile.keys]
            for q_start, q_stop, k_start, k_stop, _ in tile.segments.rows():
                pairs = product(queries[q_start:q_stop], keys[k_start:k_stop])
                found |= {(q, k): step for q, k in pairs if not tile.segments.causal or k <= q}
    size = group.tokens // drawing.CHUNKS
    drawn = {(q, k): drawing.step(q // size, k // size) for q in range(group.tokens) for k in range(q + 1)}
    assert found == drawn


# -- traffic ------------------------------------------------------------------------------------------------------


def counted(group: Group) -> list[dict]:
    """Calls and bytes by verb that every rank counts in forward and backward of one attention in bf16."""

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), counting)
        shapes = [(context.tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        out = attention(q, k, v, context)
        forward = {verb: counting.traffic(verb).calls for verb in ("all_to_all", "exchange")}
        out.backward(torch.ones_like(out))
        both = {verb: counting.traffic(verb) for verb in ("all_to_all", "exchange")}
        return {verb: (forward[verb], both[verb].calls - forward[verb], both[verb].bytes) for verb in both}

    return run_ranks(group.degree, body)


def even_group(ulysses: int, ring: int) -> Group:
    """Tokens divide by everything, so that all ranks are alike."""
    spans = (Span(0, 0, 16 * ulysses * ring), Span(1, 0, 8 * ulysses * ring))
    return Group(tuple(range(ulysses * ring)), ulysses, ring, spans)


@pytest.mark.parametrize(("u", "r"), [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 3)])
def test_calls_and_bytes_are_those_of_the_table_and_of_the_cost_model(u, r):
    group = even_group(u, r)
    tokens, kv = group.tokens, u * -(-KV_HEADS // u)
    exchanged = 4 * (HEADS + kv) * DIM * 2 * tokens // (u * r) * (u - 1) // u
    passed = 2 * kv * DIM * tokens // (u * r) * (2 * (r - 1) * 2 + 4 * r) if r > 1 else 0
    calls = {"all_to_all": (2, 2) if u > 1 else (0, 0), "exchange": (r - 1, r + 1) if r > 1 else (0, 0)}
    for rank in counted(group):
        assert rank == {"all_to_all": (*calls["all_to_all"], exchanged), "exchange": (*calls["exchange"], passed)}

    fields = {"layers": 1, "hidden": 1, "ffn": 1, "gated": True, "vocabulary": 1, "tied": True, "head_dim": DIM}
    model = ModelSpec(name="one layer", heads=HEADS, kv_heads=KV_HEADS, **fields)
    links = Communication(Profile.load("h200"), Cluster.parse("1x8xH200"), model)
    assert round(links.ulysses_bytes(GroupShape(u, r), Checkpoint.NONE) * tokens * (u - 1) / u) == exchanged
    assert r == 1 or round(links.ring_bytes(GroupShape(u, r), Checkpoint.NONE) * tokens) == passed


def test_a_gather_takes_three_exchanges_and_at_most_the_bytes_of_the_table():
    group = even_group(2, 2)
    most = 2 * KV_HEADS * DIM * group.tokens // 4 * (2 * 2 + 4) * (2 - 1)
    sent = [rank["exchange"] for rank in counted(replace(group, method=Method.GATHER))]
    assert {(ahead, back) for ahead, back, _ in sent} == {(1, 2)}
    assert 0 < max(size for *_, size in sent) <= most


def test_the_figures_of_the_picture_are_counted(drawing):
    ranks = counted(drawing.GROUP)
    assert all(rank == ranks[0] for rank in ranks)
    (there, back, swapped), (ahead, home, passed) = ranks[0]["all_to_all"], ranks[0]["exchange"]
    words = f"{swapped:,} bytes in {there + back} all-to-all and {passed:,} bytes in {ahead + home} exchanges"
    assert " ".join(between("counted").split()) == words


# -- kernels, example, files --------------------------------------------------------------------------------------


def test_the_support_matrix_is_what_the_kernels_answer(drawing):
    assert between("support").strip() == drawing.support_matrix().strip()
    head, _, *lines = drawing.support_matrix().splitlines()
    names = [cell.strip() for cell in head.split("|")[2:-1]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    matrix = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    assert names == [*KERNELS, "engine"]
    assert {name for name, cell in matrix["CPU"].items() if cell == "supported"} == {"cpu_flash", "reference", "engine"}
    assert matrix["any offset"]["fa4"] == "refused"
    dropping = {name for name, cell in matrix["dropout of attention weights"].items() if cell == "supported"}
    assert dropping == {"triton", "reference", "engine"}


def test_every_kernel_is_explained_in_the_order_of_preference():
    table = PAGE[PAGE.index("| kernel | what it is |") : PAGE.index("The dispatcher is itself")]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(KERNELS)


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
def test_the_example_runs(block, run_block):
    lines = run_block("python", block).splitlines()
    assert [line.split("|")[0] for line in lines] == [
        "0 0[0:4) 0[12:14) ",
        "1 0[14:16) 1[0:2) 1[6:8) ",
        "2 0[4:10) ",
        "3 0[10:12) 1[2:6) ",
    ]
    assert all(float(line.split()[-1]) > 0 for line in lines)
