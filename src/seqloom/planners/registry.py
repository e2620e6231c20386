"""Planners by name: one table, and the calls that make plans from it.

To add a planner, write its function ``(lengths, cost, **options) -> Plan`` and add a row to `_TABLE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import MemoryBudgetError, SeqloomError, unknown_name
from seqloom.plan import Plan, Sharding
from seqloom.planners.recompute import with_layer_choices
from seqloom.simulate import predicted_ns

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PublishedClaim:
    """A published speed-up, and the ratio that this implementation gives under some profiles.

    A speed-up over a rival says little about the authors' system where the rival here does not give their figures. So
    every report of a rival says "validated" or "not validated". The ratios are those of the committed results
    (`benchmarks/results`), and a test compares the two.
    """

    over: str = ""  # the planner that the speed-up is over
    ratio: float | None = None  # the published figure; None if none could be read, or none that can be repeated
    tolerance: float = 0.2  # relative deviation that still counts as reproduced
    measured: Mapping[str, float] = field(default_factory=dict)  # profile -> the same ratio here
    setting: str = ""  # what the two were measured on
    remark: str = ""  # why the claim cannot be repeated

    def validated(self, profile: str) -> bool:
        """Whether the published ratio is met under this profile."""
        here = self.measured.get(profile)
        return self.ratio is not None and here is not None and abs(here / self.ratio - 1) <= self.tolerance

    def verdict(self, profile: str) -> str:
        """The verdict under this profile in one line."""
        verdict = "validated" if self.validated(profile) else "not validated"
        if self.ratio is None:
            return f"{verdict}: {self.remark}"
        published = f"published {self.ratio:.2f}x over {self.over}"
        if profile not in self.measured:
            return f"{verdict}: {published}, not tried under profile {profile}"
        where = f", {self.setting}" if self.setting else ""
        return f"{verdict}: {self.measured[profile]:.2f}x under profile {profile}{where}; {published}"


@dataclass(frozen=True, slots=True)
class PlannerSpec:
    """One row of the table."""

    name: str  # as users write it
    target: str  # ``module:function``, loaded on first use
    option: str = ""  # argument that the number after the name sets: ``static:64`` is ``degree=64``; "": none
    seeded: bool = False  # whether it takes a seed
    rival: bool = False  # whether it is a published planner to compare with, which ``auto`` does not ask
    makes_stages: bool = False  # whether its plans cut the model into pipeline stages
    reads_strategies: bool = False  # whether it chooses from a list of strategies under free sharding
    quick: bool = False  # whether it answers at once: `plan_batches` then asks for a tiny plan before it measures any
    by_speed: bool = True  # whether it plans for ranks of unequal speed
    packs_dataset: bool = False  # whether it decides which documents make a batch, and so plans no batch that is given
    claim: PublishedClaim | None = None  # its published speed-up

    def load(self) -> Callable[..., Plan]:
        """Import the planner's function: ``(lengths, cost, **options) -> Plan``."""
        module, function = self.target.split(":")
        return getattr(import_module(f"seqloom.{module}"), function)


