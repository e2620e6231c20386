"""How evenly a step's work lies on its ranks, and how much of it communicates: four shares and a time.

    token imbalance       DBR   of what ranks could do while the fullest one works, the part they have no tokens for
    padding               PR    tokens that are computed beyond those of the documents
    attention imbalance   ABR   as DBR, of attention work: squares of lengths
    communication         CR    tokens of documents that are spread over several ranks

An imbalance is 1 - mean / max over ranks, of rounds that follow each other 1 - sum of means / sum of maxima: ranks
wait in every round for the one that has most. Of several steps, the mean over steps. Padding and communication are
shares of all tokens of all steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan, Stage, Work
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

    Ranks are compared inside a stage, round by round: stages of a pipeline have other layers, not fewer tokens.

    Args:
        plans: of the steps, at least one.
        cost: prices them, and knows the granule to which documents are padded.
        step_ns: their predicted times, if they are known.
    """
    times = [predicted_ns(plan, cost) for plan in plans] if step_ns is None else step_ns
    loads = [[_on_ranks(*each, cost) for each in _works(plan)] for plan in plans]
    tokens = sum(plan.tokens for plan in plans)
    occupied = sum(int(cost.tokens(np.array(plan.documents)).sum()) for plan in plans)
    return Balance(
        tokens=sum(imbalance(held for held, _ in rounds) for rounds in loads) / len(plans),
        padding=1 - tokens / occupied,
        attention=sum(imbalance(squares for _, squares in rounds) for rounds in loads) / len(plans),
        communication=sum(map(_communicating, plans)) / tokens,
        steps=len(plans),
        step_ns=sum(times) / len(plans),
    )


def _works(plan: Plan) -> Iterator[tuple[Stage, Work]]:
    """Every stage's share of every round."""
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            yield from zip(pipeline.stages, current.work, strict=True)


def _communicating(plan: Plan) -> int:
    """Tokens of documents in groups of several ranks."""
    rounds = (current for pipeline in plan.pipelines for current in pipeline.rounds)
    return sum(group.tokens for current in rounds for group in current.work[0].groups if group.degree > 1)


def imbalance(rounds: Iterable[np.ndarray]) -> float:
    """1 - sum of means / sum of maxima, over what ranks have in every round, float64[ranks] each; 0 if all is empty."""
    means, most = 0.0, 0.0
    for loads in rounds:
        means += float(loads.mean())
        most += float(loads.max())
    return 1 - means / most if most else 0.0


def _on_ranks(stage: Stage, work: Work, cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """(float64[k] tokens in linear layers, float64[k] attention work) on the k ranks of a stage in a round.

    A group's ranks share both evenly: Ulysses by heads, rings in zigzag.
    """
    tokens, squares = np.zeros(cost.ranks), np.zeros(cost.ranks)
    for group in work.groups:
        ranks = list(group.ranks)
        occupied = sum(-(-stop // cost.granule) - -(-start // cost.granule) for _, start, stop in group.spans)
        tokens[ranks] += occupied * cost.granule / group.degree
        squares[ranks] += sum(stop**2 - start**2 for _, start, stop in group.spans) / group.degree
    if work.linear is not None:
        tokens = np.bincount(work.linear.rank, work.linear.sizes, cost.ranks).astype(np.float64)
    own = list(stage.ranks)
    return tokens[own], squares[own]
