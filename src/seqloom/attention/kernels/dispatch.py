"""Several kernels behind the interface of one: segments go where they are predicted to finish soonest.

The prediction is a sum: every kernel that is used costs a call, every segment costs its time on its kernel. So once
it is known which kernels take part, each segment goes to the fastest of them; the few sets of kernels are all tried.
Forward and backward are chosen apart: all a backward needs of its forward is the output and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from seqloom.attention.kernels.kernel import Ability, Kernel, Prepared, Shape, Warmable
from seqloom.attention.kernels.parts import PreparedParts
from seqloom.attention.kernels.tables import KernelTable, Times
from seqloom.attention.segments import Segments
from seqloom.errors import SeqloomError

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

    def refusal(self, segments: Segments, shape: Shape) -> str | None:
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

    def prepare(self, segments: Segments, shape: Shape) -> Prepared:
        """Choose kernels for both passes and prepare them. One kernel for everything is returned as it is."""
        forward, backward = (self.choose(segments, shape, backward=backward) for backward in (False, True))
        if len(forward) == len(backward) == 1 and forward[0].kernel is backward[0].kernel:
            return forward[0].kernel.prepare(forward[0].segments, shape)
        shares = [[(part.kernel, part.segments) for part in parts] for parts in (forward, backward)]
        return PreparedParts.of(shares[0], shares[1], shape)

    def warm_up(
        self,
        shape: Shape,
        longest: int,
        *,
        tokens: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> int:
        """See `Warmable`: all kernels that take the shape, one after the other."""
        able = [kernel for kernel in self.kernels if kernel.ability.refuse_shape(shape) is None]
        warmable = [kernel for kernel in able if isinstance(kernel, Warmable)]
        return sum(kernel.warm_up(shape, longest, tokens=tokens, report=report) for kernel in warmable)

    def explain(self, segments: Segments, shape: Shape) -> list[dict[str, Any]]:
        """Say which kernel gets what and why: one row per pass and kernel, for people and for JSON."""
        return [
            {"pass": name, **part.explain()}
            for name, backward in (("forward", False), ("backward", True))
            for part in self.choose(segments, shape, backward=backward)
        ]

    def choose(self, segments: Segments, shape: Shape, *, backward: bool = False) -> list[Part]:
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
