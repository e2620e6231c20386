"""``seqloom schedule NAME``: print, check and time a pipeline schedule, by name or from a file."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.schedules import Schedule
    from seqloom.schedules.timing import ScheduleMetrics

MAX_DENOMINATOR, MAX_TIME = 10**9, 10**9
"""Times are rounded to one part in the first and may not exceed the second."""
Durations = tuple[Fraction, Fraction, Fraction]
"""Forward, input half and weight half of the backward."""

Name = Annotated[
    str | None,
    Argument(
        metavar="NAME",
        help="gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, v-half, v-min, terapipe, seq1f1b, "
        "seq1f1b-i, seq1f1b-zb or balanced.",
    ),
]
Chunks = Annotated[int | None, Option(help="Stages per pipeline rank; without it, the least the schedule takes.")]


def schedule(
    name: Name = None,
    stages: Annotated[int | None, Option(help="Pipeline ranks.")] = None,
    micro_batches: Annotated[int | None, Option(help="Sequences of a step.")] = None,
    pieces: Annotated[str, Option(help="Pieces of every sequence, or one number per sequence such as 4,2,1.")] = "1",
    chunks: Chunks = None,
    times: Annotated[
        str, Option(help="Forward, input half and weight half of the backward, of a micro-batch on a pipeline rank.")
    ] = "1,1,1",
    memory: Annotated[
        float | None,
        Option(help="Micro-batches that a pipeline rank may hold; what holds more is refused, balanced fits in."),
    ] = None,
    file: Annotated[
        Path | None, Option(help="Read the schedule from this .csv file: a line per pipeline rank, actions 0F3.")
    ] = None,
    csv: Annotated[Path | None, Option(help="Write the schedule to this .csv file.")] = None,
    picture: shared.Picture = None,
    json: shared.AsJson = False,
) -> None:
    """Print a pipeline schedule as a grid, with its bubble and its peak memory.

    \b
    Examples:
        seqloom schedule seq1f1b --stages 4 --micro-batches 4 --pieces 2
        seqloom schedule --file mine.csv --pieces 2 --times 1,1.6,0.6
    """
    from seqloom.schedules.schedule import to_csv
    from seqloom.schedules.timing import schedule_metrics

    shared.check_picture(picture)
    shared.check_output(csv, "schedule", (".csv",))
    durations, limit, counts = parse_times(times), _parse_memory(memory), _parse_pieces(pieces)
    sizes = {"stages": stages, "micro_batches": micro_batches, "pieces": counts, "chunks": chunks}
    built = _build(name, durations, limit, **sizes) if file is None else _load(file, name, limit, **sizes)
    metrics = schedule_metrics(built, *durations)
    if csv is not None:
        csv.write_text(to_csv(built.rows))
    if picture is not None:
        from seqloom.view import schedule_picture

        schedule_picture(built, metrics, [_size_line(built)]).save(picture)
    shared.report(json, lambda: _as_dict(built, durations, metrics), lambda console: _draw(console, built, metrics))


def parse_times(text: str) -> Durations:
    """Read F,B,W: three numbers, the first above 0."""
    try:
        values = [Fraction(part.strip()).limit_denominator(MAX_DENOMINATOR) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        values = []
    if len(values) != 3 or not all(0 <= value <= MAX_TIME for value in values) or values[0] == 0:
        raise SeqloomError(
            f"--times {text!r}; three numbers from 0 to {MAX_TIME:.0e} are wanted, the first above 0: forward, input "
            "half and weight half of the backward; use 1,1,1, for example"
        )
    return values[0], values[1], values[2]


def _parse_memory(memory: float | None) -> Fraction | None:
    if memory is None:
        return None
    if not 0 < memory < MAX_TIME:
        raise SeqloomError(f"--memory {memory:g}; a number of micro-batches above 0 is wanted; use 4, for example")
    return Fraction(memory).limit_denominator(MAX_DENOMINATOR)


def _parse_pieces(text: str) -> int | list[int]:
    """Read one number of pieces, or one per sequence."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise SeqloomError(
            f"--pieces {text!r}; a whole number is wanted, or one per sequence; use 4, or 4,2,1"
        ) from None
    return values[0] if len(values) == 1 else values


