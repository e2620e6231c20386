"""Hierarchical balance packing (HBP): pack a fixed data set and group the packs into steps, before training.

Packs have one of a few lengths, the packing levels (see `levels`). A pack takes the longest document of its level that
still fits, again and again; shorter documents fill the gaps. All packs of a step are of one level: packs sorted by
attention work are cut into steps, so packs that run side by side take nearly the same time. Levels alternate over the
run.

`Balance` measures how evenly steps use the ranks, for packings and for any other plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.cost.resharding import exposed_reshard_ns
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.packing.levels import PackingLevel, level_sets
from seqloom.plan import Pipeline, Plan, Sharding, StageMicroBatch, sort_groups
from seqloom.planners.compiled import kernels
from seqloom.planners.packing import first_fit, least_loaded
from seqloom.planners.problem import build_plan, whole_documents
from seqloom.simulate import predicted_ns

TRIAL_DOCUMENTS = 50_000
"""Documents of a data set that levels are compared on."""
Step = tuple[int, np.ndarray]
"""A step: index of its level, and int64 numbers of its packs."""


def hbp(
    lengths: Sequence[int] | np.ndarray,
    cost: CostModel,
    tokens_per_step: int,
    *,
    levels: Sequence[PackingLevel] | None = None,
    short_first: int = 0,
    seed: int = 0,
) -> Packing:
    """Pack a data set into steps; SeqloomError for a document that no level holds.

    Args:
        lengths: int64[n] tokens of every document.
        cost: prices packs, and so chooses the levels.
        tokens_per_step: no step has more tokens.
        levels: shortest packs first, from `cheapest_level`; None lets the cost model choose.
        short_first: number of first steps that take only packs of the lowest level, while there are any.
        seed: of the order of a level's steps.
    """
    if short_first < 0:
        raise SeqloomError(f"{short_first} short steps first; give 0 or more")
    array = _checked_lengths(lengths, tokens_per_step)
    if levels is None:
        levels = choose_levels(array, cost, tokens_per_step)
    else:
        _check_levels(levels, array, cost, tokens_per_step)
    return _pack(array, cost, tuple(levels), short_first, seed)


def choose_levels(lengths: np.ndarray, cost: CostModel, tokens_per_step: int) -> tuple[PackingLevel, ...]:
    """Choose the levels with the least total time of the data set, or of every k-th document of a large one.

    Arguments as for `hbp`. Of equal sets, the one with fewer levels wins.
    """
    every = -(-len(lengths) // TRIAL_DOCUMENTS)
    tried = np.sort(lengths)[::-1][::every]  # the longest document is among them
    sets = level_sets(lengths, cost, tokens_per_step)
    return min(sets, key=lambda levels: int(_pack(tried, cost, levels, 0, 0).step_ns.sum()))


def plain_packing(lengths: Sequence[int] | np.ndarray, cost: CostModel, tokens_per_step: int) -> Packing:
    """Pack without levels, to compare with `hbp`: packs as long as the longest document, first fit in data order."""
    array = _checked_lengths(lengths, tokens_per_step)
    (top,) = next(level_sets(array, cost, tokens_per_step))
    pack = first_fit(cost.padded_lengths(array) // cost.pad_multiple, top.tokens // cost.pad_multiple)
    no_order = np.zeros(pack.max() + 1, dtype=np.int64)
    return _in_running_order("first-fit", array, cost, (top,), pack, cut_into_steps(no_order, no_order, (top,)))


def _checked_lengths(lengths: Sequence[int] | np.ndarray, tokens_per_step: int) -> np.ndarray:
    if tokens_per_step < 1:
        raise SeqloomError(f"{tokens_per_step} tokens per step hold no document; give 1 or more")
    return Batch.of(lengths).lengths


def _check_levels(levels: Sequence[PackingLevel], lengths: np.ndarray, cost: CostModel, tokens_per_step: int) -> None:
    """Refuse levels that do not rise, do not hold the longest document, or do not fit in memory or in a step."""
    longest = int(cost.padded_lengths(lengths).max())
    rising = all(a.tokens < b.tokens for a, b in pairwise(levels))
    if not levels or not rising or levels[-1].tokens < longest:
        given = ", ".join(str(level.tokens) for level in levels) or "none"
        raise SeqloomError(
            f"levels of {given} tokens: give rising ones, the last of at least {longest}, as the longest document has"
        )
    for level in levels:
        most = level.shape.degree * cost.capacity(level.policy) if level.shape in cost.shapes else 0
        if level.tokens > most:
            raise SeqloomError(
                f"a level of {level.tokens} tokens on groups of shape {level.shape}, which hold {most} here; "
                "choose it with `cheapest_level`"
            )
        if level.packs * level.tokens > tokens_per_step:
            raise SeqloomError(
                f"a level with {level.packs} packs of {level.tokens} tokens in a step of {tokens_per_step}; "
                "lower its packs, or raise the tokens per step"
            )


def _pack(
    lengths: np.ndarray, cost: CostModel, levels: tuple[PackingLevel, ...], short_first: int, seed: int
) -> Packing:
    """Pack under given levels."""
    sizes = cost.padded_lengths(lengths) // cost.pad_multiple
    pack, pack_levels = _even_last_step(
        *_fill_packs(sizes, cost.pad_multiple, levels), sizes, cost.pad_multiple, levels
    )
    order = np.argsort(pack, kind="stable")
    work = np.add.reduceat(np.square(lengths[order]), np.searchsorted(pack[order], np.arange(len(pack_levels))))
    steps = cut_into_steps(work, pack_levels, levels)
    running = running_order(np.array([level for level, _ in steps]), short_first=short_first, seed=seed)
    return _in_running_order("hbp", lengths, cost, levels, pack, [steps[k] for k in running.tolist()])


def _fill_packs(sizes: np.ndarray, multiple: int, levels: Sequence[PackingLevel]) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] the pack of every document, int64[P] the level of every pack), from the longest packs down.

    `sizes` are int64[n] lengths of documents in units of `multiple` tokens, to which documents are padded.
    """
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    upto = np.searchsorted(ascending, np.arange(int(ascending[-1]) + 1), side="right")
    left = np.arange(len(sizes) + 1)
    found = np.empty(len(sizes), dtype=np.int64)
    pack_levels: list[int] = []
    for index in reversed(range(len(levels))):
        size, packs = levels[index].tokens // multiple, levels[index].packs
        low = int(upto[min(levels[index - 1].tokens // multiple, len(upto) - 1)]) if index else 0
        count = kernels().fill_packs(ascending, upto, left, size, low, packs, len(pack_levels), found)
        pack_levels += [index] * count
    pack = np.empty_like(found)
    pack[order] = found
    return pack, np.array(pack_levels)


def _even_last_step(
    pack: np.ndarray, pack_levels: np.ndarray, sizes: np.ndarray, multiple: int, levels: Sequence[PackingLevel]
) -> tuple[np.ndarray, np.ndarray]:
    """Spread the documents of the last step, if it lacks packs, evenly over as many packs as a step has.

    Only the lowest level in use can have such a step: shorter documents fill the steps of the others.
    """
    index = int(pack_levels[-1])
    level = levels[index]
    whole = len(pack_levels) - int((pack_levels == index).sum()) % level.packs
    members = np.flatnonzero(pack >= whole)
    members = members[np.argsort(-sizes[members], kind="stable")]  # longest first
    count, own = min(level.packs, len(members)), sizes[members]
    found = least_loaded(own, own, count, level.tokens // multiple) if count else None
    if found is None:
        return pack, pack_levels
    pack[members] = whole + found
    return pack, np.append(pack_levels[:whole], [index] * count)


def cut_into_steps(work: np.ndarray, pack_levels: np.ndarray, levels: Sequence[PackingLevel]) -> list[Step]:
    """Sort the packs of every level by their work, most first, and cut consecutive ones into steps.

    The last packs of a level, if too few for a step, make a smaller step: they are not full, and would leave ranks
    waiting in any other. `work` is int64[P] sum of squared lengths, `pack_levels` int64[P] index of a pack's level.
    """
    steps: list[Step] = []
    for index, level in enumerate(levels):
        own = np.flatnonzero(pack_levels == index)
        whole = len(own) - len(own) % level.packs
        own[:whole] = own[:whole][np.argsort(-work[own[:whole]], kind="stable")]
        steps += [(index, own[first : first + level.packs]) for first in range(0, len(own), level.packs)]
    return steps


def running_order(levels: np.ndarray, *, short_first: int, seed: int) -> np.ndarray:
    """int64[S] numbers of steps: levels alternate in proportion to their steps; steps of one level are shuffled.

    `levels` is int64[S] index of each step's level. First come `short_first` steps of the lowest, while there are any.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed])).random_raw(len(levels))  # numpy guarantees this stream
    shuffled = np.argsort(keys, kind="stable")
    lowest = shuffled[levels[shuffled] == levels.min()][:short_first]
    rest = shuffled[~np.isin(shuffled, lowest)]
    place = np.empty(len(rest))
    for level in np.unique(levels[rest]).tolist():
        own = levels[rest] == level
        place[own] = (np.arange(own.sum()) + 0.5) / own.sum()  # evenly over the run
    return np.concatenate([lowest, rest[np.lexsort((levels[rest], place))]])


def _in_running_order(
    name: str,
    lengths: np.ndarray,
    cost: CostModel,
    levels: tuple[PackingLevel, ...],
    pack: np.ndarray,
    steps: Sequence[Step],
) -> Packing:
    """Build the packing whose packs run in the order of these steps."""
    packs = np.concatenate([own for _, own in steps])
    place = np.argsort(packs)[pack]  # of every document's pack in the run
    documents = np.argsort(place, kind="stable")
    pack_starts = np.searchsorted(place[documents], np.arange(len(packs) + 1))
    step_starts = np.concatenate([[0], np.cumsum([len(own) for _, own in steps])])
    step_levels = np.array([level for level, _ in steps], dtype=np.int64)
    return Packing(name, lengths, cost, levels, documents, pack_starts, step_starts, step_levels)


@dataclass(frozen=True, eq=False)
class Packing:
    """A packed data set: documents in packs, packs in steps, in running order. One level per step."""

    name: str  # planner's name in the plans
    lengths: np.ndarray  # int64[n] tokens of every document of the data set
    cost: CostModel  # prices the packs on the cluster
    levels: tuple[PackingLevel, ...]  # shortest packs first
    documents: np.ndarray  # int64[n] numbers of documents, pack after pack
    pack_starts: np.ndarray  # int64[P + 1] where in `documents` each pack begins; the last one is n
    step_starts: np.ndarray  # int64[S + 1] the first pack of each step; the last one is P
    step_levels: np.ndarray  # int64[S] index of each step's level

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.step_levels)

    def packs(self, step: int) -> list[np.ndarray]:
        """The packs of a step: int64 numbers of documents each."""
        if not 0 <= step < self.steps:
            raise SeqloomError(f"step {step}: the data set makes {self.steps} steps; choose 0 .. {self.steps - 1}")
        edges = self.pack_starts[self.step_starts[step] : self.step_starts[step + 1] + 1]
        return [self.documents[low:high] for low, high in pairwise(edges.tolist())]

    def batch(self, step: int) -> np.ndarray:
        """int64[k]: numbers of the step's documents, ascending, in the order of its plan's documents."""
        return np.sort(np.concatenate(self.packs(step)))

    def plan(self, step: int) -> Plan:
        """Plan one step: its packs side by side, in groups of its level's shape, over as many rounds as it takes."""
        batch = self.batch(step)
        cost, level = self.cost, self.levels[self.step_levels[step]]
        lengths = self.lengths[batch].tolist()
        packs = [np.searchsorted(batch, np.sort(pack)).tolist() for pack in self.packs(step)]
        blocks = cost.family.blocks(level.shape.degree)
        rounds = []
        for first in range(0, len(packs), len(blocks)):
            groups = [
                whole_documents(cost, level.shape, block, pack, lengths)
                for block, pack in zip(blocks, packs[first:], strict=False)
            ]
            rounds.append(StageMicroBatch(sort_groups(groups, cost.node_size), level.policy.checkpoint))
        return build_plan(cost, lengths, rounds, level.policy.reduce, self.name)

    @cached_property
    def _pack_levels(self) -> np.ndarray:
        """int64[P]: index of every pack's level."""
        return np.repeat(self.step_levels, np.diff(self.step_starts))

    def _pack_ns(self) -> np.ndarray:
        """int64[P]: time of every pack's group."""
        times = np.zeros(len(self._pack_levels), dtype=np.int64)
        counts = np.diff(self.pack_starts)
        for index in np.unique(self.step_levels).tolist():
            level, own = self.levels[index], self._pack_levels == index
            members = self.documents[np.repeat(own, counts)]
            tables = self.cost.tables(self.lengths[members], level.policy, [level.shape])
            first = np.cumsum(counts[own]) - counts[own]
            times[own] = (np.add.reduceat(tables.cost[:, 0], first, axis=1) + tables.fixed).max(axis=0)
        return times

    @cached_property
    def step_ns(self) -> np.ndarray:
        """int64[S]: predicted ns of every step's plan, without building the plans but for experts and unequal ranks.

        In a round, ranks of a shard group wait for the slowest of their packs; others go on. What experts take does not
        follow from each pack by itself: few tokens wait for weights, and EP groups share the work of several packs.
        """
        if self.cost.model.experts or self.cost.speeds:
            return np.array([predicted_ns(self.plan(step), self.cost) for step in range(self.steps)], dtype=np.int64)
        times, pack_ns = np.zeros(self.steps, dtype=np.int64), self._pack_ns()
        for index, level in enumerate(self.levels):
            size, grid = self.cost.shard_group_size, self._grid(pack_ns, index)
            blocks = self.cost.family.blocks(level.shape.degree)
            touched = [range(block.start // size, (block.stop - 1) // size + 1) for block in blocks]
            slowest = np.zeros((grid.shape[1], self.cost.ranks // size, len(grid)), dtype=np.int64)
            for block, shard_groups in enumerate(touched):
                row = slowest[:, shard_groups.start]
                np.maximum(row, grid[:, :, block].T, out=row)
            done = finish_times(slowest, [join_shard_groups(touched)] * len(slowest)).max(axis=0)
            overhead = self.cost.step_overhead_ns(level.policy) + self._resharding_ns(grid, level)
            times[self.step_levels == index] = done + overhead
        return times

    def _resharding_ns(self, grid: np.ndarray, level: PackingLevel) -> np.ndarray:
        """int64[steps of the level]: exposed ns of moving parameters and gradients under free sharding.

        `grid` holds int64[steps, rounds, blocks] ns of packs, 0 where there is none.
        """
        if self.cost.sharding != Sharding.FREE:
            return np.zeros(len(grid), dtype=np.int64)
        pipelines = (Pipeline.single(range(self.cost.ranks), self.cost.model.layers, (), level.policy.reduce),)
        shortest = np.where(grid > 0, grid, np.iinfo(np.int64).max).min(axis=2)
        last = (grid.max(axis=2) > 0).sum(axis=1) - 1
        windows = zip(shortest[:, 0].tolist(), shortest[np.arange(len(grid)), last].tolist(), strict=True)
        return np.array([exposed_reshard_ns(self.cost, pipelines, [each]) for each in windows], dtype=np.int64)

    @cached_property
    def balance(self) -> Balance:
        """The same figures as `plans_balance` of all its plans, without building the plans."""
        lengths, starts = self.lengths[self.documents], self.pack_starts[:-1]
        tokens, padded, squares = (
            np.add.reduceat(each, starts) for each in (lengths, self.cost.padded_lengths(lengths), np.square(lengths))
        )
        spread = np.array([level.shape.degree > 1 for level in self.levels])[self._pack_levels]
        return Balance(
            tokens=float(self._imbalance(padded).mean()),
            padding=float(1 - tokens.sum() / padded.sum()),
            attention=float(self._imbalance(squares).mean()),
            communication=float(tokens[spread].sum() / tokens.sum()),
            steps=self.steps,
            step_ns=float(self.step_ns.mean()),
        )

    def _imbalance(self, work: np.ndarray) -> np.ndarray:
        """float64[S]: 1 - sum of means / sum of maxima over the rounds of every step; int64[P] work of packs."""
        shares = np.zeros(self.steps)
        for index, level in enumerate(self.levels):
            grid = self._grid(work, index)
            means = grid.sum(axis=(1, 2)) * (1 / self.cost.ranks)
            most = grid.max(axis=2, initial=0).sum(axis=1) / level.shape.degree
            shares[self.step_levels == index] = 1 - means / most
        return shares

    def _grid(self, values: np.ndarray, index: int) -> np.ndarray:
        """int64[steps of the level, rounds, blocks]: a value of every pack where it runs; 0 where none does."""
        level = self.levels[index]
        blocks = len(self.cost.family.blocks(level.shape.degree))
        counts = np.diff(self.step_starts)[self.step_levels == index]
        rounds = -(-max(level.packs, int(counts.max(initial=0))) // blocks)
        grid = np.zeros((len(counts), rounds * blocks), dtype=np.int64)
        grid[np.arange(rounds * blocks) < counts[:, None]] = values[self._pack_levels == index]
        return grid.reshape(len(counts), rounds, blocks)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly steps use the ranks, and how much they communicate: shares between 0 and 1, means over the steps.

    An imbalance is 1 - mean / max over all ranks. The maxima of consecutive rounds add up, since all ranks wait in
    every round for the one with most work. Among pipelines side by side, the largest such sum counts; in a pipeline,
    that of the slowest stage, with work in proportion to its layers.
    """

    tokens: float  # imbalance of tokens (DBR)
    padding: float  # tokens computed beyond those of the documents, of all tokens of all steps (PR)
    attention: float  # imbalance of attention work, squares of lengths (ABR)
    communication: float  # tokens of documents that are spread over several ranks, of all tokens of all steps (CR)
    steps: int  # their number
    step_ns: float  # their mean predicted time

    def as_dict(self) -> dict[str, float]:
        """The field's names: DBR, PR, ABR, CR; the time in milliseconds."""
        shares = {"dbr": self.tokens, "pr": self.padding, "abr": self.attention, "cr": self.communication}
        return {**shares, "steps": self.steps, "mean_step_ms": self.step_ns / 1e6}


def plans_balance(plans: Sequence[Plan], cost: CostModel, step_ns: Sequence[int] | None = None) -> Balance:
    """Compute the balance of several steps, at least one; without `step_ns` their times are predicted."""
    times = [predicted_ns(plan, cost) for plan in plans] if step_ns is None else step_ns
    tokens = sum(plan.tokens for plan in plans)
    padded = sum(int(cost.padded_lengths(np.array(plan.documents)).sum()) for plan in plans)
    by_tokens, by_attention = np.mean([_imbalances(plan, cost) for plan in plans], axis=0).tolist()
    rounds = [current for plan in plans for pipeline in plan.pipelines for current in pipeline.rounds]
    spread = sum(group.tokens for current in rounds for group in current.by_stage[0].groups if group.degree > 1)
    mean_ns = sum(times) / len(plans)
    return Balance(by_tokens, 1 - tokens / padded, by_attention, spread / tokens, len(plans), mean_ns)


def _imbalances(plan: Plan, cost: CostModel) -> np.ndarray:
    """float64[2]: imbalance of tokens and of attention work in one step."""
    total, most = np.zeros((2, cost.ranks)), np.zeros(2)
    for pipeline in plan.pipelines:
        slowest = np.zeros((len(pipeline.ranks_by_pp_rank), 2))
        pp_ranks = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]
        shares = [(layers.stop - layers.first) / layers.model_layers for layers in pipeline.layer_ranges]
        for current in pipeline.rounds:
            for pp_rank, share, work in zip(pp_ranks, shares, current.by_stage, strict=True):
                loads = share * _rank_loads(work, cost)
                total += loads
                slowest[pp_rank] += loads.max(axis=1)
        most = np.maximum(most, slowest.max(axis=0))
    return 1 - total.mean(axis=1) / most


def _rank_loads(work: StageMicroBatch, cost: CostModel) -> np.ndarray:
    """float64[2, ranks]: tokens in linear layers and attention work of one stage's part of a round.

    A group's ranks share both evenly: Ulysses by heads, rings in zigzag.
    """
    multiple = cost.pad_multiple
    loads = np.zeros((2, cost.ranks))
    for group in work.groups:
        padded = sum(-(-stop // multiple) - -(-start // multiple) for _, start, stop in group.spans) * multiple
        squares = sum(stop**2 - start**2 for _, start, stop in group.spans)
        loads[:, list(group.ranks)] += np.array([[padded], [squares]]) / group.degree
    if work.linear is not None:
        loads[0] = np.bincount(work.linear.rank, work.linear.sizes, cost.ranks)
    return loads
