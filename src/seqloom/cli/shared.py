"""What several verbs share: options, output, progress bars, the sequences to plan, lines about cost models and plans.

A verb imports this module as a whole (``from seqloom.cli import shared``) and everything heavy inside its functions, so
that ``seqloom --help`` stays fast.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from seqloom.errors import SeqloomError, import_extra, unknown_name
from seqloom.reader import is_file_name, read_mapping
from seqloom.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from seqloom.api import Evaluation
    from seqloom.cost import CostModel
    from seqloom.describe import Batch, ModelSpec

PROGRESS_S = 5.0
"""Seconds between two lines of progress where there is no terminal."""

# Options.


def at_least_one(parameter: typer.CallbackParam, value: int | None) -> int | None:
    """Refuse a number below 1 of an option that counts something."""
    if value is not None and value < 1:
        raise SeqloomError(f"{parameter.opts[0]} {value}; give 1 or more")
    return value


AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Seed = Annotated[int, Option(help="Seed of everything that is drawn at random.")]
Cluster = Annotated[str, Option(help="Preset, spelling such as 8x8xH100 (nodes x GPUs x kind), or file.")]
Model = Annotated[str, Option(help="Preset, a Hugging Face folder or config.json, or organisation/name of its hub.")]
Profile = Annotated[str | None, Option(help="Constants by name or file; without it, those of the cluster's device.")]
Sharding = Annotated[
    str,
    Option(help="Parameters are sharded over all GPUs (full), a node (hybrid) or none; free: they move at every step."),
]
BudgetGib = Annotated[
    float | None, Option(help="Memory per GPU that a plan may use; else the profile's, or 0.9 of the GPU's.")
]
DEFAULT_LENGTHS = "wikipedia"
"""Sampler of published lengths, for those who have no data yet; the heading names it."""
Float8 = Annotated[bool, Option("--float8", help="Linear layers multiply in float8, but for gradients of weights.")]
Offload = Annotated[
    str,
    Option(
        help="Activations in host memory: auto (batches that fit in no other way), true (where that is predicted to be "
        "faster) or false."
    ),
]
OffloadOptimiser = Annotated[
    str, Option(help="The optimiser's state in host memory: auto (if nothing else holds the batch), true or false.")
]
HostGib = Annotated[
    float | None, Option(help="Host memory per GPU that a plan may use; else what the cluster says, if it does.")
]
Expert = Annotated[
    str, Option(help="GPUs that divide the experts of every layer among them: 1, 2, 4, ... or auto, the fastest.")
]
Tensor = Annotated[
    str, Option(help="GPUs of a node that divide the matrices of every layer: 1, 2, 4, ... or auto, the fastest.")
]
Chunks = Annotated[
    str, Option(help="Of planner pipeline: stages of the model per pipeline rank, 1, 2, ... or auto, the fastest.")
]
Lengths = Annotated[
    str,
    Option(
        help="A sampler's name; a token store; documents, as data prepare takes them; a .txt .jsonl .csv .parquet .npy "
        ".npz file of lengths; or - for stdin."
    ),
]
Skip = Annotated[int, Option(help="Batches to skip at the beginning.")]
MaxLength = Annotated[int | None, Option(help="Longest sequence of the run, tokens; longer ones are dropped first.")]
Column = Annotated[str | None, Option(help="Column, field or array to read where a file has several.")]
Tokenizer = Annotated[
    str | None, Option(help="Counts texts and chats: bytes, a tokenizer.json, or a Hugging Face tokenizer folder.")
]
ChatTemplate = Annotated[
    Path | None, Option(help="Jinja file with the template of chats, instead of the tokenizer's own.")
]
Picture = Annotated[Path | None, Option(help="Draw the timeline to this file: .svg; .png or .pdf with matplotlib.")]
Trace = Annotated[Path | None, Option(help="Write the simulated step to this .json file, for ui.perfetto.dev.")]
Html = Annotated[Path | None, Option(help="Write a report to this .html file, for any browser; it fetches nothing.")]
ConfigFile = Annotated[Path, Argument(help="A training config, .toml.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, Option("--set", help="section.key=value, instead of the config's.")]


# Output.


def report(
    as_json: bool,
    content: Callable[[], dict[str, Any]],
    draw: Callable[[Console], None],
) -> None:
    """Print a result as JSON or as text on stdout."""
    if as_json:
        typer.echo(json.dumps(content(), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        draw(Console(highlight=False))


def print_lines(console: Console, *lines: str) -> None:
    """Print lines whose brackets are no markup."""
    for line in lines:
        console.print(line, markup=False)


def check_output(path: Path | None, what: str = "plan", suffixes: tuple[str, ...] = (".json", ".txt")) -> None:
    """Refuse, before any work, an output file that cannot be written; None: none was asked for."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise SeqloomError(f"{str(path)!r}: a {what} file ends in {' or '.join(suffixes)}; rename it")
    if path.is_dir() or not path.absolute().parent.is_dir():
        wrong = "is a folder" if path.is_dir() else f"needs the folder {str(path.parent)!r}, which does not exist"
        raise SeqloomError(f"{str(path)!r} {wrong}; choose another file")