_TABLE = (
    PlannerSpec("static", "planners.uniform:plan_static", option="degree", quick=True),
    PlannerSpec("adaptive", "planners.uniform:plan_adaptive", quick=True),
    PlannerSpec(
        "flexsp",
        "planners.published.flexsp:plan_flexsp",
        seeded=True,
        claim=PublishedClaim(
            "static:64", 1.72, 0.10, {"flexsp-a100": 1.76}, "for GPT-7B on 64 GPUs with Wikipedia lengths up to 192K"
        ),
    ),
    PlannerSpec("flex", "planners.flex:plan_flex", seeded=True, quick=True),
    PlannerSpec("zones", "planners.zones:plan_zones", quick=True),
    PlannerSpec(
        "pipeline",
        "planners.pipeline:plan_pipeline",
        option="stages",
        makes_stages=True,
        quick=True,
        by_speed=False,
    ),
    PlannerSpec("pieces", "planners.pipeline:plan_pieces", quick=True),
    PlannerSpec(
        "hydraulis",
        "planners.hydraulis:plan_strategies",
        seeded=True,
        makes_stages=True,
        reads_strategies=True,
        quick=True,
        by_speed=False,
    ),
    PlannerSpec("exact", "planners.exact:plan_exact"),
    PlannerSpec("auto", "planners.auto:plan_auto", seeded=True, reads_strategies=True, quick=True),
    PlannerSpec(
        "te-cp",
        "planners.published.rivals:plan_te_cp",
        rival=True,
        claim=PublishedClaim(remark="the baseline of Zeppelin's figures, with no speed-up of its own"),
    ),
    PlannerSpec(
        "llama-cp",
        "planners.published.rivals:plan_llama_cp",
        rival=True,
        claim=PublishedClaim(remark="no speed-up of its own could be read"),
    ),
    PlannerSpec(
        "hybrid-dp",
        "planners.published.rivals:plan_hybrid_dp",
        rival=True,
        claim=PublishedClaim(remark="published up to 7.89x on 1,024 GPUs of an unnamed kind"),
    ),
    PlannerSpec(
        "megatron",
        "planners.published.megatron:plan_megatron",
        rival=True,
        claim=PublishedClaim(remark="published 1.21x to 1.50x over static packing, on an unnamed model and cluster"),
    ),
    PlannerSpec(
        "megatron-hybrid",
        "planners.published.megatron:plan_megatron_hybrid",
        rival=True,
        claim=PublishedClaim(remark="no speed-up of its own was published"),
    ),
    PlannerSpec(
        "wlb-llm",
        "planners.published.balanced:plan_wlb_llm",
        rival=True,
        claim=PublishedClaim(remark="published 1.23x over packs of equal length, with pipelines and delayed outliers"),
    ),
    PlannerSpec(
        "skrull",
        "planners.published.balanced:plan_skrull",
        rival=True,
        claim=PublishedClaim(remark="published 3.76x over DeepSpeed, mean, without its settings"),
    ),
    PlannerSpec(
        "verl",
        "planners.published.balanced:plan_verl",
        rival=True,
        claim=PublishedClaim(remark="no speed-up of its own was published"),
    ),
    PlannerSpec(
        "chunkflow",
        "planners.published.chunkflow:plan_chunkflow",
        option="stages",
        makes_stages=True,
        rival=True,
        by_speed=False,
        claim=PublishedClaim(remark="published up to 4.53x over Megatron-LM, without its settings"),
    ),
    PlannerSpec(
        "zeppelin",
        "planners.published.zeppelin:plan_zeppelin",
        rival=True,
        claim=PublishedClaim("te-cp", 2.80, 0.2, {"a800": 7.40, "h800": 7.78, "h200": 9.79}, "mean of 48 settings"),
    ),
    PlannerSpec("hbp", "packing:hbp", packs_dataset=True),
)
PLANNERS: Mapping[str, PlannerSpec] = {spec.name: spec for spec in _TABLE}
RIVALS: tuple[str, ...] = tuple(spec.name for spec in _TABLE if spec.rival)
_RENAMED = {"strategies": "hydraulis"}


def verdicts(names: Sequence[str], profile: str) -> dict[str, str]:
    """The published ones of these planners, each with its verdict under a profile."""
    specs = {name: PLANNERS.get(name) for name in names}
    return {name: spec.claim.verdict(profile) for name, spec in specs.items() if spec and spec.claim}


def parse_planner(name: str) -> tuple[PlannerSpec, dict[str, Any]]:
    """Look a name up, with the option behind it: ``static:64`` has groups of 64 GPUs, ``pipeline:4`` has 4 stages."""
    if not isinstance(name, str):
        raise SeqloomError(f"planner {name!r} is no name; give one of {', '.join(PLANNERS)}")
    base, colon, number = name.lower().partition(":")
    if base in _RENAMED:
        raise SeqloomError(f"planner {name!r}: {base} is called {_RENAMED[base]} now")
    spec = PLANNERS.get(base)
    if spec is None:
        raise unknown_name("planner", base, [other.name for other in _TABLE if not other.packs_dataset])
    if spec.packs_dataset:
        raise SeqloomError(
            f"planner {name!r} packs a whole data set into steps of its own, it plans no batch that is given; ask "
            "seqloom plan --planner hbp --tokens-per-step N for its steps, or choose flex for your batches"
        )
    if not colon:
        return spec, {}
    if not spec.option or not number.isdecimal() or int(number) < 1:
        *takers, last = (other.name for other in _TABLE if other.option)
        raise SeqloomError(
            f"planner {name!r}: only {', '.join(takers)} and {last} take an option, a degree or a number of stages, "
            "for example static:64 or pipeline:4"
        )
    return spec, {spec.option: int(number)}


