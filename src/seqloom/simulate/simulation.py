"""A plan run on paper: its windows, its tasks, and when each of them starts and stops.

Ranks that share memory and clock, as processes of one CPU do, are faster while others wait. A profile prices work as if
all were busy and has a constant `alone` for the other end. Pipelines have ranks that wait, so they are run twice: with
all prices as they are, which tells the share of time in which ranks work; and with prices for that share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.simulate.events import EventTable, NicTable, busy_ns, event_table, nic_table
from seqloom.simulate.memory import peak_memory
from seqloom.simulate.tasks import TaskGraph, build_tasks
from seqloom.simulate.windows import FULL_SHARE, MicroBatchKey, MicroBatchTimes, end_ns, price


class DryRun(NamedTuple):
    """Tasks are numbered as in the program's engine; ns."""

    windows: dict[MicroBatchKey, MicroBatchTimes]
    program: TaskGraph
    starts: np.ndarray
    stops: np.ndarray


def dry_run(plan: Plan, cost: CostModel) -> DryRun:
    """Price a plan and run its actions."""
    windows = price(plan, cost)
    found = _run(plan, cost, windows)
    if cost.engine.solo_time_ratio == 1.0 or all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return found
    busy = sum(int(window.total.sum()) for window in windows.values())
    waiting = 1.0 - busy / max(busy, cost.ranks * int(found.stops.max(initial=0)), 1)
    share = round(FULL_SHARE * (1.0 - (1.0 - cost.engine.solo_time_ratio) * waiting))
    return _run(plan, cost, {place: window.scaled(share) for place, window in windows.items()})


def _run(plan: Plan, cost: CostModel, windows: dict[MicroBatchKey, MicroBatchTimes]) -> DryRun:
    program = build_tasks(plan, cost, windows)
    return DryRun(windows, program, *program.engine.run(program.name))


# ---- merged: simulate.predicted
# One predicted step time for any plan: what planners compare, and what training records beside the measured time.


def predicted_ns(plan: Plan, cost: CostModel) -> int:
    """Step time of a plan in ns: `Simulation.step_ns`, by the closed form where there is one.

    Plans of one stage have a closed form; plans with more stages are run on paper.
    """
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return cost.plan_ns(plan)
    found = dry_run(plan, cost)
    return int(found.stops.max(initial=0)) + end_ns(plan, cost, found.windows)[0]


# ---- merged: simulate.simulation
# Simulate a plan: step time, who works, who waits, memory, and the timeline.


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One round of one pipeline: its forward and backward.

    Attributes:
        pipeline: index of the pipeline.
        round: index of the round in it.
        time_ns: forward and backward of its longest component; stages one after the other.
        held_ns: rank-ns of all ranks that take part, with or without tokens.
        busy_ns: rank-ns of computing.
        comm_ns: rank-ns of exposed communication.
    """

    pipeline: int
    round: int
    time_ns: int
    held_ns: int
    busy_ns: int
    comm_ns: int

    @property
    def idle_share(self) -> float:
        """Share of the held rank-time that is spent waiting in lock step."""
        return 1 - (self.busy_ns + self.comm_ns) / max(self.held_ns, 1)

    @property
    def comm_share(self) -> float:
        """Share of the held rank-time that is exposed communication."""
        return self.comm_ns / max(self.held_ns, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What running a plan would look like under a cost model.

    For every rank ``busy_ns + comm_ns + idle_ns == step_ns``.

    Attributes:
        step_ns: time of the step.
        end_ns: how much of it is the end of the step (reduction once per step, optimiser), after all rounds; with what
            free sharding moves and the rounds do not hide, before the first of them too.
        node_size: ranks of a node.
        events: who does what when.
        rounds: pipeline by pipeline.
        busy_ns: int64[ranks] computing, the optimiser at the end of the step included.
        comm_ns: int64[ranks] exposed communication: the time of the rank's groups that is not computing, and
            messages between stages during which the rank does nothing else.
        idle_ns: int64[ranks] neither computing nor communicating.
        peak_memory: int64[ranks] bytes.
        nic_busy_ns: int64[nodes, nics] time in which every network card is taken by exchanges of groups and remapping
            (parameters and gradients not counted).
        link_busy_ns: int64[ranks] the same of every rank's NVLink port.
        nics: when the cards of every node are in use.
    """

    step_ns: int
    end_ns: int
    node_size: int
    events: EventTable
    rounds: tuple[RoundSummary, ...]
    busy_ns: np.ndarray
    comm_ns: np.ndarray
    idle_ns: np.ndarray
    peak_memory: np.ndarray
    nic_busy_ns: np.ndarray
    link_busy_ns: np.ndarray
    nics: NicTable

    @property
    def ranks(self) -> int:
        """Ranks of the cluster, those without work included."""
        return len(self.busy_ns)

    @property
    def idle_share(self) -> float:
        """Share of all rank-time (ranks x step) in which a rank neither computes nor communicates."""
        return float(self.idle_ns.sum() / max(self.ranks * self.step_ns, 1))

    @property
    def comm_share(self) -> float:
        """Share of all rank-time (ranks x step) that is exposed communication."""
        return float(self.comm_ns.sum() / max(self.ranks * self.step_ns, 1))

    @property
    def nic_shares(self) -> tuple[float, float]:
        """Share of the step in which a network card is taken: of the busiest one, and the mean of all."""
        shares = self.nic_busy_ns / max(self.step_ns, 1)
        return float(shares.max()), float(shares.mean())

    def __repr__(self) -> str:
        """Summarise in one line."""
        return (
            f"Simulation({self.step_ns / 1e6:.3f} ms on {self.ranks} ranks, {len(self.rounds)} rounds, "
            f"idle {self.idle_share:.1%}, communication {self.comm_share:.1%}, "
            f"peak {int(self.peak_memory.max()) / 1024**3:.1f} GiB)"
        )


