"""``seqloom profile --model``: constants of this machine for one model, measured by running its training steps."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from seqloom.cli.options import print_json
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import torch

    from seqloom.cost import CostModel

LONGEST = {"cpu": 8_192, "cuda": 131_072}
"""Tokens of the longest document that is tried where none is named."""


class Wanted(NamedTuple):
    """What is measured.

    Attributes:
        model: a preset or a file of shapes.
        cluster: its spelling; None: CPU processes on this machine.
        sharding: of the parameters.
        capacity: tokens of a rank in a round; None: what memory holds.
        max_length: longest document that is tried; None: a usual one.
        dtype: that layers compute in.
        show: say on stderr what is being measured.
    """

    model: str
    cluster: str | None
    sharding: str
    capacity: int | None
    max_length: int | None
    dtype: str
    show: bool

    def cost(self, ranks: int) -> CostModel:
        """The cost model whose constants are measured, for so many ranks."""
        from seqloom.cost import CostModel
        from seqloom.describe import Cluster, ModelSpec

        cluster = Cluster.parse(self.cluster or f"1x{ranks}xCPU")
        if cluster.ranks != ranks:
            raise SeqloomError(
                f"--cluster {self.cluster} has {cluster.ranks} ranks, the measurement {ranks}; start {cluster.ranks} "
                f"processes, or name a cluster of {ranks}"
            )
        spec = ModelSpec.load(self.model)
        return CostModel(cluster, spec, None, self.sharding, max_length=self.max_length, capacity=self.capacity)


def profile_machine(wanted: Wanted, ranks: int | None, output: Path | None, json: bool) -> None:
    """Measure on processes of this machine, or as one of torchrun's, and write the profile."""
    import torch

    from seqloom.train.launch import under_torchrun
    from seqloom.train.processes import join_ranks, start_ranks

    if ranks is not None and ranks < 1:
        raise SeqloomError(f"{ranks} ranks measure nothing; give --ranks 1 or more")
    if output is None:
        raise SeqloomError("a profile of this machine is a file; say where to: --output machine.json")
    if wanted.cluster is None and torch.cuda.is_available():
        raise SeqloomError("name the cluster whose GPUs are measured, for its links: --cluster 1x8xH200")
    if under_torchrun():
        if ranks is not None:
            raise SeqloomError(f"--ranks {ranks} under torchrun, which has started the ranks; leave one of them out")
        found = join_ranks(measure_rank, wanted, str(output))
    else:
        wanted.cost(ranks or 1)  # refuse here, once, what every process would refuse
        found = start_ranks(measure_rank, ranks or 1, wanted, str(output))
    if not found:  # another rank than the first
        return
    if json:
        print_json(found)
    else:
        _print_found(found)


def measure_rank(rank: int, ranks: int, device: torch.device, wanted: Wanted, output: str) -> dict[str, Any]:
    """Be one of the ranks; the first one writes the profile and returns what was found, the others nothing."""
    import torch

    from seqloom.comm import Communicators, Distributed
    from seqloom.plan import GroupFamily
    from seqloom.train.calibration import Machine
    from seqloom.train.trials import described

    cost = wanted.cost(ranks)
    communicators = Communicators.create(GroupFamily(ranks, cost.node_size))
    communicators.warm_up()
    machine = Machine(cost, Distributed(communicators), device, getattr(torch, wanted.dtype))
    looking = wanted.show and rank == 0 and sys.stderr.isatty()
    report = (lambda text: typer.echo(text, err=True)) if looking else (lambda text: None)
    stages = 2 if ranks % 2 == 0 and cost.model.layers > 1 else 1
    found = machine.calibrate(wanted.max_length or LONGEST[device.type], report, stages=stages)
    communicators.close()
    if rank:
        return {}
    found.profile.save(output)
    pairs = zip(found.trials, found.predicted_ns, strict=True)
    trials = [
        {"what": described(trial.plan), "measured_ms": trial.ns / 1e6, "predicted_ms": predicted / 1e6}
        for trial, predicted in pairs
    ]
    return {"output": output, "cluster": cost.cluster.spelling, "model": cost.model.name, "trials": trials}


def _print_found(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("groups side by side", "measured ms", "by the profile", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    errors = []
    for trial in found["trials"]:
        measured, predicted = trial["measured_ms"], trial["predicted_ms"]
        errors.append(abs(predicted / measured - 1))
        table.add_row(trial["what"], f"{measured:,.1f}", f"{predicted:,.1f}")
    console = Console(highlight=False)
    console.print(table)
    off = f"{statistics.mean(errors):.1%} on average, {max(errors):.0%} at most"
    console.print(f"off by {off}; {found['model']} on {found['cluster']}", markup=False)
    console.print(f"wrote {found['output']}", markup=False, soft_wrap=True)
