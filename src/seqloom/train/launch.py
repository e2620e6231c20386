"""Starting the ranks of a run: processes on this machine, or those that torchrun has started."""

from __future__ import annotations

import sys
from typing import Any

import torch

from seqloom.comm import Communicators, Distributed
from seqloom.plan import GroupFamily
from seqloom.train.config import Config
from seqloom.train.kinds import REFERENCE, Kind, dtypes
from seqloom.train.loop import Trainer
from seqloom.train.processes import join_ranks, start_ranks
from seqloom.train.setup import Setup

DIED_ADVICE = "the last checkpoint is intact, run the same command to go on from it"


def train_here(config: Config, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Run as the rank that torchrun made this process; return the summary on the first rank, {} on others."""
    return join_ranks(_run, config, kind, show)


def train_on_processes(config: Config, ranks: int, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Start `ranks` processes on this machine, wait for them, and return the summary.

    When one fails, the others are stopped and its reason is raised.
    """
    Setup.of(config, ranks)  # refuse here, once, what every process would refuse
    kind.build(config, torch.device("meta"), dtypes(config)[0])
    return start_ranks(_run, ranks, config, kind, show, advice=DIED_ADVICE)


def _run(rank: int, ranks: int, device: torch.device, config: Config, kind: Kind, show: bool) -> dict[str, Any]:
    """Connect to the other ranks and train."""
    setup = Setup.of(config, ranks)
    communicators = Communicators.create(GroupFamily(ranks, setup.cost.node_size))
    communicators.warm_up()
    stream = sys.stderr if show and rank == 0 else None
    with Trainer(config, setup, Distributed(communicators), kind=kind, device=device) as trainer:
        summary = trainer.run(stream)
    communicators.close()
    return summary
