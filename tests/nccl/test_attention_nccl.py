"""Attention over NCCL against one process in float64: Ulysses, ring, gather, zones, routes, pieces, TP groups."""

import pytest
import torch

from seqloom.layout import Route, Span
from seqloom.plan import Group, Method
from support.attention_cases import Case, assemble, attend, worst
from support.kv_cache_cases import PiecesCase, attend_pieces

PACK = (370, 1, 50, 640, 2, 2, 190)


def spread(ulysses, ring, **options):
    heads = options.pop("heads", (8, 2))
    return Case.one_group(PACK, *heads, 16, ulysses, ring, **options)


def zones(method, slices, proxies, heads=(6, 3)):
    """Two nodes of four: a document over both nodes, routed; one inside each; short ones on single ranks."""
    groups = (
        Group((2, 3, 6, 7), 2, 2, (Span(0, 0, 610),), method, Route((0, 3, 4, 7), slices)),
        Group((0, 4, 1, 5), 1, 4, (Span(1, 0, 500), Span(2, 0, 90)), method, Route(proxies, slices)),
        Group((0, 1, 2, 3), 2, 2, (Span(3, 0, 300),), method),
        Group((4, 5, 6), 1, 3, (Span(4, 0, 170),), method),
        *(
            Group((rank,), 1, 1, (Span(5 + 2 * k, 0, 110), Span(6 + 2 * k, 0, 40)))
            for k, rank in enumerate((0, 1, 5, 7))
        ),
    )
    return Case((610, 500, 90, 300, 170) + (110, 40) * 4, *heads, 16, world=8, groups=groups, node_size=4)


CASES = {
    "zones, a ring through all": zones(Method.RING, 2, tuple(range(8))),
    "zones, a ring through others, odd heads": zones(Method.RING, 1, (2, 3, 6, 7), heads=(5, 5)),
    "zones, a gather through some": zones(Method.GATHER, 3, (0, 2, 4, 6)),
    "ulysses": spread(4, 1),
    "ulysses, odd heads": spread(4, 1, heads=(7, 7)),
    "ulysses, two ranks": spread(2, 1),
    "ring": spread(1, 4),
    "ring, two ranks": spread(1, 2),
    "ring, window": spread(1, 4, window=90),
    "gather": spread(1, 4, method="gather"),
    "gather, window": spread(1, 4, window=90, method="gather"),
    "unified, eight ranks": spread(4, 2, heads=(8, 1)),
    "unified, eight ranks, gather": spread(2, 4, method="gather"),
    "TP groups, unified, eight ranks": spread(2, 2, heads=(4, 2)).in_tp_groups(2),
    "tokens on few ranks": Case.one_group((1, 2), 4, 2, 16, 2, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_truth(nccl_pool, device, name):
    case = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.015)):
        inputs = case.inputs(dtype)
        found = assemble(nccl_pool.run(attend, case, inputs, None, device, ranks=case.world))
        assert worst(found, case.truth(inputs)) < tolerance, dtype


@pytest.mark.parametrize(("shape", "window", "tensor"), [((2, 2), None, 1), ((1, 4), 20, 1), ((2, 2), 9, 2)], ids=str)
def test_pieces_of_a_document(nccl_pool, device, shape, window, tensor):
    """Two pieces of 40 and 1 tokens, whole documents beside the second."""
    whole = Case((5, 41, 9), 8, 2, 16, shape[0] * shape[1], (), window=window)
    rounds = [[Span(1, 0, 40)], [Span(0, 0, 5), Span(1, 40, 41), Span(2, 0, 9)]]
    case = PiecesCase.on_one_group(whole, rounds, *shape, layers=2).in_tp_groups(tensor)
    inputs = case.inputs(torch.float64)
    parts = nccl_pool.run(attend_pieces, case, inputs, None, device, ranks=case.world)
    for own, given in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), case.truth(given)) < 1e-9
