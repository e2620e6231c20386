"""What `seqloom verify` compares: loss, gradient norm and every gradient of one batch under plans and in one process.

    ranks of a plan             parameters                            messages
    threads of this process     replicated                            matched by NCCL's rules
    processes                   FSDP2's shards, as in a run           gloo, or NCCL on GPUs

Under free sharding both move parameters to where the plan computes. The reference is one process that runs the batch as
a single group; of processes it is rank 0, on its device. It runs the batch again in rounds, which sums over tokens in
other parts: how far the two are apart is the error of one process, and no plan can be nearer. Models that sum in
float32 by design, such as the gradients of norms or routers, are so found out, and compared as exactly as they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.cost import CostModel
from seqloom.data import Batch, Source, rank_rows
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import (
    Communicators,
    SingleRankTransport,
    TorchTransport,
    Transport,
    launched_rank,
    run_ranks,
)
from seqloom.engine import bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import Parameters, ReplicatedParameters, ReshardingParameters
from seqloom.plan import GroupFamily, Plan, Sharding
from seqloom.planners import make_plan
from seqloom.planners.registry import PlannerChoice
from seqloom.train.config import Config
from seqloom.train.fork_server import check_cores
from seqloom.train.launch import RankProcess, run_on_processes
from seqloom.train.model import ModelFamily, prepare_layers, shard_parameters
from seqloom.train.setup import RunChoices, RunSetup

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference of loss, norm and gradients that rounding explains if all is computed in this dtype."""
MARGIN = 10
"""How much farther from one process than that is from itself a plan may be."""
CHAOS = 1e-3
"""Relative difference of one process from itself that no rounding explains."""
UNITS = 10
"""A gradient may be so many units of rounding of the whole gradient off: some are zero but for rounding."""


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
    tolerance: float
    passed: bool  # loss, norm and all gradients are within the tolerance


class StepOutcome(NamedTuple):
    """Loss, gradient norm and gradients of a step."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]

    def largest_difference(self, other: StepOutcome) -> float:
        """Return the largest relative difference of a gradient of the other from one of this outcome.

        Norm of the difference / norm of the gradient. One that is 0 by mathematics, such as that of queries where every
        document has a single key, is made of rounding: it is measured by the whole gradient (`UNITS`).
        """
        worst = 0.0
        for name, gradient in self.gradients.items():
            unit = torch.finfo(gradient.dtype).eps
            scale = max(float(gradient.double().norm()), UNITS * unit / TOLERANCE[gradient.dtype] * self.norm, unit)
            worst = max(worst, float((other.gradients[name].double() - gradient.double()).norm()) / scale)
        return worst


class Reference(NamedTuple):
    """What one process computes, and how near to it a plan has to be."""

    outcome: StepOutcome
    tolerance: float


PlannedBatch = Sequence[tuple[str, Plan]]
"""The plans of one batch, each with the name of its planner."""


def plan_batch(batch: Batch, planners: Sequence[str | PlannerChoice], cost: CostModel, seed: int) -> PlannedBatch:
    """Return a plan of every planner for a batch."""
    choices = [PlannerChoice(each, seed=seed) if isinstance(each, str) else each for each in planners]
    return [(str(planner), planner.plan(batch.lengths, cost)) for planner in choices]


def verify(
    spec: ModelSpec,
    source: Source,
    batch: Batch,
    planned: PlannedBatch,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    build: Callable[[], ModelAdapter] | None = None,
) -> Iterator[PlanComparison]:
    """Run a batch in one process, then under every plan with threads as ranks, and yield how they compare.

    `build` builds the model in `dtype` (float64 or float32) with the same values every time; None: the reference model
    of `spec` and `seed`.
    """
    build = build or (lambda: ModelAdapter.of(Transformer(spec, seed=seed, dtype=dtype)))
    reference = _run_reference(spec, source, batch, build(), dtype)
    for planner, plan in planned:
        outcome = run_plan(plan, source, batch, build)
        yield _compare(planner, plan, outcome, reference)


def run_plan(plan: Plan, source: Source, batch: Batch, build: Callable[[], ModelAdapter]) -> StepOutcome:
    """Run one step of a plan on threads, with a model each, and return the outcome of rank 0."""
    adapters = [build() for _ in range(plan.limits.ranks)]  # before: libraries draw and load for one thread at a time

    def body(transport: Transport) -> StepOutcome:
        parameter_class = ReshardingParameters if plan.sharding == Sharding.FREE else ReplicatedParameters
        parameters = parameter_class(prepare_layers(adapters[transport.rank]), transport)
        return _run_step(plan, transport, parameters, source, batch)

    return run_ranks(plan.limits.ranks, body, strict=True, timeout_s=600)[0]


# ---- Ranks that are processes


def check_processes(on: str, ranks: int) -> str:
    """Say what the ranks will be, or refuse: `on` is "threads", "gloo" or "nccl"."""
    check_cores(ranks)
    if on == "threads":
        return f"{ranks} threads"
    if launched_rank() is not None:
        raise SeqloomError(
            f"--{on} under torchrun or srun, while verify starts its ranks itself; leave the launcher out"
        )
    gpus = torch.cuda.device_count()
    if on == "nccl" and not gpus:
        raise SeqloomError(
            "--nccl on a machine where torch finds no GPU, which NCCL needs; run it where there is one, or take --gloo "
            "for processes on CPUs, or neither for threads"
        )
    shares = f", sharing {gpus} GPU{'s' * (gpus > 1)}" if on == "nccl" and gpus < ranks else ""
    return f"{ranks} processes over {'NCCL' if on == 'nccl' else on}{shares}"


def verify_on_processes(
    setup: RunSetup, planned: Sequence[PlannedBatch], *, dtype: torch.dtype, model_family: ModelFamily, on: str
) -> list[PlanComparison]:
    """Compare the plans of a run's first batches with one process, on processes that are started once for all."""
    texts = [[(planner, plan.to_json()) for planner, plan in each] for each in planned]
    rows = run_on_processes(
        *(compare_as_rank, setup.cost.ranks, setup.config, setup.choices, model_family, texts, dtype),
        preload=model_family.build.__module__,
        share_gpu=True,
        on_cpu=on == "gloo",
    )
    return [PlanComparison(**row) for row in rows]


