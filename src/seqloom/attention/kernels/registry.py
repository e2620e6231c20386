"""All kernels by name, and the dispatcher of a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from seqloom.attention.kernels.cpu_flash import CpuFlash
from seqloom.attention.kernels.cudnn import Cudnn
from seqloom.attention.kernels.dispatch import Dispatcher
from seqloom.attention.kernels.flash_attn import FlashAttn2, FlashAttn3, installed
from seqloom.attention.kernels.kernel import Ability, Kernel
from seqloom.attention.kernels.reference import Reference
from seqloom.attention.kernels.tables import KernelTable, built_in, default_path
from seqloom.attention.kernels.triton_segments import TritonSegments
from seqloom.attention.kernels.varlen import Varlen
from seqloom.errors import unknown


class Entry(NamedTuple):
    """A kernel that may be used where nothing is missing."""

    make: Callable[[], Kernel]
    missing: Callable[[torch.device], str | None]
    """Says what a device or an installation lacks."""
    at_least: int = 0
    """Without measurements it is preferred for segments of at least this many tokens."""


def _nothing(device: torch.device) -> str | None:
    return None


def _triton(device: torch.device) -> str | None:
    return "package triton is not installed" if find_spec("triton") is None else None


def _cudnn(device: torch.device) -> str | None:
    needed = "it needs the package nvidia-cudnn-frontend and a GPU of compute capability 9.0 or more"
    return None if Cudnn.available(device) else needed


def _ampere(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, not 8.0 or more" if major < 8 else None


def _flash_attn_2(device: torch.device) -> str | None:
    return _ampere(device) if installed("flash_attn_2") else "package flash_attn is not installed"


def _flash_attn_3(device: torch.device) -> str | None:
    if not installed("flash_attn_3"):
        return "package flash_attn_interface is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, not 9.x" if major != 9 else None


ENTRIES = {
    "cudnn": Entry(Cudnn, _cudnn, at_least=256),
    "triton": Entry(TritonSegments, _triton),
    "varlen": Entry(Varlen, _ampere),
    "flash_attn_3": Entry(FlashAttn3, _flash_attn_3),
    "flash_attn_2": Entry(FlashAttn2, _flash_attn_2),
    "cpu_flash": Entry(CpuFlash, _nothing),
    "reference": Entry(Reference, _nothing),
}
"""In order of preference, which decides where nothing was measured."""


def all_abilities() -> dict[str, Ability]:
    """Return what every kernel can do, by name, whether or not it can run here."""
    return {name: entry.make().ability for name, entry in ENTRIES.items()}


def make_kernel(name: str) -> Kernel:
    """Return the kernel of this name."""
    if name not in ENTRIES:
        raise unknown("kernel", name, ENTRIES)
    return ENTRIES[name].make()


def missing(device: torch.device) -> dict[str, str]:
    """Return the kernels for this kind of device that cannot run on it, and why."""
    found = {}
    for name, entry in ENTRIES.items():
        why = entry.missing(device) if device.type in entry.make().ability.devices else None
        if why is not None:
            found[name] = why
    return found


def available(device: torch.device) -> tuple[Kernel, ...]:
    """Return the kernels that can run on a device, in order of preference."""
    absent = missing(device)
    kernels = [entry.make() for name, entry in ENTRIES.items() if name not in absent]
    return tuple(kernel for kernel in kernels if device.type in kernel.ability.devices)


def default(device: torch.device | str, table: Path | None = None) -> Dispatcher:
    """Return the dispatcher over all kernels that can run on a device; the same one every time.

    Args:
        device: where attention runs.
        table: file of measured times; None: the one that `seqloom profile` keeps, and those of the package.
    """
    return _default(torch.device(device), table)


@lru_cache
def _default(device: torch.device, table: Path | None) -> Dispatcher:
    own = default_path() if table is None else table
    measured = KernelTable() if table is None and not own.is_file() else KernelTable.load(own)
    if table is None:
        measured = measured.joined(built_in())
    floors = {name: entry.at_least for name, entry in ENTRIES.items() if entry.at_least}
    return Dispatcher(available(device), measured, floors)
