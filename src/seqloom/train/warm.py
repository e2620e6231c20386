"""Before the first step: all that attention builds for shapes it has not met yet, and a rehearsal of every strategy.

On a GPU a new shape holds up a step by about 0.1 s, and with it every rank that waits for this one. What the first plan
and the rehearsed ones spread their documents over is taken for what later ones will do; another degree is built when
it comes. A rehearsal is a whole step of next to no tokens without an update: from then on all lanes and communicators
of a strategy are there, and what its parameters' moves need to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from seqloom.attention import warm_up_attention
from seqloom.comm import Context
from seqloom.plan import Plan
from seqloom.runtime import BoundPlan, Network, Parameters, run_step

QUARTERS = 4
"""How often progress is told, for every degree."""


def warm_up(
    network: Network,
    plans: Sequence[Plan],
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None],
) -> int:
    """Build what the attention of a model can need. Every rank does it for itself.

    Args:
        network: whose layers call attention.
        plans: of the first step and of rehearsals; their Ulysses degrees decide how many heads a rank has.
        longest: tokens of a document.
        dtype: that layers compute in.
        device: where they run; on a CPU there is nothing to build.
        note: is told how far it is.

    Returns:
        Number of shapes.
    """
    capacity = max(tokens for plan in plans for _, tokens in plan.limits.capacity)
    built = 0
    for degree in sorted({degree for plan in plans for degree in _degrees(plan)}):
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


def rehearse(bound: BoundPlan, parameters: Parameters) -> None:
    """Run a plan on made-up tokens and forget its gradients. All ranks call it."""

    def rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(context.tokens, dtype=torch.int64, device=bound.device)
        return ids, ids

    run_step(bound, parameters, rows, sum(bound.plan.documents))
    parameters.clear()


def _degrees(plan: Plan) -> Iterator[int]:
    for line in plan.pipelines:
        yield from (group.ulysses for each in line.rounds for work in each.work for group in work.groups)


def _tell(note: Callable[[str], None], degree: int, done: int, total: int) -> None:
    if total >= QUARTERS and done % (total // QUARTERS) == 0:
        note(f"attention over {degree} rank{'s' * (degree > 1)}: {done} of {total} shapes built")
