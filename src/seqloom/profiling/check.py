"""What `seqloom check` predicts before a run starts: its documents, and times and memory of its first steps.

Figures only, without torch. What a run could not start with raises the error that the run would raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from seqloom.api import Evaluation, evaluate
from seqloom.cost import CostModel
from seqloom.cost.engines import AnalyticEngine
from seqloom.data import Batch, JoinedSource, LengthLimitedSource, Sampler, Source
from seqloom.data.documents import Show
from seqloom.errors import SeqloomError
from seqloom.packing import Balance, hbp, plain_packing, plans_balance
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.recompute import offloaded_counts, without_offload
from seqloom.planners.registry import PlannerChoice, parse_planner
from seqloom.planners.uniform import fastest_static_degree
from seqloom.simulate import predicted_ns
from seqloom.simulate.memory import peak_host_memory
from seqloom.train.config import Config
from seqloom.train.logging import import_trackers, load_callbacks
from seqloom.train.run_folder import Manifest, RunLock, latest_checkpoint, resumed_checkpoint
from seqloom.train.setup import Describe, RunPlanners, RunSetup, make_sampler, open_documents

Progress = Callable[[str, int], None]
"""Called with a planner's name and a batch's index before each planning."""


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """What a source holds under the config's limit of length, in an epoch."""

    documents: int
    tokens: int
    valid: int  # labels that the loss counts
    longest: int  # document, tokens
    truncated: int  # documents
    dropped: int  # documents
    lost: int  # tokens that this took away
    batches: int  # of the first epoch
    unlabelled: int  # batches of the first epoch in which no label counts


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What a source of a mixture holds under the config's limit of length, and what the whole run takes of it."""

    path: str
    share: float  # its weight beside those of all sources
    documents: int
    tokens: int
    taken_documents: int  # as often as they come
    taken_tokens: int
    passes: float  # times that the run goes through it


@dataclass(frozen=True, slots=True, eq=False)
class RunCheck:
    """A run before anything is planned: its documents, and a sample of its first batches."""

    setup: RunSetup
    training: DocumentCounts
    validation: DocumentCounts | None
    sample: tuple[Batch, ...]
    resumed: tuple[Path, Manifest] | None = None  # the checkpoint that the run begins from
    sources: tuple[SourceCounts, ...] = ()  # of a mixture

    @property
    def has_baseline(self) -> bool:
        """Whether planner and fallback differ, so that comparing them says something."""
        planner, fallback = self.setup.planners.planner, self.setup.planners.fallback
        return (parse_planner(planner.name)[0].name, planner.options) != (fallback.name, fallback.options)


@dataclass(frozen=True, slots=True, eq=False)
class PredictedSteps:
    """The sampled steps under one planner; tuples and lists have one entry per batch."""

    planner: str  # its name and options
    evaluations: tuple[Evaluation, ...]  # of the plans; their planning time includes that of the bound, as in a run
    fallback_reasons: tuple[str, ...]  # why the fallback planner was used; "" where it was not
    balance: Balance  # how evenly the steps use the ranks

    @property
    def step_ns(self) -> list[int]:
        """Predicted step times."""
        return [each.simulation.step_ns for each in self.evaluations]

    @property
    def gaps(self) -> list[float | None]:
        """How far each step is above its lower bound, as a share of the bound; None where nothing is proven."""
        return [each.gap for each in self.evaluations]

    @property
    def planning_ns(self) -> list[int]:
        """Wall times of planner and bound."""
        return [each.planning_ns or 0 for each in self.evaluations]

    @property
    def worst(self) -> int:
        """Index of the longest step."""
        return int(np.argmax(self.step_ns))


