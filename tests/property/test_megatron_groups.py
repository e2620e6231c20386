"""Schedules for Megatron's dynamic context parallelism: within its output rules, and never slower than its own."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.errors import SeqloomError
from seqloom.integrations.megatron import _by_rank, _Group, _legal, _Prices, dynamic_cp_groups, packed_sequences
from seqloom.planners.published.megatron import group_sizes, micro_batches

CAP = 2_048
COSTS = {ranks: cost_model(f"1x{ranks}xH100", "qwen3-1.7b", sharding="none") for ranks in (1, 4, 6, 8)}


@st.composite
def batches(draw, multiple=1):
    """Draw ranks, and (id, padded length) of samples, some of them longer than a rank holds."""
    ranks = draw(st.sampled_from(sorted(COSTS)))
    units = st.one_of(st.integers(1, 20), st.integers(1, CAP * ranks // 48))
    lengths = [48 * each for each in draw(st.lists(units, min_size=multiple, max_size=24))]
    return ranks, [(7 * number + 3, length) for number, length in enumerate(lengths)]


def check_rules(schedule, samples, ranks, smallest=1):
    lengths = dict(samples)
    for batch in schedule:
        assert len(batch) == ranks and all(batch)
        size_of = Counter(map(tuple, batch))
        assert sum(size_of.values()) == ranks
        for members, size in size_of.items():
            first = batch.index([*members])
            assert batch[first : first + size] == [[*members]] * size  # neighbours
            assert size == ranks or (size & (size - 1) == 0 and first % size == 0)
            assert size >= smallest and sum(lengths[i] for i in members) <= CAP * size
            assert sum(listed[0] == members[0] for listed in batch) == size  # what local_cp_size counts
    placed = [i for batch in schedule for members in {tuple(listed) for listed in batch} for i in members]
    assert sorted(placed) == sorted(lengths)


@given(batches())
def test_output_rules(drawn):
    ranks, samples = drawn
    schedule = dynamic_cp_groups(samples, COSTS[ranks], max_seqlen_per_dp_cp_rank=CAP)
    check_rules(schedule, samples, ranks)
    assert schedule == dynamic_cp_groups(samples, COSTS[ranks], max_seqlen_per_dp_cp_rank=CAP)


@given(batches(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]))
def test_interleaved_pipelines_and_the_smallest_group(drawn, multiple, smallest):
    ranks, samples = drawn
    samples += [(1_000 + each, 48) for each in range(multiple * len(samples))]  # so many that a multiple exists
    smallest = min(ranks, smallest)
    schedule = dynamic_cp_groups(
        samples,
        COSTS[ranks],
        max_seqlen_per_dp_cp_rank=CAP,
        min_cp_size=smallest,
        microbatch_group_size_per_vp_stage=multiple,
    )
    assert len(schedule) % multiple == 0
    check_rules(schedule, samples, ranks, smallest)


@given(batches())
def test_never_slower_than_megatrons_own(drawn):
    ranks, samples = drawn
    lengths = np.array([length for _, length in samples])
    prices = _Prices.of(COSTS[ranks], lengths, group_sizes(ranks), CAP)

    def step_ns(batches):
        return prices.step_ns([[_Group(size, [*members]) for members, size in batch.items()] for batch in batches])

    rival = [{tuple(each.documents): len(each.ranks) for each in batch} for batch in micro_batches(lengths, CAP, ranks)]
    place = {sample: number for number, (sample, _) in enumerate(samples)}
    schedule = dynamic_cp_groups(samples, COSTS[ranks], max_seqlen_per_dp_cp_rank=CAP)
    found = [Counter(tuple(place[i] for i in listed) for listed in batch) for batch in schedule]
    assert step_ns(found) <= step_ns(rival)


def test_a_domain_of_six_ranks_takes_what_fits():
    """Megatron refuses 32,770 tokens on six ranks of 8,192: more than four ranks hold, and eight there are not."""
    schedule = dynamic_cp_groups([(0, 32_784)], COSTS[6], max_seqlen_per_dp_cp_rank=8_192)
    assert schedule == [[[0]] * 6]


def test_samples_that_fill_micro_batches_alone_and_make_no_multiple():
    with pytest.raises(SeqloomError, match="too few of them can share or be alone"):
        dynamic_cp_groups(
            [(each, 4 * CAP) for each in range(3)],
            COSTS[4],
            max_seqlen_per_dp_cp_rank=CAP,
            microbatch_group_size_per_vp_stage=2,
        )


def test_packed_data_of_a_rank():
    schedule = dynamic_cp_groups([(5, 4_096), (6, 960), (8, 96)], COSTS[4], max_seqlen_per_dp_cp_rank=CAP)
    (batch,) = schedule
    lengths = {5: 4_090, 6: 953, 8: 96}
    padded = {5: 4_096, 6: 960, 8: 96}
    for rank, members in enumerate(batch):
        packed = packed_sequences(batch, rank, lengths, padded)
        assert list(packed.sample_ids) == members and rank in packed.cp_ranks
        assert packed.local_cp_size == len(packed.cp_ranks) == batch.count(members)
        assert np.diff(packed.cu_seqlens_q).tolist() == [lengths[i] for i in members]
        assert np.diff(packed.cu_seqlens_kv_padded).tolist() == [padded[i] for i in members]
        assert packed.max_seqlen_q == max(padded[i] for i in members) and packed.qkv_format == "thd"
    with pytest.raises(SeqloomError, match="a multiple of 8; pad to 16"):
        packed_sequences([[0]] * 4, 1, {0: 9})


@pytest.mark.parametrize(
    ("samples", "options", "words"),
    [
        ([], {}, "0 samples"),
        ([(1, 5), (1, 6)], {}, "2 samples with 1 ids"),
        ([(1, 0)], {}, "a sample of 0 tokens"),
        ([(1, 4 * CAP + 1)], {}, "raise max_seqlen_per_dp_cp_rank"),
        ([(1, 5)], {"min_cp_size": 3}, "a group has 1, 2, 4"),
        ([(1, 5)], {"microbatch_group_size_per_vp_stage": 2}, "1 samples for micro-batches in multiples of 2"),
    ],
)
def test_what_is_refused(samples, options, words):
    with pytest.raises(SeqloomError, match=words):
        dynamic_cp_groups(samples, COSTS[4], max_seqlen_per_dp_cp_rank=CAP, **options)


def test_legal_sizes_of_planned_groups():
    """Groups of three ranks become four, and one that does not fit any more waits for the next micro-batch."""
    lengths = np.array([3 * CAP, 3 * CAP, CAP, CAP, 48])
    prices = _Prices.of(COSTS[8], lengths, group_sizes(8), CAP)
    legal = _legal([[_Group(3, [0]), _Group(3, [1]), _Group(1, [2]), _Group(1, [3, 4][:1])], [_Group(2, [4])]], prices)
    samples = [(number, int(length)) for number, length in enumerate(lengths)]
    check_rules([_by_rank(batch, [*range(5)]) for batch in legal], samples, 8)
