"""Offloading on a CPU as on a GPU: whatever its size, and what has gone to the host is overwritten."""

from __future__ import annotations

import pytest
import torch

from seqloom.models import offload
from seqloom.models.offload import OffloadedLayer


def copy_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Copy every tensor but scalars and handles, in small blocks, and make dropped ones unusable."""
    drop = OffloadedLayer.drop

    def overwrite(self: OffloadedLayer) -> None:
        for tensor in self._device or ():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        drop(self)

    patch.setattr(offload, "MIN_ELEMENTS", 2)
    patch.setattr(offload, "BLOCK_BYTES", 256)
    patch.setattr(OffloadedLayer, "drop", overwrite)
