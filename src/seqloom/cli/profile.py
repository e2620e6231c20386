"""``seqloom profile``: measure this machine.

seqloom profile                   time the attention kernels; write the table by which the dispatcher chooses one
seqloom profile --model NAME      time training steps on several ranks; write the profile that prices plans
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError, import_extra, unknown_name
from seqloom.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rich.console import Console
    from rich.table import Table

    from seqloom.attention.kernels.dispatch import Measurement, TimePoint
    from seqloom.attention.kernels.interface import AttentionShape, Kernel
    from seqloom.profiling.kernels import TimingSettings
    from seqloom.profiling.stored import MachineSetup
    from seqloom.train.launch import RankProcess

SHORTEST = 64
LONGEST = {"cuda": 131_072, "cpu": 1_024}
LONGEST_QUICK = {"cuda": 16_384, "cpu": 256}
LONGEST_STEP = {"cuda": 131_072, "cpu": 8_192}
LONGEST_STEP_QUICK = {"cuda": 32_768, "cpu": 2_048}
"""Tokens of the longest document: kernels, kernels with --quick, training steps, the same with --quick."""
PACK_TOKENS = {"cuda": 131_072, "cpu": 0}
"""Tokens of a pack at least: a GPU must be full to be measured."""
DTYPES = ("bfloat16", "float16", "float32", "float64")
MASKS = ("causal", "full")

Kernels = Annotated[str | None, Option(help="Names with commas between; without it, all but the plain reference.")]
Longest = Annotated[int | None, Option(help="Longest document, tokens.  [default: 131072 on a GPU, 1024 on a CPU]")]
Capacity = Annotated[int | None, Option(help="With --model: tokens of a rank in a round; else what memory holds.")]
KERNEL_OPTIONS = ("device", "heads", "kv_heads", "dim", "kernels")
MODEL_OPTIONS = ("ranks", "cluster", "sharding", "capacity")


def profile(
    context: typer.Context,
    device: Annotated[str | None, Option(help="cpu, cuda or cuda:1; without it, the GPU if any.")] = None,
    heads: Annotated[int, Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, Option(help="Key and value heads.")] = 8,
    dim: Annotated[int, Option(help="Width of a head.")] = 128,
    dtype: Annotated[str, Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    kernels: Kernels = None,
    max_length: Longest = None,
    quick: Annotated[bool, Option("--quick", help="Fewer lengths, plans and runs: a first impression.")] = False,
    output: Annotated[
        Path | None,
        Option(
            help="File to write, .json; what a table holds of other shapes and devices is kept. Without it, and with "
            "--model --quick, the profile is stored for runs with plan.profile = measured."
        ),
    ] = None,
    model: Annotated[
        str | None, Option(help="Measure training steps of this model instead, and write a profile for --profile.")
    ] = None,
    ranks: Annotated[
        int | None, Option(callback=shared.at_least_one, help="With --model: processes to start here.  [default: 1]")
    ] = None,
    cluster: Annotated[str | None, Option(help="With --model: what the ranks run on, as in plan.")] = None,
    sharding: Annotated[str, Option(help="With --model: full, hybrid or none.")] = "full",
    capacity: Capacity = None,
    json: shared.AsJson = False,
) -> None:
    """Measure the attention kernels of this machine and write the table that decides which one runs.

    With --model: measure training steps on several ranks and write a profile, the constants by which plans are priced.

    \b
    Example:
        seqloom profile --quick --heads 8 --kv-heads 2 --dim 64
        seqloom profile --model qwen3-0.6b --ranks 4 --quick --capacity 1024 --dtype float32
        seqloom profile --model qwen3-0.6b --ranks 4 --capacity 2048 --dtype float32 --output machine.json
        torchrun --nproc-per-node 8 -m seqloom profile --model llama3-8b --cluster 1x8xH200 --output machine.json
    """
    shared.check_output(output, "table" if model is None else "profile", (".json",))
    import_extra("seqloom profile measures kernels and", "train", "torch")
    _refuse_options(context, with_model=model is not None)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if model is not None:
        from seqloom.profiling.stored import MachineSetup, stored_profiles

        setup = MachineSetup(
            model,
            cluster,
            sharding,
            capacity,
            max_length,
            dtype,
            quick,
            verbose=not json,
            folder=str(stored_profiles()),
        )
        _profile_machine(setup, ranks, output, json)
        return
    import torch

    from seqloom.attention.kernels.dispatch import KernelTable, default_table_path
    from seqloom.attention.kernels.interface import AttentionShape
    from seqloom.profiling.kernels import time_kernels

    place = choose_device(device)
    if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
        sizes = f"{heads} heads, {kv_heads} kv heads, head dim {dim}"
        raise SeqloomError(f"{sizes}: all at least 1, and kv heads must divide the heads")
    shape = AttentionShape(heads, kv_heads, dim, getattr(torch, dtype), place, dim**-0.5)
    chosen, left_out = choose_kernels(kernels, shape)
    settings = timing_settings(max_length, quick, place.type)
    path = default_table_path() if output is None else output
    table = KernelTable.load(path) if path.is_file() else KernelTable()
    with shared.progress_bar(len(chosen) * 2 * len(settings.lengths), "warming up") as step:
        measurement = time_kernels(
            chosen, shape, settings, lambda name, length: step(f"{name}, documents of {length:,}")
        )
    table.adding(measurement).save(path)
    shared.report(
        json,
        lambda: {**measurement_dict(measurement), "left_out": left_out, "output": str(path)},
        lambda console: _draw_measurement(console, measurement, left_out, path),
    )


def _refuse_options(context: typer.Context, *, with_model: bool) -> None:
    """Refuse options that only the other kind of measurement has."""
    for name in KERNEL_OPTIONS if with_model else MODEL_OPTIONS:
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE"):
            wrong = "has no meaning with --model; leave it out, the model says it"
            raise SeqloomError(f"--{name.replace('_', '-')} {wrong if with_model else 'needs --model; add --model'}")


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
    wanted = shared.split_names(names, "kernel", next(iter(here)))
    for name in wanted:
        refusal = make_kernel(name).capabilities.unsupported_shape(shape) or left_out.get(name)
        if refusal is not None:
            raise SeqloomError(f"kernel {name!r} cannot be measured: {refusal}; here: {', '.join(here)}")
    return [here[name] for name in wanted], {}


def timing_settings(max_length: int | None, quick: bool, device: str) -> TimingSettings:
    """Choose the lengths to measure: powers of two up to the longest, and the longest itself."""
    from seqloom.profiling.kernels import TimingSettings

    longest = (LONGEST_QUICK if quick else LONGEST)[device] if max_length is None else max_length
    if longest < 1:
        raise SeqloomError(f"longest document of {longest} tokens; give --max-length at least 1")
    lengths = [SHORTEST << k for k in range(longest.bit_length()) if SHORTEST << k < longest][:: 2 if quick else 1]
    return TimingSettings((*lengths, longest), tokens=max(longest, PACK_TOKENS[device]), repeats=3 if quick else 7)


def measurement_dict(measurement: Measurement) -> dict[str, Any]:
    """Return the measurement with the fastest kernel of every length, by JSON keys."""
    content = {"version": __version__, **asdict(measurement)}
    for times, one in zip(content["times"], measurement.times, strict=True):
        times |= {mask: [point._asdict() for point in getattr(one, mask)] for mask in MASKS}
    return content | {"fastest": {mask: dict(fastest(measurement, mask)) for mask in MASKS}}


def fastest(measurement: Measurement, mask: str) -> list[tuple[int, str]]:
    """Return (length, fastest kernel) of every length, forward and backward together."""
    return [(points[0].length, measurement.times[best].kernel) for points, best in _by_length(measurement, mask)]


def _by_length(measurement: Measurement, mask: str) -> Iterator[tuple[Sequence[TimePoint], int]]:
    """Yield of every length the points of all kernels, and the index of the fastest."""
    for points in zip(*(getattr(one, mask) for one in measurement.times), strict=True):
        yield points, min(range(len(points)), key=lambda k: points[k].forward_ns + points[k].backward_ns)


def _draw_measurement(console: Console, one: Measurement, left_out: dict[str, str], path: Path) -> None:
    heads = f"{one.heads} heads" if one.heads == one.kv_heads else f"{one.heads} heads on {one.kv_heads}"
    shared.print_lines(console, f"{one.device}, torch {one.torch}, {heads} of {one.dim}, {one.dtype}")
    for mask, title in zip(MASKS, ("Causal documents", "Without mask"), strict=True):
        console.print(f"{title}: forward + backward, us per document")
        console.print(_kernel_table(one, mask))
        shared.print_lines(console, f"fastest: {', '.join(winner_ranges(fastest(one, mask)))}", "")
    calls = ", ".join(
        f"{each.kernel} {(each.forward_call_ns + each.backward_call_ns) / 1e3:,.0f} us" for each in one.times
    )
    shared.print_lines(console, f"Every call costs, however little it does: {calls}")
    shared.print_lines(console, *(f"{name} is left out: {why}" for name, why in left_out.items()))
    typer.echo(f"wrote {path}")


def _kernel_table(measurement: Measurement, mask: str) -> Table:
    """Draw a row per length and a column per kernel, the fastest in bold."""
    from seqloom.view.format import table_of

    table = table_of(["tokens", *(one.kernel for one in measurement.times)], left=())
    for points, best in _by_length(measurement, mask):
        cells = [f"{point.forward_ns / 1e3:,.0f} + {point.backward_ns / 1e3:,.0f}" for point in points]
        cells[best] = f"[bold]{cells[best]}[/bold]"
        table.add_row(f"{points[0].length:,}", *cells)
    return table


def winner_ranges(winners: Sequence[tuple[int, str]]) -> list[str]:
    """Join neighbouring lengths with the same winner: triton up to 256, fa4 up to 131,072."""
    ranges = [(kernel, list(group)) for kernel, group in groupby(winners, key=lambda winner: winner[1])]
    return [f"{kernel} up to {group[-1][0]:,}" for kernel, group in ranges]


# Training steps: --model.


def _profile_machine(setup: MachineSetup, ranks: int | None, output: Path | None, json: bool) -> None:
    """Measure on processes of this machine, or as one of torchrun's, and write the profile."""
    import torch

    from seqloom.train.launch import run_as_launched_rank, run_on_processes

    if output is None and not setup.quick:
        raise SeqloomError(
            "a profile of this machine is a file; say where to: --output machine.json; with --quick it is kept for "
            'runs with plan.profile = "measured"'
        )
    if setup.cluster is None and torch.cuda.is_available():
        raise SeqloomError("name the cluster whose GPUs are measured, for its links: --cluster 1x8xH200")
    if shared.launched(ranks):
        result = run_as_launched_rank(measure_rank, setup, output and str(output))
    else:
        setup.cost(ranks or 1)  # refuse here, once, what every process would refuse
        result = run_on_processes(measure_rank, ranks or 1, setup, output and str(output))
    if result:  # the first rank's
        shared.report(json, lambda: result, lambda console: _draw_trials(console, result))


