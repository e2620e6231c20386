"""TODO."""

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
