"""What a rank spends its time on inside the layers of a step: attention, messages, losses.

`bind_plan` gives every context of a step one `LayerTimes`. Attention measures its calls by it, forward and backward, in
compiled layers too, where it is an opaque operator; `TimedTransport` measures the messages that layers send; the model
measures its loss. On a CPU times are the host's; on a GPU those between two events in the stream of the layers, for
which nothing waits: of messages on streams of their own they are what is exposed. Waiting for the other side of a
message counts as the message: a rank cannot tell one from the other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from seqloom.dist.transport import Channel, Exchange, P2PTensor, Transport
from seqloom.plan import Action

ATTENTION, IN_ATTENTION, MESSAGES, LOSS = "attention", "messages in attention", "messages", "loss"


class TimeSlice(NamedTuple):
    """Part of a step on one rank, in seconds since the step began; stage and round are -1 where they make no sense."""

    name: str  # of an `ActionKind`, or messages or rows
    start_s: float
    stop_s: float
    stage: int = -1
    round: int = -1


class Timer:
    """Seconds by name until `stop`: by the host's clock, or by a GPU's events, which only `seconds` waits for."""

    def __init__(self, device: torch.device) -> None:
        """Start; on a GPU, in the order of its current stream."""
        self._cuda = device.type == "cuda"
        self._start: Any = self._now()
        self._stop: Any = None
        self._measured: list[tuple[str, Any, Any, Action | None]] = []

    @contextmanager
    def measure(self, name: str, action: Action | None = None) -> Iterator[None]:
        """Add the time of the block to that of `name`; `action` says for which stage and round it is spent."""
        start = self._now()
        yield
        self._measured.append((name, start, self._now(), action))

    def stop(self) -> None:
        """End the step's time here; on a GPU, in the order of its current stream."""
        self._stop = self._now()

    def seconds(self) -> defaultdict[str, float]:
        """Return the seconds of every name, 0 for others, and those from start to stop as "step".

        On a GPU it waits until the stream has come to the stop, not for what was launched behind it.
        """
        if self._cuda:
            self._stop.synchronize()
        total: defaultdict[str, float] = defaultdict(float)
        for name, start, stop, _ in (*self._measured, ("step", self._start, self._stop, None)):
            total[name] += self._between(start, stop)
        return total

    def slices(self) -> tuple[TimeSlice, ...]:
        """Return every block that was measured; after `seconds`."""
        found = []
        for name, start, stop, action in self._measured:
            times = self._between(self._start, start), self._between(self._start, stop)
            stage, number = (-1, None) if action is None else (action.stage, action.round)
            found.append(TimeSlice(name, *times, stage, -1 if number is None else number))
        return tuple(found)

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1000 if self._cuda else stop - start

    def _now(self) -> Any:
        """Return the host's time in seconds, or a recorded event."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class LayerSeconds(NamedTuple):
    """Seconds of a rank inside the layers of a step, by phase."""

    attention: float = 0.0  # calls of attention, forward and backward, without messages: kernels, and host work on CPUs
    exchange: float = 0.0  # messages of layers that nothing hides, with the wait for their other side
    loss: float = 0.0  # of `loss_tokens`, in which no rank waits for another
    loss_tokens: int = 0
    complete: bool = False  # whether attention and messages were measured


class LayerTimes:
    """Measures the phases of a rank's layers from `start` to `stop`.

    Attributes:
        complete: whether attention and messages are measured; otherwise the loss alone is.
    """

    def __init__(self, device: torch.device, *, complete: bool = True) -> None:
        """Measure nothing yet."""
        self._device, self.complete = device, complete
        self._timer: Timer | None = None
        self._in_attention, self._loss_tokens = False, 0

    def start(self) -> None:
        """Begin a step."""
        self._timer, self._loss_tokens = Timer(self._device), 0

    def stop(self) -> None:
        """End the step's time here, as `Timer.stop`."""
        assert self._timer is not None
        self._timer.stop()

    def seconds(self) -> LayerSeconds:
        """Return the seconds of the phases; on a GPU it waits until the stream has come to the stop."""
        assert self._timer is not None
        found, self._timer = self._timer.seconds(), None
        attention, exchange = found[ATTENTION] - found[IN_ATTENTION], found[IN_ATTENTION] + found[MESSAGES]
        return LayerSeconds(max(0.0, attention), exchange, found[LOSS], self._loss_tokens, self.complete)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Add the time of the block to attention."""
        if self._timer is None or not self.complete:
            yield
            return
        self._in_attention = True
        try:
            with self._timer.measure(ATTENTION):
                yield
        finally:
            self._in_attention = False

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Add the time of the block to messages."""
        if self._timer is None or not self.complete:
            yield
            return
        with self._timer.measure(IN_ATTENTION if self._in_attention else MESSAGES):
            yield

    @contextmanager
    def loss(self, tokens: int) -> Iterator[None]:
        """Add the time of the block, for so many tokens, to losses."""
        if self._timer is None:
            yield
            return
        with self._timer.measure(LOSS):
            yield
        self._loss_tokens += tokens


class TimedTransport:
    """Wraps a transport, does what it does, and measures how long a rank's layers are in it."""

    def __init__(self, transport: Transport, times: LayerTimes) -> None:
        """Measure by `times`."""
        self._transport, self.times = transport, times

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return self._transport.ranks

    @property
    def waits_in_stream(self) -> bool:
        """See `Transport.waits_in_stream`."""
        return self._transport.waits_in_stream

    def on(self, channel: Channel) -> TimedTransport:
        """See `Transport.on`."""
        return TimedTransport(self._transport.on(channel), self.times)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        with self.times.messages():
            self._transport.all_to_all(output, input, output_sizes, input_sizes, block)

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """See `Transport.exchange`; its start and its end are measured, not what is computed in between."""
        with self.times.messages():
            return _TimedExchange(self._transport.exchange(sends, receives), self.times)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """See `Transport.all_gather`."""
        with self.times.messages():
            self._transport.all_gather(output, input, block, sizes)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """See `Transport.all_reduce`."""
        with self.times.messages():
            self._transport.all_reduce(tensor, block)

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """See `Transport.broadcast`."""
        with self.times.messages():
            return self._transport.broadcast(payload, root=root)


class _TimedExchange:
    """An exchange in flight whose end is measured."""

    __slots__ = ("_exchange", "_times")

    def __init__(self, exchange: Exchange, times: LayerTimes) -> None:
        self._exchange, self._times = exchange, times

    def wait(self) -> None:
        """See `Handle.wait`."""
        with self._times.messages():
            self._exchange.wait()

    def done(self) -> bool:
        """See `Exchange.done`."""
        return self._exchange.done()
