"""Ranks agree before anything is built: rank 0 chooses, and one that differs is named on all of them."""

from pathlib import Path

import pytest

from seqloom.dist import JobRank
from seqloom.errors import SeqloomError
from seqloom.train import launch
from seqloom.train.config import Config, Pipelining
from seqloom.train.setup import RunChoices
from seqloom.version import __version__

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny-cpu.toml"
SMALL = ("data.source=toy:24", "data.max_length=96", "plan.capacity=128")


def on_one_node(transport):
    return JobRank(transport.rank, transport.ranks, transport.rank, transport.ranks)


def loaded(transport, changes, version=None):
    """The choices of a rank, or what it says; `changes` are those of the last rank."""
    last = transport.rank == transport.ranks - 1
    launch.__version__ = version if last and version is not None else __version__
    try:
        config = Config.load(RECIPE, [*SMALL, *(changes if last else ())])
        return launch.load_alike(config, on_one_node(transport)).choices
    except SeqloomError as error:
        return str(error)
    finally:
        launch.__version__ = __version__


@pytest.mark.parametrize(
    ("changes", "version", "words"),
    [
        (
            ("optimiser.lr=0.5",),
            None,
            "rank 7 differs from rank 0: optimiser.lr = 0.5, not 0.002; start all",
        ),
        (("data.source=toy:25",), None, "rank 7 differs from rank 0: data.source"),
        ((), "9.9", "rank 7 differs from rank 0: Seqloom's version = 9.9, not "),
    ],
)
def test_a_rank_that_differs_is_named_on_all(gloo_pool, changes, version, words):
    for found in gloo_pool.run(loaded, changes, version):
        assert str(found).startswith(words), found


def test_rank_0_chooses(gloo_pool):
    found = gloo_pool.run(loaded, ())
    assert found == [RunChoices(Config.load(RECIPE, SMALL).data, Pipelining(), ())] * 8


def prepared(transport, folder):
    """Every rank's store of a file that the config names, and what it was told; every sign of progress is sent."""
    before, launch.PROGRESS_S, shown = launch.PROGRESS_S, -1.0, []
    try:
        words = (f"data.source={folder / 'a.jsonl'}", "data.tokenizer=bytes", f"run.output={folder / 'run'}")
        config = Config.load(RECIPE, [*SMALL, *words])
        return launch.load_alike(config, on_one_node(transport), show=shown.append).config.data, shown
    finally:
        launch.PROGRESS_S = before


def test_rank_0_prepares_documents_and_says_so_meanwhile(gloo_pool, tmp_path):
    lines = [f'{{"text": "{"ab" * (1 + k % 40)}"}}' for k in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = gloo_pool.run(prepared, tmp_path)
    stores, shown = {data.source for data, _ in found}, [told for _, told in found]
    [store] = stores
    assert store.parent == tmp_path / "run" / "data" and (store / "meta.json").is_file()
    assert shown == [shown[0]] * 8 and shown[0][0] == "preparing a.jsonl" and "60 documents" in shown[0][-1]
    again = gloo_pool.run(prepared, tmp_path)
    assert {data.source for data, _ in again} == stores and "are prepared in" in again[0][1][-1]


def test_what_rank_0_refuses_all_refuse(gloo_pool):
    found = gloo_pool.run(refused)
    assert len(set(found)) == 1 and "plan.cluster = '1x3xCPU' has 3 ranks" in found[0]


def refused(transport):
    try:
        launch.load_alike(Config.load(RECIPE, [*SMALL, "plan.cluster=1x3xCPU"]), on_one_node(transport))
    except SeqloomError as error:
        return str(error)


def on_nodes(transport, sizes, changes=()):
    """The cluster that a rank plans for, when nodes of these sizes have been launched, or what it says."""
    node = [(local, size) for size in sizes for local in range(size)][transport.rank]
    job_rank = JobRank(transport.rank, transport.ranks, *node)
    try:
        return launch.load_alike(Config.load(RECIPE, [*SMALL, *changes]), job_rank).cost.cluster.spelling
    except SeqloomError as error:
        return str(error)


def test_the_nodes_of_the_launcher_are_those_of_the_plans(gloo_pool):
    assert gloo_pool.run(on_nodes, (4, 4)) == ["2x4xCPU"] * 8
    assert gloo_pool.run(on_nodes, (4, 4), ("plan.cluster=1x8xCPU",)) == ["8xCPU"] * 8, "a name wins"
    assert gloo_pool.run(on_nodes, (3, 5), ("plan.cluster=1x8xCPU",)) == ["8xCPU"] * 8


def test_nodes_of_different_size_have_to_be_named(gloo_pool):
    found = gloo_pool.run(on_nodes, (3, 5))
    assert len(set(found)) == 1 and found[0].startswith(
        "nodes with different numbers of ranks (3 and 5): start equally"
    )
