"""Segments over several kernels, as one prepared attention: they share the buffers of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.cpu_flash import CpuFlash
from seqloom.attention.kernels.cudnn import Cudnn
from seqloom.attention.kernels.flash import FlashAttn2, FlashAttn3, Varlen, installed
from seqloom.attention.kernels.interface import (
    Ability,
    AttentionShape,
    Gradients,
    Kernel,
    Prepared,
    Saved,
    Warmable,
    Writer,
    rows_of,
)
from seqloom.attention.kernels.reference import Reference
from seqloom.attention.kernels.tables import KernelTable, Times, built_in, default_path
from seqloom.attention.kernels.triton_attention import TritonSegments
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError, unknown_name

Share = tuple[Kernel, Segments]


class Placed(NamedTuple):
    """A prepared part and where its rows are."""

    prepared: Prepared
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    writer: Writer | None

    @classmethod
    def of(cls, kernel: Kernel, segments: Segments, shape: AttentionShape) -> Placed:
        """Prepare a part."""
        prepared = kernel.prepare(segments, shape)
        queries = rows_of(segments.q_start, segments.q_stop, shape.device)
        keys = rows_of(segments.k_start, segments.k_stop, shape.device)
        return cls(prepared, queries, keys, prepared if isinstance(prepared, Writer) else None)


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """The parts of both passes. The first makes the buffers, the others put their rows into them, in order."""

    forward_parts: tuple[Placed, ...]
    backward_parts: tuple[Placed, ...]

    @classmethod
    def of(cls, forward: Sequence[Share], backward: Sequence[Share], shape: AttentionShape) -> PreparedParts:
        """Prepare the shares of both passes; a share of both is prepared once."""
        made: dict[tuple[int, bytes], Placed] = {}

        def place(shares: Sequence[Share]) -> tuple[Placed, ...]:
            placed = []
            for kernel, segments in sorted(shares, key=_order):
                key = (id(kernel), segments.q_start.tobytes())
                if key not in made:
                    made[key] = Placed.of(kernel, segments, shape)
                placed.append(made[key])
            return tuple(placed)

        return cls(place(forward), place(backward))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        first, *others = self.forward_parts
        out, lse = first.prepared.forward(q, k, v)
        for part in others:
            if part.writer is not None:
                part.writer.forward_into(q, k, v, out, lse)
                continue
            result, sums = part.prepared.forward(q, k, v)
            out[part.queries] = result[part.queries].to(out.dtype)
            lse[:, part.queries] = sums[:, part.queries]
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`."""
        first, *others = self.backward_parts
        gradients = first.prepared.backward(dout, saved)
        for part in others:
            if part.writer is not None:
                part.writer.backward_into(dout, saved, gradients)
                continue
            results = part.prepared.backward(dout, saved)
            places = (part.queries, part.keys, part.keys)
            for buffer, where, result in zip(gradients, places, results, strict=True):
                buffer[where] = result[where].to(buffer.dtype)
        return gradients


def _order(share: Share) -> tuple[bool, int]:
    """Kernels that spill come first, then the part with most rows, which others need not copy."""
    kernel, segments = share
    return not kernel.ability.spills, -int(segments.q_len.sum() + segments.k_len.sum())


# ---- merged: attention.kernels.dispatch
# Several kernels behind the interface of one: segments go where they are predicted to finish soonest.
#
# The prediction is a sum: every kernel that is used costs a call, every segment costs its time on its kernel. So
# once
# it is known which kernels take part, each segment goes to the fastest of them; the few sets of kernels are all
# tried.
# Forward and backward are chosen apart: all a backward needs of its forward is the output and the log-sum-exp.


NEVER = 2**40
"""Nanoseconds of a segment on a kernel that refuses it; far above any, and a sum of many still fits an integer."""


