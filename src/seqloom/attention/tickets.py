"""Tickets: tensors that stand for Python objects where only tensors can go, inside a compiled graph.

The memory of a ticket belongs to the object: whoever keeps the ticket, or a view of it, keeps the object, and nobody
else does. So a graph that saves a ticket for its backward saves the object, and what drops the one drops the other.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from seqloom.comm import Context

_WIDTH = torch.int64.itemsize


class _Held(bytearray):
    """The memory of a ticket, which is its number, and the object."""

    value: object


class Visit(NamedTuple):
    """A context as one layer is called with it: a graph serves all layers, so it cannot tell which one it is."""

    context: Context
    layer: int | None


_numbers = count(1)
_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()


def ticket(value: object) -> torch.Tensor:
    """Return a new ticket for an object, int64[1] on the CPU. The object must not hold it: nothing would free them."""
    number = next(_numbers)
    held = _Held(number.to_bytes(_WIDTH, sys.byteorder))
    held.value = value
    _held[number] = held
    return torch.frombuffer(held, dtype=torch.int64)  # keeps `held` as long as its storage lives


def holder(given: torch.Tensor) -> Any:
    """Return the object that a ticket stands for."""
    return _held[int(given)].value
