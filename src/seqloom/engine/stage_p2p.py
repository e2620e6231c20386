"""Hidden states and their gradients between pipeline stages: which rows go to which rank, and when.

Two stages may deal a round's tokens to their ranks in different ways. `StageBoundary` computes, per round, which rows a
rank sends to the next stage and receives from the previous one; where both deal alike, every rank has one peer and
sends all of its rows. `place_messages` decides when both sides of a message are started, `StageP2P` runs the messages
of one step. A sent tensor is freed when the send is known to be done; nobody waits for it before the end of the step.
`Progress` says where a rank is in its row when a message fails or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from seqloom.compat import lost_rank_reason
from seqloom.dist import Channel, P2PTensor, Transport
from seqloom.dist.rows import on_device, rows_of_move, slice_or_index
from seqloom.dist.streams import stream_of
from seqloom.dist.transport import Exchange, exchange_nonempty
from seqloom.errors import LostRankError, SeqloomError
from seqloom.layout import Layout, move_between
from seqloom.plan import Action, ActionKind, Pipeline, Remap, StageMicroBatch
from seqloom.schedules.schedule import grid

UNREAD = 2
"""Messages of one stage that may lie unread at the next one, or at the previous one."""
F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the field's name for the input half
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
MESSAGES = (SEND_F, RECV_F, SEND_B, RECV_B)


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
        self._pipeline, self._rank, self._device, self._chain = pipeline, rank, device, pipeline.chain
        self._layout = cache(lambda stage, number: hidden_layout(pipeline.rounds[number].by_stage[stage]))
        self._head_layout = cache(lambda number: dealt_layout(pipeline.rounds[number].by_stage[self._chain.last + 1 :]))
        self._is_unchanged = cache(self._compare)

    def slices(self, stage: int, round_index: int, tokens: int) -> tuple[RowSlices, RowSlices]:
        """Return what comes from the previous stage and goes to the next one; this rank has so many tokens here."""
        before, after = self._chain.previous(stage), self._chain.following(stage)
        received = self._side(before, round_index, tokens, sends=False) if stage else None
        sent = self._side(stage, round_index, tokens, sends=True) if after else None
        return received, sent

    def has_message(self, stage: int, round_index: int) -> bool:
        """Whether rows of a round change ranks between `stage` and the next one, or go to head stages."""
        if self._is_dealt(stage):
            return True
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        return ranks != others or not self._is_unchanged(stage, round_index)

    def _side(self, stage: int, round_index: int, tokens: int, *, sends: bool) -> RowSlices:
        """Return this rank's side of the boundary between `stage` and the next one, or all head stages."""
        if self._is_dealt(stage):
            layouts = self._layout(stage, round_index), self._head_layout(round_index)
            return row_slices(*layouts, self._rank, sends=sends, device=self._device)
        ranks, others = (each.ranks for each in self._pipeline.stages[stage : stage + 2])
        if self._is_unchanged(stage, round_index):
            if ranks == others:
                return None
            here, there = (ranks, others) if sends else (others, ranks)
            return all_rows(tokens, there[here.index(self._rank)])
        layouts = self._layout(stage, round_index), self._layout(stage + 1, round_index)
        return row_slices(*layouts, self._rank, sends=sends, device=self._device)

    def _is_dealt(self, stage: int) -> bool:
        """Whether head stages take the output of a stage."""
        return self._chain.heads > 0 and stage == self._chain.last

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


def dealt_layout(works: Sequence[StageMicroBatch]) -> Layout:
    """Return who holds which tokens of a round in head stages."""
    columns = [work.attention_layout().columns()[:4] for work in works]
    return Layout(*(np.concatenate(each) for each in zip(*columns, strict=True)))


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


# ---- When messages start


def place_messages(
    pipeline: Pipeline, rows: Sequence[Sequence[Action]], boundary: StageBoundary, *, reduce_last: bool = False
) -> list[list[Action]]:
    """Return the rows with all messages where the step ends even if every call blocks until its other side is called.

    The rows' own messages are dropped. The rows are timed, and both sides of a message are started at the moment in
    which its tensor is there: after the actions that have begun by then, and before those that have not. So all calls
    of all ranks are in one order in time, and a call that blocks only waits for calls before it. Later than that are
    messages of which `UNREAD` before them have not been used. The times only need to be plausible: on a GPU the host
    is ahead of them.

    Between two stages of the same ranks the RECV follows the SEND, and a rank that has both starts them together.

    Args:
        reduce_last: put the reductions of the step behind all messages: under free sharding gradients go to ranks of
            other stages, which would wait for those of this rank.
    """
    if len(pipeline.stages) == 1:
        return [list(row) for row in rows]
    pp_ranks = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]
    computing = [[action for action in row if action.kind not in MESSAGES] for row in rows]
    start, computed = _time_rows(pipeline, computing, pp_ranks)
    placed: list[list[tuple[int, int, int, Action]]] = []
    for times, row in zip(start, computing, strict=True):
        placed.append([(time, 1, index, action) for index, (time, action) in enumerate(zip(times, row, strict=True))])
    for number, (time, sends, receives) in enumerate(_messages(pipeline, computed, boundary)):
        for after, actions in enumerate((sends, receives)):
            for action in actions:
                placed[pp_ranks[action.stage]].append((time, 0, 2 * number + after, action))
    sorted_rows = [[action for *_, action in sorted(each, key=lambda entry: entry[:3])] for each in placed]
    return [_ends_last(row) for row in sorted_rows] if reduce_last else sorted_rows


