"""Runs on two nodes that meet faults of links and nodes: each a network namespace with torchrun's agent and a rank.

As in `campaign`, one run is started until it is complete, every time with a fault, and has the losses of one that meets
none. Agents are elastic or not, drawn for every start: elastic ones go on by themselves with the nodes that are left.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults.campaign import LIMIT_S, SAID, Campaign, Failed, wait_for_steps
from support.hosts import LINK, Hosts
from support.processes import descendants_of, runs

SCRIPT = Path(__file__).parents[2] / "recipes" / "launch" / "torchrun.sh"
NODES, RATE_MBIT, SLOW_MBIT = 2, 1000, 2
HEAD, OTHER = 0, 1


@dataclass
class NodesStart:
    """One start of the run: the agents of its nodes, by node, and the links between them."""

    campaign: NodesCampaign
    hosts: Hosts
    folder: Path
    elastic: bool
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Nodes of which the rest hears no more."""

    def add(self, node: int) -> None:
        """Start the agent of a node."""
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NODES": f"1:{NODES}" if self.elastic else str(NODES),
            "NODE_RANK": str(node),
            "RANKS_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",  # the nodes share the cores of this machine
            "HEAD": self.hosts.address(HEAD),
            "GLOO_SOCKET_IFNAME": LINK,
            "PET_LOCAL_ADDR": self.hosts.address(node),  # all nodes have this machine's name
            "PET_LOG_DIR": str(self.folder / f"node{node}-{len(list(self.folder.iterdir()))}"),
            "PET_REDIRECTS": "3",
        }
        if self.elastic:
            quick = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"
            environment["PET_RDZV_CONF"] = f"{quick},is_host={int(node == HEAD)}"  # found by name where names differ
        inside = ["nsenter", f"--net={self.hosts.enter_namespace.paths[node]}", str(SCRIPT)]
        with (self.folder / f"agent{node}.log").open("ab") as log:
            words = [*inside, *self.campaign.words("run")]
            self.agents[node] = subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def processes(self, node: int) -> list[int]:
        """Agent, ranks and planner of a node."""
        return [self.agents[node].pid, *descendants_of(self.agents[node].pid)]

    def lose(self, node: int) -> None:
        """Kill all processes of a node at once."""
        self.lost.append(node)
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def works(self) -> bool:
        """Whether an agent is there that still has to end."""
        return any(agent.poll() is None for node, agent in self.agents.items() if node not in self.lost)

    def said(self) -> str:
        """What the ranks of all nodes have written to stderr."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("node*/**/stderr.log")))


@dataclass(frozen=True)
class NodeFault:
    """Something that goes wrong with a link or a node, after the first step.

    Attributes:
        goes_on: whether the start is complete all the same, where agents are not elastic.
        elastic: whether agents are elastic; None: either.
        late: whether the second node starts only when the fault comes.
    """

    name: str
    inject: Callable[[NodesStart, random.Random], None]
    goes_on: bool = False
    elastic: bool | None = None
    late: bool = False


def _cut(start: NodesStart, draw: random.Random) -> None:
    """Cut a node off for good: both sides hear no more of each other. Its ranks end, by themselves or by their agent.

    An elastic agent asks the store on the other node, and may wait for an answer before it looks after its ranks.
    """
    start.hosts.cut(OTHER)
    start.lost.append(OTHER)
    deadline = time.monotonic() + LIMIT_S
    ranks = start.processes(OTHER)[1:]
    while (left := [*filter(runs, ranks)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        raise Failed(f"processes {left} of a node that was cut off still wait after {LIMIT_S} s")


def _cut_for_a_moment(start: NodesStart, draw: random.Random) -> None:
    start.hosts.cut(OTHER)
    time.sleep(draw.uniform(0.5, 3))
    start.hosts.mend(OTHER)


def _slow(start: NodesStart, draw: random.Random) -> None:
    node = draw.choice((HEAD, OTHER))
    start.hosts.set_rate(node, SLOW_MBIT)
    time.sleep(draw.uniform(2, 10))
    start.hosts.set_rate(node, RATE_MBIT)


def _lossy(start: NodesStart, draw: random.Random) -> None:
    """Lose about a third of what is sent, in pieces, while the run works or for six seconds."""
    deadline = time.monotonic() + 6
    while start.works and time.monotonic() < deadline:
        start.hosts.cut(OTHER)
        time.sleep(draw.uniform(0.01, 0.05))
        start.hosts.mend(OTHER)
        time.sleep(draw.uniform(0.02, 0.1))


def _lose_the_other(start: NodesStart, draw: random.Random) -> None:
    start.lose(OTHER)


def _lose_the_head(start: NodesStart, draw: random.Random) -> None:
    start.lose(HEAD)


def _join(start: NodesStart, draw: random.Random) -> None:
    start.add(OTHER)


def _lose_and_join(start: NodesStart, draw: random.Random) -> None:
    start.lose(OTHER)
    time.sleep(draw.uniform(0, 10))
    if start.agents[HEAD].poll() is None:
        start.lost.remove(OTHER)
        start.add(OTHER)


NODE_FAULTS = (
    NodeFault("link cut", _cut),
    NodeFault("link cut for a moment", _cut_for_a_moment, goes_on=True),
    NodeFault("link slow", _slow, goes_on=True),
    NodeFault("link lossy", _lossy, goes_on=True),
    NodeFault("node lost", _lose_the_other),
    NodeFault("head node lost", _lose_the_head),
    NodeFault("node joins", _join, elastic=True, late=True),
    NodeFault("node lost and back", _lose_and_join, elastic=True),
)


@dataclass
class NodesCampaign(Campaign):
    """A campaign whose starts are on two nodes; faults are those of `NODE_FAULTS`."""

    steps: int = 60  # that wait for links

    def words(self, run: str) -> list[str]:
        """What follows `seqloom train` on every node."""
        command = self.command(run, NODES)
        return command[command.index("train") + 1 : command.index("--ranks")]

    def run(self, faults: Sequence[NodeFault] = NODE_FAULTS, most: int = 30) -> None:
        """Start until the run is complete."""
        for _ in range(most):
            if self.start_nodes(self.draw.choice(faults)):
                return
        raise Failed(f"not complete after {most} starts")

    def start_nodes(self, fault: NodeFault) -> bool:
        """Start the run once on both nodes, with a fault; return whether it is complete."""
        elastic = fault.elastic if fault.elastic is not None else self.draw.random() < 0.5
        folder = self.place / "logs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with Hosts(nodes=NODES, ranks=1, nics=1, rate_mbit=RATE_MBIT) as hosts:
            start = NodesStart(self, hosts, folder, elastic)
            try:
                start.add(HEAD)
                if not fault.late:
                    start.add(OTHER)
                if wait_for_steps(lambda: start.works, self.place / "run"):
                    time.sleep(self.draw.random() * 1.5)
                    fault.inject(start, self.draw)
                self._wait(start, fault)
            finally:
                for node in start.agents:
                    start.lose(node)
                    start.agents[node].wait()
        self.injected.append(fault.name)
        return self._judge(start, fault)

    def _wait(self, start: NodesStart, fault: NodeFault) -> None:
        deadline = time.monotonic() + LIMIT_S
        while start.works:
            if time.monotonic() > deadline:
                raise Failed(f"{fault.name}: the run hangs\n{start.said()}")
            time.sleep(0.1)

    def _judge(self, start: NodesStart, fault: NodeFault) -> bool:
        """Refuse what a start has promised and not done; return whether the run is complete."""
        said, kind = start.said(), f"{fault.name} ({'' if start.elastic else 'not '}elastic)"
        if "Traceback" in said:
            raise Failed(f"{kind}: a traceback\n{said}")
        codes = {node: agent.returncode for node, agent in start.agents.items()}
        complete = 0 in codes.values()
        head_is_there = fault.inject is not _lose_the_head
        if not complete and (fault.goes_on or (start.elastic and head_is_there)):
            raise Failed(f"{kind}: agents ended with {codes}\n{said}")
        if not complete and not re.search(SAID, said):
            raise Failed(f"{kind}: no rank says how to go on\n{said}")
        return complete
