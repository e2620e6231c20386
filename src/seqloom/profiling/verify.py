"""What `seqloom verify` compares: loss, gradient norm and every gradient of one batch under plans and in one process.

The ranks of a plan are threads that obey NCCL's rules. Parameters are replicated, or under free sharding moved to where
the plan computes. The reference is one process that runs the batch as a single group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

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
from seqloom.train.model import prepare_layers

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference of loss, norm and gradients that rounding explains."""


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """One plan beside one process; loss and norm are those under the plan."""

    planner: str
    plan_hash: str
    rounds: int
    groups: int
    loss: float
    grad_norm: float
    max_relative_gradient_difference: float  # over parameter tensors, norm of the difference / norm of the gradient
    passed: bool  # loss, norm and all gradients are within the tolerance


class StepOutcome(NamedTuple):
    """Loss, gradient norm and gradients of a step."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]


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
) -> Iterator[PlanComparison]:
    """Run a batch in one process, then under a plan of every planner, and yield how they compare.

    The ranks of `cost` are the threads that run a plan. `build` builds the model in `dtype` (float64 or float32) with
    the same values every time; None: the reference model of `spec` and `seed`.
    """
    build = build or (lambda: ModelAdapter.of(Transformer(spec, seed=seed, dtype=dtype)))
    one_rank = CostModel(Cluster.parse("1x1xCPU"), spec, max_length=int(batch.lengths.max()))
    reference = run_plan(make_plan("static:1", batch.lengths, one_rank), source, batch, build)
    for each in planners:
        planner = PlannerChoice(each, seed=seed) if isinstance(each, str) else each
        plan = planner.plan(batch.lengths, cost)
        outcome = run_plan(plan, source, batch, build)
        yield _compare(str(planner), plan, outcome, reference, TOLERANCE[dtype])


def run_plan(plan: Plan, source: Source, batch: Batch, build: Callable[[], ModelAdapter]) -> StepOutcome:
    """Run one step of a plan on threads, with a model each, and return the outcome of rank 0."""
    adapters = [build() for _ in range(plan.limits.ranks)]  # before: libraries draw and load for one thread at a time

    def body(transport: Transport) -> StepOutcome | None:
        parameter_class = ReshardingParameters if plan.sharding == Sharding.FREE else ReplicatedParameters
        parameters = parameter_class(prepare_layers(adapters[transport.rank]), transport)
        rows = partial(rank_rows, source, batch=batch)
        result = run_step(bind_plan(plan, transport), parameters, rows, batch.valid_tokens)
        gradients = {name: each for name, each in parameters.full_gradients() if transport.rank == 0}
        return None if transport.rank else StepOutcome(result.loss, result.gradient_norm, gradients)

    first = run_ranks(plan.limits.ranks, body, strict=True, timeout_s=600)[0]
    assert first is not None
    return first


def _compare(name: str, plan: Plan, outcome: StepOutcome, reference: StepOutcome, tolerance: float) -> PlanComparison:
    """Compare with one process. A parameter without gradient must have none under the plan."""
    largest = max(_difference(outcome.gradients[key], truth) for key, truth in reference.gradients.items())
    scalars = (_relative(outcome.loss, reference.loss), _relative(outcome.norm, reference.norm))
    rounds = [round_ for pipeline in plan.pipelines for round_ in pipeline.rounds]
    groups = sum(len(round_.groups) for round_ in rounds)
    passed = bool(max(largest, *scalars) <= tolerance)
    return PlanComparison(name, plan.hash, len(rounds), groups, outcome.loss, outcome.norm, largest, passed)


def _difference(gradient: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference / norm of the truth."""
    norm = float(truth.double().norm())
    difference = float((gradient.double() - truth.double()).norm())
    return difference / norm if norm else (0.0 if difference == 0 else inf)


def _relative(value: float, truth: float) -> float:
    return abs(value - truth) / abs(truth) if truth else abs(value)
