"""Cluster spellings round-trip; ranks fall into nodes and NICs evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seqloom.describe import DEVICES, Cluster

CLUSTERS = st.builds(Cluster.of, st.integers(1, 200), st.integers(1, 16), st.sampled_from(sorted(DEVICES)))


@given(CLUSTERS, st.sampled_from([str, str.lower, str.upper]))
def test_spelling_round_trips(cluster, change):
    assert cluster.name == cluster.spelling
    assert Cluster.parse(change(cluster.spelling)) == cluster


@given(CLUSTERS)
def test_every_rank_has_a_nic(cluster):
    assert all(0 <= cluster.nic_of(rank) < cluster.nics_per_node for rank in range(cluster.ranks))
