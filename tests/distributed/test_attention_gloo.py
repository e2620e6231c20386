"""A fixed set of attention cases on real processes with gloo between them."""

from dataclasses import replace

import pytest
import torch

from seqloom.plan import Method
from support.attention_cases import assemble, attend, worst
from support.kv_cache_cases import attend_pieces
from support.process_cases import PIECES, SHORT_PACK, pieces_case, process_cases, spread, zones

torch.set_num_threads(1)
ODD_WORLDS = {
    "ulysses, heads shared unequally": spread(SHORT_PACK, 3, 1),
    "ring, full, three ranks": spread(SHORT_PACK, 1, 3, causal=False),
}
CASES = process_cases(SHORT_PACK) | ODD_WORLDS


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_the_truth(gloo_pool, name):
    case = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = case.inputs(dtype)
        found = assemble(gloo_pool.run(attend, case, inputs, ranks=case.world))
        assert worst(found, case.truth(inputs)) < tolerance


def test_routes_change_no_bit_on_processes(gloo_pool):
    case = zones(Method.RING, 2, tuple(range(8)))
    direct = replace(case, groups=tuple(replace(group, route=None) for group in case.groups))
    inputs = case.inputs(torch.bfloat16)
    found, plain = (assemble(gloo_pool.run(attend, each, inputs, ranks=8)) for each in (case, direct))
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_half_precision_travels_over_gloo(gloo_pool):
    case = spread(SHORT_PACK, 2, 2)
    inputs = case.inputs(torch.bfloat16)
    found = assemble(gloo_pool.run(attend, case, inputs, ranks=4))
    assert worst(found, case.truth(inputs)) < 0.01


@pytest.mark.parametrize(("shape", "window", "tensor"), [*PIECES, ((1, 3), 20, 1)], ids=str)
def test_pieces_of_a_document_on_processes(gloo_pool, shape, window, tensor):
    case = pieces_case(shape, window, tensor)
    inputs = case.inputs(torch.float64)
    parts = gloo_pool.run(attend_pieces, case, inputs, ranks=case.world)
    for own, given in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), case.truth(given)) < 1e-9
