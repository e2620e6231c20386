"""Segments over several kernels, as one prepared attention: they share the buffers of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqloom.attention.kernels.kernel import Gradients, Kernel, Prepared, Saved, Shape, Writer, rows_of
from seqloom.attention.segments import Segments

Share = tuple[Kernel, Segments]


class Placed(NamedTuple):
    """A prepared part and where its rows are."""

    prepared: Prepared
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    writer: Writer | None

    @classmethod
    def of(cls, kernel: Kernel, segments: Segments, shape: Shape) -> Placed:
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
    def of(cls, forward: Sequence[Share], backward: Sequence[Share], shape: Shape) -> PreparedParts:
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
