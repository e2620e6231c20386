"""From a config to everything a run needs before ranks connect: documents, sampler, model spec, cost model, planners.

`RunSetup.load` is deterministic: every rank calls it, with the choices of rank 0. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from seqloom.api import cost_models
from seqloom.cost import CostModel
from seqloom.data import (
    Batch,
    JoinedSource,
    LengthLimitedSource,
    Mixture,
    RecordFields,
    Sampler,
    Source,
    load_tokenizer,
    open_source,
    split_source,
)
from seqloom.data.documents import Show, names_documents, prepare_once
from seqloom.data.mixture import check_same_vocabulary
from seqloom.data.tokenizers import Tokenizer
from seqloom.describe import Cluster, ModelSpec
from seqloom.describe.huggingface import position_rows
from seqloom.errors import MemoryBudgetError, SeqloomError
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
from seqloom.planners.pipeline.planner import V_SHAPED, check_schedule, chunk_counts
from seqloom.planners.pipeline.stage_layout import StageLayout, check_head_stages, check_stages
from seqloom.planners.registry import PlannerChoice, fastest, parse_planner
from seqloom.reader import read_mapping
from seqloom.simulate import predicted_ns
from seqloom.train.config import MEASURED, Config, Data, Documents, Pipelining

SAMPLED_BATCHES = 4
"""Batches by whose predicted times `pipeline.stages` and `.chunks`, `plan.tensor` and `.expert` are decided."""
HEAD_BATCHES = 2
"""Of these, batches by which `pipeline.head = "auto"` is decided."""
STRATEGIES_FILE = "strategies.json"
"""The list of proposed strategies, in a run's folder."""
WARM_UP_TOKENS = 2
"""Tokens per rank of a document in a warm-up plan."""


HeadStages = Literal["last", "all"]
"""The stages that compute the head."""
Describe = Callable[[Config], ModelSpec]
"""Returns the shapes of the model that a config names."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*")
"""Files of which a folder with a tokenizer has one."""


@dataclass(frozen=True, slots=True)
class RunChoices:
    """What a config leaves open: stores of its documents; pipeline, degrees, place of the optimiser, strategies."""

    data: Data
    pipeline: Pipelining
    strategies: tuple[Strategy, ...]
    offload_optimiser: bool = False
    expert: int = 1
    tensor: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RunSetup:
    """Everything a run needs before ranks connect, the same on all ranks."""

    config: Config  # with the choices where it says "auto"
    spec: ModelSpec  # shapes of the model
    source: Source  # documents of training
    sampler: Sampler  # at its beginning
    cost: CostModel  # of the plans
    planners: RunPlanners  # of the steps
    steps: int  # of the whole run

    @classmethod
    def load(
        cls,
        config: Config,
        ranks: int,
        choices: RunChoices | None = None,
        *,
        describe: Describe | None = None,
        show: Show | None = None,
    ) -> RunSetup:
        """Open and check everything that needs no other rank, for a run on `ranks` processes.

        Documents that the config names by themselves are prepared first, unless they are already.

        Args:
            choices: those of rank 0; None: choose here.
            describe: returns the shapes of the model; None: they follow from its spec or its config.json.
            show: is told how far preparing documents has come.
        """
        spec = (describe or load_model_spec)(config)
        if not spec.causal:
            raise SeqloomError(
                f"model {spec.name} is not causal: labels of a run are the next tokens, and its tokens see those; use "
                "a causal model, or train this one in a loop of your own, with a label for what each position hides"
            )
        data = choices.data if choices else prepare_documents(config, spec, show or (lambda text: None))
        config = replace(config, data=data)
        source = open_documents(config, spec)
        longest = int(source.lengths.max())
        offload = choices.offload_optimiser if choices else choose_optimiser_offload(config, spec, ranks, longest)
        config = replace(config, optimiser=replace(config.optimiser, offload=offload))
        if choices is not None:
            config = replace(config, plan=replace(config.plan, expert=choices.expert, tensor=choices.tensor))
        costs = make_cost_models(config, spec, ranks, longest)
        cost, sampler = costs[0], make_sampler(config, source, costs[0])
        if choices is None:
            batches = [batch.lengths for batch in sampler.peek(SAMPLED_BATCHES)]
            pipeline, cost = choose_degrees(config, costs, batches)
            strategies = load_strategies(config, cost, source.lengths)
            choices = RunChoices(data, pipeline, strategies, offload, cost.expert, cost.tensor)
            config = replace(config, plan=replace(config.plan, expert=cost.expert, tensor=cost.tensor))
            sampler = sampler if cost is costs[0] else make_sampler(config, source, cost)
        planners = RunPlanners.load(config, cost, choices.pipeline, choices.strategies)
        config = replace(config, pipeline=choices.pipeline)
        return cls(config, spec, source, sampler, cost, planners, _count_steps(config, source, cost))

    @property
    def choices(self) -> RunChoices:
        """What was chosen for this run."""
        config, cost, strategies = self.config, self.cost, self.planners.strategies
        return RunChoices(config.data, config.pipeline, strategies, cost.offload_optimiser, cost.expert, cost.tensor)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same on all ranks, by name: config, model, documents and cost model."""
        settings = self.config.as_dict()
        found = {f"{section}.{key}": str(value) for section in settings for key, value in settings[section].items()}
        documents = hashlib.sha256(np.ascontiguousarray(self.source.lengths).tobytes()).hexdigest()
        profile = hashlib.sha256(repr(self.cost.profile).encode()).hexdigest()
        return found | {"model": repr(self.spec), "lengths of documents": documents[:12], "profile": profile[:12]}

    def validation(self) -> tuple[Source, list[Batch]]:
        """Return the documents of evaluation, and its batches: always the same ones."""
        if not self.config.data.evaluates:
            raise SeqloomError("data.validation is not set; name the documents to evaluate on")
        source = open_documents(self.config, self.spec, evaluation=True)
        return source, make_sampler(self.config, source).peek(self.config.evaluation.batches)


