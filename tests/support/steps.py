"""Whole training steps on tiny models: what one process finds, and what any plan on any ranks finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from seqloom.describe import ModelSpec
from seqloom.dist import Context, Transport, bind_single_rank
from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.layout import Span
from seqloom.models import Transformer, TransformerOptions
from seqloom.models.adapter import ModelAdapter
from seqloom.models.compile import compile_layers
from seqloom.models.float8 import use_float8
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.loss import IGNORED
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.params.interface import Parameters, ReplicatedParameters
from seqloom.params.resharding import ReshardingParameters
from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    StageMicroBatch,
    sort_groups,
)
from support.strategies_groups import Shape, group_shapes, layer_choices, shared


@dataclass(frozen=True)
class Found:
    """Loss, norm and every gradient of a step."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]

    def worst(self, wanted: Found, *, floor: float = 1e-3) -> float:
        """Return the largest relative difference: of the loss, of the norm, of a gradient.

        A gradient smaller than `floor` of the largest is measured against that.
        """
        least = floor * max(float(each.norm()) for each in wanted.gradients.values())
        assert self.gradients.keys() == wanted.gradients.keys()
        differences = [
            float((self.gradients[name].double() - each.double()).norm()) / max(float(each.double().norm()), least)
            for name, each in wanted.gradients.items()
        ]
        numbers = [abs(self.loss / wanted.loss - 1), abs(self.norm / wanted.norm - 1)]
        return max(*differences, *numbers)


@dataclass(frozen=True)
class Step:
    """A model and the documents of a step, the same in every process.

    Attributes:
        masked: share of the labels that do not count.
        float8: linear layers multiply in float8.
    """

    lengths: tuple[int, ...]
    spec: ModelSpec
    options: TransformerOptions = TransformerOptions()  # noqa: RUF009 - frozen
    dtype: torch.dtype = torch.float64
    masked: float = 0.3
    float8: bool = False

    def in_float8(self) -> Step:
        """Return the step with widths of the feed-forward layers, at least, that float8 takes."""
        return replace(self, spec=replace(self.spec, ffn=32), float8=True)

    def model(self) -> Transformer:
        """Return the model, its attention far from uniform."""
        model = Transformer(self.spec, self.options, seed=2, dtype=self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 12 if parameter.ndim > 1 else 1
        if self.float8:
            assert use_float8(model.model.layers, narrowest=16)
        return model

    def model_adapter(self) -> ModelAdapter:
        """Return the model as the runtime sees it."""
        return ModelAdapter.of(self.model())

    def documents(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return ids and labels of every document; at least one label counts."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        ids = [torch.randint(self.spec.vocabulary, (n,), generator=generator) for n in self.lengths]
        labels = [torch.randint(self.spec.vocabulary, (n,), generator=generator) for n in self.lengths]
        for each in labels:
            each[torch.rand(len(each), generator=generator) < self.masked] = IGNORED
        labels[-1][-1] = 1
        return ids, labels

    @property
    def valid(self) -> int:
        """Labels that count."""
        return sum(int((each != IGNORED).sum()) for each in self.documents()[1])

    def rows(self) -> Callable[[Context], tuple[torch.Tensor, torch.Tensor]]:
        """Return what reads a rank's rows."""
        documents = self.documents()

        def read(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
            none = [torch.empty(0, dtype=torch.int64)]
            ids, labels = (torch.cat([x[d][a:b] for d, a, b in context.spans] or none) for x in documents)
            return ids, labels

        return read

    def alone(self) -> Found:
        """Return what one process finds with all logits at once and nothing recomputed."""
        model, (ids, labels) = self.model(), self.documents()
        context = bind_single_rank(self.lengths)
        logits = model(torch.cat(ids), context.positions, context)
        loss = cross_entropy(logits, torch.cat(labels), reduction="sum", ignore_index=IGNORED) / self.valid
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([each.norm() for each in gradients.values()]).norm()
        return Found(loss.item(), norm.item(), gradients)

    def spread(
        self,
        plan: Plan,
        transport: Transport,
        make: Callable[..., Parameters] | None = None,
        *,
        backend: str | None = None,
        device: str = "cpu",
    ) -> Found:
        """Return what a rank of a plan finds. All ranks call it.

        Args:
            plan: of this step's documents.
            transport: this rank's.
            make: makes the parameters of a network and a transport; None: replicated ones, or with a free layout where
                the plan asks for that.
            backend: layers are compiled with it; None: they are not.
            device: where the model runs; what is found is on the CPU.
        """
        if make is None:
            make = ReshardingParameters if plan.sharding == Sharding.FREE else ReplicatedParameters
        adapter = ModelAdapter.of(self.model().to(device))
        if any(action.kind == ActionKind.W for line in plan.pipelines for row in line.actions for action in row):
            adapter = replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers))
        if backend is not None:
            compile_layers(adapter.layers, backend=backend)
        recompute_layers(adapter.layers)
        parameters = make(adapter, transport)
        read = self.rows()

        def rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
            ids, labels = read(context)
            return ids.to(device), labels.to(device)

        result = run_step(bind_plan(plan, transport, device=device), parameters, rows, self.valid)
        assert result.expert_tokens is None or set(result.expert_tokens.sum(1).tolist()) == {
            sum(self.lengths) * self.spec.active_experts
        }
        gradients = {name: each.to("cpu", copy=True) for name, each in parameters.full_gradients()}
        return Found(result.loss, result.gradient_norm, gradients)


def tiny_spec(**changes: Any) -> ModelSpec:
    """Return the shapes of a model that runs in milliseconds."""
    plain = ModelSpec(
        name="tiny",
        layers=2,
        hidden=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn=24,
        gated=True,
        vocabulary=23,
        tied=False,
    )
    return replace(plain, windows=changes.pop("windows", ()), **changes)


def one_stage_plan(
    rounds: Sequence[Sequence[Group]],
    *,
    ranks: int,
    layers: int = 2,
    heads: int = 4,
    node_size: int | None = None,
    checkpoint: Checkpoint | Sequence[Checkpoint] = Checkpoint.NONE,
    sharding: Sharding = Sharding.NONE,
    reduce: Reduce = Reduce.ROUND,
) -> Plan:
    """Build a valid plan of whole documents from the groups of its rounds."""
    kinds = [checkpoint] * len(rounds) if isinstance(checkpoint, Checkpoint) else list(checkpoint)
    lengths = {span.document: span.stop for groups in rounds for group in groups for span in group.spans}
    limits = Limits(ranks, node_size or ranks, heads, tuple((kind, 10**9) for kind in Checkpoint))
    works = [
        Round((StageMicroBatch(sort_groups(each, limits.node_size), kind),))
        for each, kind in zip(rounds, kinds, strict=True)
    ]
    pipeline = Pipeline.single(range(ranks), layers, works, reduce)
    plan = Plan(limits, sharding, reduce, tuple(lengths[k] for k in range(len(lengths))), (pipeline,), "drawn")
    plan.validate()
    return plan


@st.composite
def steps(draw: st.DrawFn, *, longest: int = 30, chunked: bool = False) -> Step:
    """Draw a step: grouped heads, windows, biases, tied and untied heads, some labels masked, or nearly all.

    `chunked`: layers may also have attention chunks, and tokens may see their whole document.
    """
    kv_heads = draw(st.integers(1, 2))
    layers = draw(st.integers(1, 2))
    windows = draw(st.lists(st.none() | st.integers(1, 20), min_size=layers, max_size=layers))
    chunks = [draw(st.none() | st.integers(1, 20)) for _ in range(layers if chunked else 0)]
    causal = set(windows) != {None} or not chunked or draw(st.booleans())
    spec = tiny_spec(
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        tied=draw(st.booleans()),
        windows=tuple(windows),
        attention_chunks=tuple(chunks),
        causal=causal,
    )
    options = TransformerOptions(qk_norm=draw(st.booleans()), qkv_bias=draw(st.booleans()))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=6))
    masked = draw(st.sampled_from((0.0, 0.4, 1.1)))
    return Step(tuple(lengths), spec, options, masked=masked)


