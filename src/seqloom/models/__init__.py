"""A reference transformer on packed tokens, whose attention goes through the engine."""

from seqloom.models.adapter import ModelAdapter
from seqloom.models.compile import compile_layers
from seqloom.models.loss import summed_loss
from seqloom.models.recompute import recompute_layers
from seqloom.models.split_backward import split_weights
from seqloom.models.transformer import Details, Rope, Stretch, Transformer

__all__ = [
    "Details",
    "ModelAdapter",
    "Rope",
    "Stretch",
    "Transformer",
    "compile_layers",
    "recompute_layers",
    "split_weights",
    "summed_loss",
]
