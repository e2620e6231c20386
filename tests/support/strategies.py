"""Hypothesis strategies for the values of `seqloom.plan`. Every plan they draw is valid.

`plans` draws several pipelines and stages, stages that share their ranks (interleaved, in a V, anyhow), documents
in pieces, groups that share ranks, with every method and route, tensor degrees, split backwards and explicit layouts,
all small: what a rule can break on, it breaks on with few ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import Adapters, Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.plan import (
    ActionKind,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Remap,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
    sort_groups,
)
from support.strategies_groups import Shape, cut, group_shapes, layer_choices, limits, shared
from support.tables import completed, greedy_order, rows_in_order


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    ranks: int = 5,
    items: int = 3,
    extent: int = 12,
    axes: int | None = None,
    complete: bool = False,
) -> Layout:
    """Draw a layout with replication.

    Args:
        draw: given by hypothesis.
        ranks: holders are below this.
        items: items are below this.
        extent: every axis of every item is 0 .. extent.
        axes: 1 or 2; None draws it.
        complete: every element of every item has at least one holder.
    """
    axes = draw(st.sampled_from((1, 2))) if axes is None else axes
    boxes = []
    for item in range(items):
        grid = [draw(_cuts(extent)) for _ in range(axes)]
        for row in grid[0]:
            for column in grid[1] if axes == 2 else [()]:
                holders = draw(st.sets(st.integers(0, ranks - 1), min_size=int(complete), max_size=3))
                boxes += [(rank, item, *row, *column) for rank in sorted(holders)]
    return Layout.of(boxes) if boxes else Layout.empty(axes)


def _cuts(extent: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.sets(st.integers(1, extent - 1), max_size=4)
    return inner.map(lambda cuts: list(pairwise([0, *sorted(cuts), extent])))


@st.composite
def rounds(draw: st.DrawFn, **options: int) -> Round:
    """Draw a valid round: one of a valid plan."""
    plan = draw(plans(**options))
    return draw(st.sampled_from([current for line in plan.pipelines for current in line.rounds]))


@st.composite
def plans(draw: st.DrawFn, *, max_documents: int = 8, longest: int = 40, max_nodes: int = 3) -> Plan:
    """Draw a valid plan."""
    own = draw(limits(max_nodes=max_nodes))
    sharding = draw(st.sampled_from((Sharding.HYBRID, Sharding.NONE, Sharding.FULL, Sharding.FREE)))
    reduce = draw(st.sampled_from(Reduce))
    documents = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_documents)))
    stages = draw(_stages(own))
    home = [draw(st.integers(0, len(stages) - 1)) for _ in documents]
    pipelines = []
    for number, line in enumerate(stages):
        mine = [document for document, pipeline in enumerate(home) if pipeline == number]
        pipelines.append(draw(_pipelines(own, line, {k: documents[k] for k in mine}, sharding, reduce)))
    plan = Plan(own, sharding, reduce, documents, tuple(pipelines), draw(st.sampled_from(("drawn", "", "a b\n"))))
    slack = draw(st.integers(0, 3))
    capacity = tuple((checkpoint, need + slack) for checkpoint, need in _needs(plan).items())
    return replace(plan, limits=replace(own, capacity=capacity))


def _needs(plan: Plan) -> dict[Checkpoint, int]:
    """Return, for every checkpoint in use, the tokens on the fullest rank."""
    needs: dict[Checkpoint, int] = {}
    for work in (work for line in plan.pipelines for current in line.rounds for work in current.by_stage):
        held: dict[int, int] = {}
        for group in work.groups:
            tokens = sum(plan.limits.padded(span.tokens) for span in group.spans)
            for rank in group.ranks:
                held[rank] = held.get(rank, 0) + -(-tokens // group.degree)
        most = [*held.values()]
        for layout in (work.attention, work.linear):
            most += [] if layout is None else np.bincount(layout.rank, weights=layout.sizes).astype(int).tolist()
        for checkpoint in {work.checkpoint, work.lighter_layers and work.checkpoint.lighter} - {0, None}:
            needs[checkpoint] = max(needs.get(checkpoint, 1), *most)
    return needs


@st.composite
def _stages(draw: st.DrawFn, own: Limits) -> list[tuple[Stage, ...]]:
    """Draw pipelines as tuples of stages; some ranks may stay unused."""
    cuts = draw(st.sets(st.integers(1, own.ranks - 1), min_size=1, max_size=3)) if own.ranks > 1 else set()
    hosts = [tuple(range(low, high)) for low, high in pairwise([0, *sorted(cuts), own.ranks])]
    if len(hosts) > 2 and draw(st.booleans()):
        hosts.pop()
    hosts = draw(st.permutations(hosts))
    ends = draw(st.sets(st.sampled_from(range(1, len(hosts))), max_size=1)) if len(hosts) > 1 else set()
    lines = [draw(_placements(hosts[low:high])) for low, high in pairwise([0, *sorted(ends), len(hosts)])]
    layers = max(map(len, lines)) + draw(st.integers(0, 3))
    return [tuple(draw(_line(own, line, layers))) for line in lines]


@st.composite
def _placements(draw: st.DrawFn, hosts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Draw the ranks of every stage: one stage per host, or several: in turn, in a V, or anyhow."""
    kind = draw(st.sampled_from(("once", "in turn", "V", "anyhow")))
    more = {"once": [], "in turn": hosts, "V": hosts[::-1]}
    return hosts + (more[kind] if kind in more else draw(st.lists(st.sampled_from(hosts), max_size=3)))


