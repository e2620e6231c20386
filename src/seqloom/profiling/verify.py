"""Shows that a plan does not change the result: one batch in one process, then under several plans.

Ranks are threads that obey NCCL's rules. Parameters are replicated, or under free sharding brought where the plan
computes. Everything is compared with one process that runs the same batch as a single group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqloom.cost import CostModel
from seqloom.data import Batch, Source, rank_rows
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import Transport, run_ranks
from seqloom.engine import bind_plan, run_step
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import ReplicatedParameters, ReshardingParameters
from seqloom.plan import Plan, Sharding
from seqloom.planners import make_plan
from seqloom.planners.registry import PlannerChoice
from seqloom.train.model import made_ready

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference of loss, norm and gradients that rounding explains."""


@dataclass(frozen=True, slots=True)
class Verified:
    """One plan beside one process.

    Attributes:
        planner: who made the plan.
        plan_hash: its hash.
        rounds, groups: its size.
        loss, grad_norm: under the plan.
        max_relative_gradient_difference: over parameter tensors, norm of the difference / norm of the gradient.
        passed: loss, norm and all gradients are within the tolerance.
    """

    planner: str
    plan_hash: str
    rounds: int
    groups: int
    loss: float
    grad_norm: float
    max_relative_gradient_difference: float
    passed: bool


class Outcome:
    """Loss, gradient norm and gradients of a step."""

    __slots__ = ("gradients", "loss", "norm")

    def __init__(self, loss: float, norm: float, gradients: dict[str, torch.Tensor]) -> None:
        """Keep the values."""
        self.loss, self.norm, self.gradients = loss, norm, gradients


def verify(
    spec: ModelSpec,
    source: Source,
    batch: Batch,
    cost: CostModel,
    planners: Sequence[str | PlannerChoice],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    build: Callable[[], ModelAdapter] | None = None,
) -> Iterator[Verified]:
    """Run a batch in one process, then under a plan of every planner, and yield how they compare.

    Args:
        spec: shapes of the model.
        source: where the batch's documents are.
        batch: a step's.
        cost: prices the plans; its ranks are the threads that run them.
        planners: names, see `make_plan`, or planners with their options.
        dtype: float64 or float32.
        seed: of parameters and planners.
        build: makes the model in `dtype`, with the same values every time; None: the reference model.
    """
    make = build or (lambda: ModelAdapter.of(Transformer(spec, seed=seed, dtype=dtype)))
    alone = CostModel(Cluster.parse("1x1xCPU"), spec, max_length=int(batch.lengths.max()))
    truth = run_plan(make_plan("static:1", batch.lengths, alone), source, batch, make)
    for each in planners:
        chosen = PlannerChoice(each, seed=seed) if isinstance(each, str) else each
        plan = chosen.plan(batch.lengths, cost)
        yield _compared(str(chosen), plan, run_plan(plan, source, batch, make), truth, TOLERANCE[dtype])


def run_plan(plan: Plan, source: Source, batch: Batch, build: Callable[[], ModelAdapter]) -> Outcome:
    """Run one step of a plan on threads, with a model each, and return what the first rank holds in the end."""
    adapters = [build() for _ in range(plan.limits.ranks)]  # before: libraries draw and load for one thread at a time

    def body(transport: Transport) -> Outcome | None:
        kind = ReshardingParameters if plan.sharding == Sharding.FREE else ReplicatedParameters
        parameters = kind(made_ready(adapters[transport.rank]), transport)
        bound = bind_plan(plan, transport)
        result = run_step(bound, parameters, lambda context: rank_rows(source, context, batch), batch.valid_tokens)
        gradients = {name: each for name, each in parameters.full_gradients() if transport.rank == 0}
        return None if transport.rank else Outcome(result.loss, result.gradient_norm, gradients)

    first = run_ranks(plan.limits.ranks, body, strict=True, timeout_s=600)[0]
    assert first is not None
    return first


def _compared(name: str, plan: Plan, found: Outcome, truth: Outcome, tolerance: float) -> Verified:
    """Compare with one process. A parameter without gradient must have none under the plan."""
    furthest = max(_difference(found.gradients[key], truth.gradients[key]) for key in truth.gradients)
    others = (_relative(found.loss, truth.loss), _relative(found.norm, truth.norm))
    rounds = [current for pipeline in plan.pipelines for current in pipeline.rounds]
    return Verified(
        name,
        plan.hash,
        len(rounds),
        sum(len(current.groups) for current in rounds),
        found.loss,
        found.norm,
        furthest,
        bool(max(furthest, *others) <= tolerance),
    )


def _difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference / norm of the truth."""
    norm = float(truth.double().norm())
    difference = float((found.double() - truth.double()).norm())
    return difference / norm if norm else (0.0 if difference == 0 else float(np.inf))


def _relative(found: float, truth: float) -> float:
    return abs(found - truth) / abs(truth) if truth else abs(found)