@dataclass(frozen=True, slots=True)
class OffloadedSteps:
    """What the sampled steps keep in host memory between forward and backward, and what the copies cost."""

    steps: int  # that offload some layers
    layers: int  # of a micro-batch on a stage, at most
    host_bytes: int  # of activations of a rank, at most
    copies_ns: int  # by which these steps are longer for the copies
    step_ns: int  # of these steps

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], cost: CostModel) -> OffloadedSteps | None:
        """Count over some steps; None: none of them offloads anything."""
        counts = [offloaded_counts(each.plan) for each in evaluations]
        offloading = [each for each, found in zip(evaluations, counts, strict=True) if any(found)]
        if not offloading:
            return None
        times = [each.simulation.step_ns for each in offloading]
        return cls(
            steps=len(offloading),
            layers=max(max(found, default=0) for found in counts),
            host_bytes=max(int(each.simulation.peak_host_memory.max()) for each in offloading)
            - optimiser_bytes(offloading, cost),
            copies_ns=sum(times) - sum(predicted_ns(without_offload(each.plan), cost) for each in offloading),
            step_ns=sum(times),
        )


@dataclass(frozen=True, slots=True)
class OffloadedOptimiser:
    """Master weights and moments in host memory, and what updating them there, or from there, costs."""

    host_bytes: int  # of a rank, at most
    update_ns: int  # of a step
    update_on_host: bool  # by the CPUs, not on the device

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], cost: CostModel) -> OffloadedOptimiser | None:
        """Measure by the plans of some steps; None: the optimiser is on the device."""
        if not cost.offload_optimiser or not isinstance(cost.engine, AnalyticEngine):
            return None
        size = optimiser_bytes(evaluations, cost)
        update_ns = min(cost.engine.offloaded_update_ns(size / cost.engine.memory.host_bytes_per_update).values())
        return cls(size, round(update_ns), cost.updates_on_host)


def optimiser_bytes(evaluations: Sequence[Evaluation], cost: CostModel) -> int:
    """Bytes of the optimiser in the host memory of a rank, at most."""
    return int(peak_host_memory(without_offload(evaluations[0].plan), cost).max())


def inspect_run(
    config: Config, ranks: int, batches: int = 8, describe: Describe | None = None, show: Show | None = None
) -> RunCheck:
    """Open and count what a run on `ranks` processes reads, and refuse what it would refuse; no step is planned.

    The sample has the first `batches` batches, or as many as the run has steps. For `describe` and
    `show` see `RunSetup.load`.
    """
    if batches < 1:
        raise SeqloomError(f"{batches} batches to look at; give 1 or more")
    setup = RunSetup.load(config, ranks, describe=describe, show=show)
    import_trackers(config.log.sinks)
    load_callbacks(config.run.callbacks)
    RunLock(config.run.output).check()
    path = resumed_checkpoint(latest_checkpoint(config.checkpoints), config.checkpoint.resume)
    resumed = None if path is None else (path, Manifest.read(path))
    config, source, cost = setup.config, setup.source, setup.cost
    mixed = isinstance(source, JoinedSource)
    for part in source.parts if mixed else (source,):
        _refuse_too_long(f"data.sources: {part.name}" if mixed else "data.source", part, cost, setup.planners)
    validation = None
    if config.data.evaluates:
        documents = open_documents(config, setup.spec, evaluation=True)
        _refuse_too_long("data.validation", documents, cost, setup.planners)
        validation = _count_documents(documents, make_sampler(config, documents))
    training = _count_documents(source, make_sampler(config, source, cost))
    sample = tuple(setup.sampler.peek(min(batches, setup.steps)))
    return RunCheck(setup, training, validation, sample, resumed, _count_sources(setup))


