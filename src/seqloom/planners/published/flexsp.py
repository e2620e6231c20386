"""Planner ``flexsp``: the published system, from its paper and its released solver.

1. The blaster cuts the batch, sorted by length, into M micro-batches of as equal tokens as possible; M runs from the
   least that fits the cluster over ``counts`` values.
2. Every micro-batch is bucketed and its mixed-integer programme solved, beginning with the best homogeneous answer.
3. Concrete documents are drawn at random from each bucket; the step is priced with their true lengths; the best M wins.

All groups of a micro-batch run side by side over the whole cluster, whatever the sharding. The most promising M is
solved first, and an M that can no longer win is given up: that saves time and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from seqloom.cost import CostModel, CostTables
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.loops import NEVER
from seqloom.planners.packing import least_loaded
from seqloom.planners.problem import BatchProblem, GroupPlacement, fitting_problems
from seqloom.planners.recompute import CHECKPOINTS
from seqloom.planners.uniform import holding_degrees, uniform_answers

ROWS = 512
"""Ends of buckets whose starts are compared at once: limits the memory of the dynamic programme."""
Matrix = tuple[np.ndarray, np.ndarray, np.ndarray]
"""A sparse matrix in compressed rows: int32 where each row begins, int32 columns and float64 values of its entries."""
MS = 1e-6
"""Milliseconds per nanosecond: times are scaled so that the solver's tolerances mean something."""


