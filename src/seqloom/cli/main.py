"""The ``seqloom`` command: a list of verbs, and one way to report an error.

Verbs import what they need inside their functions, so that ``seqloom --help`` stays fast.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from seqloom.cli import check, compare, data, demo, doctor, plan, profile, propose, schedule, simulate, train, verify
from seqloom.errors import SeqloomError
from seqloom.version import __version__

app = typer.Typer(
    name="seqloom",
    no_args_is_help=True,
    add_completion=False,
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


# One line per verb, in the order of the help.
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("simulate")(simulate.simulate)
app.command("propose")(propose.propose)
app.command("schedule")(schedule.schedule)
app.command("profile")(profile.profile)
app.add_typer(data.app, name="data")
app.command("check")(check.check)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line; a request that cannot be met is one message on stderr and exit code 2."""
    try:
        app(prog_name="seqloom")
    except SeqloomError as error:
        _refuse(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"cannot use {str(error.filename)!r}: {error.strerror}; check the path and its permissions")


def _refuse(message: str) -> None:
    typer.echo(f"seqloom: {message}", err=True)
    sys.exit(2)
