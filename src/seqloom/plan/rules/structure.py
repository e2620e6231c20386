"""Rules about documents, limits, stages, groups and tensor degrees: everything that needs no look at tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from seqloom.errors import violation
from seqloom.plan.limits import Reduce, Sharding
from seqloom.plan.pipeline import Pipeline, Stage
from seqloom.plan.round import Checkpoint, Group, StageMicroBatch

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan


MAX_RANKS = 2**20
"""More ranks than this are a typing error; refused before anything is listed per rank."""


def stage_batches(plan: Plan) -> Iterator[tuple[tuple[int, int, int], Stage, StageMicroBatch]]:
    """Yield ((pipeline, round, stage), its Stage, its StageMicroBatch) of the whole plan."""
    for p, pipeline in enumerate(plan.pipelines):
        for r, current in enumerate(pipeline.rounds):
            for s, share in enumerate(current.by_stage):
                yield (p, r, s), pipeline.stages[s], share


def stage_groups(plan: Plan) -> Iterator[tuple[tuple[int, int, int, int], Stage, Group]]:
    """Yield ((pipeline, round, stage, group), its Stage, its Group) of the whole plan."""
    for (p, r, s), stage, share in stage_batches(plan):
        for g, group in enumerate(share.groups):
            yield (p, r, s, g), stage, group


def place(where: tuple[int, ...]) -> str:
    """Name a pipeline, round and stage, or a group of them, in a message."""
    return " ".join(map("{} {}".format, ("pipeline", "round", "stage", "group"), where))


def whole_numbers(values: object) -> bool:
    """Say whether all values are integers (of Python or numpy, but not truth values)."""
    kinds = set(map(type, values))  # type: ignore[call-overload]
    return all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)


def documents(plan: Plan) -> None:
    """A step has documents, and every one has a positive whole number of tokens."""
    if not plan.documents:
        raise violation("documents", "no documents", "a step needs at least one", "plan a non-empty batch")
    if whole_numbers(plan.documents) and min(plan.documents) > 0:
        return
    for number, length in enumerate(plan.documents):
        if not whole_numbers([length]) or length < 1:
            value = f"document {number} has length {length!r}"
            raise violation("documents", value, "lengths are whole numbers of at least 1 token", "drop this document")


def limits(plan: Plan) -> None:
    """The limits make sense by themselves."""
    own = plan.limits
    for name in ("ranks", "node_size", "heads", "pad_multiple", "communicators"):
        value, least = getattr(own, name), int(name != "communicators")
        if not whole_numbers([value]) or value < least:
            must = f"a whole number of at least {least}"
            raise violation("limits", f"{name} is {value!r}", must, f"use {least} or more")
    if own.ranks > MAX_RANKS:
        must = f"a plan has at most {MAX_RANKS} ranks"
        raise violation("limits", f"{own.ranks} ranks", must, f"use {MAX_RANKS} or fewer")
    if own.ranks % own.node_size:
        nearest = max(1, round(own.ranks / own.node_size)) * own.node_size
        value = f"{own.ranks} ranks in nodes of {own.node_size}"
        raise violation("limits", value, "ranks are a whole number of nodes", f"use {nearest} ranks")
    for key in ("capacity", "offload_capacity"):
        names = [checkpoint for checkpoint, _ in getattr(own, key)]
        missing = key == "capacity" and not names
        if missing or len(set(names)) < len(names) or not set(names) <= set(Checkpoint):
            value = f"{key} is given for {names}"
            raise violation("limits", value, "every checkpoint at most once", f"choose among {', '.join(Checkpoint)}")
        for checkpoint, tokens in getattr(own, key):
            if not whole_numbers([tokens]) or tokens < 1:
                value = f"{key} of checkpoint {checkpoint} is {tokens!r} tokens"
                raise violation("limits", value, "at least 1 token per rank and round", "raise the memory budget")
    for kind, chosen in ((Sharding, plan.sharding), (Reduce, plan.reduce)):
        if chosen not in list(kind):
            value = f"{kind.__name__.lower()} is {chosen!r}"
            raise violation("limits", value, "it is one of a fixed list", f"choose among {', '.join(kind)}")


def stage_ranks(plan: Plan) -> None:
    """Pipelines have stages, stages have ranks of the world; two stages have the same ranks or none in common.

    Only stages of one pipeline may have the same ranks. So ranks that share parameter shards (a shard group is a
    pipeline rank or a part of it) are in the same rounds without a rule of their own.
    """
    owner: dict[int, tuple[int, int]] = {}  # the first stage of its pipeline rank
    world = plan.limits.ranks
    if not plan.pipelines:
        raise violation("stage-ranks", "no pipelines", "a plan has at least one", "use Pipeline.single")
    for p, pipeline in enumerate(plan.pipelines):
        if not pipeline.stages:
            raise violation("stage-ranks", f"pipeline {p} has no stages", "it has at least one", "use Pipeline.single")
        for ranks in pipeline.ranks_by_pp_rank:
            s = next(s for s, stage in enumerate(pipeline.stages) if stage.ranks == ranks)
            if not ranks:
                value = f"pipeline {p} stage {s} has no ranks"
                raise violation("stage-ranks", value, "a stage has at least one", "leave the stage out")
            for rank in ranks:
                if not whole_numbers([rank]) or not 0 <= rank < world:
                    value = f"pipeline {p} stage {s} uses rank {rank!r}"
                    raise violation("stage-ranks", value, f"there are {world} ranks", f"use ranks 0 to {world - 1}")
                if rank in owner:
                    other, first = owner[rank]
                    value = f"rank {rank} is in pipeline {p} stage {s} and in pipeline {other} stage {first}"
                    must = "stages have the same ranks in the same order (in one pipeline) or none in common"
                    same = other == p and first != s
                    way_out = "remove it from one of them" + f", or give both the ranks of stage {first}" * same
                    raise violation("stage-ranks", value, must, way_out)
                owner[rank] = (p, s)


def layers(plan: Plan) -> None:
    """The stages of a pipeline run all layers, one range after the other; all pipelines run equally many."""
    totals = []
    for p, pipeline in enumerate(plan.pipelines):
        expected, heads = 0, pipeline.chain.heads
        if heads > 1:
            _check_head_stages(p, pipeline)
        for s, stage in enumerate(pipeline.stages[: -heads if heads > 1 else None]):
            first, stop = stage.layers
            if first != expected or stop <= first:
                value = f"pipeline {p} stage {s} has layers [{first}:{stop})"
                must = "layers of the stages follow each other from 0, at least one each"
                raise violation("layers", value, must, f"use [{expected}:{max(stop, expected + 1)})")
            expected = stop
        totals.append(expected)
    if len(set(totals)) > 1:
        value = f"pipelines have {', '.join(map(str, totals))} layers"
        raise violation("layers", value, "all pipelines run the same model", f"use {max(totals)} layers in each")


def _check_head_stages(p: int, pipeline: Pipeline) -> None:
    """Refuse stages without layers unless they are the last ones, one on every pipeline rank, and weights are whole."""
    chain, end = pipeline.chain, pipeline.stages[pipeline.chain.last].layers[1]
    heads = pipeline.stages[chain.last + 1 :]
    same = [stage.ranks for stage in heads] == [
        *dict.fromkeys(each.ranks for each in pipeline.stages[: chain.last + 1])
    ]
    wrong = next((s for s, each in enumerate(heads, chain.last + 1) if each.layers != (end, end)), None)
    if wrong is not None:
        first, stop = pipeline.stages[wrong].layers
        value, way_out = f"pipeline {p} stage {wrong} has layers [{first}:{stop})", f"use [{end}:{end})"
        must = "layers of the stages follow each other from 0, at least one each, but for head stages behind them"
        raise violation("layers", value, must, way_out)
    if not same or any(stage.tensor > 1 for stage in pipeline.stages):
        value = f"pipeline {p} has {len(heads)} stages without layers"
        must = "head stages are one on every pipeline rank, in their order, of several with tensor degree 1"
        raise violation("layers", value, must, "leave them out: the last stage has the head then")


def work(plan: Plan) -> None:
    """Every round has work for every stage, and every group has documents.

    A head stage has none in a round with fewer tokens than ranks.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for r, current in enumerate(pipeline.rounds):
            if len(current.by_stage) != len(pipeline.stages):
                value = f"pipeline {p} round {r} has {len(current.by_stage)} shares for {len(pipeline.stages)} stages"
                must = "a round has one StageMicroBatch per stage"
                raise violation("work", value, must, f"give {len(pipeline.stages)}")
    for where, stage, share in stage_batches(plan):
        if (stage.layer_count and not share.groups) or not all(group.spans for group in share.groups):
            what = "no groups" if not share.groups else "a group without documents"
            raise violation("work", f"{place(where)} has {what}", "groups and rounds do some work", "leave it out")


