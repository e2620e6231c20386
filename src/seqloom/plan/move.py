"""From one layout to another: who sends which boxes to whom.

Handing out data, the Ulysses exchange, stage to stage, remapping for linear layers and parameter resharding
are all moves. The arithmetic is done on cells: all starts and stops of both layouts cut every item into a
grid, every box is a rectangle of whole cells, and for every cell that a rank needs one holder is chosen.
Equal neighbours are then joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.plan.boxes import Boxes, Column, as_column, merge_touching, settle_columns
from seqloom.plan.error import PlanError
from seqloom.plan.grid import Grid
from seqloom.plan.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Move(Boxes):
    """Boxes with a sender and a receiver, sorted by sender, receiver, item and start.

    A box whose sender is its receiver is a local copy. Columns are int64[n], the last two None with one axis.
    """

    sender: Column
    receiver: Column
    item: Column
    start: Column
    stop: Column
    start2: Column | None = None
    stop2: Column | None = None

    def __post_init__(self) -> None:
        """Bring the boxes into the canonical order and make them read-only."""
        columns = merge_touching([as_column(column) for column in self.columns()], keys=3)
        settle_columns(self, columns)

    @property
    def remote(self) -> Column:
        """Which boxes travel, bool[n]: those whose sender is not their receiver."""
        return self.sender != self.receiver

    def __repr__(self) -> str:
        """Say how much moves, not every box."""
        travels = int(self.sizes[self.remote].sum())
        return f"Move({len(self)} boxes, {self.axes} axes, {travels} of {int(self.sizes.sum())} elements travel)"


def move_between(source: Layout, target: Layout, *, node_size: int | None = None) -> Move:
    """Return the move after which every rank holds what `target` gives it.

    Every box of the target is received exactly once. A rank that holds something already keeps it (a local
    copy). Otherwise the sender is, among the holders: one in the receiver's node if `node_size` is given,
    then the one that sends the fewest elements so far, then the lowest rank.

    Args:
        source: who holds what before; may replicate.
        target: who shall hold what after; may replicate, and may leave things out.
        node_size: ranks per node.
    """
    if not len(target):
        return Move(*(np.empty(0, dtype=np.int64) for _ in range(3 + 2 * target.axes)))
    if source.axes != target.axes and len(source):
        raise PlanError(
            f"source has {source.axes} axes, target {target.axes}; they need the same, use Layout.with_axis"
        )
    grid = Grid.over(source if len(source) else Layout.empty(target.axes), target)
    needed, box = grid.cells(target)
    receiver = target.rank[box]
    sender = _choose_senders(source, grid, needed, receiver, node_size)
    first, second = np.divmod(needed, grid.width)
    columns = [sender, receiver, target.item[box], grid.edges[0][first], grid.edges[0][first + 1]]
    if target.axes == 1:
        return Move(*columns)
    across = [*columns, grid.edges[1][second], grid.edges[1][second + 1]]
    # Join along the second axis first (axes exchanged); Move then joins whole strips along the first.
    swapped = merge_touching([*across[:3], *across[5:7], *across[3:5]], keys=3)
    return Move(*swapped[:3], *swapped[5:7], *swapped[3:5])


def _choose_senders(source: Layout, grid: Grid, needed: Column, receiver: Column, node_size: int | None) -> Column:
    """Return a holder for every needed cell: the receiver, else the only candidate, else the least loaded."""
    held, box = grid.cells(source)
    holder = source.rank[box]
    order = np.lexsort([holder, held])
    held, holder = held[order], holder[order]
    low, high = np.searchsorted(held, needed, side="left"), np.searchsorted(held, needed, side="right")
    _refuse_missing(low == high, grid, needed, receiver)

    if node_size is not None:
        low, high, _ = _narrow(held, holder, needed, receiver, low, high, node_size)
    low, high, local = _narrow(held, holder, needed, receiver, low, high, 1)
    sender = holder[low]
    size = grid.sizes(needed)
    load = np.zeros(int(holder.max()) + 1, dtype=np.int64)
    forced = (high - low == 1) & ~local
    np.add.at(load, sender[forced], size[forced])
    for k in np.flatnonzero(high - low > 1):
        candidates = holder[low[k] : high[k]]
        sender[k] = candidates[np.argmin(load[candidates])]
        load[sender[k]] += size[k]
    return sender


def _narrow(
    held: Column, holder: Column, needed: Column, receiver: Column, low: Column, high: Column, block: int
) -> tuple[Column, Column, Column]:
    """Narrow the candidates low..high to those in the receiver's block of ranks, where there are any.

    Holders are sorted within a cell, so the ranks of a block are neighbours. Returns low, high and where it
    narrowed.
    """
    blocks = int(max(holder.max(), receiver.max())) // block + 1
    code = _codes(held, needed)
    have = code[: len(held)] * blocks + holder // block
    want = code[len(held) :] * blocks + receiver // block
    begin, end = np.searchsorted(have, want, side="left"), np.searchsorted(have, want, side="right")
    near = end > begin
    return np.where(near, begin, low), np.where(near, end, high), near


def _codes(held: Column, needed: Column) -> Column:
    """Number the cells without gaps, so that (cell, rank) fits one integer."""
    return np.unique(np.concatenate([held, needed]), return_inverse=True)[1]


def _refuse_missing(missing: np.ndarray, grid: Grid, needed: Column, receiver: Column) -> None:
    if not missing.any():
        return
    k = int(np.flatnonzero(missing)[0])
    first, second = divmod(int(needed[k]), grid.width)
    item = grid.items[grid.keys[0][first] // len(grid.values[0])]
    where = f"[{grid.edges[0][first]}:{grid.edges[0][first + 1]})"
    if grid.width > 1:
        where += f"x[{grid.edges[1][second]}:{grid.edges[1][second + 1]})"
    raise PlanError(
        f"rank {receiver[k]} shall receive item {item} {where}, which nobody holds; "
        "a target may only ask for what the source holds, add it to the source"
    )