def check_picture(path: Path | None) -> None:
    """Refuse, before any work, a picture that cannot be written: its name, its folder, or a missing library."""
    if path is not None:
        from seqloom.view.picture import FORMATS, check_picture

        check_output(path, "picture", FORMATS)
        check_picture(path)


# Arguments and the installation.


def parse_offload(text: str) -> bool | str:
    """Return true, false or "auto", as an option says."""
    known: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text not in known:
        raise unknown_name("offload", text, known)
    return known[text]


def parse_degree(option: str, text: str) -> int | str:
    """Return a tensor or expert degree, or a number of chunks, or "auto", as an option says."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise SeqloomError(f"--{option} {text!r}; give 1, 2, 4, ... or auto")
    return int(text)


def parse_chunks(text: str, planners: Sequence[str]) -> int | str:
    """Return the number of chunks or "auto", as the option says; refuse it where no planner has any."""
    from seqloom.planners.registry import has_chunks

    chunks = parse_degree("chunks", text)
    if chunks != 1 and not any(map(has_chunks, planners)):
        raise SeqloomError(
            f"--chunks {text} with {', '.join(planners)}: only planner pipeline divides the layers of a pipeline rank; "
            "name pipeline or pipeline:4, or leave the option out"
        )
    return chunks


def split_names(text: str, what: str, example: str) -> list[str]:
    """Split names with commas between; a name given twice counts once."""
    names = list(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name))
    if not names:
        raise SeqloomError(f"no {what} in {text!r}; name at least one, for example {example}")
    return names


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A repository of the Hugging Face hub: organisation/name."""


def load_model(name: str | Path) -> ModelSpec:
    """Return the shapes of a model by name, file, folder or hub name.

    Transformers reads a folder's, where it has its type; of a hub name, config.json is all that is read.
    """
    from seqloom.describe import ModelSpec

    if not Path(name).exists() and not is_file_name(str(name)) and _HUB_NAME.fullmatch(str(name)):
        return replace(load_model(_hub_folder(str(name))), name=str(name))
    path, libraries = Path(name) / "config.json", all(map(find_spec, ("torch", "transformers")))
    if path.is_file() and libraries:
        describe = import_module("seqloom.integrations.transformers.describe")
        if describe.has_type(read_mapping(path)):
            return describe.describe_folder(Path(name))
    return ModelSpec.load(str(name))


def _hub_folder(name: str) -> Path:
    """Return the folder of the Hugging Face cache that has the config.json of a model. Nothing is fetched."""
    hub = import_extra(f"model {name!r} of the Hugging Face hub", "hf", "huggingface_hub")
    found = hub.try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise SeqloomError(
            f"model {name!r} has no config.json in the Hugging Face cache, and nothing is fetched here; fetch it first "
            f"(hf download {name} config.json), give a folder that has one, or a name of seqloom list models"
        )
    return Path(found).parent


def launched(ranks: int | None) -> bool:
    """Whether a launcher has started this process; then refuse a number of ranks to start."""
    from seqloom.dist import launched_rank

    started = launched_rank() is not None
    if started and ranks is not None:
        raise SeqloomError(f"--ranks {ranks} under torchrun or srun, which has started the ranks; leave one out")
    return started


