"""Kernels behind one interface: what they can do, which one runs, and what they were measured to take.

Heavy modules are loaded by `registry`, not here.
"""

from seqloom.attention.kernels.interface import Ability, Kernel, Prepared, Shape

__all__ = [
    "Ability",
    "Kernel",
    "Prepared",
    "Shape",
]