@dataclass(frozen=True, slots=True)
class AnyOf(Ability):
    """What several kernels can do together, segment by segment."""

    members: tuple[Ability, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Ability], name: str = "dispatcher") -> AnyOf:
        """Join abilities; the single fields say what at least one member can do."""
        return cls(
            name=name,
            devices=tuple(dict.fromkeys(device for one in members for device in one.devices)),
            dtypes=tuple(dict.fromkeys(dtype for one in members for dtype in one.dtypes)),
            max_dim=max(one.max_dim for one in members),
            dim_multiple=min(one.dim_multiple for one in members),
            grouped=any(one.grouped for one in members),
            windows=any(one.windows for one in members),
            offsets=any(one.offsets for one in members),
            prefixes=any(one.prefixes for one in members),
            tested=all(one.tested for one in members),
            members=tuple(members),
        )

    def refusal(self, segments: Segments, shape: AttentionShape) -> str | None:
        """Say why some segment is taken by no member, with the reason of every member; None when all are taken."""
        able = [one for one in self.members if one.refuse_shape(shape) is None]
        taken = np.zeros(len(segments), dtype=bool)
        for one in able:
            taken |= one.takes(segments)
        if able and taken.all():
            return None
        left = segments.select(~taken)
        reasons = [one.refuse_shape(shape) or one.refuse_segments(left) for one in self.members]
        return "no kernel can run this attention:\n  " + "\n  ".join(reason for reason in reasons if reason)


