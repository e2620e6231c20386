"""How evenly a step's work lies on its ranks, and how much of it communicates: four shares and a time.

    token imbalance       DBR   of what ranks could do while the fullest one works, the part they have no tokens for
    padding               PR    tokens that are computed beyond those of the documents
    attention imbalance   ABR   as DBR, of attention work: squares of lengths
    communication         CR    tokens of documents that are spread over several ranks

An imbalance is 1 - mean / max over all ranks. Of rounds that follow each other the maxima add up, since ranks wait in
every round for the one that has most; of pipelines side by side the largest sum counts, and in it that of the slowest
stage, whose work is in proportion to its layers. Of several steps, the mean. Padding and communication are shares of
all tokens of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan, Work
from seqloom.simulate import predicted_ns


@dataclass(frozen=True, slots=True)
class Balance:
    """Shares between 0 and 1, the number of steps and their mean predicted time in ns."""

    tokens: float
    padding: float
    attention: float
    communication: float
    steps: int
    step_ns: float

    def as_dict(self) -> dict[str, float]:
        """By the names that the field uses, the time in milliseconds."""
        return {
            "dbr": self.tokens,
            "pr": self.padding,
            "abr": self.attention,
            "cr": self.communication,
            "steps": self.steps,
            "mean_step_ms": self.step_ns / 1e6,
        }


def plans_balance(plans: Sequence[Plan], cost: CostModel, step_ns: Sequence[int] | None = None) -> Balance:
    """The figures of several steps.

    Args:
        plans: of the steps, at least one.
        cost: prices them, and knows the granule to which documents are padded.
        step_ns: their predicted times, if they are known.
    """
    times = [predicted_ns(plan, cost) for plan in plans] if step_ns is None else step_ns
    tokens = sum(plan.tokens for plan in plans)
    occupied = sum(int(cost.tokens(np.array(plan.documents)).sum()) for plan in plans)
    held, squares = np.mean([imbalances(plan, cost) for plan in plans], axis=0).tolist()
    return Balance(
        tokens=held,
        padding=1 - tokens / occupied,
        attention=squares,
        communication=sum(map(_communicating, plans)) / tokens,
        steps=len(plans),
        step_ns=sum(times) / len(plans),
    )


def imbalances(plan: Plan, cost: CostModel) -> np.ndarray:
    """float64[2]: imbalance of tokens and of attention work in one step."""
    total, most = np.zeros((2, cost.ranks)), np.zeros(2)
    for pipeline in plan.pipelines:
        paced = np.zeros((len(pipeline.hosts), 2))
        hosts = [pipeline.host_of(stage) for stage in range(len(pipeline.stages))]
        shares = [(part.stop - part.first) / part.of for part in pipeline.parts]
        for current in pipeline.rounds:
            for host, share, work in zip(hosts, shares, current.work, strict=True):
                loads = share * _on_ranks(work, cost)
                total += loads
                paced[host] += loads.max(axis=1)
        most = np.maximum(most, paced.max(axis=0))
    return 1 - total.mean(axis=1) / most


def _communicating(plan: Plan) -> int:
    """Tokens of documents in groups of several ranks."""
    rounds = (current for pipeline in plan.pipelines for current in pipeline.rounds)
    return sum(group.tokens for current in rounds for group in current.work[0].groups if group.degree > 1)


def _on_ranks(work: Work, cost: CostModel) -> np.ndarray:
    """float64[2, ranks]: tokens in linear layers and attention work of one stage's share of a round.

    A group's ranks share both evenly: Ulysses by heads, rings in zigzag.
    """
    loads = np.zeros((2, cost.ranks))
    for group in work.groups:
        occupied = sum(-(-stop // cost.granule) - -(-start // cost.granule) for _, start, stop in group.spans)
        squares = sum(stop**2 - start**2 for _, start, stop in group.spans)
        loads[:, list(group.ranks)] += np.array([[occupied * cost.granule], [squares]]) / group.degree
    if work.linear is not None:
        loads[0] = np.bincount(work.linear.rank, work.linear.sizes, cost.ranks)
    return loads