def _build(name: str | None, durations: Durations, limit: Fraction | None, **sizes: Any) -> Schedule:
    """Build the schedule of that name and size."""
    from seqloom.schedules import build_schedule

    if sizes["micro_batches"] is None and isinstance(sizes["pieces"], list):
        sizes["micro_batches"] = len(sizes["pieces"])
    given = {"a NAME": name, "--stages": sizes["stages"], "--micro-batches": sizes["micro_batches"]}
    missing = [what for what, value in given.items() if value is None]
    if name is None or missing:
        raise SeqloomError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; a schedule needs a name, stages "
            "and micro-batches, or a --file; try: seqloom schedule seq1f1b --stages 4 --micro-batches 4 --pieces 2"
        )
    scale = math.lcm(*(value.denominator for value in durations))
    forward, backward, weights = (int(value * scale) for value in durations)
    built = build_schedule(name, **sizes, times=(forward, backward, weights), memory=limit)
    built.validate()
    return built


def _load(file: Path, name: str | None, limit: Fraction | None, *, pieces: Any, **sizes: int | None) -> Schedule:
    """Read a schedule file and refuse options that contradict it."""
    from seqloom.schedules import Schedule
    from seqloom.schedules.registry import check_memory

    try:
        text = file.read_text()
    except UnicodeDecodeError:
        raise SeqloomError(
            f"{str(file)!r} is not text; give a .csv file with a line of actions per pipeline rank"
        ) from None
    built = Schedule.from_csv(text, name or file.name, pieces)
    for key, size in _size(built).items():
        if sizes.get(key, size) not in (None, size):
            option = "--" + key.replace("_", "-")
            raise SeqloomError(
                f"{option} {sizes[key]}, but {str(file)!r} has {size}; leave {option} out, or use {size}"
            )
    if limit is not None:
        check_memory(built, limit)
    return built


def _size(built: Schedule) -> dict[str, Any]:
    """Return the numbers of pipeline ranks, chunks, sequences and pieces; a list of pieces where sequences differ."""
    pieces = [unit.pieces for unit in built.units if unit.piece == 0]
    ranks = len(built.rows)
    return {
        "stages": ranks,
        "chunks": len(built.pp_ranks) // ranks,
        "micro_batches": len(pieces),
        "pieces": pieces[0] if len(set(pieces)) == 1 else pieces,
    }


def _size_line(built: Schedule) -> str:
    size = _size(built)
    pieces = "unequal" if isinstance(size["pieces"], list) else size["pieces"]
    return (
        f"{size['stages']} pipeline ranks, {size['chunks']} stage{'s' * (size['chunks'] > 1)} each, "
        f"{size['micro_batches']} micro-batches, {pieces} piece{'s' * (pieces != 1)} each"
    )


def _as_dict(built: Schedule, durations: Durations, metrics: ScheduleMetrics) -> dict[str, Any]:
    return {
        "schedule": built.name,
        **_size(built),
        "times": [float(value) for value in durations],
        "bubble": metrics.bubble,
        "makespan": metrics.step_time,
        "until_end": metrics.makespan,
        "peak_memory": list(metrics.peak_memory),
        "grid": [[str(action) for action in row] for row in built.rows],
    }


def _draw(console: Console, built: Schedule, metrics: ScheduleMetrics) -> None:
    from seqloom.view import ScheduleChart

    shared.print_lines(console, f"{built.name}: {_size_line(built)}")
    console.print(ScheduleChart(built, metrics.timing))
    memory = " ".join(f"{most:.4g}" for most in metrics.peak_memory)
    console.print(f"bubble {100 * metrics.bubble:.1f} %, makespan {metrics.step_time:.6g}")
    if metrics.makespan > metrics.step_time:
        console.print(f"ranks that begin late end late: {metrics.makespan:.6g} from the first start to the last stop")
    console.print(f"peak memory per pipeline rank, in micro-batches: {memory}")
