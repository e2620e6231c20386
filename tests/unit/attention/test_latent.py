"""Latents (MLA): the matrix that makes keys and values, what travels, what is kept, and what is refused."""

import pytest
import torch

from seqloom.attention import KVCache, LatentShape, latent_attention
from seqloom.attention.latent import Expansion
from seqloom.cost import GroupShape
from seqloom.cost.communication import Communication
from seqloom.cost.profile import Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import SingleRankTransport, bind, bind_single_rank, run_ranks
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch
from support.transports import CountingTransport

torch.set_num_threads(1)
SHAPE, HEADS, TOKENS = LatentShape(latent=6, rotated=4, unrotated=5, values=7), 4, 96
WIDTHS = [SHAPE, LatentShape(3, 2, 4, 9), LatentShape(3, 0, 6, 6)]


@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("heads", [slice(None), slice(1, 3)])
def test_keys_and_values_are_those_of_the_projection(shape, heads):
    weight = torch.randn(HEADS * (shape.unrotated + shape.values), shape.latent, dtype=torch.float64)
    rows, expansion = torch.randn(8, 1, shape.row, dtype=torch.float64), Expansion(shape, weight, HEADS, True)
    made = (rows[:, 0, : shape.latent] @ weight.T).unflatten(1, (HEADS, -1))[:, heads]
    k, v = expansion.of_heads(heads)(rows).tensor_split(2, dim=1)
    own = shape.unrotated + shape.rotated
    torch.testing.assert_close(k[..., : shape.unrotated], made[..., : shape.unrotated])
    copied = rows[..., shape.latent :].expand(-1, made.shape[1], -1)
    assert torch.equal(k[..., shape.unrotated : own], copied) and not k[..., own:].any()  # copied bit by bit
    torch.testing.assert_close(v[..., : shape.values], made[..., shape.unrotated :])
    assert not v[..., shape.values :].any()


def test_gradients_of_the_weight_add_up_over_heads_and_calls():
    weight = torch.randn(HEADS * 12, 6, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 1, SHAPE.row, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 2 * HEADS, SHAPE.head, dtype=torch.float64)
    wanted = torch.autograd.grad(Expansion(SHAPE, weight.detach(), HEADS).of_heads(slice(None))(rows), rows, gradient)[
        0
    ]
    expansion, found = Expansion(SHAPE, weight.detach(), HEADS, True), 0
    for heads in (slice(0, 1), slice(1, 4)):
        dk, dv = (part[:, heads] for part in gradient.tensor_split(2, dim=1))
        for some in (slice(0, 2), slice(2, 5)):
            part, nothing = expansion.of_heads(heads).backward(rows.detach()[some], dk[some], dv[some])
            assert nothing.shape == (len(part), 0, SHAPE.row)
            found = found + torch.nn.functional.pad(part, (0, 0, 0, 0, some.start, 5 - some.stop))
    torch.testing.assert_close(found, wanted)
    x = rows[:, 0, :6]
    made = (x @ weight.T).unflatten(1, (HEADS, -1))
    outputs = torch.cat([gradient[:, :HEADS, :5], gradient[:, HEADS:, :7]], dim=2)
    torch.testing.assert_close(expansion.gradient(), torch.autograd.grad(made, weight, outputs)[0])
    assert Expansion(SHAPE, weight, HEADS).gradient() is None


def priced():
    """The links of a cluster for one layer with these latents."""
    latents = {"latent": SHAPE.latent, "rotated": SHAPE.rotated, "value_dim": SHAPE.values}
    sizes = {"layers": 1, "hidden": 8, "heads": HEADS, "kv_heads": HEADS, "head_dim": SHAPE.head, "ffn": 4}
    spec = ModelSpec("latent", **sizes, gated=True, vocabulary=8, tied=True, **latents)
    return Communication(Profile.for_device("H100"), Cluster.parse("1x8xH100"), spec)


def tensors(tokens, dtype):
    """q, rows and weight."""
    sizes = (tokens, HEADS, 9), (tokens, SHAPE.row), (HEADS * 12, SHAPE.latent)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("ulysses, ring", [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("method", Method)
def test_the_bytes_are_those_that_the_cost_model_prices(ulysses, ring, method):
    """Ulysses and ring; a gather without mask sends every latent to everybody."""
    if ring == 1 and method == Method.GATHER:
        return
    group = Group(tuple(range(ulysses * ring)), ulysses, ring, (Span(0, 0, TOKENS),), method, latent=True)

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), counting)
        q, rows, weight = tensors(context.tokens, torch.bfloat16)
        latent_attention(q, rows, weight, SHAPE, context, causal=method == Method.RING).sum().backward()
        return counting.traffic("all_to_all").bytes, counting.traffic("exchange").bytes

    links, shape = priced(), GroupShape(ulysses, ring, method, latent=True)
    heads = links.ulysses_bytes(shape, Checkpoint.NONE) * TOKENS * (ulysses - 1) / ulysses
    gathered = (ring - 1) / ring * SHAPE.row * (2 * 2 + 4) * TOKENS
    keys = gathered if method == Method.GATHER else links.ring_bytes(shape, Checkpoint.NONE) * TOKENS * (ring > 1)
    assert run_ranks(ulysses * ring, body) == [(round(heads), round(keys))] * (ulysses * ring)


def test_pieces_leave_latents():
    cache, pieces = KVCache(), (Span(0, 0, 8), Span(0, 8, 12))
    group = Group((0,), 1, 1, (pieces[0],), latent=True)
    context = bind(
        StageMicroBatch((group,), Checkpoint.NONE), SingleRankTransport(), pieces={0: pieces}, kv_cache=cache
    )
    latent_attention(*tensors(8, torch.float64), SHAPE, context, layer=0)
    (kept,) = cache._documents.values()
    assert kept.kv.shape == (12, 1, SHAPE.row)


def test_a_weight_that_is_frozen_has_no_gradient():
    group = Group((0, 1), 2, 1, (Span(0, 0, 10),), latent=True)

    def body(transport):
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), transport)
        q, rows, weight = tensors(context.tokens, torch.float64)
        weight.requires_grad_(False)
        latent_attention(q, rows, weight, SHAPE, context).sum().backward()
        return weight.grad is None and rows.grad.norm() > 0

    assert all(run_ranks(2, body))


def test_other_widths_are_refused():
    q, rows, weight = tensors(10, torch.float64)
    context = bind_single_rank([10])
    with pytest.raises(SeqloomError, match=r"latents \(10, 9\).* takes .*\(10, 10\) and \(48, 6\), in one dtype"):
        latent_attention(q, rows[:, 1:], weight, SHAPE, context)
    with pytest.raises(SeqloomError, match=r"float64, torch\.float32, torch\.float64: with LatentShape"):
        latent_attention(q, rows.float(), weight, SHAPE, context)
