"""Which kernel runs: segments go to the kernels that are predicted to finish soonest, by measured times.

    KERNELS       all kernels by name, what each needs of a device, in order of preference
    KernelTable   measured times, written by `seqloom profile`; the package brings some
    Dispatcher    a kernel that splits segments over the available ones

A predicted time is a sum: every kernel in use costs a call, every segment costs its time on its kernel, and a kernel
that does not work in place costs the copies of its rows. For each of the few sets of kernels every segment goes to the
fastest of the set, and the set with the least sum is taken. Forward and backward are chosen separately: all a backward
needs of its forward is the output and the log-sum-exp.

A measured time is that of one segment among others in the same call, by how many (query, key) pairs it holds. Times for
other head counts are scaled by the heads; other head dims and dtypes need a measurement of their own.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.cpu import CpuFlash, Reference
from seqloom.attention.kernels.flash import FlashAttention4, Varlen
from seqloom.attention.kernels.interface import (
    AttentionShape,
    Capabilities,
    Gradients,
    InPlaceAttention,
    Kernel,
    KernelBuild,
    KernelUse,
    PreparedAttention,
    Saved,
    SupportsBuilds,
    device_rows,
    dtype_name,
)
from seqloom.attention.kernels.triton_attention import TritonSegments
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError, unknown_name
from seqloom.reader import read_mapping

FORMAT = 1
DEFAULT_COPY_GB_S = 1000.0
"""Of tables that were measured without it: low for a data-centre GPU, so that copies look dear rather than cheap."""
UNSUPPORTED_NS = 2**40
"""Time of a segment on a kernel that does not support it; far above any, and a sum of many still fits an integer."""


# -- all kernels ------------------------------------------------------------------------------------------------------


class KernelEntry(NamedTuple):
    """A kernel of the project.

    Attributes:
        make: its class.
        missing: what a device or an installation lacks to run it; None: nothing.
        min_length: without measurements it is preferred for segments of at least this many tokens.
    """

    make: Callable[[], Kernel]
    missing: Callable[[torch.device], str | None] = lambda device: None
    min_length: int = 0


def _triton_missing(device: torch.device) -> str | None:
    return "package triton is not installed" if find_spec("triton") is None else None


def _fa4_missing(device: torch.device) -> str | None:
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "package flash-attn-4 is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, not 9.0 or more" if major < 9 else None


def _ampere_missing(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}, not 8.0 or more" if major < 8 else None


KERNELS = {
    "fa4": KernelEntry(FlashAttention4, _fa4_missing, min_length=256),
    "triton": KernelEntry(TritonSegments, _triton_missing),
    "varlen": KernelEntry(Varlen, _ampere_missing),
    "cpu_flash": KernelEntry(CpuFlash),
    "reference": KernelEntry(Reference),
}
"""In order of preference, which decides where nothing was measured."""


def make_kernel(name: str) -> Kernel:
    """Return the kernel of this name."""
    if name not in KERNELS:
        raise unknown_name("kernel", name, KERNELS)
    return KERNELS[name].make()


def unavailable_kernels(device: torch.device) -> dict[str, str]:
    """Return the kernels for this type of device that cannot run on it, and why."""
    found = {}
    for name, entry in KERNELS.items():
        why = entry.missing(device) if device.type in entry.make().capabilities.devices else None
        if why is not None:
            found[name] = why
    return found


def available_kernels(device: torch.device) -> tuple[Kernel, ...]:
    """Return the kernels that can run on a device, in order of preference."""
    absent = unavailable_kernels(device)
    kernels = [entry.make() for name, entry in KERNELS.items() if name not in absent]
    return tuple(kernel for kernel in kernels if device.type in kernel.capabilities.devices)


def default_dispatcher(device: torch.device | str, table: Path | None = None) -> Dispatcher:
    """Return the dispatcher over all kernels that can run on a device; the same one every time.

    `table` is a file of measured times; None: the one that `seqloom profile` writes, and those of the package.
    """
    return _default_dispatcher(indexed_device(device), table)


def indexed_device(device: torch.device | str) -> torch.device:
    """Return the device with its index: "cuda" and "cuda:0" are one where GPU 0 is the current one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@lru_cache
