"""Price documents for planner ``zones``, fill one round with them, even it out, and time it.

`ZonePrices` has every document on one rank, and the long ones in every group shape. Groups of a round may share ranks,
so `RankLoads` counts time and memory rank by rank. `fill_round` goes from the longest document to the shortest: it cuts
only where the target asks for it, and puts the rest whole on the least loaded rank. `swap_rebalance` then exchanges
whole documents between slow and fast ranks. `rank_times` and `finish` give the times of the cost model.

With a tensor degree, the ranks of a TP group do everything together. Then all that is said of ranks here is of TP
groups: degrees of shapes, ranks of a node or of a shard group, and the tokens that one holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import finish_round, join_shard_groups
from seqloom.cost.speeds import RankSpeeds
from seqloom.plan.limits import mixed_capacity
from seqloom.planners.loops import NEVER

PROBE = 1 << 16
"""Tokens at which the time of linear layers, which is proportional, is read off."""
CUTTABLE_SHARE = 8
"""Documents that take less than one part in this many of a rank's round are never cut: they serve to even out ranks."""
GROUPS_TRIED = 16
"""Groups of a shape that a document may join; it may open another anywhere."""
SWEEPS = 8
"""Times that the slow ranks are paired with the fast ones."""
MAX_SWAPPED = 8
"""Documents of a rank, the shortest ones, that may change ranks in a sweep."""
EVEN = 1000
"""Ranks that wait less than one part in this many count as even."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SingleRankPrices:
    """One batch under one policy, every document on one rank: enough to see whether the policy can win."""

    lengths: np.ndarray
    cost: CostModel
    policy: MemoryPolicy
    lighter_layers: int = 0  # Layers that recompute less than the policy says

    @property
    def slowness(self) -> float:
        """Times as long as by the profile that ranks compute on average, weighted by the work that each can do."""
        return self.ranks / self.speeds.total(self.ranks)

    @cached_property
    def tables(self) -> CostTables:
        """The documents on one rank of average speed, whether it holds them or not."""
        return self.priced(self.lengths, (GroupShape(self.cost.tensor, 1),), self.slowness)

    def priced(
        self, lengths: np.ndarray, shapes: Sequence[GroupShape] | None = None, slowness: float = 1.0
    ) -> CostTables:
        """Documents of these lengths in all shapes or these, on ranks so slow."""
        heavy = self.cost.tables(lengths, self.policy, shapes, slowness)
        if not self.lighter_layers:
            return heavy
        checkpoint, layers = self.policy.checkpoint.lighter, self.cost.model.layers
        assert checkpoint is not None
        policy = self.policy._replace(checkpoint=checkpoint)
        light, share = self.cost.tables(lengths, policy, shapes, slowness), self.lighter_layers / layers

        def between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.rint(a + (b - a) * share).astype(np.int64)

        return replace(
            heavy,
            cost=between(heavy.cost, light.cost),
            fixed=between(heavy.fixed, light.fixed),
            capacity=mixed_capacity(heavy.capacity, light.capacity, self.lighter_layers, layers),
        )

    @property
    def ranks(self) -> int:
        """That the cost model has."""
        return self.cost.ranks // self.cost.tensor

    @cached_property
    def speeds(self) -> RankSpeeds:
        """Of every rank."""
        return self.cost.speeds.of_blocks(self.cost.tensor)

    @property
    def min_rounds(self) -> int:
        """Rounds without which memory does not hold the batch."""
        return max(1, -(-int(self.tables.tokens.sum()) // (self.tables.capacity * self.cost.ranks)))

    def least_ns(self, rounds: int) -> int:
        """Step in ns if every rank were busy all the time, in so many rounds."""
        fixed, _, floor = self.tables.fixed[:, 0].tolist()
        work = int(self.tables.cost[0, 0].sum()) // self.ranks + rounds * fixed
        return max(work, rounds * floor) + self.cost.step_overhead_ns(self.policy)


class CutPrices(NamedTuple):
    """Prices of cutting long documents, each in a group of its own. ``m`` long documents, ``S`` shapes."""

    rank_ns: np.ndarray  # int64[S, m]: time on each rank of the group; NEVER where memory does not hold it
    total_ns: np.ndarray  # int64[S, m]: time of all its ranks together
    order: np.ndarray  # int64[S, m]: shapes by rising total
    cheapest: list[int]  # Least total of every document over shapes of several ranks


@dataclass(frozen=True, eq=False)
class ZonePrices:
    """One batch under one policy. Times in ns per rank; ``n`` documents, ``m`` long ones, ``S`` shapes.

    Of ranks of average speed, with the same for every class of ranks that differ in `by_class`.
    """

    cost: CostModel
    policy: MemoryPolicy
    ranks: int
    lighter_layers: int  # see `SingleRankPrices`
    speeds: RankSpeeds
    node_size: int  # Ranks of a node
    shard_group_size: int  # Ranks of a shard group
    capacity: int  # Tokens a rank holds in one round
    tokens: np.ndarray  # int64[n]: tokens a document occupies
    whole_ns: np.ndarray  # int64[n]: time of a document on one rank
    attention_ns: np.ndarray  # int64[n]: of that, its attention, which hides messages of other documents
    order: np.ndarray  # int64[n]: documents by falling time, ties by number
    fixed_ns: int  # Time of a rank's round before its first document
    floor_ns: int  # Parameter gathers and gradient reduction of a round: it is never shorter
    column: dict[int, int]  # Long document -> its column in what follows
    shapes: tuple[GroupShape, ...]
    compute_ns: np.ndarray  # int64[S, m]: computing and exposed exchanges of a document; NEVER: memory does not hold it
    ring_ns: np.ndarray  # int64[S, m]: the same with the ring's messages in place of attention; 0 without a ring
    nic_ns: np.ndarray  # int64[S, m]: occupancy of the NIC
    group_ns: np.ndarray  # int64[2, S]: what a group adds to the first two before its first document
    classes: tuple[ZonePrices, ...] = ()  # the same for each class of ranks, the fastest first; none: all are alike

    @classmethod
    def of(cls, single: SingleRankPrices) -> ZonePrices:
        """Price a batch; only documents that may be worth cutting are priced in every shape."""
        cost, tables = single.cost, single.tables
        whole = tables.cost[0, 0]
        order = np.argsort(-whole, kind="stable")
        least = int(whole.sum()) // (single.ranks * single.min_rounds * CUTTABLE_SHARE)
        long = order[(whole[order] > least) | (tables.tokens[order] > tables.capacity * cost.tensor)]
        own = cls._at(single, order, long, tables, single.slowness)
        if not single.speeds:
            return own
        one = (GroupShape(cost.tensor, 1),)
        of_class = (single.priced(single.lengths, one, each) for each in single.speeds.classes)
        both = zip(of_class, single.speeds.classes, strict=True)
        return replace(own, classes=tuple(cls._at(single, order, long, each, slowness) for each, slowness in both))

    @classmethod
    def _at(
        cls, single: SingleRankPrices, order: np.ndarray, long: np.ndarray, tables: CostTables, slowness: float
    ) -> ZonePrices:
        """Price a batch, and these documents in every shape, on ranks so slow; `tables` are of one such rank."""
        cost, policy, whole, capacity = single.cost, single.policy, tables.cost[0, 0], tables.capacity
        tensor, one = cost.tensor, GroupShape(cost.tensor, 1)
        cut = single.priced(single.lengths[long], slowness=slowness)
        fits = cut.tokens[None, :] <= cut.degree[:, None] * capacity
        fixed = int(tables.fixed[0, 0])
        probe = cost.document_ns(cost.padded_lengths(np.array([PROBE])), [(one, cost.aligned_traffic(one))], policy)
        token = sum(int(probe[name][0, 0]) for name in ("linear", "routed", "head") if name in probe)
        linear = tables.tokens * round(token * slowness) // PROBE
        hiding = np.maximum(0, whole - linear) if tensor == 1 else np.zeros_like(whole)  # by single ranks only
        return cls(
            cost=cost,
            policy=policy,
            ranks=single.ranks,
            lighter_layers=single.lighter_layers,
            speeds=single.speeds,
            node_size=cost.node_size // tensor,
            shard_group_size=cost.shard_group_size // tensor,
            capacity=capacity * tensor,
            tokens=-(-tables.tokens // tensor) * tensor,
            whole_ns=whole,
            attention_ns=hiding,
            order=order,
            fixed_ns=fixed,
            floor_ns=int(tables.fixed[2, 0]),
            column={k: i for i, k in enumerate(long.tolist())},
            shapes=tuple(shape._replace(ulysses=shape.ulysses // tensor) for shape in cut.shapes),
            compute_ns=np.where(fits, cut.cost[0], NEVER),
            ring_ns=cut.cost[1],
            nic_ns=cut.cost[2],
            group_ns=np.stack([cut.fixed[0] - fixed, np.where(cut.fixed[1] > 0, cut.fixed[1] - fixed, 0)]),
        )

    @cached_property
    def cut_prices(self) -> tuple[CutPrices, CutPrices]:
        """Prices of cuts: with the ring's messages exposed, and hidden behind the rank's other work."""
        computing = self.compute_ns + self.group_ns[0][:, None]
        exposed = np.maximum(computing, self.ring_ns + self.group_ns[1][:, None])
        degree = np.array([shape.degree for shape in self.shapes], np.int64)[:, None]
        found = []
        for rank_ns in (exposed, computing):
            total = np.where(rank_ns < NEVER, rank_ns * degree, NEVER)
            cheapest = np.where(degree > 1, total, NEVER).min(axis=0).tolist() if len(total) else []
            found.append(CutPrices(rank_ns, total, np.argsort(total, axis=0, kind="stable"), cheapest))
        return found[0], found[1]

    @cached_property
    def rank_class(self) -> list[int]:
        """The class of every rank, of `every_class`."""
        return self.speeds.class_of_rank.tolist() if self.classes else [0] * self.ranks

    @property
    def every_class(self) -> tuple[ZonePrices, ...]:
        """Prices for every class of ranks."""
        return self.classes or (self,)

    def slowest_of(self, ranks: Ranks) -> int:
        """The class of a group of these ranks: that of its slowest."""
        return max(self.rank_class[rank] for rank in ranks) if self.classes else 0

    @cached_property
    def tokens_list(self) -> list[int]:
        """`tokens` as a plain list, for loops over single documents."""
        return self.tokens.tolist()

    @cached_property
    def whole_ns_list(self) -> list[int]:
        """`whole_ns` as a plain list."""
        return self.whole_ns.tolist()


@dataclass(eq=False)
class RankLoads:
    """The documents of every rank in one round. Loads are estimates in ns."""

    load: list[int]
    tokens_left: list[int]
    whole: list[list[int]]  # Documents that are whole on each rank
    cut: dict[tuple[Ranks, int], list[int]] = field(default_factory=dict)  # (ranks, shape) -> documents of one group
    groups: dict[int, list[Ranks]] = field(default_factory=dict)  # Index of a shape -> the ranks of each group of it
    unplaced: list[int] = field(default_factory=list)  # Documents that found no room

    def place(self, cut: Cut, document: int) -> None:
        """Cut a document over ranks."""
        key = cut.ranks, cut.shape
        if key not in self.cut:
            self.cut[key] = []
            self.groups.setdefault(cut.shape, []).append(cut.ranks)
        self.cut[key].append(document)
        for rank in cut.ranks:
            self.load[rank] += cut.rank_ns
            self.tokens_left[rank] -= cut.share


class FillTarget(NamedTuple):
    """The target that a round is filled towards."""

    target: int  # ns after which every rank should be done, without the round's fixed cost
    limit: int  # ns that a single document may take of a rank; one that takes longer is cut
    break_even: int  # Per mille that a cut may cost above the whole document, where only balance asks for it
    hidden: bool = False  # Whether ring messages are taken to hide behind the rank's other work
    degrees: Mapping[int, int] = {}  # Document -> its least degree; 1 leaves it whole if one rank holds it


class Cut(NamedTuple):
    """A possible cut of a document: index of the shape, ns and tokens on each of its ranks, the ranks."""

    shape: int
    rank_ns: int
    share: int
    ranks: Ranks


def fill_round(prices: ZonePrices, documents: Sequence[int], begin: list[int], target: FillTarget) -> RankLoads:
    """Place the documents of one round, which come by falling time; rank i is free from ``begin[i]`` ns on."""
    loads = RankLoads(list(begin), [prices.capacity] * len(begin), [[] for _ in begin])
    tokens, whole = prices.tokens_list, prices.whole_ns_list
    cut, rest = [], []
    for at, k in enumerate(documents):
        if k not in prices.column:  # nor is any shorter one
            rest += documents[at:]
            break
        degree = target.degrees.get(k, 2 if whole[k] > target.limit else 1)
        (cut if degree > 1 or tokens[k] > prices.capacity else rest).append(k)
    _place_cut(prices, cut, loads, target)
    _place_rest(prices, rest, loads, target)
    return loads


def _place_cut(prices: ZonePrices, documents: Sequence[int], loads: RankLoads, target: FillTarget) -> None:
    load, tokens_left = np.array(loads.load), np.array(loads.tokens_left)
    for k in documents:
        cut = _cheapest_cut(prices, k, loads, load, tokens_left, target, int(NEVER), int(NEVER))
        if cut is None:
            loads.unplaced.append(k)
            continue
        loads.place(cut, k)
        at = list(cut.ranks)
        load[at] = [loads.load[rank] for rank in at]
        tokens_left[at] = [loads.tokens_left[rank] for rank in at]


def _place_rest(prices: ZonePrices, documents: Sequence[int], loads: RankLoads, target: FillTarget) -> None:
    """Put documents whole on the rank with room where they end first, or cut those that would end late there."""
    tokens, tokens_left, column = prices.tokens_list, loads.tokens_left, prices.column
    cheapest = prices.cut_prices[target.hidden].cheapest
    queues = [_FreeRanks(loads, prices.rank_class, own) for own in range(len(prices.every_class))]
    whole = [each.whole_ns_list for each in prices.every_class]
    load = loads.load
    for k in documents:
        size, ends, time, heap = tokens[k], int(NEVER), 0, None
        for queue, times in zip(queues, whole, strict=True):
            least = queue.least_loaded(size)
            if least is not None and least + times[k] < ends:
                ends, time, heap = least + times[k], times[k], queue.heap
        if ends > target.target and k in column and (k not in target.degrees or not heap):
            most = time + time * target.break_even // 1000 if heap else int(NEVER)
            if cheapest[column[k]] <= most:
                cut = _cheapest_cut(prices, k, loads, np.array(load), np.array(tokens_left), target, most, ends)
                if cut is not None:
                    loads.place(cut, k)
                    continue
        if not heap:
            loads.unplaced.append(k)
            continue
        rank = heap[0][1]
        load[rank] = ends
        tokens_left[rank] -= size
        loads.whole[rank].append(k)
        heapreplace(heap, (ends, rank))


class _FreeRanks:
    """The ranks of one class by their load, while documents are placed, longest first."""

    def __init__(self, loads: RankLoads, rank_class: Sequence[int], own: int) -> None:
        self.loads = loads
        self.heap = [(load, rank) for rank, load in enumerate(loads.load) if rank_class[rank] == own]
        heapify(self.heap)
        self.full: list[tuple[int, int]] = []  # (-tokens left, rank) of ranks without room for the document at hand

    def least_loaded(self, size: int) -> int | None:
        """Bring the least loaded rank that has room for so many tokens to the top; returns its load, None: no rank."""
        heap, full, load, tokens_left = self.heap, self.full, self.loads.load, self.loads.tokens_left
        while full and -full[0][0] >= size:
            held, rank = heappop(full)
            if -held == tokens_left[rank]:
                heappush(heap, (load[rank], rank))
            else:
                heappush(full, (-tokens_left[rank], rank))
        while heap:
            least, rank = heap[0]
            if tokens_left[rank] < size:
                heappop(heap)
                heappush(full, (-tokens_left[rank], rank))
            elif least != load[rank]:
                heapreplace(heap, (load[rank], rank))
            else:
                return least
        return None


def _cheapest_cut(
    prices: ZonePrices,
    k: int,
    loads: RankLoads,
    load: np.ndarray,
    tokens_left: np.ndarray,
    target: FillTarget,
    most: int,
    ends: int,
) -> Cut | None:
    """The cheapest cut of document ``k`` that ends within the target; else the one that ends first, before ``ends``.

    ``load`` and ``tokens_left``, int64[ranks], are those of ``loads``. The cut may cost ``most`` rank-ns.
    """
    at, size, tensor = prices.column[k], int(prices.tokens[k]), prices.cost.tensor
    priced = prices.cut_prices[target.hidden]
    by_class = [each.cut_prices[target.hidden].rank_ns[:, at].tolist() for each in prices.every_class]
    rank_ns, total_ns = priced.rank_ns[:, at].tolist(), priced.total_ns[:, at].tolist()
    limit, least = (int(NEVER), target.degrees[k]) if k in target.degrees else (target.limit, 2)
    best: Cut | None = None
    for s in priced.order[:, at].tolist():
        time, shape = rank_ns[s], prices.shapes[s]
        if total_ns[s] > most or time >= NEVER:
            break
        if shape.degree < max(2, least) or time > limit:
            continue
        share = -(-size // (shape.degree * tensor)) * tensor
        # a document that joins a group does not pay the group's own cost again
        own_ns = int(prices.group_ns[0, s] if target.hidden else prices.group_ns[:, s].min())
        joined = _best_group(prices, loads, s, share, [times[s] - own_ns for times in by_class])
        if joined is not None and joined[0] < ends:
            ends, best = joined[0], Cut(s, by_class[prices.slowest_of(joined[1])][s] - own_ns, share, joined[1])
        for own, times in enumerate(by_class):  # on ranks that are no slower
            here = load if len(by_class) == 1 else np.where(prices.speeds.class_of_rank <= own, load, NEVER)
            opened = best_ranks(shape, here, tokens_left, share, prices.node_size)
            if opened is not None and opened[0] + times[s] < ends:
                ends, best = opened[0] + times[s], Cut(s, times[s], share, opened[1])
        if ends <= target.target:
            break
    return best


def _best_group(
    prices: ZonePrices, loads: RankLoads, s: int, share: int, rank_ns: Sequence[int]
) -> tuple[int, Ranks] | None:
    """The group of this shape, among those there are, that ends first with ``rank_ns`` more, by class: (ns, ranks)."""
    best: tuple[int, Ranks] | None = None
    for ranks in loads.groups.get(s, ())[:GROUPS_TRIED]:
        end = max(loads.load[rank] for rank in ranks) + rank_ns[prices.slowest_of(ranks)]
        if (best is None or end < best[0]) and min(loads.tokens_left[rank] for rank in ranks) >= share:
            best = (end, ranks)
    return best


def best_ranks(
    shape: GroupShape, load: np.ndarray, tokens_left: np.ndarray, share: int, node_size: int
) -> tuple[int, Ranks] | None:
    """The least loaded ranks that a group of this shape may have, with the load of the fullest; None: no room.

    Each has room for ``share`` tokens. Inside a node these are any aligned Ulysses blocks of it (any ranks, for a pure
    ring), across nodes whole nodes. ``load`` and ``tokens_left`` are int64[ranks].
    """
    inner = shape.ulysses
    load = np.where(tokens_left >= share, load, NEVER)
    if shape.degree > node_size:
        width = max(inner, node_size)
        blocks = load[: len(load) // width * width].reshape(-1, width).max(axis=1)
        first, count = 0, shape.degree // width
    else:
        width, per_node = inner, node_size // inner
        rows = load.reshape(-1, node_size)[:, : per_node * inner].reshape(-1, per_node, inner).max(axis=2)
        worst = np.sort(rows, axis=1)[:, shape.ring - 1]
        node = int(worst.argmin())
        first, count, blocks = node * node_size, shape.ring, rows[node]
    chosen = np.argsort(blocks, kind="stable")[:count].tolist()
    fullest = int(blocks[chosen[-1]]) if len(chosen) == count else int(NEVER)
    if fullest >= NEVER:
        return None
    starts = (first + block * width for block in sorted(chosen))
    return fullest, tuple(rank for start in starts for rank in range(start, start + width))


def swap_rebalance(prices: ZonePrices, loads: RankLoads, times: np.ndarray, begin: np.ndarray) -> None:
    """Move or exchange whole documents between slow and fast ranks, all pairs of ranks at once, as long as it helps.

    The slowest rank is paired with the fastest and so on; in every other sweep with the least fast one and so on.
    ``times``, int64[ranks] ns that the ranks take from ``begin`` on, change along with the loads.
    """
    times += begin
    tokens_left = np.array(loads.tokens_left)
    even = int(times.sum()) // len(times)
    idle = 0  # sweeps without gain
    for sweep in range(SWEEPS):
        order = np.argsort(times, kind="stable")
        movable = np.array([bool(documents) for documents in loads.whole])
        slow = order[(times[order] - even > even // EVEN) & movable[order]][::-1]
        fast = order[times[order] <= even]
        pairs = min(len(slow), len(fast))
        if not pairs:
            break
        turned = fast[:pairs] if sweep % 2 == 0 else fast[:pairs][::-1]
        gained = _sweep(prices, loads, times, tokens_left, slow[:pairs].tolist(), turned.tolist())
        idle = 0 if gained else idle + 1
        if idle == 2:
            break
    times -= begin
    loads.tokens_left[:] = tokens_left.tolist()


def _sweep(
    prices: ZonePrices, loads: RankLoads, times: np.ndarray, tokens_left: np.ndarray, slow: list[int], fast: list[int]
) -> bool:
    """Make the best exchange of each pair: a document of the slow rank for one of the fast rank, or for none.

    Returns whether any pair gained.
    """
    given, taken = _shortest(loads, slow), _shortest(loads, fast)
    taken = np.concatenate([np.full((len(fast), 1), -1), taken], axis=1)
    # P pairs, G documents to give, T to take: shifts of time and tokens are int64[P, G, T]
    shift, shift_fast = (_exchanged_ns(prices, ranks, given, taken) for ranks in (slow, fast))
    more = prices.tokens[given][:, :, None] - np.where(taken < 0, 0, prices.tokens[taken])[:, None, :]
    before, after = times[slow], times[fast]
    later = np.maximum(before[:, None, None] - shift, after[:, None, None] + shift_fast)
    barred = (
        (more > tokens_left[fast][:, None, None]) | (-more > tokens_left[slow][:, None, None]) | (given < 0)[:, :, None]
    )
    barred |= np.concatenate([np.zeros((len(fast), 1), bool), taken[:, 1:] < 0], axis=1)[:, None, :]
    later = np.where(barred, before[:, None, None], later).reshape(len(slow), -1)
    best = later.argmin(axis=1)
    gained = later[np.arange(len(slow)), best] < before
    for pair in np.flatnonzero(gained).tolist():
        row, at = divmod(int(best[pair]), taken.shape[1])
        moved, back = int(given[pair, row]), int(taken[pair, at])
        loads.whole[slow[pair]].remove(moved)
        loads.whole[fast[pair]].append(moved)
        if back >= 0:
            loads.whole[fast[pair]].remove(back)
            loads.whole[slow[pair]].append(back)
        for rank, sign, ns in ((slow[pair], -1, shift), (fast[pair], 1, shift_fast)):
            times[rank] += sign * ns[pair, row, at]
            loads.load[rank] += sign * int(ns[pair, row, at])
            tokens_left[rank] -= sign * more[pair, row, at]
    return bool(gained.any())


def _exchanged_ns(prices: ZonePrices, ranks: list[int], given: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """int64[P, G, T] ns that documents take more on these ranks than others do, int64[P, G] and [P, T]; -1 is none."""
    if not prices.classes:
        return prices.whole_ns[given][:, :, None] - np.where(taken < 0, 0, prices.whole_ns[taken])[:, None, :]
    own = np.stack([each.whole_ns for each in prices.classes])[[prices.rank_class[rank] for rank in ranks]]
    more, less = np.take_along_axis(own, given, axis=1), np.take_along_axis(own, np.maximum(taken, 0), axis=1)
    return more[:, :, None] - np.where(taken < 0, 0, less)[:, None, :]


def _shortest(loads: RankLoads, ranks: list[int]) -> np.ndarray:
    """int64[ranks, MAX_SWAPPED]: the last whole documents of each rank, which are its shortest; -1: it has fewer."""
    width = max(1, min(MAX_SWAPPED, max(len(loads.whole[rank]) for rank in ranks)))
    rows = [loads.whole[rank][-width:] for rank in ranks]
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)


def rank_times(prices: ZonePrices, loads: RankLoads) -> np.ndarray:
    """int64[ranks] ns of the round: fixed cost, computing, and the ring messages that attention does not hide.

    A rank's whole documents have no messages of their own: their attention hides what a ring leaves exposed.
    """
    documents = np.fromiter(chain.from_iterable(loads.whole), np.int64)
    first = np.cumsum([0, *map(len, loads.whole)])
    whole_ns, attention_ns = prices.whole_ns[documents], prices.attention_ns[documents]
    if prices.classes:
        own = np.repeat(prices.rank_class, np.diff(first))
        whole_ns = np.stack([each.whole_ns for each in prices.classes])[own, documents]
        attention_ns = np.stack([each.attention_ns for each in prices.classes])[own, documents]
    busy = np.diff(np.append(0, np.cumsum(whole_ns))[first])
    filler = np.diff(np.append(0, np.cumsum(attention_ns))[first])
    exposed, nic = np.zeros((2, len(loads.load)), np.int64)
    for (members, s), cut in loads.cut.items():
        columns, own = [prices.column[k] for k in cut], prices.every_class[prices.slowest_of(members)]
        computing = int(own.compute_ns[s, columns].sum()) + int(own.group_ns[0, s])
        ring = int(own.ring_ns[s, columns].sum()) + int(own.group_ns[1, s])
        at = list(members)
        busy[at] += computing
        exposed[at] += max(0, ring - computing)
        nic[at] += int(prices.nic_ns[s, columns].sum())
    total = prices.fixed_ns + busy + np.maximum(0, exposed - filler)
    return np.where(busy > 0, np.maximum(total, prices.floor_ns + nic), 0)


def finish(prices: ZonePrices, loads: RankLoads, times: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """int64[shard groups] ns: when every shard group, free from ``ready`` on, is done after this round.

    ``times``, int64[ranks], are ns that each rank takes in the round.
    """
    size = prices.shard_group_size
    slowest = times.reshape(-1, size).max(axis=1)
    joined = join_shard_groups({rank // size for rank in members} for members, _ in loads.cut)
    return finish_round(ready, slowest, joined)
