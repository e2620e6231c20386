"""Kernels behind one interface: what they can do, which one runs, and what they were measured to take.

Heavy modules are loaded by `registry`, not here.
"""

from __future__ import annotations

from seqloom.attention.kernels.kernel import Ability, Kernel, Prepared, Shape

__all__ = ["Ability", "Kernel", "Prepared", "Shape"]