def load_model_spec(config: Config) -> ModelSpec:
    """Return the shapes of the model that is trained."""
    folder = config.model.huggingface
    if folder is None:
        return ModelSpec.load(cast("str", config.model.spec))
    if not (folder / "config.json").is_file():
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r}: no config.json in it; give the folder of a model, or the name of a "
            "published one, such as Qwen/Qwen3-0.6B"
        )
    return ModelSpec.load(str(folder))


def prepare_documents(config: Config, spec: ModelSpec, show: Show) -> Data:
    """Prepare the documents that a config names by themselves, each once; return its keys with stores in their place.

    `show` is told of the progress, and what was left out.
    """
    data = config.data
    named = [path for path in (data.source, data.validation, *(each.path for each in data.sources or ())) if path]
    if not any(map(names_documents, named)):
        given = [key for key in ("tokenizer", "chat_template", "fields", "cache") if getattr(data, key) is not None]
        if given:
            raise SeqloomError(
                f"data.{given[0]} is set, and nothing is prepared: all sources have ids already; leave it out, or name "
                "documents as source"
            )
        return data
    tokenizer, fields = _load_tokenizer(config, spec), data.fields or RecordFields()

    def store_of(key: str, path: Documents) -> Path:
        if isinstance(path, Path) and not names_documents(path):
            return path
        options: dict[str, Any] = {"tokenizer": tokenizer, "vocabulary": spec.vocabulary, "fields": fields}
        try:
            store, done = prepare_once(path, config.stores, **options, show=show)
        except SeqloomError as error:
            lacks = tokenizer is None and "tokenizer" in str(error)
            where = "; data.tokenizer is not set, and the model has none" if lacks else ""
            raise SeqloomError(f"data.{key}: {error}{where}") from None
        show("; ".join(done.lines()) if done else f"documents are prepared in {store}")
        return store

    sources = data.sources and tuple(replace(each, path=store_of("sources", each.path)) for each in data.sources)
    source, validation = (
        None if path is None else store_of(key, path)
        for key, path in (("source", data.source), ("validation", data.validation))
    )
    own = {"tokenizer": None, "chat_template": None, "fields": None, "cache": None}
    return replace(data, source=source, validation=validation, sources=sources, **own)


