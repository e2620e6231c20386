"""What it takes to keep a unit's activations in host memory: copies over the bus, beside the computing."""

from __future__ import annotations

import math

HOST_GB_S = 20.0
"""GB/s of a GPU to and from pinned host memory, in one direction: 16 lanes of PCIe 4 carry 25 to 28 when nothing else
uses them, and the GPUs of a node share its memory. No profile has a figure of its own."""


def copy_ns(size: float) -> int:
    """ns of copying so many bytes between a GPU and host memory, one way."""
    return math.ceil(size / HOST_GB_S)
