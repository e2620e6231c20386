"""slime's own schedule against ours; its code is in no package, so these tests need a checkout."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.integrations.balancing import attention_work, slime_schedule
from support.host_balancers import lockstep

pytestmark = pytest.mark.plugins
CAP = 1_024


@pytest.fixture(scope="module", autouse=True)
def checkout():
    reason = (
        "no slime here: slime on PyPI is an empty placeholder; name a checkout of github.com/THUDM/slime: "
        "python tests/plugins/run.py slime --source slime=FOLDER"
    )
    pytest.importorskip("slime.utils.dp_schedule", reason=reason)


def by_rank(schedule, step):
    """Samples of the micro-batches of every rank in a step."""
    partitions, batches, counts, _ = schedule
    first, last = sum(counts[:step]), sum(counts[: step + 1])
    return [
        [[part[i] for i in batch] for batch in own[first:last]] for part, own in zip(partitions, batches, strict=True)
    ]


@given(st.lists(st.integers(1, CAP), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_schedules_are_as_slime_has_them_and_never_slower(lengths, ranks, samples, group):
    from slime.utils.dp_schedule import build_dp_schedule

    lengths = lengths + [2] * (2 * ranks * group * samples)
    rollouts = [i // samples for i in range(len(lengths))]
    size = max(rollouts[-1] // 2, -(-2 * ranks * group // samples))
    config = {"dp_size": ranks, "cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": group}
    options = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": CAP // 2, "micro_batch_size": None}
    args = SimpleNamespace(**options, balance_data=False, balance_by_flops=False)
    given = {"global_batch_size": min(size, rollouts[-1] + 1), "rollout_indices": rollouts}
    theirs, ours = (make(args, config, lengths, **given) for make in (build_dp_schedule, slime_schedule))
    assert ours[3] == theirs[3] and len(ours[2]) == len(theirs[2])
    weights = attention_work(lengths)
    for step in range(len(ours[2])):
        mine, rival = by_rank(ours, step), by_rank(theirs, step)
        placed = [sorted(i for rank in found for batch in rank for i in batch) for found in (mine, rival)]
        assert placed[0] == placed[1] and ours[2][step] % group == 0
        assert all(batch and sum(lengths[i] for i in batch) <= CAP for rank in mine for batch in rank)
        assert lockstep(mine, weights) <= lockstep(rival, weights)