def _load_tokenizer(config: Config, spec: ModelSpec) -> Tokenizer | None:
    """Return the tokenizer of a run's documents: the config's, or its model's; None: there is none."""
    name, template, folder = config.data.tokenizer, config.data.chat_template, config.model.huggingface
    if name is None and folder is not None and any(any(folder.glob(each)) for each in TOKENIZER_FILES):
        name = str(folder)
    if name is None:
        if template is not None:
            raise SeqloomError(
                f"data.chat_template = {str(template)!r} without a tokenizer; name a Hugging Face tokenizer folder in "
                "data.tokenizer"
            )
        return None
    tokenizer = load_tokenizer(name, template)
    if tokenizer.vocabulary > spec.vocabulary:
        raise SeqloomError(
            f"data.tokenizer = {name!r} has {tokenizer.vocabulary:,} ids, the model {spec.vocabulary:,}; name the "
            "tokenizer of the model"
        )
    return tokenizer


def open_documents(config: Config, spec: ModelSpec, *, evaluation: bool = False) -> Source:
    """Open the documents of training or evaluation, under the config's limit of length, and refuse too long ones.

    A share for evaluation is set aside before the limit, which then moves no document from one to the other.
    """
    data = config.data
    path = data.validation if evaluation and data.validation is not None else data.source
    if path is not None:
        source = _divide_and_limit(config, _open_store(path, spec), evaluation)
    else:
        source = _open_mixture(config, spec, evaluation)
    folder = config.model.huggingface
    if folder is not None and spec.learned_positions:
        positions = position_rows(read_mapping(folder / "config.json"))
        for part in source.parts if isinstance(source, JoinedSource) else (source,):
            _check_positions(part, positions)
    return source


def _open_store(path: Documents, spec: ModelSpec) -> Source:
    """Open what documents were prepared into, or what needs no preparing."""
    assert isinstance(path, Path)  # by `prepare_documents`
    return open_source(path, vocabulary=spec.vocabulary)


def _check_positions(source: Source, positions: int) -> None:
    """Refuse a document with more tokens than a model has positions."""
    longest = int(source.lengths.argmax())
    if source.lengths[longest] > positions:
        raise SeqloomError(
            f"{source.name}: document {longest} has {source.lengths[longest]:,} tokens, and the model a table of "
            f"{positions:,} positions; set data.max_length = {positions}, and data.too_long = 'truncate' or 'drop'"
        )


def _open_mixture(config: Config, spec: ModelSpec, evaluation: bool) -> JoinedSource:
    """Open the sources of a mixture, each with a share for evaluation and under the limit of length by itself."""
    named = config.data.sources or ()
    sources, parts = [_open_store(each.path, spec) for each in named], []
    check_same_vocabulary(sources)
    for each, source in zip(named, sources, strict=True):
        try:
            parts.append(_divide_and_limit(config, source, evaluation))
        except SeqloomError as error:
            raise SeqloomError(f"data.sources: {str(each.path)!r}: {error}") from None
    return JoinedSource(parts)


def _divide_and_limit(config: Config, source: Source, evaluation: bool) -> Source:
    """Return the part of training, or that of evaluation, under the config's limit of length."""
    data = config.data
    if data.validation_share:
        source = split_source(source, data.validation_share, seed=config.run.seed)[evaluation]
    return source if data.max_length is None else LengthLimitedSource(source, data.max_length, data.too_long)


