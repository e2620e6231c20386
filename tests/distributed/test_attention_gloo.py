"""A fixed set of attention cases on real processes with gloo between them."""

import pytest
import torch

from seqloom.plan import Group, Span
from seqloom.testing.attention_cases import Case, assemble, attend, worst

torch.set_num_threads(1)
PACK = (37, 1, 5, 64, 2, 2, 19)


def spread(ulysses, ring, **options):
    heads = options.pop("heads", (8, 2))
    return Case.one_group(PACK, *heads, 16, ulysses, ring, **options)


CASES = {
    "ulysses": spread(4, 1),
    "ulysses, odd heads": spread(4, 1, heads=(7, 7)),
    "ulysses, heads shared unequally": spread(3, 1),
    "ring": spread(1, 4),
    "ring, full": spread(1, 3, causal=False),
    "ring, window": spread(1, 4, window=9),
    "gather": spread(1, 4, method="gather"),
    "gather, window": spread(1, 4, window=9, method="gather"),
    "unified": spread(2, 2),
    "unified, eight ranks": spread(4, 2, heads=(8, 1)),
    "unified, eight ranks, gather": spread(2, 4, method="gather"),
    "tokens on few ranks": Case.one_group((1, 2), 4, 2, 8, 2, 3),
    "groups that share ranks": Case(
        (11, 8, 40, 5),
        *(4, 2, 8),
        world=4,
        groups=(
            Group((0, 1, 2, 3), 2, 2, (Span(2, 0, 40),)),
            Group((2, 3), 1, 2, (Span(0, 0, 11),)),
            Group((0, 1), 2, 1, (Span(1, 0, 8),)),
            Group((1,), 1, 1, (Span(3, 0, 5),)),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_the_truth(gloo_pool, name):
    case = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = case.inputs(dtype)
        found = assemble(gloo_pool.run(attend, case, inputs, ranks=case.world))
        assert worst(found, case.truth(inputs)) < tolerance


def test_half_precision_travels_over_gloo(gloo_pool):
    case = spread(2, 2)
    inputs = case.inputs(torch.bfloat16)
    found = assemble(gloo_pool.run(attend, case, inputs, ranks=4))
    assert worst(found, case.truth(inputs)) < 0.01
