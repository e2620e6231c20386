"""One rank's part of a relay: where pieces of weights lie in its tensors, and where in fused buffers.

A rank has one end of the move as its source boxes, and the other as its target boxes. With the optimiser's layout of
4 ranks as the source, and a whole copy on rank 2 as the target, rank 2 receives a bundle of two weights a and b like
this:

    buffer     | a from 0 | b from 0 | a from 1 | b from 1 | a from 3 | b from 3 |
    tensors    | a from 0 | a from 1 | its own a | a from 3 |   | b from 0 | b from 1 | its own b | b from 3 |

Pieces of one size at one distance are a strip, and a strip is copied by one call, however many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqloom.errors import SeqloomError


class Box(NamedTuple):
    """What a rank holds of a weight: rows `start .. stop - 1` of columns `start2 .. stop2 - 1`."""

    start: int
    stop: int
    start2: int
    stop2: int

    @property
    def rows(self) -> int:
        """Rows of the tensor that holds it."""
        return self.stop - self.start

    @property
    def columns(self) -> int:
        """Columns of the tensor that holds it."""
        return self.stop2 - self.start2

    def view(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a contiguous tensor that holds this box as [rows, columns]."""
        if tensor.numel() != self.rows * self.columns or not tensor.is_contiguous():
            raise SeqloomError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} for {self.rows} rows x "
                f"{self.columns} columns of the weight; give a contiguous tensor of as many elements"
            )
        return tensor.detach().view(self.rows, self.columns)


class Strip(NamedTuple):
    """Pieces [rows, columns] of a weight, at equal distances in the tensor of its box and in a buffer.

    Attributes:
        weight: index.
        rows, columns: of each piece.
        width: columns of the tensor.
        at, step: elements of the tensor before the first piece, and from one to the next.
        place, stride: the same in the buffer, where each piece is contiguous.
        count: pieces.
    """

    weight: int
    rows: int
    columns: int
    width: int
    at: int
    place: int
    step: int = 0
    stride: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of all pieces."""
        return self.count * self.rows * self.columns

    def in_box(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of the weight's tensor."""
        strides = (self.step, self.width, 1)
        return tensor.as_strided((self.count, self.rows, self.columns), strides, tensor.storage_offset() + self.at)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of a flat buffer."""
        strides, offset = (self.stride, self.columns, 1), buffer.storage_offset() + self.place
        return buffer.as_strided((self.count, self.rows, self.columns), strides, offset)


class Form(NamedTuple):
    """The same boxes for one or more ranks, ascending: strips whose places count from the beginning of a message.

    This rank is among them where it keeps these boxes itself.
    """

    strips: tuple[Strip, ...]
    size: int
    peers: tuple[int, ...]


class Local(NamedTuple):
    """A piece that stays on this rank: in its source tensor, and in its target tensor.

    The places are those of a message to itself.
    """

    source: Strip
    target: Strip


@dataclass(frozen=True, slots=True)
class Index:
    """One rank's part of moving one bundle.

    Attributes:
        rank: this one.
        forms: the source end; values are packed once for all ranks of a form, sums come from each of them.
        strips: the target end; places count from the beginning of the buffer for all other ranks.
        messages: (rank, elements) in the order of that buffer, ranks ascending.
        local: what stays here.
    """

    rank: int
    forms: tuple[Form, ...]
    strips: tuple[Strip, ...]
    messages: tuple[tuple[int, int], ...]
    local: tuple[Local, ...]

    @property
    def outgoing(self) -> int:
        """Elements of the source that go to other ranks."""
        return sum(form.size for form in self.forms for peer in form.peers if peer != self.rank)

    @property
    def incoming(self) -> int:
        """Elements of the target that come from other ranks."""
        return sum(size for _, size in self.messages)
