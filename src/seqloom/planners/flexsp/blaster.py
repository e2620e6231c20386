"""The blaster: cut a batch, sorted by falling length, into micro-batches of as equal tokens as possible.

Micro-batch ``i`` ends at the document where the largest token sum so far is least:

    least[i][k] = min over j < k of max(least[i - 1][j], tokens of documents j .. k)

The first term rises with ``j`` and the second falls, so the best cut lies where they cross: one binary
search instead of a scan, and still exact.
"""

from __future__ import annotations

import numpy as np


def cut(tokens: np.ndarray, count: int) -> list[np.ndarray]:
    """Cut documents into ``count`` consecutive, non-empty chunks with the least largest token sum.

    Of equally good cuts the last chunk is the longest, then the one before it: the published tie-break.

    Args:
        tokens: int64[n], positive, in the order in which they are to be cut.
        count: 1 to n chunks.

    Returns:
        the positions in each chunk, in order.
    """
    n = len(tokens)
    sums = np.concatenate([[0], np.cumsum(tokens)])
    least = sums.copy()  # one chunk: everything up to k
    cuts = []
    for chunk in range(1, count):
        starts = np.arange(chunk, n)  # earlier chunks hold one document at least
        ends = np.arange(chunk + 1, n + 1)
        crossing = np.searchsorted(least[starts] + sums[starts], sums[ends])
        after = np.clip(starts[np.minimum(crossing, len(starts) - 1)], None, ends - 1)
        before = np.clip(after - 1, chunk, None)
        worth = [np.maximum(least[j], sums[ends] - sums[j]) for j in (before, after)]
        best = np.minimum(*worth)
        first = np.maximum(np.searchsorted(sums, sums[ends] - best), chunk)
        least, cut_at = least.copy(), np.zeros(n + 1, np.int64)
        least[ends], cut_at[ends] = best, first
        cuts.append(cut_at)
    return _walk_back(cuts, n)


def fewest_chunks(tokens: np.ndarray, capacity: int) -> int:
    """The fewest chunks of the cut that all hold less than ``capacity`` tokens (one document may fill it)."""
    count = max(1, -(-int(tokens.sum()) // capacity))
    while count < len(tokens) and max(int(tokens[chunk].sum()) for chunk in cut(tokens, count)) >= capacity:
        count += 1
    return min(count, len(tokens))


def _walk_back(cuts: list[np.ndarray], n: int) -> list[np.ndarray]:
    """Chunks of the best cut of all ``n`` documents, from the last chunk's start to the first's."""
    chunks = []
    end = n
    for cut_at in reversed(cuts):
        start = int(cut_at[end])
        chunks.append(np.arange(start, end))
        end = start
    chunks.append(np.arange(end))
    return chunks[::-1]
