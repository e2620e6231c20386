"""Between two stages: which rows of a rank's hidden states go to, or come from, which rank.

Two stages may deal a round's tokens to their ranks in different ways. What one holds and the next needs is a move
like any other. Where both deal alike, every rank has one partner and all of its rows.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from seqloom.dist import Message, P2PChannel, P2PDirection, Transport
from seqloom.dist.rows import first_rows, on_device, slice_or_index
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, move_between
from seqloom.plan import Action, ActionKind, Pipeline, Remap, StageMicroBatch
from seqloom.schedules.schedule import grid


class RowSlice(NamedTuple):
    """Rows of the hidden states on this rank that another one sends, or is sent.

    Attributes:
        peer: the other rank; this one itself where a host's next stage finds them here.
        rows: a run of them, or an index int64[tokens].
        tokens: how many.
    """

    peer: int
    rows: slice | torch.Tensor
    tokens: int


def states_layout(work: StageMicroBatch) -> Layout:
    """Return who holds which tokens between layers, and so between stages."""
    return work.linear_layout() if work.remap == Remap.ATTENTION else work.attention_layout()


def same_groups(work: StageMicroBatch, other: StageMicroBatch, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two stages' groups are the same but for the ranks, which is often so and quick to see."""
    if any(each.attention is not None or each.linear is not None for each in (work, other)):
        return False
    if len(work.groups) != len(other.groups) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    return all(
        (a.ulysses, a.ring, a.spans) == (b.ulysses, b.ring, b.spans) and tuple(place[r] for r in a.ranks) == b.ranks
        for a, b in zip(work.groups, other.groups, strict=True)
    )