def _refuse_too_long(name: str, source: Source, cost: CostModel, planners: RunPlanners) -> None:
    """Refuse a document that no plan holds: the step that has it could not be planned."""
    document = int(source.lengths.argmax())
    length = source.lengths[document : document + 1]
    if planners.multi_stage:
        try:
            planners.planner.plan(length, cost)
        except SeqloomError as error:
            raise SeqloomError(f"{name}: document {document}: {error}") from None
        return
    if planners.fallback.name == "pieces":  # since no group holds it whole
        with suppress(SeqloomError):
            planners.planner.plan(length, cost)
            return
    cost = cost.holding(length)
    degree = max(shape.degree for shape in cost.shapes)
    capacity = max(cost.capacity(policy) for policy in cost.policies)
    most = degree * capacity // cost.pad_multiple * cost.pad_multiple
    if int(cost.padded_lengths(length)[0]) > most:
        raise SeqloomError(
            f"{name}: document {document} has {length[0]:,} tokens, but the largest group ({degree} "
            f"ranks x {capacity:,} tokens) holds {most:,}; set data.max_length to {most} with data.too_long 'truncate' "
            f"or 'drop', raise plan.capacity if it is set, {cost.ways_out}"
        )


def _count_documents(source: Source, sampler: Sampler) -> DocumentCounts:
    parts = source.parts if isinstance(source, JoinedSource) else (source,)
    limited = [part for part in parts if isinstance(part, LengthLimitedSource)]
    batches = []
    while sampler.epoch < 1:
        batch = sampler.next_batch()
        batches.append((len(batch), batch.tokens, batch.valid_tokens))
    documents, tokens, valid = np.array(batches).sum(axis=0).tolist()
    return DocumentCounts(
        *(documents, tokens, valid, int(source.lengths.max())),
        *(sum(part.truncated for part in limited), sum(part.dropped for part in limited)),
        lost=sum(part.lost_tokens for part in limited),
        batches=len(batches),
        unlabelled=sum(not valid for _, _, valid in batches),
    )


def _count_sources(setup: RunSetup) -> tuple[SourceCounts, ...]:
    """Count what all steps of a run take of each source of its mixture."""
    source, named = setup.source, setup.config.data.sources
    if not isinstance(source, JoinedSource) or named is None:
        return ()
    sampler, times = make_sampler(setup.config, source, setup.cost), np.zeros(len(source), dtype=np.int64)
    for _ in range(setup.steps):
        times[sampler.next_batch().documents] += 1  # no document is twice in a batch
    weights, counts = sum(each.weight for each in named), []
    for each, part, start in zip(named, source.parts, source.starts.tolist(), strict=True):
        taken = times[start : start + len(part)]
        documents, tokens = int(taken.sum()), int(taken @ part.lengths)
        held = (len(part), int(part.lengths.sum()))
        counts.append(
            SourceCounts(str(each.path), each.weight / weights, *held, documents, tokens, documents / len(part))
        )
    return tuple(counts)


def predict_steps(run: RunCheck, progress: Progress | None = None) -> list[PredictedSteps]:
    """Plan the sampled batches with the run's planner, and with the fallback planner where that is another.

    Static has one degree: the one that is fastest over the sample.
    """
    lengths, cost = [batch.lengths for batch in run.sample], run.setup.cost
    planner, fallback = run.setup.planners.planner, run.setup.planners.fallback
    predictions = [_predict(planner, fallback, lengths, cost, progress)]
    if run.has_baseline:
        if fallback == PlannerChoice("static"):
            longest = [int(batch.max()) for batch in lengths]
            fallback = PlannerChoice(f"static:{fastest_static_degree(lengths, cost.holding(longest))}")
        predictions.append(_predict(fallback, fallback, lengths, cost, progress))
    return predictions


def _predict(
    planner: PlannerChoice,
    fallback: PlannerChoice,
    lengths: Sequence[np.ndarray],
    cost: CostModel,
    progress: Progress | None,
) -> PredictedSteps:
    """Plan every batch as a run does: by the fallback planner, with the reason, where the planner cannot."""

    def plan_batch(batch: np.ndarray) -> tuple[Plan, str]:
        try:
            return planner.plan(batch, cost), ""
        except SeqloomError as error:
            return fallback.plan(batch, cost), str(error)

    plan_batch(lengths[0][:2])  # load, and compile where that is installed, before the clock runs
    evaluations, reasons = [], []
    for index, batch in enumerate(lengths):
        if progress is not None:
            progress(planner.name, index)
        begin = time.perf_counter_ns()
        plan, reason = plan_batch(batch)
        bound_ns = plan_bound(plan, cost)
        planning_ns = time.perf_counter_ns() - begin
        evaluations.append(evaluate(plan, cost, bound_ns=bound_ns, planning_ns=planning_ns))
        reasons.append(reason)
    balance = plans_balance(
        [each.plan for each in evaluations], cost, [each.simulation.step_ns for each in evaluations]
    )
    return PredictedSteps(str(planner), tuple(evaluations), tuple(reasons), balance)