@st.composite
def _line(draw: st.DrawFn, own: Limits, hosts: Sequence[tuple[int, ...]], layers: int) -> list[Stage]:
    """Draw one pipeline's stages over `layers` layers, on the hosts given."""
    inner = draw(st.permutations(range(1, layers)))[: len(hosts) - 1]
    extents = pairwise([0, *sorted(inner), layers])
    stages = []
    for ranks, extent in zip(hosts, extents, strict=True):
        degrees = [
            size
            for size in own.family.sizes
            if own.heads % size == 0 and set(cut(ranks, size)) <= {tuple(block) for block in own.family.blocks(size)}
        ]
        stages.append(Stage(ranks, extent, draw(st.sampled_from(degrees))))
    return stages


@st.composite
def _pipelines(
    draw: st.DrawFn,
    own: Limits,
    stages: tuple[Stage, ...],
    documents: dict[int, int],
    sharding: Sharding,
    reduce: Reduce,
) -> Pipeline:
    """Draw the rounds and the table of one pipeline; `documents` maps ids to lengths."""
    count = draw(st.integers(1, 4))
    pieces: list[list[Span]] = [[] for _ in range(count)]
    for document, length in documents.items():
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=count - 1)) if length > 1 and count > 1 else set()
        where = sorted(draw(st.permutations(range(count)))[: len(cuts) + 1])
        for number, (start, stop) in zip(where, pairwise([0, *sorted(cuts), length]), strict=True):
            pieces[number].append(Span(document, start, stop))
    shapes = [
        [draw(group_shapes(own, stage.ranks, stage.tensor)) for _ in range(draw(st.integers(1, 3)))] for stage in stages
    ]
    home = {document: [draw(st.sampled_from(choice)) for choice in shapes] for document in documents}
    latent = draw(st.booleans())
    shard_groups = [own.shard_groups(sharding, stage.ranks) for stage in stages]
    found = [
        Round(
            tuple(
                draw(
                    _works(
                        own,
                        documents,
                        spans,
                        [home[span.document][s] for span in spans],
                        shard_groups[s],
                        stage.tensor,
                        latent,
                    ).flatmap(partial(layer_choices, layers=stage.layer_count))
                )
                for s, stage in enumerate(stages)
            )
        )
        for spans in pieces
        if spans
    ]
    if len(stages) == 1 and draw(st.booleans()):
        return replace(Pipeline.single(stages[0].ranks, stages[0].layers, found, reduce), stages=stages)
    split = [draw(st.booleans()) for _ in stages]
    kinds = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
    first = draw(st.permutations([(kind, s) for kind in kinds for s in range(len(stages))]))
    table = rows_in_order(stages, greedy_order(len(stages), found, split, first))
    return Pipeline(stages, tuple(found), completed(stages, table, reduce, unshard=draw(st.booleans())))


@st.composite
def _works(
    draw: st.DrawFn,
    own: Limits,
    documents: dict[int, int],
    spans: list[Span],
    shapes: list[Shape],
    shard_groups: tuple[tuple[int, ...], ...],
    tensor: int,
    latent: bool,
) -> StageMicroBatch:
    """Draw one stage's share: spans of equal shape form a group; layouts are explicit now and then.

    Keys of documents in pieces go round from rank to rank, those of others any way. TP groups have neither routes nor a
    linear layout.
    """
    by_shape: dict[Shape, list[Span]] = {}
    for span, shape in zip(spans, shapes, strict=True):
        by_shape.setdefault(shape, []).append(span)
    used = {rank for ranks, _, _ in by_shape for rank in ranks}
    awake = {rank for shard_group in shard_groups if used.intersection(shard_group) for rank in shard_group}
    plain = [Group(*shape, tuple(members), latent=latent) for shape, members in by_shape.items()]
    whole = [all(span.tokens == documents[span.document] for span in group.spans) for group in plain]
    groups = [
        replace(draw(shared(group, own.node_size, awake)), states=draw(st.booleans())) if free else group
        for group, free in zip(plain, whole, strict=True)
    ]
    groups = [replace(group, route=None) for group in groups] if tensor > 1 else groups
    work = StageMicroBatch(sort_groups(groups, own.node_size), draw(st.sampled_from(Checkpoint)))
    kinds = ("derived", "derived", "attention") if tensor > 1 else ("derived", "derived", "attention", "linear", "both")
    kind = draw(st.sampled_from(kinds))
    if kind == "derived":
        return work
    attention = work.attention_layout()
    shift = draw(st.integers(0, max(map(len, shard_groups)) - 1))
    onward = {
        rank: shard_group[(k + shift) % len(shard_group)]
        for shard_group in shard_groups
        for k, rank in enumerate(shard_group)
    }
    moved = np.array([onward[rank] for rank in attention.rank.tolist()], dtype=np.int64)
    linear = Layout(moved, attention.item, attention.start, attention.stop)
    explicit = {"attention": (attention, None), "linear": (None, linear), "both": (attention, linear)}[kind]
    remap = draw(st.sampled_from(Remap)) if explicit[1] is not None else Remap.ATTENTION
    return replace(work, attention=explicit[0], linear=explicit[1], remap=remap)


