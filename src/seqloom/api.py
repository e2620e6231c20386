"""The Python API: build a cost model, plan a batch, simulate or evaluate the plan.

    cost_model(cluster, model)          -> CostModel    prices every part of a plan
    cost_models(cluster, model)         -> [CostModel]  one for every tensor and expert degree
    plan(lengths, cluster, model)       -> Plan
    simulate(plan, cluster, model)      -> Simulation   step time, idle time, memory, timeline
    lower_bound(lengths, cost)          -> ns           no plan for these lengths is faster
    evaluate(plan, cost)                -> Evaluation   simulation and lower bound together, in ms and GiB

Clusters, models and profiles may be names or objects: ``cluster="8x8xH200"`` or a ``Cluster``. The command line calls
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import product
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from seqloom.cost import CostModel, MadeFor, Profile
from seqloom.describe import Batch, Cluster, ModelSpec
from seqloom.errors import MemoryBudgetError, SeqloomError, unknown_name
from seqloom.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from seqloom.cost.plan_cost import ExpertShares
    from seqloom.plan import Sharding
    from seqloom.simulate import Simulation

P = ParamSpec("P")
T = TypeVar("T")
GIB = 1024**3
MS = 1e6
"""Nanoseconds per millisecond."""


# -- arguments: every public function refuses names and values that it does not know, with the way out

_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "whole": (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    "gib": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number of GiB"),
    "switch": (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    "automatic": (lambda value: isinstance(value, bool | np.bool_) or value == "auto", "True, False or 'auto'"),
    "degree": (lambda value: isinstance(value, Integral) or value == "auto", "1, 2, 4, ... or 'auto'"),
    "any": (lambda value: True, ""),
    "plan": (lambda value: isinstance(value, Plan), "a Plan, as seqloom.plan or Plan.load return it"),
    "cost": (lambda value: isinstance(value, CostModel), "a CostModel, as seqloom.cost_model returns it"),
}
"""Kinds of arguments: how to tell one, and what to give."""
_KIND_OF = {
    **dict.fromkeys(("max_length", "capacity", "stages", "seed", "bound_ns", "planning_ns"), "whole"),
    **dict.fromkeys(("budget_gib", "host_gib"), "gib"),
    **dict.fromkeys(("offload", "offload_optimiser"), "automatic"),
    **dict.fromkeys(("expert", "tensor"), "degree"),
    "float8": "switch",
    "plan": "plan",
    "cost": "cost",
}
"""Arguments that are checked where they are given; `None` stands for those that are left out."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments whose name or kind is wrong, in front of a public function."""
    parameters = signature(function).parameters
    several = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
    needed = [name for name, each in parameters.items() if each.default is each.empty and name not in several]

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in parameters and not several:
                raise unknown_name(f"argument of {function.__name__}", name, parameters)
        given = dict(zip(parameters, args, strict=False)) | options
        for name in needed:
            if name not in given:
                raise SeqloomError(f"{function.__name__} lacks {name}; its arguments are {', '.join(parameters)}")
        for name, value in given.items():
            is_one, wanted = _KINDS[_KIND_OF.get(name, "any")]
            if value is not None and not is_one(value):
                raise SeqloomError(f"{name} is {value!r}; give {wanted}")
        return function(*args, **options)

    return call


# -- the functions