def find_warnings(run: RunCheck, predicted: PredictedSteps) -> list[str]:
    """Say what lets a run start and is probably not meant, each with the way out."""
    warnings, config = [], run.setup.config
    reasons = [reason for reason in predicted.fallback_reasons if reason]
    if reasons:
        warnings.append(
            f"the {run.setup.planners.fallback.name} planner is the fallback in {len(reasons)} of {len(run.sample)} "
            f"steps, since planner {predicted.planner!r} could not plan them: {reasons[0]}"
        )
    plan_ns, step_ns = median(predicted.planning_ns), median(predicted.step_ns)
    if not config.plan.ahead:
        warnings.append(
            f"plan.ahead = 0, so every step waits for its plan, about {plan_ns / 1e6:.3g} ms beside a step of "
            f"{step_ns / 1e6:.3g} ms; raise it to 1 or more"
        )
    elif plan_ns > step_ns:
        warnings.append(
            f"planning takes {plan_ns / 1e6:.3g} ms and a step {step_ns / 1e6:.3g} ms (medians), so planning ahead "
            "falls behind and steps wait; choose a faster planner, or give a step more tokens"
        )
    if run.training.unlabelled:
        warnings.append(
            f"no label counts in {run.training.unlabelled:,} of the first epoch's {run.training.batches:,} batches, "
            "and such a step is refused; put more documents in a step, or prepare the data without such documents"
        )
    if run.sources and run.training.batches == 1:
        ending = max(run.sources, key=lambda each: each.passes)
        warnings.append(
            f"an epoch of the mixture ends when {ending.path!r} has been gone through: after "
            f"{run.training.documents:,} documents, which are one step, perhaps a smaller one than asked for; lower "
            "its weight, or put fewer documents in a step"
        )
    every, batches = config.evaluation.every, config.evaluation.batches
    if run.validation is not None and not every:
        warnings.append(
            "documents are named for evaluation (data.validation, data.validation_share) and evaluation.every = 0, so "
            "nothing is evaluated; set every, or leave them out"
        )
    elif run.validation is not None:
        if every > run.setup.steps:
            warnings.append(
                f"evaluation.every = {every} is more than the {run.setup.steps:,} steps of the run; lower it"
            )
        if batches > run.validation.batches:
            warnings.append(
                f"evaluation.batches = {batches}, but the documents of evaluation have {run.validation.batches}, so "
                f"documents count more than once; lower it to {run.validation.batches}"
            )
    return warnings


@dataclass(frozen=True, slots=True)
class PackingComparison:
    """The documents of some steps, packed again into other steps before a run starts."""

    tokens_per_step: int  # that no step exceeds
    balance: dict[str, Balance]  # by the name of the packing
    refused: str = ""  # why there is none


def compare_packings(batches: Sequence[np.ndarray], cost: CostModel) -> PackingComparison:
    """Pack the documents of these batches, int64[n] tokens each, into steps as large as the batches are on average."""
    lengths = np.concatenate(list(batches))
    padded = cost.padded_lengths(lengths)
    most = max(-(-int(padded.sum()) // len(batches)), int(padded.max()))
    try:
        packings = {"hbp": hbp(lengths, cost, most), "first-fit": plain_packing(lengths, cost, most)}
    except SeqloomError as error:  # a model that only pipelines hold, or a document that only pieces of it fit
        return PackingComparison(most, {}, str(error))
    return PackingComparison(most, {name: packing.balance for name, packing in packings.items()})