def _default_dispatcher(device: torch.device, table: Path | None) -> Dispatcher:
    path = default_table_path() if table is None else table
    measured = KernelTable() if table is None and not path.is_file() else KernelTable.load(path)
    if table is None:
        measured = measured.merged(built_in_table())
    min_lengths = {name: entry.min_length for name, entry in KERNELS.items() if entry.min_length}
    return Dispatcher(available_kernels(device), measured, min_lengths)


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CombinedCapabilities(Capabilities):
    """Capabilities of several kernels together, segment by segment: only the two methods are meaningful."""

    members: tuple[Capabilities, ...] = ()

    def unsupported_shape(self, shape: AttentionShape) -> str | None:
        """Return why no member supports the shape; None when one does."""
        reasons = [one.unsupported_shape(shape) for one in self.members]
        return None if None in reasons else "no kernel can run this attention:\n  " + "\n  ".join(filter(None, reasons))

    def unsupported(self, segments: Segments, shape: AttentionShape) -> str | None:
        """Return why some segment is supported by no member, with the reason of every member; None when all are."""
        able = [one for one in self.members if one.unsupported_shape(shape) is None]
        supported = np.zeros(len(segments), dtype=bool)
        for one in able:
            supported |= one.supports(segments)
        if able and supported.all():
            return None
        left = segments.select(~supported)
        reasons = [one.unsupported_shape(shape) or one.unsupported_segments(left) for one in self.members]
        return "no kernel can run this attention:\n  " + "\n  ".join(reason for reason in reasons if reason)


