"""Parameters as boxes: which rows each rank stores for the optimiser, and which it needs to compute a plan.

The optimiser's layout never changes. Every step parameters move from it to the compute layout of that step's plan, and
gradients move back and are summed. Two pipelines, one of two stages and one of a single stage with tensor degree 2:

                  optimiser   compute layout                                    a weight of 8 rows that a
        rank 0    rows 0-1    pipeline 0, stage 0: rows 0-7 of its layers       TP group cuts along its rows
        rank 1    rows 2-3    pipeline 0, stage 1: rows 0-7 of its layers
        rank 2    rows 4-5    pipeline 1: rows 0-3 of all layers
        rank 3    rows 6-7    pipeline 1: rows 4-7 of all layers

Items of these layouts are indices of a list of weights, the axes are rows and columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.layout import Column, Layout
from seqloom.plan.pipeline import LayerRange, Pipeline, Stage

EMBEDDING, HEAD = "embedding", "head"

ROWS, COLUMNS = 0, 1


class Weight(NamedTuple):
    """A parameter as layouts see it.

    Attributes:
        name: as in checkpoints.
        rows: length of the first axis.
        columns: product of the other axes; 1 for vectors.
        used_by: numbers of layers, "embedding", "head" (the final norm and the vocabulary projection); a tied embedding
            has both.
        tp_axis: the axis along which a TP group cuts it: 0 (rows), 1 (columns) or None (every rank has all of it).
        experts: rows are experts, which an EP group divides.
    """

    name: str
    rows: int
    columns: int
    used_by: tuple[int | str, ...]
    tp_axis: int | None = None
    experts: bool = False


def layer_buckets(weights: Sequence[Weight]) -> tuple[tuple[int, ...], ...]:
    """Return the weights that move together: the embedding's, those of layers 0, 1, .., then the norm's and the head's.

    Layer k is bucket k + 1, the head is the last bucket; a bucket may be empty. A weight with several users belongs to
    the first of them. So a tied embedding moves with the embedding: its values are there before either use. Its
    gradient may move after both uses have had their last backward on this rank; gradients move from the last bucket to
    the first, and a rank that has the head but not the embedding stores the table's until the first bucket's turn.
    """
    layers = 1 + max((user for weight in weights for user in weight.used_by if isinstance(user, int)), default=-1)
    buckets: list[list[int]] = [[] for _ in range(layers + 2)]
    for index, weight in enumerate(weights):
        if not weight.used_by:
            raise PlanError(f"{weight.name} has no home; name the layers that need it, {EMBEDDING!r} or {HEAD!r}")
        numbers = {EMBEDDING: 0, HEAD: layers + 1}
        buckets[min(numbers[user] if isinstance(user, str) else user + 1 for user in weight.used_by)].append(index)
    return tuple(map(tuple, buckets))


def optimiser_layout(weights: Sequence[Weight], ranks: int) -> Layout:
    """Return the optimiser's layout: rank k stores the k-th chunk of ceil(rows / ranks) rows of every weight.

    This is torch's chunking, so these are the shards of a DTensor with Shard(0) over all ranks. The last ranks have
    less, or nothing, of a weight that does not divide.
    """
    shapes = _shapes(weights)
    item, rank = (each.ravel() for each in np.indices((len(weights), ranks)))
    start, stop = _chunk(np.zeros_like(item), shapes[item, ROWS], rank, ranks)
    return _layout([(rank, item, start, stop, np.zeros_like(item), shapes[item, COLUMNS])])


def compute_layout(
    weights: Sequence[Weight], pipelines: Sequence[Pipeline], resharded: Collection[tuple[int, int]] = ()
) -> Layout:
    """Return what every rank holds while its stages compute; ranks in no stage hold nothing.

    Ranks of a stage hold all weights that its layers use: all of each, or, with a tensor degree t, rank k of a TP group
    the k-th of t equal slices along `tp_axis`; with an expert degree e, rank k of an EP group the k-th of e equal
    slices of the experts.

    With `resharded`, the (pipeline, stage) of stages that are gathered for every pass, return what every rank holds for
    the whole step. Ranks of such a stage with the same slice of a weight store between passes an even
    share of the rows of what they hold while computing: rank j of w the j-th chunk of ceil(rows / w). A weight that
    another stage of the same ranks stores for the step is stored in full. UNSHARD then is a move from here to the
    compute layout among the ranks of each `dp_groups` entry, and gradients of a pass are summed the same way back.
    """
    shapes = _shapes(weights)
    needed_by: dict[LayerRange, tuple[int, ...]] = {}  # ranges repeat from pipeline to pipeline
    boxes = []
    for number, pipeline in enumerate(pipelines):
        ranges = pipeline.layer_ranges
        for pp_rank in range(len(pipeline.ranks_by_pp_rank)):
            stages = sorted(pipeline.stages_of(pp_rank), key=lambda stage: ((number, stage) in resharded, stage))
            held: dict[int, int] = {}  # weight: tensor degree of the stage that has brought it
            for stage in stages:
                own, layers = pipeline.stages[stage], ranges[stage]
                needed = needed_by.get(layers) or needed_by.setdefault(layers, _weights_of(weights, layers))
                _check_cuts(weights, needed, own, held)
                new = np.array([item for item in needed if item not in held], dtype=np.int64)
                held.update(dict.fromkeys(new.tolist(), own.tensor))
                boxes.append(_stage_boxes(shapes, new, own, (number, stage) in resharded))
    return _layout(boxes)


def dp_groups(ranks: Sequence[int], tensor: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of a stage that have the same slice of weights, slice by slice."""
    return tuple(tuple(ranks[k::tensor]) for k in range(tensor))


