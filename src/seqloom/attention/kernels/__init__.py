"""Kernels behind one interface: what they can do, which one runs, and what they were measured to take.

Heavy modules are loaded by `registry`, not here.
"""

from seqloom.attention.kernels.interface import Ability, AttentionShape, Kernel, Prepared

__all__ = [
    "Ability",
    "AttentionShape",
    "Kernel",
    "Prepared",
]
