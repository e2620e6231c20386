"""Options that several verbs share, spelt and explained once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.errors import SeqloomError
from seqloom.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from seqloom.cost import CostModel
    from seqloom.describe import Batch
    from seqloom.plan import Plan
    from seqloom.simulate import Simulation


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn at random.")]

# What is planned for.
ClusterName = Annotated[
    str, typer.Option("--cluster", help="Preset, spelling such as 8x8xH100 (nodes x GPUs x kind), or file.")
]
ModelName = Annotated[str, typer.Option("--model", help="Preset, or path to a Hugging Face config.json.")]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Constants by name or file; without it, those of the cluster's device."),
]
ShardingName = Annotated[
    str,
    typer.Option(
        "--sharding",
        help="Parameters are sharded over all GPUs (full), a node (hybrid) or none; free: they move at every step.",
    ),
]
BudgetGib = Annotated[
    float | None,
    typer.Option("--budget-gib", help="Memory per GPU that a plan may use; else the profile's, or 0.9 of the GPU's."),
]

# Which sequences.
Lengths = Annotated[
    str,
    typer.Option("--lengths", help="A sampler's name, a .txt .jsonl .csv .parquet .npy .npz file, or - for stdin."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences per batch.")]
Skip = Annotated[int, typer.Option("--skip", help="Batches left out at the beginning.")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", help="Longest sequence of the run, tokens; longer ones are dropped first."),
]
Column = Annotated[
    str | None, typer.Option("--column", help="Column, field or array to read where a file has several.")
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Counts a column of texts: bytes, or a tokenizer.json.")
]

Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write the plan to this file: .json, or .txt with one line per action."),
]
OutStrategies = Annotated[
    Path | None, typer.Option("--out", help="Write the strategies to this .json file, for plan.strategies of a config.")
]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="Write what is shown to this .svg file as well, in colour.")
]
Draw = Annotated[bool, typer.Option("--view", help="Draw the lengths and the timeline as well.")]


def require_writable(path: Path | None, what: str = "plan", suffixes: tuple[str, ...] = (".json", ".txt")) -> None:
    """Refuse, before any planning, a file that cannot be written to; None is a file that nobody asked for."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise SeqloomError(f"{str(path)!r}: a {what} file ends in {' or '.join(suffixes)}; rename it")
    if path.is_dir() or not path.absolute().parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"needs the folder {str(path.parent)!r}, which does not exist"
        raise SeqloomError(f"{str(path)!r} {wrong}; choose another file")


def require_picture(path: Path | None) -> None:
    """Refuse, before any planning, a file that a picture cannot be written to."""
    require_writable(path, "picture", (".svg",))


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


# ---- merged: cli.progress
# Progress of long work: a bar on stderr, only when somebody is looking at it.


@contextmanager
def planning(total: int) -> Iterator[Callable[[str, int], None] | None]:
    """Give a function to call with a planner's name and a batch's index before each of ``total`` plannings.

    None when stderr is not a terminal.
    """
    with steps("planning", total) as step:
        yield None if step is None else lambda name, index: step(f"batch {index}: {name}")


