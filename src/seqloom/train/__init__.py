"""Training: config, setup, launch, the loop itself, optimiser, checkpoints and metrics.

`config` and `setup` need no torch, so that a run is checked before anything heavy is loaded.
"""

from seqloom.train.config import Config

__all__ = [
    "Config",
]
