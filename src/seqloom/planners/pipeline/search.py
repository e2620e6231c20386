"""Orders to choose from: the strict ones, those with split backwards, and the list schedule under the memory cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.stages import StageMemory, pp_rank_bytes
from seqloom.errors import PlanError, SeqloomError, unknown
from seqloom.plan import Action, ActionKind, Checkpoint, Group, Limits, Reduce
from seqloom.planners.pipeline.memory import Choice, Ledger
from seqloom.planners.pipeline.micro_batches import Draft, Size, draft
from seqloom.planners.pipeline.placement import Hall, Level, Seats
from seqloom.planners.pipeline.prices import UnitPrices
from seqloom.planners.pipeline.stage_layout import Line, host_shapes, shard_group_of
from seqloom.schedules import NAMES, Schedule, Times, play, schedule_of
from seqloom.schedules.search import BUDGET, balanced

B, W = ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
FOLDED = ("zb-v", "v-half", "v-min")
"""Orders whose stages go down the hosts and up again; they run whole micro-batches only."""
WHOLE = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", *FOLDED)
"""Orders that cut no document unless memory asks for it."""
PIECEWISE = ("seq1f1b", "seq1f1b-i")
"""What the orders of whole documents are called when these come in pieces."""
ALL_NAMES = tuple(dict.fromkeys((*NAMES, "balanced")))


def names_of(schedule: str, chunks: int) -> tuple[str, ...]:
    """The orders that are tried when a run asks for this one: all that suit the chunks, or the one it names."""
    if schedule not in ("auto", *ALL_NAMES):
        raise unknown("schedule", schedule, ("auto", *ALL_NAMES))
    if schedule != "auto":
        return (schedule,)
    if chunks == 1:
        return ("1f1b", "seq1f1b", "balanced", "seq1f1b-zb")
    return ("interleaved", "seq1f1b-i", "balanced")


def order_of(
    name: str, places: Sequence[int], times: Times, ledger: Ledger, choice: Choice, budget: int
) -> Schedule | None:
    """The order of that name for these units; None where it cannot hold them.

    Args:
        name: one of `ALL_NAMES`.
        places: the host of every stage.
        times: of the units.
        ledger: what they are and what they hold.
        choice: which level they hold it at.
        budget: list schedules to try.
    """
    hosts, prices = max(places) + 1, ledger.prices
    units = prices.draft.units
    if name == "balanced":
        whole = ledger.whole(choice)
        try:
            held, caps = ledger.held(choice), ledger.caps(choice)
            found = balanced(places, units, fused(times, whole), held, caps, message=prices.message, budget=budget)
        except PlanError:
            return None
        return joined(found, whole)
    counts = [unit.pieces for unit in units if unit.piece == 0]
    if name in FOLDED and max(counts) > 1:
        return None
    return schedule_of(name, hosts, len(counts), counts, len(places) // hosts, times)


def fused(times: Times, whole: np.ndarray) -> Times:
    """The same work with nothing left for the weight half where backwards shall be whole, bool[stages, units]."""
    late = np.where(whole, times.weights, 0)
    return Times(times.forward, times.backward + late, times.weights - late, np.where(whole, 0, times.apart))


def joined(order: Schedule, whole: np.ndarray) -> Schedule:
    """The order with whole backwards in place of their halves, where the input half is."""
    if not whole.any():
        return order
    table = whole.tolist()
    rows = []
    for row in order.rows:
        kept = [a for a in row if a.kind is not W or not table[a.stage][a.round or 0]]
        rows.append(
            tuple(Action(a.stage, B, a.round) if a.kind is I and table[a.stage][a.round or 0] else a for a in kept)
        )
    return replace(order, rows=tuple(rows))


def require_order(name: str, hosts: int, chunks: int) -> None:
    """Refuse a named order that such a pipeline cannot have, before any planning."""
    if name not in ("auto", "balanced"):
        schedule_of(name, hosts, 1, 1, chunks)


# ---- merged: planners.pipelines.search
# The search: how coarse units are, in what order they run, and how much is kept of them.
#
# Units that take longer make fewer messages and fuller kernels; shorter ones fill the pipeline sooner. Several
# sizes are
# tried, every one with several orders; the best by `play` is taken. Where memory binds, less is kept, cheapest
# first:
# the list schedule obeys the cap by itself, the other orders have units keep less until they fit.


PIECES = (1, 2, 4, 8, 16, 32)
"""Into how many pieces the longest document is cut, where nobody says."""
ROUNDS_PER_STAGE = (2, 4)
"""Units per stage, where the batch and not its longest document decides how coarse they are."""
APART_PERCENT = 140
"""Sizes nearer to each other than this are not tried both."""
WORTH_PERCENT = 105
"""Narrower groups are tried where wide ones cost this much of their rank-time for the longest document."""
NEAR_PERCENT = 101
"""Answers that are this near to the fastest may be taken in its place; nothing slower is worth a try."""
MOST_UNITS = 64
"""Units per stage that a plan may have."""
BINDING_PERCENT = 90
"""A plan that fills less of the memory than this gains nothing by keeping less."""


CHANGES: tuple[Callable[[Size], Size], ...] = (
    lambda size: size._replace(later=150, packs=200, starters=6, room=size.room * 4 // 3),
    lambda size: size._replace(room=size.room * 4 // 3),
    lambda size: size._replace(starters=size.starters // 2),
    lambda size: size._replace(target=max(1, size.target * 5 // 6)),
    lambda size: size._replace(target=size.target * 7 // 6),
    lambda size: size._replace(starters=max(2, size.starters)),
    lambda size: size._replace(later=150),
    lambda size: size._replace(packs=150),
    lambda size: size._replace(packs=200),
    lambda size: size._replace(room=max(1, size.room * 3 // 4)),
    lambda size: size._replace(room=max(1, size.room // 2)),
)
"""What is tried around the best size."""
QUICK = 3
"""Orders that every size is tried with; the others are tried with the best size."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to run a batch."""

    draft: Draft
    order: Schedule
    choice: Choice
    """int64[stages, units]: index of the level of every unit on every stage."""
    makespan: int
    """ns without the step's end."""
    filled: float
    """Share of the memory for units that is in use at most, on the fullest host."""