def measure_rank(process: RankProcess, setup: MachineSetup, output: str | None) -> dict[str, Any]:
    """Measure as one of the ranks; rank 0 writes the profile and returns the report, the others return nothing.

    Without a file to write to it is stored for runs of the machine.
    """
    import time

    import torch

    from seqloom.api import MS
    from seqloom.dist import Communicators, TorchTransport
    from seqloom.plan import GroupFamily
    from seqloom.profiling.calibration import Calibrator, describe_trial
    from seqloom.profiling.stored import StoredProfile
    from seqloom.train.launch import gather_job_ranks, spell_nodes

    (rank, ranks, *_), device, _ = process
    cost = setup.cost(ranks, None if setup.cluster else spell_nodes(gather_job_ranks(process.job_rank)))
    communicators = Communicators(GroupFamily(ranks, cost.node_size))
    communicators.warm_up()
    calibrator = Calibrator(cost, TorchTransport(communicators), device, getattr(torch, setup.dtype))
    verbose = setup.verbose and rank == 0
    report = (lambda text: typer.echo(text, err=True)) if verbose else (lambda text: None)
    longest = setup.max_length or (LONGEST_STEP_QUICK if setup.quick else LONGEST_STEP)[device.type]
    stages = 2 if ranks % 2 == 0 and cost.model.layers > 1 and not setup.quick else 1
    begin = time.monotonic()
    calibration = calibrator.calibrate(longest, report, stages=stages, quick=setup.quick)
    communicators.close()
    if rank:
        return {}
    if output is None:
        output = str(setup.path(cost, device.type))
        StoredProfile.of(calibration, time.monotonic() - begin).save(Path(output))
    else:
        calibration.profile.save(output)
    trials = [
        {"what": describe_trial(trial.plan), "measured_ms": trial.ns / MS, "predicted_ms": predicted / MS}
        for trial, predicted in zip(calibration.trials, calibration.predicted_ns, strict=True)
    ]
    return {"output": output, "cluster": cost.cluster.spelling, "model": cost.model.name, "trials": trials}


def _draw_trials(console: Console, result: dict[str, Any]) -> None:
    from seqloom.view.format import table_of

    table = table_of(("groups side by side", "measured ms", "by the profile"), left=("groups side by side",))
    for trial in result["trials"]:
        table.add_row(trial["what"], f"{trial['measured_ms']:,.1f}", f"{trial['predicted_ms']:,.1f}")
    console.print(table)
    errors = [abs(trial["predicted_ms"] / trial["measured_ms"] - 1) for trial in result["trials"]]
    error = f"{statistics.mean(errors):.1%} on average, {max(errors):.0%} at most"
    shared.print_lines(console, f"off by {error}; {result['model']} on {result['cluster']}")
    typer.echo(f"wrote {result['output']}")
