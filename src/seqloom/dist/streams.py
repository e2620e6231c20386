"""CUDA streams beside that of the layers: one for every use, for a process's life; torch's pool has only 32.

parameters      gathers and reductions of the stages of a pipeline
offload         copies of activations to host memory and back
a channel       messages between stages
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def stream_of(device: torch.device, use: str) -> torch.cuda.Stream | None:
    """Return the stream of a use, the same one every time; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
