"""One plan for all ranks: one of them plans ahead, the plan is broadcast, and every rank checks its hash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqloom.comm.broadcast import broadcast_bytes
from seqloom.comm.transport import Transport
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.ahead import PlanAhead, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlans:
    """The plans of a run, as one rank sees them.

    Attributes:
        transport: this rank's.
        ahead: who plans, on the root; None on the others.
        device: where the transport's tensors live.
        root: the rank that plans.
    """

    transport: Transport
    ahead: PlanAhead | None
    device: torch.device | str = "cpu"
    root: int = 0

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a coming step made; nothing happens on other ranks than the root."""
        if self.ahead is not None:
            self.ahead.submit(step, lengths)

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, the same on all ranks; all ranks call it.

        The root decides, also whether the static plan stands in. Times are those of the root.

        Raises:
            SeqloomError: on every rank, when the ranks do not hold the same plan, or not one for these lengths.
        """
        payload = None if self.ahead is None else _answer(self.ahead, step, lengths)
        taken = _decode(broadcast_bytes(self.transport, payload, root=self.root, device=self.device))
        self._check(step, lengths, taken)
        return taken

    def hand_out(self, plans: Sequence[Plan] | None) -> list[Plan]:
        """Return plans of the root on all ranks, which all call it; others than the root give None."""
        payload = None if plans is None else json.dumps([plan.to_json() for plan in plans]).encode()
        texts = json.loads(broadcast_bytes(self.transport, payload, root=self.root, device=self.device))
        return [Plan.from_json(text) for text in texts]

    def _check(self, step: int, lengths: Sequence[int] | np.ndarray, taken: StepPlan) -> None:
        """Compare step, plan and lengths over all ranks, before anybody acts on them."""
        own = [taken.step == step, list(taken.plan.documents) == np.asarray(lengths).tolist()]
        digest = int(taken.plan.hash[:15], 16)
        mine = torch.tensor([*map(int, own), digest, step], dtype=torch.int64, device=self.device)
        everyone = torch.empty(self.transport.ranks * len(mine), dtype=torch.int64, device=self.device)
        self.transport.all_gather(everyone, mine, range(self.transport.ranks))
        rows = everyone.view(-1, len(mine)).tolist()
        for rank, (same_step, same_lengths, its_digest, its_step) in enumerate(rows):
            if not same_step:
                raise SeqloomError(f"rank {rank} is at step {its_step}, the plan is for step {taken.step}; start again")
            if not same_lengths:
                raise SeqloomError(
                    f"step {step}: the batch of rank {rank} has other lengths than the plan; "
                    "all ranks must read the same data with the same sampler state"
                )
            if its_digest != rows[0][2]:
                raise SeqloomError(
                    f"step {step}: rank {rank} holds another plan than rank 0; run one version on all ranks"
                )


def _answer(ahead: PlanAhead, step: int, lengths: Sequence[int] | np.ndarray) -> bytes:
    """The root's plan, or why there is none: then all ranks refuse together and nobody waits."""
    try:
        taken = ahead.take(step, lengths)
    except SeqloomError as error:
        return json.dumps({"step": step, "error": str(error)}).encode()
    names = ("step", "plan_ns", "wait_ns", "fallback", "bound_ns", "idle_share")
    head = {name: getattr(taken, name) for name in names}
    return (json.dumps(head) + "\n" + taken.plan.to_json()).encode()


def _decode(payload: bytes) -> StepPlan:
    head, _, plan = payload.decode().partition("\n")
    content = json.loads(head)
    if "error" in content:
        raise SeqloomError(f"step {content['step']} cannot be planned: {content['error']}")
    return StepPlan(plan=Plan.from_json(plan), **content)
