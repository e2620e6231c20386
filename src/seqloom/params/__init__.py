"""Where parameters and their gradients live while a plan runs: `Parameters` and its four implementations.

`ReplicatedParameters` keeps everything on every rank (any transport). `FSDPParameters` shards one stage with torch's
FSDP2, `PipelineFSDP` the stages of a pipeline, both for a whole run. `ReshardingParameters` (Hydraulis) keeps the
optimiser's shards in place and moves parameters and gradients to and from the stages of every step's plan.
"""

from seqloom.params.fsdp import FSDPParameters
from seqloom.params.interface import Parameters, ReplicatedParameters, scale_gradients
from seqloom.params.pipeline_fsdp import PipelineFSDP
from seqloom.params.placement import Placement
from seqloom.params.resharding import ReshardingParameters

__all__ = [
    "FSDPParameters",
    "Parameters",
    "PipelineFSDP",
    "Placement",
    "ReplicatedParameters",
    "ReshardingParameters",
    "scale_gradients",
]