def plan_flexsp(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    smallest: int = 1,
    buckets: int = 16,
    counts: int = 5,
    nodes: int = 1,
    gap: float = 0.05,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a batch, int64[n] tokens, as FlexSP does.

    Args:
        smallest: least degree of a group. 1 is the paper's; the released solver begins at 2.
        buckets: per micro-batch to begin with.
        counts: values of M to try.
        nodes: branch-and-bound nodes per micro-batch. The plan is the same on any machine.
        gap: a micro-batch this close to the solver's bound is good enough; counts with ``nodes``.
        time_limit_s: wall seconds per micro-batch in place of ``nodes`` and ``gap`` (published: 10). The plan
            then depends on the machine.
        seed: of the draw from the buckets.
    """
    require_highspy()
    problem = _fastest_problem(lengths, cost)
    menu = _menu(problem, smallest)
    options = solver_options(nodes, gap, time_limit_s)
    best: tuple[int, list[list[GroupPlacement]]] | None = None
    for window in _windows(problem, menu, buckets, counts):
        for micro_batches in sorted(window, key=_promise):
            found = _solve(problem, menu, micro_batches, options, seed, None if best is None else best[0])
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is not None:
            return problem.plan(best[1], "flexsp")
    raise SeqloomError(f"flexsp found no plan for this batch on {cost.ranks} GPUs; use planner adaptive or flex")


def _fastest_problem(lengths: np.ndarray, cost: CostModel) -> BatchProblem:
    """The batch under the policy in which homogeneous groups are fastest: the published solver knows only one."""
    problems = fitting_problems(lengths, cost)
    if len(problems) == 1:
        return problems[0]
    answers = uniform_answers(problems, holding_degrees(problems, 1))
    return min(answers, key=lambda answer: answer.ns).problem


def _menu(problem: BatchProblem, smallest: int) -> dict[int, int]:
    """Degree to shape index, ascending: powers of two and the whole cluster, each in its cheapest shape.

    On nodes of another size: powers of two that divide a node, and nodes by powers of two. Each then divides the next,
    so that groups in falling order of degree always lie on aligned ranks.
    """
    tables, node, ranks = problem.tables, problem.cost.node_size, problem.cost.ranks
    total = (tables.fixed + tables.cost.sum(axis=2)).max(axis=0)
    menu: dict[int, int] = {}
    for degree in np.unique(tables.degree).tolist():
        inside = node % degree == 0 and degree & (degree - 1) == 0
        nodes = degree // node if degree % node == 0 else 0
        if inside or degree == ranks or (nodes and nodes & (nodes - 1) == 0):
            shapes = np.flatnonzero(tables.degree == degree)
            menu[degree] = int(shapes[total[shapes].argmin()])
    if max(menu) * tables.capacity < tables.tokens.max():
        raise SeqloomError(
            f"flexsp has groups of {', '.join(map(str, menu))} GPUs here, none holds a sequence of "
            f"{tables.tokens.max()} tokens; use planner adaptive or flex"
        )
    return {degree: shape for degree, shape in menu.items() if degree >= smallest} or menu


def _windows(
    problem: BatchProblem, menu: dict[int, int], buckets: int, counts: int
) -> Iterator[list[list[MicroBatch]]]:
    """Micro-batches for each M: the first ``counts`` values together, the others one at a time."""
    tokens, ranks = problem.tables.tokens, problem.cost.ranks
    order = np.argsort(-tokens, kind="stable")

    def micro_batches(count: int) -> list[MicroBatch]:
        return [MicroBatch.of(problem, menu, order[chunk], buckets) for chunk in blast(tokens[order], count)]

    first = fewest_chunks(tokens[order], ranks * problem.tables.capacity)
    later = min(first + counts, len(order) + 1)
    yield [micro_batches(count) for count in range(first, later)]
    for count in range(later, len(order) + 1):
        yield [micro_batches(count)]


def _promise(micro_batches: list[MicroBatch]) -> tuple[bool, int, int]:
    """Sort key: the homogeneous answers' time, ns; those without one come last."""
    starts = [one.start[0] for one in micro_batches if one.start is not None]
    return len(starts) < len(micro_batches), sum(starts), len(micro_batches)


def _solve(
    problem: BatchProblem,
    menu: dict[int, int],
    micro_batches: list[MicroBatch],
    options: Mapping[str, Any],
    seed: int,
    to_beat: int | None,
) -> tuple[int, list[list[GroupPlacement]]] | None:
    """Step time and rounds for one M; None if a micro-batch has no answer or ``to_beat`` ns stands."""
    random = Random(seed)
    lock_step = problem.cost.shard_group_size == problem.cost.ranks
    fastest = problem.tables_at(next(c for c in CHECKPOINTS if c in problem.capacities))
    floors = [floor_ns(fastest, one.documents, problem.cost.ranks) if lock_step else 0 for one in micro_batches]
    rounds: list[list[GroupPlacement]] = []
    for number, one in enumerate(micro_batches):
        if to_beat is not None and problem.step_ns(rounds) + sum(floors[number:]) >= to_beat:
            return None
        placed = one.answer(options)
        if placed is None:
            return None
        rounds.append(_placements(problem, menu, one.milp.degree, one.draw(placed, random)))
    return problem.step_ns(rounds), rounds


def _placements(
    problem: BatchProblem, menu: dict[int, int], degree: np.ndarray, groups: list[list[int]]
) -> list[GroupPlacement]:
    """Place groups, degrees falling, on consecutive ranks: each then begins at a multiple of its size."""
    placed, start = [], 0
    for size, documents in zip(degree.tolist(), groups, strict=True):
        if documents:
            placed.append(GroupPlacement(problem.tables.shapes[menu[size]], start, documents))
            start += size
    return placed


def floor_ns(tables: CostTables, documents: np.ndarray, ranks: int) -> int:
    """ns that no micro-batch of these documents beats: the longest in a group of its own; all work on all ranks."""
    degree = tables.degree[:, None]
    fits = tables.tokens[documents] <= degree * tables.capacity
    cost = tables.cost[:, :, documents]
    longest = np.where(fits, (cost + tables.fixed[:, :, None]).max(axis=0), NEVER).min(axis=0).max()
    work = np.where(fits, cost * degree, NEVER).min(axis=1).sum(axis=1) // ranks
    return max(int(longest), int((work + tables.fixed.min(axis=1)).max()))


# The blaster. Micro-batch i ends at the document where the largest token sum so far is least:
#
#     least[i][k] = min over j < k of max(least[i - 1][j], tokens of documents j .. k)
#
# The first term rises with j and the second falls, so the best cut lies where they cross: one binary search instead of
# a scan, and still exact.


def blast(tokens: np.ndarray, count: int) -> list[np.ndarray]:
    """Cut documents into ``count`` consecutive, non-empty chunks with the least largest token sum.

    Of equally good cuts the last chunk is the longest, then the one before it: the published tie-break. Returns the
    positions in each chunk, in order.
    """
    n = len(tokens)
    sums = np.concatenate([[0], np.cumsum(tokens)])
    least = sums.copy()  # one chunk: everything up to k
    starts_of_last = []
    for chunk in range(1, count):
        starts = np.arange(chunk, n)  # earlier chunks hold one document at least
        ends = np.arange(chunk + 1, n + 1)
        crossing = np.searchsorted(least[starts] + sums[starts], sums[ends])
        after = np.clip(starts[np.minimum(crossing, len(starts) - 1)], None, ends - 1)
        before = np.clip(after - 1, chunk, None)
        best = np.minimum(*(np.maximum(least[j], sums[ends] - sums[j]) for j in (before, after)))
        first = np.maximum(np.searchsorted(sums, sums[ends] - best), chunk)
        least, start_of_last = least.copy(), np.zeros(n + 1, np.int64)
        least[ends], start_of_last[ends] = best, first
        starts_of_last.append(start_of_last)
    edges = [n]
    for start_of_last in reversed(starts_of_last):
        edges.append(int(start_of_last[edges[-1]]))
    edges.append(0)
    return [np.arange(start, end) for end, start in pairwise(edges)][::-1]


def fewest_chunks(tokens: np.ndarray, capacity: int) -> int:
    """The fewest chunks of the cut that all hold less than ``capacity`` tokens (one document may fill it)."""
    count = max(1, -(-int(tokens.sum()) // capacity))
    while count < len(tokens) and max(int(tokens[chunk].sum()) for chunk in blast(tokens, count)) >= capacity:
        count += 1
    return min(count, len(tokens))


# Buckets: documents of similar length count as equals, at the length of the longest of them. Dynamic programming over
# distinct lengths in rising order chooses the edges that add the fewest tokens:
#
#     error[q][k] = min over j < k of error[q - 1][j] + sum over i in j .. k of (length[k] - length[i])


def bucket(tokens: np.ndarray, least: int, capacity: int) -> list[np.ndarray]:
    """Bucket the documents of one micro-batch, int64[n] tokens, with the least added tokens: positions, rising length.

    Begins with ``least`` buckets; more follow, one by one, until the bucketed tokens are at most half-way between the
    true ones and ``capacity``, that of the cluster, so that rounding up never makes a micro-batch look too large.
    """
    values, kind, copies = np.unique(tokens, return_inverse=True, return_counts=True)
    total = int(tokens.sum())
    weight = np.concatenate([[0], np.cumsum(copies)])
    sums = np.concatenate([[0], np.cumsum(copies * values)])
    error = values * weight[1:] - sums[1:]  # one bucket
    starts = [np.zeros(len(values), np.int64)]
    while len(starts) < len(values):
        if len(starts) >= least and 2 * (total + int(error[-1])) <= total + capacity:
            break
        error, start = _one_more(error, values, weight, sums)
        starts.append(start)
    edges = [len(values)]
    for start in reversed(starts):
        edges.append(int(start[edges[-1] - 1]))
    edges.reverse()
    owner = np.searchsorted(np.array(edges[1:]), kind, side="right")
    return [np.flatnonzero(owner == q) for q in range(len(starts))]


def _one_more(
    error: np.ndarray, values: np.ndarray, weight: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors and last bucket starts with one bucket more; ``error[k]`` covers values ``0 .. k``."""
    n = len(values)
    begun = np.concatenate([error[:1], error[:-1]])  # error of everything before value j, for j >= 1
    best, start = error.copy(), np.zeros(n, np.int64)
    for low in range(1, n, ROWS):
        ends = np.arange(low, min(low + ROWS, n))
        starts = np.arange(1, ends[-1] + 1)
        added = values[ends, None] * (weight[ends + 1, None] - weight[starts])
        added -= sums[ends + 1, None] - sums[starts]
        added += begun[starts]
        added[starts > ends[:, None]] = np.iinfo(np.int64).max
        choice = added.argmin(axis=1)
        best[ends], start[ends] = added[np.arange(len(ends)), choice], starts[choice]
    return best, start


# One micro-batch: its buckets, its virtual groups, its programme and the homogeneous answer to begin with.


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents that run side by side, and the programme that places them."""

    documents: np.ndarray  # int64[n] indices into the batch
    buckets: list[np.ndarray]  # positions of the documents in each
    milp: BucketedMilp
    start: tuple[int, np.ndarray] | None  # Best homogeneous answer: ns and documents of each bucket in each group

    @classmethod
    def of(cls, problem: BatchProblem, menu: dict[int, int], documents: np.ndarray, least: int) -> MicroBatch:
        """Set up a micro-batch; ``menu`` has shape indices by degree, ascending, ``least`` is that of `bucket`."""
        tables, ranks = problem.tables, problem.cost.ranks
        tokens = tables.tokens[documents]
        buckets = bucket(tokens, least, ranks * tables.capacity)
        degree = virtual_groups(np.array(list(menu)), tokens, tables.capacity, ranks)
        shapes = np.array([menu[d] for d in degree.tolist()])
        longest = [documents[members[tokens[members].argmax()]] for members in buckets]
        count = np.array([len(members) for members in buckets], np.int64)
        cost, fixed = tables.cost[:, shapes][:, :, longest], tables.fixed[:, shapes]
        milp = BucketedMilp(tables.tokens[longest], count, degree, cost, fixed, tables.capacity, ranks)
        start = best_start(milp)
        if start is None and ranks not in menu:  # groups of the menu may be unable to use every rank: let some idle
            milp = replace(milp, every_rank=False)
            start = best_start(milp)
        return cls(documents, buckets, milp, start)

    def answer(self, options: Mapping[str, Any]) -> np.ndarray | None:
        """int64[Q, P] documents of each bucket in each group; the start if the solver finds nothing."""
        known = None if self.start is None else self.start[1]
        found = self.milp.solve(known, options)
        return known if found is None else found

    def draw(self, placed: np.ndarray, random: Random) -> list[list[int]]:
        """Documents of each group: concrete ones, drawn at random from each bucket to fill the counts."""
        groups: list[list[int]] = [[] for _ in self.milp.degree]
        for members, counts in zip(self.buckets, placed.tolist(), strict=True):
            drawn = self.documents[members].tolist()
            random.shuffle(drawn)
            for group, count in enumerate(counts):
                groups[group] += drawn[:count]
                del drawn[:count]
        return groups


def virtual_groups(degrees: np.ndarray, tokens: np.ndarray, capacity: int, ranks: int) -> np.ndarray:
    """Degrees of the groups that may be opened, falling; ``degrees``, int64[D], ascend.

    Published pruning: beside the documents that need the largest degree, each counted in a group of its own, smaller
    degrees get only what is left of the cluster.
    """
    needed = degrees[np.searchsorted(degrees * capacity, tokens)]
    largest = int(needed.max())
    left = ranks - largest * int((needed == largest).sum())
    copies = [max(0, left if degree < largest else ranks) // degree for degree in degrees.tolist()]
    return np.repeat(degrees, copies)[::-1]


def best_start(milp: BucketedMilp) -> tuple[int, np.ndarray] | None:
    """The fastest homogeneous answer: ns and int64[Q, P] documents; None if none obeys every rule."""
    placed = [homogeneous(milp, degree) for degree in np.unique(milp.degree).tolist()]
    found = [(value, each) for each in placed if each is not None and (value := milp.value_ns(each)) is not None]
    return min(found, key=lambda answer: answer[0], default=None)


def homogeneous(milp: BucketedMilp, degree: int) -> np.ndarray | None:
    """Place documents, longest first, on the group of this degree with the fewest tokens; None if they do not fit."""
    groups = np.flatnonzero(milp.degree == degree)
    order = np.argsort(-milp.tokens, kind="stable")
    buckets = np.repeat(order, milp.count[order])
    sizes = milp.tokens[buckets]
    group = least_loaded(sizes, sizes, len(groups), degree * milp.capacity)
    if group is None:
        return None
    placed = np.zeros((len(milp.tokens), len(milp.degree)), np.int64)
    np.add.at(placed, (buckets, groups[group]), 1)
    return placed


# The mixed-integer programme of one micro-batch, on HiGHS.
#
# Data: buckets ``q`` with ``b_q`` documents of ``s_q`` tokens; virtual groups ``p`` of ``d_p`` ranks, which
# may be opened or not; ``N`` ranks that hold ``E`` tokens each; streams ``l``.
#
# Variables: ``A_qp`` documents of bucket ``q`` in group ``p`` (whole, and only where ``d_p`` ranks hold one);
# ``m_p`` is 1 if group ``p`` is open; ``C`` the micro-batch's time in ms.
#
# Minimise ``C`` subject to
#
#     sum_p A_qp = b_q                                    every document has a place
#     base_l + extra_lp m_p + sum_q cost_lpq A_qp <= C    for every stream; base is the least fixed cost,
#                                                         charged to every group, open or not
#     sum_q s_q A_qp <= d_p E m_p                         memory; closed groups are empty
#     sum_q A_qp >= m_p                                   open groups are not
#     sum_p d_p m_p = N                                   no rank idles (<= N where that is impossible)
#
# These are the published rules. Two more follow from them and are written out, because without them HiGHS
# has no useful bound: all work fits into N ranks for a time C, and with an answer of time T at hand, an open
# group works at most T:
#
#     base_l + sum_p d_p / N (extra_lp m_p + sum_q cost_lpq A_qp) <= C
#     sum_q cost_lpq A_qp <= (T - fixed_lp) m_p


def solver_options(nodes: int, gap: float, time_limit_s: float | None = None) -> dict[str, Any]:
    """HiGHS settings: one thread, and when to stop on one micro-batch, see `plan_flexsp`."""
    common: dict[str, Any] = {"threads": 1, "parallel": "off", "random_seed": 0}
    if time_limit_s is not None:
        return {**common, "time_limit": float(time_limit_s)}
    return {**common, "mip_max_nodes": nodes, "mip_rel_gap": gap}


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

    def solve(self, start: np.ndarray | None, options: Mapping[str, Any]) -> np.ndarray | None:
        """int64[Q, P] documents of each bucket in each group, from a ``start``; None if the solver found nothing."""
        highspy = require_highspy()
        solver = highspy.Highs()
        solver.silent()
        for name, value in options.items():
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
        """Append a block of rows: (row within the block, column, coefficient) broadcast together, between bounds."""
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
        return starts.astype(np.int32), column[order].astype(np.int32), value[order]


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

    ``columns`` and ``rows`` are the lower and upper limits of the two; infinities are allowed.
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
