"""Short convolutions over documents on several ranks: every token sees the ones before it, and few rows are sent."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import conv1d, pad

from seqloom.attention import KVCache
from seqloom.attention.halo import convolve_documents
from seqloom.dist import SingleRankTransport, bind, run_ranks
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.transports import CountingTransport

torch.set_num_threads(1)
CHANNELS, BEFORE = 5, 3
WEIGHT = torch.randn(CHANNELS, 1, BEFORE + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def convolve(rows):
    """[rows, channels], zeros before the first row; a rank may have none."""
    if not len(rows):
        return rows
    return conv1d(pad(rows.T[None], (BEFORE, 0)), WEIGHT.to(rows.dtype), groups=CHANNELS)[0].T


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (3, 1), (1, 4), (2, 2)])
def test_tokens_see_those_before_them_wherever_they_lie(ulysses, ring):
    """Also where a run of a rank is shorter than the halo, so that rows come from several ranks."""
    ranks, lengths = ulysses * ring, (30, 1, 6, 4)
    x = torch.randn(sum(lengths), CHANNELS, dtype=torch.float64, requires_grad=True)
    truth = torch.cat([convolve(each) for each in x.split(lengths)])
    (truth**2).sum().backward()
    starts = torch.tensor([0, 30, 31, 37])
    spans = tuple(Span(k, 0, n) for k, n in enumerate(lengths))
    work = StageMicroBatch((Group(tuple(range(ranks)), ulysses, ring, spans),), Checkpoint.NONE)

    def body(transport):
        context = bind(work, transport)
        rows = starts[context.documents] + context.positions
        own = x.detach()[rows].requires_grad_()
        out = convolve_documents(convolve, own, BEFORE, context, layer=0, name="conv")
        (out**2).sum().backward()
        return rows, out.detach(), own.grad

    for rows, out, grad in run_ranks(ranks, body, strict=True):
        assert torch.allclose(out, truth[rows].detach(), rtol=1e-12)
        assert torch.allclose(grad, x.grad[rows], rtol=1e-12)


def test_only_the_halo_is_sent():
    """A document of 400 tokens on a ring of 4: seven borders between chunks, one of them inside a rank."""
    work = StageMicroBatch((Group((0, 1, 2, 3), 1, 4, (Span(0, 0, 400),)),), Checkpoint.NONE)

    def body(transport):
        counting = CountingTransport(transport)
        x = torch.randn(100, CHANNELS).requires_grad_()
        convolve_documents(convolve, x, BEFORE, bind(work, counting), layer=0, name="conv").sum().backward()
        return counting.traffic("exchange").bytes

    assert sum(run_ranks(4, body)) == 2 * 6 * BEFORE * CHANNELS * 4  # forward and backward


@pytest.mark.parametrize("cuts", [(8, 20), (1, 2), (2, 19)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_pieces_see_the_pieces_before_them(cuts, ranks):
    """Also where a piece is shorter than the halo; another document is whole beside the second one."""
    edges = (0, *cuts, 24)
    pieces = tuple(Span(0, start, stop) for start, stop in pairwise(edges))
    x = torch.randn(24 + 7, CHANNELS, dtype=torch.float64, requires_grad=True)
    truth = torch.cat([convolve(each) for each in x.split((24, 7))])
    (truth**2).sum().backward()

    def body(transport):
        cache, losses, found = KVCache(), [], []
        for number, piece in enumerate(pieces):
            spans = (piece, Span(1, 0, 7)) if number == 1 else (piece,)
            work = StageMicroBatch((Group(tuple(range(ranks)), 1, ranks, spans),), Checkpoint.NONE)
            context = bind(work, transport, pieces={0: pieces}, kv_cache=cache)
            rows = 24 * context.documents + context.positions
            own = x.detach()[rows].requires_grad_()
            out = convolve_documents(convolve, own, BEFORE, context, layer=0, name="conv")
            found.append((rows, out.detach(), own))
            losses.append((out**2).sum())
        for loss in reversed(losses):
            loss.backward()
        cache.check_empty()
        return found

    for rank in run_ranks(ranks, body, strict=True):
        for rows, out, own in rank:
            assert torch.allclose(out, truth[rows].detach(), rtol=1e-12)
            assert torch.allclose(own.grad, x.grad[rows], rtol=1e-12)


def test_evaluation_in_pieces_keeps_nothing():
    pieces, cache = (Span(0, 0, 3), Span(0, 3, 5)), KVCache(backward=False)
    x, found = torch.randn(5, CHANNELS, dtype=torch.float64), []
    for piece in pieces:
        work = StageMicroBatch((Group((0,), 1, 1, (piece,)),), Checkpoint.NONE)
        context = bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=cache)
        with torch.no_grad():
            own = x[piece.start : piece.stop]
            found.append(convolve_documents(convolve, own, BEFORE, context, layer=0, name="conv"))
    assert torch.allclose(torch.cat(found), convolve(x), rtol=1e-12)
    cache.check_empty()
