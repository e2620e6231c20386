"""Latents that travel (MLA): the engine beside one process, and models beside plain transformers, under any groups."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention import LatentShape, latent_attention
from seqloom.attention.kernels.cpu import Reference
from seqloom.dist import bind
from seqloom.dist.thread_transport import Ranks
from seqloom.plan import Checkpoint, GroupFamily, Remap
from support.attention_cases import rows_of_pack
from support.model_steps import assert_near, run, steps, summed
from support.oracle import attention_truth, difference
from support.strategies_attention import cases, cases_of_many_groups, cases_of_zones
from support.tiny_models import LATENTS, documents, gradients, one_by_one, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of tiny configs
TOLERANCE = {"minicpm3": 1e-9, "youtu": 1e-9}
OTHERS = 1e-6
"""Routers, and DeepSeek-V2's rotary embedding, compute in float32 also where the model is in float64."""
SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 5)]
WIDTHS = [LatentShape(6, 4, 5, 7), LatentShape(3, 1, 2, 9), LatentShape(5, 2, 6, 8)]
"""Values narrower than keys, wider, as wide."""


@pytest.fixture(scope="module")
def ranks():
    """Threads for every number of ranks, kept over examples."""
    made = cache(Ranks)
    yield made
    for world in range(1, 9):
        made(world).close()


@st.composite
def latent_cases(draw):
    """A case in which latents travel in some groups, and its widths."""
    case = draw(cases() | cases_of_many_groups() | cases_of_zones())
    groups = tuple(replace(group, latent=draw(st.booleans())) for group in case.groups)
    return replace(case, groups=groups, kv_heads=case.heads), draw(st.sampled_from(WIDTHS))


def drawn(case, shape, dtype):
    """q, rows, weight and dout."""
    generator, tokens = torch.Generator().manual_seed(0), sum(case.lengths)
    sizes = [
        (tokens, case.heads, shape.unrotated + shape.rotated),
        (tokens, shape.row),
        (case.heads * (shape.unrotated + shape.values), shape.latent),
        (tokens, case.heads, shape.values),
    ]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def truth(case, shape, q, rows, weight, dout):
    """Output and gradients of one process in float64, with every key and value written out."""
    q, rows, weight, dout = (x.double() for x in (q, rows, weight, dout))
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    made = (rows[:, : shape.latent] @ weight.T).unflatten(1, (case.heads, -1))
    k, v = made.split([shape.unrotated, shape.values], dim=2)
    k = torch.cat([k, rows[:, None, shape.latent :].expand(-1, case.heads, -1)], dim=2)
    options = case.options | {"scale": case.scale or q.shape[2] ** -0.5}
    width = shape.head  # the oracle takes one width
    wide = [torch.nn.functional.pad(x, (0, width - x.shape[2])) for x in (q, k, v, dout)]
    found = attention_truth(*(x.detach() for x in wide), case.lengths, causal=case.causal, **options, sinks=None)
    torch.autograd.backward([k, v], [found.dk[..., : k.shape[2]], found.dv[..., : v.shape[2]]])
    return found.out[..., : shape.values], found.dq[..., : q.shape[2]], rows.grad, weight.grad


def attend(transport, case, shape, tensors):
    q, rows, weight, dout = tensors
    family = GroupFamily.cached(case.world, case.world)
    context = bind(case.work, transport, family=family, node_size=case.node_size)
    place = rows_of_pack(case, context)
    q, rows, weight = q[place].requires_grad_(), rows[place].requires_grad_(), weight.clone().requires_grad_()
    options = {"causal": case.causal, **case.options, "kernels": Reference()}
    out = latent_attention(q, rows, weight, shape, context, **options)
    return place, out.detach(), *torch.autograd.grad(out, (q, rows, weight), dout[place])


@settings(max_examples=max(1, settings().max_examples // 2))
@given(drawn_case=latent_cases(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_the_engine_is_one_process(ranks, drawn_case, dtype):
    case, shape = drawn_case
    tensors = drawn(case, shape, dtype)
    parts = ranks(case.world).run(lambda transport: attend(transport, case, shape, tensors), strict=True)
    places, outs, dqs, drows, dweights = zip(*parts, strict=True)
    order = torch.argsort(torch.cat(places))
    found = [torch.cat(each)[order] for each in (outs, dqs, drows)]
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    names = ("out", "dq", "latents", "weight")
    for name, got, wanted in zip(names, (*found, sum(dweights)), truth(case, shape, *tensors), strict=True):
        assert difference(got, wanted) <= tolerance or float((got - wanted).norm()) <= tolerance, name


@st.composite
def latent_steps(draw):
    """Steps of a model in some of whose groups latents travel; pieces of a document agree."""
    lengths, rounds, ranks = draw(steps(SHAPES))
    whole, first = draw(st.booleans()), draw(st.booleans())
    groups = [tuple(replace(g, latent=whole if n == 0 else first) for n, g in enumerate(each)) for each in rounds]
    return lengths, groups, ranks


@pytest.mark.parametrize("name", LATENTS)
@settings(max_examples=max(1, settings().max_examples // 8))
@given(
    case=latent_steps(),
    keep=st.sampled_from([Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL]),
    remap=st.sampled_from([None, *Remap]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_loss_and_gradients_equal_those_of_plain_transformers(name, case, keep, remap, dtype):
    lengths, rounds, ranks = case
    model, ids = tiny_model(name, dtype=dtype), documents(lengths)
    plain = copy.deepcopy(model)
    logits = one_by_one(plain, ids)
    tolerance = 1e-4 if dtype == torch.float32 else TOLERANCE.get(name, OTHERS)
    assert_near(run(model, ids, rounds, ranks, keep, remap), (summed(logits, ids), gradients(plain)), tolerance)
