"""Attention over NCCL against one process in float64: Ulysses, ring, gather, zones, routes, pieces, TP groups."""

import pytest
import torch

from support.attention_cases import assemble, attend, worst
from support.kv_cache_cases import attend_pieces
from support.process_cases import LONG_PACK, PIECES, pieces_case, process_cases

CASES = process_cases(LONG_PACK)


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_truth(nccl_pool, device, name):
    case = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.015)):
        inputs = case.inputs(dtype)
        found = assemble(nccl_pool.run(attend, case, inputs, None, device, ranks=case.world))
        assert worst(found, case.truth(inputs)) < tolerance, dtype


@pytest.mark.parametrize(("shape", "window", "tensor"), PIECES, ids=str)
def test_pieces_of_a_document(nccl_pool, device, shape, window, tensor):
    case = pieces_case(shape, window, tensor)
    inputs = case.inputs(torch.float64)
    parts = nccl_pool.run(attend_pieces, case, inputs, None, device, ranks=case.world)
    for own, given in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), case.truth(given)) < 1e-9