@contextmanager
def progress_bar(total: int | None, description: str) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr; a line every few seconds where that is no terminal.

    Yields a function to call before each of ``total`` steps (None: their number is not known) with its description.
    """
    done = itertools.count()
    if not sys.stderr.isatty():
        shown = time.monotonic()

        def show(description: str) -> None:
            nonlocal shown
            step = next(done)
            if time.monotonic() - shown >= PROGRESS_S:
                shown = time.monotonic()
                typer.echo(f"{description} ({step}{'' if total is None else f' of {total}'} done)", err=True)

        yield show
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda description: bar.update(task, completed=next(done), description=description)


@contextmanager
def planning_progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar of ``total`` plannings; yield a function of a planner's name and a batch's index."""
    with progress_bar(total, "planning") as step:
        yield lambda planner, batch: step(f"batch {batch}: {planner}")


# Sequences.

MAX_SAMPLED = 10_000_000
"""Sequences to draw from a sampler at most: more is a typing error."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where lengths come from: a sampler, a file or stdin, and how to read it."""

    name: str
    seed: int = 0
    max_length: int | None = None
    column: str | None = None
    tokenizer: str | None = None
    chat_template: Path | None = None

    def read(self, count: int) -> tuple[np.ndarray, Left]:
        """Return the lengths up to the maximum, in order, and how many sequences are not among them.

        Reads a whole file, or draws from a sampler until ``count`` lengths remain.
        """
        from seqloom.describe import drop_longer, lengths_from

        if count > MAX_SAMPLED and self.note is not None:
            raise SeqloomError(
                f"{count:,} sequences of sampler {self.name} are wanted, at most {MAX_SAMPLED:,} are drawn; "
                "take fewer or smaller batches"
            )
        options = asdict(self)
        name, template, left_out = options.pop("name"), options.pop("chat_template"), 0
        if self._may_be_documents:
            from seqloom.data.lengths import document_lengths

            how = {"column": self.column, "tokenizer": self.tokenizer, "chat_template": template}
            lengths, left_out = document_lengths(name, **how)
        else:
            lengths = lengths_from(name, count=max(1, count), **options)
        kept, dropped = drop_longer(lengths, self.max_length)
        return kept, Left(dropped, left_out)

    @property
    def _may_be_documents(self) -> bool:
        """Whether this is more than a sampler or a plain file of lengths."""
        path = Path(self.name)
        if self.name.startswith("hf:"):
            return True
        if self.note is not None or (
            not path.exists() and not any(sign in self.name for sign in "*?[") and self.name != "-"
        ):
            return False
        plain = (".csv", ".npy", ".npz") if self.tokenizer else (".txt", ".csv", ".npy", ".npz")
        return path.is_dir() or path.suffix.lower() not in plain

    @property
    def note(self) -> str | None:
        """What a sampler says about its origin; None for a file."""
        from seqloom.describe import SAMPLERS, sampler

        return sampler(self.name).note if self.name in SAMPLERS else None