NOTHING: Mapping[str, Answer] = {}


@dataclass(frozen=True, eq=False)
class Search:
    """One batch on one line."""

    cost: CostModel
    line: Line
    limits: Limits
    lengths: np.ndarray
    names: tuple[str, ...]
    """Orders to try."""
    pieces: int | None
    """Pieces of the longest document; None: several are tried."""
    _tried: set[tuple[int, tuple[Seats, ...]]] = field(default_factory=set, init=False, repr=False)
    _prices: dict[Draft, UnitPrices] = field(default_factory=dict, init=False, repr=False)

    @property
    def levels(self) -> tuple[Level, ...]:
        """How little may be kept, the fastest first; what lies in host memory comes last."""
        known = [checkpoint for checkpoint, _ in self.limits.capacity]
        least = [Level(c, offload=True) for c in (Checkpoint.FULL, Checkpoint.STAGE, Checkpoint.PROFILE) if c in known]
        return (*(Level(checkpoint) for checkpoint in known), *least)

    def answers(self) -> list[Answer]:
        """The best answer of every order, fastest first; empty where nothing fits.

        Where memory binds, all units keep less, level by level; running a stage again and host memory are no faster
        than running its layers again, and are begun with only where nothing else fits.
        """
        best: dict[str, Answer] = {}
        for base, level in enumerate(self.levels):
            if best and (level.offload or level.checkpoint == Checkpoint.STAGE):
                break
            for made in self._drafts(base, best):
                self._try(made, base, self.names[:QUICK], best, budget=1)
            fastest = _fastest(best)
            if fastest is None or fastest.filled * 100 >= BINDING_PERCENT:
                for made in self._drafts(base, best, held=self.line.hosts):
                    self._try(made, base, self.names[:QUICK], best, budget=1)
            fastest = _fastest(best)
            if fastest is not None and (fastest.filled * 100 < BINDING_PERCENT or self._settled(fastest, base + 1)):
                break
        for base in reversed(range(0 if best else len(self.levels))):  # the smallest pieces, the least kept
            for made in self._smallest(base):
                self._try(made, base, self.names[:QUICK], best, budget=1)
        chosen = _fastest(best)
        if chosen is not None:
            again = [name for name in self.names if name == "balanced" or name in self.names[QUICK:]]
            base = int(chosen.choice.min())
            self._try(chosen.draft, base, again, best, budget=BUDGET)
            if "balanced" in self.names and self.pieces is None:
                self._refine(base, best)
        return sorted(best.values(), key=lambda answer: answer.makespan)

    def _refine(self, base: int, best: dict[str, Answer]) -> None:
        """Try what lies around the size of the best units, change after change, and go on from what is faster.

        Where memory has made units smaller than their target, it is one that they nearly reach that is changed.
        """
        hall, policy, room = self._hall(base)
        for change in CHANGES:
            fastest = _fastest(best)
            assert fastest is not None  # it was asked for
            size, reached = fastest.draft.size, hall.work // (self.line.width * len(fastest.draft.units))
            size = change(size._replace(target=max(1, min(size.target, reached * 3 // 2))))
            made = draft(hall, policy, size._replace(room=min(size.room, room)))
            if len(made.units) <= self.most_units:
                self._try(made, base, ("balanced",), best, budget=1)

    def _settled(self, fastest: Answer, base: int) -> bool:
        """Whether even without any waiting the same units would take longer if they kept less."""
        return base == len(self.levels) or self._busiest(fastest.draft, base) >= fastest.makespan

    def _busiest(self, made: Draft, base: int) -> int:
        """ns that the busiest host works on these units, all kept alike: no order is faster."""
        times = self._priced(made).times(self.levels[base])
        work = np.zeros(self.line.hosts, dtype=np.int64)
        np.add.at(work, list(self.line.places), sum(column.sum(axis=1) for column in times[:3]))
        return int(work.max())

    def _priced(self, made: Draft) -> UnitPrices:
        if made not in self._prices:
            self._prices[made] = UnitPrices(self.cost, self.line, made, self.lengths)
        return self._prices[made]

    def _try(self, made: Draft, base: int, names: Sequence[str], best: dict[str, Answer], budget: int) -> None:
        """Run a draft in these orders, and keep what beats the best of its kind."""
        if budget == 1 and (base, made.seats) in self._tried:
            return
        self._tried.add((base, made.seats))
        prices = self._priced(made)
        ledger = Ledger(prices, self.levels, self.limits)
        choice = np.full((len(self.line.places), len(made.units)), base, dtype=np.int64)
        cut = any(unit.pieces > 1 for unit in made.units)
        for name in names:
            if len(self.names) > 1 and name in (WHOLE if cut else PIECEWISE):
                continue  # it is the same order by another name
            self._keep(self._answer(name, prices, ledger, choice, budget), best)

    def _keep(self, answer: Answer | None, best: dict[str, Answer]) -> None:
        known = None if answer is None else best.get(answer.order.name)
        if answer is not None and (known is None or answer.makespan < known.makespan):
            best[answer.order.name] = answer

    def _drafts(self, base: int, best: Mapping[str, Answer] = NOTHING, held: int = 1) -> Iterator[Draft]:
        """Units of every size that is tried, so small that a rank could hold `held` of them at a time.

        The smaller units are, the more work they are: from where that alone takes longer than the best answer that is
        known by then, none is tried.

        The first host of a line holds what all others work at: nearly two units per host.
        """
        hall, policy, room = self._hall(base)
        room = max(self.cost.pad_multiple, room // held)
        seen = set()
        if int(hall.tokens.max()) > room * self.line.width * self.most_units:
            return  # more pieces than a plan may have units
        for degree in self._degrees(hall):
            for target in self._targets(hall, degree):
                made = draft(hall, policy, Size(degree, target, room))
                if made.seats in seen or len(made.units) > self.most_units:
                    continue
                seen.add(made.seats)
                fastest = _fastest(best)
                if fastest is not None and self._busiest(made, base) * 100 > fastest.makespan * NEAR_PERCENT:
                    break
                yield made

    def _smallest(self, base: int) -> Iterator[Draft]:
        """Ever smaller units, for batches that nothing else holds."""
        hall, policy, room = self._hall(base)
        degree = hall.degrees[-1]
        target = max(1, 2 * hall.longest(degree) // self.most_units)
        least = -(-2 * int(hall.tokens.max()) // (degree * self.most_units))
        for most in dict.fromkeys(
            max(hall.cost.pad_multiple, min(room, size)) for size in (room // 4, room // 16, least)
        ):
            made = draft(hall, policy, Size(degree, target, most))
            if self.pieces is None and len(made.units) <= 4 * self.most_units:
                yield made

    def _hall(self, base: int) -> tuple[Hall, MemoryPolicy, int]:
        """The batch priced for a level, its policy, and the tokens that a rank may hold in a unit."""
        checkpoint = self.levels[base].checkpoint
        policy = MemoryPolicy(checkpoint, Reduce.STEP, resident=True)
        return Hall.of(self.lengths, self.cost, self.line, policy), policy, dict(self.limits.capacity)[checkpoint]

    @property
    def most_units(self) -> int:
        """Units that a plan may have: as many as documents and pieces ask for where somebody says how many pieces."""
        wanted = len(self.lengths) * (self.pieces or 0)
        return max(wanted, MOST_UNITS * self.line.hosts)

    def _degrees(self, hall: Hall) -> list[int]:
        """Ranks of the groups of documents in pieces: of a whole host, of a node, or as few as the longest can do with.

        A document may take half of what a host works in a step. Narrow groups exchange less and have others beside
        them; where that is little, the widest are enough.
        """
        half = hall.work // (2 * self.line.width)
        fast = [degree for degree in hall.degrees if hall.longest(degree) <= half]
        widest = hall.degrees[-1]
        narrow = [degree for degree in (self.cost.node_size, *fast[:1]) if degree in fast and degree < widest]
        spent = {degree: degree * hall.longest(degree) for degree in (widest, *narrow)}
        return [widest, *(d for d in dict.fromkeys(narrow) if spent[widest] * 100 > spent[d] * WORTH_PERCENT)]

    def _targets(self, hall: Hall, degree: int) -> list[int]:
        """ns that a unit shall take, the longest first."""
        longest = max(1, hall.longest(degree))
        if self.pieces is not None:
            return [-(-longest // self.pieces)]
        wanted = [-(-longest // k) for k in PIECES]
        wanted += [hall.work // (self.line.width * self.line.hosts * rounds) for rounds in ROUNDS_PER_STAGE]
        if all(name in WHOLE for name in self.names):
            wanted = [max(longest, target) for target in wanted]
        kept: list[int] = []
        for target in sorted({max(1, w) for w in wanted}, reverse=True):
            if not kept or kept[-1] * 100 >= target * APART_PERCENT:
                kept.append(target)
        return kept

    def _answer(self, name: str, prices: UnitPrices, ledger: Ledger, choice: Choice, budget: int) -> Answer | None:
        """The units in one order, keeping what `choice` says or as much less as memory asks for; None: too much."""
        times = self._times(prices, choice)
        order = order_of(name, self.line.places, times, ledger, choice, budget)
        if order is None:
            return None
        kept: Choice | None = choice
        if any(peak > free for peak, free in zip(ledger.peaks(order, choice), ledger.free, strict=True)):
            kept = ledger.fitted(order, choice, [prices.times(level) for level in self.levels])
        if kept is None:
            return None
        filled = [peak / max(free, 1) for peak, free in zip(ledger.peaks(order, kept), ledger.free, strict=True)]
        makespan = play(order, self._times(prices, kept), message=prices.message).makespan
        return Answer(prices.draft, order, kept, makespan, max(filled))

    def _times(self, prices: UnitPrices, choice: Choice) -> Times:
        """The times of units of which each is kept in its own way."""
        first = int(choice.flat[0])
        if (choice == first).all():
            return prices.times(self.levels[first])
        times = [prices.times(level) for level in self.levels]
        columns = zip(*(each[:3] for each in times), strict=True)
        picked = [np.take_along_axis(np.stack(column), choice[None], axis=0)[0] for column in columns]
        return Times(*picked, apart=times[0].apart)


def _fastest(best: Mapping[str, Answer]) -> Answer | None:
    return min(best.values(), key=lambda answer: answer.makespan, default=None)


# ---- merged: planners.pipelines.longest
# The longest document that a pipeline holds: as little kept of it as can be, in the smallest pieces it may have.


GIB = 1024**3
PROBE = 1 << 20
"""Tokens of the document whose keys and values are weighed; they grow in proportion."""


def longest_document(search: Search) -> int:
    """Tokens of the longest document that fits on every host: whole, or in pieces with its keys and values."""
    widest = max(shape.degree for shape in host_shapes(search.cost, search.line))
    whole = widest * max(tokens for _, tokens in search.limits.capacity)
    return max(whole, *(_fits(search, level) for level in search.levels))


def _fits(search: Search, level: Level) -> int:
    cost, line = search.cost, search.line
    shard_group = shard_group_of(cost, line)
    best = 0
    for shape in host_shapes(cost, line):
        group = Group(tuple(range(shape.degree)), shape.ulysses, shape.ring, ())
        most = []
        for shares in line.of_hosts:
            free = float(cost.budget_bytes - pp_rank_bytes(cost, shares, shard_group))
            each = 0.0
            working = 0.0
            for share in shares:
                memory = StageMemory(cost, share)
                own = memory.activation_bytes(*level)
                working = max(working, own.forward, own.backward)
                each += own.held / shape.degree + sum(memory.kv_cache_bytes(group, PROBE)) / PROBE
            piece = 2 / (shape.degree * search.most_units)  # of a document's tokens, on a rank, in its first piece
            most.append(max(0.0, free) / max(each + piece * working, 1.0))
        best = max(best, int(min(most)))
    return best - best % cost.pad_multiple


def too_long(search: Search) -> SeqloomError:
    """The error that says which document no choice can hold, and what would fit."""
    longest = int(search.lengths.argmax())
    room = longest_document(search)
    if int(search.lengths[longest]) <= room and len(search.names) > 1:
        return SeqloomError(
            f"{len(search.lengths)} sequences of {int(search.lengths.sum())} tokens need more than {search.most_units} "
            f"units in the memory of {search.line.hosts} stages; put fewer sequences into a step, raise the memory "
            "budget (or the capacity, if one is set), or use more stages or more GPUs"
        )
    if int(search.lengths[longest]) <= room:
        way = f"take schedule 'auto' instead of {search.names[0]!r}, " if len(search.names) == 1 else ""
        return SeqloomError(
            f"no order found for this batch in {search.cost.budget_bytes / GIB:.1f} GiB per GPU: sequence {longest} of "
            f"{search.lengths[longest]} tokens is near what {search.line.hosts} stages hold (about {room}); {way}"
            "raise the memory budget, use more stages, or drop longer sequences (--max-length)"
        )
    return SeqloomError(
        f"sequence {longest} has {search.lengths[longest]} tokens, more than the {search.line.hosts} stages of "
        f"{search.line.width} ranks hold even in pieces, recomputed and in host memory (about {room} tokens); "
        f"drop longer sequences (--max-length {max(room, 1)}), raise the memory budget, use more stages or more GPUs"
    )