@contextmanager
def steps(first: str, total: int) -> Iterator[Callable[[str], None] | None]:
    """Give a function to call before each of ``total`` steps with what it does; None when nobody is looking.

    Args:
        first: what stands there until the first call.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=total)
        begun = 0

        def report(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1

        yield report


# ---- merged: cli.workload
# The sequences a verb works on: a source, cut into batches, with a count of what was dropped.


MOST_DRAWN = 10_000_000
"""Sequences that are drawn from a sampler at most; more than that is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where lengths come from, and how they are read."""

    name: str
    seed: int = 0
    max_length: int | None = None
    column: str | None = None
    tokenizer: str | None = None

    def read(self, count: int) -> tuple[np.ndarray, int]:
        """Lengths in order without those above the maximum, and how many these were.

        A file is read whole; a sampler is drawn from until ``count`` lengths are kept.
        """
        from seqloom.describe import drop_longer, lengths_from

        if count > MOST_DRAWN and self.sampled:
            raise SeqloomError(
                f"{count:,} sequences of sampler {self.name} are wanted, at most {MOST_DRAWN:,} are drawn; "
                "take fewer or smaller batches"
            )
        lengths = lengths_from(
            self.name,
            seed=self.seed,
            count=max(1, count),
            max_length=self.max_length,
            column=self.column,
            tokenizer=self.tokenizer,
        )
        return drop_longer(lengths, self.max_length)

    @property
    def sampled(self) -> bool:
        """Whether the name is a sampler's."""
        from seqloom.describe import SAMPLERS

        return self.name in SAMPLERS

    @property
    def note(self) -> str | None:
        """What a sampler says of itself, stand-ins included; None for a file."""
        from seqloom.describe import sampler

        return sampler(self.name).note if self.sampled else None

    def described(self, dropped: int) -> dict[str, Any]:
        """The source for a report in JSON; of so many sequences above the maximum length."""
        return {
            "lengths": self.name,
            "sampler": self.note,
            "max_length": self.max_length,
            "dropped": dropped,
            "seed": self.seed,
        }

    def notes(self, dropped: int) -> list[str]:
        """What a reader of the tables must know: where the lengths come from, and what was dropped."""
        lines = []
        if self.note:
            lines.append(f"sampler {self.name}: {self.note}")
        if dropped:
            lines.append(f"{dropped:,} sequences above {self.max_length:,} tokens dropped first")
        return lines


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of a source."""

    source: Source
    batches: tuple[Batch, ...]
    dropped: int
    """Sequences above the maximum length."""

    @classmethod
    def by_count(cls, source: Source, size: int, *, skip: int = 0, count: int = 1) -> Workload:
        """Runs of ``size`` sequences in file order, after ``skip`` of them."""
        from seqloom.describe import batches_by_count

        lengths, dropped = source.read((skip + count) * size)
        return cls(source, tuple(batches_by_count(lengths, size, skip=skip, count=count)), dropped)

    @classmethod
    def by_tokens(cls, source: Source, budget: int, *, skip: int = 0) -> Workload:
        """One run of at most ``budget`` tokens in file order, after ``skip`` of them; nothing is cut."""
        from seqloom.describe import batches_by_tokens

        wanted = 1024
        lengths, dropped = source.read(wanted)
        while source.sampled and lengths.sum() <= (skip + 1) * max(budget, int(lengths.max())):
            wanted *= 2
            lengths, dropped = source.read(wanted)
        return cls(source, tuple(batches_by_tokens(lengths, budget, skip=skip, count=1)), dropped)

    def described(self) -> dict[str, Any]:
        """The source for a report in JSON."""
        return self.source.described(self.dropped)

    def notes(self) -> list[str]:
        """What a reader of the tables must know: where the lengths come from, and what was dropped."""
        return self.source.notes(self.dropped)


# ---- merged: cli.outcome
# What is reported of a plan: its simulated step beside the bound, in the units of the border.


GIB = 1024**3
MS = 1e6
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan, simulated."""

    plan: Plan
    simulation: Simulation
    bound_ns: int | None
    """What no plan on the same stages beats; None where nothing is proven, see `plan_bound`."""
    plan_ns: int | None = None
    """What planning took; None for a plan that was read from a file."""

    @property
    def gap(self) -> float | None:
        """How far the step is above the bound, as a share of the bound."""
        return None if self.bound_ns is None else self.simulation.step_ns / self.bound_ns - 1

    def figures(self) -> dict[str, Any]:
        """The figures of a comparison, by their names in JSON."""
        return {
            "step_ms": self.simulation.step_ns / MS,
            "bound_ms": _ms(self.bound_ns),
            "plan_ms": _ms(self.plan_ns),
            "rounds": self.plan.rounds,
            "comm_share": float(self.simulation.comm_share),
            "idle_share": float(self.simulation.idle_share),
            "peak_memory_gib": float(self.simulation.peak_memory.max()) / GIB,
            "plan_hash": self.plan.hash,
        }

    def described(self) -> dict[str, Any]:
        """One plan for a report in JSON."""
        size = {"sequences": len(self.plan.documents), "tokens": self.plan.tokens}
        cards = dict(zip(("busiest", "mean"), self.simulation.nic_shares, strict=True))
        return {"planner": self.plan.planner, **size, **self.figures(), "gap": self.gap, "nic_share": cards}

    def summary(self) -> str:
        """The step and its gap in one line of text."""
        from seqloom.view.format import duration

        line = f"step {duration(self.simulation.step_ns)}"
        if self.bound_ns is not None and self.gap is not None:
            which = "plan on these stages" if staged(self.plan) else "plan"
            line += f", {100 * self.gap:.1f} % above the bound of {duration(self.bound_ns)} that no {which} can beat"
        if len(self.simulation.nic_busy_ns) > 1:
            busiest, mean = (f"{100 * share:.0f} %" for share in self.simulation.nic_shares)
            line += f"; network cards in use {mean} of the time, the busiest {busiest}"
        peak = float(self.simulation.peak_memory.max()) / GIB
        return f"{line}; at most {peak:.1f} GiB per GPU; hash {self.plan.hash[:12]}"


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / MS


def staged(plan: Plan) -> bool:
    """Whether the bound of a plan is that of its stages: several, teams, or gathered for every pass."""
    from seqloom.plan.pipeline import reshard_after_forward_stages

    lines = plan.pipelines
    teams = any(stage.tensor > 1 for line in lines for stage in line.stages)
    return teams or any(len(line.stages) > 1 or reshard_after_forward_stages(line) for line in lines)


def outcomes(
    planners: Sequence[str],
    batches: Sequence[Batch],
    cost: CostModel,
    *,
    seed: int,
    progress: Callable[[str, int], None] | None,
) -> list[dict[str, Outcome]]:
    """Plan and simulate every batch with every planner: one dictionary per batch."""
    from seqloom.api import lower_bound
    from seqloom.planners import plan_batches
    from seqloom.planners.bounds import plan_bound
    from seqloom.simulate import simulate

    planned = plan_batches(planners, [batch.lengths for batch in batches], cost, seed=seed, progress=progress)
    rows = []
    for batch, plans in zip(batches, planned, strict=True):
        alike = None if all(staged(made.plan) for made in plans.values()) else lower_bound(batch, cost)
        row = {}
        for name, made in plans.items():
            bound_ns = plan_bound(made.plan, cost) if staged(made.plan) else alike
            row[name] = Outcome(made.plan, simulate(made.plan, cost), bound_ns, made.plan_ns)
        rows.append(row)
    return rows


def setting(cost: CostModel) -> dict[str, Any]:
    """What plans were priced with, for a report in JSON."""
    return {
        "version": __version__,
        "cluster": cost.cluster.name,
        "model": cost.model.name,
        "profile": cost.profile.name,
        "sharding": cost.sharding.value,
        "budget_gib": cost.budget_bytes / GIB,
    }


def heading(cost: CostModel) -> str:
    """The same in one line of text."""
    return (
        f"{cost.cluster.name}, {cost.model.name}, profile {cost.profile.name}, "
        f"{cost.sharding} sharding, {cost.budget_bytes / GIB:.1f} GiB per GPU"
    )