def check_options(planner: str, options: Collection[str], others: Collection[str] = ()) -> None:
    """Refuse options that a planner does not have; `others` are names that the caller takes, for the hint."""
    spec, given = parse_planner(planner)
    known = set(signature(spec.load()).parameters) - {"lengths", "cost", "seed", *given}
    for option in options:
        if option not in known:
            raise unknown_name(f"option of planner {spec.name}", option, {*known, *others, "cluster", "model"})


def requested_stages(names: Sequence[str]) -> int:
    """Pipeline stages of the plans that these planners make, as far as their names say; 1: none makes any."""
    parsed = [parse_planner(name) for name in names]
    return max((given.get("stages", 2 if spec.option == "stages" else 1) for spec, given in parsed), default=1)


def make_plan(name: str, lengths: np.ndarray, cost: CostModel, *, seed: int = 0, **options: Any) -> Plan:
    """Plan one batch, int64[n] tokens, with the planner of that name and its options; the plan is validated.

    The seed starts the pseudo-random choices of planners that make any. Whoever plans, layers recompute as little as
    memory allows, and store activations in host memory as the cost model's `offload` says.
    """
    spec, given = parse_planner(name)
    array = Batch.of(lengths).lengths
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise SeqloomError(f"seed {seed!r} is not a whole number; give one, for example 0")
    if spec.seeded:
        given["seed"] = seed
    check_options(name, options)
    if spec.rival and cost.tensor > 1:
        raise SeqloomError(
            f"planner {spec.name} with tensor degree {cost.tensor}: as published it divides no weights; use tensor "
            "degree 1, or another planner"
        )
    if cost.speeds and (not spec.by_speed or options.get("stages", 1) > 1):
        own = [other.name for other in _TABLE if other.by_speed and not other.rival and not other.packs_dataset]
        raise SeqloomError(
            f"planner {name} on ranks of unequal speed ({min(cost.speeds.values):g} to {max(cost.speeds.values):g}): "
            f"its stages have equal ranks; use one of {', '.join(own)}"
        )

    def plan_under(own: CostModel) -> Plan:
        return with_layer_choices(spec.load()(array, own, **given, **options), own)

    may_offload = cost.may_offload and not spec.makes_stages  # pipelines offload by themselves
    plan = _with_offload(plan_under, array, cost) if may_offload else plan_under(cost)
    plan.validate()
    return plan


