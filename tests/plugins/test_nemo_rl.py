"""NeMo-RL's own packers against ours; its code is in no package, so these tests need a checkout."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.integrations.balancing import attention_work, nemo_rl_bins
from support.host_balancers import lockstep
from support.pages import python_blocks

pytestmark = pytest.mark.plugins
CAP = 1_024
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rl-frameworks.md"


@pytest.fixture(scope="module", autouse=True)
def checkout():
    reason = (
        "no NeMo-RL here: nemo-rl on PyPI is an empty placeholder; name a checkout of github.com/NVIDIA-NeMo/RL: "
        "python tests/plugins/run.py nemo_rl --source nemo_rl=FOLDER"
    )
    pytest.importorskip("nemo_rl.data.packing.algorithms", reason=reason)


@given(st.lists(st.integers(1, CAP), min_size=1, max_size=30), st.integers(1, 6))
def test_bins_are_as_nemo_rl_has_them_and_never_slower(lengths, ranks):
    from nemo_rl.data.packing.algorithms import get_packer

    lengths = lengths + [2] * (2 * ranks)
    theirs = get_packer("first_fit_decreasing", CAP, min_bin_count=ranks, bin_count_multiple=ranks).pack(lengths)
    ours = nemo_rl_bins(lengths, CAP, ranks, ranks)
    for bins in (ours, theirs):
        assert sorted(i for part in bins for i in part) == [*range(len(lengths))] and all(bins)
        assert len(bins) % ranks == 0 and all(sum(lengths[i] for i in part) <= CAP for part in bins)
    weights = attention_work(lengths)
    by_rank, rivals = ([bins[rank::ranks] for rank in range(ranks)] for bins in (ours, theirs))
    assert lockstep(by_rank, weights) <= lockstep(rivals, weights)


def test_the_page_puts_ours_in_the_place_of_nemo_rls(monkeypatch):
    from nemo_rl.data.packing import algorithms

    packer = algorithms.FirstFitDecreasingPacker
    monkeypatch.setattr(packer, "_pack_implementation", packer._pack_implementation)  # put back after the test
    [block] = python_blocks(PAGE, "NeMo-RL")
    exec(block, {})
    lengths = [1_000, 20, 500, 500, 24, 7]
    found = algorithms.get_packer("first_fit_decreasing", CAP, min_bin_count=2, bin_count_multiple=2).pack(lengths)
    assert found == nemo_rl_bins(lengths, CAP, 2, 2)
