"""Packs of documents: the longest that still fits, again and again, until nothing does.

This is first fit decreasing, pack by pack instead of document by document. Documents stand in ascending order; what is
taken is skipped by links to the next shorter one that is left, so that taking a document costs about the same however
many there are.
"""

from __future__ import annotations

import numpy as np

from seqloom.planners.compiled import kernel


@kernel
def longest_left(left: np.ndarray, place: int) -> int:
    """The last of the places ``0 .. place`` whose document is left; 0 is before the first document.

    Args:
        left: int64[n + 1]: of every place itself, or a lower one to go on from. Paths are halved on the way.
        place: 1 + the index of a document.
    """
    while left[place] != place:
        left[place] = left[left[place]]
        place = left[place]
    return place


@kernel
def fill_packs(
    sizes: np.ndarray,
    upto: np.ndarray,
    left: np.ndarray,
    room: int,
    low: int,
    per_step: int,
    first: int,
    out: np.ndarray,
) -> int:
    """Make packs of one level until none of its own documents is left; shorter ones fill the gaps.

    The last step of the level is made whole with packs of shorter documents, as far as there are any.

    Args:
        sizes: int64[n] granules of every document, ascending.
        upto: int64[longest + 1]: how many documents have at most so many granules.
        left: int64[n + 1], see `longest_left`; what is taken is marked.
        room: granules of a pack.
        low: index of the first document of the level; those below it are of lower levels.
        per_step: packs of a step.
        first: number of the first pack.
        out: int64[n], receives the pack of every document that is taken.

    Returns:
        number of packs made.
    """
    made = 0
    while True:
        longest = longest_left(left, sizes.shape[0])
        if longest == 0 or (longest <= low and made % per_step == 0):
            return made
        gap = room
        while True:
            place = longest_left(left, upto[min(gap, upto.shape[0] - 1)])
            if place == 0:
                break
            out[place - 1] = first + made
            left[place] = place - 1
            gap -= sizes[place - 1]
        made += 1


@kernel
def first_fit(sizes: np.ndarray, room: int, out: np.ndarray) -> int:
    """Put every document, in the order given, into the first pack with room for it: what plain packing does.

    Args:
        sizes: int64[n] granules of every document.
        room: granules of a pack.
        out: int64[n], receives the pack of every document.

    Returns:
        number of packs.
    """
    leaves = 1
    while leaves < sizes.shape[0]:
        leaves *= 2
    most = np.full(2 * leaves, room, np.int64)  # a tree: most room of any pack below each node
    packs = 0
    for document in range(sizes.shape[0]):
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= sizes[document] else 2 * node + 1
        out[document] = node - leaves
        packs = max(packs, node - leaves + 1)
        most[node] -= sizes[document]
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return packs
