"""What packing a run's documents before it starts would do: other steps of the same documents, and their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from seqloom.cost import CostModel
from seqloom.data import Batch, LengthLimitedSource, Sampler, Source
from seqloom.errors import SeqloomError
from seqloom.packing import Balance, Packing, hbp, plain_packing, plans_balance
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.registry import PlannerChoice, parse_planner
from seqloom.planners.uniform import fastest_static_degree
from seqloom.simulate import predicted_ns
from seqloom.simulate.memory import peak_memory
from seqloom.train.config import Config
from seqloom.train.setup import Planners, chosen, make_cost, make_sampler, model_spec, open_documents

PACKINGS: dict[str, Callable[[np.ndarray, CostModel, int], Packing]] = {"hbp": hbp, "first-fit": plain_packing}


@dataclass(frozen=True, slots=True)
class Repacked:
    """The documents of some steps, packed as one data set.

    Attributes:
        tokens_per_step: that no step exceeds.
        balance: by the name of the packing.
        refused: why there is none; "" where there is.
    """

    tokens_per_step: int
    balance: dict[str, Balance]
    refused: str = ""


def repacked(batches: Sequence[np.ndarray], cost: CostModel) -> Repacked:
    """Pack the documents of these batches, int64[n] tokens each, into steps as large as the batches are on average."""
    lengths = np.concatenate(list(batches))
    occupied = cost.padded_lengths(lengths)
    most = max(-(-int(occupied.sum()) // len(batches)), int(occupied.max()))
    try:
        found = {name: packing(lengths, cost, most).balance for name, packing in PACKINGS.items()}
    except SeqloomError as error:  # a model that only pipelines hold, or a document that only pieces of it fit
        return Repacked(most, {}, str(error))
    return Repacked(most, found)


# ---- merged: train.check
# What a run will be, before it starts: its documents, its steps, and the predicted times and memory of the first
# ones.
#
# Figures only. Nothing here needs torch; what a run could not start with raises the error that the run would raise.


T = TypeVar("T")
Progress = Callable[[str, int], None]
"""Called with a planner's name and a batch's index before each planning."""


@dataclass(frozen=True, slots=True)
class Documents:
    """What a source holds under the config's limit of length.

    Attributes:
        documents, tokens: of an epoch.
        valid: labels that count, of an epoch.
        longest: tokens.
        truncated, dropped: documents to which it happened.
        lost: tokens that this took away.
        batches: of the first epoch.
        unlabelled: those of them in which no label counts.
    """

    documents: int
    tokens: int
    valid: int
    longest: int
    truncated: int
    dropped: int
    lost: int
    batches: int
    unlabelled: int


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """A run before anything is planned.

    Attributes:
        config: of the run.
        cost: prices its plans.
        planners: that plan its steps.
        training: its documents.
        validation: those of evaluation; None: there are none.
        steps: of the whole run.
        sample: the first batches.
    """

    config: Config
    cost: CostModel
    planners: Planners
    training: Documents
    validation: Documents | None
    steps: int
    sample: tuple[Batch, ...]

    @property
    def baseline(self) -> bool:
        """Whether the planner is another one than its stand-in, so that this one is worth a comparison."""
        planner, plain = self.planners.planner, self.planners.fallback
        return (parse_planner(planner.name)[0].name, planner.options) != (plain.name, plain.options)


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The sampled steps under one planner; every tuple has one entry per batch.

    Attributes:
        planner: its name and options.
        step_ns: predicted.
        bound_ns: what no plan on the same stages beats; the step's own time where nothing is proven.
        rounds: of the plan.
        plan_ns: what planning took, the bound included, as in a run.
        memory: int64[batches, ranks], predicted peak bytes.
        fallbacks: why a plain plan stands in; "" where it does not.
        balance: how evenly the steps use the ranks.
    """

    planner: str
    step_ns: tuple[int, ...]
    bound_ns: tuple[int, ...]
    rounds: tuple[int, ...]
    plan_ns: tuple[int, ...]
    memory: np.ndarray
    fallbacks: tuple[str, ...]
    balance: Balance

    @property
    def worst(self) -> int:
        """Index of the longest step."""
        return int(np.argmax(self.step_ns))

    @property
    def gaps(self) -> tuple[float, ...]:
        """How far each step is above its bound, as a share of the bound."""
        return tuple(step / bound - 1 for step, bound in zip(self.step_ns, self.bound_ns, strict=True))

    @property
    def peak_bytes(self) -> int:
        """The most that any rank holds in any of the steps."""
        return int(self.memory.max())


