"""Small programs of transport verbs, with what each rank must end up with: one text, run on every transport.

All ranks go through the steps in order and do their part of each. The values are small whole numbers, exact in
every dtype, so results are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from seqloom.dist.transport import Handle, P2PTensor, Transport
from seqloom.plan import GroupFamily

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8")


@dataclass(frozen=True, slots=True)
class Collective:
    """A verb of one block.

    Attributes:
        sizes: of an all-to-all, `sizes[i][j]` elements go from the i-th rank to the j-th; of the others, `((n,),)`, or
            of an all-gather of unequal inputs one row with the elements of every rank.
    """

    verb: str
    block: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Swap:
    """An exchange: (sender, receiver, elements) of every parcel. Every rank waits `lag` steps later."""

    parcels: tuple[tuple[int, int, int], ...]
    dtype: str
    lag: int = 0


Step = Collective | Swap
Program = tuple[Step, ...]


def every_verb(dtype: str) -> Program:
    """Return every verb on 4 ranks, with uneven and empty pieces, blocks of one, and parcels to oneself."""
    everyone = (0, 1, 2, 3)
    uneven = ((2, 0, 3, 1), (0, 0, 1, 0), (4, 1, 0, 0), (0, 0, 0, 0))
    parcels = ((0, 1, 3), (1, 0, 2), (0, 1, 5), (2, 2, 4), (1, 2, 0), (0, 1, 3), (3, 0, 1))
    return (
        Collective("all_to_all", everyone, uneven, dtype),
        Collective("all_to_all", (2, 3), ((0, 0), (0, 0)), dtype),
        Collective("all_to_all", (1,), ((4,),), dtype),
        Swap(parcels, dtype, lag=3),
        Collective("all_gather", (0, 1, 2), ((3,),), dtype),
        Collective("all_gather", everyone, ((0,),), dtype),
        Collective("all_gather", (2,), ((3,),), dtype),
        Collective("all_gather", (0, 1, 2), ((3, 1, 4),), dtype),
        Collective("all_gather", everyone, ((2, 0, 3, 3),), dtype),
        Swap((), dtype),
        Collective("all_reduce", everyone, ((5,),), dtype),
        Collective("all_reduce", (0, 1), ((0,),), dtype),
        Collective("all_reduce", (3,), ((2,),), dtype),
        Swap(parcels, dtype),
    )


def random_program(random: Random, ranks: int, steps: int = 6) -> Program:
    """Draw a legal program on the blocks of a family of `ranks` ranks in one node."""
    family = GroupFamily.cached(ranks, node_size=ranks)
    blocks = [tuple(block) for size in family.sizes for block in family.blocks(size)]
    program: list[Step] = []
    for _ in range(random.randint(1, steps)):
        dtype = random.choice(DTYPES)
        verb = random.choice(("exchange", "all_to_all", "all_gather", "all_reduce"))
        if verb == "exchange":
            pairs = [(random.randrange(ranks), random.randrange(ranks)) for _ in range(random.randint(0, 2 * ranks))]
            parcels = tuple((sender, receiver, random.choice((0, 1, 5))) for sender, receiver in pairs)
            program.append(Swap(parcels, dtype, lag=random.randint(0, 3)))
            continue
        block = random.choice(blocks)
        sizes = tuple(tuple(random.choice((0, 1, 2, 7)) for _ in block) for _ in block)
        if verb != "all_to_all":
            count = len(block) if verb == "all_gather" and random.random() < 0.5 else 1
            sizes = (tuple(random.choice((0, 1, 6)) for _ in range(count)),)
        program.append(Collective(verb, block, sizes, dtype))
    return tuple(program)


def run_program(transport: Transport, program: Program, device: str = "cpu") -> list[torch.Tensor]:
    """Do this rank's part of every step; return all that was received, in order of steps and parcels."""
    received: list[torch.Tensor] = []
    pending: list[tuple[int, Handle]] = []
    for index, step in enumerate(program):
        if isinstance(step, Collective):
            if transport.rank in step.block:
                received.append(_run_collective(transport, step, index, device))
        else:
            handle, tensors = _start_swap(transport, step, index, device)
            pending.append((index + step.lag, handle))
            received += tensors
        for due, handle in pending:
            if due <= index:
                handle.wait()
        pending = [(due, handle) for due, handle in pending if due > index]
    for _, handle in pending:
        handle.wait()
    return [tensor.cpu() for tensor in received]


def expected_of(program: Program, rank: int) -> list[torch.Tensor]:
    """Return what `run_program` must return on `rank`, worked out without any transport."""
    expected: list[torch.Tensor] = []
    for index, step in enumerate(program):
        if isinstance(step, Swap):
            for number, (sender, receiver, size) in enumerate(step.parcels):
                if receiver == rank:
                    expected.append(_values(size, step.dtype, index, sender, number))
        elif rank in step.block:
            here = step.block.index(rank)
            if step.verb == "all_to_all":
                pieces = [_values(row[here], step.dtype, index, i, here) for i, row in enumerate(step.sizes)]
                expected.append(torch.cat(pieces))
            else:
                counts = step.sizes[0] if len(step.sizes[0]) == len(step.block) else step.sizes[0] * len(step.block)
                pieces = [_values(count, step.dtype, index, i, 0) for i, count in enumerate(counts)]
                gathers = step.verb == "all_gather"
                expected.append(torch.cat(pieces) if gathers else torch.stack(pieces).sum(0, dtype=pieces[0].dtype))
    return expected


def _run_collective(transport: Transport, step: Collective, index: int, device: str) -> torch.Tensor:
    here = step.block.index(transport.rank)
    dtype = getattr(torch, step.dtype)
    if step.verb == "all_to_all":
        send_sizes, receive_sizes = list(step.sizes[here]), [row[here] for row in step.sizes]
        pieces = [_values(count, step.dtype, index, here, j) for j, count in enumerate(send_sizes)]
        output = torch.zeros(sum(receive_sizes), dtype=dtype, device=device)
        transport.all_to_all(output, torch.cat(pieces).to(device), receive_sizes, send_sizes, step.block)
        return output
    counts = step.sizes[0] if len(step.sizes[0]) == len(step.block) else step.sizes[0] * len(step.block)
    own = _values(counts[here], step.dtype, index, here, 0).to(device)
    if step.verb == "all_reduce":
        transport.all_reduce(own, step.block)
        return own
    output = torch.zeros(sum(counts), dtype=dtype, device=device)
    transport.all_gather(output, own, step.block, counts if len(step.sizes[0]) > 1 else None)
    return output


def _start_swap(transport: Transport, step: Swap, index: int, device: str) -> tuple[Handle, list[torch.Tensor]]:
    sends, receives = [], []
    for number, (sender, receiver, size) in enumerate(step.parcels):
        if sender == transport.rank:
            sends.append(P2PTensor(receiver, _values(size, step.dtype, index, sender, number).to(device)))
        if receiver == transport.rank:
            receives.append(P2PTensor(sender, torch.zeros(size, dtype=getattr(torch, step.dtype), device=device)))
    return transport.exchange(sends, receives), [tensor for _, tensor in receives]


def _values(size: int, dtype: str, index: int, sender: int, piece: int) -> torch.Tensor:
    """Numbers 0 .. 15 that tell step, sender and piece apart; eight of them add up exactly in every dtype."""
    return ((torch.arange(size) + 3 * index + 5 * sender + 7 * piece) % 16).to(getattr(torch, dtype))
