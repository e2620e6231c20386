"""From a plan to priced windows: every stage of every round, in integer nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from itertools import islice

from seqloom.cost import CostModel, Variant
from seqloom.cost.offload import copy_ns
from seqloom.cost.passes import priced_passes
from seqloom.cost.relaying import relay_ns
from seqloom.cost.rounds import tokens_on_ranks
from seqloom.cost.stage_memory import StageMemory
from seqloom.cost.stages import stage_end_ns
from seqloom.plan import Part, Pipeline, Plan, Work
from seqloom.simulate.twins import Place, Twins, stage_shares
from seqloom.simulate.window import Islands, Window, window_of


def price(plan: Plan, cost: CostModel) -> dict[Place, Window]:
    """Price every `Work`, and turn it into its window."""
    islands = Islands.of(plan)
    windows = {}
    for (variant, p, tensor), works in _alike(plan, cost).items():
        twins, own_cost = Twins.of(plan, cost, p), cost.with_tensor(tensor)
        shares = stage_shares(plan.pipelines[p])
        own: dict[Hashable, list[tuple[Place, Work]]] = defaultdict(list)
        for place, work in works:
            own[twins.key(place, work)].append((place, work))
        first = [members[0] for members in own.values()]
        parts = iter(own_cost.groups_parts([group for _, work in first for group in work.groups], variant))
        for (place, work), members in zip(first, own.values(), strict=True):
            priced = list(islice(parts, len(work.groups)))
            times = own_cost.round_times(work, variant, shares[place.stage], priced)
            copied = _copied(own_cost, work, shares[place.stage])
            apart = own_cost.engine.split_ns(_layers(own_cost, shares[place.stage]))
            stage = plan.pipelines[p].stages[place.stage]
            together = stage.ranks if place.stage in twins.together else ()
            window = window_of(work, times, islands, own_cost.engine.products, copied, apart, together)
            for other, _ in members:
                windows[other] = twins.moved(window, place.stage, other.stage)
    return windows


def _layers(cost: CostModel, share: Part | None) -> int:
    """Layers of a stage; None: all of them."""
    return cost.model.layers if share is None else share.stop - share.first


def _copied(cost: CostModel, work: Work, share: Part | None) -> int:
    """ns of copying what is kept of a unit to host memory, on its fullest rank."""
    if not work.offload or share is None:
        return 0
    kept = StageMemory(cost, share).holding(work.checkpoint, offload=False).held
    return copy_ns(kept * int(tokens_on_ranks(cost, work).max()))


def _alike(plan: Plan, cost: CostModel) -> dict[tuple[Variant, int, int], list[tuple[Place, Work]]]:
    """Return the works of every variant, pipeline and tensor degree: what is priced in one go."""
    works: dict[tuple[Variant, int, int], list[tuple[Place, Work]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        resident = len(pipeline.stages) > 1 or bool(priced_passes(cost, pipeline))
        for r, current in enumerate(pipeline.rounds):
            for s, work in enumerate(current.work):
                variant = Variant(work.checkpoint, plan.reduce, resident)
                works[variant, p, pipeline.stages[s].tensor].append((Place(p, s, r), work))
    return works


def end_ns(plan: Plan, cost: CostModel, windows: dict[Place, Window]) -> tuple[int, int]:
    """What the step costs once, beside its rounds, and how much of that is communication."""
    shades = []
    for p, pipeline in enumerate(plan.pipelines):
        ends = [windows[Place(p, 0, r)] for r in (0, len(pipeline.rounds) - 1)] if pipeline.rounds else []
        shades.append((int(ends[0].length.min()), int(ends[1].length.min())) if ends else (0, 0))
    moved = relay_ns(cost, plan.pipelines, shades)
    total, communication = slowest_end(plan, cost)
    return total + moved, communication + moved


def slowest_end(plan: Plan, cost: CostModel) -> tuple[int, int]:
    """ns of the end of the step on the slowest host, and how much of that is communication. The same for all rounds."""
    costs = [(0, 0)]
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > 1:
            costs += [_host_end(plan, cost, pipeline, host) for host in range(len(pipeline.hosts))]
            continue
        own = cost.with_tensor(pipeline.stages[0].tensor)
        for checkpoint in {current.work[0].checkpoint for current in pipeline.rounds}:
            variant = Variant(checkpoint, plan.reduce, bool(priced_passes(cost, pipeline)))
            costs.append((own.step_overhead_ns(variant), own.step_communication_ns(variant)))
    return max(costs)


def _host_end(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> tuple[int, int]:
    """The end of a step on one host: of all its stages, by the widest island that it has.

    Stages of a host have one tensor degree, or are priced by that of the first.
    """
    stages, ranks = pipeline.stages_of(host), pipeline.hosts[host]
    own = cost.with_tensor(pipeline.stages[stages[0]].tensor)
    islands = plan.limits.islands(plan.sharding, ranks)
    return stage_end_ns(own, [pipeline.parts[stage] for stage in stages], len(ranks), min(map(len, islands)))
