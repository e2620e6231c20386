"""Planner ``zones``: split the batch into rounds, fill each with groups that may share ranks, keep the best policy.

After Zeppelin's zones, but by price instead of by length: every round is filled towards several targets, then the
degree of one document at a time is changed, and the filling that is done first is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.describe import Batch
from seqloom.plan import Checkpoint, Group, Plan, StageMicroBatch
from seqloom.plan.limits import mixed_capacity
from seqloom.planners.loops import NEVER
from seqloom.planners.packing import least_loaded
from seqloom.planners.problem import (
    BatchProblem,
    build_plan,
    whole_documents,
)
from seqloom.planners.recompute import checkpoint_capacities, fastest_checkpoint, with_layer_choices
from seqloom.planners.remap import with_remapping
from seqloom.planners.zones.fill import (
    FillTarget,
    RankLoads,
    SingleRankPrices,
    ZonePrices,
    fill_round,
    finish,
    rank_times,
    swap_rebalance,
)

EVALUATIONS = 1_200
"""Documents placed, over all fillings of the batch, where no budget is given."""
MIN_FILLINGS, MAX_FILLINGS = 2, 128
"""Fillings of each round then."""
FILL_ONCE_FROM = 4_096
"""Documents from which on every round is filled once: a second filling gains less than one part in 300 there."""
QUICK_FROM = 512
"""Documents from which on, where no budget is given, one number of rounds is tried."""
SPARE = 16
"""One part in this many of a round's memory is left free to place documents."""
WORTH = 200
"""What can gain less than one part in this many is not tried."""
FILLER = 40
"""Per cent of the tokens, in the shortest documents, that even out the ranks of every round."""
MAX_TARGETS = 16
"""Fillings towards different targets at most; what is left of the budget goes to single degrees."""
LIMITS = (50, 100, 25, 75)
"""What a document may take of a rank, per cent of the target: cut finer, long ones leave room for short ones."""
MUCH = 30
"""Per mille of waiting that voluntary cuts may well remove, unless memory is tight: then finer cuts are tried first."""
TIGHT = 80
"""Per cent of the memory of a round from which on it is tight."""
MAX_COMBINATIONS = 100
"""Up to so many combinations of degrees, all are tried."""
SLOW_RANKS = 2
"""Slowest ranks whose documents are tried in other degrees."""
MAX_MIXTURES = 3
"""Numbers of lighter layers and rounds that are filled, at most."""
SLACKS = (2, 0, 5, 10)
"""How far targets are above the time at which all ranks would end together, per cent."""


@dataclass(frozen=True, eq=False)
class FilledRounds:
    """The batch in filled rounds under one policy, and the time of the step."""

    ns: int
    prices: ZonePrices
    rounds: list[RankLoads]