def outlook(config: Config, ranks: int, batches: int = 8) -> Outlook:
    """Open and count what a run reads, and refuse what it would refuse; no step is planned.

    Args:
        config: of the run.
        ranks: processes of the run.
        batches: to look at, from the first on; not more than the run has steps.
    """
    if batches < 1:
        raise SeqloomError(f"{batches} batches to look at; give 1 or more")
    spec = model_spec(config)
    source = open_documents(config, spec)
    cost = make_cost(config, spec, ranks, int(source.lengths.max()))
    sources = {"data.source": source}
    if config.data.validation is not None:
        sources["data.validation"] = open_documents(config, spec, validation=True)
    config, planners = chosen(config, cost, make_sampler(config, source, cost), source)
    for name, each in sources.items():
        _refuse_too_long(name, each, cost, planners)
    samplers = [make_sampler(config, each, cost if each is source else None) for each in sources.values()]
    training, *others = map(_count, sources.values(), samplers)
    steps = config.run.steps or len(_labels(make_sampler(config, source, cost), config.run.epochs or 1))
    sample = make_sampler(config, source, cost).peek(min(batches, steps))
    return Outlook(config, cost, planners, training, others[0] if others else None, steps, tuple(sample))


def forecasts(run: Outlook, progress: Progress | None = None) -> list[Forecast]:
    """Plan the sampled batches with the run's planner, and with what stands in for it where that is another.

    Static has one degree: the one that is fastest over the sample.
    """
    lengths = [batch.lengths for batch in run.sample]
    planner, plain = run.planners.planner, run.planners.fallback
    made = [_forecast(planner, plain, lengths, run.cost, progress)]
    if run.baseline:
        if plain == PlannerChoice("static"):
            plain = PlannerChoice(f"static:{fastest_static_degree(lengths, run.cost)}")
        made.append(_forecast(plain, plain, lengths, run.cost, progress))
    return made


def warnings(run: Outlook, planned: Forecast) -> list[str]:
    """Say what lets a run start and is probably not meant, each with the way out."""
    found = []
    if any(planned.fallbacks):
        reason = next(filter(None, planned.fallbacks))
        count = sum(map(bool, planned.fallbacks))
        found.append(
            f"the {run.planners.fallback.name} plan stands in for {count} of {len(run.sample)} steps, since planner "
            f"{planned.planner!r} could not plan them: {reason}"
        )
    plan_ns, step_ns = median(planned.plan_ns), median(planned.step_ns)
    if not run.config.plan.ahead:
        found.append(
            f"plan.ahead = 0, so every step waits for its plan, about {plan_ns / 1e6:.3g} ms beside a step of "
            f"{step_ns / 1e6:.3g} ms; raise it to 1 or more"
        )
    elif plan_ns > step_ns:
        found.append(
            f"planning takes {plan_ns / 1e6:.3g} ms and a step {step_ns / 1e6:.3g} ms (medians), so planning ahead "
            "falls behind and steps wait; choose a faster planner, or give a step more tokens"
        )
    if run.training.unlabelled:
        found.append(
            f"no label counts in {run.training.unlabelled:,} of the first epoch's {run.training.batches:,} batches, "
            "and such a step is refused; put more documents in a step, or prepare the data without such documents"
        )
    return found + _of_evaluation(run)


def _of_evaluation(run: Outlook) -> list[str]:
    every, batches = run.config.evaluation.every, run.config.evaluation.batches
    if run.validation is None:
        return []
    if not every:
        return ["data.validation is set and evaluation.every = 0, so nothing is evaluated; set every, or leave it out"]
    found = []
    if every > run.steps:
        found.append(f"evaluation.every = {every} is more than the {run.steps:,} steps of the run; lower it")
    if batches > run.validation.batches:
        found.append(
            f"evaluation.batches = {batches}, but data.validation has {run.validation.batches}, so documents count "
            f"more than once; lower it to {run.validation.batches}"
        )
    return found


