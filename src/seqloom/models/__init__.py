"""Models: the reference transformer, the adapter through which the engine sees any model, and how its layers run."""

from seqloom.models.adapter import ModelAdapter
from seqloom.models.compile import compile_layers
from seqloom.models.float8 import use_float8
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.loss import summed_loss
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.models.transformer import Llama3Scaling, Rope, Transformer, TransformerOptions

__all__ = [
    "Llama3Scaling",
    "ModelAdapter",
    "Rope",
    "Transformer",
    "TransformerOptions",
    "compile_layers",
    "defer_weight_gradients",
    "recompute_layers",
    "summed_loss",
    "use_float8",
]
