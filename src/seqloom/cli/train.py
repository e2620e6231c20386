"""``seqloom train``: a config in, a trained model out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import AsJson, print_json
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.train.config import Config
    from seqloom.train.model import ModelFamily

ConfigFile = Annotated[Path, typer.Argument(help="A training config, .toml.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, instead of the config's.")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes to start here; without it, the config's.")]


def train(config: ConfigFile, overrides: Overrides = None, ranks: Ranks = None, json: AsJson = False) -> None:
    """Train with a fresh plan for every step.

    Starts processes on this machine itself, or is one of those that torchrun has started. Goes on from the latest
    checkpoint of the output folder.

    \b
    Example:
        seqloom train recipes/tiny-cpu.toml --ranks 4
        torchrun --nproc-per-node 4 -m seqloom train recipes/tiny-cpu.toml
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise SeqloomError(f"seqloom train needs torch ({error}); pip install 'seqloom[train,data]'") from None
    from seqloom.train.config import Config
    from seqloom.train.launch import started_by_torchrun, train_on_processes, train_under_torchrun

    loaded = Config.load(config, overrides or [])
    model_family = model_family_of(loaded)
    if started_by_torchrun():
        if ranks is not None:
            raise SeqloomError(f"--ranks {ranks} under torchrun, which has started the ranks; leave one of them out")
        summary = train_under_torchrun(loaded, model_family=model_family, show=not json)
    else:
        summary = train_on_processes(loaded, ranks or loaded.run.ranks, model_family=model_family, show=not json)
    if not summary:  # another rank than the first
        return
    if json:
        print_json(summary)
    else:
        _print_summary(summary, loaded.run.output)
        typer.echo(f"trained model: {loaded.run.output / 'model'}")


def model_family_of(config: Config) -> ModelFamily:
    """Return how the model that a config names is built and written."""
    from seqloom.train.model import REFERENCE

    if config.model.huggingface is None:
        return REFERENCE
    from seqloom.integrations.transformers.loading import HUGGINGFACE

    return HUGGINGFACE


def _print_summary(summary: dict[str, Any], output: Path) -> None:
    typer.echo(
        f"{summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}, "
        f"{summary['tokens_per_second'] or 0:,.0f} tokens/s"
    )
    typer.echo(f"checkpoints and metrics: {output}")