def alike(source: Layout, target: Layout, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether ranks of equal place in `ranks` and `others` hold the same tokens before and after."""
    if len(source) != len(target) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    same = all(map(np.array_equal, source.columns()[1:], target.columns()[1:]))
    return same and [place[rank] for rank in source.rank.tolist()] == target.rank.tolist()


def border(
    source: Layout, target: Layout, rank: int, *, sends: bool, device: torch.device | str = "cpu"
) -> tuple[RowSlice, ...]:
    """Return what a rank sends or receives when tokens go from one layout to the other, by peer.

    Args:
        source, target: of the stage before and of the one after.
        rank: the one asked for.
        sends: what it sends from its rows of the source; else what it receives for its rows of the target.
        device: where the rows are.
    """
    move, held = move_between(source, target), source if sends else target
    own, peer = (move.sender, move.receiver) if sends else (move.receiver, move.sender)
    mine, spans = own == rank, np.stack(held.columns()[1:])[:, held.rank == rank]
    boxes, peers = np.stack((move.item, move.start, move.stop))[:, mine], peer[mine]
    starts, lengths = first_rows(spans, boxes), boxes[2] - boxes[1]
    shares = []
    for other in np.unique(peers):
        chosen = peers == other
        rows = slice_or_index(starts[chosen], lengths[chosen])
        index = rows if isinstance(rows, slice) else on_device(rows, torch.device(device))
        shares.append(RowSlice(int(other), index, int(lengths[chosen].sum())))
    return tuple(shares)


def whole(tokens: int, peer: int) -> tuple[RowSlice, ...]:
    """Return what a rank exchanges with its partner in a stage that deals tokens alike."""
    return (RowSlice(peer, slice(0, tokens), tokens),) if tokens else ()


def ways_of(rank: int, ahead: Sequence[RowSlice], behind: Sequence[RowSlice]) -> Iterator[P2PChannel]:
    """Yield the ways of a rank's messages with the stage after it and the stage before it."""
    for shares, out, back in (
        (ahead, P2PDirection.FORWARD, P2PDirection.BACKWARD),
        (behind, P2PDirection.BACKWARD, P2PDirection.FORWARD),
    ):
        for peer in {share.peer for share in shares} - {rank}:
            yield P2PChannel(out, rank, peer)
            yield P2PChannel(back, peer, rank)


# ---- merged: pipeline.handovers
# What one rank hands over from stage to stage, round by round: with whom it exchanges which rows.


Shares = tuple[RowSlice, ...] | None


class StageBoundary:
    """The borders between the stages of a pipeline, as one rank sees them."""

    def __init__(self, pipeline: Pipeline, rank: int, device: torch.device) -> None:
        """Look at a pipeline; rows are worked out when they are asked for."""
        self._pipeline, self._rank, self._device = pipeline, rank, device
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._alike: dict[tuple[int, int], bool] = {}

    def of(self, stage: int, number: int, tokens: int) -> tuple[Shares, Shares]:
        """Return what comes from the stage before and what goes to the stage after in a round; None: nothing moves.

        Args:
            stage: one of this rank.
            number: of the round.
            tokens: of this rank on the stage.
        """
        behind = self._side(stage - 1, number, tokens, sends=False) if stage else None
        ahead = self._side(stage, number, tokens, sends=True) if stage + 1 < len(self._pipeline.stages) else None
        return behind, ahead

    def with_own(self, row: Sequence[Action]) -> tuple[Action, ...]:
        """Return a host's row with the messages among its ranks: between its own stages, where tokens change places.

        They follow directly what makes them, on all ranks of the host, so they are sent and received in one order.
        """
        return tuple(each for action in row for each in (action, *self._own(action)))

    def _own(self, action: Action) -> Iterator[Action]:
        if action.round is None or action.kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
            return
        forward = action.kind == ActionKind.F
        other = action.stage + (1 if forward else -1)
        first = min(action.stage, other)
        if 0 <= other < len(self._pipeline.stages) and self._moves_inside(first, action.round):
            kinds = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
            yield Action(action.stage, kinds[0], action.round)
            yield Action(other, kinds[1], action.round)

    def _moves_inside(self, stage: int, number: int) -> bool:
        """Whether tokens change ranks between a stage and the next one, both on one host."""
        one, other = self._pipeline.stages[stage : stage + 2]
        return one.ranks == other.ranks and not self._same(stage, number)

    def _side(self, stage: int, number: int, tokens: int, *, sends: bool) -> Shares:
        """Return this rank's side of the border between `stage` and the next one."""
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        if self._same(stage, number):
            if ranks == others:
                return None
            here, there = (ranks, others) if sends else (others, ranks)
            return whole(tokens, there[here.index(self._rank)])
        source, target = self._layout(stage, number), self._layout(stage + 1, number)
        return border(source, target, self._rank, sends=sends, device=self._device)

    def _same(self, stage: int, number: int) -> bool:
        key = (stage, number)
        if key not in self._alike:
            ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
            work, other = self._pipeline.rounds[number].by_stage[stage : stage + 2]
            self._alike[key] = same_groups(work, other, ranks, others) or alike(
                self._layout(stage, number), self._layout(stage + 1, number), ranks, others
            )
        return self._alike[key]

    def _layout(self, stage: int, number: int) -> Layout:
        key = (stage, number)
        if key not in self._layouts:
            self._layouts[key] = states_layout(self._pipeline.rounds[number].by_stage[stage])
        return self._layouts[key]


# ---- merged: pipeline.watch
# Where a rank is in its row of actions: kept while a step runs, told when it hangs.


MAKES = {
    True: (ActionKind.F,),
    False: (ActionKind.B, ActionKind.I),
}
"""What makes a message, whether it goes forward."""


class Progress:
    """What one rank is at. Another thread may ask at any time."""

    def __init__(self, pipeline: Pipeline | None, rank: int, name: str = "") -> None:
        """Start before the first action.

        Args:
            pipeline: the one that the rank is in; None: it is in none.
            rank: this one.
            name: of the pipeline, where others run beside it.
        """
        self._rows, self._rank, self._name = () if pipeline is None else pipeline.actions, rank, name
        hosts = () if pipeline is None else pipeline.ranks_by_pp_rank
        self._host = next((h for h, ranks in enumerate(hosts) if rank in ranks), None)
        self._action: Action | None = None
        self._awaited: tuple[Action, int | None] | None = None

    def at(self, action: Action | None) -> None:
        """Note the action that comes now; None: the row is done."""
        self._action = action

    @contextmanager
    def waiting(self, action: Action, peer: int | None) -> Iterator[None]:
        """Note that a message is waited for; an error says so, with the grid.

        Args:
            action: the SEND or RECV of the message.
            peer: where it comes from; None: it was sent, to whoever.
        """
        self._awaited = (action, peer)
        try:
            yield
        except SeqloomError as error:
            error.add_note(self.report())
            raise
        except RuntimeError as error:  # what transports raise for a rank that is gone or late
            line = re.sub(r"^\[\S+:\d+\] ", "", next(iter(str(error).strip().splitlines()), type(error).__name__))
            raise SeqloomError(self.report(f" ({line})")) from error
        self._awaited = None

    def place(self) -> str:
        """Say in one line what this rank is at."""
        words = f"rank {self._rank} is at {'the end of its row' if self._action is None else f'action {self._action}'}"
        words += f" of {self._name}" if self._name else ""
        if self._awaited is None:
            return words
        action, peer = self._awaited
        return f"{words} and waits for {action}{'' if peer is None else f' from rank {peer}'}"

    def report(self, why: str = "") -> str:
        """Say what this rank is at, and why if that is known, and draw the rows of all hosts around that action."""
        if not self._rows:
            return f"{self.place()}{why}"
        mark = None if self._host is None else (self._host, _place_in(self._rows[self._host], self._action))
        return f"{self.place()}{why}:\n{grid(self._rows, mark=mark)}"


def _place_in(row: Sequence[Action], action: Action | None) -> int:
    """Return the place of an action in a row; messages among a host's own ranks are not in it, but what makes them."""
    if action is None:
        return len(row) - 1
    if action in row:
        return row.index(action)
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    stage = action.stage - (action.kind == ActionKind.RECV_F) + (action.kind == ActionKind.RECV_B)
    makers = [Action(stage, kind, action.round) for kind in MAKES[forward]]
    return next(k for k, each in enumerate(row) if each in makers)


# ---- merged: pipeline.mail
# A rank's messages in one step: receives are started early, sends are not waited for.
#
# What a row of actions will receive is known before it starts. So receives are started in the row's order, as far
# ahead
# as there is room for them, and an action that needs one waits only if it has not arrived. A send keeps its tensor
# until
# it is known to be done; nobody waits for it before the end of the step.


AHEAD = 2
"""Room for messages that have not been asked for yet: so many of the largest, from every stage that sends any."""
LANES = {
    ActionKind.SEND_F: P2PDirection.FORWARD,
    ActionKind.RECV_F: P2PDirection.FORWARD,
    ActionKind.SEND_B: P2PDirection.BACKWARD,
    ActionKind.RECV_B: P2PDirection.BACKWARD,
}


class Arrival(NamedTuple):
    """What a RECV of the row brings: all rows of a stage's hidden states, or of their gradient, in shares."""

    action: Action
    tokens: int
    shares: tuple[RowSlice, ...]


class _Posted(NamedTuple):
    """A message that is being received: into `tensor`, whose rows belong at `rows` of the whole; None: they are."""

    peer: int
    message: Message
    tensor: torch.Tensor
    rows: torch.Tensor | None


class StageP2P:
    """The messages of one rank in one step."""

    def __init__(
        self,
        transport: Transport,
        room: Callable[[int], torch.Tensor],
        arrivals: Iterable[Arrival],
        progress: Progress,
        *,
        ahead: int = AHEAD,
    ) -> None:
        """Start with nothing sent.

        Args:
            transport: this rank's; its ways are connected.
            room: memory for the hidden states of so many tokens, see `Parameters.room`.
            arrivals: all RECVs of the row, in its order.
            progress: told what is waited for.
            ahead: see `AHEAD`.
        """
        self._transport, self._room, self._progress = transport, room, progress
        self._coming = deque(arrivals)
        sources = {(each.action.stage, each.action.kind) for each in self._coming}
        self._budget = ahead * len(sources) * max((each.tokens for each in self._coming), default=0)
        self._held = 0
        self._posted: dict[Action, tuple[Arrival, torch.Tensor, list[_Posted]]] = {}
        self._here: dict[Action, torch.Tensor] = {}
        self._local: dict[Action, torch.Tensor] = {}
        self._sent: dict[Action, list[tuple[Message, torch.Tensor]]] = {}

    def put(self, action: Action, tensor: torch.Tensor) -> None:
        """Keep what a SEND will send, or what a RECV that needs no message will find."""
        self._here[action] = tensor

    def look_after(self) -> None:
        """Start receives as far as there is room, and let go of what has been sent. Called between actions."""
        while self._coming and self._held + self._coming[0].tokens <= self._budget:
            self._post(self._coming.popleft())
        for action, messages in [*self._sent.items()][:1]:  # the oldest: others are rarely done before it
            if all(message.done() for message, _ in messages):
                self._let_go(action)

    def send(self, action: Action, shares: Sequence[RowSlice]) -> None:
        """Run a SEND of the row: start to send what was put there."""
        whole, lane = self._here.pop(action), LANES[action.kind]
        for peer, rows, _ in shares:
            part = whole[rows].contiguous()
            if peer == self._transport.rank:
                self._local[action] = part
            else:
                with self._progress.waiting(action, None):  # a rank that is gone may be noticed here
                    message = self._transport.send(part, peer, lane)
                self._sent.setdefault(action, []).append((message, part))

    def receive(self, action: Action) -> None:
        """Run a RECV of the row: start it, if that was not done before."""
        while self._coming and action not in self._posted:
            self._post(self._coming.popleft())

    def take(self, action: Action) -> torch.Tensor:
        """Return what a RECV has brought, or what was put there instead, [tokens, hidden]; waits for it.

        Where there is neither, the stage before had nothing to do here, and there are no tokens.
        """
        if action not in self._posted:
            found = self._here.pop(action, None)
            return self._room(0) if found is None else found
        arrival, whole, posted = self._posted.pop(action)
        for peer, message, tensor, rows in posted:
            with self._progress.waiting(action, peer):
                message.wait()
            if rows is not None:
                whole[rows] = tensor
        self._take_own(arrival, whole)
        self._held -= arrival.tokens
        if action.kind == ActionKind.RECV_B:  # an answer: what it answers to has arrived, if a transport knows or not
            self._let_go(Action(action.stage, ActionKind.SEND_F, action.round))
        return whole

    def close(self) -> None:
        """Wait for all that was sent. What was received has been taken."""
        while self._sent:
            self._let_go(next(iter(self._sent)))

    def _post(self, arrival: Arrival) -> None:
        whole, lane, posted = self._room(arrival.tokens), LANES[arrival.action.kind], []
        for peer, rows, tokens in arrival.shares:
            if peer == self._transport.rank:
                continue
            scattered = isinstance(rows, torch.Tensor)
            tensor = self._room(tokens) if scattered else whole[rows]
            with self._progress.waiting(arrival.action, peer):
                message = self._transport.receive(tensor, peer, lane)
            posted.append(_Posted(peer, message, tensor, rows if scattered else None))
        self._held += arrival.tokens
        self._posted[arrival.action] = (arrival, whole, posted)

    def _take_own(self, arrival: Arrival, whole: torch.Tensor) -> None:
        """Copy the rows that this rank had already, between two stages of one host."""
        for peer, rows, _ in arrival.shares:
            if peer == self._transport.rank:
                whole[rows] = self._local.pop(other_end(arrival.action))

    def _let_go(self, action: Action) -> None:
        """Wait for what a SEND has sent, and free it."""
        for message, _ in self._sent.pop(action, ()):
            with self._progress.waiting(action, None):
                message.wait()


def other_end(receive: Action) -> Action:
    """Return the SEND of a RECV."""
    forward = receive.kind == ActionKind.RECV_F
    stage, kind = (receive.stage - 1, ActionKind.SEND_F) if forward else (receive.stage + 1, ActionKind.SEND_B)
    return Action(stage, kind, receive.round)
