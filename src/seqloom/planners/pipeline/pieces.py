"""Planner ``pieces``: long documents in pieces on a single stage, one after another, with keys and values carried on.

A document that exceeds the memory of the widest group still runs: pieces go forward in order, the keys and values of
all stay, and backward goes from the last piece to the first. Only the last pieces keep their activations; the others
keep little (FULL: the input of every layer) or nothing (STAGE), and run forward once more before their backward. So
memory grows with the keys and values of a document and no longer with its activations (ChunkFlow, arXiv 2503.02356):

    0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0      pieces 2 and 3 keep all, 0 and 1 are run forward again

Pieces have equal tokens: no other stage waits for them. Short documents are packed on ranks that would wait and into
rounds of about the same time, as in a pipeline of several stages. Parameters are gathered and gradients reduced as in
any plan of one stage. How many pieces a document has, and how many keep their activations, is searched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes
from seqloom.cost.plan_cost import round_ns, tokens_on_ranks
from seqloom.describe import Batch
from seqloom.errors import MemoryBudgetError, SeqloomError, how_to_drop
from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    LayerRange,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    StageMicroBatch,
)
from seqloom.planners.pipeline.long_sequences import DocumentCosts, StageGroups
from seqloom.planners.pipeline.micro_batches import MicroBatches, MicroBatchSize, make_micro_batches
from seqloom.planners.pipeline.recompute_offload import ActivationPolicy, stage_micro_batch
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.planners.recompute import CHECKPOINTS, fastest_checkpoint, with_layer_choices, without_unused_limits
from seqloom.schedules.memory import UnitMemory, memory_walk
from seqloom.simulate import predicted_ns
from seqloom.simulate.memory import PipelineMemory

SHARES = (1, 2, 4, 8, 16)
"""Tokens of a piece on a rank to try: what memory holds with all activations, over each of these."""
AGAIN = (Checkpoint.FULL, Checkpoint.STAGE)
"""What pieces store that run forward again."""
PROBE = 1 << 20
"""Tokens of a document by whose keys and values shapes are compared."""
MAX_ROUNDS = 256
"""Rounds that a plan may have: smaller pieces are not tried."""


def plan_pieces(lengths: np.ndarray, cost: CostModel, *, pieces: int | None = None) -> Plan:
    """Plan a batch, int64[n] tokens, on one stage, with `pieces` of the longest document; None tries several numbers.

    MemoryBudgetError if memory does not hold the keys and values of the longest document beside a small piece.
    """
    array = Batch.of(lengths).lengths
    if not cost.model.causal:
        raise SeqloomError(
            f"planner pieces for {cost.model.name}, which is not causal: tokens of a piece would see later pieces, "
            "whose keys do not exist yet; choose a planner of whole documents, for example flex"
        )
    if pieces is not None and not 1 <= pieces <= int(array.max()):
        raise SeqloomError(
            f"{pieces} pieces of a longest sequence of {array.max()} tokens; give 1 to {array.max()}, or leave it out"
        )
    searches = [PiecesSearch(array, cost, reduce) for reduce in dict.fromkeys(each.reduce for each in cost.policies)]
    plans = [plan for search in searches for plan in search.plans(search.costs, pieces)]
    if not plans:
        plans = [plan for search in searches for plan in search.plans(search.smallest_caches, pieces)]
    if not plans:
        longest = int(array.argmax())
        raise MemoryBudgetError(
            f"sequence {longest} of {array[longest]} tokens does not fit into {cost.ranks} {cost.rank_word}s of "
            f"{cost.budget_bytes / 1024**3:.1f} GiB, not even in pieces: its keys and values stay until its backward; "
            f"{how_to_drop(int(array[longest]) // 2)}, {cost.ways_out}"
        )
    return with_layer_choices(min(plans, key=lambda plan: predicted_ns(plan, cost)), cost)


@dataclass(frozen=True, eq=False)
class PiecesSearch:
    """Plans of a batch in pieces that reduce gradients in one way."""

    lengths: np.ndarray
    cost: CostModel
    reduce: Reduce

    @cached_property
    def limits(self) -> Limits:
        """Tokens of a round that memory holds beside nothing else, under every checkpoint; see `Plan.limits`."""
        own = replace(self.cost.limits(self.reduce), offload_capacity=())
        layers, policy = LayerRange(0, self.cost.model.layers, self.cost.model.layers), self.policy
        if policy.checkpoint == Checkpoint.PROFILE:
            return own
        free = self.cost.budget_bytes - self.cost.memory.fixed_bytes(policy)
        most = int(max(0, free) // self.cost.memory.activation_bytes(layers, Checkpoint.STAGE).peak)
        stage = self.cost.microbatch_capacity(most)
        capacity = (*own.capacity, (Checkpoint.STAGE, stage))
        return replace(own, capacity=tuple((checkpoint, tokens) for checkpoint, tokens in capacity if tokens > 0))

    @cached_property
    def policy(self) -> MemoryPolicy:
        """The fastest policy that memory holds: documents are cut by its prices."""
        return next(each for each in self.cost.policies if each.reduce == self.reduce)

    @cached_property
    def layout(self) -> StageLayout:
        """One stage of all ranks."""
        return StageLayout.of(self.cost, 1)

    @cached_property
    def costs(self) -> DocumentCosts:
        """The documents priced in every shape."""
        return DocumentCosts.of(self.lengths, self.cost, self.layout, self.policy)

    @property
    def smallest_caches(self) -> DocumentCosts:
        """The same without shapes whose ranks keep more of a document's keys and values than others as wide do."""
        costs, cost, layers = self.costs, self.cost, LayerRange(0, self.cost.model.layers, self.cost.model.layers)
        groups = [cost.group(shape, range(shape.degree), ()) for shape in costs.shapes]
        kept = np.array([sum(kv_cache_bytes(cost, layers, group, PROBE)) for group in groups])
        rows = [row for row, degree in enumerate(costs.degree) if kept[row] == kept[costs.degree == degree].min()]
        return replace(
            costs,
            shapes=tuple(costs.shapes[row] for row in rows),
            offsets=tuple(costs.offsets[row] for row in rows),
            degree=costs.degree[rows],
            streams=costs.streams[:, rows],
            prefix=costs.prefix[:, rows],
        )

    def plans(self, costs: DocumentCosts, pieces: int | None = None) -> Iterator[Plan]:
        """Yield the best plan for every size of pieces and width of groups that memory holds."""
        seen: set[tuple[StageGroups, ...]] = set()
        for size in self._sizes(costs, pieces):
            micro_batches = make_micro_batches(costs, size)
            if micro_batches.groups in seen or len(micro_batches.groups) > self._most_rounds:
                continue
            seen.add(micro_batches.groups)
            if (works := self._with_checkpoints(micro_batches)) is not None:
                yield without_unused_limits(self.plan(works))

    def _sizes(self, costs: DocumentCosts, pieces: int | None) -> Iterator[MicroBatchSize]:
        """Sizes of rounds to try: groups as wide as all ranks or as a node, pieces that leave room for others.

        With a given number of `pieces` memory decides only where they would be too large.
        """
        capacity, widest = dict(self.limits.capacity), costs.degrees[-1]
        if not capacity:
            return
        most = min(capacity[each] for each in (self.policy.checkpoint, Checkpoint.STAGE) if each in capacity)
        for degree in dict.fromkeys((widest, self.cost.node_size)):
            if degree not in costs.degrees:
                continue
            longest_ns, tokens = costs.longest_ns(degree), -(-int(costs.tokens.max()) // degree)
            sizes = [most // share for share in SHARES] if pieces is None else [min(most, -(-tokens // pieces))]
            for held in (max(self.cost.pad_multiple, size) for size in sizes):
                rounds = -(-tokens // held)  # of the longest document
                if rounds <= self._most_rounds:
                    yield MicroBatchSize(degree, max(1, longest_ns // rounds), held, equal_tokens=True)

    @property
    def _most_rounds(self) -> int:
        return max(MAX_ROUNDS, len(self.lengths))

    def _with_checkpoints(self, micro_batches: MicroBatches) -> list[StageMicroBatch] | None:
        """The rounds with the fastest checkpoints that fit; None: some do not fit under any."""
        placed = [
            stage_micro_batch(self.cost, self.layout, groups, 0, ActivationPolicy(self.policy.checkpoint))
            for groups in micro_batches.groups
        ]
        choices, checkpoints = RoundChoices(self, placed), list[Checkpoint]()
        for _, chain in groupby(range(len(placed)), key=lambda number: micro_batches.units[number].sequence):
            chosen = choices.fastest(list(chain))
            if chosen is None:
                return None
            checkpoints += chosen
        return [replace(work, checkpoint=each) for work, each in zip(placed, checkpoints, strict=True)]

    def plan(self, works: Sequence[StageMicroBatch]) -> Plan:
        """The plan of these rounds."""
        cost, rounds = self.cost, [Round((work,)) for work in works]
        pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, self.reduce, cost.tensor, cost.expert)
        documents = tuple(self.lengths.tolist())
        return Plan(self.limits, cost.sharding, self.reduce, documents, (pipeline,), "pieces")


class RoundChoices:
    """Time and memory of rounds under every checkpoint, and the fastest checkpoints of a chain that memory holds."""

    def __init__(self, search: PiecesSearch, rounds: Sequence[StageMicroBatch]) -> None:
        self.cost, self.capacity = search.cost, dict(search.limits.capacity)
        self.tokens = [int(tokens_on_ranks(search.cost, work).max()) for work in rounds]
        plans = {each: search.plan([replace(work, checkpoint=each) for work in rounds]) for each in self.capacity}
        self._memory = {each: PipelineMemory(plan, self.cost, plan.pipelines[0]) for each, plan in plans.items()}
        self._ns: dict[tuple[int, Checkpoint], int] = {}

    @cached_property
    def _units(self) -> dict[Checkpoint, list[UnitMemory]]:
        """float64[ranks] bytes of every round."""
        return {each: list(memory.units(0)) for each, memory in self._memory.items()}

    def fastest(self, chain: Sequence[int]) -> list[Checkpoint] | None:
        """Checkpoints of the rounds of a chain of pieces; None: it does not fit under any.

        As many of the last as possible keep more. A chain of one round has whole documents, and one checkpoint.
        """
        tokens = max(self.tokens[number] for number in chain)
        legal = [each for each, most in self.capacity.items() if most >= tokens]
        if len(chain) == 1:
            known = fastest_checkpoint(self.capacity, tokens)
            return None if known is None else [known]
        options: list[list[Checkpoint]] = []
        for light in (each for each in CHECKPOINTS if each in legal):
            if self._fits(chain, [light] * len(chain)):
                options.append([light] * len(chain))
                break  # the next checkpoints keep less
            again = [each for each in AGAIN if each != light and each in legal]
            options += [kept for each in again if (kept := self._most_kept(chain, light, each)) is not None]
        if len(options) < 2:
            return options[0] if options else None
        return min(options, key=lambda each: sum(map(self._round_ns, chain, each)))

    def _most_kept(self, chain: Sequence[int], light: Checkpoint, again: Checkpoint) -> list[Checkpoint] | None:
        """As many last pieces under `light` as memory holds, and the others under `again`; None: not even none."""

        def of(kept: int) -> list[Checkpoint]:
            return [again] * (len(chain) - kept) + [light] * kept

        kept = bisect_left(range(len(chain)), True, key=lambda count: not self._fits(chain, of(count)))
        return of(kept - 1) if kept else None

    def _fits(self, chain: Sequence[int], checkpoints: Sequence[Checkpoint]) -> bool:
        """Whether memory holds a chain from its first forward to its last backward."""
        units = {number: self._units[each][number] for number, each in zip(chain, checkpoints, strict=True)}
        row = [*(Action(0, ActionKind.F, k) for k in chain), *(Action(0, ActionKind.B, k) for k in reversed(chain))]
        free = self.cost.budget_bytes - self._memory[checkpoints[0]].state_bytes(0).max()
        return all(
            bool((peak <= free).all()) for _, peak, _ in memory_walk(row, lambda action: units[action.round or 0])
        )

    def _round_ns(self, number: int, checkpoint: Checkpoint) -> int:
        """ns of a round."""
        if (number, checkpoint) not in self._ns:
            memory = self._memory[checkpoint]
            work = memory.pipeline.rounds[number].by_stage[0]
            self._ns[number, checkpoint] = round_ns(self.cost, memory.plan, memory.pipeline, work)
        return self._ns[number, checkpoint]
