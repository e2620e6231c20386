"""Simulate a plan: step time, who works, who waits, memory, and the timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.plan.action import EVALUATION_KINDS
from seqloom.plan.notebook import html_table
from seqloom.simulate.events import EventTable, NicTable, event_table, nic_table
from seqloom.simulate.memory import peak_host_memory, peak_memory
from seqloom.simulate.microbatch import FULL_SHARE, MicroBatchKey, MicroBatchTimes, end_ns, price
from seqloom.simulate.tasks import TaskGraph, build_tasks


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """Forward and backward of one round of one pipeline."""

    pipeline: int
    round: int
    time_ns: int  # of its longest component; stages one after the other
    held_ns: int  # rank-ns of all ranks that take part, with or without tokens
    busy_ns: int  # rank-ns of computing
    comm_ns: int  # rank-ns of exposed communication

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
    """A simulated step. For every rank ``busy_ns + comm_ns + idle_ns == step_ns``.

    Exposed communication is the time of a rank's groups that is not computing, and messages between stages during which
    the rank does nothing else. The end of the step is the reduction once per step and the optimiser, after all rounds,
    and the exposed resharding time of free sharding, which may come before the first of them, as does a forward that
    counts where routers send tokens (`ModelSpec.counts_routing`).
    """

    step_ns: int
    end_ns: int  # of the step
    node_size: int
    events: EventTable
    rounds: tuple[RoundSummary, ...]  # pipeline by pipeline
    busy_ns: np.ndarray  # int64[ranks] computing, the optimiser included
    comm_ns: np.ndarray  # int64[ranks] exposed communication
    idle_ns: np.ndarray  # int64[ranks]
    peak_memory: np.ndarray  # int64[ranks] bytes
    peak_host_memory: np.ndarray  # int64[ranks] bytes of activations, and of the optimiser, in host memory
    nic_busy_ns: np.ndarray  # int64[nodes, nics] with exchanges of groups and remapping, not parameters and gradients
    link_busy_ns: np.ndarray  # int64[ranks] the same of every rank's NVLink port
    nics: NicTable

    def _repr_html_(self) -> str:
        """Show the summary of the simulated step in a notebook."""
        rows = [
            ("step", f"{self.step_ns / 1e6:,.2f} ms"),
            ("ranks", f"{self.ranks:,}"),
            ("idle", f"{self.idle_share:.1%}"),
            ("exposed communication", f"{self.comm_share:.1%}"),
            ("peak memory of the fullest rank", f"{self.peak_memory.max() / 1024**3:.1f} GiB"),
        ]
        return html_table("Simulated step", ("", ""), rows)

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
        """Share of the step in which a NIC is occupied: of the busiest one, and the mean of all."""
        shares = self.nic_busy_ns / max(self.step_ns, 1)
        return float(shares.max()), float(shares.mean())

    def __repr__(self) -> str:
        return (
            f"Simulation({self.step_ns / 1e6:.3f} ms on {self.ranks} ranks, {len(self.rounds)} rounds, "
            f"idle {self.idle_share:.1%}, communication {self.comm_share:.1%}, "
            f"peak {int(self.peak_memory.max()) / 1024**3:.1f} GiB)"
        )


def simulate(plan: Plan, cost: CostModel) -> Simulation:
    """Run the actions of a plan in the event engine.

    Plans of one stage whose rounds go forward and backward before the next take exactly ``cost.plan_ns(plan)``. Does
    not validate the plan; rows of actions that wait for each other raise `DeadlockError`.
    """
    _require_match(plan, cost)
    graph, starts, stops = _dry_run(plan, cost)
    end, end_comm = end_ns(plan, cost, graph.times)
    end += _counting_ns(plan, cost)
    step = int(stops.max(initial=0)) + end
    events = event_table(graph, starts, cost.ranks, (end, end_comm))
    comm, idle = _comm_and_idle_ns(events, cost.ranks, step)
    nics = np.zeros((cost.cluster.nodes, cost.cluster.nics_per_node), dtype=np.int64)
    return Simulation(
        step_ns=step,
        end_ns=end,
        node_size=cost.node_size,
        events=events,
        rounds=_summaries(plan, graph.times),
        busy_ns=step - comm - idle,
        comm_ns=comm,
        idle_ns=idle,
        peak_memory=peak_memory(plan, cost),
        peak_host_memory=peak_host_memory(plan, cost),
        nic_busy_ns=sum((batch.nic for batch in graph.times.values()), nics),
        link_busy_ns=sum((batch.link for batch in graph.times.values()), np.zeros(cost.ranks, dtype=np.int64)),
        nics=nic_table(graph, starts, cost.node_size),
    )


def predicted_ns(plan: Plan, cost: CostModel) -> int:
    """Step time of a plan in ns: `Simulation.step_ns`, by the closed form for whole documents on one stage.

    Planners compare it, and training records it beside the measured time.
    """
    counting = _counting_ns(plan, cost)
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines) and not plan.has_pieces:
        return cost.plan_ns(plan) + counting
    graph, _, stops = _dry_run(plan, cost)
    return int(stops.max(initial=0)) + end_ns(plan, cost, graph.times)[0] + counting


def _counting_ns(plan: Plan, cost: CostModel) -> int:
    """Time of the forward that counts where routers send a step's tokens, before it (`models.router_loss`)."""
    if not cost.model.counts_routing:
        return 0
    forward = [
        replace(each, actions=tuple(tuple(one for one in row if one.kind in EVALUATION_KINDS) for row in each.actions))
        for each in plan.pipelines
    ]
    _, _, stops = _dry_run(replace(plan, pipelines=tuple(forward)), cost)
    return int(stops.max(initial=0))