@st.composite
def step_plans(draw: st.DrawFn, step: Step, *, max_ranks: int = 6) -> Plan:
    """Draw a plan of a step: any groups, also several of a rank, any methods, routes, checkpointing and table."""
    node_size = draw(st.integers(1, max_ranks))
    ranks = node_size * draw(st.integers(1, max_ranks // node_size))
    own = Limits(ranks, node_size, step.spec.heads, tuple((kind, 10**9) for kind in Checkpoint))
    count = draw(st.integers(1, 3))
    shapes = [draw(group_shapes(own, range(ranks))) for _ in range(3)]
    placements: list[dict[Shape, list[Span]]] = [{} for _ in range(count)]
    for document, length in enumerate(step.lengths):
        chosen = placements[draw(st.integers(0, count - 1))]
        chosen.setdefault(draw(st.sampled_from(shapes)), []).append(Span(document, 0, length))
    sharding = draw(st.sampled_from(Sharding))
    shard_groups = own.shard_groups(sharding, tuple(range(ranks)))
    rounds = []
    for placement in filter(None, placements):
        busy = {rank for members, _, _ in placement for rank in members}
        awake = {rank for shard_group in shard_groups if not busy.isdisjoint(shard_group) for rank in shard_group}
        plain = [Group(*shape, tuple(spans)) for shape, spans in placement.items()]
        rounds.append([draw(shared(group, node_size, awake)) for group in plain])
    plan = one_stage_plan(
        rounds,
        ranks=ranks,
        layers=step.spec.layers,
        heads=step.spec.heads,
        node_size=node_size,
        checkpoint=[draw(st.sampled_from([c for c in Checkpoint if c != Checkpoint.STAGE])) for _ in rounds],
        sharding=sharding,
        reduce=draw(st.sampled_from(Reduce)),
    )
    [line] = plan.pipelines
    works = [draw(layer_choices(each.by_stage[0], step.spec.layers)) for each in line.rounds]
    plan = replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))
    plan.validate()
    return open_together(plan) if draw(st.booleans()) and plan.reduce == Reduce.STEP else plan


