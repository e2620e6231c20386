"""``seqloom profile``: measure this machine.

seqloom profile                   time the attention kernels; write the table by which the dispatcher chooses one
seqloom profile --model NAME      time training steps on several ranks; write the profile that prices plans
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from seqloom.cli import shared
from seqloom.errors import SeqloomError, unknown_name
from seqloom.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.table import Table

    from seqloom.attention.kernels.dispatch import Measurement, TimePoint
    from seqloom.attention.kernels.interface import AttentionShape, Kernel
    from seqloom.cost import CostModel
    from seqloom.profiling.kernels import TimingSettings
    from seqloom.train.launch import RankProcess

SHORTEST = 64
LONGEST = {"cuda": 131_072, "cpu": 1_024}
LONGEST_QUICK = {"cuda": 16_384, "cpu": 256}
LONGEST_STEP = {"cuda": 131_072, "cpu": 8_192}
"""Tokens of the longest document: kernels, kernels with --quick, training steps."""
PACK_TOKENS = {"cuda": 131_072, "cpu": 0}
"""Tokens of a pack at least: a GPU must be full to be measured."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
MASKS = ("causal", "full")

Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:1; without it, the GPU if any.")]
Heads = Annotated[int, typer.Option("--heads", help="Query heads.")]
KvHeads = Annotated[int, typer.Option("--kv-heads", help="Key and value heads.")]
Dim = Annotated[int, typer.Option("--dim", help="Width of a head.")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"{', '.join(DTYPES)}.")]
Kernels = Annotated[
    str | None, typer.Option("--kernels", help="Names with commas between; without it, all but the plain reference.")
]
Longest = Annotated[
    int | None,
    typer.Option("--max-length", help="Longest document, tokens.  [default: 131072 on a GPU, 1024 on a CPU]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer lengths and runs: a first impression.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", help="File to write, .json; what a table holds of other shapes and devices is kept."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Measure training steps of this model instead, and write a profile for --profile."),
]
Ranks = Annotated[int | None, typer.Option("--ranks", help="With --model: processes to start here.  [default: 1]")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="With --model: what the ranks run on, as in plan.")]
Sharding = Annotated[str, typer.Option("--sharding", help="With --model: full, hybrid or none.")]
Capacity = Annotated[
    int | None, typer.Option("--capacity", help="With --model: tokens of a rank in a round; else what memory holds.")
]
KERNEL_OPTIONS = ("device", "heads", "kv_heads", "dim", "kernels", "quick")
MODEL_OPTIONS = ("ranks", "cluster", "sharding", "capacity")


def profile(
    context: typer.Context,
    device: Device = None,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    dim: Dim = 128,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = None,
    max_length: Longest = None,
    quick: Quick = False,
    output: Output = None,
    model: Model = None,
    ranks: Ranks = None,
    cluster: Cluster = None,
    sharding: Sharding = "full",
    capacity: Capacity = None,
    json: shared.AsJson = False,
) -> None:
    """Measure the attention kernels of this machine and write the table that decides which one runs.

    With --model: measure training steps on several ranks and write a profile, the constants by which plans are priced.

    \b
    Example:
        seqloom profile --quick --heads 8 --kv-heads 2 --dim 64
        seqloom profile --model qwen3-0.6b --ranks 4 --capacity 2048 --dtype float32 --output machine.json
        torchrun --nproc-per-node 8 -m seqloom profile --model llama3-8b --cluster 1x8xH200 --output machine.json
    """
    shared.check_output(output, "table" if model is None else "profile", (".json",))
    shared.require_torch("seqloom profile measures kernels and")
    _refuse_options(context, MODEL_OPTIONS if model is None else KERNEL_OPTIONS, with_model=model is not None)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if model is not None:
        setup = MachineSetup(model, cluster, sharding, capacity, max_length, dtype, verbose=not json)
        _profile_machine(setup, ranks, output, json)
        return
    from seqloom.attention.kernels.dispatch import KernelTable, default_table_path
    from seqloom.profiling.kernels import time_kernels

    place = choose_device(device)
    shape = make_shape(heads, kv_heads, dim, dtype, place)
    chosen, left_out = choose_kernels(kernels, shape)
    effort = make_effort(max_length, quick, place.type)
    path = default_table_path() if output is None else output
    table = KernelTable.load(path) if path.is_file() else KernelTable()
    with shared.progress_bar(len(chosen) * 2 * len(effort.lengths), "warming up") as step:
        report = None if step is None else lambda name, length: step(f"{name}, documents of {length:,}")
        measurement = time_kernels(chosen, shape, effort, report)
    table.adding(measurement).save(path)
    if json:
        shared.print_json({**measurement_dict(measurement), "left_out": left_out, "output": str(path)})
    else:
        _print_measurement(measurement, left_out, path)


