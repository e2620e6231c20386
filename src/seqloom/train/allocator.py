"""torch's allocator on a GPU: plans change the sizes of buffers from step to step, which fragments fixed segments.

torch reads its setting from the environment when a process begins to use the GPU. Processes that Seqloom starts are
given one; a launcher's are not Seqloom's, so there the log gives advice. What the user has set is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads: the name since 2.9, and the one before."""
SETTING = "expandable_segments:True"


def user_setting(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that the user has set, as `NAME=value`; None: neither."""
    return next((f"{name}={environment[name]}" for name in NAMES if environment.get(name)), None)


def advice(device: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Say what to set, for a process that runs on this kind of device and was started without; None: nothing."""
    if device != "cuda" or user_setting(environment) is not None:
        return None
    return f"{NAMES[0]} is not set; {NAMES[0]}={SETTING} keeps GPU memory from fragmenting when sizes change every step"


@contextmanager
def for_new_processes() -> Iterator[None]:
    """Hand the setting to processes that are started inside, unless the user has one. This process keeps its own."""
    if user_setting() is not None:
        yield
        return
    before = os.environ.get(NAMES[0])
    os.environ[NAMES[0]] = SETTING
    try:
        yield
    finally:
        if before is None:
            del os.environ[NAMES[0]]
        else:
            os.environ[NAMES[0]] = before
