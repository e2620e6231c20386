"""Random weights and pipelines, and what every rank holds of them, worked out on whole tensors with `torch.chunk`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from seqloom.plan import Pipeline, Stage, Weight

Wholes = Sequence[torch.Tensor]
Held = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReshardCase:
    """Weights of a model with `layers` layers, and pipelines on some of `ranks` ranks.

    Attributes:
        per_pass: (pipeline, stage) of stages that are gathered for every pass.
    """

    ranks: int
    weights: tuple[Weight, ...]
    pipelines: tuple[Pipeline, ...]
    per_pass: frozenset[tuple[int, int]] = frozenset()

    def wholes(self, seed: int) -> list[torch.Tensor]:
        """Make values of all weights, [rows, columns] float32."""
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(weight.rows, weight.columns, generator=random) for weight in self.weights]

    def numbers(self) -> list[torch.Tensor]:
        """Number the elements of every weight, [rows, columns]."""
        shapes = ((weight.rows, weight.columns) for weight in self.weights)
        return [torch.arange(rows * columns).view(rows, columns) for rows, columns in shapes]

    def kept(self, wholes: Wholes, rank: int) -> Held:
        """What a rank keeps for the optimiser."""
        return _filled({k: _chunk(whole, self.ranks, 0, rank) for k, whole in enumerate(wholes)})

    def used(self, wholes: Wholes, rank: int) -> Held:
        """What a rank computes with."""
        return self.between_passes(wholes, rank, ())

    def between_passes(self, wholes: Wholes, rank: int, per_pass: Collection[tuple[int, int]]) -> Held:
        """What a rank holds for the whole step, when some stages are gathered for every pass."""
        found: Held = {}
        for p, pipeline in enumerate(self.pipelines):
            for s, (stage, part) in enumerate(zip(pipeline.stages, pipeline.layer_ranges, strict=True)):
                if rank not in stage.ranks:
                    continue
                tp_group, member = divmod(stage.ranks.index(rank), stage.tensor)
                ends = ["embedding"] * part.has_embedding + ["head"] * part.has_head
                homes = {*range(part.first, part.stop), *ends}
                for k, weight in enumerate(self.weights):
                    if homes.isdisjoint(weight.used_by):
                        continue
                    own = (
                        wholes[k] if weight.tp_axis is None else _chunk(wholes[k], stage.tensor, weight.tp_axis, member)
                    )
                    if (p, s) in per_pass:
                        own = _chunk(own, len(stage.ranks) // stage.tensor, 0, tp_group)
                    if k not in found or found[k].numel() < own.numel():  # one stage keeps it whole
                        found[k] = own
        return _filled(found)


def _chunk(whole: torch.Tensor, parts: int, axis: int, index: int) -> torch.Tensor:
    """Return one of torch's chunks, empty where there are fewer."""
    chunks = whole.chunk(parts, axis)
    return chunks[index] if index < len(chunks) else whole.narrow(axis, 0, 0)


def _filled(held: Held) -> Held:
    return {k: each.contiguous() for k, each in held.items() if each.numel()}


@st.composite
def reshard_cases(draw: st.DrawFn, *, max_ranks: int = 8, per_pass: bool = False) -> ReshardCase:
    """Draw weights and pipelines: vectors and matrices, odd rows, fewer rows than ranks, idle ranks, tied tables.

    Args:
        draw: given by hypothesis.
        max_ranks: ranks, at most.
        per_pass: draw stages that are gathered for every pass too.
    """
    ranks, layers = draw(st.integers(1, max_ranks)), draw(st.integers(1, 4))
    weights = [draw(_weights("table", ("embedding", "head") if draw(st.booleans()) else ("embedding",)))]
    for layer in range(layers):
        homes = st.sampled_from(((layer,), (layer,), (layer, layers - 1)))
        for k in range(draw(st.integers(0, 3))):
            weights.append(draw(_weights(f"{layer}.{k}", draw(homes), any_cut=True)))
    weights += [draw(_weights(name, ("head",))) for name in ("norm", "head")]
    pipelines = draw(_pipelines(ranks, layers))
    stages = [(p, s) for p, pipeline in enumerate(pipelines) for s in range(len(pipeline.stages))]
    chosen = draw(st.sets(st.sampled_from(stages), min_size=1)) if per_pass and stages else ()
    return ReshardCase(ranks, tuple(draw(st.permutations(weights))), pipelines, frozenset(chosen))


@st.composite
def _weights(draw: st.DrawFn, name: str, home: tuple[int | str, ...], any_cut: bool = False) -> Weight:
    """Draw a weight; every tensor degree drawn here divides a cut axis."""
    cut = draw(st.sampled_from((None, 0, 1))) if any_cut else None
    rows, columns = draw(st.integers(1, 13)), draw(st.sampled_from((1, 1, 2, 3, 5)))
    return Weight(name, 12 * draw(st.integers(1, 2)) if cut == 0 else rows, 12 if cut == 1 else columns, home, cut)


@st.composite
def _pipelines(draw: st.DrawFn, ranks: int, layers: int) -> tuple[Pipeline, ...]:
    """Draw pipelines side by side; some ranks are in none."""
    free, found = list(draw(st.permutations(range(ranks)))), []
    while free and draw(st.sampled_from((True, True, True, True, False))):
        stages = draw(st.integers(1, min(4, layers, len(free))))
        cuts = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
        edges, line = [0, *cuts, layers], []
        for s in range(stages):
            if line and draw(st.integers(0, 3)) == 0:  # on the ranks of an earlier stage
                own, tensor = draw(st.sampled_from([(stage.ranks, stage.tensor) for stage in line]))
            else:
                most = len(free) - (stages - s - 1)
                tensor = draw(st.integers(1, min(4, most)))
                width = tensor * draw(st.integers(1, most // tensor))
                own, free = tuple(sorted(free[:width])), free[width:]
            line.append(Stage(own, (edges[s], edges[s + 1]), tensor))
        found.append(Pipeline(tuple(line), (), ()))
    return tuple(found)
