"""The ``seqloom`` command: a file per verb or pair of verbs, and one place that reports errors.

Verbs import what they need inside their functions, so that ``seqloom --help`` stays fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from seqloom.cli import (
    bench,
    check,
    compare,
    data,
    demo,
    doctor,
    export,
    plan,
    presets,
    profile,
    propose,
    schedule,
    train,
)
from seqloom.errors import SeqloomError
from seqloom.version import __version__

__all__ = ["app", "main"]

INTERRUPTED = 130
"""Exit code of typer after Ctrl-C, as shells have it."""


class _Verbs(TyperGroup):
    """The verbs, each with its whole first sentence in the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs; long lines are wrapped, not cut."""
        verbs = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(limit=1000)) for name, verb in verbs if verb])


app = typer.Typer(
    name="seqloom",
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"seqloom {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Decide how far each sequence of a batch is spread over the GPUs: lengths + cluster + model -> plan.

    \b
    Start here:
        seqloom demo
        seqloom plan --lengths wikipedia --cluster 8x8xH200 --model llama3-8b --view
    """


# In the order of the help.
for verb in (
    *(demo.demo, plan.plan, compare.compare, plan.simulate, propose.propose, schedule.schedule, profile.profile),
    *(check.check, train.train, train.verify, train.replay, export.export, doctor.doctor, bench.bench),
):
    app.command(verb.__name__)(verb)
app.command("list")(presets.list_presets)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; print a request that cannot be met as one message on stderr and exit with its code, 2.

    75 is the exit code of a run that was asked to leave, 130 that of a command that was interrupted.
    """
    code = SeqloomError.exit_code
    try:
        app(prog_name="seqloom")
        return
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            typer.echo("seqloom: interrupted", err=True)
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # threads may be deep in torch, which aborts a process that ends in the usual way
        raise
    except SeqloomError as error:
        message, code = str(error), error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        message = f"cannot use {str(error.filename)!r}: {error.strerror}; check the path and its permissions"
    typer.echo(f"seqloom: {message}", err=True)
    sys.exit(code)
