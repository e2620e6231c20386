"""One source, two speeds: hot loops run as plain Python, or compiled where numba is installed.

The loops use integers and IEEE doubles only, so both give the same plan to the last bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except ImportError:  # the base install: slower, same results
    numba = None

COMPILED: bool = numba is not None


def kernel(function: Function) -> Function:
    """Compile a hot loop if numba is there (kept on disk after the first call), else return it unchanged."""
    if numba is None:
        return function
    dispatcher: Any = numba.njit(nogil=True)(function)
    if dispatcher is function:  # compilation is switched off in numba itself
        return function
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # no folder to write to: compile in every process
        return cast(Function, dispatcher)
    # numba looks only at the file that a kernel stands in, but a kernel contains the ones it calls: what is on disk
    # counts only while none of them has changed.
    dispatcher._cache._cache_file._version = f"{numba.__version__} {sources()}"
    return cast(Function, dispatcher)


@cache
def sources() -> str:
    """Hash of every file that kernels stand in."""
    contents = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"".join(content for content in contents if b"\n@kernel\n" in content)).hexdigest()