@st.composite
def with_experts(draw: st.DrawFn, step: Step) -> Step:
    """Draw the same step with experts in some layers, as many as 8 ranks or fewer can divide."""
    layers = step.spec.layers
    sparse = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers, unique=True))
    sizes = {"experts": draw(st.sampled_from((12, 24))), "active_experts": draw(st.integers(1, 4)), "expert_ffn": 6}
    shared = draw(st.sampled_from((0, 8)))
    return replace(step, spec=replace(step.spec, moe_layers=tuple(sorted(sparse)), shared_ffn=shared, **sizes))


@st.composite
def divided_experts(draw: st.DrawFn, plan: Plan, experts: int) -> Plan:
    """Draw a plan whose stages divide their experts over any number of ranks that may."""
    node, pipelines = plan.limits.node_size, []
    for line in plan.pipelines:
        degrees = {}
        for ranks in line.ranks_by_pp_rank:
            legal = [size for size in range(1, len(ranks) + 1) if len(ranks) % size == experts % size == 0]
            if plan.sharding == Sharding.HYBRID:
                groups = {size: [ranks[k : k + size] for k in range(0, len(ranks), size)] for size in legal}
                legal = [size for size in legal if all(len({r // node for r in each}) == 1 for each in groups[size])]
            degrees[ranks] = draw(st.sampled_from(legal))
        stages = tuple(replace(stage, expert=degrees[stage.ranks] if stage.tensor == 1 else 1) for stage in line.stages)
        pipelines.append(replace(line, stages=stages))
    divided = replace(plan, pipelines=tuple(pipelines))
    divided.validate()
    return divided


@st.composite
def wide_steps(draw: st.DrawFn) -> Step:
    """Draw a step whose heads and widths 2, 3 or 4 ranks can divide, and sometimes its vocabulary."""
    step, kv_heads = draw(steps(longest=20)), draw(st.sampled_from((2, 3, 4)))
    heads = kv_heads * draw(st.integers(1, 2))
    vocabulary = draw(st.sampled_from((23, 24)))
    step = replace(step, spec=replace(step.spec, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary))
    return draw(with_experts(step)) if kv_heads != 3 and draw(st.booleans()) else step


@st.composite
def tensor_plans(draw: st.DrawFn, step: Step, *, max_ranks: int = 6) -> Plan:
    """Draw a plan of a step whose TP groups, of any degree that its heads allow, are in the place of ranks."""
    tensor = draw(st.sampled_from([t for t in (2, 3, 4) if step.spec.kv_heads % t == 0 and max_ranks >= t]))
    spec = step.spec
    few = replace(step, spec=replace(spec, heads=spec.heads // tensor, kv_heads=spec.kv_heads // tensor))
    return in_tp_groups(draw(step_plans(few, max_ranks=max_ranks // tensor)), tensor)


def in_tp_groups(plan: Plan, tensor: int) -> Plan:
    """Return the plan with TP groups in the place of its ranks; groups have no routes then."""
    wide = lambda ranks: tuple(rank * tensor + k for rank in ranks for k in range(tensor))  # noqa: E731
    limits = plan.limits
    limits = replace(limits, ranks=limits.ranks * tensor, node_size=limits.node_size * tensor)
    limits = replace(limits, heads=limits.heads * tensor)
    pipelines = []
    for line in plan.pipelines:
        rounds = []
        for current in line.rounds:
            works = []
            for work in current.by_stage:
                groups = [
                    replace(each, ranks=wide(each.ranks), ulysses=each.ulysses * tensor, route=None)
                    for each in work.groups
                ]
                works.append(replace(work, groups=sort_groups(groups, limits.node_size), attention=None))
            rounds.append(Round(tuple(works)))
        stages = tuple(replace(stage, ranks=wide(stage.ranks), tensor=tensor) for stage in line.stages)
        pipelines.append(replace(line, stages=stages, rounds=tuple(rounds)))
    plan = replace(plan, limits=limits, pipelines=tuple(pipelines))
    plan.validate()
    return plan


def open_together(plan: Plan) -> Plan:
    """Return the plan with all forwards before all backwards."""
    line = plan.pipelines[0]
    table = [Action(0, kind, k) for kind in (ActionKind.F, ActionKind.B) for k in range(len(line.rounds))]
    changed = replace(plan, pipelines=(replace(line, actions=((*table, Action(0, ActionKind.REDUCE)),)),))
    changed.validate()
    return changed