def _refuse_options(context: typer.Context, names: Sequence[str], *, with_model: bool) -> None:
    """Refuse options that only the other kind of measurement has."""
    given = [name for name in names if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if given:
        option = "--" + given[0].replace("_", "-")
        if with_model:
            raise SeqloomError(f"{option} has no meaning with --model; leave it out, the model says it")
        raise SeqloomError(f"{option} needs --model; add --model")


def choose_device(name: str | None) -> torch.device:
    """Return the device to measure."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise SeqloomError(f"unknown device {name!r}; use cpu, cuda or cuda:0") from None
    if device.type not in LONGEST:
        raise SeqloomError(f"no kernel runs on device {name!r}; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SeqloomError(f"device {name!r} is not here, torch sees {torch.cuda.device_count()} GPUs; use cpu")
    return device


def make_shape(heads: int, kv_heads: int, dim: int, dtype: str, device: torch.device) -> AttentionShape:
    """Return the attention shape to measure."""
    import torch

    from seqloom.attention.kernels.interface import AttentionShape

    if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
        raise SeqloomError(
            f"{heads} heads, {kv_heads} kv heads, head dim {dim}: all at least 1, and kv heads must divide the heads"
        )
    return AttentionShape(heads, kv_heads, dim, getattr(torch, dtype), device, dim**-0.5)


def choose_kernels(names: str | None, shape: AttentionShape) -> tuple[list[Kernel], dict[str, str]]:
    """Return the kernels to measure, and why others are left out.

    Without names: all that run here and accept the shape, except for the reference, which is slow on purpose.
    """
    from seqloom.attention.kernels.dispatch import available_kernels, make_kernel, unavailable_kernels

    here = {kernel.capabilities.name: kernel for kernel in available_kernels(shape.device)}
    left_out = unavailable_kernels(shape.device)
    if names is None:
        refusals = {name: here[name].capabilities.unsupported_shape(shape) for name in here if name != "reference"}
        left_out |= {name: refusal for name, refusal in refusals.items() if refusal is not None}
        chosen = [here[name] for name, refusal in refusals.items() if refusal is None]
        if not chosen:
            raise SeqloomError(f"no kernel to measure: {'; '.join(left_out.values())}")
        return chosen, left_out
    wanted = list(dict.fromkeys(name for name in map(str.strip, names.split(",")) if name))
    if not wanted:
        raise SeqloomError(f"no kernel in {names!r}; name at least one, for example {next(iter(here))}")
    for name in wanted:
        refusal = make_kernel(name).capabilities.unsupported_shape(shape) or left_out.get(name)
        if refusal is not None:
            raise SeqloomError(f"kernel {name!r} cannot be measured: {refusal}; here: {', '.join(here)}")
    return [here[name] for name in wanted], {}


def make_effort(max_length: int | None, quick: bool, device: str) -> TimingSettings:
    """Choose the lengths to measure: powers of two up to the longest, and the longest itself."""
    from seqloom.profiling.kernels import TimingSettings

    longest = (LONGEST_QUICK if quick else LONGEST)[device] if max_length is None else max_length
    if longest < 1:
        raise SeqloomError(f"longest document of {longest} tokens; give --max-length at least 1")
    octaves = range((longest - 1).bit_length() - SHORTEST.bit_length() + 1)
    lengths = tuple(SHORTEST << k for k in octaves if SHORTEST << k < longest)[:: 2 if quick else 1]
    return TimingSettings((*lengths, longest), tokens=max(longest, PACK_TOKENS[device]), repeats=3 if quick else 7)


def measurement_dict(measurement: Measurement) -> dict[str, Any]:
    """Return the measurement with the fastest kernel of every length, by JSON keys."""
    times = [
        {
            "kernel": one.kernel,
            "forward_call_ns": one.forward_call_ns,
            "backward_call_ns": one.backward_call_ns,
            **{mask: [point._asdict() for point in getattr(one, mask)] for mask in MASKS},
        }
        for one in measurement.times
    ]
    winners = {mask: dict(fastest(measurement, mask)) for mask in MASKS}
    return {"version": __version__, **asdict(measurement), "times": times, "fastest": winners}


def fastest(measurement: Measurement, mask: str) -> list[tuple[int, str]]:
    """Return (length, fastest kernel) of every length, forward and backward together."""
    names = [one.kernel for one in measurement.times]
    columns = zip(*(getattr(one, mask) for one in measurement.times), strict=True)
    return [(points[0].length, names[_fastest_index(points)]) for points in columns]


def _fastest_index(points: Sequence[TimePoint]) -> int:
    return min(range(len(points)), key=lambda index: points[index].forward_ns + points[index].backward_ns)


def _print_measurement(measurement: Measurement, left_out: dict[str, str], path: Path) -> None:
    one = measurement
    console = shared.terminal()
    heads = f"{one.heads} heads" if one.heads == one.kv_heads else f"{one.heads} heads on {one.kv_heads}"
    console.print(f"{one.device}, torch {one.torch}, {heads} of {one.dim}, {one.dtype}", markup=False)
    for mask, title in zip(MASKS, ("Causal documents", "Without mask"), strict=True):
        console.print(f"{title}: forward + backward, us per document")
        console.print(_kernel_table(measurement, mask))
        console.print(f"fastest: {', '.join(_winner_ranges(fastest(measurement, mask)))}", markup=False)
        console.print()
    calls = ", ".join(
        f"{times.kernel} {(times.forward_call_ns + times.backward_call_ns) / 1e3:,.0f} us" for times in one.times
    )
    console.print(f"Every call costs, however little it does: {calls}", markup=False)
    for name, why in left_out.items():
        console.print(f"{name} is left out: {why}", markup=False)
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _kernel_table(measurement: Measurement, mask: str) -> Table:
    """Draw a row per length and a column per kernel, the fastest in bold."""
    from rich.table import Table

    table = Table("tokens", *(one.kernel for one in measurement.times), box=None)
    for column in table.columns:
        column.justify = "right"
    for points in zip(*(getattr(one, mask) for one in measurement.times), strict=True):
        cells = [f"{point.forward_ns / 1e3:,.0f} + {point.backward_ns / 1e3:,.0f}" for point in points]
        best = _fastest_index(points)
        cells[best] = f"[bold]{cells[best]}[/bold]"
        table.add_row(f"{points[0].length:,}", *cells)
    return table


def _winner_ranges(winners: Sequence[tuple[int, str]]) -> list[str]:
    """Join neighbouring lengths with the same winner: varlen up to 1,024, cudnn up to 131,072."""
    ends = [at for at in range(len(winners)) if at + 1 == len(winners) or winners[at + 1][1] != winners[at][1]]
    return [f"{winners[at][1]} up to {winners[at][0]:,}" for at in ends]


# Training steps: --model.


class MachineSetup(NamedTuple):
    """The training steps to measure.

    Attributes:
        model: a preset or a file of shapes.
        cluster: its spelling; None: CPU processes on this machine.
        sharding: of the parameters.
        capacity: tokens of a rank in a round; None: what memory holds.
        max_length: longest document to try; None: `LONGEST_STEP`.
        dtype: that layers compute in.
        verbose: say on stderr what is being measured.
    """

    model: str
    cluster: str | None
    sharding: str
    capacity: int | None
    max_length: int | None
    dtype: str
    verbose: bool

    def cost(self, ranks: int) -> CostModel:
        """Build the cost model whose constants are measured, for so many ranks."""
        from seqloom.api import cost_model
        from seqloom.describe import Cluster

        cluster = Cluster.parse(self.cluster or f"1x{ranks}xCPU")
        if cluster.ranks != ranks:
            raise SeqloomError(
                f"--cluster {self.cluster} has {cluster.ranks} ranks, the measurement {ranks}; start {cluster.ranks} "
                f"processes, or name a cluster of {ranks}"
            )
        options = {"sharding": self.sharding, "max_length": self.max_length, "capacity": self.capacity}
        return cost_model(cluster, self.model, **options)


def _profile_machine(setup: MachineSetup, ranks: int | None, output: Path | None, json: bool) -> None:
    """Measure on processes of this machine, or as one of torchrun's, and write the profile."""
    import torch

    from seqloom.train.launch import run_on_processes, run_under_torchrun, started_by_torchrun

    if ranks is not None and ranks < 1:
        raise SeqloomError(f"{ranks} ranks measure nothing; give --ranks 1 or more")
    if output is None:
        raise SeqloomError("a profile of this machine is a file; say where to: --output machine.json")
    if setup.cluster is None and torch.cuda.is_available():
        raise SeqloomError("name the cluster whose GPUs are measured, for its links: --cluster 1x8xH200")
    if started_by_torchrun():
        if ranks is not None:
            raise SeqloomError(f"--ranks {ranks} under torchrun, which has started the ranks; leave one of them out")
        found = run_under_torchrun(measure_rank, setup, str(output))
    else:
        setup.cost(ranks or 1)  # refuse here, once, what every process would refuse
        found = run_on_processes(measure_rank, ranks or 1, setup, str(output))
    if not found:  # another rank than the first
        return
    if json:
        shared.print_json(found)
    else:
        _print_trials(found)


def measure_rank(process: RankProcess, setup: MachineSetup, output: str) -> dict[str, Any]:
    """Measure as one of the ranks; rank 0 writes the profile and returns the report, the others return nothing."""
    import torch

    from seqloom.api import MS
    from seqloom.dist import Communicators, TorchTransport
    from seqloom.plan import GroupFamily
    from seqloom.profiling.calibration import Calibrator, describe_trial

    rank, ranks, device, _ = process
    cost = setup.cost(ranks)
    communicators = Communicators.create(GroupFamily(ranks, cost.node_size))
    communicators.warm_up()
    calibrator = Calibrator(cost, TorchTransport(communicators), device, getattr(torch, setup.dtype))
    verbose = setup.verbose and rank == 0 and sys.stderr.isatty()
    report = (lambda text: typer.echo(text, err=True)) if verbose else (lambda text: None)
    stages = 2 if ranks % 2 == 0 and cost.model.layers > 1 else 1
    found = calibrator.calibrate(setup.max_length or LONGEST_STEP[device.type], report, stages=stages)
    communicators.close()
    if rank:
        return {}
    found.profile.save(output)
    trials = [
        {"what": describe_trial(trial.plan), "measured_ms": trial.ns / MS, "predicted_ms": predicted / MS}
        for trial, predicted in zip(found.trials, found.predicted_ns, strict=True)
    ]
    return {"output": output, "cluster": cost.cluster.spelling, "model": cost.model.name, "trials": trials}


def _print_trials(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("groups side by side", "measured ms", "by the profile", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    errors = []
    for trial in found["trials"]:
        measured, predicted = trial["measured_ms"], trial["predicted_ms"]
        errors.append(abs(predicted / measured - 1))
        table.add_row(trial["what"], f"{measured:,.1f}", f"{predicted:,.1f}")
    console = shared.terminal()
    console.print(table)
    error = f"{statistics.mean(errors):.1%} on average, {max(errors):.0%} at most"
    console.print(f"off by {error}; {found['model']} on {found['cluster']}", markup=False)
    console.print(f"wrote {found['output']}", markup=False, soft_wrap=True)
