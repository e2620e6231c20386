"""One device: the packed entry, and a world of one rank."""

import numpy as np
import pytest
import torch

from seqloom.attention import packed_attention
from seqloom.dist import P2PTensor, SingleRankTransport, bind_single_rank
from seqloom.errors import SeqloomError
from support.attention_cases import Case
from support.oracle import difference

torch.set_num_threads(1)


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 3}], ids=str)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_it_is_the_truth(mask, kind):
    case = Case.one_group((4, 1, 9), 4, 2, 8, **mask)
    inputs = case.inputs(torch.float64)
    truth = case.truth(inputs)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out = packed_attention(q, k, v, kind([0, 4, 5, 14]), **mask)
    found = (out, *torch.autograd.grad(out, (q, k, v), inputs.dout))
    assert max(map(difference, found, (truth.out, truth.dq, truth.dk, truth.dv))) < 1e-10


def test_prefixes_that_see_themselves():
    case = Case.one_group((4, 1, 9), 4, 2, 8, prefixes=(4, 0, 5))
    inputs = case.inputs(torch.float64)
    out = packed_attention(*inputs[:3], [0, 4, 5, 14], prefixes=[4, 0, 5])
    assert difference(out, case.truth(inputs).out) < 1e-10
    with pytest.raises(SeqloomError, match=r"2 prefixes for 3 documents"):
        packed_attention(*inputs[:3], [0, 4, 5, 14], prefixes=[4, 0])


def test_empty_documents_and_an_empty_pack():
    q = torch.randn(3, 2, 4)
    assert torch.equal(packed_attention(q, q, q, [0, 0, 3, 3]), packed_attention(q, q, q, [0, 3]))
    assert packed_attention(q[:0], q[:0], q[:0], [0]).shape == (0, 2, 4)


@pytest.mark.parametrize("ends", [[], [0, 2], [1, 3], [0, 3, 2, 3], [0, 4]])
def test_ends_that_do_not_fit_are_refused(ends):
    q = torch.randn(3, 2, 4)
    with pytest.raises(SeqloomError, match=r"for 3 tokens: it must rise from 0 to 3"):
        packed_attention(q, q, q, ends)


def test_a_long_list_is_named_by_its_ends():
    q = torch.randn(3, 2, 4)
    with pytest.raises(SeqloomError, match=r"\[0, 1, 1, \.\., 9\]"):
        packed_attention(q, q, q, [0, 1, 1, 1, 1, 1, 1, 9])


def test_lengths_on_a_gpu_are_refused():
    q = torch.randn(3, 2, 4)
    with pytest.raises(SeqloomError, match="must be on the host"):
        packed_attention(q, q, q, torch.zeros(2, dtype=torch.int32, device="meta"))


def test_a_negative_length_is_refused():
    with pytest.raises(SeqloomError, match="a document of -2 tokens"):
        bind_single_rank([3, -2])


def test_alone_everything_sent_comes_back():
    alone, sent = SingleRankTransport(), torch.arange(4.0)
    gathered, swapped, received = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    alone.all_gather(gathered, sent, [0])
    alone.all_to_all(swapped, sent, [4], [4], [0])
    alone.exchange([P2PTensor(0, sent)], [P2PTensor(0, received)]).wait()
    alone.all_reduce(sent, [0])
    assert all(torch.equal(one, torch.arange(4.0)) for one in (gathered, swapped, received, sent))
    with pytest.raises(SeqloomError, match=r"block \(0, 1\) called by rank 0 of 1: .* a transport that reaches all"):
        alone.all_reduce(sent, [0, 1])


@pytest.mark.parametrize("ends", [[0, 1.7, 3], torch.tensor([0.0, 1.7, 3.0]), [0, None, 3], np.array([0.0, 3.0])])
def test_lengths_that_are_no_whole_numbers_are_refused(ends):
    q = torch.zeros(3, 2, 4)
    with pytest.raises(SeqloomError, match=r"cu_seqlens holds .*, no whole number of tokens; give integers"):
        packed_attention(q, q, q, ends)


def test_integers_of_numpy_are_integers():
    q = torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(0))
    wanted = packed_attention(q, q, q, [0, 2, 9], window=3)
    found = packed_attention(q, q, q, np.array([0, 2, 9]), window=np.int64(3))
    assert torch.equal(found, wanted)
    with pytest.raises(SeqloomError, match=r"window 2.5 with causal=True: a window is a whole number"):
        packed_attention(q, q, q, [0, 9], window=2.5)