class Part(NamedTuple):
    """Segments for one kernel."""

    kernel: Kernel
    segments: Segments
    predicted_ns: int | None
    """The call included; None where nothing was measured."""
    why: str

    def explain(self) -> dict[str, Any]:
        """One row for people and for JSON."""
        lengths = np.maximum(self.segments.q_len, self.segments.k_len)
        return {
            "kernel": self.kernel.ability.name,
            "segments": len(self.segments),
            "tokens": int(self.segments.q_len.sum()),
            "shortest": int(lengths.min()) if len(lengths) else 0,
            "longest": int(lengths.max()) if len(lengths) else 0,
            "predicted_us": None if self.predicted_ns is None else self.predicted_ns / 1e3,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Dispatcher:
    """A kernel that hands segments on to others.

    Attributes:
        kernels: in order of preference, which decides where nothing was measured.
        table: measured times.
        at_least: without measurements, a kernel named here is preferred only for segments this long (the root of
            queries x keys).
    """

    kernels: tuple[Kernel, ...]
    table: KernelTable = field(default_factory=KernelTable)
    at_least: Mapping[str, int] = field(default_factory=dict)

    @property
    def ability(self) -> AnyOf:
        """What the kernels can do together."""
        return AnyOf.of([kernel.ability for kernel in self.kernels])

    def prepare(self, segments: Segments, shape: AttentionShape) -> Prepared:
        """Choose kernels for both passes and prepare them. One kernel for everything is returned as it is."""
        forward, backward = (self.choose(segments, shape, backward=backward) for backward in (False, True))
        if len(forward) == len(backward) == 1 and forward[0].kernel is backward[0].kernel:
            return forward[0].kernel.prepare(forward[0].segments, shape)
        shares = [[(part.kernel, part.segments) for part in parts] for parts in (forward, backward)]
        return PreparedParts.of(shares[0], shares[1], shape)

    def warm_up(
        self,
        shape: AttentionShape,
        longest: int,
        *,
        tokens: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> int:
        """See `Warmable`: all kernels that take the shape, one after the other."""
        able = [kernel for kernel in self.kernels if kernel.ability.refuse_shape(shape) is None]
        warmable = [kernel for kernel in able if isinstance(kernel, Warmable)]
        return sum(kernel.warm_up(shape, longest, tokens=tokens, report=report) for kernel in warmable)

    def explain(self, segments: Segments, shape: AttentionShape) -> list[dict[str, Any]]:
        """Say which kernel gets what and why: one row per pass and kernel, for people and for JSON."""
        return [
            {"pass": name, **part.explain()}
            for name, backward in (("forward", False), ("backward", True))
            for part in self.choose(segments, shape, backward=backward)
        ]

    def choose(self, segments: Segments, shape: AttentionShape, *, backward: bool = False) -> list[Part]:
        """Split segments over the kernels, for one pass.

        Raises:
            SeqloomError: when a segment can be taken by no kernel, with the reason of every one.
        """
        refusal = self.ability.refusal(segments, shape)
        if refusal is not None:
            raise SeqloomError(refusal)
        able = [kernel for kernel in self.kernels if kernel.ability.refuse_shape(shape) is None]
        if not len(segments):
            return [Part(able[0], segments, None, "nothing to do")]
        takes = np.array([kernel.ability.takes(segments) for kernel in able])
        measurement = self.table.find(shape)
        if measurement is None:
            return list(self._by_preference(able, takes, segments, "first that takes it; not measured here"))
        times = {one.kernel: one for one in measurement.scaled(shape.heads)}
        timed = [(kernel, times[kernel.ability.name]) for kernel in able if kernel.ability.name in times]
        left = np.ones(len(segments), dtype=bool)
        for kernel, _ in timed:
            left &= ~kernel.ability.takes(segments)
        parts = [] if left.all() else list(_soonest(timed, segments.select(~left), backward))
        if left.any():
            parts += self._by_preference(able, takes[:, left], segments.select(left), "no measured kernel takes it")
        return parts

    def _by_preference(self, able: Sequence[Kernel], takes: np.ndarray, segments: Segments, why: str) -> Iterator[Part]:
        """Give every segment to the first kernel that takes it and is preferred at its length."""
        squared = segments.q_len * segments.k_len
        floors = np.array([self.at_least.get(kernel.ability.name, 0) for kernel in able])
        preferred = takes & (squared >= floors[:, None] ** 2)
        # A kernel that is not preferred at this length is still better than none.
        owner = np.where(preferred.any(axis=0), preferred.argmax(axis=0), takes.argmax(axis=0))
        for index in np.unique(owner):
            yield Part(able[index], _plain(segments.select(owner == index)), None, why)


def _soonest(timed: Sequence[tuple[Kernel, Times]], segments: Segments, backward: bool) -> Iterator[Part]:
    """Split segments so that the predicted total is least. Fewer kernels win ties, then earlier ones.

    Every segment is taken by one of the kernels.
    """
    takes = np.array([kernel.ability.takes(segments) for kernel, _ in timed])
    costs = np.where(takes, np.array([times.predict_ns(segments, backward) for _, times in timed]), NEVER)
    calls = np.array([times.call_ns(backward) for _, times in timed])
    sets = [list(some) for size in range(1, len(timed) + 1) for some in combinations(range(len(timed)), size)]
    totals = [int(calls[some].sum() + costs[some].min(axis=0).sum()) for some in sets]
    best = sets[int(np.argmin(totals))]
    owner = np.array(best)[costs[best].argmin(axis=0)]
    alone = {index: int(calls[index] + costs[index].sum()) for index in range(len(timed)) if takes[index].all()}
    why = _why({timed[index][0].ability.name: ns for index, ns in alone.items()}, min(totals))
    for index in np.unique(owner):
        kernel, times = timed[index]
        some = segments.select(owner == index)
        yield Part(kernel, _plain(some), times.call_ns(backward) + int(times.predict_ns(some, backward).sum()), why)


def _why(alone_ns: Mapping[str, int], total_ns: int) -> str:
    """least predicted total, 812 us; alone: varlen 1,020 us, triton 990 us."""
    alone = ", ".join(f"{name} {ns / 1e3:,.0f} us" for name, ns in alone_ns.items())
    return f"least predicted total, {total_ns / 1e3:,.0f} us" + (f"; alone: {alone}" if alone else "")


def _plain(segments: Segments) -> Segments:
    """Drop a window that hides nothing, so that kernels without windows need not know of it."""
    return segments if segments.windowed().any() else replace(segments, window=None)


# ---- merged: attention.kernels.registry
# All kernels by name, and the dispatcher of a device.


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
        raise unknown_name("kernel", name, ENTRIES)
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
