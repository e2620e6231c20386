"""Megatron-Core's real scheduler, data loader wrapper, `PackedSeqParams` and `GPTModel`, with ours in their places.

Its wrapper and its loop of sub-samples call CUDA, and so do its own attention and its rotary embedding: here the
wrapper is built and asked for schedules, and the model has attention of torch or of Seqloom, and learned positions.
"""

import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.attention import packed_attention
from seqloom.errors import SeqloomError
from seqloom.integrations.megatron import (
    HybridCPScheduler,
    _from_ranks,
    _Prices,
    packed_seq_params,
    packed_sequences,
)
from seqloom.planners.published.megatron import group_sizes
from support.pages import python_blocks

pytestmark = pytest.mark.plugins
CAP = 2_048
COSTS = {ranks: cost_model(f"1x{ranks}xH100", "qwen3-1.7b", sharding="none") for ranks in (2, 4, 6, 8)}
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "megatron.md"


def host_scheduler(ranks):
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    return BalancedCPScheduler(CAP, SimpleNamespace(size=lambda: ranks))


@st.composite
def batches(draw):
    """Draw ranks, and (id, length) of samples, some of them longer than a rank holds."""
    ranks = draw(st.sampled_from(sorted(COSTS)))
    units = st.one_of(st.integers(1, 20), st.integers(1, CAP * ranks // 48))
    return ranks, [(7 * k + 3, 48 * each) for k, each in enumerate(draw(st.lists(units, min_size=1, max_size=24)))]


@given(batches())
def test_schedules_keep_the_hosts_rules_and_are_never_slower(drawn):
    ranks, samples = drawn
    lengths, host = dict(samples), host_scheduler(ranks)
    listed_lengths, schedule = HybridCPScheduler(COSTS[ranks], host).get_groups_and_subsamples(samples, None)
    assert [[[lengths[i] for i in listed] for listed in batch] for batch in schedule] == listed_lengths
    for batch in schedule:
        assert len(batch) == ranks and all(batch)
        for listed in batch:
            for sample in listed:
                size = sum(sample in other for other in batch)  # what the host's loop counts
                first = next(rank for rank, other in enumerate(batch) if sample in other)
                assert size == ranks or (size & (size - 1) == 0 and first % size == 0)
                assert batch[first : first + size] == [listed] * size and lengths[sample] <= CAP * size
    placed = [i for batch in schedule for members in {tuple(listed) for listed in batch} for i in members]
    assert sorted(placed) == sorted(lengths)
    try:
        _, rival = host.get_groups_and_subsamples(samples, None)
    except AssertionError:
        assert ranks == 6, "it refuses samples that need eight ranks"
        return
    ids, longs = [sample for sample, _ in samples], np.array([length for _, length in samples])
    prices = _Prices.of(COSTS[ranks], longs, group_sizes(ranks), CAP, packed=False)
    assert prices.step_ns(_from_ranks(schedule, ids)) <= prices.step_ns(_from_ranks(rival, ids))


def test_a_cost_model_of_other_ranks_is_refused():
    with pytest.raises(SeqloomError, match="a cost model of 4 ranks for 8"):
        HybridCPScheduler(COSTS[4], host_scheduler(8)).get_groups_and_subsamples([(0, 48)])


@pytest.fixture(scope="module")
def one_rank():
    """Megatron's process groups, of one process."""
    from megatron.core import parallel_state

    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_the_page_gives_the_wrapper_our_scheduler(one_rank):
    block = python_blocks(PAGE, "Samples one by one")[0].replace('"2x8xH100", "llama3-8b"', '"1x1xH100", "qwen3-0.6b"')
    exec(block, names := {})
    wrapper = names["wrapped"](iter(()), SimpleNamespace(max_seqlen_per_dp_cp_rank=CAP))
    scheduler = wrapper.cp_balancing_scheduler
    assert isinstance(scheduler, HybridCPScheduler) and scheduler.host.total_hdp_gpus == 1
    _, schedule = scheduler.get_groups_and_subsamples([(0, 96), (1, CAP)], wrapper.config)
    assert sorted(sample for batch in schedule for sample in batch[0]) == [0, 1]


def test_the_page_makes_params_of_a_pack(capsys):
    exec(python_blocks(PAGE, "Packs")[0], names := {})
    params, groups = names["params"], names["groups"]
    assert params.qkv_format == "thd" and params.cu_seqlens_q.dtype == torch.int32
    members = groups[names["rank"]]
    assert params.cu_seqlens_q.diff().tolist() == [names["lengths"][i] for i in members]
    assert params.local_cp_size == sum(listed == members for listed in groups)
    assert str(members) in capsys.readouterr().out


class PlainAttention(torch.nn.Module):
    """Attention of one sample from torch."""

    def __init__(self, config, *args, **options):
        super().__init__()

    def forward(self, q, k, v, mask, *args, **options):
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class PackedAttention(PlainAttention):
    """Attention of a pack from Seqloom."""

    def forward(self, q, k, v, mask, *args, packed_seq_params=None, **options):
        return packed_attention(q, k, v, packed_seq_params.cu_seqlens_q).flatten(1)[:, None]


def gpt_model(attention):
    """A GPT of two layers with this core attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    exact = {"params_dtype": torch.float64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fused = dict.fromkeys(("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"), False)
    config = TransformerConfig(use_cpu_initialization=True, **sizes, **exact, **fused)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = attention
    options = {"position_embedding_type": "learned_absolute", "parallel_output": False}
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=64, **options).double()


def test_loss_and_gradients_of_a_pack_are_those_of_its_samples(one_rank):
    plain, packed = gpt_model(PlainAttention), gpt_model(PackedAttention)
    packed.load_state_dict(plain.state_dict())
    lengths = {0: 7, 1: 30, 2: 1}
    samples = [torch.randint(64, (length,)) for length in lengths.values()]
    labels = [each.roll(-1) for each in samples]
    alone = [
        plain(ids[None], torch.arange(len(ids))[None], None, labels=wanted[None])[0]
        for ids, wanted in zip(samples, labels, strict=True)
    ]
    params = packed_seq_params(packed_sequences([[0, 1, 2]], 0, lengths))
    positions = torch.cat([torch.arange(length) for length in lengths.values()])[None]
    ids, wanted = torch.cat(samples)[None], torch.cat(labels)[None]
    together = packed(ids, positions, None, labels=wanted, packed_seq_params=params)[0]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=0)
    torch.cat(alone).sum().backward()
    together.sum().backward()
    for (name, one), other in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-12, msg=name)
