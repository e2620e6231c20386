"""SkyRL's own packers against ours: the same rules, and never a slower step."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import SeqloomError
from seqloom.integrations.balancing import attention_work, skyrl_bins
from support.host_balancers import lockstep
from support.pages import python_blocks

pytestmark = pytest.mark.plugins
CAP = 1_024
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rl-frameworks.md"


@pytest.mark.parametrize("algorithm", ["first_fit_decreasing", "balanced"])
@given(st.lists(st.integers(1, CAP), min_size=1, max_size=30), st.integers(1, 6), st.integers(0, 6))
def test_bins_are_as_skyrl_has_them_and_never_slower(algorithm, lengths, ranks, least):
    from skyrl.train.dataset.bin_packing import make_seq_packer

    lengths = lengths + [2] * (least + 2 * ranks)
    theirs = make_seq_packer(algorithm, CAP, least, ranks).pack(lengths)
    ours = skyrl_bins(lengths, CAP, least, ranks)
    for bins in (ours, theirs):
        assert sorted(i for part in bins for i in part) == [*range(len(lengths))] and all(bins)
        assert len(bins) % ranks == 0 and len(bins) >= least
        assert all(sum(lengths[i] for i in part) <= CAP for part in bins)
    weights = attention_work(lengths)
    by_rank, rivals = ([bins[rank::ranks] for rank in range(ranks)] for bins in (ours, theirs))
    assert lockstep(by_rank, weights) <= lockstep(rivals, weights)


def test_the_page_puts_ours_in_the_place_of_skyrls(monkeypatch):
    from skyrl.train.dataset import bin_packing

    monkeypatch.setattr(bin_packing, "_PACKERS", dict(bin_packing._PACKERS))  # put back after the test
    [block] = python_blocks(PAGE, "SkyRL")
    exec(block, {})
    lengths = [1_000, 20, 500, 500, 24, 7]
    for strategy in ("first_fit_decreasing", "balanced"):
        packer = bin_packing.make_seq_packer(strategy, CAP, 2, 2)
        assert packer.pack(lengths) == skyrl_bins(lengths, CAP, 2, 2)
        with pytest.raises(SeqloomError, match=f"a sequence of {CAP + 1} tokens"):
            packer.pack([CAP + 1, 1])
