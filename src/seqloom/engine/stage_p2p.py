"""Hidden states and their gradients between pipeline stages: which rows go to which rank, and when.

Two stages may deal a round's tokens to their ranks in different ways. `StageBoundary` computes, per round, which rows a
rank sends to the next stage and receives from the previous one; where both deal alike, every rank has one peer and
sends all of its rows. `StageP2P` runs the messages of one step. The RECVs of a row of actions are known before it
starts, so they are posted in the row's order, as far ahead as the memory budget allows, and an action waits only for
what has not arrived. A sent tensor is freed when the send is known to be done; nobody waits for it before the end of
the step. `Progress` says where a rank is in its row when a message fails or hangs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from seqloom.dist import Message, P2PChannel, P2PDirection, Transport
from seqloom.dist.rows import on_device, rows_of_move, slice_or_index
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, move_between
from seqloom.plan import Action, ActionKind, Pipeline, Remap, StageMicroBatch
from seqloom.schedules.schedule import grid

POSTED_AHEAD = 2
"""Receives posted before they are due: so many of the largest, for every stage that sends any."""
F, B, I = ActionKind.F, ActionKind.B, ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
DIRECTIONS = {
    SEND_F: P2PDirection.FORWARD,
    RECV_F: P2PDirection.FORWARD,
    SEND_B: P2PDirection.BACKWARD,
    RECV_B: P2PDirection.BACKWARD,
}


class RowSlice(NamedTuple):
    """Rows of the hidden states on this rank that it sends to, or receives from, a peer.

    Attributes:
        peer: this rank itself where the next stage is on the same ranks and needs them here.
        rows: a run of them, or an index int64[tokens].
    """

    peer: int
    rows: slice | torch.Tensor
    tokens: int


RowSlices = tuple[RowSlice, ...] | None
"""None: the rows stay where they are, or there is no such stage."""


class StageBoundary:
    """The boundaries between the stages of a pipeline, as one rank sees them."""

    def __init__(self, pipeline: Pipeline, rank: int, device: torch.device) -> None:
        """Look at a pipeline; rows are computed when they are asked for."""
        self._pipeline, self._rank, self._device = pipeline, rank, device
        self._layout = cache(lambda stage, number: hidden_layout(pipeline.rounds[number].by_stage[stage]))
        self._is_unchanged = cache(self._compare)

    def slices(self, stage: int, round_index: int, tokens: int) -> tuple[RowSlices, RowSlices]:
        """Return what comes from the previous stage and goes to the next one; this rank has so many tokens here."""
        last = len(self._pipeline.stages) - 1
        received = self._side(stage - 1, round_index, tokens, sends=False) if stage else None
        sent = self._side(stage, round_index, tokens, sends=True) if stage < last else None
        return received, sent

    def with_local_messages(self, row: Sequence[Action]) -> tuple[Action, ...]:
        """Return a row with the messages between two of its own stages, where tokens change ranks.

        They follow directly the action that produces them, on all ranks of the stage, in one order.
        """
        return tuple(each for action in row for each in (action, *self._local_messages(action)))

    def _local_messages(self, action: Action) -> Iterator[Action]:
        if action.round is None or action.kind not in (F, B, I):
            return
        forward = action.kind == F
        other = action.stage + (1 if forward else -1)
        if not 0 <= other < len(self._pipeline.stages):
            return
        first = min(action.stage, other)
        one, following = self._pipeline.stages[first : first + 2]
        if one.ranks == following.ranks and not self._is_unchanged(first, action.round):
            send, receive = (SEND_F, RECV_F) if forward else (SEND_B, RECV_B)
            yield Action(action.stage, send, action.round)
            yield Action(other, receive, action.round)

    def _side(self, stage: int, round_index: int, tokens: int, *, sends: bool) -> RowSlices:
        """Return this rank's side of the boundary between `stage` and the next one."""
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        if self._is_unchanged(stage, round_index):
            if ranks == others:
                return None
            here, there = (ranks, others) if sends else (others, ranks)
            return all_rows(tokens, there[here.index(self._rank)])
        layouts = self._layout(stage, round_index), self._layout(stage + 1, round_index)
        return row_slices(*layouts, self._rank, sends=sends, device=self._device)

    def _compare(self, stage: int, round_index: int) -> bool:
        """Whether ranks of equal index in a stage and the next one hold the same tokens."""
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        work, other = self._pipeline.rounds[round_index].by_stage[stage : stage + 2]
        return same_groups(work, other, ranks, others) or same_layout(
            self._layout(stage, round_index), self._layout(stage + 1, round_index), ranks, others
        )


def hidden_layout(work: StageMicroBatch) -> Layout:
    """Return who holds which tokens between layers, and so between stages."""
    return work.linear_layout() if work.remap == Remap.ATTENTION else work.attention_layout()


