"""Values that come when parameters are cut into shards, one parameter at a time: no rank ever has a whole model.

A network that is built so has its parameters on "meta", and says where their values are:

    a file, or a generator   --read-->   one parameter, whole, on the device   --cut-->   this rank's rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors

META = torch.device("meta")


class DeferredParameters:
    """Where the values of a model's parameters are.

    Attributes:
        device: where parameters shall be.
    """

    def __init__(self, read: Callable[[str], torch.Tensor], device: torch.device) -> None:
        """Read nothing yet.

        Args:
            read: canonical name -> the whole parameter, on any device and in any dtype; asked at most once for each.
            device: where parameters shall be.
        """
        self.device = device
        self._read: Callable[[str], torch.Tensor] | None = read

    def materialize(self, name: str, parameter: nn.Parameter) -> None:
        """Give a parameter on "meta" its values, in its dtype. It stays the same object: tied ones stay tied."""
        assert self._read is not None, "values were closed"
        values = torch.empty_like(parameter, device=self.device, requires_grad=False)
        values.copy_(self._read(name))
        swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))

    def close(self) -> None:
        """Let go of files, and of values that nobody has asked for."""
        self._read = None


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, new modules have their parameters on "meta" and their buffers where they say."""

    def register(module: nn.Module, name: str, given: nn.Parameter | None) -> nn.Parameter | None:
        return None if given is None else to_meta(given)

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", register))  # what it returns counts
    try:
        yield
    finally:
        hook.remove()


def to_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter's shape without its values."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
