"""A pipeline: stages, the rounds that flow through them, and the table of actions that says in what order.

A stage is ranks, a range of layers and a tensor-parallel degree. Under free sharding a plan also chooses, per stage,
whether its parameters stay gathered for the step or are gathered for every pass:

    0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE 0RESHARD                       stay for the step

    0UNSHARD0 0F0 0RESHARD0 0UNSHARD0 0B0 0RESHARD0 ... 0REDUCE     gathered for every pass (reshard_after_forward)

Between passes the ranks with the same slice of such a stage's weights hold a share of it each, and of its gradients.
That is less memory for more messages. UNSHARD all-gathers the shares. RESHARD frees the copies; after a backward it
reduce-scatters their gradients into the shares first. Gradients of weight halves (W) wait for the REDUCE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from seqloom.layout.layout import Span
from seqloom.plan.action import Action, ActionKind
from seqloom.plan.limits import Reduce
from seqloom.plan.round import Group, Round, StageMicroBatch


@dataclass(frozen=True, slots=True)
class Stage:
    """Ranks that run layers `layers[0] .. layers[1] - 1`.

    Several stages of a pipeline may have the same ranks, see `Pipeline`. A stage without layers, behind the last one
    that has some, is a head stage: see `deal_head`.

    With a tensor degree t above 1 the weights are split over t neighbours: ranks 0 to t - 1 of the stage, the next t,
    and so on. Tokens and heads are then split over these ranks exactly as over Ulysses ranks, so tensor ranks are the
    innermost part of a group's Ulysses axis: every group of the stage has a `ulysses` that is a multiple of t.

    With an expert degree e above 1 the experts of every layer are divided over e neighbours (an EP group) in the same
    way. Tokens stay where they are: a rank sends each to the ranks with its experts, and gets the results back. So the
    ranks of an EP group take part in the same rounds, whichever of them has tokens.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    tensor: int = 1
    expert: int = 1

    @property
    def layer_count(self) -> int:
        """Layers of the stage."""
        return self.layers[1] - self.layers[0]


