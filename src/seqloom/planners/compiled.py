"""One source, two speeds: hot loops run as plain Python, or compiled where numba is installed.

The loops use integers and IEEE doubles only, so both give the same plan to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except ImportError:  # the base install: slower, same results
    numba = None

COMPILED: bool = numba is not None


def kernel(function: Function) -> Function:
    """Compile a hot loop if numba is there (cached on disk after the first call), else return it unchanged."""
    if numba is None:
        return function
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
