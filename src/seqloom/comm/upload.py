"""Small index arrays from the host to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def on_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Return the array as a tensor on a device. The copy to a GPU takes its turn in the stream; the host goes on.

    A plain copy would wait until all that was launched before is done: a pause in every round.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