def plan_zones(
    lengths: np.ndarray, cost: CostModel, *, evaluations: int | None = None, only: MemoryPolicy | None = None
) -> Plan:
    """Plan a batch, int64[n] tokens, with groups that may share ranks.

    ``evaluations`` are fillings of each round; None chooses by size. ``only`` is the one policy to plan for; None tries
    all that can still win.
    """
    array = Batch.of(lengths).lengths
    policies = [policy for policy in cost.policies if only in (None, policy)]
    longest = int(cost.padded_lengths(array.max(keepdims=True))[0])
    most = max(shape.degree for shape in cost.shapes)
    holding = [SingleRankPrices(array, cost, p) for p in policies if longest <= most * cost.capacity(p)]
    if not holding:
        widest = max(policies, key=cost.capacity)
        raise BatchProblem(array, cost, widest).too_long()
    best: FilledRounds | None = None
    quick = evaluations is None and len(array) >= QUICK_FROM
    least = 1 if len(array) >= FILL_ONCE_FROM else MIN_FILLINGS
    fillings = max(least, min(MAX_FILLINGS, EVALUATIONS // len(array))) if evaluations is None else max(1, evaluations)
    for single in sorted(holding, key=lambda single: single.least_ns(single.min_rounds)):
        if best is not None and not _may_win(single.least_ns(single.min_rounds), best.ns):
            break
        prices = ZonePrices.of(single)
        for rounds in round_counts(single, quick):
            for split in (split_sorted,) if quick or rounds == 1 else (split_sorted, split_lpt):
                if best is None or _may_win(single.least_ns(rounds), best.ns):
                    answer = fill_rounds(prices, split(prices, rounds), fillings)
                    best = answer if best is None or answer.ns < best.ns else best
    assert best is not None
    plans = [plan_of(best.prices, best.rounds, array)]
    if mixes := mixtures(holding)[: 1 if quick else MAX_MIXTURES]:
        mixed = fill_mixtures(mixes, fillings, cost.plan_ns(with_layer_choices(plans[0], cost)))
        plans += [] if mixed is None else [plan_of(mixed.prices, mixed.rounds, array)]
    plans = plans if quick else [with_remapping(plan, cost) for plan in plans]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: cost.plan_ns(with_layer_choices(plan, cost)))


Mixture = tuple[SingleRankPrices, int]
"""Prices with so many lighter layers, and the rounds that they are for."""


def fill_mixtures(mixes: Sequence[Mixture], fillings: int, best_ns: int) -> FilledRounds | None:
    """Fill fewer rounds than a checkpoint needs, some of whose layers recompute more; None if none beats ``best_ns``.

    Rounds that only just hold their documents even their tokens out, and not their times; rounds of the heavier
    checkpoint alone fill one rank much more than another, which that rank pays for in layers that recompute. So as many
    layers recompute more as leave the usual room to place documents, or twice as much.
    """
    best: FilledRounds | None = None
    for single, rounds in mixes:
        if _may_win(single.least_ns(rounds), best_ns):
            prices = ZonePrices.of(single)
            answer = fill_rounds(prices, split_sorted(prices, rounds), fillings)
            best, best_ns = (answer, answer.ns) if answer.ns < best_ns else (best, best_ns)
    return best


def mixtures(holding: Sequence[SingleRankPrices]) -> list[Mixture]:
    """Mixtures of all pairs of checkpoints, the most promising first."""
    of_policy, mixes = {single.policy: single for single in holding}, []
    for heavy in holding:
        light = of_policy.get(heavy.policy._replace(checkpoint=heavy.policy.checkpoint.lighter or Checkpoint.NONE))
        if light is None or light is heavy or heavy.cost.counts_offload:
            continue
        layers = heavy.cost.model.layers
        tokens = int(heavy.tables.tokens.sum())
        for rounds in range(roomy_rounds(heavy), roomy_rounds(light)):
            for spare in (SPARE, SPARE // 2):
                most = tokens * spare // ((spare - 1) * rounds * heavy.cost.ranks) + 1  # tokens of a rank
                capacities = heavy.tables.capacity, light.tables.capacity
                lighter = bisect_left(
                    range(layers), True, key=lambda n: mixed_capacity(*capacities, n + 1, layers) < most
                )
                if 0 < lighter < layers:
                    least = lighter * light.least_ns(rounds) + (layers - lighter) * heavy.least_ns(rounds)
                    mixes.append((least, rounds, replace(heavy, lighter_layers=lighter)))
    return [(single, rounds) for _, rounds, single in sorted(mixes, key=lambda mix: mix[:2])]


def roomy_rounds(single: SingleRankPrices) -> int:
    """As few rounds as leave room to place documents, which is filled quickly."""
    tokens, capacity = int(single.tables.tokens.sum()), single.tables.capacity * single.cost.ranks
    return max(1, -(-tokens * SPARE // (capacity * (SPARE - 1))))


def _may_win(least_ns: int, best_ns: int) -> bool:
    """Whether a step that takes at least this long may still be noticeably faster than the best one."""
    return least_ns + least_ns // WORTH < best_ns


def round_counts(single: SingleRankPrices, quick: bool) -> list[int]:
    """Numbers of rounds to try: as few as leave room to place documents; and those around."""
    roomy = roomy_rounds(single)
    return [roomy] if quick else sorted({single.min_rounds, single.min_rounds + 1, roomy})


def split_lpt(prices: ZonePrices, rounds: int) -> list[list[int]]:
    """Split the batch into rounds of about equal time: every document to the round with the least work and room.

    A document that no round has room for goes to the one with most room; what its ranks cannot hold is left over there.
    The documents of a round come by falling time.
    """
    order, capacity = prices.order, prices.capacity * prices.ranks
    chosen = least_loaded(prices.tokens[order], prices.whole_ns[order], rounds, capacity, overflow=True)
    return [order[chosen == r].tolist() for r in range(rounds)]


def split_sorted(prices: ZonePrices, rounds: int) -> list[list[int]]:
    """Split the long documents, by falling time, into runs of equal tokens, a run per round; the short ones in turn.

    The first round takes longest: there is more time for the longest documents, which are cut less finely.
    """
    order = prices.order
    if rounds == 1:
        return [order.tolist()]
    tokens = prices.tokens[order]
    upto = np.cumsum(tokens)
    long = upto * 100 <= int(upto[-1]) * (100 - FILLER)
    runs = np.minimum((upto - tokens) * rounds // max(1, int(tokens[long].sum())), rounds - 1)
    chosen = np.where(long, runs, (np.cumsum(~long) - 1) % rounds)
    return [order[chosen == r].tolist() for r in range(rounds)]


def fill_rounds(prices: ZonePrices, split: list[list[int]], fillings: int) -> FilledRounds:
    """Fill rounds one after another; what finds no room goes to the next one, or makes further rounds.

    ``split`` has the documents of every round, each by falling time; ``fillings`` are tried for each.
    """
    ready = np.zeros(prices.ranks // prices.shard_group_size, np.int64)
    rounds: list[RankLoads] = []
    waiting = list(split)
    while waiting:
        documents = waiting.pop(0)
        if not documents:
            continue
        loads, ready = best_filling(prices, documents, ready, fillings)
        rounds.append(loads)
        if loads.unplaced:
            if waiting:
                waiting[0] = sorted([*waiting[0], *loads.unplaced], key=lambda k: (-int(prices.whole_ns[k]), k))
            else:
                waiting.append(loads.unplaced)
    return FilledRounds(int(ready.max()) + prices.cost.step_overhead_ns(prices.policy), prices, rounds)


def best_filling(
    prices: ZonePrices, documents: Sequence[int], ready: np.ndarray, fillings: int
) -> tuple[RankLoads, np.ndarray]:
    """The best of so many fillings of one round, with int64[shard groups] ns at which the shard groups are done.

    The documents come by falling time; the shard groups are free from ``ready`` on.
    """
    search = FillSearch(prices, documents, ready)
    best: Filling | None = None
    spent, going = 0, True
    targets = search.targets()
    while going and spent < min(fillings, MAX_TARGETS):
        filling = search.fill(next(targets))
        spent += 1
        best = filling if best is None or filling.score < best.score else best
        going = search.learn(best if spent > 1 else filling)
    assert best is not None
    while going and spent < fillings:
        going = False
        for degrees in search.changed_degrees(best):
            filling = search.fill(best.target._replace(degrees=degrees))
            spent += 1
            if filling.score < best.score:
                best, going = filling, True
                break
            if spent >= fillings:
                break
    return best.loads, best.done


@dataclass(frozen=True, eq=False)
class Filling:
    """A filled round, its target, and when it is done."""

    target: FillTarget
    loads: RankLoads
    times: np.ndarray  # int64[ranks] ns that each rank takes
    done: np.ndarray  # int64[shard groups] ns at which each shard group is free again
    score: tuple[int, int, int]  # Tokens without room; ns when all are done; rank-ns: less is better


class FillSearch:
    """The fillings of one round."""

    def __init__(self, prices: ZonePrices, documents: Sequence[int], ready: np.ndarray) -> None:
        self.prices, self.documents, self.ready = prices, documents, ready
        self.begin = np.repeat(ready - ready.min(), prices.shard_group_size)
        self.level = (int(prices.whole_ns[documents].sum()) + int(self.begin.sum())) // len(self.begin) + 1
        """ns at which all ranks would end together."""
        columns = [prices.column[k] for k in documents if k in prices.column]
        shortest = prices.cut_prices[False].rank_ns[:, columns].min(axis=0) if columns else np.zeros(1, np.int64)
        self.least = int(shortest[shortest < NEVER].max(initial=0))
        """ns below which some document cannot be cut."""
        self.break_even = 0
        """Per mille; at first nothing is cut for balance alone."""

    def fill(self, target: FillTarget) -> Filling:
        """Fill towards a target, even the ranks out, and time the round."""
        prices, begin = self.prices, self.begin
        loads = fill_round(prices, self.documents, begin.tolist(), target)
        times = rank_times(prices, loads)
        swap_rebalance(prices, loads, times, begin)
        done = finish(prices, loads, times, self.ready)
        unplaced = sum(int(prices.tokens[k]) for k in loads.unplaced)
        return Filling(target, loads, times, done, (unplaced, int(done.max()), int(times.sum())))

    def targets(self) -> Iterator[FillTarget]:
        """First what the average asks for; then, knowing how long ranks wait, what could gain from that."""
        yield self._target(0, LIMITS[0] if self.prices.lighter_layers else 100)
        tokens, capacity = int(self.prices.tokens[self.documents].sum()), self.prices.capacity * len(self.begin)
        if self.break_even > MUCH and tokens * 100 < capacity * TIGHT:
            yield self._target(0, 100)
        for slack in SLACKS:
            for limit in LIMITS:
                yield self._target(slack, limit)
                yield self._target(slack, limit, hidden=True)

    def _target(self, slack: int, limit: int, hidden: bool = False) -> FillTarget:
        """A target ``slack`` per cent above the level of all ranks; a document may take ``limit`` per cent of it."""
        level = self.level + self.level * slack // 100
        target = max(level, self.least, self.prices.floor_ns - self.prices.fixed_ns)  # the round is never shorter
        return FillTarget(target, max(target * limit // 100, self.least), self.break_even, hidden)

    def learn(self, filling: Filling) -> bool:
        """Take the share of time that ranks wait as break-even; False where nothing is left to gain."""
        ends = self.begin + np.maximum(filling.times - self.prices.fixed_ns, 0)
        mean, last = int(ends.mean()), int(ends.max())
        self.break_even = max(1, min(1000, (last - mean) * 1000 // max(1, mean)))
        self.level = max(self.level, min(mean, last))
        waits = last - max(mean, self.prices.floor_ns - self.prices.fixed_ns)
        return filling.score[0] > 0 or waits > mean // WORTH

    def changed_degrees(self, filling: Filling) -> Iterator[Mapping[int, int]]:
        """Other degrees for one document each: of the slowest ranks, longest documents first; then any narrower cut."""
        prices, loads = self.prices, filling.loads
        degree = {k: len(ranks) for (ranks, _), members in loads.cut.items() for k in members}
        degrees = {k: degree.get(k, 1) for k in self.documents if k in prices.column}
        known = np.unique([shape.degree for shape in prices.shapes]).tolist()
        if len(known) ** len(degrees) <= MAX_COMBINATIONS:
            yield from (dict(zip(degrees, chosen, strict=True)) for chosen in product(known, repeat=len(degrees)))
        for slow in np.argsort(-(self.begin + filling.times), kind="stable")[:SLOW_RANKS].tolist():
            here = [k for k in loads.whole[slow] if k in prices.column]
            here += [k for (ranks, _), members in loads.cut.items() if slow in ranks for k in members]
            for k in sorted(here, key=lambda k: (-int(prices.whole_ns[k]), k)):
                at = known.index(degrees[k])
                for other in (at + 1, at - 1, at + 2, at - 2):
                    if 0 <= other < len(known):
                        yield {**degrees, k: known[other]}
        for k, current in degrees.items():
            if current > 1:
                yield {**degrees, k: known[known.index(current) - 1]}


def plan_of(prices: ZonePrices, rounds: Sequence[RankLoads], lengths: np.ndarray) -> Plan:
    """Build the plan of these rounds, in this order, each with the fastest checkpoint that its memory allows."""
    cost, reduce = prices.cost, prices.policy.reduce
    capacities, sizes, built = checkpoint_capacities(cost, reduce), lengths.tolist(), []
    for loads in rounds:
        checkpoint = fastest_checkpoint(capacities, (prices.capacity - min(loads.tokens_left)) // cost.tensor)
        assert checkpoint is not None
        built.append(StageMicroBatch(_groups(prices, loads, sizes), checkpoint))
    return build_plan(cost, sizes, built, reduce, "zones")


def _groups(prices: ZonePrices, loads: RankLoads, lengths: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a round, slow links first: those that cross nodes, then the wider ones, then single ranks."""
    cost, node, tensor = prices.cost, prices.node_size, prices.cost.tensor
    cuts = sorted(
        loads.cut.items(),
        key=lambda item: (item[0][0][0] // node == item[0][0][-1] // node, -len(item[0][0]), item[0]),
    )
    single = [((rank,), members) for rank, members in enumerate(loads.whole) if members]
    shaped = [(prices.shapes[s], ranks, members) for (ranks, s), members in cuts]
    groups = []
    for shape, chosen, members in [*shaped, *((GroupShape(1, 1), *each) for each in single)]:
        ranks = tuple(rank * tensor + k for rank in chosen for k in range(tensor))
        shape = shape._replace(ulysses=shape.ulysses * tensor)
        groups.append(whole_documents(cost, shape, ranks, members, lengths))
    return tuple(groups)
