"""The cells of Zeppelin's evaluation: clusters, models, data and GPUs, and one cell planned and simulated.

Fixed before any run, from what is known of the published set-up (64K tokens on 16 GPUs in its timelines):

- a step has 4,096 tokens per GPU, so 64K on 16 GPUs and 512K on 128; documents in the order in which they are drawn,
  the last one cut where the step is full; one longer than the whole step is left out
- memory is 0.9 of the device's; parameters and optimiser are sharded over all GPUs, where the authors split the 13B and
  the 30B by tensor parallelism
- LLaMA 7B, 13B and 30B as published in 2023, 3B as OpenLLaMA has it (26 layers, width 3,200): no grouped heads
- ArXiv and GitHub lengths are stand-ins; ProLong is the 64K workload of the DistCA release
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from seqloom.api import cost_model, lower_bound
from seqloom.cost import CostModel, Shape
from seqloom.cost.shapes import ordered, useful_shapes
from seqloom.describe import sample
from seqloom.plan import Plan, Round
from seqloom.planners import RIVALS, make_plan, plan_batches
from seqloom.planners.rivals import plan_te_cp, plan_zeppelin
from seqloom.simulate import simulate

CLUSTERS = {"A": "A800", "B": "H800", "C": "H200"}
MODELS = ("llama-3b", "llama-7b", "llama-13b", "llama-30b")
DATA = {"ArXiv": "arxiv", "GitHub": "github", "ProLong": "prolong-64k"}
GPUS = (16, 32, 64, 128)
TOKENS = 4096
"""Of a step, per GPU."""
OURS = ("flex", "zones", "auto")


@dataclass(frozen=True, slots=True)
class Cell:
    """Which cluster, model, data and number of GPUs."""

    cluster: str
    model: str
    data: str
    gpus: int

    @property
    def cost(self) -> CostModel:
        """What prices this cell's plans."""
        return _cost(CLUSTERS[self.cluster], self.model, self.gpus)

    def batches(self, count: int, seed: int) -> list[np.ndarray]:
        """Steps of this cell, all of the same number of tokens: the same for all clusters and models."""
        room = TOKENS * self.gpus
        drawn = sample(DATA[self.data], count * room // 512, seed=seed, max_length=room)
        full = room * np.arange(1, count + 1)
        ends = np.union1d(np.cumsum(drawn), full)
        return np.split(np.diff(ends, prepend=0), np.searchsorted(ends, full) + 1)[:count]


@cache
def _cost(device: str, model: str, gpus: int) -> CostModel:
    return cost_model(f"{gpus // 8}x8x{device}", model, max_length=TOKENS * gpus)


def steps(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Simulated seconds per step of every planner, and the bound's."""
    cost, names = cell.cost, (*RIVALS, *OURS)
    planned = plan_batches(names, batches, cost)
    seconds = {name: [simulate(plans[name].plan, cost).step_ns / 1e9 for plans in planned] for name in names}
    seconds["bound"] = [lower_bound(batch, cost) / 1e9 for batch in batches]
    return {name: float(np.mean(values)) for name, values in seconds.items()}


def mean_step(plan: Callable[[np.ndarray], Plan], batches: list[np.ndarray], cost: CostModel) -> float:
    """Simulated seconds per step of the plans of these batches."""
    return float(np.mean([simulate(plan(batch), cost).step_ns for batch in batches])) / 1e9


def published_ablation(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Seconds of Zeppelin with parts of it switched off, as in its own ablation."""
    cost = cell.cost
    sides: dict[str, Callable[[np.ndarray], Plan]] = {
        "te-cp": lambda batch: plan_te_cp(batch, cost),
        "routing": lambda batch: plan_te_cp(batch, cost, routed=True),
        "partitioning": lambda batch: plan_zeppelin(batch, cost, routing=False, remapping=False),
        "routing + partitioning": lambda batch: plan_zeppelin(batch, cost, remapping=False),
        "+ remapping": lambda batch: plan_zeppelin(batch, cost),
    }
    return {name: mean_step(plan, batches, cost) for name, plan in sides.items()}


def own_ablation(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Seconds of ``auto`` with one of its means taken away at a time; without partitioning, one group of all GPUs."""
    cost = cell.cost
    direct, rings = (
        with_shapes(cost, keep) for keep in (lambda shape: not shape.routed, lambda shape: shape.ulysses == 1)
    )
    sides: dict[str, Callable[[np.ndarray], Plan]] = {
        "auto": lambda batch: make_plan("auto", batch, cost),
        "no partitioning": lambda batch: make_plan(f"static:{cell.gpus}", batch, cost),
        "no routing": lambda batch: make_plan("auto", batch, direct),
        "no remapping": lambda batch: in_one_layout(make_plan("auto", batch, cost)),
        "no Ulysses": lambda batch: make_plan("auto", batch, rings),
    }
    return {name: mean_step(plan, batches, cost) for name, plan in sides.items()}


def in_one_layout(plan: Plan) -> Plan:
    """The same plan with linear layers where attention is."""

    def kept(current: Round) -> Round:
        return Round(tuple(replace(work, linear=None) for work in current.work))

    pipelines = (replace(one, rounds=tuple(map(kept, one.rounds))) for one in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def with_shapes(cost: CostModel, keep: Callable[[Shape], bool]) -> CostModel:
    """The same cost model with fewer shapes for planners to choose from, chosen among those as usual."""
    fewer = copy.copy(cost)
    fewer.shapes = tuple(shape for shape in cost.engine.shapes if keep(shape))
    useful = [useful_shapes(partial(fewer.tables, variant=variant)) for variant in cost.variants]
    fewer.shapes = ordered(shape for shapes in useful for shape in shapes)
    return fewer
