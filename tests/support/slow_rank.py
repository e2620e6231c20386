"""Ranks whose computing is mostly sleep, so that they are as fast as they are told to be, whatever the machine does."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from seqloom.models import adapter as adapter_module
from seqloom.models.adapter import ModelAdapter
from seqloom.models.transformer import FeedForward
from seqloom.train.config import Config
from seqloom.train.model import REFERENCE, ModelFamily, build_reference, save_reference

TOKEN_S = 250e-6
"""Seconds that a rank of speed 1 sleeps for a token, in a layer and in the head."""
SLOW_RANK, SLOW_SPEED = 1, 0.7


def build_slow(config: Config, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Build the reference model, in a rank with layers and a loss that sleep."""
    if device.type == "meta":  # the launcher looks at the model only
        return build_reference(config, device, dtype)
    each_s = TOKEN_S / (SLOW_SPEED if dist.get_rank() == SLOW_RANK else 1.0)
    adapter = build_reference(config, device, dtype)
    for module in adapter.module.modules():
        if isinstance(module, FeedForward):
            module.register_forward_pre_hook(partial(_sleep_before, each_s))
    adapter_module.summed_loss = partial(_sleeping_loss, each_s, adapter_module.summed_loss)
    return adapter


def _sleep_before(each_s: float, module: torch.nn.Module, args: Any) -> None:
    time.sleep(each_s * len(args[0]))


def _sleeping_loss(each_s: float, loss: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    time.sleep(each_s * len(states))
    return loss(states, *args, **kwargs)


SLOW_FAMILY = ModelFamily(build_slow, save_reference, REFERENCE.describe, REFERENCE.notes)