def _require_match(plan: Plan, cost: CostModel) -> None:
    """Refuse a plan that was made for another cluster, model or sharding, with both values."""
    pairs = {
        "ranks": (plan.limits.ranks, cost.ranks),
        "ranks per node": (plan.limits.node_size, cost.node_size),
        "query heads": (plan.limits.heads, cost.model.heads),
        "layers": (plan.pipelines[0].stages[-1].layers[1], cost.model.layers),
        "sharding": (plan.sharding.value, cost.sharding.value),
    }
    differing = [f"{of_plan} {name}, not {here}" for name, (of_plan, here) in pairs.items() if of_plan != here]
    if differing:
        raise SeqloomError(
            f"the plan is not one for {cost.cluster.name}, {cost.model.name} and {cost.sharding} sharding: "
            f"it has {'; '.join(differing)}; give what it was made for, or plan again"
        )


def _dry_run(plan: Plan, cost: CostModel) -> tuple[TaskGraph, np.ndarray, np.ndarray]:
    """Price a plan and run its actions; return the tasks with starts and stops, int64[tasks] ns.

    Ranks that share memory and clock, as processes of one CPU do, are faster while others wait. A profile prices work
    as if all were busy and has a `solo_time_ratio` for the other end. Pipelines have ranks that wait, so they are run
    twice: with all prices as they are, which tells the share of time in which ranks work; and with prices for that
    share.
    """
    times, ratio = price(plan, cost), cost.engine.solo_time_ratio
    graph = build_tasks(plan, cost, times)
    starts, stops = graph.engine.run(graph.name)
    if ratio < 1.0 and any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        busy = sum(int(batch.total.sum()) for batch in times.values())
        waiting = 1.0 - busy / max(busy, cost.ranks * int(stops.max(initial=0)), 1)
        share = round(FULL_SHARE * (1.0 - (1.0 - ratio) * waiting))
        graph = build_tasks(plan, cost, {key: batch.scaled(share) for key, batch in times.items()})
        starts, stops = graph.engine.run(graph.name)
    return graph, starts, stops


def _comm_and_idle_ns(events: EventTable, ranks: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(exposed communication, idle), int64[ranks] ns.

    Events are sorted by start. All ranks are put on one time axis, one step after the other: an event adds to the
    covered time what it reaches beyond all before it.
    """
    working, comm, covered = np.zeros((3, ranks), dtype=np.int64)
    np.add.at(working, events.rank, np.where(events.is_message, 0, events.stop - events.start))
    np.add.at(comm, events.rank, events.comm)
    begin, stop = events.rank * step + events.start, events.rank * step + events.stop
    reached = np.concatenate([[0], np.maximum.accumulate(stop)[:-1]])
    np.add.at(covered, events.rank, np.maximum(stop - np.maximum(begin, reached), 0))
    return comm + covered - working, step - covered


def _summaries(plan: Plan, times: dict[MicroBatchKey, MicroBatchTimes]) -> tuple[RoundSummary, ...]:
    sums: dict[tuple[int, int], np.ndarray] = {}
    sizes = list(map(len, plan.shard_groups))
    for key, batch in times.items():
        held_by = [sum(sizes[number] for number in joined) for joined in batch.shard_groups]
        comm, held = batch.comm.sum(), (batch.length * held_by).sum()
        own = np.array([batch.length.max(initial=0), held, batch.total.sum() - comm, comm])
        sums[key.pipeline, key.round] = sums.get((key.pipeline, key.round), 0) + own
    return tuple(RoundSummary(*key, *sums[key].tolist()) for key in sorted(sums))