@checked
def cost_model(
    cluster: Cluster | str,
    model: ModelSpec | str,
    *,
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str = "full",
    budget_gib: float | None = None,
    max_length: int | None = None,
    capacity: int | None = None,
    stages: int = 1,
    float8: bool = False,
    offload: bool | str = "auto",
    offload_optimiser: bool = False,
    host_gib: float | None = None,
    expert: int = 1,
    tensor: int = 1,
) -> CostModel:
    """Build the cost model that prices plans.

    Args:
        cluster: a cluster, its spelling (``8x8xH100``), a preset's name, or a .json or .toml file.
        model: a model, a preset's name, or the path of a Hugging Face ``config.json``.
        profile: measured constants, their name or file; None takes those of the cluster's device.
        sharding: over which ranks parameters are sharded: ``full``, ``hybrid`` (a node) or ``none``.
        budget_gib: memory per GPU that a plan may use; None takes the profile's value, or 0.9 of the device's.
        max_length: longest sequence of the whole run, tokens; ``static`` must hold it, and learned position
            tables grow with it.
        capacity: tokens a GPU may hold in one round; None takes what fits in memory.
        stages: pipeline stages of the plans to come; with more than one, a model that fits only in stages is accepted.
        float8: linear layers multiply in float8, but for the gradients of weights.
        offload: whether plans may keep activations in host memory: True where that is predicted to be faster, "auto"
            for batches that fit in no other way, False never.
        offload_optimiser: whether the optimiser's master weights and moments are in host memory.
        host_gib: host memory per GPU that a plan may use; None takes the GPU's share of what the cluster has, if it
            says that.
        expert: neighbouring GPUs that divide the experts of every layer among them (expert parallelism).
        tensor: neighbouring GPUs of a node that divide the matrices of every layer (tensor parallelism).
    """
    if "auto" in (expert, tensor):
        raise SeqloomError("one cost model has one degree; give a number, or leave the choice to seqloom.plan")
    return CostModel(
        _cluster(cluster),
        _model(model),
        profile,  # pyrefly: ignore
        sharding,
        budget_gib,
        max_length,
        capacity,
        stages,
        float8=float8,
        offload=offload,
        offload_optimiser=offload_optimiser,
        host_gib=host_gib,
        expert=expert,
        tensor=tensor,
    )


def cost_models(
    cluster: Cluster | str,
    model: ModelSpec | str,
    *,
    expert: int | str = "auto",
    tensor: int | str = 1,
    **options: Any,
) -> list[CostModel]:
    """Build the cost models to choose plans by: one for every pair of degrees that holds the model, ascending.

    Args:
        expert: the only expert degree; "auto": all legal ones, which is 1 for a model without experts.
        tensor: the only tensor degree; "auto": all legal ones.
        options: of :func:`cost_model`.
    """
    from seqloom.cost.model import expert_degrees, tensor_degrees

    cluster, model = _cluster(cluster), _model(model)
    place = cluster, model, options.get("profile"), options.get("sharding", "full")
    if tensor not in (1, "auto") and place[-1] == "free":
        raise SeqloomError(
            f"tensor degree {tensor} with sharding free, where planner hydraulis chooses the degree of every stage; "
            "leave it out, or use sharding full, hybrid or none"
        )
    tensors = tensor_degrees(*place) if tensor == "auto" else (int(tensor),)
    experts = expert_degrees(*place) if expert == "auto" else (int(expert),)
    degrees = list(product(tensors, experts))
    if "auto" in (tensor, expert):  # ranks divide the matrices of layers, or their experts
        degrees = [pair for pair in degrees if 1 in pair]
    costs: list[CostModel] = []
    refusal: MemoryBudgetError | None = None
    for pair in degrees:
        try:
            costs.append(cost_model(cluster, model, **options, tensor=pair[0], expert=pair[1]))
        except MemoryBudgetError as error:
            refusal = refusal or error
    if not costs:
        assert refusal is not None
        raise refusal
    return costs


def _cluster(value: Cluster | Path | str) -> Cluster:
    if isinstance(value, str | Path):
        return Cluster.parse(str(value))
    if not isinstance(value, Cluster):
        raise SeqloomError(f'cluster {value!r} is no cluster; give a spelling such as "1x8xH100", a preset or a file')
    return value


def _model(value: ModelSpec | Path | str) -> ModelSpec:
    if isinstance(value, str | Path):
        return ModelSpec.load(str(value))
    if not isinstance(value, ModelSpec):
        raise SeqloomError(f'model {value!r} is no model; give a preset such as "llama3-8b", a file or a folder')
    return value


def with_fitting_optimiser(
    run: Callable[[list[CostModel]], T],
    build: Callable[[bool], list[CostModel]],
    offload_optimiser: bool | str = "auto",
) -> T:
    """Return what `run` makes of cost models, with the optimiser in host memory or not.

    "auto": where memory does not hold the model or a document otherwise; not on CPUs, whose memory is the host's.

    Args:
        build: makes the cost models to choose from, given whether the optimiser is in host memory.
    """
    if offload_optimiser != "auto":
        return run(build(offload_optimiser is True))
    try:
        return run(build(False))
    except MemoryBudgetError as error:
        refused = error
    try:
        costs = build(True)
    except SeqloomError:
        raise refused from None
    if costs[0].cluster.device.name == "CPU":
        raise refused
    return run(costs)


