"""The bucketed mixed-integer programme of one micro-batch, on HiGHS.

Data: buckets ``q`` with ``b_q`` documents of ``s_q`` tokens; virtual groups ``p`` of ``d_p`` ranks, which
may be opened or not; ``N`` ranks that hold ``E`` tokens each; streams ``l``.

Variables: ``A_qp`` documents of bucket ``q`` in group ``p`` (whole, and only where ``d_p`` ranks hold one);
``m_p`` is 1 if group ``p`` is open; ``C`` the micro-batch's time in ms.

Minimise ``C`` subject to

    sum_p A_qp = b_q                                    every document has a place
    base_l + extra_lp m_p + sum_q cost_lpq A_qp <= C    for every stream; base is the least fixed cost,
                                                        charged to every group, open or not
    sum_q s_q A_qp <= d_p E m_p                         memory; closed groups are empty
    sum_q A_qp >= m_p                                   open groups are not
    sum_p d_p m_p = N                                   no rank idles (<= N where that is impossible)

These are the published rules. Two more follow from them and are written out, because without them HiGHS
has no useful bound: all work fits into N ranks for a time C, and with an answer of time T at hand, an open
group works at most T:

    base_l + sum_p d_p / N (extra_lp m_p + sum_q cost_lpq A_qp) <= C
    sum_q cost_lpq A_qp <= (T - fixed_lp) m_p
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqloom.errors import SeqloomError

MS = 1e-6
"""Milliseconds per nanosecond: times are scaled so that the solver's tolerances mean something."""


class Budget(NamedTuple):
    """When the solver stops working on one micro-batch."""

    nodes: int
    """Branch-and-bound nodes: the same answer on any machine."""
    gap: float
    """Relative distance to the solver's bound that is good enough; counts with ``nodes`` only."""
    time_limit_s: float | None = None
    """Seconds of wall time in place of the other two, as published."""

    def options(self) -> dict[str, Any]:
        """HiGHS settings: one thread, and one of the two budgets."""
        common: dict[str, Any] = {"threads": 1, "parallel": "off", "random_seed": 0}
        if self.time_limit_s is not None:
            return {**common, "time_limit": float(self.time_limit_s)}
        return {**common, "mip_max_nodes": self.nodes, "mip_rel_gap": self.gap}