class _Time(NamedTuple):
    """When a forward or a backward starts and stops."""

    start: int
    stop: int


_Computed = dict[tuple[int, bool, int | None], _Time]
"""Those of (stage, forward or backward, round)."""


def _time_rows(
    pipeline: Pipeline, rows: Sequence[Sequence[Action]], pp_ranks: Sequence[int]
) -> tuple[list[list[int]], _Computed]:
    """Return when every action of the rows starts, and when forwards and backwards do and stop."""
    chain = pipeline.chain
    tokens = cache(lambda stage, number: max_rank_tokens(pipeline.rounds[number].by_stage[stage]))
    layers = [each.stop - each.first for each in pipeline.layer_ranges]
    start: list[list[int]] = [[] for _ in rows]
    now, computed = [0] * len(rows), _Computed()
    moved = True
    while moved:
        moved = False
        for row, actions in enumerate(rows):
            for action in actions[len(start[row]) :]:
                stage, forward = action.stage, action.kind == F
                if action.kind in (F, B, I):
                    previous = (chain.previous(stage),) * (stage > 0) if forward else chain.following(stage)
                    if any((each, forward, action.round) not in computed for each in previous):
                        break
                    now[row] = max([now[row], *(computed[each, forward, action.round].stop for each in previous)])
                start[row].append(now[row])
                moved = True
                if action.kind in (F, B, I, W):
                    unit = 1 + (layers[stage] + 1) * tokens(stage, action.round)
                    now[row] += 2 * unit if action.kind == B else unit
                if action.kind in (F, B, I):
                    computed[stage, forward, action.round] = _Time(start[row][-1], now[row])
    return start, computed


