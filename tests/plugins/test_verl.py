"""verl's own balancing against ours: the same rules, never a heavier part, and none above the cap."""

import multiprocessing
import socket
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import SeqloomError
from seqloom.integrations.balancing import attention_work, verl_partitions
from support.pages import python_blocks

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


def batch_of(lengths, nested):
    """A TensorDict whose samples begin with their number."""
    from tensordict import TensorDict

    rows = [torch.cat([torch.tensor([number]), torch.arange(length - 1)]) for number, length in enumerate(lengths)]
    if nested:
        return TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return TensorDict({"input_ids": ids, "attention_mask": mask.long()}, [len(rows)])


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


def rank(number, port, answers):
    from seqloom.integrations.verl import rearrange_micro_batches

    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=number, world_size=2)
    said = []
    for lengths in ([[900, 900, 900], [5, 6, 7, 8]], [[900] * 5, [5, 6]], [[5, CAP + 1], [5, 6]]):
        try:
            found = rearrange_micro_batches(batch_of(lengths[number], True), CAP, dp_group=dist.group.WORLD)
            said.append(len(found[1]))
        except SeqloomError as error:
            said.append(str(error))
    answers.put((number, said))
    dist.destroy_process_group()


@pytest.mark.distributed
def test_ranks_agree_on_the_number_of_micro_batches_and_on_what_they_refuse():
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    answers = context.Queue()
    started = [context.Process(target=rank, args=(number, port, answers)) for number in range(2)]
    for process in started:
        process.start()
    found = dict(answers.get(timeout=300) for _ in started)
    for process in started:
        process.join()
    assert found[0] == found[1] and found[0][0] == 3
    assert "5 micro-batches where a rank has 2" in found[0][1] and f"of {CAP + 1}" in found[0][2]


def test_the_page_puts_ours_in_the_place_of_verls(monkeypatch):
    from verl.trainer.ppo import ray_trainer
    from verl.workers.engine import utils

    [block] = python_blocks(PAGE, "verl")
    for module, name in ((utils, "rearrange_micro_batches"), (ray_trainer, "get_seqlen_balanced_partitions")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    exec(block, {})
    from tensordict import NonTensorData

    lengths = [900, 100, 800, 200, 30]
    batch = batch_of(lengths, True)
    for name, value in {"use_dynamic_bsz": True, "max_token_len_per_gpu": CAP, "sp_size": 1}.items():
        batch[name] = NonTensorData(value)
    batches, samples = utils.prepare_micro_batches(batch)
    assert len(batches) == 2 and sorted(chain.from_iterable(samples)) == [0, 1, 2, 3, 4]
    assert all(sum(lengths[i] for i in part) <= CAP for part in samples)
    assert utils.rearrange_micro_batches.__module__ == "seqloom.integrations.verl"
    assert ray_trainer.get_seqlen_balanced_partitions.__module__ == "seqloom.integrations.balancing"
