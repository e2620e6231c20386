"""Latents that travel (MLA): the engine beside one process, and models beside plain transformers, under any groups."""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention import LatentShape
from seqloom.attention.kernels.cpu import Reference
from seqloom.dist.thread_transport import Ranks
from seqloom.plan import Checkpoint, Group, Method, Remap
from support.attention_cases import Case
from support.latent_cases import LatentInputs, assemble_latents, attend_latents, truth
from support.model_steps import assert_near, run_step, steps, summed
from support.oracle import difference
from support.strategies_attention import cases, cases_of_many_groups, cases_of_zones, with_prefixes
from support.tiny_models import LATENTS, documents, gradients, one_by_one, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of tiny configs
TOLERANCE = {"minicpm3": 1e-9, "youtu": 1e-9}
OTHERS = 1e-5
"""Routers, and DeepSeek-V2's rotary embedding, compute in float32 also where the model is in float64: sums in
other orders differ by units of 1.2e-7 in every element, more where a CPU's matrix products round otherwise."""
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
    case = draw(cases() | cases_of_many_groups() | cases_of_zones() | with_prefixes(cases()))
    groups = tuple(replace(group, latent=draw(st.booleans())) for group in case.groups)
    return replace(case, groups=groups, kv_heads=case.heads), draw(st.sampled_from(WIDTHS))


def run(ranks, case, shape, inputs, *, kernels=None):
    body = partial(attend_latents, case=case, shape=shape, inputs=inputs, kernels=kernels)
    return assemble_latents(ranks(case.world).run(body, strict=True))


@settings(max_examples=max(1, settings().max_examples // 2))
@given(
    drawn_case=latent_cases(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    dropout=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_the_engine_is_one_process(ranks, drawn_case, dtype, dropout):
    case, shape = replace(drawn_case[0], dropout=dropout), drawn_case[1]
    inputs = LatentInputs.of(case, shape, dtype)
    found, wanted = run(ranks, case, shape, inputs, kernels=Reference()), truth(case, shape, inputs)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for name, got, true in zip(wanted._fields, found, wanted, strict=True):
        assert difference(got, true) <= tolerance or float((got - true).norm()) <= tolerance, name


@st.composite
def averaging_cases(draw):
    """Cases with so many elements that rounding errors average out and their ratio means something."""
    ulysses, ring = draw(st.sampled_from([(2, 1), (1, 2), (4, 1), (1, 4), (2, 3), (3, 2)]))
    lengths = draw(st.lists(st.integers(20, 60), min_size=3, max_size=5))
    method = draw(st.sampled_from(Method)) if ring > 1 else Method.RING
    case = Case.one_group(lengths, 6, 6, 24, ulysses, ring, method=method)
    return replace(case, groups=(replace(case.groups[0], latent=True),))


@settings(max_examples=max(1, settings().max_examples // 4))
@given(case=averaging_cases())
def test_bfloat16_errs_at_most_twice_as_much_as_one_process(ranks, case):
    shape, spans = LatentShape(32, 8, 16, 16), case.groups[0].spans
    inputs = LatentInputs.of(case, shape, torch.bfloat16)
    alone = replace(case, world=1, groups=(Group((0,), 1, 1, spans),))
    wanted, one, many = truth(case, shape, inputs), *(run(ranks, each, shape, inputs) for each in (alone, case))
    for name, true, single, spread in zip(wanted._fields, wanted, one, many, strict=True):
        assert difference(spread, true) <= 2 * difference(single, true), name


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
    assert_near(run_step(model, ids, rounds, ranks, keep, remap), (summed(logits, ids), gradients(plain)), tolerance)
