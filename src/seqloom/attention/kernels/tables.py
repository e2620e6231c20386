"""Measured times of kernels: what `seqloom profile` writes and the dispatcher reads.

A time is that of one segment among others in the same call, forward or backward, by how many (query, key) pairs it
holds. Times for other head counts are scaled by the heads; other head dims and dtypes need a measurement of their own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.interface import AttentionShape
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError
from seqloom.reader import read_mapping

FORMAT = 1


class Point(NamedTuple):
    """Time of one square segment of `length` queries and keys."""

    length: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class Times:
    """What one kernel takes.

    Attributes:
        kernel: its name.
        forward_call_ns, backward_call_ns: of a call with next to nothing in it; paid once, however many segments.
        causal, full: squares with a causal mask and without, by ascending length.
    """

    kernel: str
    forward_call_ns: int
    backward_call_ns: int
    causal: tuple[Point, ...]
    full: tuple[Point, ...]

    def __post_init__(self) -> None:
        """Check that the curves can be read off."""
        for name, points in (("causal", self.causal), ("full", self.full)):
            lengths = [point.length for point in points]
            if not points or lengths != sorted(set(lengths)) or lengths[0] < 1:
                raise SeqloomError(f"kernel {self.kernel!r}: {name} lengths {lengths} must ascend from 1 or more")
            if min(self.forward_call_ns, self.backward_call_ns, *(min(point[1:]) for point in points)) < 0:
                raise SeqloomError(f"kernel {self.kernel!r}: a time below 0 ns; measure again")

    def call_ns(self, backward: bool) -> int:
        """Return the cost of a call of one pass."""
        return self.backward_call_ns if backward else self.forward_call_ns

    def predict_ns(self, segments: Segments, backward: bool) -> np.ndarray:
        """Return the time of every segment in one pass, without the call; int64[n]."""
        pairs = segments.area()
        full = _interpolate(pairs, [(point.length**2, point[1 + backward]) for point in self.full])
        half = [(point.length * (point.length + 1) // 2, point[1 + backward]) for point in self.causal]
        return np.where(segments.tiles(), full, _interpolate(pairs, half))


def _interpolate(pairs: np.ndarray, points: list[tuple[int, int]]) -> np.ndarray:
    """Read times off a curve, linear between logarithms; shorter costs as the shortest, longer in proportion."""
    known = np.log([float(area) for area, _ in points])
    times = np.log([max(1.0, ns) for _, ns in points])
    wanted = np.log(np.maximum(pairs, 1))
    beyond = np.maximum(wanted - known[-1], 0.0)
    return np.rint(np.exp(np.interp(wanted, known, times) + beyond)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of the kernels of one device, for tensors of one shape.

    Attributes:
        device: its name, see `device_name`.
        torch: version it was measured with.
        heads, kv_heads, dim: of the tensors; dtype: for example "bfloat16".
    """

    device: str
    torch: str
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    times: tuple[Times, ...]

    def scaled(self, heads: int) -> tuple[Times, ...]:
        """Return the times for so many heads: in proportion, except for the cost of a call."""
        share = heads / self.heads

        def scale(points: tuple[Point, ...]) -> tuple[Point, ...]:
            return tuple(Point(length, round(there * share), round(back * share)) for length, there, back in points)

        return tuple(replace(one, causal=scale(one.causal), full=scale(one.full)) for one in self.times)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Measurements of one or more devices and shapes."""

    measurements: tuple[Measurement, ...] = ()

    def find(self, shape: AttentionShape) -> Measurement | None:
        """Return the measurement to use: same device, head dim and dtype; this torch release if there is one, then the
        nearest head counts.
        """
        device, release, dtype = device_name(shape.device), _release(torch.__version__), dtype_name(shape.dtype)
        fitting = [one for one in self.measurements if (one.device, one.dim, one.dtype) == (device, shape.dim, dtype)]
        shared = shape.heads // shape.kv_heads

        def distance(one: Measurement) -> tuple[bool, int, int]:
            ratio = abs(one.heads // one.kv_heads - shared)
            return _release(one.torch) != release, ratio, abs(one.heads - shape.heads)

        return min(fitting, key=distance, default=None)

    def joined(self, other: KernelTable) -> KernelTable:
        """Return this table with what only `other` has."""
        known = {_key(one) for one in self.measurements}
        return KernelTable((*self.measurements, *(one for one in other.measurements if _key(one) not in known)))

    def adding(self, measurement: Measurement) -> KernelTable:
        """Return the table with this measurement, in place of an older one of the same device, torch and shape."""
        kept = tuple(one for one in self.measurements if _key(one) != _key(measurement))
        return KernelTable((*kept, measurement))

    def save(self, path: Path) -> None:
        """Write the table as JSON; folders are made where they are missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> KernelTable:
        """Read a table that `save` wrote."""
        content = read_mapping(path)
        if content.get("format") != FORMAT:
            raise SeqloomError(f"{path}: format {content.get('format')!r}, not {FORMAT}; run seqloom profile again")
        try:
            return cls(tuple(_measurement(one) for one in content["measurements"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SeqloomError(f"{path}: not a table of kernel times ({error}); run seqloom profile again") from None


def _measurement(content: dict[str, Any]) -> Measurement:
    """Rebuild a measurement from JSON."""
    times = tuple(
        Times(
            str(one["kernel"]),
            int(one["forward_call_ns"]),
            int(one["backward_call_ns"]),
            tuple(Point(*map(int, point)) for point in one["causal"]),
            tuple(Point(*map(int, point)) for point in one["full"]),
        )
        for one in content["times"]
    )
    heads, kv_heads, dim = (int(content[name]) for name in ("heads", "kv_heads", "dim"))
    if min(heads, kv_heads, dim) < 1:
        raise ValueError(f"{heads} heads, {kv_heads} kv heads, head dim {dim}")
    return Measurement(
        str(content["device"]), str(content["torch"]), heads, kv_heads, dim, str(content["dtype"]), times
    )


def _key(one: Measurement) -> tuple[Any, ...]:
    return (one.device, one.torch, one.heads, one.kv_heads, one.dim, one.dtype)


def _release(version: str) -> str:
    """2.11 of 2.11.0+cu128."""
    return ".".join(version.split(".")[:2])


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """Return what a device calls itself: "NVIDIA H200"; a CPU by its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def built_in() -> KernelTable:
    """Return the measurements that come with the package."""
    table = KernelTable()
    for path in sorted((Path(__file__).parent / "measured").glob("*.json")):
        table = table.joined(KernelTable.load(path))
    return table


def default_path() -> Path:
    """Return where `seqloom profile` keeps its table: the user's cache folder, by the custom of the system."""
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "seqloom" / "kernels.json"