def compare_as_rank(
    process: RankProcess,
    config: Config,
    choices: RunChoices,
    model_family: ModelFamily,
    planned: Sequence[Sequence[tuple[str, str]]],
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Run every plan as one of the ranks; rank 0 returns how they compare with one process, others return []."""
    job_rank, device, _ = process
    rank, ranks = job_rank.rank, job_rank.ranks
    setup = RunSetup.load(config, ranks, choices, describe=model_family.describe)
    communicators = Communicators(GroupFamily(ranks, setup.cost.node_size))
    communicators.warm_up()
    transport, found, reference = TorchTransport(communicators), [], None
    for batch, plans in zip(setup.sampler.peek(len(planned)), planned, strict=True):
        if rank == 0:
            adapter = model_family.build(config, device, dtype)
            reference = _run_reference(setup.spec, setup.source, batch, adapter, dtype, device)
        for planner, text in plans:
            plan = Plan.from_json(text)
            stages = plan.pipelines[0].stages
            adapter = model_family.build(config, device, dtype)
            split_backward = len(stages) > 1 or plan.sharding == Sharding.FREE
            adapter = prepare_layers(adapter, split_backward=split_backward)
            parameters = shard_parameters(adapter, transport, stages, setup.cost, None)
            outcome = _run_step(plan, transport, parameters, setup.source, batch, device)
            if reference is not None:
                found.append(asdict(_compare(planner, plan, outcome, reference)))
    communicators.close()
    return found


# ---- One step, and how it compares


def _run_reference(
    spec: ModelSpec,
    source: Source,
    batch: Batch,
    adapter: ModelAdapter,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Reference:
    """Run a batch in this process alone, as a single group, and once more in rounds of few documents."""
    parameters = ReplicatedParameters(prepare_layers(adapter), SingleRankTransport())
    run = partial(_run_alone, spec, source, parameters, device)
    outcome = whole = run(batch)
    if len(batch.documents) == 1:  # twice makes two rounds
        batch = Batch(*(np.repeat(each, 2) for each in (batch.documents, batch.lengths, batch.valid)))
        whole = run(batch)
    own = whole.largest_difference(run(batch, capacity=int(batch.lengths.max())))
    if own > CHAOS:
        raise SeqloomError(
            f"one process computes gradients that differ by {own:.1e} when it sums over tokens in other parts: the "
            "model is not deterministic, and no plan can have its result; leave out what is random in it"
        )
    return Reference(outcome, max(TOLERANCE[dtype], MARGIN * own))


def _run_alone(
    spec: ModelSpec,
    source: Source,
    parameters: Parameters,
    device: torch.device | str,
    batch: Batch,
    capacity: int | None = None,
) -> StepOutcome:
    cost = CostModel(Cluster.parse("1x1xCPU"), spec, max_length=int(batch.lengths.max()), capacity=capacity)
    plan = make_plan("static:1", batch.lengths, cost)
    return _run_step(plan, SingleRankTransport(), parameters, source, batch, device)


def _run_step(
    plan: Plan,
    transport: Transport,
    parameters: Parameters,
    source: Source,
    batch: Batch,
    device: torch.device | str = "cpu",
) -> StepOutcome:
    """Run one step of a plan as a rank; gradients are returned on rank 0."""
    rows = partial(rank_rows, source, batch=batch)
    result = run_step(bind_plan(plan, transport, device=device, dropout_seed=0), parameters, rows, batch.valid_tokens)
    gradients = {name: each.clone() for name, each in parameters.full_gradients() if transport.rank == 0}
    if not isfinite(result.loss) or not isfinite(result.gradient_norm):
        raise SeqloomError(
            f"loss {result.loss} and gradient norm {result.gradient_norm} of the batch on {transport.ranks} "
            f"rank{'s' * (transport.ranks > 1)}: nothing can be compared; look at the model's parameters and the data"
        )
    return StepOutcome(result.loss, result.gradient_norm, gradients)


def _compare(name: str, plan: Plan, outcome: StepOutcome, reference: Reference) -> PlanComparison:
    """Compare with one process. A parameter without gradient must have none under the plan."""
    truth, tolerance = reference
    largest = truth.largest_difference(outcome)
    scalars = (_relative(outcome.loss, truth.loss), _relative(outcome.norm, truth.norm))
    rounds = [round_ for pipeline in plan.pipelines for round_ in pipeline.rounds]
    return PlanComparison(
        name,
        plan.hash,
        len(rounds),
        sum(len(round_.groups) for round_ in rounds),
        outcome.loss,
        outcome.norm,
        largest,
        tolerance,
        passed=max(largest, *scalars) <= tolerance,
    )


def _relative(value: float, truth: float) -> float:
    return abs(value - truth) / abs(truth) if truth else abs(value)