class LayerRange(NamedTuple):
    """Layers `first .. stop - 1` of a model with `model_layers` layers: what a stage has of it.

    The first range also embeds; the last also has the final norm, the vocabulary projection and the loss, unless stages
    of their own have these.
    """

    first: int
    stop: int
    model_layers: int
    head_stages: int = 0  # that have norm, projection and loss between them, and no layers; 0: the last range has these

    @property
    def has_embedding(self) -> bool:
        """Whether it takes token ids; other ranges take hidden states."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """Whether it returns the sum of token losses; other ranges return hidden states."""
        return self.stop == self.model_layers and (self.first == self.stop or not self.head_stages)


class StageChain(NamedTuple):
    """Which stage hands its output to which: every one to the next, the last with layers to all head stages."""

    stages: int
    heads: int = 0  # of these stages, the last ones, which have no layers

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> StageChain:
        """The chain of the stages of a pipeline."""
        heads = takewhile(lambda stage: stage.layer_count == 0, reversed(stages[1:]))
        return cls(len(stages), sum(1 for _ in heads))

    @property
    def last(self) -> int:
        """The last stage with layers."""
        return self.stages - self.heads - 1

    def is_head(self, stage: int) -> bool:
        """Whether a stage has no layers."""
        return stage > self.last

    def previous(self, stage: int) -> int:
        """The stage whose output a stage takes; -1 before the first."""
        return min(stage - 1, self.last)

    def following(self, stage: int) -> tuple[int, ...]:
        """The stages that take a stage's output; () behind the end."""
        if stage == self.last:
            return tuple(range(stage + 1, self.stages))
        return (stage + 1,) if stage < self.last else ()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield every stage with the one before it."""
        for stage in range(1, self.stages):
            yield self.previous(stage), stage


def layer_ranges(stages: Sequence[Stage]) -> tuple[LayerRange, ...]:
    """Return the layers of every stage of a pipeline."""
    heads = StageChain.of(stages).heads
    return tuple(LayerRange(*stage.layers, stages[-1].layers[1], heads) for stage in stages)


def deal_head(work: StageMicroBatch, ranks: Sequence[Sequence[int]]) -> tuple[StageMicroBatch, ...]:
    """Deal the tokens of a micro-batch to the head stages, which have these ranks: equally many to every rank.

    The norm, the vocabulary projection and the loss of a token need no other token. The tokens are taken in the order
    of the last stage's groups, in runs, and runs that follow each other go to head stages that do: what the first rank
    of the last stage has goes to the first ranks of all head stages.
    """
    spans = list(work.spans())
    total, places = sum(span.tokens for span in spans), [rank for column in zip(*ranks, strict=True) for rank in column]
    ends = [total * (k + 1) // len(places) for k in range(len(places))]
    held: dict[int, list[Span]] = {rank: [] for rank in places}
    at, k = 0, 0
    for document, start, stop in spans:
        while start < stop:
            while ends[k] <= at:
                k += 1
            taken = min(stop - start, ends[k] - at)
            held[places[k]].append(Span(document, start, start + taken))
            start, at = start + taken, at + taken
    return tuple(
        StageMicroBatch(tuple(Group((rank,), 1, 1, tuple(held[rank])) for rank in block if held[rank]), work.checkpoint)
        for block in ranks
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, rounds in their total order, and one row of actions per pipeline rank (pp_rank).

    Two stages have the same ranks or none in common. A pipeline rank is a tuple of ranks that one or more stages have;
    pipeline ranks are numbered in the order in which the stages name them. The row of one holds the actions of all its
    stages in the order in which its ranks run them. With ranks a and b:

        stages 0-1 on  a b        pp_rank 0 runs stage 0, pp_rank 1 runs stage 1
        stages 0-3 on  a b a b    interleaved: pp_rank 0 runs stages 0 and 2, pp_rank 1 runs 1 and 3
        stages 0-3 on  a b b a    V: pp_rank 0 runs stages 0 and 3, pp_rank 1 runs 1 and 2

    The output of a stage reaches the next one by SEND and RECV, or without any when both are on one pipeline rank.

    Stages 2-3 on  a b  without layers are head stages: the last stage with layers, 1, sends each of them its tokens of
    a round (2F, 2B and 3F, 3B work on these), and takes the gradients of all of them.
    """

    stages: tuple[Stage, ...]
    rounds: tuple[Round, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, pipeline rank by pipeline rank."""
        return tuple(rank for ranks in self.ranks_by_pp_rank for rank in ranks)

    @property
    def ranks_by_pp_rank(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline rank."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    @property
    def layer_ranges(self) -> tuple[LayerRange, ...]:
        """The layers of every stage."""
        return layer_ranges(self.stages)

    def has_pieces(self, documents: Sequence[int]) -> bool:
        """Return whether one of the documents, of these lengths in tokens, is cut into pieces."""
        spans = (span for current in self.rounds for span in current.by_stage[0].spans())
        return any(stop - start < documents[document] for document, start, stop in spans)

    @property
    def chain(self) -> StageChain:
        """Which stage hands its output to which."""
        return StageChain.of(self.stages)

    def ep_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a stage that divide the experts of its layers among them, group by group."""
        ranks, size = self.stages[stage].ranks, self.stages[stage].expert
        return tuple(ranks[k : k + size] for k in range(0, len(ranks), size))

    def tp_groups(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a stage that divide the weights of its layers among them, group by group."""
        ranks, size = self.stages[stage].ranks, self.stages[stage].tensor
        return tuple(ranks[k : k + size] for k in range(0, len(ranks), size))

    def pp_rank_of(self, stage: int) -> int:
        """Return the pipeline rank, and so the row of `actions`, that runs a stage."""
        return self.ranks_by_pp_rank.index(self.stages[stage].ranks)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs."""
        ranks = self.ranks_by_pp_rank[pp_rank]
        return tuple(s for s, stage in enumerate(self.stages) if stage.ranks == ranks)

    @classmethod
    def single(
        cls,
        ranks: Sequence[int],
        layers: int | tuple[int, int],
        rounds: Sequence[Round],
        reduce: Reduce,
        tensor: int = 1,
        expert: int = 1,
    ) -> Pipeline:
        """Build the pipeline of one stage with the trivial table; rounds have one `StageMicroBatch` each.

        `layers` is the model's number of layers, or their range.
        """
        extent = (0, layers) if isinstance(layers, int) else layers
        stage = Stage(tuple(ranks), extent, tensor, expert)
        return cls((stage,), tuple(rounds), (tuple(_single_stage_row(rounds, reduce)),))


def _single_stage_row(rounds: Sequence[Round], reduce: Reduce) -> Iterator[Action]:
    """Yield forward and backward round by round.

    Rounds that hold pieces of one document run forward in order and then backward in reverse: the backward of a piece
    needs the key and value gradients of all later pieces.
    """
    for run in _runs_of_rounds(rounds):
        for number in run:
            yield Action(0, ActionKind.F, number)
        for number in reversed(run):
            yield Action(0, ActionKind.B, number)
            if reduce == Reduce.ROUND:
                yield Action(0, ActionKind.REDUCE, number)
    if reduce == Reduce.STEP:
        yield Action(0, ActionKind.REDUCE)


def _runs_of_rounds(rounds: Sequence[Round]) -> Iterator[range]:
    """Split the rounds into the shortest runs such that no document has pieces in two of them."""
    last: dict[int, int] = {}
    for number, current in enumerate(rounds):
        for span in current.by_stage[0].spans():
            last[span.document] = number
    start, reach = 0, 0
    for number, current in enumerate(rounds):
        reach = max([reach, *(last[span.document] for span in current.by_stage[0].spans())])
        if number >= reach:
            yield range(start, number + 1)
            start = reach = number + 1


FRAME = (ActionKind.UNSHARD, ActionKind.RESHARD)
BACKWARD = (ActionKind.B, ActionKind.I)
COMPUTING = (ActionKind.F, *BACKWARD, ActionKind.W)


class ShardCollective(Enum):
    """The collective that an action runs between shares and copies of a stage's parameters."""

    ALL_GATHER = "all_gather"  # parameters, from the shares
    REDUCE_SCATTER = "reduce_scatter"  # gradients, into the shares


def reshard_after_forward_stages(pipeline: Pipeline) -> frozenset[int]:
    """Return the stages that a pipeline gathers for every pass: those with an UNSHARD of a round."""
    actions = (action for row in pipeline.actions for action in row)
    return frozenset(each.stage for each in actions if each.kind is ActionKind.UNSHARD and each.round is not None)


def with_reshard_after_forward(pipeline: Pipeline, stages: Sequence[int] | None = None) -> Pipeline:
    """Return the pipeline with these stages gathered for every pass; None: all of them."""
    chosen = range(len(pipeline.stages)) if stages is None else stages

    def around(action: Action) -> tuple[Action, ...]:
        if action.stage not in chosen or action.kind not in (*FRAME, *COMPUTING):
            return (action,)
        first, last = (Action(action.stage, kind, action.round) for kind in FRAME)
        return () if action.kind in FRAME else (first, action, last)

    rows = (tuple(each for action in row for each in around(action)) for row in pipeline.actions)
    return replace(pipeline, actions=tuple(rows))


def shard_collectives(row: Sequence[Action], stages: frozenset[int]) -> Iterator[ShardCollective | None]:
    """Yield for every action of a pipeline's row the collective that it runs; `stages` are gathered for every pass."""
    split = any(action.kind is ActionKind.W for action in row)
    pending: set[int] = set()  # stages with gradients that are not in the shares yet
    for action in row:
        move = None
        if action.stage in stages:
            if action.kind is ActionKind.UNSHARD:
                move = ShardCollective.ALL_GATHER
            elif action.kind in BACKWARD:
                pending.add(action.stage)
            else:
                at_end = action.kind is ActionKind.REDUCE and action.round is None
                if (at_end and split) or (action.stage in pending and (at_end or action.kind is ActionKind.RESHARD)):
                    move = ShardCollective.REDUCE_SCATTER
                    pending.discard(action.stage)
        yield move