def _stage_boxes(shapes: np.ndarray, items: Column, stage: Stage, shared: bool) -> tuple[Column, ...]:
    """Return the boxes of a stage: every rank with every item, as columns of a layout."""
    ranks = np.array(stage.ranks)
    place, at = (each.ravel() for each in np.indices((len(ranks), len(items))))
    item = items[at]
    tp_axis, by_expert = shapes[item, 2], (shapes[item, 3] == 1) & (stage.expert > 1)
    axis = np.where(by_expert, ROWS, np.where(stage.tensor > 1, tp_axis, -1))
    parts = np.where(by_expert, stage.expert, np.where(axis >= 0, stage.tensor, 1))
    index = place % parts
    edges = []
    for along in (ROWS, COLUMNS):
        cuts = np.where(axis == along, parts, 1)
        length = shapes[item, along] // cuts
        start = np.where(cuts > 1, index, 0) * length
        edges += [start, start + length]
    if shared:
        # ranks of a TP group have one slice of all weights: also of those that it does not cut
        apart = np.where(by_expert, stage.expert, stage.tensor)
        edges[:2] = _chunk(edges[0], edges[1], place // apart, len(ranks) // apart)
    return (ranks[place], item, *edges)


def _chunk(start: Column, stop: Column, index: Column, of: int | Column) -> tuple[Column, Column]:
    """Return torch's chunk `index` of `of` of every interval; some are empty."""
    length = -(-(stop - start) // of)
    return np.minimum(start + index * length, stop), np.minimum(start + (index + 1) * length, stop)


def _layout(parts: Sequence[tuple[Column, ...]]) -> Layout:
    """Join columns of boxes, without the empty ones."""
    if not parts:
        return Layout.empty(axes=2)
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
    filled = (columns[3] > columns[2]) & (columns[5] > columns[4])
    return Layout(*(column[filled] for column in columns))


def _shapes(weights: Sequence[Weight]) -> np.ndarray:
    """Return rows, columns, TP axis (-1: none) and whether rows are experts of every weight, int64[weights, 4]."""
    table = [(each.rows, each.columns, -1 if each.tp_axis is None else each.tp_axis, each.experts) for each in weights]
    return np.array(table, dtype=np.int64).reshape(-1, 4)


def _weights_of(weights: Sequence[Weight], layers: LayerRange) -> tuple[int, ...]:
    """Return the indices of the weights that a range of layers uses."""
    ends = {EMBEDDING: layers.has_embedding, HEAD: layers.has_head}
    return tuple(
        index
        for index, weight in enumerate(weights)
        if any(ends[u] if isinstance(u, str) else layers.first <= u < layers.stop for u in weight.used_by)
    )


def _check_cuts(weights: Sequence[Weight], needed: Sequence[int], stage: Stage, held: dict[int, int]) -> None:
    """Refuse a weight that ranks cannot cut evenly, or that two stages of one pipeline rank cut differently."""
    tensor = stage.tensor
    for weight in (weights[item] for item in needed):
        if weight.experts and weight.rows % stage.expert:
            raise PlanError(
                f"{weight.name} has {weight.rows} experts, a stage with expert degree {stage.expert} divides them "
                f"evenly; use an expert degree that divides {weight.rows}"
            )
    for item in needed:
        weight = weights[item]
        if weight.tp_axis is None:
            continue
        axis = "columns" if weight.tp_axis == COLUMNS else "rows"
        length = getattr(weight, axis)
        if length % tensor:
            raise PlanError(
                f"{weight.name} has {length} {axis}, a stage with tensor degree {tensor} cuts them evenly; "
                f"use a tensor degree that divides {length}"
            )
        if held.get(item, tensor) != tensor:
            raise PlanError(
                f"{weight.name} is on two stages of the same ranks with tensor degrees {held[item]} and {tensor}; "
                "give both one degree, or ranks of their own"
            )