class Left(NamedTuple):
    """How many sequences of a source are in no batch."""

    dropped: int = 0  # above the maximum length
    left_out: int = 0  # records without a label that the loss counts, which `data prepare` leaves out, too
    unused: int = 0  # after the last batch
    over: int = 0  # tokens of the longest sequence that is longer than a batch may be, and so is one of its own


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of a source, and how many of its sequences are in none."""

    source: Source
    batches: tuple[Batch, ...]
    left: Left
    budget: int | None = None  # tokens of a batch, where it is cut by them

    @classmethod
    def by_count(cls, source: Source, size: int, *, skip: int = 0, count: int = 1) -> Workload:
        """Take ``count`` batches of ``size`` sequences each, in file order, after ``skip`` of them."""
        from seqloom.describe import batches_by_count

        lengths, left = source.read((skip + count) * size)
        return cls._of(source, batches_by_count(lengths, size, skip=skip, count=count), lengths, left)

    @classmethod
    def by_tokens(cls, source: Source, budget: int, *, skip: int = 0) -> Workload:
        """Take one batch of at most ``budget`` tokens, whole sequences in file order, after ``skip`` of them."""
        from seqloom.describe import batches_by_tokens

        count = 1024
        lengths, left = source.read(count)
        while source.note is not None and lengths.sum() <= (skip + 1) * max(budget, int(lengths.max())):
            count *= 2
            lengths, left = source.read(count)
        workload = cls._of(source, batches_by_tokens(lengths, budget, skip=skip, count=1), lengths, left)
        longest = max(batch.longest for batch in workload.batches)
        over = longest if longest > budget else 0
        return replace(workload, left=workload.left._replace(over=over), budget=budget)

    @classmethod
    def _of(cls, source: Source, batches: Iterable[Batch], lengths: np.ndarray, left: Left) -> Workload:
        """Count the sequences of a file after the last batch; a sampler has as many as one likes."""
        taken = tuple(batches)
        after = len(lengths) - 1 - int(taken[-1].ids[-1])
        return cls(source, taken, left if source.note is not None else left._replace(unused=after))

    @classmethod
    def data_set(cls, source: Source, count: int) -> Workload:
        """Take everything as one batch: a whole file, or ``count`` sequences of a sampler."""
        from seqloom.describe import Batch

        lengths, left = source.read(count)
        return cls(source, (Batch.of(lengths),), left)

    def as_dict(self) -> dict[str, Any]:
        """Return where the sequences come from, by JSON keys."""
        return {
            "lengths": self.source.name,
            "sampler": self.source.note,
            "max_length": self.source.max_length,
            **self.left._asdict(),
            "seed": self.source.seed,
        }

    def notes(self) -> list[str]:
        """Return lines for the reader of a table: a sampler's origin, and what was dropped."""
        lines = [f"sampler {self.source.name}: {self.source.note}"] if self.source.note else []
        dropped, left_out, unused, over = self.left
        if left_out:
            lines.append(f"{left_out:,} record{'s' * (left_out > 1)} with nothing to learn left out")
        if dropped:
            above = f"above {self.source.max_length:,} tokens dropped first"
            lines.append(f"{dropped:,} sequence{'s' * (dropped > 1)} {above}")
        if over:
            lines.append(
                f"a sequence of {over:,} tokens is longer than a batch of {self.budget:,}: it is one of its own"
            )
        if unused:
            lines.append(f"{unused:,} sequence{'s' * (unused > 1)} after the last batch not used")
        return lines


# Lines and JSON about what was planned.


def cost_dict(cost: CostModel) -> dict[str, Any]:
    """Return what plans were priced with, by JSON keys."""
    from seqloom.api import GIB

    return {
        "version": __version__,
        "cluster": cost.cluster.name,
        "model": cost.model.name,
        "profile": cost.profile.name,
        "sharding": cost.sharding.value,
        "budget_gib": cost.budget_bytes / GIB,
        "host_gib": None if cost.host_bytes is None else cost.host_bytes / GIB,
        "offload": cost.offload,
        "offload_optimiser": cost.offload_optimiser,
        "float8": cost.float8,
        "tensor": cost.tensor,
        "expert": cost.expert,
        **({"speeds": list(cost.speeds.values)} if cost.speeds else {}),
    }


def cost_line(cost: CostModel) -> str:
    """Return what plans were priced with, in one line."""
    return (
        f"{cost.cluster.name}, {cost.model.name}, profile {_profile_text(cost)}, "
        f"{cost.sharding} sharding, {_budget_text(cost)}{', float8' if cost.float8 else ''}"
        f"{', optimiser in host memory' if cost.offload_optimiser else ''}"
        f"{''.join(f', {name} degree {size}' for name, size in _degrees(cost.degrees).items())}{_speeds_text(cost)}"
    )


def _budget_text(cost: CostModel) -> str:
    """Return the budget of a rank, and what its device has where that is less."""
    from seqloom.api import GIB

    budget, device = cost.budget_bytes / GIB, cost.cluster.device
    more = f" (a device has {device.memory_gib:g})" if budget > device.memory_gib else ""
    return f"{budget:.1f} GiB per {cost.rank_word}{more}"