def lighter(plan: Plan) -> None:
    """Fewer layers than all recompute less, where there is such a choice and nothing is offloaded."""
    for where, stage, share in stage_batches(plan):
        count = share.lighter_layers
        if whole_numbers((count,)) and count == 0:
            continue
        value = f"{place(where)} has {count!r} layers that recompute less than checkpoint {share.checkpoint}"
        if share.checkpoint.lighter is None or share.offload:
            must = "only full and selective checkpointing that stays on the GPU has a lighter choice"
            raise violation("lighter", value, must, "use 0")
        if not whole_numbers((count,)) or not 0 < count < stage.layer_count:
            must = f"they are some of the {stage.layer_count} layers of the stage, not all"
            raise violation("lighter", value, must, f"use 0 to {stage.layer_count - 1}")


def offload(plan: Plan) -> None:
    """Some or all layers of a stage are offloaded; all or none where the stage is recomputed as one."""
    for where, stage, share in stage_batches(plan):
        count, layers = share.offloaded_layers, stage.layer_count
        if whole_numbers((count,)) and count == 0:
            continue
        value = f"{place(where)} has {count!r} layers whose activations are offloaded"
        if not whole_numbers((count,)) or not 0 < count <= layers:
            raise violation("offload", value, f"the stage has {layers} layers", f"use 0 to {layers}")
        if share.checkpoint == Checkpoint.STAGE and count < layers:
            must = f"checkpoint {share.checkpoint} stores the input of the stage and nothing of its {layers} layers"
            raise violation("offload", value, must, f"use 0 or {layers}")


