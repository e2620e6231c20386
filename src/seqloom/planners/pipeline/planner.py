"""Planner ``pipeline``: stages, pieces of long sequences, packs of short documents, and their schedule (Seq1F1B).

Larger micro-batches send fewer messages and fill kernels; smaller ones fill the pipeline sooner. The search tries
several sizes, each with several schedules, and takes the fastest by `simulate_schedule`. Where memory is short,
micro-batches store fewer activations: the balanced schedule obeys the memory cap by itself; under other schedules,
micro-batches take policies that store less until they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes, pipeline_limits, pp_rank_bytes
from seqloom.describe import Batch
from seqloom.errors import MemoryBudgetError, PlanError, SeqloomError, how_to_drop, unknown_name
from seqloom.plan import Action, ActionKind, Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round
from seqloom.planners.pipeline.long_sequences import DocumentCosts, StageGroups
from seqloom.planners.pipeline.micro_batches import MicroBatches, MicroBatchSize, make_micro_batches
from seqloom.planners.pipeline.recompute_offload import (
    ActivationMemory,
    ActivationPolicy,
    Choice,
    MicroBatchCosts,
    policies_of,
    policy_capacity,
    stage_micro_batches,
)
from seqloom.planners.pipeline.stage_layout import StageLayout, check_stages, stage_group_shapes
from seqloom.planners.recompute import with_layer_choices, without_unused_limits
from seqloom.schedules import SCHEDULE_NAMES, Schedule, Times, build_schedule, simulate_schedule
from seqloom.schedules.head import LEADS, schedule_head, times_with_lead
from seqloom.schedules.search import BUDGET, balanced_schedule
from seqloom.simulate import predicted_ns

HEADS = ("last", "all", "auto")
"""Which stages may compute the head."""
USUAL_STAGES = (2, 4, 8)
V_SHAPED = ("zb-v", "v-half", "v-min")
"""Schedules whose stages go down the pp_ranks and up again; they run only uncut sequences."""
UNCUT = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", *V_SHAPED)
"""Schedules that cut a sequence only if memory requires it."""
PIECEWISE = ("seq1f1b", "seq1f1b-i")
"""Names of 1f1b and interleaved for sequences in pieces."""
SCHEDULES = tuple(dict.fromkeys((*SCHEDULE_NAMES, "balanced")))

CHUNKS = (1, 2, 4)
"""Stages of a pp_rank to try: with more, messages of short stages outweigh the shorter bubble."""
PIECES = (1, 2, 4, 8, 16, 32)
"""Pieces of the longest document to try."""
ROUNDS_PER_STAGE = (2, 4)
"""Micro-batches per stage to try: sizes that depend on the batch, not on its longest document."""
DISTINCT_PERCENT = 140
"""Least ratio of two target times to try."""
WORTH_PERCENT = 105
"""Narrower groups are tried if the widest take more than this much of their rank-time for the longest document."""
NEAR_PERCENT = 101
"""Candidates this near to the fastest are planned and compared; sizes that cannot come this near are not tried."""
MAX_MICRO_BATCHES = 64
"""Micro-batches per stage that a plan may have."""
BINDING_PERCENT = 90
"""Memory limits a candidate that fills this much of it; others gain nothing by storing less."""
FIRST_SCHEDULES = 3
"""Number of schedules that every size is tried with; the others are tried with the best size."""
SIZE_CHANGES: tuple[Callable[[MicroBatchSize], MicroBatchSize], ...] = (
    lambda size: size._replace(later_percent=150, pack_percent=200, warmup=6, max_tokens=size.max_tokens * 4 // 3),
    lambda size: size._replace(max_tokens=size.max_tokens * 4 // 3),
    lambda size: size._replace(warmup=size.warmup // 2),
    lambda size: size._replace(target_ns=max(1, size.target_ns * 5 // 6)),
    lambda size: size._replace(target_ns=size.target_ns * 7 // 6),
    lambda size: size._replace(warmup=max(2, size.warmup)),
    lambda size: size._replace(later_percent=150),
    lambda size: size._replace(pack_percent=150),
    lambda size: size._replace(pack_percent=200),
    lambda size: size._replace(max_tokens=max(1, size.max_tokens * 3 // 4)),
    lambda size: size._replace(max_tokens=max(1, size.max_tokens // 2)),
)
"""Changes of the best size to try one after the other."""
GIB = 1024**3
PROBE = 1 << 20
"""Tokens of a document whose keys and values give the bytes per token."""


def plan_pipeline(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    stages: int | None = None,
    chunks: int | str = 1,
    pieces: int | None = None,
    schedule: str = "auto",
    layers: Sequence[int] | None = None,
    head: str = "last",
) -> Plan:
    """Plan a batch, int64[n] tokens, for a pipeline.

    Args:
        stages: number of pp_ranks, with equally many ranks each; None takes the best of 2, 4 and 8.
        chunks: stages of every pp_rank; ``auto`` takes the fastest of `chunk_counts`.
        pieces: of the longest document; None tries several numbers.
        schedule: name of a schedule, or ``auto`` for the best of several.
        layers: of every stage; None balances the stages' times, see `stage_layers`.
        head: which stages compute norm, vocabulary projection and loss: the ``last``, ``all`` of them by tokens, or
            ``auto`` for the faster.
    """
    if head not in HEADS:
        raise unknown_name("head", head, HEADS)
    array = Batch.of(lengths).lengths
    if not cost.model.causal:
        raise SeqloomError(
            f"planner pipeline for {cost.model.name}, which is not causal: it cuts long documents into pieces, and a "
            "token would see later pieces, whose keys do not exist yet; plan whole documents, with one stage (flex, "
            "zones) or with hydraulis"
        )
    if chunks != "auto" and (isinstance(chunks, bool) or not isinstance(chunks, int | np.integer)):
        raise SeqloomError(f"chunks {chunks!r}; give 1, 2, 4, ... or 'auto'")
    if stages is None:
        given = {"chunks": chunks, "pieces": pieces, "schedule": schedule, "layers": layers, "head": head}
        return _best_number_of_stages(lambda n: plan_pipeline(array, cost, stages=n, **given), cost, chunks)
    if chunks == "auto":
        given = {"stages": stages, "pieces": pieces, "schedule": schedule, "layers": layers, "head": head}
        counts = chunk_counts(cost, stages, schedule)
        return _fastest_plan([partial(plan_pipeline, array, cost, chunks=n, **given) for n in counts], cost)
    if stages == 1:
        raise SeqloomError(
            "a pipeline of 1 stage: all ranks have all layers, and nothing flows; give 2 stages or more, or take "
            "planner pieces for long documents in pieces on one stage"
        )
    check_stages(cost, stages, chunks)
    schedules = schedules_to_try(schedule, chunks)
    check_schedule(schedule, stages, chunks)
    if pieces is not None and not 1 <= pieces <= int(array.max()):
        raise SeqloomError(
            f"{pieces} pieces of a longest sequence of {array.max()} tokens; give 1 to {array.max()}, or leave it out"
        )
    if head == "auto":
        given = {"stages": stages, "chunks": chunks, "pieces": pieces, "schedule": schedule, "layers": layers}
        return _fastest_plan([partial(plan_pipeline, array, cost, head=each, **given) for each in HEADS[:2]], cost)
    shape = {"v_shape": schedule in V_SHAPED, "head_stages": head == "all"}
    layout = StageLayout.of(cost, stages, chunks, layers, **shape)
    search = PipelineSearch(cost, layout, array, schedules, pieces)
    candidates = search.run() if int(array.max()) <= search.longest_document() else []
    if not candidates:
        raise search.too_long()
    near = [each for each in candidates if each.makespan_ns * 100 <= candidates[0].makespan_ns * NEAR_PERCENT]
    plans = [with_layer_choices(search.plan(candidate), cost) for candidate in near]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: predicted_ns(plan, cost))


def _best_number_of_stages(plan: Callable[[int], Plan], cost: CostModel, chunks: int | str) -> Plan:
    """The fastest plan over the usual numbers of stages; if all are refused, the last refusal."""
    width, least = max(cost.tensor, cost.expert), 1 if chunks == "auto" else int(chunks)
    options = [n for n in USUAL_STAGES if cost.ranks % (n * width) == 0 and n * least <= cost.model.layers]
    if not options:
        raise SeqloomError(
            f"{cost.ranks} ranks and {cost.model.layers} layers cannot be cut into 2, 4 or 8 stages; "
            "give their number (pipeline:3), or plan without a pipeline (auto)"
        )
    plans: list[Plan] = []
    for stages in options:
        try:
            plans.append(plan(stages))
        except SeqloomError:
            if not plans and stages == options[-1]:
                raise
    return min(plans, key=lambda plan: predicted_ns(plan, cost))


def chunk_counts(cost: CostModel, stages: int, schedule: str = "auto") -> list[int]:
    """Numbers of chunks that ``auto`` chooses from: those of `CHUNKS` that layers and schedule allow.

    [1] where they allow none: whoever plans with it says why.
    """
    found = []
    for chunks in CHUNKS:
        with suppress(SeqloomError):
            check_stages(cost, stages, chunks)
            check_schedule(schedule, stages, chunks)
            found.append(chunks)
    return found or [1]


def _fastest_plan(plans: Iterable[Callable[[], Plan]], cost: CostModel) -> Plan:
    """The fastest of the plans that these make, the first of equals; the first refusal if all are refused."""
    made: list[Plan] = []
    refusal: SeqloomError | None = None
    for plan in plans:
        try:
            made.append(plan())
        except SeqloomError as error:
            refusal = refusal or error
    if not made and refusal is not None:
        raise refusal
    return min(made, key=lambda plan: predicted_ns(plan, cost))


def schedules_to_try(schedule: str, chunks: int) -> tuple[str, ...]:
    """Names of the schedules to try: the given one, or for ``auto`` all that suit the chunks."""
    if schedule not in ("auto", *SCHEDULES):
        raise unknown_name("schedule", schedule, ("auto", *SCHEDULES))
    if schedule != "auto":
        return (schedule,)
    if chunks == 1:
        return ("1f1b", "seq1f1b", "balanced", "seq1f1b-zb")
    return ("interleaved", "seq1f1b-i", "balanced")


def check_schedule(name: str, pp_size: int, chunks: int) -> None:
    """Refuse a schedule that does not exist for such a pipeline, before any planning."""
    if name not in ("auto", "balanced"):
        build_schedule(name, pp_size, 1, 1, chunks)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Micro-batches of a batch in one schedule."""

    micro_batches: MicroBatches
    schedule: Schedule
    choice: Choice  # the activation policy of every micro-batch on every stage
    makespan_ns: int  # without the optimiser step
    memory_share: float  # peak share of the memory for micro-batches, on the fullest pp_rank


