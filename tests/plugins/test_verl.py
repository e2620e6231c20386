"""verl's own balancing against ours: the same rules, never a heavier part, and none above the cap."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.integrations.balancing import attention_work, verl_partitions
from support.pages import python_blocks
from support.verl_batches import batch_of

pytestmark = pytest.mark.plugins
CAP = 1_024
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rl-frameworks.md"
lengths_of = st.lists(st.one_of(st.integers(1, 200), st.integers(1, CAP)), min_size=1, max_size=30)


def heaviest(parts, weights):
    return max(sum(weights[i] for i in part) for part in parts)


@given(lengths_of, st.integers(1, 8), st.booleans())
def test_partitions_are_as_verl_has_them_and_never_heavier(lengths, ranks, equal_size):
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    lengths = lengths * ranks if equal_size else lengths + [1] * max(0, ranks - len(lengths))
    weights = calculate_workload(torch.tensor(lengths)).tolist()
    assert weights == attention_work(lengths)
    theirs = get_seqlen_balanced_partitions(weights, ranks, equal_size=equal_size)
    ours = verl_partitions(weights, ranks, equal_size)
    assert len(ours) == len(theirs) and sorted(chain.from_iterable(ours)) == sorted(chain.from_iterable(theirs))
    assert not equal_size or {*map(len, ours)} == {*map(len, theirs)}
    assert heaviest(ours, weights) <= heaviest(theirs, weights)


@given(lengths_of, st.booleans(), st.sampled_from([1, 2]), st.booleans())
def test_micro_batches_are_as_verl_has_them(lengths, nested, group, balance):
    from verl.utils import seqlen_balancing

    from seqloom.integrations.verl import rearrange_micro_batches

    lengths = (
        [length for length in lengths for _ in range(group)] if group == 1 else [max(1, n // 2) for n in lengths * 2]
    )
    batch = batch_of(lengths, nested)
    options = {"use_dynamic_bsz_balance": balance, "force_group_size": group}
    theirs, their_samples = seqlen_balancing.rearrange_micro_batches(batch, CAP, **options)
    ours, samples = rearrange_micro_batches(batch, CAP, **options)
    assert sorted(chain.from_iterable(samples)) == [*range(len(lengths))] and len(samples) <= len(their_samples)
    assert all(sum(lengths[i] for i in part) <= CAP for part in samples)
    assert all(part[k + 1] == part[k] + 1 for part in samples for k in range(0, len(part), group) if group == 2)
    weights = attention_work(lengths)
    if len(samples) == len(their_samples):
        assert heaviest(samples, weights) <= heaviest(their_samples, weights)
    assert {*ours[0].keys()} == {*theirs[0].keys()}
    whole = torch.cat(
        [each["input_ids"].to_padded_tensor(0)[:, :1] if nested else each["input_ids"][:, :1] for each in ours]
    )
    restored = seqlen_balancing.restore_dynamic_batch(whole, samples)
    assert restored.flatten().tolist() == [*range(len(lengths))]


@pytest.mark.distributed
def test_ranks_agree_on_the_number_of_micro_batches_and_on_what_they_refuse():
    script = str(Path(__file__).with_name("verl_ranks.py"))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4_000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == second and first[0] == 3
    assert "5 micro-batches where a rank has 2" in first[1] and f"of {CAP + 1} tokens" in first[2]


PAGE_SCRIPT = """
exec(open("page.py").read())
from tensordict import NonTensorData
from support.verl_batches import batch_of
from verl.workers.engine import utils

lengths = [900, 100, 800, 200, 30]
batch = batch_of(lengths, nested=True)
for name, value in {"use_dynamic_bsz": True, "max_token_len_per_gpu": 1_024, "sp_size": 1}.items():
    batch[name] = NonTensorData(value)
batches, samples = utils.prepare_micro_batches(batch)
assert utils.rearrange_micro_batches.__module__ == "seqloom.integrations.verl"
print(sorted(sorted(lengths[i] for i in part) for part in samples))
print(seqlen_balancing.get_seqlen_balanced_partitions([9, 1, 5, 5], k_partitions=2, equal_size=True))
"""


def test_the_page_puts_ours_in_the_place_of_verls(tmp_path):
    [block] = python_blocks(PAGE, "verl")
    (tmp_path / "page.py").write_text(block)
    told = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", PAGE_SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4_000:]
    packs, parts = map(json.loads, done.stdout.splitlines()[-2:])
    assert packs == [[30, 100, 200], [800], [900]]
    assert sorted(map(sorted, parts)) == [[0, 1], [2, 3]]
