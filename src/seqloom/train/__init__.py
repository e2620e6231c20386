"""Training: the config of a run, its metrics, optimiser and checkpoints.

What is here needs no torch, so that a config is checked before anything heavy is loaded; `seqloom.train.optimiser` and
`seqloom.train.checkpoints` do.
"""

from seqloom.train.config import Config

__all__ = [
    "Config",
]
