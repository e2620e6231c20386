"""The longest document that a pipeline holds: as little kept of it as can be, in the smallest pieces it may have."""

from __future__ import annotations

from seqloom.cost.stage_limits import host_bytes
from seqloom.cost.stage_memory import StageMemory
from seqloom.errors import SeqloomError
from seqloom.plan import Group
from seqloom.planners.pipelines.line import host_shapes, island_of
from seqloom.planners.pipelines.search import Search
from seqloom.planners.pipelines.seats import Level

GIB = 1024**3
PROBE = 1 << 20
"""Tokens of the document whose keys and values are weighed; they grow in proportion."""


def longest_document(search: Search) -> int:
    """Tokens of the longest document that fits on every host: whole, or in pieces with its keys and values."""
    widest = max(shape.degree for shape in host_shapes(search.cost, search.line))
    whole = widest * max(tokens for _, tokens in search.limits.capacity)
    return max(whole, *(_fits(search, level) for level in search.levels))


def _fits(search: Search, level: Level) -> int:
    cost, line = search.cost, search.line
    island = island_of(cost, line)
    best = 0
    for shape in host_shapes(cost, line):
        group = Group(tuple(range(shape.degree)), shape.ulysses, shape.ring, ())
        most = []
        for shares in line.of_hosts:
            free = float(cost.budget_bytes - host_bytes(cost, shares, island))
            each = 0.0
            working = 0.0
            for share in shares:
                memory = StageMemory(cost, share)
                own = memory.holding(*level)
                working = max(working, own.forward, own.backward)
                each += own.held / shape.degree + sum(memory.carried_bytes(group, PROBE)) / PROBE
            piece = 2 / (shape.degree * search.most_units)  # of a document's tokens, on a rank, in its first piece
            most.append(max(0.0, free) / max(each + piece * working, 1.0))
        best = max(best, int(min(most)))
    return best - best % cost.granule


def too_long(search: Search) -> SeqloomError:
    """The error that says which document no choice can hold, and what would fit."""
    longest = int(search.lengths.argmax())
    room = longest_document(search)
    if int(search.lengths[longest]) <= room and len(search.names) > 1:
        return SeqloomError(
            f"{len(search.lengths)} sequences of {int(search.lengths.sum())} tokens need more than {search.most_units} "
            f"units in the memory of {search.line.hosts} stages; put fewer sequences into a step, raise the memory "
            "budget (or the capacity, if one is set), or use more stages or more GPUs"
        )
    if int(search.lengths[longest]) <= room:
        way = f"take schedule 'auto' instead of {search.names[0]!r}, " if len(search.names) == 1 else ""
        return SeqloomError(
            f"no order found for this batch in {search.cost.budget_bytes / GIB:.1f} GiB per GPU: sequence {longest} of "
            f"{search.lengths[longest]} tokens is near what {search.line.hosts} stages hold (about {room}); {way}"
            "raise the memory budget, use more stages, or drop longer sequences (--max-length)"
        )
    return SeqloomError(
        f"sequence {longest} has {search.lengths[longest]} tokens, more than the {search.line.hosts} stages of "
        f"{search.line.width} ranks hold even in pieces, recomputed and in host memory (about {room} tokens); "
        f"drop longer sequences (--max-length {max(room, 1)}), raise the memory budget, use more stages or more GPUs"
    )