def _degrees(degrees: tuple[int, int]) -> dict[str, int]:
    """Return tensor and expert degree by name, where they are above 1."""
    return {name: size for name, size in zip(("tensor", "expert"), degrees, strict=True) if size > 1}


def _speeds_text(cost: CostModel) -> str:
    """Return the slowest and the fastest speed of ranks that differ."""
    return f", speeds {min(cost.speeds.values):g} to {max(cost.speeds.values):g}" if cost.speeds else ""


def _profile_text(cost: CostModel) -> str:
    """Return the profile's name, and whether its constants are of another kind of device."""
    from seqloom.cost.profile import is_of

    device, known = cost.cluster.device.name, cost.profile.known_devices
    fits = any(is_of(device, name) for name in known)
    return cost.profile.name if fits else f"{cost.profile.name} (constants of {' or '.join(known)}, not of {device})"


def print_heading(console: Console, cost: CostModel, workload: Workload, before: str = "") -> None:
    """Print what is planned: cost model, number of sequences, their origin."""
    lengths = [batch.longest for batch in workload.batches]
    sequences = sum(map(len, workload.batches))
    tokens = sum(batch.tokens for batch in workload.batches)
    size = f"{before}{sequences:,} sequence{'s' * (sequences > 1)}, {tokens:,} tokens, longest {max(lengths):,}"
    print_lines(console, cost_line(cost), size, *workload.notes())


def evaluation_line(evaluation: Evaluation, cost: CostModel) -> str:
    """Return the step of a plan, its gap to the lower bound, use of NICs and memory, in one line."""
    from seqloom.api import degrees_of, has_stages
    from seqloom.view.format import duration

    simulation = evaluation.simulation
    line = f"step {duration(simulation.step_ns)}"
    if evaluation.bound_ns is not None and evaluation.gap is not None:
        which = "plan on these stages" if has_stages(evaluation.plan) else "plan"
        which += "".join(f" with {name} degree {size}" for name, size in _degrees(degrees_of(evaluation.plan)).items())
        gap = f"{100 * evaluation.gap:.1f} % above the bound of {duration(evaluation.bound_ns)}"
        line += f", {gap} that no {which} can beat"
    if len(simulation.nic_busy_ns) > 1:
        busiest, mean = (f"{100 * share:.0f} %" for share in simulation.nic_shares)
        line += f"; NICs in use {mean} of the time, the busiest {busiest}"
    memory = f"at most {evaluation.peak_memory_gib:.1f} GiB per {cost.rank_word}"
    if evaluation.peak_host_memory_gib:
        memory += f" and {evaluation.peak_host_memory_gib:.1f} GiB of its host's memory"
    return f"{line}; {memory}; hash {evaluation.plan.hash[:12]}"


def experts_line(cost: CostModel, evaluation: Evaluation) -> str:
    """Return how many experts of a layer a GPU has, and their share of the step, in one line; "" without experts."""
    from seqloom.api import expert_degree

    if evaluation.experts is None:
        return ""
    degree, count = expert_degree(evaluation.plan), cost.model.experts
    compute, exchange = (f"{100 * share:.1f} %" for share in evaluation.experts)
    moved = f", dispatch and combine {exchange}" if degree > 1 else ""
    stages = (stage for pipeline in evaluation.plan.pipelines for stage in pipeline.stages)
    own = " or ".join(map(str, sorted({count // (stage.expert * stage.tensor) for stage in stages})))
    held = f"expert degree {degree}, {own} of {count} experts of a layer on each {cost.rank_word}"
    return f"{held}: they compute for {compute} of the step{moved}"


def save_report(path: Path | None, cost: CostModel, row: dict[str, Evaluation], *notes: str) -> None:
    """Write the report of a batch under one or several planners, if a file is named."""
    if path is None:
        return
    from seqloom.view.report import ReportStep, save_report

    steps = [ReportStep(name, one.plan, one.simulation, one.bound_ns, one.as_dict()) for name, one in row.items()]
    documents = len(next(iter(row.values())).plan.documents)
    title = f"One step of {documents:,} sequences on {cost.ranks:,} {cost.rank_word}s"
    save_report(path, title, steps, cost, notes=[cost_line(cost), *notes])