@st.composite
def batches(draw: st.DrawFn, *, max_documents: int = 60, longest: int = 60_000) -> np.ndarray:
    """Draw the lengths of a batch, int64[n]: anything, a long tail, equal lengths, one giant, or tiny documents."""
    count = draw(st.integers(1, max_documents))
    kind = draw(st.sampled_from(("tail", "any", "equal", "giant", "tiny")))
    if kind == "equal":
        return np.full(count, draw(st.integers(1, longest)), dtype=np.int64)
    if kind == "tiny":
        return np.array(draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)), dtype=np.int64)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    if kind == "any":
        return random.integers(1, longest, count, endpoint=True)
    lengths = np.minimum(random.lognormal(np.log(longest / 40), 1.3, count).astype(np.int64) + 1, longest)
    if kind == "giant":
        lengths[draw(st.integers(0, count - 1))] = longest
    return lengths


MIXTURE = ModelSpec(
    **{"name": "small-moe", "layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 2048},
    **{"gated": True, "vocabulary": 32_000, "tied": True},
    **{"experts": 24, "active_experts": 4, "expert_ffn": 512, "shared_ffn": 512, "moe_layers": tuple(range(1, 12))},
)
"""A model whose experts many degrees divide."""
ADAPTED = replace(
    ModelSpec.load("qwen3-4b"), name="qwen3-4b-lora", adapters=(Adapters(), *[Adapters(16, 4, 9_000, 8_000, True)] * 35)
)
"""A model of which adapters alone are trained, in all layers but one."""


@st.composite
def cost_models(
    draw: st.DrawFn, *, max_nodes: int = 4, max_ranks: int = 32, published: bool | None = None
) -> CostModel:
    """Draw a cost model of a small cluster: memory from tight to roomy, every sharding, published or analytic.

    Args:
        draw: given by hypothesis.
        max_nodes: nodes, at most.
        max_ranks: GPUs, at most.
        published: whether the additive constants of FlexSP price it; None draws that.
    """
    published = draw(st.booleans()) if published is None else published
    gpus = draw(st.sampled_from([size for size in (8, 4, 6, 3, 2, 1) if size <= max_ranks]))
    nodes = draw(st.integers(1, 1 if published and gpus < 8 else min(max_nodes, max_ranks // gpus)))
    sharding = draw(st.sampled_from(("full", "hybrid", "none")))
    tier = draw(st.integers(0, 3))
    if published:
        return roomy_cost_model(f"{nodes}x{gpus}xA100-40G", "gpt-7b", "flexsp-a100", sharding, tier)
    model = draw(st.sampled_from(("qwen3-0.6b", "qwen3-4b", "llama3-8b", "minicpm3-4b", MIXTURE.name, ADAPTED.name)))
    cluster = f"{nodes}x{gpus}x{draw(st.sampled_from(('H100', 'H200')))}"
    found = roomy_cost_model(cluster, model, None, sharding, tier)
    return found.with_expert(draw(st.sampled_from(found.expert_degrees)))


@lru_cache(maxsize=1024)
def roomy_cost_model(cluster: str, model: str, profile: str | None, sharding: str, tier: int) -> CostModel:
    """The cost model of the ``tier``-th of a list of budgets that hold the model at all, or of the largest."""
    own = next((spec for spec in (MIXTURE, ADAPTED) if spec.name == model), None)
    parts = (Cluster.parse(cluster), own or ModelSpec.load(model), profile, sharding)
    found: list[CostModel] = []
    for budget in (14.0, 24.0, 40.0, 75.0, 130.0, 150.0, 260.0):
        try:
            found.append(CostModel(*parts, budget_gib=budget))
        except SeqloomError:
            continue
        if len(found) > tier:
            break
    return found[-1]