def _with_offload(plan_under: Callable[[CostModel], Plan], lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan with activations in host memory where nothing else holds the batch, or where that is faster, as allowed.

    Under free sharding pipelines may hold what one stage does not.
    """
    if cost.offload is True:
        plans = [plan_under(cost)] if cost.holds(lengths) else []
        return min([*plans, plan_under(cost.with_offload())], key=lambda plan: predicted_ns(plan, cost))
    if cost.sharding != Sharding.FREE:
        return plan_under(cost.holding(lengths))
    try:
        return plan_under(cost)
    except MemoryBudgetError:
        if cost.holds(lengths) or not cost.with_offload().holds(lengths):
            raise
        return plan_under(cost.with_offload())


@dataclass(frozen=True, slots=True)
class PlannerChoice:
    """A planner with its options, see `make_plan`, as a value that another process can receive."""

    name: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        """Name and options, for example ``pipeline:4,1,1f1b``; of a list its length, or the only entry."""
        return ":".join([self.name, *filter(None, [",".join(map(_option_text, self.options.values()))])])

    @property
    def uses_speeds(self) -> bool:
        """Whether its plans give slow ranks less."""
        return parse_planner(self.name)[0].by_speed and self.options.get("stages", 1) == 1

    def plan(self, lengths: Sequence[int] | np.ndarray, cost: CostModel) -> Plan:
        """Plan one batch, int64[n] tokens; the plan is validated."""
        return make_plan(self.name, np.asarray(lengths, dtype=np.int64), cost, seed=self.seed, **self.options)


def _option_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"{len(value)} candidates"


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A plan, and the wall time from lengths to the validated and hashed plan."""

    plan: Plan
    plan_ns: int


def plan_batches(
    names: Sequence[str],
    batches: Sequence[np.ndarray],
    cost: CostModel,
    *,
    others: Sequence[CostModel] = (),
    chunks: int | str = 1,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
    refused: dict[str, SeqloomError] | None = None,
) -> list[dict[str, TimedPlan]]:
    """Plan every batch with every planner, one after another.

    ``static`` keeps one degree for all batches, as a run would, ``pipeline`` one number of chunks, and every planner
    one tensor and one expert degree; ``auto`` also sees what the others found for a batch. ``progress`` is called with
    the planner's name and the batch's index before each planning; of several numbers of chunks, with the first. Returns
    one dictionary per batch, from the name as given to its plan.

    Args:
        others: the cost model with other tensor or expert degrees. A planner takes the one by which it is fastest.
        chunks: of planner ``pipeline``; "auto": the number by which it is fastest.
        refused: takes the errors of planners that cannot plan the batches, which are left out; None: an error ends all.
    """
    costs, results = (cost, *others), {}
    found: dict[tuple[int, int], dict[str, list[TimedPlan]]] = {own.degrees: {} for own in costs}

    def plan_all(name: str, own: CostModel) -> tuple[int, list[TimedPlan]]:
        tries = _run_options(name, batches, own, chunks)
        total, plans = fastest(tries, lambda options: plan_with(name, own, options, tries))
        found[own.degrees][name] = plans
        return total, plans

    def plan_with(
        name: str, own: CostModel, options: dict[str, Any], tries: Sequence[dict[str, Any]]
    ) -> tuple[int, tuple[int, list[TimedPlan]]]:
        known, plans = found[own.degrees], []
        if parse_planner(name)[0].quick and len(batches):  # load modules before the clock runs
            make_plan(name, batches[0][:2], own, seed=seed, **options)
        for index, batch in enumerate(batches):
            if progress is not None and options is tries[0]:
                progress(name, index)
            begin = time.perf_counter_ns()
            if name == "auto":
                options["known"] = [known[other][index].plan for other in known if other not in RIVALS]
            plan = make_plan(name, batch, own, seed=seed, **options)
            assert plan.hash
            plans.append(TimedPlan(plan, time.perf_counter_ns() - begin))
        total = sum(predicted_ns(each.plan, own) for each in plans) if others or len(tries) > 1 else 0
        return total, (total, plans)

    for name in sorted(names, key=lambda name: name == "auto"):
        try:
            results[name] = fastest(costs, partial(plan_all, name))
        except SeqloomError as error:
            if refused is None:
                raise
            refused[name] = error
    return [{name: results[name][index] for name in names if name in results} for index in range(len(batches))]


def _run_options(name: str, batches: Sequence[np.ndarray], cost: CostModel, chunks: int | str) -> list[dict[str, Any]]:
    """Return the options of a planner that are the same for all batches of a run; where several, to choose from."""
    if name == "static":
        from seqloom.planners.uniform import fastest_static_degree

        return [{"degree": fastest_static_degree(batches, cost.holding([int(batch.max()) for batch in batches]))}]
    if chunks == 1 or not has_chunks(name):
        return [{}]
    from seqloom.planners.pipeline.planner import CHUNKS

    return [{"chunks": number} for number in (CHUNKS if chunks == "auto" else (chunks,))]


def has_chunks(name: str) -> bool:
    """Whether the planner of that name has an option for the stages of every pipeline rank."""
    return "chunks" in signature(parse_planner(name)[0].load()).parameters


def fastest(options: Sequence[S], run: Callable[[S], tuple[int, T]]) -> T:
    """Return what ``run`` makes, with its time in ns, of the option by which it takes least; the first of equals.

    Options are cost models that differ by their tensor and expert degrees, or numbers of chunks. Those by which it is
    refused are left out; if all are, the first refusal is raised.
    """
    best: tuple[int, T] | None = None
    refusal: SeqloomError | None = None
    for option in options:
        try:
            made = run(option)
        except SeqloomError as error:
            refusal = refusal or error
            continue
        best = made if best is None or made[0] < best[0] else best
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]
