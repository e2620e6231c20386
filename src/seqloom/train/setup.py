"""Batches of a data set that is packed ahead: hierarchical balance packing decides which documents make a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.cost import CostModel
from seqloom.data import Batch, LengthLimitedSource, Sampler, Source, open_source
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.packing import choose_levels, hbp
from seqloom.plan import Plan, Sharding, Stage
from seqloom.planners.hydraulis import (
    Strategy,
    check_strategies,
    propose_strategies,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.planners.hydraulis.dispatch import Assignment
from seqloom.planners.hydraulis.planner import plan_assignment
from seqloom.planners.pipeline.planner import V_SHAPED, check_schedule
from seqloom.planners.pipeline.stage_layout import StageLayout, check_stages
from seqloom.planners.registry import PlannerChoice, parse_planner
from seqloom.simulate import predicted_ns
from seqloom.train.config import Config, Pipelining


class PackedSteps:
    """The batches of every epoch: the same levels, and an order of steps of its own. See `data.Steps`."""

    def __init__(self, lengths: np.ndarray, cost: CostModel, tokens: int, seed: int) -> None:
        """Choose the lengths of packs.

        Args:
            lengths: int64[n] tokens of every document.
            cost: prices packs.
            tokens: of a step, at most.
            seed: of the order of steps.
        """
        self._lengths, self._cost, self._tokens, self._seed = lengths, cost, tokens, seed
        self._levels = choose_levels(lengths, cost, tokens)

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of an epoch, step after step, and where steps begin."""
        packing = hbp(self._lengths, self._cost, self._tokens, levels=self._levels, seed=self._seed + epoch)
        return packing.documents, packing.pack_starts[packing.step_starts]


# ---- merged: train.stages
# Who plans a run, and on which stages: one pipeline for all of its steps, none, or others in every step.


SAMPLE = 4
"""Batches by whose predicted times the number of stages is chosen."""


@dataclass(frozen=True, slots=True)
class Planners:
    """What a run plans with.

    Attributes:
        stages: of all its plans; a single one: no pipeline; none: every plan has its own.
        planner: of every step.
        fallback: of a step whose plan is late or could not be made.
        strategies: that the planner chooses from; none: it chooses from no list.
    """

    stages: tuple[Stage, ...]
    planner: PlannerChoice
    fallback: PlannerChoice
    strategies: tuple[Strategy, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether plans may cut the model into stages."""
        return len(self.stages) != 1

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees of the strategies."""
        return tuple(sorted({pipe.parallel.tensor for each in self.strategies for pipe in each.pipelines}))

    def alternatives(self, lengths: np.ndarray) -> list[PlannerChoice]:
        """Return one planner for every strategy that holds documents of these lengths, tokens; and that of the run.

        A planner that makes nothing but such plans has no plan beside them.
        """
        able = [each for each in self.strategies if each.max_tokens >= lengths.max()]
        every = [replace(self.planner, name="hydraulis", options={"strategies": (each,)}) for each in able]
        return every if every and parse_planner(self.planner.name)[0].makes_stages else [*every, self.planner]

    @classmethod
    def of(cls, config: Config, cost: CostModel, stages: int, strategies: Sequence[Strategy] = ()) -> Planners:
        """Return the planners of a run with so many stages, or with these strategies.

        Raises:
            SeqloomError: the model or the ranks do not allow this number.
        """
        if stages > 1:
            return cls._of_line(config, cost, stages)
        options = {"strategies": tuple(strategies)} if strategies else {}
        planner = PlannerChoice(config.plan.planner, options, config.run.seed)
        if cost.sharding == Sharding.FREE:
            return cls((), planner, _plain(planner, cost), tuple(strategies))
        everything = Stage(tuple(range(cost.ranks)), (0, cost.model.layers))
        return cls((everything,), planner, PlannerChoice("static"))

    @classmethod
    def _of_line(cls, config: Config, cost: CostModel, stages: int) -> Planners:
        """One pipeline over all ranks."""
        chunks, order = config.pipeline.chunks, config.pipeline.schedule
        check_stages(cost, stages, chunks)
        check_schedule(order, stages, chunks)
        _check_nodes(cost, stages)
        folded = order in V_SHAPED
        placed = StageLayout.of(cost, stages, chunks, v_shape=folded).stages
        plain = order if folded else "1f1b" if chunks == 1 else "interleaved"
        line = {"stages": stages, "chunks": chunks}
        planner, fallback = (PlannerChoice("pipeline", {**line, "schedule": each}) for each in (order, plain))
        return cls(() if cost.sharding == Sharding.FREE else placed, planner, fallback)


def _plain(planner: PlannerChoice, cost: CostModel) -> PlannerChoice:
    """Return who stands in where plans may have any stages: static, unless only several stages hold the documents."""
    static = PlannerChoice("static")
    try:
        static.plan([cost.max_length or 1], cost)
    except SeqloomError:
        return planner
    return static


def _check_nodes(cost: CostModel, stages: int) -> None:
    """Refuse hybrid sharding of ranks that are neither a part of a node nor a number of whole ones."""
    width, node = cost.ranks // stages, cost.node_size
    if cost.sharding == Sharding.HYBRID and width % node and node % width:
        raise SeqloomError(
            f"plan.sharding = 'hybrid' with stages of {width} ranks in nodes of {node}: every stage needs equally many "
            "ranks in every node that it touches; use 'full' or 'none', or stages that fill nodes or divide them"
        )


def number_of_stages(config: Config, cost: CostModel, batches: Sequence[np.ndarray]) -> int:
    """Return the config's number of stages; where it says auto, the one with the shortest predicted steps.

    Args:
        config: of the run.
        cost: prices its plans.
        batches: lengths of its first batches, int64[n] each.
    """
    wanted = config.pipeline.stages
    if isinstance(wanted, int):
        return wanted
    most = cost.model.layers // config.pipeline.chunks
    divisors = [count for count in range(1, min(cost.ranks, most) + 1) if cost.ranks % count == 0]
    times: dict[int, int] = {}
    refused: SeqloomError | None = None
    for count in divisors:
        try:
            planner = Planners.of(config, cost, count).planner
            times[count] = sum(predicted_ns(planner.plan(batch, cost), cost) for batch in batches[:SAMPLE])
        except SeqloomError as error:
            refused = refused or error
    if not times:
        raise refused or SeqloomError("no documents to choose the number of stages by; give it in pipeline.stages")
    return min(times, key=lambda count: (times[count], count))


# ---- merged: train.strategies
# The strategies that a run chooses from at every step: proposed for its data, or read from a file.
#
# The list is part of a run's folder, so that it can be read, and given to another run. Nothing that is saved
# depends on
# it: parameters and the optimiser's state lie the same way whatever the plans.


FILE = "strategies.json"
"""Where the list lies in a run's folder."""
FEW = 2
"""Tokens per rank of a document that rehearses a pipeline."""


def candidates(config: Config, cost: CostModel, lengths: np.ndarray) -> tuple[Strategy, ...]:
    """Return what the run's planner chooses from; nothing where it chooses from no list.

    Args:
        config: of the run.
        cost: prices its plans.
        lengths: int64[documents], tokens of all its documents.

    Raises:
        SeqloomError: a list that cannot be read, that the ranks or the model do not allow, or that holds no document
            as long as the longest.
    """
    spec = parse_planner(config.plan.planner)[0]
    if not spec.reads_strategies or config.plan.sharding != Sharding.FREE or config.pipeline.stages != 1:
        return ()
    if config.plan.strategies == "auto":
        tokens = tokens_of_step(config, lengths)
        try:
            return propose_strategies(lengths, cost, tokens_per_step=tokens, seed=config.run.seed)
        except SeqloomError:
            if spec.makes_stages:
                raise
            return ()  # plans of one stage may do
    strategies = _read(Path(config.plan.strategies), cost)
    room, longest = max(each.max_tokens for each in strategies), int(lengths.max())
    if room < longest:
        raise SeqloomError(
            f"document {int(lengths.argmax())} has {longest:,} tokens, but no pipeline of plan.strategies = "
            f"{config.plan.strategies!r} holds more than {room:,}; set data.max_length to {room} with data.too_long "
            "'truncate' or 'drop', or propose strategies for longer documents"
        )
    return strategies


def tokens_of_step(config: Config, lengths: np.ndarray) -> int:
    """Return the tokens that a step of the run has, as a mean where it has so many documents."""
    return config.data.tokens or round((config.data.sequences or 1) * float(lengths.mean()))


def kept(config: Config, strategies: Sequence[Strategy]) -> Config:
    """Write a list that was proposed into the run's folder; return the config that names the file.

    One that came from a file stays there.
    """
    if not strategies or config.plan.strategies != "auto":
        return config
    path = config.run.output / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(strategies_to_json(strategies) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise SeqloomError(f"{path}: cannot be written ({reason}); choose another run.output") from None
    return replace(config, plan=replace(config.plan, strategies=str(path)))


def told(config: Config, strategies: Sequence[Strategy], former: Sequence[Any] | None) -> Iterator[str]:
    """Say what the run chooses from, and whether the run that it goes on from chose from something else.

    Args:
        config: of the run.
        strategies: its list.
        former: that of the checkpoint, as plain values; None: the run begins.
    """
    if strategies:
        where = config.run.output / FILE if config.plan.strategies == "auto" else config.plan.strategies
        yield f"{len(strategies)} strategies to choose from ({where}): {'; '.join(map(str, strategies))}"
    if config.model.compile and any(pipe.parallel.tensor > 1 for each in strategies for pipe in each.pipelines):
        yield "model.compile = true: layers of stages that split weights (tensor > 1) run uncompiled, others compiled"
    if former is not None and list(former) != [each.as_dict() for each in strategies]:
        other = f"{len(former)} other strategies" if former else "no strategies"
        yield f"the checkpoint was made with {other}; nothing in it depends on them"


def small_plans(strategies: Sequence[Strategy], cost: CostModel) -> list[Plan]:
    """Return a plan of next to no tokens for every strategy, in which all its pipelines work on two documents each."""
    plans = []
    for strategy in strategies:
        lengths = [min(FEW * len(pipe.ranks), pipe.max_tokens) for pipe in strategy.pipelines for _ in range(2)]
        batches = tuple(((2 * number,), (2 * number + 1,)) for number in range(len(strategy.pipelines)))
        given = Assignment(0, batches, (0,) * len(batches))
        plans.append(plan_assignment(np.array(lengths), strategy, given, cost))
    return plans


def _read(path: Path, cost: CostModel) -> tuple[Strategy, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SeqloomError(
            f"plan.strategies = {str(path)!r} cannot be read ({reason}); write it with seqloom propose --json, or "
            "set 'auto'"
        ) from None
    try:
        strategies = strategies_from_json(text)
        check_strategies(strategies, cost)
        return strategies
    except SeqloomError as error:
        raise SeqloomError(f"plan.strategies = {str(path)!r}: {error}") from None


# ---- merged: train.setup
# From a config to what a run is made of: documents, sampler, model spec, cost model.


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What a run is made of, the same on all ranks.

    Attributes:
        config: of the run, with its number of stages.
        spec: shapes of the model.
        source: documents of training.
        sampler: at its beginning.
        cost: prices plans.
        planners: that plan its steps.
        steps: of the whole run.
    """

    config: Config
    spec: ModelSpec
    source: Source
    sampler: Sampler
    cost: CostModel
    planners: Planners
    steps: int

    @classmethod
    def of(cls, config: Config, ranks: int) -> Setup:
        """Open and check everything that needs no other rank, for a run on `ranks` processes."""
        spec = model_spec(config)
        source = open_documents(config, spec)
        cost = make_cost(config, spec, ranks, int(source.lengths.max()))
        sampler = make_sampler(config, source, cost)
        config, planners = chosen(config, cost, sampler, source)
        return cls(config, spec, source, sampler, cost, planners, _steps(config, source, cost))

    def validation(self) -> tuple[Source, list[Batch]]:
        """Return the documents of evaluation, and its batches: always the same ones."""
        source = open_documents(self.config, self.spec, validation=True)
        return source, make_sampler(self.config, source).peek(self.config.evaluation.batches)


def chosen(config: Config, cost: CostModel, sampler: Sampler, source: Source) -> tuple[Config, Planners]:
    """Return who plans the run, and the config with a number in the place of `pipeline.stages = "auto"`.

    The number is chosen by the first batches, strategies by the lengths of all documents.
    """
    stages = number_of_stages(config, cost, [batch.lengths for batch in sampler.peek(SAMPLE)])
    strategies = candidates(config, cost, source.lengths)
    planners = Planners.of(config, cost, stages, strategies)
    return replace(config, pipeline=replace(config.pipeline, stages=stages) if stages > 1 else Pipelining()), planners


def _steps(config: Config, source: Source, cost: CostModel) -> int:
    """Optimiser steps of the run; epochs are counted out."""
    if config.run.steps is not None:
        return config.run.steps
    sampler, steps = make_sampler(config, source, cost), 0
    while sampler.epoch < (config.run.epochs or 0):
        sampler.next_batch()
        steps += 1
    return steps


def model_spec(config: Config) -> ModelSpec:
    """Return the shapes of the model that is trained."""
    if config.model.spec is None:
        return ModelSpec.load(str(config.model.huggingface))
    return ModelSpec.load(config.model.spec)


def open_documents(config: Config, spec: ModelSpec, *, validation: bool = False) -> Source:
    """Open the documents of training, or those of evaluation, under the config's limit of length."""
    path: Path | None = config.data.validation if validation else config.data.source
    if path is None:
        raise SeqloomError("data.validation is not set; name the documents to evaluate on")
    source = open_source(path, vocabulary=spec.vocabulary)
    if config.data.max_length is None:
        return source
    return LengthLimitedSource(source, config.data.max_length, config.data.too_long)


def make_sampler(config: Config, source: Source, cost: CostModel | None = None) -> Sampler:
    """Return the sampler of a run, at its beginning.

    Args:
        config: says what makes a batch.
        source: its documents.
        cost: of the run, for the documents of training; those of evaluation are never packed ahead.
    """
    if cost is not None and config.data.batches == "hbp":
        assert config.data.tokens is not None  # the section has checked it
        packed = PackedSteps(source.lengths, cost, config.data.tokens, config.run.seed)
        return Sampler(source.lengths, source.valid, seed=config.run.seed, packed=packed)
    size = {"documents": config.data.sequences, "tokens": config.data.tokens}
    return Sampler(source.lengths, source.valid, seed=config.run.seed, **size)


def make_cost(config: Config, spec: ModelSpec, ranks: int, longest: int) -> CostModel:
    """Return what prices the plans of a run.

    Args:
        config: names cluster, profile, sharding and limits.
        spec: of the model.
        ranks: processes of the run.
        longest: tokens of the longest document, where the config sets no limit.
    """
    spelling = f"1x{ranks}xCPU" if config.plan.cluster == "auto" else config.plan.cluster
    cluster = Cluster.parse(spelling)
    if cluster.ranks != ranks:
        raise SeqloomError(
            f"plan.cluster = {spelling!r} has {cluster.ranks} ranks, the run has {ranks}; "
            f"start {cluster.ranks} processes, or name a cluster of {ranks}"
        )
    options = config.plan
    limit = config.data.max_length or longest
    asked = config.pipeline.stages
    anything = asked == "auto" or options.sharding == Sharding.FREE  # perhaps only a pipeline holds the model
    stages = 2 if anything else int(asked)
    memory = (options.budget_gib, limit, options.capacity)
    return CostModel(cluster, spec, options.profile, options.sharding, *memory, stages=stages)