def same_groups(work: StageMicroBatch, other: StageMicroBatch, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two stages' groups differ in their ranks only: the usual case, and quick to see."""
    if any(each.attention is not None or each.linear is not None for each in (work, other)):
        return False
    if len(work.groups) != len(other.groups) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    return all(
        (a.ulysses, a.ring, a.spans) == (b.ulysses, b.ring, b.spans) and tuple(place[r] for r in a.ranks) == b.ranks
        for a, b in zip(work.groups, other.groups, strict=True)
    )


def same_layout(source: Layout, target: Layout, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether ranks of equal index in `ranks` and `others` hold the same tokens before and after."""
    if len(source) != len(target) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    same = all(map(np.array_equal, source.columns()[1:], target.columns()[1:]))
    return same and [place[rank] for rank in source.rank.tolist()] == target.rank.tolist()


def row_slices(
    source: Layout, target: Layout, rank: int, *, sends: bool, device: torch.device | str = "cpu"
) -> tuple[RowSlice, ...]:
    """Return what a rank sends from its rows of the source, or receives for those of the target, by peer."""
    held = source if sends else target
    peers, starts, lengths = rows_of_move(move_between(source, target), held, rank, sends=sends)
    found = []
    for peer in np.unique(peers):
        chosen = peers == peer
        rows = slice_or_index(starts[chosen], lengths[chosen])
        index = rows if isinstance(rows, slice) else on_device(rows, torch.device(device))
        found.append(RowSlice(int(peer), index, int(lengths[chosen].sum())))
    return tuple(found)


def all_rows(tokens: int, peer: int) -> tuple[RowSlice, ...]:
    """Return what a rank exchanges with its peer in a stage that deals tokens alike."""
    return (RowSlice(peer, slice(0, tokens), tokens),) if tokens else ()


def channels_of(rank: int, sent: Sequence[RowSlice], received: Sequence[RowSlice]) -> Iterator[P2PChannel]:
    """Yield the channels of a rank's messages with the next stage and with the previous one."""
    for slices, out, back in (
        (sent, P2PDirection.FORWARD, P2PDirection.BACKWARD),
        (received, P2PDirection.BACKWARD, P2PDirection.FORWARD),
    ):
        for peer in {each.peer for each in slices} - {rank}:
            yield P2PChannel(out, rank, peer)
            yield P2PChannel(back, peer, rank)


class Receive(NamedTuple):
    """A RECV of the row: all rows of a stage's hidden states, or of their gradient, in slices."""

    action: Action
    tokens: int
    slices: tuple[RowSlice, ...]


_Posted = tuple[int, Message, torch.Tensor, torch.Tensor | None]
"""Peer, message, tensor that it is received into, and the rows of the result where these go (None: they are there)."""


class StageP2P:
    """The messages of one rank in one step."""

    def __init__(
        self,
        transport: Transport,
        empty_hidden_states: Callable[[int], torch.Tensor],
        receives: Iterable[Receive],
        progress: Progress,
        *,
        ahead: int = POSTED_AHEAD,
    ) -> None:
        """Start with nothing sent.

        Args:
            empty_hidden_states: allocates the hidden states of so many tokens, see `Parameters.empty_hidden_states`.
            receives: all RECVs of the row, in its order.
        """
        self._transport, self._empty, self._progress = transport, empty_hidden_states, progress
        self._receives = deque(receives)
        sources = {(each.action.stage, each.action.kind) for each in self._receives}
        self._budget = ahead * len(sources) * max((each.tokens for each in self._receives), default=0)
        self._posted_tokens = 0
        self._posted: dict[Action, tuple[Receive, torch.Tensor, list[_Posted]]] = {}
        self._outputs: dict[Action, torch.Tensor] = {}
        self._local: dict[Action, torch.Tensor] = {}
        self._sent: dict[Action, list[tuple[Message, torch.Tensor]]] = {}

    def put(self, action: Action, tensor: torch.Tensor) -> None:
        """Store what a SEND will send, or what a RECV that needs no message will return."""
        self._outputs[action] = tensor

    def poll(self) -> None:
        """Post receives as far as the budget allows, and free what has been sent. Called between actions."""
        while self._receives and self._posted_tokens + self._receives[0].tokens <= self._budget:
            self._post(self._receives.popleft())
        for action, messages in [*self._sent.items()][:1]:  # the oldest: others are rarely done before it
            if all(message.done() for message, _ in messages):
                self._free_sent(action)

    def send(self, action: Action, slices: Sequence[RowSlice]) -> None:
        """Run a SEND of the row: start to send what was put there."""
        output, direction = self._outputs.pop(action), DIRECTIONS[action.kind]
        for peer, rows, _ in slices:
            part = output[rows].contiguous()
            if peer == self._transport.rank:
                self._local[action] = part
            else:
                with self._progress.waiting(action, None):  # a rank that is gone may be noticed here
                    message = self._transport.send(part, peer, direction)
                self._sent.setdefault(action, []).append((message, part))

    def receive(self, action: Action) -> None:
        """Run a RECV of the row: post it, if that was not done before."""
        while self._receives and action not in self._posted:
            self._post(self._receives.popleft())

    def wait(self, action: Action) -> torch.Tensor:
        """Return what a RECV has received, or what was put there instead, [tokens, hidden].

        Where there is neither, the previous stage had no tokens for this rank.
        """
        if action not in self._posted:
            found = self._outputs.pop(action, None)
            return self._empty(0) if found is None else found
        receive, result, posted = self._posted.pop(action)
        for peer, message, tensor, rows in posted:
            with self._progress.waiting(action, peer):
                message.wait()
            if rows is not None:
                result[rows] = tensor
        for peer, rows, _ in receive.slices:  # rows that were here already, between two stages of the same ranks
            if peer == self._transport.rank:
                result[rows] = self._local.pop(send_of(action))
        self._posted_tokens -= receive.tokens
        if action.kind == RECV_B:  # it answers the SEND_F, which has arrived then, whether the transport knows or not
            self._free_sent(Action(action.stage, SEND_F, action.round))
        return result

    def close(self) -> None:
        """Wait for all sends. All receives have been waited for."""
        while self._sent:
            self._free_sent(next(iter(self._sent)))

    def _post(self, receive: Receive) -> None:
        result, direction, posted = self._empty(receive.tokens), DIRECTIONS[receive.action.kind], []
        for peer, rows, tokens in receive.slices:
            if peer == self._transport.rank:
                continue
            scattered = isinstance(rows, torch.Tensor)
            tensor = self._empty(tokens) if scattered else result[rows]
            with self._progress.waiting(receive.action, peer):
                message = self._transport.receive(tensor, peer, direction)
            posted.append((peer, message, tensor, rows if scattered else None))
        self._posted_tokens += receive.tokens
        self._posted[receive.action] = (receive, result, posted)

    def _free_sent(self, action: Action) -> None:
        """Wait for what a SEND has sent, and free it."""
        for message, _ in self._sent.pop(action, ()):
            with self._progress.waiting(action, None):
                message.wait()


def send_of(receive: Action) -> Action:
    """Return the SEND of a RECV."""
    forward = receive.kind == RECV_F
    stage, kind = (receive.stage - 1, SEND_F) if forward else (receive.stage + 1, SEND_B)
    return Action(stage, kind, receive.round)


class Progress:
    """Where one rank is in its row of actions. Another thread may ask at any time."""

    def __init__(self, pipeline: Pipeline | None, rank: int, name: str = "") -> None:
        """Start before the first action; a rank may be in no pipeline, or in one of several, which has a name."""
        self._rows, self._rank, self._name = () if pipeline is None else pipeline.actions, rank, name
        by_pp_rank = () if pipeline is None else pipeline.ranks_by_pp_rank
        self._pp_rank = next((index for index, ranks in enumerate(by_pp_rank) if rank in ranks), None)
        self._action: Action | None = None
        self._awaited: tuple[Action, int | None] | None = None

    def start(self, action: Action | None) -> None:
        """Note the action that starts now; None: the row is done."""
        self._action = action

    @contextmanager
    def waiting(self, action: Action, peer: int | None) -> Iterator[None]:
        """Note that a message from `peer`, or of this rank (None), is waited for; an error gets the report."""
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

    def describe(self) -> str:
        """Say in one line what this rank is at."""
        words = f"rank {self._rank} is at {'the end of its row' if self._action is None else f'action {self._action}'}"
        words += f" of {self._name}" if self._name else ""
        if self._awaited is None:
            return words
        action, peer = self._awaited
        return f"{words} and waits for {action}{'' if peer is None else f' from rank {peer}'}"

    def report(self, reason: str = "") -> str:
        """Say what this rank is at, and the reason if known, and draw the rows of all pp ranks around that action."""
        if not self._rows:
            return f"{self.describe()}{reason}"
        mark = None
        if self._pp_rank is not None:
            mark = self._pp_rank, _index_in(self._rows[self._pp_rank], self._action)
        return f"{self.describe()}{reason}:\n{grid(self._rows, mark=mark)}"


def _index_in(row: Sequence[Action], action: Action | None) -> int:
    """Return the index of an action in a row; of a local message, which is not in it, that of what produces it."""
    if action is None:
        return len(row) - 1
    if action in row:
        return row.index(action)
    send = send_of(action) if action.kind in (RECV_F, RECV_B) else action
    producers = [Action(send.stage, kind, send.round) for kind in ((F,) if send.kind == SEND_F else (B, I))]
    return next(index for index, each in enumerate(row) if each in producers)
