"""A fixed set of attention cases for real processes, whatever is between them."""

from __future__ import annotations

from typing import Any

from seqloom.layout import Route, Span
from seqloom.plan import Group, Method
from support.attention_cases import Case
from support.kv_cache_cases import PiecesCase

SHORT_PACK, LONG_PACK = (37, 1, 5, 64, 2, 2, 19), (370, 1, 50, 640, 2, 2, 190)
PIECES = [((2, 2), None, 1), ((1, 4), 20, 1), ((2, 2), 9, 2)]
"""(ulysses, ring), window and tensor degree of `pieces_case`."""


def zones(method: Method, slices: int, proxies: tuple[int, ...], heads: tuple[int, int] = (6, 3)) -> Case:
    """Two nodes of four: a document over both nodes, routed; one inside each; short ones on single ranks."""
    groups = (
        Group((2, 3, 6, 7), 2, 2, (Span(0, 0, 61),), method, Route((0, 3, 4, 7), slices)),
        Group((0, 4, 1, 5), 1, 4, (Span(1, 0, 50), Span(2, 0, 9)), method, Route(proxies, slices)),
        Group((0, 1, 2, 3), 2, 2, (Span(3, 0, 30),), method),
        Group((4, 5, 6), 1, 3, (Span(4, 0, 17),), method),
        *(Group((rank,), 1, 1, (Span(5 + 2 * k, 0, 11), Span(6 + 2 * k, 0, 4))) for k, rank in enumerate((0, 1, 5, 7))),
    )
    return Case((61, 50, 9, 30, 17) + (11, 4) * 4, *heads, 16, world=8, groups=groups, node_size=4)


def spread(pack: tuple[int, ...], ulysses: int, ring: int, **options: Any) -> Case:
    """All documents of a pack on one group."""
    heads = options.pop("heads", (8, 2))
    return Case.one_group(pack, *heads, 16, ulysses, ring, **options)


def process_cases(pack: tuple[int, ...]) -> dict[str, Case]:
    """Return the cases with documents of these lengths, on worlds of 2, 4 and 8 ranks."""
    return {
        "zones, a ring through all": zones(Method.RING, 2, tuple(range(8))),
        "zones, a ring through others, odd heads": zones(Method.RING, 1, (2, 3, 6, 7), heads=(5, 5)),
        "zones, a gather through some": zones(Method.GATHER, 3, (0, 2, 4, 6)),
        "ulysses": spread(pack, 4, 1),
        "ulysses, two ranks": spread(pack, 2, 1),
        "ulysses, odd heads": spread(pack, 4, 1, heads=(7, 7)),
        "ring": spread(pack, 1, 4),
        "ring, two ranks": spread(pack, 1, 2),
        "ring, full": spread(pack, 1, 4, causal=False),
        "ring, window": spread(pack, 1, 4, window=9),
        "gather": spread(pack, 1, 4, method="gather"),
        "gather, window": spread(pack, 1, 4, window=9, method="gather"),
        "unified": spread(pack, 2, 2),
        "unified, eight ranks": spread(pack, 4, 2, heads=(8, 1)),
        "unified, eight ranks, gather": spread(pack, 2, 4, method="gather"),
        "TP groups, unified, eight ranks": spread(pack, 2, 2, heads=(4, 2)).in_tp_groups(2),
        "tokens on few ranks": Case.one_group((1, 2), 4, 2, 16, 2, 4),
        "groups that share ranks": Case(
            (11, 8, 40, 5),
            *(4, 2, 16),
            world=4,
            groups=(
                Group((0, 1, 2, 3), 2, 2, (Span(2, 0, 40),)),
                Group((2, 3), 1, 2, (Span(0, 0, 11),)),
                Group((0, 1), 2, 1, (Span(1, 0, 8),)),
                Group((1,), 1, 1, (Span(3, 0, 5),)),
            ),
        ),
    }


def pieces_case(shape: tuple[int, int], window: int | None, tensor: int) -> PiecesCase:
    """Two pieces of 40 and 1 tokens, whole documents beside the second; several tensors in one exchange."""
    whole = Case((5, 41, 9), 8, 2, 16, shape[0] * shape[1], (), window=window)
    rounds = [[Span(1, 0, 40)], [Span(0, 0, 5), Span(1, 40, 41), Span(2, 0, 9)]]
    return PiecesCase.on_one_group(whole, rounds, *shape, layers=2).in_tp_groups(tensor)