def max_rank_tokens(work: StageMicroBatch) -> int:
    """Return about how many tokens the fullest rank has in a round."""
    return max((group.tokens // len(group.ranks) for group in work.groups), default=0)


def _messages(
    pipeline: Pipeline, computed: _Computed, boundary: StageBoundary
) -> list[tuple[int, list[Action], list[Action]]]:
    """Return the time of every message, its SEND and its RECV, in the order of their times.

    What goes to head stages, or comes from them, is one message: of one SEND or of one RECV.
    """
    found = []
    for early in range(pipeline.chain.last + 1):
        lates = pipeline.chain.following(early)
        waits = any(pipeline.stages[late].ranks != pipeline.stages[early].ranks for late in lates)
        for forward in (True, False) if lates else ():
            senders, receivers = ((early,), lates) if forward else (lates, (early,))
            send, receive = (SEND_F, RECV_F) if forward else (SEND_B, RECV_B)
            wanted: list[tuple[int, int, int, int]] = []
            for number in range(len(pipeline.rounds)):
                if any((s, forward, number) not in computed for s in (*senders, *receivers)):
                    continue
                if boundary.has_message(early, number):
                    made, used = ([computed[s, forward, number] for s in side] for side in (senders, receivers))
                    first = min(each.start for each in used)
                    wanted.append((max(each.stop for each in used), max(each.stop for each in made), first, number))
            wanted.sort()
            for index, (_, time, first, number) in enumerate(wanted):
                if index >= UNREAD and waits:  # but before the first of several receivers, which may be well ahead
                    time = min(max(time, wanted[index - UNREAD][0]), first)
                sends = [Action(s, send, number) for s in senders]
                receives = [Action(s, receive, number) for s in receivers]
                found.append((time, sends, receives))
    return sorted(found, key=lambda each: (each[0], each[1][0].stage, each[1][0].kind, each[1][0].round))


def _ends_last(row: list[Action]) -> list[Action]:
    """Move what is done once per step behind all else."""
    ends = [action for action in row if action.round is None and action.kind in (ActionKind.REDUCE, ActionKind.RESHARD)]
    return [action for action in row if action not in ends] + ends


class _Output(NamedTuple):
    """What a stage has computed, and when it is there in the order of the layers' stream; None on a CPU."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None


class _Sent(NamedTuple):
    """A started SEND, and what has to live until it is done."""

    exchange: Exchange
    tensors: list[P2PTensor]
    output: torch.Tensor


class _Received(NamedTuple):
    """A started RECV.

    Attributes:
        result: where rows go, or where `scattered` are put: (rows of the result, tensor of a peer).
    """

    exchange: Exchange
    result: torch.Tensor
    scattered: list[tuple[torch.Tensor, torch.Tensor]]
    peers: list[int]


class StageP2P:
    """The messages of one rank in one step.

    On a GPU they run beside the layers: a message starts behind the output that it sends, or at once where it only
    receives, on a stream of its channel. Behind the layers' own stream, where torch would put it, a receive would start
    after the microbatch that runs now, and the next one would wait for it.
    """

    def __init__(
        self,
        transport: Transport,
        empty_hidden_states: Callable[[int], torch.Tensor],
        pipeline: Pipeline | None,
        row: Sequence[Action],
        progress: Progress,
        device: torch.device,
    ) -> None:
        """Start with nothing sent.

        Args:
            empty_hidden_states: allocates the hidden states of so many tokens, see `Parameters.empty_hidden_states`.
            pipeline: of this rank; None: it is in none.
            row: the actions of this rank.
            device: of the hidden states.
        """
        self._empty, self._progress, self._device = empty_hidden_states, progress, device
        self._pp_ranks = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))] if pipeline else []
        self._pipeline = pipeline
        self._leave_with_receive = {self._send_of(each) for each in row if each.kind in (RECV_F, RECV_B)} & {*row}
        self._on = cache(transport.on)
        self._outputs: dict[Action, _Output] = {}
        self._received: dict[Action, _Received] = {}
        self._leaving: dict[Action, tuple[list[P2PTensor], torch.Tensor]] = {}
        self._sent: dict[Action, _Sent] = {}

    def put(self, action: Action, tensor: torch.Tensor) -> None:
        """Store what a SEND will send, or what a RECV that needs no message will return."""
        self._outputs[action] = _Output(tensor, self._now())

    def poll(self) -> None:
        """Free what has been sent. Called between actions."""
        for action, sent in [*self._sent.items()][:1]:  # the oldest: others are rarely done before it
            if sent.exchange.done():
                self._free_sent(action)

    def send(self, action: Action, slices: Sequence[RowSlice]) -> None:
        """Run a SEND of the row: start to send what was put there, or have the RECV that follows start it."""
        output, ready = self._outputs.pop(action)
        with self._on_stream_of(action, behind=ready):
            sends = [P2PTensor(peer, output[rows].contiguous()) for peer, rows, _ in slices]
            if action in self._leave_with_receive:
                self._leaving[action] = sends, output
            elif sends:
                self._sent[action] = _Sent(self._start(action, action, sends, []), sends, output)

    def receive(self, action: Action, tokens: int, slices: Sequence[RowSlice]) -> None:
        """Run a RECV of the row: start to receive."""
        send = self._send_of(action)
        sends, output = self._leaving.pop(send, ([], None))
        with self._on_stream_of(send):
            result, receives, scattered = self._empty(tokens), [], []
            for peer, rows, count in slices:
                in_order = isinstance(rows, slice)
                receives.append(P2PTensor(peer, result[rows] if in_order else self._empty(count)))
                scattered += [] if in_order else [(rows, receives[-1].tensor)]
            exchange = self._start(action, send, sends, receives)
            peers = [each.peer for each in receives]
            self._received[action] = _Received(exchange, result, scattered, peers)
        if output is not None:
            self._sent[send] = _Sent(exchange, sends, output)

    def wait(self, action: Action) -> torch.Tensor:
        """Return what a RECV has received, or what was put there instead, [tokens, hidden].

        Where there is neither, the previous stage had no tokens for this rank.
        """
        if action not in self._received:
            found = self._outputs.pop(action, None)
            return self._empty(0) if found is None else found.tensor
        exchange, result, scattered, peers = self._received.pop(action)
        with self._progress.waiting(action, peers):
            exchange.wait()
        _use_in_current_stream([result, *(tensor for _, tensor in scattered)])
        for rows, tensor in scattered:
            result[rows] = tensor
        if action.kind == RECV_B:  # it answers the SEND_F, which has arrived then, whether the transport knows or not
            self._free_sent(Action(action.stage, SEND_F, action.round))
        return result

    def close(self) -> None:
        """Wait for all sends. All receives have been waited for."""
        while self._sent:
            self._free_sent(next(iter(self._sent)))

    def _send_of(self, receive: Action) -> Action:
        assert self._pipeline is not None  # there is a row
        return send_of(receive, self._pipeline)

    def _channel(self, send: Action) -> Channel:
        """Return the channel of a message; those of head stages, which go to one pipeline rank, share one."""
        stage = send.stage if self._pipeline is None else min(send.stage, self._pipeline.chain.last)
        return Channel.of_message(self._pp_ranks[stage], forward=send.kind == SEND_F)

    def _start(self, action: Action, send: Action, sends: list[P2PTensor], receives: list[P2PTensor]) -> Exchange:
        peers = [each.peer for each in (*sends, *receives)]
        with self._progress.waiting(action, peers):  # a rank that is gone may be noticed here
            return exchange_nonempty(self._on(self._channel(send)), sends, receives)

    def _free_sent(self, action: Action) -> None:
        """Wait for what a SEND has sent, and free it."""
        if action in self._sent:
            exchange, sends, _ = self._sent.pop(action)
            with self._progress.waiting(action, [each.peer for each in sends]):
                exchange.wait()
            _use_in_current_stream([each.tensor for each in sends])

    def _now(self) -> torch.cuda.Event | None:
        """Return a point in the order of the current stream; None on a CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def _on_stream_of(self, send: Action, *, behind: torch.cuda.Event | None = None) -> Iterator[None]:
        """Make the stream of a message's channel the current one."""
        stream = stream_of(self._device, self._channel(send).name)
        if stream is None:
            yield
            return
        if behind is not None:
            stream.wait_event(behind)
        with torch.cuda.stream(stream):
            yield


def _use_in_current_stream(tensors: Sequence[torch.Tensor]) -> None:
    """Let the allocator know that tensors of another stream are used in the current one, until what it has now ends."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def send_of(receive: Action, pipeline: Pipeline) -> Action:
    """Return the SEND of a RECV: of several head stages' that of the same ranks."""
    chain, number = pipeline.chain, receive.round
    if receive.kind == RECV_F:
        return Action(chain.previous(receive.stage), SEND_F, number)
    senders, ranks = chain.following(receive.stage), pipeline.stages[receive.stage].ranks
    own = [stage for stage in senders if pipeline.stages[stage].ranks == ranks]
    return Action((own or senders)[0], SEND_B, number)


class Progress:
    """Where one rank is in its row of actions. Another thread may ask at any time."""

    def __init__(self, pipeline: Pipeline | None, rank: int, name: str = "") -> None:
        """Start before the first action; a rank may be in no pipeline, or in one of several, which has a name."""
        self._rows, self._rank, self._name = () if pipeline is None else pipeline.actions, rank, name
        self._pipeline = pipeline
        by_pp_rank = () if pipeline is None else pipeline.ranks_by_pp_rank
        self._pp_rank = next((index for index, ranks in enumerate(by_pp_rank) if rank in ranks), None)
        self._action: Action | None = None
        self._awaited: tuple[Action, Sequence[int]] | None = None

    def start(self, action: Action | None) -> None:
        """Note the action that starts now; None: the row is done."""
        self._action = action

    @contextmanager
    def waiting(self, action: Action, peers: Sequence[int]) -> Iterator[None]:
        """Note that a message with these ranks is waited for; an error gets the report."""
        self._awaited = (action, peers)
        try:
            yield
        except SeqloomError as error:
            error.add_note(self.report())
            raise
        except Exception as error:
            reason = lost_rank_reason(error)
            if reason is None:
                raise
            raise LostRankError(self.report(f" ({reason})")) from error
        self._awaited = None

    def describe(self) -> str:
        """Say in one line what this rank is at."""
        words = f"rank {self._rank} is at {'the end of its row' if self._action is None else f'action {self._action}'}"
        words += f" of {self._name}" if self._name else ""
        if self._awaited is None:
            return words
        action, peers = self._awaited
        others = sorted({*peers} - {self._rank})
        named = f" with rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
        return f"{words} and waits for {action}{named}"

    def report(self, reason: str = "") -> str:
        """Say what this rank is at, and the reason if known, and draw the rows of all pp ranks around that action."""
        if not self._rows:
            return f"{self.describe()}{reason}"
        mark = None
        if self._pp_rank is not None and self._pipeline is not None:
            mark = self._pp_rank, _index_in(self._rows[self._pp_rank], self._action, self._pipeline)
        return f"{self.describe()}{reason}:\n{grid(self._rows, mark=mark)}"


def _index_in(row: Sequence[Action], action: Action | None, pipeline: Pipeline) -> int:
    """Return the index of an action in a row; of a local message, which is not in it, that of what produces it."""
    if action is None:
        return len(row) - 1
    if action in row:
        return row.index(action)
    send = send_of(action, pipeline) if action.kind in (RECV_F, RECV_B) else action
    producers = [Action(send.stage, kind, send.round) for kind in ((F,) if send.kind == SEND_F else (B, I))]
    return next(index for index, each in enumerate(row) if each in producers)