def _count(source: Source, sampler: Sampler) -> Documents:
    limited = source if isinstance(source, LengthLimitedSource) else None
    valid = _labels(sampler, 1)
    return Documents(
        documents=len(source.lengths),
        tokens=int(source.lengths.sum()),
        valid=sum(valid),
        longest=int(source.lengths.max()),
        truncated=limited.truncated if limited else 0,
        dropped=limited.dropped if limited else 0,
        lost=limited.lost_tokens if limited else 0,
        batches=len(valid),
        unlabelled=valid.count(0),
    )


def _labels(sampler: Sampler, epochs: int) -> list[int]:
    """Labels that count in every batch of some epochs; by tokens, each epoch has its own number of them."""
    valid = []
    while sampler.epoch < epochs:
        valid.append(sampler.next_batch().valid_tokens)
    return valid


def _refuse_too_long(name: str, source: Source, cost: CostModel, planners: Planners) -> None:
    """Refuse a document that no plan holds: the step that has it could not be planned."""
    document = int(source.lengths.argmax())
    length = source.lengths[document : document + 1]
    if planners.cut:
        try:
            planners.planner.plan(length, cost)
        except SeqloomError as error:
            raise SeqloomError(f"{name}: document {document}: {error}") from None
        return
    degree = max(shape.degree for shape in cost.shapes)
    capacity = max(cost.capacity(policy) for policy in cost.policies)
    room = degree * capacity // cost.pad_multiple * cost.pad_multiple
    if int(cost.padded_lengths(length)[0]) > room:
        raise SeqloomError(
            f"{name}: document {document} has {length[0]:,} tokens, but the largest group ({degree} "
            f"ranks x {capacity:,} tokens) holds {room:,}; set data.max_length to {room} with data.too_long 'truncate' "
            "or 'drop', raise plan.capacity or plan.budget_gib, or use more ranks"
        )


def _forecast(
    chosen: PlannerChoice,
    plain: PlannerChoice,
    lengths: Sequence[np.ndarray],
    cost: CostModel,
    progress: Progress | None,
) -> Forecast:
    """Plan every batch as a run does: where the planner cannot, the plain one stands in, with the reason."""
    _plan(chosen, plain, lengths[0][:2], cost)  # load, and compile where that is installed, before the clock runs
    made: list[tuple[Plan, str]] = []
    step_ns, bounds, took = [], [], []
    for index, each in enumerate(lengths):
        if progress is not None:
            progress(chosen.name, index)
        planned, ns = _timed(lambda each=each: _plan(chosen, plain, each, cost))
        bound, bound_ns = _timed(lambda plan=planned[0]: plan_bound(plan, cost))
        made.append(planned)
        step_ns.append(int(predicted_ns(planned[0], cost)))
        bounds.append(step_ns[-1] if bound is None else int(bound))
        took.append(ns + bound_ns)
    return Forecast(
        planner=str(chosen),
        step_ns=tuple(step_ns),
        bound_ns=tuple(bounds),
        rounds=tuple(plan.rounds for plan, _ in made),
        plan_ns=tuple(took),
        memory=np.stack([peak_memory(plan, cost) for plan, _ in made]),
        fallbacks=tuple(why for _, why in made),
        balance=plans_balance([plan for plan, _ in made], cost, step_ns),
    )


def _plan(chosen: PlannerChoice, plain: PlannerChoice, lengths: np.ndarray, cost: CostModel) -> tuple[Plan, str]:
    try:
        return chosen.plan(lengths, cost), ""
    except SeqloomError as error:
        return plain.plan(lengths, cost), str(error)


def _timed(work: Callable[[], T]) -> tuple[T, int]:
    """Do some work; return its result and the ns it took."""
    begin = time.perf_counter_ns()
    return work(), time.perf_counter_ns() - begin
