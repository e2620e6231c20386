"""Ranks agree before anything is built: rank 0 chooses, and one that differs is named on all of them."""

from pathlib import Path

import pytest

from seqloom.errors import SeqloomError
from seqloom.train import launch
from seqloom.train.config import Config
from seqloom.train.setup import RunChoices
from seqloom.version import __version__

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny-cpu.toml"
SMALL = ("data.source=toy:24", "data.max_length=96", "plan.capacity=128")


def loaded(transport, changes, version=None):
    """The choices of a rank, or what it says; `changes` are those of the last rank."""
    last = transport.rank == transport.ranks - 1
    launch.__version__ = version if last and version is not None else __version__
    try:
        config = Config.load(RECIPE, [*SMALL, *(changes if last else ())])
        return launch.load_alike(config, transport.rank, transport.ranks).choices
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
    assert found == [RunChoices(1, ())] * 8


def test_what_rank_0_refuses_all_refuse(gloo_pool):
    found = gloo_pool.run(refused)
    assert len(set(found)) == 1 and "plan.cluster = '1x3xCPU' has 3 ranks" in found[0]


def refused(transport):
    try:
        launch.load_alike(Config.load(RECIPE, [*SMALL, "plan.cluster=1x3xCPU"]), transport.rank, transport.ranks)
    except SeqloomError as error:
        return str(error)
