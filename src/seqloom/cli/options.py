"""Options that several verbs share, spelt and explained once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from seqloom.errors import SeqloomError

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
