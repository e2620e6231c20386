"""Cases that other projects test or got wrong, with their inputs and our expectations.

The full sizes are slow; what runs every time is a part of them with fewer heads or narrower ones.
"""

from itertools import pairwise

import pytest
import torch

from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.plan import Group
from support.attention_cases import Case, Inputs, assemble, attend, worst
from support.oracle import difference

torch.set_num_threads(1)


def run(case, inputs):
    return assemble(run_ranks(case.world, lambda transport: attend(transport, case, inputs), timeout_s=600))


def assert_twice_at_most(case, alone):
    """bfloat16: output, log-sum-exp and gradients err at most twice as much as one kernel call."""
    inputs = case.inputs(torch.bfloat16)
    truth = case.truth(inputs)
    one, many = run(alone, inputs), run(case, inputs)
    for name in truth._fields:
        true = getattr(truth, name)
        assert difference(getattr(many, name), true) <= 2 * difference(getattr(one, name), true), name


@pytest.mark.parametrize(
    "ulysses, ring, heads",
    [(2, 2, 4), (1, 4, 4)]
    + [
        pytest.param(ulysses, ranks // ulysses, 32, marks=pytest.mark.slow)
        for ranks in (2, 4, 8)
        for ulysses in (1, 2, 4, 8)
        if ulysses <= ranks
    ],
)
def test_yunchang_hybrid(ulysses, ring, heads):
    """long-context-attention: 1024 tokens, 32 heads of 64, causal; there the output alone is asserted, to 0.1."""
    sizes = ((1024,), heads, heads, 64)
    assert_twice_at_most(Case.one_group(*sizes, ulysses, ring), Case.one_group(*sizes))


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("edges", [(0, 120, 1248, 4232), (0, 128, 1248, 4240), (0, 3816), (0, 3824)])
@pytest.mark.parametrize("dim", [8, 128])
@pytest.mark.slow
def test_ring_flash_attention_packs(edges, dim, method):
    """ring-flash-attention: 5 heads on 8 ranks; there differences are printed."""
    lengths = [stop - start for start, stop in pairwise(edges)]
    assert_twice_at_most(Case.one_group(lengths, 5, 5, dim, 1, 8, method=method), Case.one_group(lengths, 5, 5, dim))


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("edges", [(0, 12, 124, 423), (0, 381)])
def test_ring_flash_attention_packs_at_a_tenth(edges, method):
    """The same with lengths that divide by nothing: log-sum-exp of every document too."""
    lengths = [stop - start for start, stop in pairwise(edges)]
    case = Case.one_group(lengths, 5, 5, 8, 1, 8, method=method)
    inputs = case.inputs(torch.float64)
    assert worst(run(case, inputs), case.truth(inputs)) < 1e-12


@pytest.mark.parametrize("ulysses, ring", [(2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("method", ["ring", "gather"])
def test_trl_probe(ulysses, ring, method):
    """TRL 6843: two packed documents, one token of the first is changed; only what may see it changes."""
    case = Case.one_group((24, 24), 4, 2, 8, ulysses, ring, method=method)
    inputs = case.inputs(torch.float32)
    changed = Inputs(*(x.clone() for x in inputs))
    for tensor in changed[:3]:
        tensor[5] += 1
    before, after = run(case, inputs), run(case, changed)
    moved = (before.out != after.out).flatten(1).any(1)
    assert moved.tolist() == [False] * 5 + [True] * 19 + [False] * 24
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(before, name)[24:], getattr(after, name)[24:]), name


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("ulysses, ring", [(1, 2), (2, 2), (1, 3)])
def test_gradients_see_keys_of_other_ranks(ulysses, ring, method):
    """diffusers 14265: forward was right, but gradients did not reach keys on other ranks. Finite differences do."""
    case = Case.one_group((20,), 2, 1, 4, ulysses, ring, method=method)
    inputs = case.inputs(torch.float64)
    inputs.dout[:10] = 0  # the loss is made by the second half; ring index 0 holds the first tokens
    found = run(case, inputs)
    step = 1e-6
    for name, token in (("k", 0), ("v", 1), ("k", 11), ("q", 12)):
        losses = []
        for sign in (1, -1):
            moved = inputs._replace(**{name: getattr(inputs, name).clone()})
            getattr(moved, name)[token, 0, 2] += sign * step
            losses.append((run(case, moved).out * inputs.dout).sum().item())
        slope = (losses[0] - losses[1]) / (2 * step)
        gradient = getattr(found, f"d{name}")[token, 0, 2].item()
        assert abs(slope) > 1e-4 and abs(gradient - slope) < 1e-7 * max(1, abs(slope)), (name, token)


@pytest.mark.parametrize("heads, ulysses", [(3, 2), (3, 3), (7, 4), (7, 2)])
def test_deepspeed_odd_heads(heads, ulysses):
    """DeepSpeed: 3 and 7 heads. A value that names its position and head comes back from where it should.

    With a window of one token attention returns the values themselves.
    """
    group = Group(tuple(range(ulysses)), ulysses, 1, (Span(1, 0, 6), Span(0, 0, 9)))
    case = Case((9, 6), heads, heads, 4, ulysses, (group,), window=1)
    inputs = case.inputs(torch.float64)
    named = torch.arange(15)[:, None, None] * 100.0 + torch.arange(heads)[:, None] + torch.zeros(4)
    found = run(case, inputs._replace(v=named.double()))
    assert torch.equal(found.out, named.double())
    assert torch.equal(found.dv, inputs.dout)
