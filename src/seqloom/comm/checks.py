"""What `bind` refuses before anything is communicated: the value, the rule and the way out."""

from __future__ import annotations

from dataclasses import replace

from seqloom.comm.pieces import check_documents
from seqloom.comm.transport import Transport
from seqloom.errors import SeqloomError
from seqloom.plan import Work


def check_work(work: Work, transport: Transport, node_size: int | None, tensor: int) -> None:
    """Refuse work that the ranks of a transport cannot do; the same on all of them.

    Args:
        work, transport, node_size, tensor: see `bind`.
    """
    _check_ranks(work, transport)
    _check_routes(work, transport, node_size)
    _check_layouts(work)
    check_documents(work)
    if tensor != 1:
        _check_teams(work, tensor)


def _check_ranks(work: Work, transport: Transport) -> None:
    for group in work.groups:
        name = f"a group on ranks {group.ranks} with ulysses {group.ulysses} x ring {group.ring}"
        beyond = [rank for rank in group.ranks if not 0 <= rank < transport.ranks]
        if beyond:
            raise SeqloomError(
                f"{name}: rank {beyond[0]} is not among the {transport.ranks} ranks of the transport; "
                f"bind a plan made for {transport.ranks} ranks, or start at least {max(beyond) + 1}"
            )
        if len(set(group.ranks)) < group.degree or group.ulysses * group.ring != group.degree or not group.ranks:
            raise SeqloomError(f"{name}: it needs ulysses x ring different ranks; list every rank once")
        for block in group.blocks():
            if block != tuple(range(block[0], block[0] + group.ulysses)):
                raise SeqloomError(
                    f"{name}: ranks {block} exchange heads and must be an ascending run, "
                    f"for example {tuple(range(min(block), min(block) + group.ulysses))}"
                )


def _check_routes(work: Work, transport: Transport, node_size: int | None) -> None:
    for group in work.groups:
        if group.route is None:
            continue
        name = f"a group on ranks {group.ranks} routed through proxies {group.route.proxies}"
        beyond = [rank for rank in group.route.proxies if not 0 <= rank < transport.ranks]
        if beyond:
            raise SeqloomError(
                f"{name}: rank {beyond[0]} is not among the {transport.ranks} ranks of the transport; "
                "choose proxies among them, or leave the route out"
            )
        if node_size is None:
            raise SeqloomError(
                f"{name}: which ranks share a node is not known; bind with node_size=..., or leave the route out"
            )


def _check_layouts(work: Work) -> None:
    if work.attention is not None and work.attention != (derived := replace(work, attention=None).attention_layout()):
        raise SeqloomError(
            f"the attention layout of the work, {work.attention}, is not the one that its groups give, {derived}: "
            "groups deal their tokens to ranks in one way, which their kernels and rings rely on; leave the attention "
            "layout out, and give tokens other places in the linear layout"
        )


def _check_teams(work: Work, tensor: int) -> None:
    for group in work.groups:
        if tensor < 1 or group.ulysses % tensor:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with ulysses {group.ulysses}: teams are "
                f"the inner part of the Ulysses axis; use a degree that divides {group.ulysses}"
            )
        if group.route is not None:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with a route: weight slices exchange keys "
                "by themselves, from rank to rank; leave the route out, or use tensor degree 1"
            )
    if work.linear is not None:
        raise SeqloomError(
            f"tensor degree {tensor} for work with a linear layout: a team computes its linear layers together, on the "
            "tokens it has in attention; leave the linear layout out, or use tensor degree 1"
        )
