"""The plans of a run's steps: rank 0 has them made ahead and broadcasts each at its step's begin; all ranks compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch

from seqloom.cost.feedback import Factors
from seqloom.dist import Transport
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.plan_ahead import PlanAhead, StepPlan


class StepPlanner(Protocol):
    """Makes the plans of steps; see `PlanAhead`."""

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a coming step made; returns at once."""
        ...

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, waiting for it if need be."""
        ...


@dataclass(slots=True, eq=False)
class PlanBroadcast:
    """The plans of a run, as one rank sees them: rank 0 has them made ahead and broadcasts each when its step begins.

    `ahead` makes the plans, on rank 0; None on others.
    """

    transport: Transport
    ahead: StepPlanner | None
    device: torch.device | str = "cpu"
    _hash_compared: bool = field(default=False, init=False)  # every rank has hashed a plan as it reads it

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a coming step made; does nothing on other ranks than 0."""
        if self.ahead is not None:
            self.ahead.submit(step, lengths)

    def use_factors(self, factors: Factors, speeds: Sequence[float] = (), error: float | None = None) -> None:
        """Have plans submitted from now on priced by other factors and speeds; does nothing on other ranks than 0.

        `error` of predictions is what a plan must gain to be used, see `PlanAhead`.
        """
        if isinstance(self.ahead, PlanAhead):
            self.ahead.factors, self.ahead.speeds, self.ahead.error = factors, tuple(speeds), error

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, the same on all ranks; all ranks call it.

        Rank 0 decides, also whether the fallback planner is used. Times are those of rank 0. Every rank raises when the
        plan is not one for this step and these lengths on all ranks, or when they read the first plan differently.
        """
        content: Any = None
        if self.ahead is not None:
            try:
                step_plan = self.ahead.take(step, lengths)
                content = {each.name: getattr(step_plan, each.name) for each in fields(step_plan) if each.init}
            except SeqloomError as error:  # all ranks refuse together and none waits
                content = {"error": str(error)}
        content = self._broadcast(content)
        if "error" in content:
            raise SeqloomError(f"step {step} cannot be planned: {content['error']}")
        step_plan = StepPlan(**content)
        self.check_all_ranks(step, lengths, step_plan)
        return step_plan

    def broadcast(self, plans: Sequence[Plan] | None) -> list[Plan]:
        """Return the plans of rank 0 on all ranks, which all call it; others than rank 0 give None."""
        texts = self._broadcast(None if plans is None else [plan.to_json() for plan in plans])
        return [Plan.from_json(text) for text in texts]

    def _broadcast(self, content: Any) -> Any:
        """Return what rank 0 gives, which JSON can hold; others give None."""
        payload = None if content is None else json.dumps(content).encode()
        return json.loads(self.transport.broadcast(payload))

    def check_all_ranks(self, step: int, lengths: Sequence[int] | np.ndarray, step_plan: StepPlan) -> None:
        """Compare step, lengths, factors, speeds and, of the first plan, the hash over all ranks, before any acts.

        All ranks get the same text. They hash what they have read of the first one, to notice a rank of another
        version; hashing takes as long as writing the plan to JSON.
        """
        plan = step_plan.plan
        matches = [step_plan.step == step, list(plan.documents) == np.asarray(lengths).tolist()]
        digest = step_plan.plan_hash if self._hash_compared else plan.hash
        self._hash_compared = True
        factors = Factors(*step_plan.factors).digest_with(step_plan.speeds)
        mine = [*map(int, matches), int(digest[:15], 16), int(factors or "0", 16), step]
        rows = gather_vectors(torch.tensor(mine, dtype=torch.int64, device=self.device), self.transport).tolist()
        for rank, (same_step, same_lengths, *digests, its_step) in enumerate(rows):
            if not same_step:
                its_plan = f"the plan is for step {step_plan.step}"
                raise SeqloomError(f"rank {rank} is at step {its_step}, {its_plan}; start again")
            if not same_lengths:
                raise SeqloomError(
                    f"step {step}: the batch of rank {rank} has other lengths than the plan; "
                    "all ranks must read the same data with the same sampler state"
                )
            if digests != rows[0][2:4]:
                raise SeqloomError(
                    f"step {step}: rank {rank} holds another plan than rank 0; run one version on all ranks"
                )


def gather_vectors(mine: torch.Tensor, transport: Transport) -> torch.Tensor:
    """All-gather a vector of every rank: [n] -> [ranks, n]."""
    everyone = mine.new_empty(transport.ranks * len(mine))
    transport.all_gather(everyone, mine, range(transport.ranks))
    return everyone.view(-1, len(mine))