def group_ranks(plan: Plan) -> None:
    """A group's ranks are distinct ranks of its stage."""
    sets = [[frozenset(stage.ranks) for stage in pipeline.stages] for pipeline in plan.pipelines]
    for where, stage, group in stage_groups(plan):
        allowed, used = sets[where[0]][where[2]], set(group.ranks)
        if not (used <= allowed and len(used) == len(group.ranks) and used and whole_numbers(used)):
            foreign = sorted(used - allowed)
            what = f"rank {foreign[0]}, which is not in the stage" if foreign else f"ranks {list(group.ranks)}"
            must = "the ranks of a group are distinct ranks of its stage"
            way_out = f"use ranks among {stage.ranks[0]} to {stage.ranks[-1]}, each once"
            raise violation("group-ranks", f"{place(where)} has {what}", must, way_out)


def group_shape(plan: Plan) -> None:
    """The ranks of a group form ulysses x ring."""
    for where, _, group in stage_groups(plan):
        ulysses, ring, degree = group.ulysses, group.ring, len(group.ranks)
        if ulysses * ring != degree or ulysses < 1 or not whole_numbers((ulysses, ring)):
            nearest = min(_divisors(degree), key=lambda size: (abs(size - ulysses), size))
            value = f"{place(where)} has ulysses {ulysses} x ring {ring} on {degree} ranks"
            way_out = f"use ulysses {nearest} x ring {degree // nearest}"
            raise violation("group-shape", value, "ulysses x ring is the number of ranks", way_out)


def heads(plan: Plan) -> None:
    """Every Ulysses rank has at least one query head."""
    most = plan.limits.heads
    for where, _, group in stage_groups(plan):
        if group.ulysses > most:
            nearest = max(size for size in range(1, most + 1) if len(group.ranks) % size == 0)
            value = f"{place(where)} has ulysses {group.ulysses} for {most} heads"
            way_out = f"use ulysses {nearest} x ring {len(group.ranks) // nearest}"
            raise violation("heads", value, "every Ulysses rank needs a query head", way_out)


def family(plan: Plan) -> None:
    """The Ulysses blocks of every group are members of the group family."""
    known = plan.limits.family
    for where, _, group in stage_groups(plan):
        size = group.ulysses
        for block in group.ulysses_groups() if size > 1 else ():
            if not known.contains(block[0], size) or block != tuple(range(block[0], block[0] + size)):
                nearest = known.nearest(min(block), size)
                value = f"{place(where)} has the Ulysses block {list(block)}"
                must = "Ulysses blocks are aligned contiguous blocks of the group family"
                way_out = f"use ranks {nearest.start} to {nearest.stop - 1} in order"
                raise violation("family", value, must, way_out)