def simulate(plan: Plan, cost: CostModel) -> Simulation:
    """Run a plan on paper.

    Plans of one stage whose rounds go forward and backward before the next take exactly
    ``cost.plan_ns(plan)``. Does not validate the plan; rows of actions that wait for each other raise
    `DeadlockError`.
    """
    _require_match(plan, cost)
    windows, program, starts, stops = dry_run(plan, cost)
    end, end_comm = end_ns(plan, cost, windows)
    step = int(stops.max(initial=0)) + end
    events = event_table(program, windows, starts, cost.ranks, (end, end_comm))
    comm, idle = _accounts(events, cost.ranks, step)
    cluster = cost.cluster
    nic, link = busy_ns(windows.values(), cluster.nodes, cluster.nics_per_node, cost.ranks)
    return Simulation(
        step_ns=step,
        end_ns=end,
        node_size=cost.node_size,
        events=events,
        rounds=_rounds(windows),
        busy_ns=step - comm - idle,
        comm_ns=comm,
        idle_ns=idle,
        peak_memory=peak_memory(plan, cost),
        nic_busy_ns=nic,
        link_busy_ns=link,
        nics=nic_table(program, windows, starts, cost.node_size),
    )


def _require_match(plan: Plan, cost: CostModel) -> None:
    made = (plan.limits.ranks, plan.limits.node_size, plan.sharding)
    here = (cost.ranks, cost.node_size, cost.sharding)
    if made != here:
        raise SeqloomError(
            f"the plan is for {made[0]} ranks in nodes of {made[1]} with {made[2]} sharding, the cost model "
            f"prices {here[0]} ranks in nodes of {here[1]} with {here[2]} sharding; give it the plan's own"
        )


def _accounts(events: EventTable, ranks: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(exposed communication, idle), int64[ranks] ns."""
    working = np.zeros(ranks, dtype=np.int64)
    comm = np.zeros(ranks, dtype=np.int64)
    beside = events.beside
    np.add.at(working, events.rank, np.where(beside, 0, events.stop - events.start))
    np.add.at(comm, events.rank, events.comm)
    covered = covered_ns(events, ranks, step) if beside.any() else working
    return comm + covered - working, step - covered


def covered_ns(events: EventTable, ranks: int, step: int) -> np.ndarray:
    """int64[ranks]: ns in which at least one event of the rank is going on. Events are sorted by start.

    All ranks lie on one line, one step after the other: an event adds what it reaches beyond all before it.
    """
    begin, stop = events.rank * step + events.start, events.rank * step + events.stop
    reach = np.maximum.accumulate(stop)
    before = np.concatenate([[0], reach[:-1]])
    added = np.maximum(stop - np.maximum(begin, before), 0)
    covered = np.zeros(ranks, dtype=np.int64)
    np.add.at(covered, events.rank, added)
    return covered


def _rounds(windows: dict[MicroBatchKey, MicroBatchTimes]) -> tuple[RoundSummary, ...]:
    """Sum up every round over its stages."""
    sums: dict[tuple[int, int], list[int]] = {}
    for place, window in windows.items():
        comm = int(window.comm.sum())
        own = (
            int(window.length.max()),
            int((window.length * window.held).sum()),
            int(window.total.sum()) - comm,
            comm,
        )
        key = (place.pipeline, place.round)
        sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 4), own, strict=True)]
    return tuple(RoundSummary(*key, *sums[key]) for key in sorted(sums))
