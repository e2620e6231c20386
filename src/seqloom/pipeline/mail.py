"""A rank's messages in one step: receives are started early, sends are not waited for.

What a row of actions will receive is known before it starts. So receives are started in the row's order, as far ahead
as there is room for them, and an action that needs one waits only if it has not arrived. A send keeps its tensor until
it is known to be done; nobody waits for it before the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from seqloom.comm import Lane, Message, Transport
from seqloom.pipeline.borders import Share
from seqloom.pipeline.watch import Progress
from seqloom.plan import Action, ActionKind

AHEAD = 2
"""Room for messages that have not been asked for yet: so many of the largest, from every stage that sends any."""
LANES = {
    ActionKind.SEND_F: Lane.FORWARD,
    ActionKind.RECV_F: Lane.FORWARD,
    ActionKind.SEND_B: Lane.BACKWARD,
    ActionKind.RECV_B: Lane.BACKWARD,
}


class Arrival(NamedTuple):
    """What a RECV of the row brings: all rows of a stage's hidden states, or of their gradient, in shares."""

    action: Action
    tokens: int
    shares: tuple[Share, ...]


class _Posted(NamedTuple):
    """A message that is being received: into `tensor`, whose rows belong at `rows` of the whole; None: they are."""

    peer: int
    message: Message
    tensor: torch.Tensor
    rows: torch.Tensor | None


class Mail:
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

    def send(self, action: Action, shares: Sequence[Share]) -> None:
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
