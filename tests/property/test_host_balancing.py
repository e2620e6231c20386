"""Balances in the place of those of RL frameworks: partition, cap, no empty part, never slower than the host's own."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.errors import SeqloomError
from seqloom.integrations.balancing import (
    attention_work,
    document_work,
    nemo_rl_bins,
    skyrl_bins,
    slime_schedule,
    verl_micro_batches,
    verl_partitions,
)
from support.host_balancers import differencing, first_fit_decreasing, lockstep, slime_bins

CAPACITY = 4_096
lengths_of = st.lists(st.one_of(st.integers(1, 400), st.integers(1, CAPACITY)), min_size=1, max_size=40)


def heaviest(parts, weights):
    return max(sum(weights[i] for i in part) for part in parts)


def check(parts, count, lengths=None, capacity=0):
    """Every sequence once, no empty part, and no part above the cap."""
    assert sorted(i for part in parts for i in part) == list(range(count)) and all(parts)
    if lengths is not None:
        assert all(sum(lengths[i] for i in part) <= capacity for part in parts)


@given(lengths_of, st.integers(1, 9), st.booleans())
def test_verl_partitions(lengths, ranks, equal_size):
    if equal_size:
        lengths = lengths * ranks
    elif len(lengths) < ranks:
        lengths = lengths + [1] * ranks
    weights = attention_work(lengths)
    parts = verl_partitions(lengths, ranks, equal_size, work=attention_work)
    check(parts, len(lengths))
    assert parts == verl_partitions(weights, ranks, equal_size) and all(part == sorted(part) for part in parts)
    assert len(parts) == ranks and (not equal_size or {len(part) for part in parts} == {len(lengths) // ranks})
    assert heaviest(parts, weights) <= heaviest(differencing(weights, ranks, equal_size), weights)


@given(lengths_of, st.integers(1, 4), st.integers(1, 4))
def test_verl_micro_batches(lengths, least, multiple):
    lengths = lengths + [3] * (least + 2 * multiple)
    parts = verl_micro_batches(lengths, CAPACITY, min_num_micro_batch=least, multiple=multiple)
    check(parts, len(lengths), lengths, CAPACITY)
    assert len(parts) >= least and len(parts) % multiple == 0
    weights = attention_work(lengths)
    rival = differencing(weights, len(parts), False)
    if max(sum(lengths[i] for i in part) for part in rival) <= CAPACITY:  # a mere target there
        assert heaviest(parts, weights) <= heaviest(rival, weights)


@pytest.mark.parametrize("pack", [nemo_rl_bins, skyrl_bins])
@given(lengths=lengths_of, ranks=st.integers(1, 6), least=st.integers(0, 8))
def test_bins_of_nemo_rl_and_skyrl(pack, lengths, ranks, least):
    lengths = lengths + [2] * (least + 2 * ranks)
    bins = pack(lengths, CAPACITY, least, ranks)
    check(bins, len(lengths), lengths, CAPACITY)
    assert len(bins) >= least and len(bins) % ranks == 0
    weights = attention_work(lengths)
    rival = first_fit_decreasing(lengths, CAPACITY, least, ranks)
    by_rank, rivals = ([each[rank::ranks] for rank in range(ranks)] for each in (bins, rival))
    assert len(bins) <= len(rival) and lockstep(by_rank, weights) <= lockstep(rivals, weights)


@given(lengths_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_slime_schedule(lengths, ranks, steps, samples, group):
    lengths = lengths + [2] * (2 * ranks * group * steps * samples)
    rollouts = [i // samples for i in range(len(lengths))]
    size = (rollouts[-1] + 1) // steps
    config = {"dp_size": ranks, "cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": group}
    args = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=CAPACITY // 2)
    partitions, batches, counts, sizes = slime_schedule(
        args, config, lengths, global_batch_size=size, rollout_indices=rollouts
    )
    full = (rollouts[-1] + 1) // size
    kept = [i for i, rollout in enumerate(rollouts) if rollout < full * size]
    assert sizes == [size] * full and len(counts) == full and all(count % group == 0 for count in counts)
    assert sorted(i for part in partitions for i in part) == kept
    for part, own in zip(partitions, batches, strict=True):
        assert [i for batch in own for i in batch] == list(range(len(part))) and len(own) == sum(counts)
        assert all(batch and sum(lengths[part[i]] for i in batch) <= CAPACITY for batch in own)
    weights = attention_work(lengths)
    for step, count in enumerate(counts):
        first = sum(counts[:step])
        mine = [
            [[part[i] for i in batch] for batch in own[first : first + count]]
            for part, own in zip(partitions, batches, strict=True)
        ]
        samples_of_step = [i for i in kept if rollouts[i] // size == step]
        assert sorted(i for rank in mine for batch in rank for i in batch) == samples_of_step
        own_lengths = [lengths[i] for i in samples_of_step]
        packed = slime_bins(own_lengths, CAPACITY, ranks * group)
        by_work = sorted(packed, key=lambda part: -sum(attention_work([own_lengths[i] for i in part])))
        for rival in ([packed[rank::ranks] for rank in range(ranks)], [by_work[rank::ranks] for rank in range(ranks)]):
            assert lockstep(mine, weights) <= lockstep(rival, attention_work(own_lengths))


def test_work_by_a_cost_model():
    cost = cost_model("1x8xH200", "llama3-8b")
    work = document_work(cost)
    short, twice, long = work([1_000, 2_000, 100_000])
    assert 2 * short <= twice < 2.2 * short and long > 150 * short
    assert document_work(cost, 2)([100_000])[0] < long
    check(verl_partitions([100, 20_000, 300, 5], 2, False, work=work), 4)
    with pytest.raises(SeqloomError, match="groups of 16 ranks"):
        document_work(cost, 16)


def test_what_is_refused():
    args = SimpleNamespace(use_dynamic_batch_size=False, max_tokens_per_gpu=10)
    config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    dynamic = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    for call, words in {
        (lambda: verl_partitions([1, 2], 3, False)): "2 sequences for 3 parts",
        (lambda: verl_partitions([1, 2, 3], 2, True)): "give 4, or equal_size=False",
        (lambda: verl_micro_batches([5, 11], 10)): "a sequence of 11 tokens with a cap of 10",
        (lambda: nemo_rl_bins([0, 1], 10)): "a sequence of 0 tokens",
        (lambda: skyrl_bins([1, 1], 10, 3)): "2 sequences for 3 parts",
        (lambda: slime_schedule(args, config, [1], global_batch_size=1, rollout_indices=[0])): "is off",
        (lambda: slime_schedule(dynamic, config, [1], global_batch_size=2, rollout_indices=[0])): "1 rollouts for",
    }.items():
        with pytest.raises(SeqloomError, match=words):
            call()


def test_it_imports_neither_torch_nor_a_host():
    import subprocess
    import sys

    code = "import sys, seqloom.integrations.balancing; print({'torch', 'verl', 'nemo_rl', 'slime'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
