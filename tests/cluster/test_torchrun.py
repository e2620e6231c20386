"""recipes/launch/torchrun.sh on two nodes: each a network namespace with an address of its own, and two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqloom.train.logging import read_steps
from support.hosts import LINK, Hosts
from support.runs import small_run

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "tiny-cpu.toml")
NODES, RANKS_PER_NODE = 2, 2


def start(hosts: Hosts, node: int, words: list[str]) -> subprocess.Popen[str]:
    """Run the script in the namespace of a node, as its user would there."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NODES": str(NODES),
        "NODE_RANK": str(node),
        "RANKS_PER_NODE": str(RANKS_PER_NODE),
        "HEAD": hosts.address(0),
        "GLOO_SOCKET_IFNAME": LINK,
    }
    inside = ["nsenter", f"--net={hosts.enter_namespace.paths[node]}", str(ROOT / "recipes" / "launch" / "torchrun.sh")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*inside, RECIPE, *words], env=environment, text=True, **pipes)


def test_two_nodes_train_as_one_machine_does(hosts, seqloom_here, tmp_path):
    """With the same plans: those for two nodes of two ranks, which nobody has named."""
    with Hosts(nodes=NODES, ranks=1, nics=1, rate_mbit=1000) as nodes:
        run = small_run(tmp_path / "nodes", "plan.feedback=false")  # plans that do not depend on measured times
        started = [start(nodes, node, run) for node in range(NODES)]
        try:
            said = [process.communicate(timeout=90)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert [process.returncode for process in started] == [0] * NODES, said
        assert min(map(sum, nodes.bytes_sent())) > 100_000, "gradients and parameters travelled between the nodes"
    cluster = f"plan.cluster={NODES}x{RANKS_PER_NODE}xCPU"
    done = seqloom_here(
        "train",
        RECIPE,
        *small_run(tmp_path / "here", cluster, "plan.feedback=false"),
        "--ranks",
        NODES * RANKS_PER_NODE,
    )
    assert done.returncode == 0, done.stderr
    there, here = (read_steps(tmp_path / run / "metrics.jsonl") for run in ("nodes", "here"))
    assert [step.plan_hash for step in there] == [step.plan_hash for step in here]
    assert [step.loss for step in there] == pytest.approx([step.loss for step in here], rel=1e-12)
