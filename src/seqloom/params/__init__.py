"""TODO."""

from seqloom.params.fsdp import Sharded
from seqloom.params.interface import Parameters, Replicated, scale_gradients
from seqloom.params.pipeline_fsdp import StageSharded
from seqloom.params.placement import Placement
from seqloom.params.resharding import FreeLayout

__all__ = [
    "FreeLayout",
    "Parameters",
    "Placement",
    "Replicated",
    "Sharded",
    "StageSharded",
    "scale_gradients",
]