class KernelChoice(NamedTuple):
    """Segments for one kernel.

    Attributes:
        predicted_ns: the call included; None where nothing was measured.
    """

    kernel: Kernel
    segments: Segments
    predicted_ns: int | None
    why: str

    def explain(self) -> dict[str, Any]:
        """Return one row for people and for JSON."""
        lengths = np.maximum(self.segments.q_len, self.segments.k_len)
        return {
            "kernel": self.kernel.capabilities.name,
            "segments": len(self.segments),
            "tokens": int(self.segments.q_len.sum()),
            "shortest": int(lengths.min()) if len(lengths) else 0,
            "longest": int(lengths.max()) if len(lengths) else 0,
            "predicted_us": None if self.predicted_ns is None else self.predicted_ns / 1e3,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Dispatcher:
    """A kernel that splits segments over other kernels.

    Attributes:
        kernels: in order of preference, which decides where nothing was measured.
        min_lengths: without measurements, a kernel named here is preferred only for segments this long (the root of
            queries x keys).
    """

    kernels: tuple[Kernel, ...]
    table: KernelTable = field(default_factory=lambda: KernelTable())
    min_lengths: Mapping[str, int] = field(default_factory=dict)

    @property
    def capabilities(self) -> CombinedCapabilities:
        """Capabilities of the kernels together."""
        members = tuple(kernel.capabilities for kernel in self.kernels)
        return CombinedCapabilities("dispatcher", devices=(), dtypes=(), max_dim=0, members=members)

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedAttention:
        """Choose kernels for both passes and prepare them. One kernel for everything is returned as it is."""
        forward, backward = (self.choose(segments, shape, backward=backward) for backward in (False, True))
        if len(forward) == len(backward) == 1 and forward[0].kernel is backward[0].kernel:
            return forward[0].kernel.prepare(forward[0].segments, shape)
        shares = [[(choice.kernel, choice.segments) for choice in choices] for choices in (forward, backward)]
        return PreparedSplit.of(shares[0], shares[1], shape)

    def builds(self, shape: AttentionShape, use: KernelUse) -> list[KernelBuild]:
        """Return the builds of all kernels that `choose` may take for the shape; see `SupportsBuilds`."""
        chosen = [kernel for kernel in self._reachable(shape) if isinstance(kernel, SupportsBuilds)]
        return [build for kernel in chosen for build in kernel.builds(shape, use)]

    def explain(self, segments: Segments, shape: AttentionShape) -> list[dict[str, Any]]:
        """Return which kernel gets what and why: one row per pass and kernel, for people and for JSON."""
        return [
            {"pass": name, **choice.explain()}
            for name, backward in (("forward", False), ("backward", True))
            for choice in self.choose(segments, shape, backward=backward)
        ]

    def choose(self, segments: Segments, shape: AttentionShape, *, backward: bool = False) -> list[KernelChoice]:
        """Split segments over the kernels, for one pass.

        Raises:
            SeqloomError: no kernel supports a segment; with the reason of every kernel.
        """
        unsupported = self.capabilities.unsupported(segments, shape)
        if unsupported is not None:
            raise SeqloomError(unsupported)
        able = self._able(shape)
        if not len(segments):
            return [KernelChoice(able[0], segments, None, "nothing to do")]
        measurement = self.table.find(shape)
        if measurement is None:
            return list(self._by_preference(able, segments, "first that takes it; not measured here"))
        times = {one.kernel: one for one in measurement.scaled(shape.heads)}
        timed = [(kernel, times[name]) for kernel in able if (name := kernel.capabilities.name) in times]
        unmeasured = np.ones(len(segments), dtype=bool)
        for kernel, _ in timed:
            unmeasured &= ~kernel.capabilities.supports(segments)
        split = Split(tuple(timed), segments.select(~unmeasured), shape, measurement.copy_gb_s, backward)
        choices = [] if unmeasured.all() else list(split.fastest())
        if unmeasured.any():
            choices += self._by_preference(able, segments.select(unmeasured), "no measured kernel takes it")
        return choices

    def _able(self, shape: AttentionShape) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.capabilities.unsupported_shape(shape) is None]

    def _reachable(self, shape: AttentionShape) -> list[Kernel]:
        """Return the measured kernels, and in order of preference those up to the first that takes every segment."""
        able, measurement = self._able(shape), self.table.find(shape)
        names = set() if measurement is None else {one.kernel for one in measurement.times}
        measured = [kernel for kernel in able if kernel.capabilities.name in names]
        if any(map(self._takes_all, measured)):
            return measured
        last = next((n for n, kernel in enumerate(able) if self._takes_all(kernel)), len(able))
        return [kernel for n, kernel in enumerate(able) if n <= last or kernel in measured]

    def _takes_all(self, kernel: Kernel) -> bool:
        known = kernel.capabilities
        return known.windows and known.offsets and known.name not in self.min_lengths

    def _by_preference(self, able: Sequence[Kernel], segments: Segments, why: str) -> Iterator[KernelChoice]:
        """Give every segment to the first kernel that supports it and is preferred at its length."""
        supported = np.array([kernel.capabilities.supports(segments) for kernel in able])
        squared = segments.q_len * segments.k_len
        floors = np.array([self.min_lengths.get(kernel.capabilities.name, 0) for kernel in able])
        preferred = supported & (squared >= floors[:, None] ** 2)
        # A kernel that is not preferred at this length is still better than none.
        owner = np.where(preferred.any(axis=0), preferred.argmax(axis=0), supported.argmax(axis=0))
        for index in np.unique(owner):
            yield KernelChoice(able[index], _drop_idle_window(segments.select(owner == index)), None, why)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Segments, each supported by one of these kernels, that are to be split over them in one pass."""

    timed: tuple[tuple[Kernel, KernelTimes], ...]
    segments: Segments
    shape: AttentionShape
    copy_gb_s: float
    backward: bool

    def fastest(self) -> Iterator[KernelChoice]:
        """Return the split with the least predicted total. Fewer kernels win ties, then earlier ones."""
        supported = np.array([kernel.capabilities.supports(self.segments) for kernel, _ in self.timed])
        predicted = np.array([times.predict_ns(self.segments, self.backward) for _, times in self.timed])
        costs = np.where(supported, predicted, UNSUPPORTED_NS)
        count = len(self.timed)
        sets = [list(some) for size in range(1, count + 1) for some in combinations(range(count), size)]
        owners = [np.array(some)[costs[some].argmin(axis=0)] for some in sets]
        totals = [sum(self._part_ns(index, owner == index, costs) for index in np.unique(owner)) for owner in owners]
        best = owners[int(np.argmin(totals))]
        single = ", ".join(
            f"{self._name(index)} {totals[index] / 1e3:,.0f} us" for index in range(count) if supported[index].all()
        )
        why = f"least predicted total, {min(totals) / 1e3:,.0f} us" + (f"; alone: {single}" if single else "")
        for index in np.unique(best):
            part = _drop_idle_window(self.segments.select(best == index))
            yield KernelChoice(self.timed[index][0], part, self._part_ns(index, best == index, costs), why)

    def _name(self, index: int) -> str:
        return self.timed[index][0].capabilities.name

    def _part_ns(self, index: int, chosen: np.ndarray, costs: np.ndarray) -> int:
        """Return the time of one kernel with these segments: its call, its copies, the segments."""
        kernel, times = self.timed[index]
        moved = self._copied_bytes(chosen) if kernel.capabilities.copies else 0
        return times.call_ns(self.backward) + round(moved / self.copy_gb_s) + int(costs[index][chosen].sum())

    def _copied_bytes(self, chosen: np.ndarray) -> int:
        """Return the bytes that a kernel which copies reads and writes around its call."""
        part, shape = self.segments.select(chosen), self.shape
        head = shape.dim * shape.dtype.itemsize
        q, kv = int(part.q_len.sum()) * shape.heads * head, 2 * int(part.k_len.sum()) * shape.kv_heads * head
        inputs, results = (3 * q + kv, q + kv) if self.backward else (q + kv, q)
        starts_and_stops = ((part.q_start, part.q_stop), (part.k_start, part.k_stop))
        gathers = not all(np.array_equal(np.sort(start)[1:], np.sort(stop)[:-1]) for start, stop in starts_and_stops)
        return 2 * (inputs * gathers + results * (gathers or not chosen.all()))


def _drop_idle_window(segments: Segments) -> Segments:
    """Drop a window that hides nothing, so that kernels without windows need not know of it."""
    return segments if segments.windowed().any() else replace(segments, window=None)


class _PlacedPart(NamedTuple):
    """Prepared segments of one kernel and their rows."""

    prepared: PreparedAttention
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    in_place: InPlaceAttention | None

    @classmethod
    def of(cls, kernel: Kernel, segments: Segments, shape: AttentionShape) -> _PlacedPart:
        prepared = kernel.prepare(segments, shape)
        queries = device_rows(segments.q_start, segments.q_stop, shape.device)
        keys = device_rows(segments.k_start, segments.k_stop, shape.device)
        return cls(prepared, queries, keys, prepared if isinstance(prepared, InPlaceAttention) else None)


@dataclass(frozen=True, slots=True)
class PreparedSplit:
    """Segments split over several kernels. The first makes the result buffers, the others write rows into them."""

    forward_parts: tuple[_PlacedPart, ...]
    backward_parts: tuple[_PlacedPart, ...]

    @classmethod
    def of(
        cls,
        forward: Sequence[tuple[Kernel, Segments]],
        backward: Sequence[tuple[Kernel, Segments]],
        shape: AttentionShape,
    ) -> PreparedSplit:
        """Prepare the kernels of both passes; segments that a kernel has in both are prepared once."""
        placed: dict[tuple[int, bytes], _PlacedPart] = {}

        def place(shares: Sequence[tuple[Kernel, Segments]]) -> tuple[_PlacedPart, ...]:
            keys = []
            for kernel, part in sorted(shares, key=_most_rows_first):
                keys.append((id(kernel), part.q_start.tobytes()))
                if keys[-1] not in placed:
                    placed[keys[-1]] = _PlacedPart.of(kernel, part, shape)
            return tuple(placed[key] for key in keys)

        return cls(place(forward), place(backward))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        first, *others = self.forward_parts
        out, lse = first.prepared.forward(q, k, v)
        for prepared, queries, _, in_place in others:
            if in_place is not None:
                in_place.forward_into(q, k, v, out, lse)
                continue
            part_out, part_lse = prepared.forward(q, k, v)
            out[queries] = part_out[queries].to(out.dtype)
            lse[:, queries] = part_lse[:, queries]
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        first, *others = self.backward_parts
        gradients = first.prepared.backward(dout, saved)
        for prepared, queries, keys, in_place in others:
            if in_place is not None:
                in_place.backward_into(dout, saved, gradients)
                continue
            results = prepared.backward(dout, saved)
            for buffer, rows, result in zip(gradients, (queries, keys, keys), results, strict=True):
                buffer[rows] = result[rows].to(buffer.dtype)
        return gradients


def _most_rows_first(share: tuple[Kernel, Segments]) -> int:
    """Sort parts by their rows, most first: the results of the first are never copied."""
    return -int(share[1].q_len.sum() + share[1].k_len.sum())


# -- measured times ---------------------------------------------------------------------------------------------------


class TimePoint(NamedTuple):
    """Time of one square segment of `length` queries and keys."""

    length: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Measured times of one kernel.

    Attributes:
        forward_call_ns, backward_call_ns: of a call with next to nothing in it; paid once, however many segments.
        causal, full: squares with a causal mask and without, by ascending length.
    """

    kernel: str
    forward_call_ns: int
    backward_call_ns: int
    causal: tuple[TimePoint, ...]
    full: tuple[TimePoint, ...]

    def __post_init__(self) -> None:
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
        copy_gb_s: GB/s, read and written, of gathering rows of a tensor.
    """

    device: str
    torch: str
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    times: tuple[KernelTimes, ...]
    copy_gb_s: float = DEFAULT_COPY_GB_S

    @property
    def key(self) -> tuple[Any, ...]:
        """Device, torch version and shape: all but the times."""
        return (self.device, self.torch, self.heads, self.kv_heads, self.dim, self.dtype)

    def scaled(self, heads: int) -> tuple[KernelTimes, ...]:
        """Return the times for so many heads: in proportion, except for the cost of a call."""
        ratio = heads / self.heads

        def scale(points: tuple[TimePoint, ...]) -> tuple[TimePoint, ...]:
            return tuple(TimePoint(length, round(fwd * ratio), round(bwd * ratio)) for length, fwd, bwd in points)

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
        group = shape.heads // shape.kv_heads

        def distance(one: Measurement) -> tuple[bool, int, int]:
            ratio = abs(one.heads // one.kv_heads - group)
            return _release(one.torch) != release, ratio, abs(one.heads - shape.heads)

        return min(fitting, key=distance, default=None)

    def merged(self, other: KernelTable) -> KernelTable:
        """Return this table with the measurements that only `other` has."""
        known = {one.key for one in self.measurements}
        return KernelTable((*self.measurements, *(one for one in other.measurements if one.key not in known)))

    def adding(self, measurement: Measurement) -> KernelTable:
        """Return the table with this measurement, in place of an older one of the same device, torch and shape."""
        others = tuple(one for one in self.measurements if one.key != measurement.key)
        return KernelTable((*others, measurement))

    def save(self, path: Path) -> None:
        """Write the table as JSON; create missing folders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> KernelTable:
        """Read a table that `save` wrote."""
        content = read_mapping(path)
        if content.get("format") != FORMAT:
            raise SeqloomError(f"{path}: format {content.get('format')!r}, not {FORMAT}; run seqloom profile again")
        try:
            return cls(tuple(_read_measurement(one) for one in content["measurements"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SeqloomError(f"{path}: not a table of kernel times ({error}); run seqloom profile again") from None


def _read_measurement(content: dict[str, Any]) -> Measurement:
    times = tuple(
        KernelTimes(
            str(one["kernel"]),
            int(one["forward_call_ns"]),
            int(one["backward_call_ns"]),
            tuple(TimePoint(*map(int, point)) for point in one["causal"]),
            tuple(TimePoint(*map(int, point)) for point in one["full"]),
        )
        for one in content["times"]
    )
    heads, kv_heads, dim = (int(content[name]) for name in ("heads", "kv_heads", "dim"))
    if min(heads, kv_heads, dim) < 1:
        raise ValueError(f"{heads} heads, {kv_heads} kv heads, head dim {dim}")
    copy_gb_s = float(content.get("copy_gb_s", DEFAULT_COPY_GB_S))
    if copy_gb_s <= 0:
        raise ValueError(f"copy_gb_s {copy_gb_s}")
    return Measurement(
        str(content["device"]),
        str(content["torch"]),
        heads,
        kv_heads,
        dim,
        str(content["dtype"]),
        times,
        copy_gb_s,
    )


def _release(version: str) -> str:
    """2.11 of 2.11.0+cu128."""
    return ".".join(version.split(".")[:2])


def device_name(device: torch.device) -> str:
    """Return the name a device gives itself: "NVIDIA H200"; for a CPU its architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def built_in_table() -> KernelTable:
    """Return the measurements that come with the package."""
    table = KernelTable()
    for path in sorted((Path(__file__).parent / "measured").glob("*.json")):
        table = table.merged(KernelTable.load(path))
    return table


def default_table_path() -> Path:
    """Return where `seqloom profile` writes its table."""
    return cache_folder() / "kernels.json"


def cache_folder() -> Path:
    """Return the folder of what this machine has measured: the user's cache folder, by the custom of the system."""
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "seqloom"
