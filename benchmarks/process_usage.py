"""What a process holds: memory, communicators, streams, file handles and threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from seqloom.dist import Communicators


@dataclass(frozen=True, slots=True)
class Usage:
    """What a rank holds after a step."""

    step: int
    allocated_mib: float
    reserved_mib: float
    host_mib: float
    communicators: int
    streams: int
    file_handles: int
    threads: int


class CountedStream(torch.cuda.Stream):
    """Counts how many streams a process has created."""

    created = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Count, and create a stream; with an id it is one that exists already."""
        CountedStream.created += "stream_id" not in kwargs
        return super().__new__(cls, *args, **kwargs)


def usage(step: int, device: torch.device, communicators: Communicators) -> Usage:
    """Measure this process."""
    cuda = device.type == "cuda"
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Usage(
        step,
        torch.cuda.memory_allocated() / 2**20 if cuda else 0.0,
        torch.cuda.memory_reserved() / 2**20 if cuda else 0.0,
        pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        communicators.count,
        CountedStream.created,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )
