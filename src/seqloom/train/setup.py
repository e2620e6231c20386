"""From a config to what a run is made of: documents, sampler, model spec, cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from seqloom.cost import CostModel
from seqloom.data import Batch, Limited, Sampler, Source, open_source
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding
from seqloom.train.config import Config
from seqloom.train.packed import PackedSteps
from seqloom.train.sections import Pipelining
from seqloom.train.stages import SAMPLE, Planners, number_of_stages
from seqloom.train.strategies import candidates


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
    return Limited(source, config.data.max_length, config.data.too_long)


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
        return Sampler(source.lengths, source.valid, seed=config.run.seed, steps=packed)
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