@checked
def plan(
    lengths: ArrayLike | Batch,
    *,
    cluster: Cluster | str,
    model: ModelSpec | str,
    planner: str = "auto",
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str = "full",
    budget_gib: float | None = None,
    max_length: int | None = None,
    float8: bool = False,
    offload: bool | str = "auto",
    offload_optimiser: bool | str = "auto",
    host_gib: float | None = None,
    expert: int | str = "auto",
    tensor: int | str = 1,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Plan one step: how far each sequence of the batch is spread over the GPUs. The plan is validated.

    Args:
        lengths: tokens of every sequence of the batch; a sequence's id in the plan is its index here.
        planner: ``static`` (``static:64`` fixes the degree), ``adaptive``, ``flexsp``, ``flex``, ``zones``, ``pieces``,
            ``pipeline`` (``pipeline:4`` has 4 stages), ``hydraulis`` (sharding free), ``exact`` or ``auto``, the best
            of all without stages; under sharding free, of strategies too.
        offload_optimiser: whether the optimiser is in host memory; "auto": if nothing else holds the batch.
        expert: expert degree; "auto": the fastest.
        tensor: tensor degree; "auto": the fastest.
        seed: of the planner's pseudo-random choices; same inputs and seed, same plan.
        options: of that planner, see its function in :mod:`seqloom.planners`.

    The other arguments are those of :func:`cost_model`.
    """
    from seqloom.planners import make_plan, requested_stages
    from seqloom.planners.registry import check_options, fastest
    from seqloom.simulate import predicted_ns

    batch = _batch(lengths)
    check_options(planner, options, signature(plan).parameters)
    given: dict[str, Any] = {"profile": profile, "sharding": sharding, "float8": float8, "offload": offload}
    given |= {"budget_gib": budget_gib, "max_length": max_length, "host_gib": host_gib, "expert": expert}
    given["tensor"] = tensor
    stages = max(requested_stages([planner]), options.get("stages") or 1)
    if max_length is not None and batch.longest > max_length:
        index = int(np.argmax(batch.lengths > max_length))
        raise SeqloomError(
            f"sequence {index} has {int(batch.lengths[index]):,} tokens, max_length is {max_length:,}; "
            "drop it first (seqloom.drop_longer) or raise max_length"
        )

    def build(offloaded: bool) -> list[CostModel]:
        return cost_models(cluster, model, **given, stages=stages, offload_optimiser=offloaded)

    def timed(cost: CostModel) -> tuple[int, Plan]:
        made = make_plan(planner, batch.lengths, cost, seed=seed, **options)
        return predicted_ns(made, cost), MadeFor.of(cost).on(made)

    return with_fitting_optimiser(lambda costs: fastest(costs, timed), build, offload_optimiser)


@checked
def simulate(
    plan: Plan,
    *,
    cluster: Cluster | str | None = None,
    model: ModelSpec | str | None = None,
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str | None = None,
    budget_gib: float | None = None,
    max_length: int | None = None,
    float8: bool | None = None,
    offload_optimiser: bool | None = None,
    host_gib: float | None = None,
) -> Simulation:
    """Simulate a plan: step time, idle and communication shares, memory, a timeline.

    What is not given is what the plan was made for (``plan.made_for``), as its file says; on another cluster the
    profile, the budget and the host memory are those of that cluster. The arguments are those of :func:`cost_model`. A
    plan that breaks a rule, does not suit the cluster or the model, or needs more memory than the budget is refused.
    """
    options: dict[str, Any] = {"profile": profile, "sharding": sharding, "float8": float8}
    options |= {"budget_gib": budget_gib, "max_length": max_length, "host_gib": host_gib}
    options["offload_optimiser"] = offload_optimiser
    return _simulate(plan, cost_model_of(plan, cluster, model, **options))


def cost_model_of(
    plan: Plan,
    cluster: Cluster | str | None = None,
    model: ModelSpec | str | None = None,
    *,
    sharding: Sharding | str | None = None,
    **options: Any,
) -> CostModel:
    """Build the cost model of a plan that exists, with its degrees and stages; see `simulate` for what is not given."""
    made_for = MadeFor.read(plan)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if made_for is not None:
        cluster = made_for.cluster if cluster is None else _cluster(cluster)
        model = made_for.model if model is None else model
        same = cluster == made_for.cluster
        own: dict[str, Any] = {"profile": made_for.profile} if same else {}
        given = own | made_for.elsewhere(cluster) | given
    if cluster is None or model is None:
        missing = "cluster" if cluster is None else "model"
        raise SeqloomError(
            f"the plan does not say for which {missing} it was made, as files of earlier versions; give the {missing}"
        )
    stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    tensor, expert = degrees_of(plan)
    given |= {"stages": stages, "expert": expert, "tensor": tensor}
    return cost_model(cluster, model, sharding=sharding or plan.sharding, **given)


def expert_degree(plan: Plan) -> int:
    """Ranks that divide the experts of a layer; of stages that differ, most."""
    return max(stage.expert for pipeline in plan.pipelines for stage in pipeline.stages)


def tensor_degree(plan: Plan) -> int:
    """Ranks that divide the matrices of a layer; of stages that differ, most."""
    return max(stage.tensor for pipeline in plan.pipelines for stage in pipeline.stages)


def chunk_count(plan: Plan) -> int:
    """Stages with layers of every pipeline rank; of pipelines that differ, most."""
    return max((pipeline.chain.last + 1) // len(pipeline.ranks_by_pp_rank) for pipeline in plan.pipelines)


def degrees_of(plan: Plan) -> tuple[int, int]:
    """Tensor and expert degree of the cost model that a plan was made with: under free sharding stages have others."""
    return 1 if plan.sharding == "free" else tensor_degree(plan), expert_degree(plan)


@checked
def lower_bound(lengths: ArrayLike | Batch, cost: CostModel) -> int:
    """Lower bound on the step time, ns: no plan of one stage for these lengths is faster under this cost model."""
    from seqloom.planners.bounds import lower_bound

    return lower_bound(_batch(lengths).lengths, cost)


def _batch(lengths: ArrayLike | Batch) -> Batch:
    if isinstance(lengths, str | Path):
        raise SeqloomError(
            f"lengths {str(lengths)!r} is no list; give the tokens of every sequence, such as [512, 4096], or what "
            "seqloom.lengths_from draws of a sampler or reads from a file"
        )
    return lengths if isinstance(lengths, Batch) else Batch.of(lengths)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A plan with its simulated step and its lower bound."""

    plan: Plan
    simulation: Simulation
    bound_ns: int | None  # no plan on the same stages has a shorter step; None where nothing is proven
    planning_ns: int | None = None  # wall time of the planner; None for a plan that was not made here
    experts: ExpertShares | None = None  # what they take of the step; None: the model has none

    @property
    def gap(self) -> float | None:
        """How far the step is above the lower bound, as a share of the bound."""
        return None if self.bound_ns is None else self.simulation.step_ns / self.bound_ns - 1

    @property
    def peak_memory_gib(self) -> float:
        """Peak memory of the fullest rank."""
        return float(self.simulation.peak_memory.max()) / GIB

    @property
    def peak_host_memory_gib(self) -> float:
        """Most that a rank has in host memory: activations, and the optimiser if it is there."""
        return float(self.simulation.peak_host_memory.max()) / GIB

    def _repr_html_(self) -> str:
        """Show the figures of the plan in a notebook."""
        from seqloom.plan.notebook import html_table

        return html_table(f"{self.plan!r}", ("figure", "value"), self.as_dict().items())

    def figures(self) -> dict[str, Any]:
        """Return the figures that comparisons show, by their JSON keys."""
        return {
            "step_ms": self.simulation.step_ns / MS,
            "bound_ms": None if self.bound_ns is None else self.bound_ns / MS,
            "plan_ms": None if self.planning_ns is None else self.planning_ns / MS,
            "rounds": self.plan.rounds,
            "chunks": chunk_count(self.plan),
            "tensor": tensor_degree(self.plan),
            "expert": expert_degree(self.plan),
            "comm_share": float(self.simulation.comm_share),
            "idle_share": float(self.simulation.idle_share),
            "peak_memory_gib": self.peak_memory_gib,
            "peak_host_memory_gib": self.peak_host_memory_gib,
            "plan_hash": self.plan.hash,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the figures with the plan's planner and size, its gap and its use of NICs, by their JSON keys."""
        return {
            "planner": self.plan.planner,
            "sequences": len(self.plan.documents),
            "tokens": self.plan.tokens,
            **self.figures(),
            "expert_share": None if self.experts is None else self.experts._asdict(),
            "gap": self.gap,
            "nic_share": dict(zip(("busiest", "mean"), self.simulation.nic_shares, strict=True)),
        }


@checked
def evaluate(plan: Plan, cost: CostModel, *, bound_ns: int | None = None, planning_ns: int | None = None) -> Evaluation:
    """Simulate a plan and compare its step with the lower bound. Refuses what `simulate` refuses.

    The lower bound is the slow part; give `bound_ns` if it is known already.
    """
    from seqloom.cost.plan_cost import expert_shares
    from seqloom.planners.bounds import plan_bound

    simulation = _simulate(plan, cost)
    bound = plan_bound(plan, cost) if bound_ns is None else bound_ns
    experts = expert_shares(cost, plan, simulation.step_ns) if cost.model.experts else None
    return Evaluation(plan, simulation, bound, planning_ns, experts)


def evaluate_planners(
    planners: Sequence[str],
    batches: Sequence[Batch],
    cost: CostModel,
    *,
    others: Sequence[CostModel] = (),
    chunks: int | str = 1,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
    refused: dict[str, SeqloomError] | None = None,
) -> list[dict[str, Evaluation]]:
    """Plan every batch with every planner and evaluate the plans: one dictionary per batch, by planner.

    `others` are the cost model with other degrees, of which every planner takes the fastest for the batches; `chunks`
    are those of planner ``pipeline``, "auto" the fastest number.
    Calls `progress` with the planner's name and the batch's index before each planning. Where `refused` is given,
    planners that cannot plan the batches are left out, and their errors are put there.
    """
    from seqloom.planners import plan_batches

    by_degrees = {own.degrees: own for own in (cost, *others)}
    lengths = [batch.lengths for batch in batches]
    given: dict[str, Any] = {"chunks": chunks, "seed": seed, "progress": progress, "refused": refused}
    planned = plan_batches(planners, lengths, cost, others=others, **given)
    rows = []
    for plans in planned:
        row: dict[str, Evaluation] = {}
        shared: dict[tuple[int, int], int | None] = {}  # plans of one stage and equal degrees have one bound
        for name, one in plans.items():
            degrees = degrees_of(one.plan)
            known = None if has_stages(one.plan) else shared.get(degrees)
            row[name] = evaluate(one.plan, by_degrees[degrees], bound_ns=known, planning_ns=one.plan_ns)
            if not has_stages(one.plan):
                shared[degrees] = row[name].bound_ns
        rows.append(row)
    return rows


def has_stages(plan: Plan) -> bool:
    """Whether the plan's lower bound holds for its stages only.

    True for several stages or pipelines, degrees that differ by stage, and parameters that are gathered for every pass.
    """
    from seqloom.plan.pipeline import reshard_after_forward_stages

    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    chosen = plan.sharding == "free" and stages[0].tensor > 1
    return len(stages) > 1 or chosen or bool(reshard_after_forward_stages(plan.pipelines[0]))


def _simulate(plan: Plan, cost: CostModel) -> Simulation:
    """Validate and simulate a plan; refuse one that needs more memory, or host memory, than the budget."""
    from seqloom.simulate import simulate

    plan.validate()
    simulation = simulate(plan, cost)
    needs = {"": (simulation.peak_memory, cost.budget_bytes)}
    if cost.host_bytes is not None:
        needs[" of host memory"] = simulation.peak_host_memory, cost.host_bytes
    for what, (peak, budget) in needs.items():
        rank = int(np.argmax(peak))
        if peak[rank] > budget:
            raise MemoryBudgetError(
                f"the plan needs {peak[rank] / GIB:.1f} GiB{what} on rank {rank}, the budget here is "
                f"{budget / GIB:.1f} GiB; give the budget and the maximum length it was made with, or plan again"
            )
    return simulation