def tensor(plan: Plan) -> None:
    """The tensor degree divides a stage's ranks and the heads, and is an inner part of every group's Ulysses axis.

    A rank holds the same slice of the weights in all rounds, so groups consist of whole TP groups of the stage. The
    ranks of a TP group compute linear layers together: these have no layout of their own, and keys have no route.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            _check_degree(f"pipeline {p} stage {s} has tensor degree {stage.tensor}", stage, plan.limits.heads)
    for where, stage, share in stage_batches(plan):
        if stage.tensor > 1 and share.linear is not None:
            must = f"the {stage.tensor} ranks of a TP group compute linear layers together, on their attention tokens"
            way_out = "leave the linear layout out, or use tensor degree 1"
            raise violation("tensor", f"{place(where)} has a linear layout", must, way_out)
    for where, stage, group in stage_groups(plan):
        if stage.tensor > 1:
            _check_tp_groups(place(where), stage, group)


def expert(plan: Plan) -> None:
    """The expert degree divides a stage's ranks, is the same on all stages of a pipeline rank, and excludes tensor > 1.

    The ranks of an EP group take part in the same rounds, so with hybrid sharding they are in one node.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            degree, value = stage.expert, f"pipeline {p} stage {s} has expert degree {stage.expert!r}"
            if not whole_numbers((degree,)) or degree < 1 or len(stage.ranks) % degree:
                nearest = max((size for size in _divisors(len(stage.ranks)) if size <= degree), default=1)
                must = f"it divides the {len(stage.ranks)} ranks of the stage"
                raise violation("expert", value, must, f"use {nearest}")
            if degree > 1 and stage.tensor > 1:
                must = f"the {stage.tensor} ranks of a TP group divide the experts already"
                raise violation("expert", value, must, "use expert degree 1, or tensor degree 1")
            first = pipeline.stages[pipeline.stages_of(pipeline.pp_rank_of(s))[0]].expert
            if degree != first:
                must = f"stages of the same ranks divide experts alike, and another has degree {first}"
                raise violation("expert", value, must, f"use {first}")
            nodes = [{rank // plan.limits.node_size for rank in ranks} for ranks in pipeline.ep_groups(s)]
            if plan.sharding == Sharding.HYBRID and any(len(each) > 1 for each in nodes):
                must = "under hybrid sharding ranks of one node run the same rounds, and the EP group is in several"
                raise violation("expert", value, must, "use a degree that divides a node's ranks, or sharding full")


def _check_degree(value: str, stage: Stage, heads: int) -> None:
    """Refuse a degree that does not divide the ranks, or the query heads."""
    for on, count, what in (("on", len(stage.ranks), "ranks of the stage"), ("for", heads, "query heads")):
        if stage.tensor < 1 or count % stage.tensor:
            nearest = max((size for size in _divisors(count) if size <= stage.tensor), default=1)
            raise violation("tensor", f"{value} {on} {count} {what}", "it divides them", f"use {nearest}")


def _check_tp_groups(name: str, stage: Stage, group: Group) -> None:
    degree, tp_groups = stage.tensor, _tp_groups(stage.ranks, stage.tensor)
    if group.ulysses % degree:
        value = f"{name} has ulysses {group.ulysses}, tensor degree {degree}"
        must = "tensor ranks are the inner part of the Ulysses axis, ulysses is a multiple of them"
        raise violation("tensor", value, must, f"use ulysses {-(-group.ulysses // degree) * degree}")
    strange = [part for part in _tp_groups(group.ranks, degree) if part not in tp_groups]
    if strange:
        must = f"tensor ranks are the stage's ranks cut every {degree}"
        nearest = next(part for part in tp_groups if strange[0][0] in part)
        raise violation("tensor", f"{name} has {list(strange[0])} as tensor ranks", must, f"use {list(nearest)}")
    if group.route is not None:
        must = f"keys of each of the {degree} slices of the weights go from rank to rank"
        raise violation("tensor", f"{name} has a route", must, "leave the route out, or use tensor degree 1")


def _tp_groups(ranks: tuple[int, ...], size: int) -> dict[tuple[int, ...], None]:
    return dict.fromkeys(ranks[k : k + size] for k in range(0, len(ranks), size))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
