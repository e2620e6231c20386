"""Before the first step: all that attention builds or compiles for shapes it has not met yet.

On a GPU a new shape holds up a step by about 0.1 s, and with it every rank that waits for this one. What the first plan
spreads its documents over is taken for what later ones will do; another degree is built when it comes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from seqloom.attention import warm_up_attention
from seqloom.plan import Plan
from seqloom.runtime import Network

QUARTERS = 4
"""How often progress is told, for every degree."""


def warm_up(
    network: Network, plan: Plan, longest: int, dtype: torch.dtype, device: torch.device, note: Callable[[str], None]
) -> int:
    """Build what the attention of a model can need. Every rank does it for itself.

    Args:
        network: whose layers call attention.
        plan: of the first step; its Ulysses degrees decide how many heads a rank has.
        longest: tokens of a document.
        dtype: that layers compute in.
        device: where they run; on a CPU there is nothing to build.
        note: is told how far it is.

    Returns:
        Number of shapes.
    """
    groups = [group for pipeline in plan.pipelines for each in pipeline.rounds for w in each.work for group in w.groups]
    capacity = max(tokens for _, tokens in plan.limits.capacity)
    built = 0
    for degree in sorted({group.ulysses for group in groups}):
        for heads, kv_heads, dim, window, scale in network.calls:
            built += warm_up_attention(
                heads,
                kv_heads,
                dim,
                dtype,
                device,
                longest=longest if window is None else min(longest, window),
                tokens=degree * capacity,
                scale=scale,
                ulysses=(degree,),
                report=lambda done, total, degree=degree: _tell(note, degree, done, total),
            )
    return built


def _tell(note: Callable[[str], None], degree: int, done: int, total: int) -> None:
    if total >= QUARTERS and done % (total // QUARTERS) == 0:
        note(f"attention over {degree} rank{'s' * (degree > 1)}: {done} of {total} shapes built")