class PipelineSearch:
    """Search over micro-batch sizes, schedules and activation policies of one batch on one layout of stages."""

    def __init__(
        self,
        cost: CostModel,
        layout: StageLayout,
        lengths: np.ndarray,
        schedules: Sequence[str],
        pieces: int | None = None,
    ) -> None:
        """`schedules` are names to try; `pieces` of the longest document, None to try several numbers."""
        self.cost, self.layout, self.lengths = cost, layout, lengths
        self.schedules, self.pieces = tuple(schedules), pieces
        self.limits: Limits = pipeline_limits(cost, layout.ranges_by_pp_rank, layout.shard_group_size(cost))
        self.policies = policies_of(self.limits)
        wanted = len(lengths) * (pieces or 0)  # the user's pieces may need more
        self.max_micro_batches = max(wanted, MAX_MICRO_BATCHES * layout.pp_size)
        self.best: dict[str, Candidate] = {}
        self._tried: set[tuple[int, tuple[StageGroups, ...]]] = set()
        self._costs: dict[MicroBatches, MicroBatchCosts] = {}

    @property
    def fastest(self) -> Candidate | None:
        """The fastest candidate so far."""
        return min(self.best.values(), key=lambda candidate: candidate.makespan_ns, default=None)

    def run(self) -> list[Candidate]:
        """Find the best candidate of every schedule, fastest first; an empty list if nothing fits.

        Where memory binds, all micro-batches begin with a policy that stores less. Running a stage again and
        offloading are no faster than running its layers again, and are begun with only where nothing else fits.
        """
        for base, policy in enumerate(self.policies):
            if self.best and (policy.offload or policy.checkpoint == Checkpoint.STAGE):
                break
            for in_flight in (1, self.layout.pp_size):
                if in_flight == 1 or self._memory_binds():
                    for micro_batches in self._sizes(base, in_flight):
                        self._try(micro_batches, base, self.schedules[:FIRST_SCHEDULES])
            if self.fastest is not None and (not self._memory_binds() or self._no_gain(self.fastest, base + 1)):
                break
        for base in reversed(range(0 if self.best else len(self.policies))):  # the smallest pieces, storing least
            for micro_batches in self._smallest(base):
                self._try(micro_batches, base, self.schedules[:FIRST_SCHEDULES])
        if (chosen := self.fastest) is not None:
            base = int(chosen.choice.min())
            again = [name for name in self.schedules if name == "balanced" or name in self.schedules[FIRST_SCHEDULES:]]
            self._try(chosen.micro_batches, base, again, budget=BUDGET)
            if "balanced" in self.schedules and self.pieces is None:
                self._refine(base)
        return sorted(self.best.values(), key=lambda candidate: candidate.makespan_ns)

    def _memory_binds(self) -> bool:
        return self.fastest is None or self.fastest.memory_share * 100 >= BINDING_PERCENT

    def _no_gain(self, fastest: Candidate, base: int) -> bool:
        """Whether the same micro-batches would take longer under policy `base` even without any waiting."""
        return base == len(self.policies) or self._busiest_ns(fastest.micro_batches, base) >= fastest.makespan_ns

    def _busiest_ns(self, micro_batches: MicroBatches, base: int) -> int:
        """ns of work of the busiest pp_rank under one policy: no schedule is faster."""
        times = self._costs_of(micro_batches).times_under(self.policies[base])
        work = np.zeros(self.layout.pp_size, dtype=np.int64)
        np.add.at(work, list(self.layout.pp_rank_of_stage), sum(column.sum(axis=1) for column in times[:3]))
        return int(work.max())

    def _costs_of(self, micro_batches: MicroBatches) -> MicroBatchCosts:
        if micro_batches not in self._costs:
            costs = MicroBatchCosts(self.cost, self.layout, micro_batches, self.lengths, self.policies)
            self._costs[micro_batches] = costs
        return self._costs[micro_batches]

    def _document_costs(self, base: int) -> tuple[DocumentCosts, int]:
        """(the batch priced under a policy, capacity of a rank in tokens of a micro-batch)."""
        policy = MemoryPolicy(self.policies[base].checkpoint, Reduce.STEP, resident=True)
        costs = DocumentCosts.of(self.lengths, self.cost, self.layout, policy)
        return costs, policy_capacity(self.limits, self.policies[base])

    def _sizes(self, base: int, in_flight: int = 1) -> Iterator[MicroBatches]:
        """Micro-batches of every size to try, so small that a rank can hold `in_flight` of them at a time.

        Smaller micro-batches are more work: once the work of the busiest pp_rank exceeds the best candidate's time, no
        smaller size is tried.
        """
        costs, capacity = self._document_costs(base)
        max_tokens = max(self.cost.pad_multiple, capacity // in_flight)
        seen = set()
        if int(costs.tokens.max()) > max_tokens * self.layout.ranks_per_stage * self.max_micro_batches:
            return  # more pieces than a plan may have micro-batches
        for degree in self._degrees(costs):
            for target_ns in self._targets(costs, degree):
                micro_batches = make_micro_batches(costs, MicroBatchSize(degree, target_ns, max_tokens))
                if micro_batches.groups in seen or len(micro_batches.units) > self.max_micro_batches:
                    continue
                seen.add(micro_batches.groups)
                fastest = self.fastest
                if (
                    fastest is not None
                    and self._busiest_ns(micro_batches, base) * 100 > fastest.makespan_ns * NEAR_PERCENT
                ):
                    break
                yield micro_batches

    def _degrees(self, costs: DocumentCosts) -> list[int]:
        """Degrees of groups of sequences in pieces: a whole stage, a node, or the narrowest that suits the longest.

        A document may take half of a pp_rank's work in a step. Narrow groups communicate less and leave ranks for
        others; where that saves little, only the widest are tried.
        """
        half = costs.total_work // (2 * self.layout.ranks_per_stage)
        fast = [degree for degree in costs.degrees if costs.longest_ns(degree) <= half]
        widest = costs.degrees[-1]
        narrow = [degree for degree in (self.cost.node_size, *fast[:1]) if degree in fast and degree < widest]
        spent = {degree: degree * costs.longest_ns(degree) for degree in (widest, *narrow)}
        return [widest, *(d for d in dict.fromkeys(narrow) if spent[widest] * 100 > spent[d] * WORTH_PERCENT)]

    def _targets(self, costs: DocumentCosts, degree: int) -> list[int]:
        """Times of a micro-batch to try, ns, the longest first."""
        longest = max(1, costs.longest_ns(degree))
        if self.pieces is not None:
            return [-(-longest // self.pieces)]
        wanted = [-(-longest // k) for k in PIECES]
        wanted += [costs.total_work // (self.cost.ranks * rounds) for rounds in ROUNDS_PER_STAGE]
        if all(name in UNCUT for name in self.schedules):
            wanted = [max(longest, target) for target in wanted]
        targets: list[int] = []
        for target in sorted({max(1, w) for w in wanted}, reverse=True):
            if not targets or targets[-1] * 100 >= target * DISTINCT_PERCENT:
                targets.append(target)
        return targets

    def _smallest(self, base: int) -> Iterator[MicroBatches]:
        """Ever smaller micro-batches, for batches that fit in no other way."""
        costs, capacity = self._document_costs(base)
        degree = costs.degrees[-1]
        target_ns = max(1, 2 * costs.longest_ns(degree) // self.max_micro_batches)
        least = -(-2 * int(costs.tokens.max()) // (degree * self.max_micro_batches))
        sizes = [max(self.cost.pad_multiple, min(capacity, size)) for size in (capacity // 4, capacity // 16, least)]
        for max_tokens in dict.fromkeys(sizes):
            micro_batches = make_micro_batches(costs, MicroBatchSize(degree, target_ns, max_tokens))
            if self.pieces is None and len(micro_batches.units) <= 4 * self.max_micro_batches:
                yield micro_batches

    def _refine(self, base: int) -> None:
        """Try changes of the best size one after the other, each from the fastest candidate so far.

        Where memory keeps micro-batches smaller than their target, the target is lowered first to about their size.
        """
        costs, capacity = self._document_costs(base)
        for change in SIZE_CHANGES:
            fastest = self.fastest
            assert fastest is not None
            size, count = fastest.micro_batches.size, len(fastest.micro_batches.units)
            reached = costs.total_work // (self.layout.ranks_per_stage * count)
            size = change(size._replace(target_ns=max(1, min(size.target_ns, reached * 3 // 2))))
            micro_batches = make_micro_batches(costs, size._replace(max_tokens=min(size.max_tokens, capacity)))
            if len(micro_batches.units) <= self.max_micro_batches:
                self._try(micro_batches, base, ("balanced",))

    def _try(self, micro_batches: MicroBatches, base: int, schedules: Sequence[str], budget: int = 1) -> None:
        """Run micro-batches in these schedules; store candidates that beat the best of their schedule."""
        if budget == 1 and (base, micro_batches.groups) in self._tried:
            return
        self._tried.add((base, micro_batches.groups))
        memory = ActivationMemory(self._costs_of(micro_batches), self.limits)
        in_pieces = any(unit.pieces > 1 for unit in micro_batches.units)
        for name in schedules:
            if len(self.schedules) > 1 and name in (UNCUT if in_pieces else PIECEWISE):
                continue  # the same schedule under another name
            found = self._candidate(name, memory, base, budget)
            if found is not None:
                known = self.best.get(found.schedule.name)
                if known is None or found.makespan_ns < known.makespan_ns:
                    self.best[found.schedule.name] = found

    def _candidate(self, name: str, memory: ActivationMemory, base: int, budget: int) -> Candidate | None:
        """Micro-batches in one schedule under policy `base`, or policies that store less; None if they do not fit."""
        costs = memory.costs
        if not memory.allows(base):
            return None
        choice = np.full((len(self.layout.layers), len(costs.micro_batches.units)), base, dtype=np.int64)
        found = [self._with_policies(each, memory, choice) for each in self._orders(name, memory, choice, budget)]
        fitting = [each for each in found if each is not None]
        return min(fitting, key=lambda candidate: candidate.makespan_ns, default=None)

    def _with_policies(self, schedule: Schedule, memory: ActivationMemory, choice: Choice) -> Candidate | None:
        """An order with policies that store less where these do not fit; None if nothing does."""
        costs = memory.costs
        if any(peak > free for peak, free in zip(memory.peaks(schedule, choice), memory.free, strict=True)):
            fitting = memory.fit(schedule, choice)
            if fitting is None:
                return None
            choice = fitting
        shares = [peak / max(free, 1) for peak, free in zip(memory.peaks(schedule, choice), memory.free, strict=True)]
        makespan = simulate_schedule(schedule, costs.times(choice), message=costs.message_ns).makespan
        return Candidate(costs.micro_batches, schedule, choice, makespan, max(shares))

    def _orders(self, name: str, memory: ActivationMemory, choice: Choice, budget: int) -> Iterator[Schedule]:
        """Yield the schedule of a name; with head stages one for every lead of forwards, if micro-batches fit."""
        costs, size = memory.costs, self.layout.pp_size
        pp_ranks, times = self.layout.pp_rank_of_stage, costs.times(choice)
        if not self.layout.heads:
            if (schedule := self._order(name, memory, choice, pp_ranks, times, budget)) is not None:
                yield schedule
            return
        for lead in LEADS[:1] if name == "balanced" else LEADS:
            longer = times_with_lead(times, size, lead)
            order = self._order(name, memory, choice, tuple(range(size + lead)), longer, budget)
            if order is not None:
                yield schedule_head(order.name, order.rows[:size], order.units, times, costs.message_ns)

    def _order(
        self, name: str, memory: ActivationMemory, choice: Choice, pp_ranks: Sequence[int], times: Times, budget: int
    ) -> Schedule | None:
        """Build a schedule by name on these pp_ranks, the best of `budget` list schedules; None if nothing fits.

        Those behind the layout's own hold nothing.
        """
        units = memory.costs.micro_batches.units
        if name == "balanced":
            with_layers, message = len(self.layout.layers) - self.layout.heads, memory.costs.message_ns
            more = len(pp_ranks) - with_layers
            fused, held = (each(choice)[:with_layers] for each in (memory.fuses_backward, memory.held))
            fused, held = (np.concatenate([each, np.zeros_like(each[:1])[[0] * more]]) for each in (fused, held))
            caps = [*memory.caps(choice), *[int(held.sum())] * (max(pp_ranks) + 1 - self.layout.pp_size)]
            try:
                found = balanced_schedule(
                    pp_ranks, units, _fuse_times(times, fused), held, caps, message=message, budget=budget
                )
            except PlanError:
                return None
            return _fuse_backward(found, fused)
        pieces = [unit.pieces for unit in units if unit.piece == 0]
        if name in V_SHAPED and max(pieces) > 1:
            return None
        pp_size = max(pp_ranks) + 1
        return build_schedule(name, pp_size, len(pieces), pieces, len(pp_ranks) // pp_size, times)

    def plan(self, candidate: Candidate) -> Plan:
        """Build the plan of a candidate."""
        rounds = []
        for number, groups in enumerate(candidate.micro_batches.groups):
            policies = [self.policies[k] for k in candidate.choice[:, number].tolist()]
            rounds.append(Round(stage_micro_batches(self.cost, self.layout, groups, policies)))
        plan = Plan(
            limits=self.limits,
            sharding=self.cost.sharding,
            reduce=Reduce.STEP,
            documents=tuple(self.lengths.tolist()),
            pipelines=(Pipeline(self.layout.stages, tuple(rounds), candidate.schedule.pipeline_actions()),),
            planner="pipeline",
        )
        return without_unused_limits(plan)

    def longest_document(self) -> int:
        """Tokens of the longest document that fits: uncut, or in pieces with its keys and values."""
        shapes = stage_group_shapes(self.cost, self.layout)
        most = max(policy_capacity(self.limits, policy) for policy in self.policies)
        whole = max(shape.degree for shape in shapes) * most
        in_pieces = [
            self._longest_in_pieces(self.cost.group(shape, range(shape.degree), ()), policy)
            for policy in self.policies
            for shape in shapes
        ]
        return max(whole, *in_pieces)

    def _longest_in_pieces(self, group: Group, policy: ActivationPolicy) -> int:
        """Tokens that a group holds under one policy, in the smallest legal pieces."""
        cost, shard_group = self.cost, self.layout.shard_group_size(self.cost)
        fits = []
        for ranges in self.layout.ranges_by_pp_rank:
            free = float(cost.budget_bytes - pp_rank_bytes(cost, ranges, shard_group))
            per_token = working = 0.0
            for layers in ranges:
                own = cost.memory.activation_bytes(layers, policy.checkpoint, policy.offloaded_layers(layers))
                working = max(working, own.forward, own.backward)
                per_token += own.held / group.degree + sum(kv_cache_bytes(cost, layers, group, PROBE)) / PROBE
            first_piece = 2 / (group.degree * self.max_micro_batches)  # share of the tokens, on a rank
            fits.append(int(max(0.0, free) / max(per_token + first_piece * working, 1.0)))
        return min(fits) - min(fits) % cost.pad_multiple

    def too_long(self) -> MemoryBudgetError:
        """The error for a batch that no candidate holds: which document, and what would fit."""
        longest, fits, pp_size = int(self.lengths.argmax()), self.longest_document(), self.layout.pp_size
        tokens = int(self.lengths[longest])
        if tokens > fits:
            return MemoryBudgetError(
                f"sequence {longest} has {tokens} tokens, more than the {pp_size} stages of "
                f"{self.layout.ranks_per_stage} ranks hold even in pieces, recomputed and in host memory (about {fits} "
                f"tokens); {how_to_drop(fits)}, {self.cost.optimiser_way_out}raise the memory budget, use more stages "
                "or more GPUs"
            )
        if len(self.schedules) > 1:
            return MemoryBudgetError(
                f"{len(self.lengths)} sequences of {int(self.lengths.sum())} tokens need more than "
                f"{self.max_micro_batches} micro-batches in the memory of {pp_size} stages; put fewer sequences into "
                "a step, raise the memory budget (or the capacity, if one is set), or use more stages or more GPUs"
            )
        return MemoryBudgetError(
            f"schedule {self.schedules[0]!r} cannot run this batch in {self.cost.budget_bytes / GIB:.1f} GiB per GPU: "
            f"sequence {longest} of {tokens} tokens is near what {pp_size} stages hold (about {fits}); take schedule "
            f"'auto', raise the memory budget, use more stages, or {how_to_drop(fits)}"
        )


def _fuse_times(times: Times, fused: np.ndarray) -> Times:
    """Move the weight half into the input half where bool[stages, units] `fused` asks for whole backwards."""
    late = np.where(fused, times.backward_weight, 0)
    halves = times.backward_input + late, times.backward_weight - late
    return Times(times.forward, *halves, np.where(fused, 0, times.split_overhead))


def _fuse_backward(schedule: Schedule, fused: np.ndarray) -> Schedule:
    """Replace I by B and drop W where bool[stages, units] `fused` asks for whole backwards."""
    if not fused.any():
        return schedule
    table = fused.tolist()

    def joined(row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            fuse = action.kind in (ActionKind.I, ActionKind.W) and table[action.stage][action.round or 0]
            if not fuse:
                yield action
            elif action.kind is ActionKind.I:
                yield Action(action.stage, ActionKind.B, action.round)

    return replace(schedule, rows=tuple(tuple(joined(row)) for row in schedule.rows))
