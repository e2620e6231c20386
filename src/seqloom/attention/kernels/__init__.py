"""Attention kernels behind one interface: their capabilities, measured times, and the choice among them.

`dispatch` imports every kernel; this package only the interface.
"""

from seqloom.attention.kernels.interface import (
    AttentionShape,
    Capabilities,
    Kernel,
    KernelBuild,
    KernelUse,
    PreparedAttention,
)

__all__ = [
    "AttentionShape",
    "Capabilities",
    "Kernel",
    "KernelBuild",
    "KernelUse",
    "PreparedAttention",
]