def make_sampler(config: Config, source: Source, cost: CostModel | None = None) -> Sampler:
    """Return the sampler of a run at its beginning. Without `cost` (evaluation) batches are never packed ahead."""
    seed, data = config.run.seed, config.data
    if cost is not None and data.batches == "hbp":
        tokens = data.tokens
        assert tokens is not None  # checked by the config
        levels = choose_levels(source.lengths, cost, tokens)

        def packed(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            """Pack with the same levels in all epochs, and another order of steps in each."""
            packing = hbp(source.lengths, cost, tokens, levels=levels, seed=seed + epoch)
            return packing.documents, packing.pack_starts[packing.step_starts]

        return Sampler(source.lengths, source.valid, seed=seed, packed=packed)
    mixture = None
    if isinstance(source, JoinedSource):
        lengths, weights = [part.lengths for part in source.parts], [each.weight for each in data.sources or ()]
        mixture = Mixture(lengths, weights, by=data.weigh_by, seed=seed)
    size = {"documents": data.sequences, "tokens": data.tokens}
    return Sampler(source.lengths, source.valid, seed=seed, mixture=mixture, **size)


def _count_steps(config: Config, source: Source, cost: CostModel) -> int:
    if config.run.steps is not None:
        return config.run.steps
    sampler, steps = make_sampler(config, source, cost), 0
    while sampler.epoch < (config.run.epochs or 0):
        sampler.next_batch()
        steps += 1
    return steps


def make_cost_models(config: Config, spec: ModelSpec, ranks: int, longest: int) -> list[CostModel]:
    """Return the cost model of a run's plans, for every tensor and expert degree that the config leaves open.

    `longest` is the longest document in tokens.
    """
    spelling = f"1x{ranks}xCPU" if config.plan.cluster == "auto" else config.plan.cluster
    cluster = Cluster.parse(spelling)
    if cluster.ranks != ranks:
        raise SeqloomError(
            f"plan.cluster = {spelling!r} has {cluster.ranks} ranks, the run has {ranks}; "
            f"start {cluster.ranks} processes, or name a cluster of {ranks}"
        )
    plan, stages, tensor = config.plan, config.pipeline.stages, config.plan.tensor
    if tensor == "auto" and (config.model.compile or (config.model.huggingface and spec.experts)):
        tensor = 1  # TP groups run neither compiled layers nor experts of transformers
    if tensor != 1 and config.model.compile:
        raise SeqloomError(
            f"plan.tensor = {tensor} with model.compile = true: layers that a TP group divides run uncompiled; leave "
            "one of them out"
        )
    if stages == "auto" or plan.sharding == Sharding.FREE:
        stages = 2  # perhaps only a pipeline holds the model
    profile = None if plan.profile == MEASURED else plan.profile  # what measures nothing takes what is shipped
    options: dict[str, Any] = {"profile": profile, "sharding": plan.sharding, "expert": plan.expert}
    options |= {"budget_gib": plan.budget_gib, "max_length": config.data.max_length or longest}
    options |= {"capacity": plan.capacity, "stages": int(stages), "float8": config.model.float8}
    options |= {"offload": plan.offload, "host_gib": plan.host_gib, "tensor": tensor}
    return cost_models(cluster, spec, **options, offload_optimiser=config.optimiser.offload is True)


def choose_optimiser_offload(config: Config, spec: ModelSpec, ranks: int, longest: int) -> bool:
    """Return whether master weights and moments go to host memory, for a run with a `longest` document in tokens.

    For "auto": if the model or that document fits in no other way, and fits then. A CPU would gain nothing.
    """
    wanted = config.optimiser.offload
    if config.optimiser.name != "adamw":
        return False
    if wanted != "auto":
        return bool(wanted)
    for offload in (False, True):
        own = replace(config, optimiser=replace(config.optimiser, offload=offload))
        try:
            costs = make_cost_models(own, spec, ranks, longest)
            if costs[0].cluster.device.name == "CPU":
                return False
            _plan_longest(own, costs, longest)
        except MemoryBudgetError:
            continue
        except SeqloomError:  # whatever else is wrong with the run is said where it belongs
            return False
        return offload
    return False


def _plan_longest(config: Config, costs: Sequence[CostModel], longest: int) -> None:
    """Raise MemoryBudgetError unless some plan of a run, by one of these, holds a document of so many tokens."""
    document, pipeline = np.array([longest]), config.pipeline

    def run(cost: CostModel) -> tuple[int, None]:
        if pipeline.stages == "auto":
            choose_pipeline(config, cost, [document])
        elif pipeline.stages != 1 or not cost.holding(document).holds(document):
            [(stages, chunks), *_] = stages_to_try(config, cost)
            own = decided(pipeline, stages, chunks, "all" if pipeline.head == "all" else "last")
            RunPlanners.load(config, cost, own).planner.plan(document, cost)
        return 0, None

    fastest(costs, run)


# ---- Planners


@dataclass(frozen=True, slots=True)
class RunPlanners:
    """Who plans the steps of a run, and on which stages: one pipeline for all steps, none, or others in every step."""

    stages: tuple[Stage, ...]  # of all plans; a single one: no pipeline; none: every plan has stages of its own
    planner: PlannerChoice  # of every step
    fallback: PlannerChoice  # of a step whose plan is late or could not be made
    strategies: tuple[Strategy, ...] = ()  # that the planner chooses from; none: it chooses from no list

    @property
    def multi_stage(self) -> bool:
        """Whether plans may cut the model into several stages."""
        return len(self.stages) != 1

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees of all plans."""
        own = [stage.tensor for stage in self.stages]
        return tuple(sorted({*own, *(pipe.parallel.tensor for each in self.strategies for pipe in each.pipelines)}))

    def alternatives(self, lengths: np.ndarray) -> list[PlannerChoice]:
        """Return a planner for every strategy that holds documents of these lengths, tokens; and that of the run.

        The latter is left out where it makes only plans of these strategies.
        """
        able = [strategy for strategy in self.strategies if strategy.max_tokens >= lengths.max()]
        choices = [replace(self.planner, name="hydraulis", options={"strategies": (strategy,)}) for strategy in able]
        return choices if choices and parse_planner(self.planner.name)[0].makes_stages else [*choices, self.planner]

    @classmethod
    def load(
        cls,
        config: Config,
        cost: CostModel,
        pipeline: Pipelining,
        strategies: Sequence[Strategy] = (),
    ) -> RunPlanners:
        """Return the planners of a run with a pipeline that leaves nothing open, or with strategies."""
        if pipeline.stages != 1:
            return cls._one_pipeline(config, cost, pipeline)
        options = {"strategies": tuple(strategies)} if strategies else {}
        planner, static = PlannerChoice(config.plan.planner, options, config.run.seed), PlannerChoice("static")
        if cost.sharding == Sharding.FREE:
            try:
                static.plan([cost.max_length or 1], cost)
            except SeqloomError:  # only several stages hold the longest document
                return cls((), planner, planner, tuple(strategies))
            return cls((), planner, static, tuple(strategies))
        everyone, longest = (
            Stage(tuple(range(cost.ranks)), (0, cost.model.layers), *cost.degrees),
            [cost.max_length or 1],
        )
        whole = cost.holding(longest).holds(longest)
        if not whole and config.plan.planner in ("auto", "pieces"):  # only pieces of the longest document fit
            return cls((everyone,), planner, PlannerChoice("pieces"))
        return cls((everyone,), planner, static)

    @classmethod
    def _one_pipeline(cls, config: Config, cost: CostModel, pipeline: Pipelining) -> RunPlanners:
        """One pipeline over all ranks."""
        stages, chunks, schedule, head = int(pipeline.stages), int(pipeline.chunks), pipeline.schedule, pipeline.head
        check_stages(cost, stages, chunks)
        if head == "all":
            check_head_stages(cost, stages, chunks)
        check_schedule(schedule, stages, chunks)
        width, node = cost.ranks // stages, cost.node_size
        if cost.sharding == Sharding.HYBRID and width % node and node % width:
            raise SeqloomError(
                f"plan.sharding = 'hybrid' with stages of {width} ranks in nodes of {node}: every stage needs equally "
                "many ranks in every node that it touches; use 'full' or 'none', or stages that fill nodes or divide "
                "them"
            )
        v_shape = schedule in V_SHAPED
        simple = schedule if v_shape else "1f1b" if chunks == 1 else "interleaved"
        options, more = {"stages": stages, "chunks": chunks}, {"head": head} if head == "all" else {}
        planner, fallback = (
            PlannerChoice("pipeline", {**options, "schedule": each, **more}) for each in (schedule, simple)
        )
        shape = {"v_shape": v_shape, "head_stages": head == "all"}
        placed = () if cost.sharding == Sharding.FREE else StageLayout.of(cost, stages, chunks, **shape).stages
        return cls(placed, planner, fallback)


def decided(pipeline: Pipelining, stages: int, chunks: int, head: HeadStages = "last") -> Pipelining:
    """Return a pipeline with what it leaves open; with one stage there is none."""
    return Pipelining() if stages == 1 else replace(pipeline, stages=stages, chunks=chunks, head=head)


def choose_degrees(
    config: Config, costs: Sequence[CostModel], batches: Sequence[np.ndarray]
) -> tuple[Pipelining, CostModel]:
    """Return the pipeline, and the cost model with the run's degrees, of the shortest predicted steps on `batches`."""
    if len(costs) == 1:
        return choose_pipeline(config, costs[0], batches), costs[0]

    def run(cost: CostModel) -> tuple[int, tuple[Pipelining, CostModel]]:
        pipeline = choose_pipeline(config, cost, batches)
        return _predicted_ns(config, cost, pipeline, batches), (pipeline, cost)

    return fastest(costs, run)


def stages_to_try(config: Config, cost: CostModel) -> list[tuple[int, int]]:
    """Return the numbers of stages and chunks that a config leaves open, as pairs; of those it gives, one."""
    stages, chunks, schedule = config.pipeline.stages, config.pipeline.chunks, config.pipeline.schedule
    if stages != "auto":
        counts = [int(stages)]
    else:
        counts = [count for count in range(1, cost.ranks + 1) if cost.ranks % count == 0]
    pairs = []
    for count in counts:
        own = [1] if count == 1 else chunk_counts(cost, count, schedule) if chunks == "auto" else [chunks]
        pairs += [(count, each) for each in own if stages != "auto" or count * each <= cost.model.layers]
    return pairs


def choose_pipeline(config: Config, cost: CostModel, batches: Sequence[np.ndarray]) -> Pipelining:
    """Return the config's pipeline with the stages, chunks and head of the shortest predicted steps on `batches`.

    What the config gives is kept. Of equals the first: fewest stages, then fewest chunks.
    """
    pairs = stages_to_try(config, cost)
    if len(pairs) == 1 and config.pipeline.stages != "auto":
        return choose_head(config, cost, decided(config.pipeline, *pairs[0]), batches)

    def run(pair: tuple[int, int]) -> tuple[int, Pipelining]:
        pipeline = choose_head(config, cost, decided(config.pipeline, *pair), batches)
        return _predicted_ns(config, cost, pipeline, batches), pipeline

    return fastest(pairs, run)


def choose_head(config: Config, cost: CostModel, pipeline: Pipelining, batches: Sequence[np.ndarray]) -> Pipelining:
    """Return a pipeline with the config's place of the head; for "auto" that of the shortest steps on some batches.

    All stages only where they hold the longest document, as they would with the head on the last.
    """
    wanted = config.pipeline.head
    if pipeline.stages == 1:
        return pipeline
    options: dict[HeadStages, Pipelining] = {head: replace(pipeline, head=head) for head in ("last", "all")}
    if wanted != "auto":
        return options[wanted]
    try:
        check_head_stages(cost, int(pipeline.stages), int(pipeline.chunks))
    except SeqloomError:
        return options["last"]
    times: dict[HeadStages, int] = {}
    for head, own in options.items():
        try:
            times[head] = _predicted_ns(config, cost, own, batches[:HEAD_BATCHES])
            RunPlanners.load(config, cost, own).planner.plan([cost.max_length or 1], cost)
        except SeqloomError:  # of the last stage it is said where the run plans its steps
            times.pop(head, None)
    return options[min(times, key=lambda head: (times[head], head == "all"), default="last")]


def _predicted_ns(config: Config, cost: CostModel, pipeline: Pipelining, batches: Sequence[np.ndarray]) -> int:
    """Return how long the first of these batches take together in a pipeline."""
    planner = RunPlanners.load(config, cost, pipeline).planner
    return sum(predicted_ns(planner.plan(batch, cost), cost) for batch in batches[:SAMPLED_BATCHES])


# ---- Strategies
# The parallel strategies from which a Hydraulis planner chooses at every step. A proposed list is written into the
# run's folder, so that it can be read and given to another run. Nothing that is saved depends on it: parameters and
# optimiser state are sharded the same way whatever the plans.


def load_strategies(config: Config, cost: CostModel, lengths: np.ndarray) -> tuple[Strategy, ...]:
    """Propose the strategies that the run's planner chooses from, or read the file that the config names.

    The result is empty where the planner chooses from no list. `lengths` are those of all documents.
    """
    planner, path = parse_planner(config.plan.planner)[0], config.plan.strategies
    if not planner.reads_strategies or config.plan.sharding != Sharding.FREE or config.pipeline.stages != 1:
        return ()
    if path == "auto":
        try:
            tokens = mean_step_tokens(config, lengths)
            # TP groups divide the experts of the reference transformer, not those of transformers' models.
            most_tensor = 1 if config.model.huggingface and cost.model.experts else None
            options = {"tokens_per_step": tokens, "seed": config.run.seed, "most_tensor": most_tensor}
            return propose_strategies(lengths, cost, **options)
        except SeqloomError:
            if planner.makes_stages:
                raise
            return ()  # plans of one stage may do
    try:
        strategies = strategies_from_json(Path(path).read_text(encoding="utf-8"))
        check_strategies(strategies, cost)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SeqloomError(
            f"plan.strategies = {path!r} cannot be read ({reason}); write it with seqloom propose --json, or set 'auto'"
        ) from None
    except SeqloomError as error:
        raise SeqloomError(f"plan.strategies = {path!r}: {error}") from None
    most, longest = max(strategy.max_tokens for strategy in strategies), int(lengths.max())
    if most < longest:
        raise SeqloomError(
            f"document {int(lengths.argmax())} has {longest:,} tokens, but no pipeline of plan.strategies = {path!r} "
            f"holds more than {most:,}; set data.max_length to {most} with data.too_long 'truncate' or 'drop', or "
            "propose strategies for longer documents"
        )
    return strategies


def mean_step_tokens(config: Config, lengths: np.ndarray) -> int:
    """Return the tokens of a step: the config's, or the mean of so many documents."""
    return config.data.tokens or round((config.data.sequences or 1) * float(lengths.mean()))


def write_strategies(config: Config, strategies: Sequence[Strategy]) -> Config:
    """Write a proposed list into the run's folder; return the config that names the file."""
    if not strategies or config.plan.strategies != "auto":
        return config
    path = config.run.output / STRATEGIES_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(strategies_to_json(strategies) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise SeqloomError(f"{path}: cannot be written ({reason}); choose another run.output") from None
    return replace(config, plan=replace(config.plan, strategies=str(path)))


def strategy_notes(config: Config, strategies: Sequence[Strategy], resumed: Sequence[Any] | None) -> Iterator[str]:
    """Say which strategies the run chooses from, and whether those of the checkpoint (`resumed`) were others."""
    if strategies:
        where = config.run.output / STRATEGIES_FILE if config.plan.strategies == "auto" else config.plan.strategies
        yield f"{len(strategies)} strategies to choose from ({where}): {'; '.join(map(str, strategies))}"
    if config.model.compile and any(pipe.parallel.tensor > 1 for each in strategies for pipe in each.pipelines):
        yield "model.compile = true: layers of stages that split weights (tensor > 1) run uncompiled, others compiled"
    if resumed is not None and list(resumed) != [strategy.as_dict() for strategy in strategies]:
        other = f"{len(resumed)} other strategies" if resumed else "no strategies"
        yield f"the checkpoint was made with {other}; nothing in it depends on them"


def warm_up_plans(strategies: Sequence[Strategy], cost: CostModel) -> list[Plan]:
    """Return a plan with next to no tokens for every strategy: two documents in each of its pipelines."""
    plans = []
    for strategy in strategies:
        lengths = [
            min(WARM_UP_TOKENS * len(pipe.ranks), pipe.max_tokens) for pipe in strategy.pipelines for _ in range(2)
        ]
        batches = tuple(((2 * number,), (2 * number + 1,)) for number in range(len(strategy.pipelines)))
        assignment = Assignment(0, batches, (0,) * len(batches))
        plans.append(plan_assignment(np.array(lengths), strategy, assignment, cost))
    return plans
