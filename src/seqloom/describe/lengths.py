"""What a length is: a whole number of tokens from 1 to ``LONGEST``. One check for every way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seqloom.errors import SeqloomError

LONGEST = 2**31 - 1
"""Longest sequence in tokens. Attention kernels take cumulative lengths as int32, and a squared length still
fits an int64."""

RULE = f"a length is a whole number of tokens from 1 to {LONGEST:,}"


def entry(index: int) -> str:
    """Place of an entry in an array, for messages."""
    return f"entry {index}"


def checked(values: Any, *, what: str = "lengths", place: Callable[[int], str] = entry) -> np.ndarray:
    """Return ``values`` as a one-dimensional int64 array of lengths, or refuse the first one that is not.

    Whole numbers stored as floats are accepted, as tables with gaps often hold them; NaN is not.

    Args:
        values: anything numpy makes a one-dimensional array of; int64 arrays are returned as they are.
        what: what the values are, for messages (a file name, for example).
        place: turns an index into the place shown to the user (``"line 3"``).
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise SeqloomError(f"{what}: not a flat list of lengths ({error}); pass one number per sequence") from None
    if array.ndim != 1:
        raise SeqloomError(f"{what}: shape {array.shape} is not a flat list; pass one length per sequence")
    if array.size == 0:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if array.dtype == object:
        array = _from_objects(array, what, place)
    if array.dtype.kind not in "iuf":
        raise refusal(what, place(0), array[0].item())
    bad = ~((array >= 1) & (array <= LONGEST))  # the negation also catches NaN
    if array.dtype.kind == "f":
        bad |= array != np.floor(array)
    if bad.any():
        first = int(np.argmax(bad))
        raise refusal(what, place(first), array[first].item())
    return array if array.dtype == np.int64 else array.astype(np.int64)


def refusal(what: str, place: str, value: Any) -> SeqloomError:
    """The error for one value that is not a length: where, which, the rule and the way out."""
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return SeqloomError(f"{what}, {place}: {shown} is not a length; {RULE}; correct it or leave it out")


def _from_objects(array: np.ndarray, what: str, place: Callable[[int], str]) -> np.ndarray:
    """Integers too large for numpy, or a mix of types: name the first value that is not a plain number."""
    for index, value in enumerate(array):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or value > LONGEST:
            raise refusal(what, place(index), value)
    return array.astype(np.float64)
