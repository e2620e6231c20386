"""Offloading on a CPU as on a GPU: what goes to the host is a copy, and what has gone is overwritten."""

from __future__ import annotations

import pytest
import torch

from seqloom.models import offload
from seqloom.models.offload import HostCopies, OffloadedLayer


def copy_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Copy every tensor but scalars and handles into a tensor of its own, and make dropped ones unusable."""
    drop = OffloadedLayer.drop

    def overwrite(self: OffloadedLayer) -> None:
        for tensor in self._device or ():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        drop(self)

    patch.setattr(offload, "MIN_ELEMENTS", 2)
    patch.setattr(HostCopies, "_copies", lambda self, tensors, device: [each.clone() for each in tensors])
    patch.setattr(OffloadedLayer, "drop", overwrite)
