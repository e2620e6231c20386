"""A fixed set of attention cases on real processes with gloo between them."""

from dataclasses import replace

import pytest
import torch

from seqloom.layout import Route, Span
from seqloom.plan import Group, Method
from support.attention_cases import Case, assemble, attend, worst
from support.kv_cache_cases import PiecesCase, attend_pieces

torch.set_num_threads(1)
PACK = (37, 1, 5, 64, 2, 2, 19)


def spread(ulysses, ring, **options):
    heads = options.pop("heads", (8, 2))
    return Case.one_group(PACK, *heads, 16, ulysses, ring, **options)


def zones(method, slices, proxies, heads=(6, 3)):
    """Two nodes of four: a document over both nodes, routed; one inside each; short ones on single ranks."""
    groups = (
        Group((2, 3, 6, 7), 2, 2, (Span(0, 0, 61),), method, Route((0, 3, 4, 7), slices)),
        Group((0, 4, 1, 5), 1, 4, (Span(1, 0, 50), Span(2, 0, 9)), method, Route(proxies, slices)),
        Group((0, 1, 2, 3), 2, 2, (Span(3, 0, 30),), method),
        Group((4, 5, 6), 1, 3, (Span(4, 0, 17),), method),
        *(Group((rank,), 1, 1, (Span(5 + 2 * k, 0, 11), Span(6 + 2 * k, 0, 4))) for k, rank in enumerate((0, 1, 5, 7))),
    )
    return Case((61, 50, 9, 30, 17) + (11, 4) * 4, *heads, 8, world=8, groups=groups, node_size=4)


CASES = {
    "zones, a ring through all": zones(Method.RING, 2, tuple(range(8))),
    "zones, a ring through others, odd heads": zones(Method.RING, 1, (2, 3, 6, 7), heads=(5, 5)),
    "zones, a gather through some": zones(Method.GATHER, 3, (0, 2, 4, 6)),
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
    "tp_groups, unified, eight ranks": spread(2, 2, heads=(4, 2)).in_tp_groups(2),
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


def test_routes_change_no_bit_on_processes(gloo_pool):
    case = zones(Method.RING, 2, tuple(range(8)))
    direct = replace(case, groups=tuple(replace(group, route=None) for group in case.groups))
    inputs = case.inputs(torch.bfloat16)
    found, plain = (assemble(gloo_pool.run(attend, each, inputs, ranks=8)) for each in (case, direct))
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_half_precision_travels_over_gloo(gloo_pool):
    case = spread(2, 2)
    inputs = case.inputs(torch.bfloat16)
    found = assemble(gloo_pool.run(attend, case, inputs, ranks=4))
    assert worst(found, case.truth(inputs)) < 0.01


@pytest.mark.parametrize(("shape", "window", "tensor"), [((2, 2), None, 1), ((1, 3), 20, 1), ((2, 2), 9, 2)], ids=str)
def test_pieces_of_a_document_on_processes(gloo_pool, shape, window, tensor):
    """Two pieces of 40 and 1 tokens, whole documents beside the second; several parcels in one exchange."""
    whole = Case((5, 41, 9), 8, 2, 16, shape[0] * shape[1], (), window=window)
    rounds = [[Span(1, 0, 40)], [Span(0, 0, 5), Span(1, 40, 41), Span(2, 0, 9)]]
    case = PiecesCase.on_one_group(whole, rounds, *shape, layers=2).in_tp_groups(tensor)
    inputs = case.inputs(torch.float64)
    parts = gloo_pool.run(attend_pieces, case, inputs, ranks=case.world)
    for own, given in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), case.truth(given)) < 1e-9