@dataclass(frozen=True, eq=False)
class BucketedMilp:
    """One micro-batch. ``L`` streams, ``P`` virtual groups, ``Q`` buckets."""

    tokens: np.ndarray  # int64[Q] of one document
    count: np.ndarray  # int64[Q] documents
    degree: np.ndarray  # int64[P] ranks
    cost: np.ndarray  # int64[L, P, Q] ns one document adds
    fixed: np.ndarray  # int64[L, P] ns of an open group
    capacity: int  # tokens a rank holds
    ranks: int
    every_rank: bool = True  # whether the open groups must use every rank

    def value_ns(self, placed: np.ndarray) -> int | None:
        """Time of the slowest group with ``placed[q, p]`` documents in each; None if a rule is broken."""
        opened = placed.sum(axis=0) > 0
        used = int(self.degree[opened].sum())
        if (placed.sum(axis=1) != self.count).any() or (placed < 0).any() or used > self.ranks:
            return None
        if (self.tokens @ placed > self.degree * self.capacity).any() or (self.every_rank and used < self.ranks):
            return None
        times = self.fixed + np.einsum("lpq,qp->lp", self.cost, placed)
        return int(times[:, opened].max())

    def solve(self, start: np.ndarray | None, budget: Budget) -> np.ndarray | None:
        """int64[Q, P] documents of each bucket in each group; None if the solver found nothing.

        Args:
            start: an answer to begin with.
            budget: when to stop.
        """
        highspy = require_highspy()
        solver = highspy.Highs()
        solver.silent()
        for name, value in budget.options().items():
            solver.setOptionValue(name, value)
        limit = None if start is None else self.value_ns(start)
        q, p = self._pairs(limit)
        solver.passModel(self._model(q, p, limit))
        if start is not None and limit is not None:
            known = highspy.HighsSolution()
            opened = start.sum(axis=0) > 0
            known.col_value = [*start[q, p].tolist(), *opened.astype(float).tolist(), limit * MS]
            solver.setSolution(known)
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        placed = np.zeros((len(self.tokens), len(self.degree)), np.int64)
        placed[q, p] = np.rint(solver.getSolution().col_value[: len(q)]).astype(np.int64)
        return placed if self.value_ns(placed) is not None else None

    def _pairs(self, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Buckets and groups that go together: the group holds a document, and in time."""
        fits = self.tokens[:, None] <= self.degree * self.capacity
        if limit is not None:
            solo_ns = (self.cost + self.fixed[:, :, None]).max(axis=0)
            fits &= np.less_equal(solo_ns.T, limit)
        q, p = np.nonzero(fits)
        return q, p

    def _model(self, q: np.ndarray, p: np.ndarray, limit: int | None) -> Any:
        """The programme for HiGHS: columns A (for these pairs), m, C."""
        rows = self._rows(q, p, limit)
        groups = len(self.degree)
        time = len(q) + groups
        most = np.minimum(self.count[q], self.degree[p] * self.capacity // self.tokens[q])
        lower = np.append(np.zeros(time), self.fixed.min(axis=1).max() * MS)
        return highs_model(
            cost=np.append(np.zeros(time), 1.0),
            columns=(lower, np.concatenate([most, np.ones(groups), [np.inf]])),
            integer=[True] * time + [False],
            rows=(np.concatenate(rows.lower), np.concatenate(rows.upper)),
            matrix=rows.compressed(),
        )

    def _rows(self, q: np.ndarray, p: np.ndarray, limit: int | None) -> _Rows:
        """The rows, in the order of the module's text."""
        groups, rows = np.arange(len(self.degree)), _Rows()
        placed, opened = np.arange(len(q)), len(q) + groups
        time, one = np.array([len(q) + len(groups)]), np.zeros(1, np.int64)
        share = self.degree / self.ranks
        rows.add([(q, placed, 1.0)], self.count, self.count)
        rows.add([(p, placed, self.tokens[q] / self.capacity), (groups, opened, -self.degree)], -np.inf, groups * 0)
        rows.add([(p, placed, 1.0), (groups, opened, -1.0)], groups * 0, np.inf)
        rows.add([(one, opened, self.degree)], self.ranks if self.every_rank else 0, one + self.ranks)
        for stream in np.flatnonzero(self.cost.any(axis=(1, 2))):
            base = int(self.fixed[stream].min())
            extra, work = (self.fixed[stream] - base) * MS, self.cost[stream, p, q] * MS
            late = np.full(len(groups), -base * MS)
            rows.add([(p, placed, work), (groups, opened, extra), (groups, time, -1.0)], -np.inf, late)
            rows.add(
                [(one, placed, work * share[p]), (one, opened, extra * share), (one, time, -1.0)],
                -np.inf,
                late[:1],
            )
            if limit is not None:
                slack = (self.fixed[stream] - limit) * MS
                rows.add([(p, placed, work), (groups, opened, slack)], -np.inf, groups * 0)
        return rows


class _Rows:
    """Rows of a sparse matrix, collected block by block."""

    def __init__(self) -> None:
        self.count = 0
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self._terms: list[list[np.ndarray]] = []

    def add(
        self,
        terms: list[tuple[np.ndarray, np.ndarray, Any]],
        lower: np.ndarray | float,
        upper: np.ndarray | float,
    ) -> None:
        """Append a block of rows, as many as the bounds have entries.

        Args:
            terms: (row within the block, column, coefficient), broadcast together.
            lower: least activity of each row.
            upper: largest activity of each row.
        """
        low, high = np.broadcast_arrays(np.asarray(lower, float), np.asarray(upper, float))
        for row, column, value in terms:
            parts = np.broadcast_arrays(row + self.count, column, np.asarray(value, float))
            self._terms.append([np.asarray(part) for part in parts])
        self.lower.append(low)
        self.upper.append(high)
        self.count += len(low)

    def compressed(self) -> Matrix:
        """Row starts, columns and coefficients, row after row, without zeros."""
        row, column, value = (np.concatenate(part) for part in zip(*self._terms, strict=True))
        keep = np.flatnonzero(value)
        order = keep[np.lexsort((column[keep], row[keep]))]
        starts = np.searchsorted(row[order], np.arange(self.count + 1))
        return Matrix(starts.astype(np.int32), column[order].astype(np.int32), value[order])


class Matrix(NamedTuple):
    """A sparse matrix in compressed rows."""

    start: np.ndarray
    """int32[rows + 1]: where each row begins."""
    column: np.ndarray
    """int32[entries]"""
    value: np.ndarray
    """float64[entries]"""


def require_highspy() -> Any:
    """Import the solver HiGHS; SeqloomError with the way out if it is not installed."""
    try:
        import highspy
    except ImportError:
        raise SeqloomError("planners flexsp and exact need the HiGHS solver: pip install 'seqloom[exact]'") from None
    return highspy


def highs_model(
    cost: np.ndarray,
    columns: tuple[np.ndarray, np.ndarray],
    integer: Sequence[bool],
    rows: tuple[np.ndarray, np.ndarray],
    matrix: Matrix,
) -> Any:
    """A ``highspy.HighsLp``: minimise ``cost @ x`` with ``x`` and ``matrix @ x`` between their limits.

    Args:
        cost: float64[columns].
        columns: lower and upper limits of x; infinities are allowed.
        integer: bool per column.
        rows: lower and upper limits of ``matrix @ x``.
    """
    highspy = require_highspy()
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(rows[0])
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = columns
    model.row_lower_, model.row_upper_ = rows
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[bool(each)] for each in integer]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix
    return model
