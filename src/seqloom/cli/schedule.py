"""``seqloom schedule NAME``: print, check and play a pipeline schedule by name or from a file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import AsJson, Picture, print_json, require_picture, require_writable
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.schedules import Schedule
    from seqloom.schedules.timing import ScheduleMetrics

FINEST, LARGEST = 10**9, 10**9
"""Times are rounded to one part in the first and may not exceed the second."""

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, v-half, v-min, terapipe, seq1f1b, "
        "seq1f1b-i, seq1f1b-zb or balanced.",
    ),
]
Stages = Annotated[int | None, typer.Option("--stages", help="Hosts of the pipeline.")]
MicroBatches = Annotated[int | None, typer.Option("--micro-batches", help="Sequences of a step.")]
Pieces = Annotated[
    str, typer.Option("--pieces", help="Pieces of every sequence, or one number per sequence such as 4,2,1.")
]
Chunks = Annotated[
    int | None, typer.Option("--chunks", help="Parts of the model per host; without it, the least the schedule takes.")
]
Durations = Annotated[
    str,
    typer.Option("--times", help="Forward, input half and weight half of the backward, of a micro-batch on a host."),
]
Memory = Annotated[
    float | None,
    typer.Option("--memory", help="Micro-batches that a host may hold; what holds more is refused, balanced fits in."),
]
File = Annotated[
    Path | None, typer.Option("--file", help="Read the schedule from this .csv file: a line per host, actions 0F3.")
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the schedule to this .csv file.")]


def schedule(
    name: Name = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    pieces: Pieces = "1",
    chunks: Chunks = None,
    times: Durations = "1,1,1",
    memory: Memory = None,
    file: File = None,
    csv: Csv = None,
    picture: Picture = None,
    json: AsJson = False,
) -> None:
    """Print a pipeline schedule as a grid, with its bubble and its peak memory.

    \b
    Examples:
        seqloom schedule seq1f1b --stages 4 --micro-batches 4 --pieces 2
        seqloom schedule --file mine.csv --pieces 2 --times 1,1.6,0.6
    """
    from seqloom.schedules.timing import schedule_metrics

    require_picture(picture)
    require_writable(csv, "schedule", (".csv",))
    durations = three_times(times)
    limit = None if memory is None else _limit(memory)
    if file is None:
        made = _named(name, stages, micro_batches, pieces, chunks, durations, limit)
    else:
        made = _from_file(file, name, stages, micro_batches, pieces, chunks, limit)
    found = schedule_metrics(made, *durations)
    if csv is not None:
        csv.write_text(made.to_csv())
    if json:
        print_json(_described(made, durations, found))
    else:
        _print(made, found)
    if picture is not None:
        from seqloom.view import save_picture

        save_picture(picture, f"seqloom schedule {made.name}", lambda console: _draw(console, made, found))


def three_times(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """Read F,B,W."""
    try:
        values = [Fraction(part.strip()).limit_denominator(FINEST) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        values = []
    if len(values) != 3 or not all(0 <= value <= LARGEST for value in values) or values[0] == 0:
        raise SeqloomError(
            f"--times {text!r}; three numbers from 0 to {LARGEST:.0e} are wanted, the first above 0: forward, input "
            "half and weight half of the backward; use 1,1,1, for example"
        )
    return values[0], values[1], values[2]


def _limit(memory: float) -> Fraction:
    if not 0 < memory < LARGEST:
        raise SeqloomError(f"--memory {memory:g}; a number of micro-batches above 0 is wanted; use 4, for example")
    return Fraction(memory).limit_denominator(FINEST)


def _counts(pieces: str) -> int | list[int]:
    """Read one number of pieces, or one per sequence."""
    try:
        values = [int(part) for part in pieces.split(",")]
    except ValueError:
        raise SeqloomError(
            f"--pieces {pieces!r}; a whole number is wanted, or one per sequence; use 4, or 4,2,1"
        ) from None
    return values[0] if len(values) == 1 else values


def _named(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    pieces: str,
    chunks: int | None,
    durations: tuple[Fraction, Fraction, Fraction],
    limit: Fraction | None,
) -> Schedule:
    """Build the schedule that is asked for by name."""
    import math

    from seqloom.schedules import build_schedule

    counts = _counts(pieces)
    if micro_batches is None and not isinstance(counts, int):
        micro_batches = len(counts)
    wanted = {"a NAME": name, "--stages": stages, "--micro-batches": micro_batches}
    missing = [what for what, value in wanted.items() if value is None]
    if name is None or stages is None or micro_batches is None:
        raise SeqloomError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; a schedule needs a name, stages "
            "and micro-batches, or a --file; try: seqloom schedule seq1f1b --stages 4 --micro-batches 4 --pieces 2"
        )
    whole = math.lcm(*(value.denominator for value in durations))
    forward, backward, weights = (int(value * whole) for value in durations)
    made = build_schedule(name, stages, micro_batches, counts, chunks, (forward, backward, weights), limit)
    made.validate()
    return made


def _from_file(
    file: Path,
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    pieces: str,
    chunks: int | None,
    limit: Fraction | None,
) -> Schedule:
    """Read a schedule, and compare it with what is said of it."""
    from seqloom.schedules import Schedule
    from seqloom.schedules.registry import check_memory

    try:
        text = file.read_text()
    except UnicodeDecodeError:
        raise SeqloomError(f"{str(file)!r} is not text; give a .csv file with a line of actions per host") from None
    made = Schedule.from_csv(text, name or file.name, _counts(pieces))
    size = _size(made)
    for what, asked, found in (
        ("--stages", stages, size["stages"]),
        ("--micro-batches", micro_batches, size["micro_batches"]),
        ("--chunks", chunks, size["chunks"]),
    ):
        if asked is not None and asked != found:
            raise SeqloomError(f"{what} {asked}, but {str(file)!r} has {found}; leave {what} out, or use {found}")
    if limit is not None:
        check_memory(made, limit)
    return made


def _size(made: Schedule) -> dict[str, Any]:
    """Hosts, chunks, sequences and pieces; a list of pieces where sequences differ."""
    counts = [unit.pieces for unit in made.units if unit.piece == 0]
    hosts = len(made.rows)
    return {
        "stages": hosts,
        "chunks": len(made.pp_ranks) // hosts,
        "micro_batches": len(counts),
        "pieces": counts[0] if len(set(counts)) == 1 else counts,
    }


def _described(
    made: Schedule, durations: tuple[Fraction, Fraction, Fraction], found: ScheduleMetrics
) -> dict[str, Any]:
    """The schedule for a report in JSON."""
    return {
        "schedule": made.name,
        **_size(made),
        "times": [float(value) for value in durations],
        "bubble": found.bubble,
        "makespan": found.step_time,
        "until_end": found.makespan,
        "peak_memory": list(found.peak_memory),
        "grid": [[str(action) for action in row] for row in made.rows],
    }


def _print(made: Schedule, found: ScheduleMetrics) -> None:
    from rich.console import Console

    _draw(Console(highlight=False), made, found)


def _draw(console: Console, made: Schedule, found: ScheduleMetrics) -> None:
    from seqloom.view import schedule_chart

    size = _size(made)
    pieces = "unequal" if isinstance(size["pieces"], list) else size["pieces"]
    console.print(
        f"{made.name}: {size['stages']} hosts, {size['chunks']} stage{'s' * (size['chunks'] > 1)} each, "
        f"{size['micro_batches']} micro-batches, {pieces} piece{'s' * (pieces != 1)} each",
        markup=False,
    )
    console.print(schedule_chart(made, found.timing))
    memory = " ".join(f"{most:.4g}" for most in found.peak_memory)
    console.print(f"bubble {100 * found.bubble:.1f} %, makespan {found.step_time:.6g}")
    if found.makespan > found.step_time:
        console.print(f"hosts that begin late end late: {found.makespan:.6g} from the first start to the last stop")
    console.print(f"peak memory per host, in micro-batches: {memory}")
