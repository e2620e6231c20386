"""The cells of Zeppelin's evaluation: clusters, models, data and GPUs, and one cell planned and simulated.

Fixed before any run, from what is known of the published set-up (64K tokens on 16 GPUs in its timelines):

- a step has 4,096 tokens per GPU, so 64K on 16 GPUs and 512K on 128; documents in the order in which they are drawn,
  the last one cut where the step is full; one longer than the whole step is left out
- memory is 0.9 of the device's; parameters and optimiser are sharded over all GPUs, where the authors split the 13B and
  the 30B by tensor parallelism
- LLaMA 7B, 13B and 30B as published in 2023, 3B as OpenLLaMA has it (26 layers, width 3,200): no grouped heads
- ArXiv and GitHub lengths are stand-ins; ProLong is the 64K workload of the DistCA release
- of the mixture of experts, 8x550M, only the name is known: 550M parameters in LLaMA's proportions (16 layers, width
  1,536), with 8 experts in the place of every feed-forward, of which a token takes two. Every planner has the better
  of two expert degrees, 1 and the 8 GPUs of a node

Changed after a first run, knowing that it brings the ablation on 16 GPUs closer to the published one: the rivals'
key/value gradients travel in 16 bits, as in Transformer Engine and in the published timeline (16 steps of 2.18 ms
forward and twice that backward are its 105 ms). It makes the rivals faster. Ours travel in float32, as our engine sends
them. With float32 for all, zeppelin is 9.9 instead of 8.3 times as fast as te-cp.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from seqloom.api import cost_model, lower_bound
from seqloom.cost import CostModel, GroupShape, communication
from seqloom.cost.shapes import ordered, useful_shapes
from seqloom.describe import ModelSpec, sample
from seqloom.plan import Plan, Round
from seqloom.planners import make_plan, plan_batches
from seqloom.planners.published.rivals import plan_te_cp
from seqloom.planners.published.zeppelin import plan_zeppelin
from seqloom.simulate import simulate

CLUSTERS = {"A": "A800", "B": "H800", "C": "H200"}
MODELS = ("llama-3b", "llama-7b", "llama-13b", "llama-30b")
SIZES = {"layers": 16, "hidden": 1536, "heads": 12, "kv_heads": 12, "head_dim": 128, "vocabulary": 32_000}
EXPERTS = ModelSpec(
    "llama-8x550m", **SIZES, ffn=0, gated=True, tied=False, experts=8, active_experts=2, expert_ffn=4096
)
DATA = {"ArXiv": "arxiv", "GitHub": "github", "ProLong": "prolong-64k"}
GPUS = (16, 32, 64, 128)
TOKENS = 4096
"""Of a step, per GPU."""
RIVALS = ("te-cp", "llama-cp", "hybrid-dp", "megatron", "zeppelin")
OURS = ("flex", "zones", "auto")


@dataclass(frozen=True, slots=True)
class Cell:
    """Which cluster, model, data and number of GPUs."""

    cluster: str
    model: str
    data: str
    gpus: int

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """Degrees that planners choose from."""
        return (1, 8) if self.model == EXPERTS.name else (1,)

    def cost(self, published: bool = False, expert: int = 1) -> CostModel:
        """What prices this cell's plans; `published` inside `as_published` only."""
        return _cost(CLUSTERS[self.cluster], self.model, self.gpus, published, expert)

    def batches(self, count: int, seed: int) -> list[np.ndarray]:
        """Steps of this cell, all of the same number of tokens: the same for all clusters and models."""
        room = TOKENS * self.gpus
        drawn = sample(DATA[self.data], count * room // 512, seed=seed, max_length=room)
        full = room * np.arange(1, count + 1)
        ends = np.union1d(np.cumsum(drawn), full)
        return np.split(np.diff(ends, prepend=0), np.searchsorted(ends, full) + 1)[:count]


@contextmanager
def as_published() -> Iterator[None]:
    """Key/value gradients in 16 bits on the wire, for cost models that are made and used in here."""
    ours, communication.KV_GRADIENT_BYTES = communication.KV_GRADIENT_BYTES, 2
    try:
        yield
    finally:
        communication.KV_GRADIENT_BYTES = ours


@cache
def _cost(device: str, model: str, gpus: int, published: bool, expert: int) -> CostModel:
    spec = EXPERTS if model == EXPERTS.name else model
    return cost_model(f"{gpus // 8}x8x{device}", spec, max_length=TOKENS * gpus, expert=expert)


def steps(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Simulated seconds per step of every planner, and the bound's: each with its best expert degree."""
    found = [_steps(cell, batches, expert) for expert in cell.expert_degrees]
    return {name: min(seconds[name] for seconds in found) for name in found[0]}


def _steps(cell: Cell, batches: list[np.ndarray], expert: int) -> dict[str, float]:
    with as_published():
        theirs = cell.cost(published=True, expert=expert)
        seconds = {name: mean_step(partial(make_plan, name, cost=theirs), batches, theirs) for name in RIVALS}
    cost = cell.cost(expert=expert)
    planned = plan_batches(OURS, batches, cost)
    for name in OURS:
        seconds[name] = float(np.mean([simulate(plans[name].plan, cost).step_ns / 1e9 for plans in planned]))
    seconds["bound"] = float(np.mean([lower_bound(batch, cost) / 1e9 for batch in batches]))
    return seconds


def mean_step(plan: Callable[[np.ndarray], Plan], batches: list[np.ndarray], cost: CostModel) -> float:
    """Simulated seconds per step of the plans of these batches."""
    return float(np.mean([simulate(plan(batch), cost).step_ns for batch in batches])) / 1e9


def published_ablation(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Seconds of Zeppelin with parts of it switched off, as in its own ablation."""
    with as_published():
        cost = cell.cost(published=True)
        sides: dict[str, Callable[[np.ndarray], Plan]] = {
            "te-cp": partial(plan_te_cp, cost=cost),
            "routing": partial(plan_te_cp, cost=cost, routed=True),
            "partitioning": partial(plan_zeppelin, cost=cost, routing=False, remapping=False),
            "routing + partitioning": partial(plan_zeppelin, cost=cost, remapping=False),
            "+ remapping": partial(plan_zeppelin, cost=cost),
        }
        return {name: mean_step(plan, batches, cost) for name, plan in sides.items()}


def own_ablation(cell: Cell, batches: list[np.ndarray]) -> dict[str, float]:
    """Seconds of ``auto`` with one of its means taken away at a time; without partitioning, one group of all GPUs."""
    cost = cell.cost()
    direct = with_shapes(cost, lambda shape: not shape.routed)
    rings = with_shapes(cost, lambda shape: shape.ulysses == 1)
    direct_rings = with_shapes(cost, lambda shape: shape.ulysses == 1 and not shape.routed)
    sides: dict[str, Callable[[np.ndarray], Plan]] = {
        "auto": partial(make_plan, "auto", cost=cost),
        "no partitioning": partial(make_plan, f"static:{cell.gpus}", cost=cost),
        "no routing": partial(make_plan, "auto", cost=direct),
        "no remapping": lambda batch: in_one_layout(make_plan("auto", batch, cost)),
        "no Ulysses": partial(make_plan, "auto", cost=rings),
        "no Ulysses, no routing": partial(make_plan, "auto", cost=direct_rings),
    }
    return {name: mean_step(plan, batches, cost) for name, plan in sides.items()}


def in_one_layout(plan: Plan) -> Plan:
    """The same plan with linear layers where attention is."""

    def kept(current: Round) -> Round:
        return Round(tuple(replace(work, linear=None) for work in current.by_stage))

    pipelines = (replace(one, rounds=tuple(map(kept, one.rounds))) for one in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def with_shapes(cost: CostModel, keep: Callable[[GroupShape], bool]) -> CostModel:
    """The same cost model with fewer shapes for planners to choose from, chosen among those as usual."""
    fewer = copy.copy(cost)
    fewer.shapes = tuple(shape for shape in cost.engine.shapes if keep(shape))
    useful = [useful_shapes(partial(fewer.tables, policy=policy)) for policy in cost.policies]
    fewer.shapes = ordered(shape for shapes in useful for shape in shapes)
    return fewer
