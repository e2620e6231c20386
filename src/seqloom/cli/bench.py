"""``seqloom bench``: the papers' tables, published beside simulated and ours; the scripts are those of a checkout."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
COLUMNS = ("published", "simulated", "difference", "ours")
ORIGIN = ("command", "quick", "lengths", "date", "commit", "hardware")
"""Keys of a script's result that say how its figures came about."""


def bench(
    table: Annotated[
        str | None, Option(help="One of those that the verb lists; without it, --quick and --committed print all.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="The smallest run of each script: three minutes for all.")] = False,
    committed: Annotated[bool, Option("--committed", help="Print the committed results; run nothing.")] = False,
    json: shared.AsJson = False,
) -> None:
    """Print the papers' tables, every published figure beside the simulated one and ours; alone, list them.

    "Simulated" is the published algorithm under our cost model; nothing is fitted to a cell, and misses are marked.

    \b
    Example:
        seqloom bench --table usp
    """
    if quick and committed:
        raise SeqloomError("--quick runs scripts and --committed runs none; give one of them")
    tables = load_tables()
    if table is not None and table not in tables:
        raise unknown_name("table", table, tables)
    if table is None and not (quick or committed):
        rows = {name: {"about": each.about, "script": f"benchmarks/{each.script}.py"} for name, each in tables.items()}
        shared.report(json, lambda: {"tables": rows}, lambda console: _draw_list(console, rows))
        return
    names = list(tables) if table is None else [table]
    found = {name: printed(tables[name], quick=quick, committed=committed) for name in names}
    shared.report(json, lambda: {"tables": found}, lambda console: _draw(console, found))


def load_tables(folder: Path = SCRIPTS) -> dict[str, Any]:
    """Import ``paper_tables.TABLES`` from the checkout's benchmarks; refused where there are none."""
    if not (folder / "paper_tables.py").is_file():
        raise SeqloomError(
            "seqloom bench runs the scripts in the folder benchmarks of a source checkout, and seqloom is installed "
            "without one; in a checkout, pip install -e . and ask again"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # scripts import one another by bare names
    return import_module("paper_tables").TABLES


def printed(table: Any, *, quick: bool, committed: bool) -> dict[str, Any]:
    """Return a table's figures and how they came about, by JSON keys."""
    result = table.result(quick=quick, committed=committed)
    rows = [
        {**each._asdict(), "difference": each.difference, "validated": _validated(each.difference, table.close)}
        for each in table.read(result["figures"])
    ]
    return {"about": table.about, **{key: result[key] for key in ORIGIN}, "close": table.close, "figures": rows}


def _validated(difference: float | None, close: float) -> bool | None:
    return None if difference is None else abs(difference) <= close


def _draw_list(console: Console, listed: dict[str, dict[str, str]]) -> None:
    from rich.table import Table

    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("table", "what", "script"):
        grid.add_column(column)
    for name, row in listed.items():
        grid.add_row(name, row["about"], Path(row["script"]).name)
    console.print(grid)
    shared.print_lines(
        console, "", "seqloom bench --table NAME runs one, --quick all of them in small, --committed runs nothing."
    )


def _draw(console: Console, found: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    for name, table in found.items():
        title = f"{name}: {table['about']}"
        grid = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
        grid.add_column("", overflow="fold")
        for column in (*COLUMNS, ""):
            grid.add_column(column, justify="right", no_wrap=True)
        for row in table["figures"]:
            cells = [_number(row["published"]), _number(row["simulated"]), _share(row["difference"])]
            grid.add_row(row["what"], *cells, _number(row["ours"]), "miss" if row["validated"] is False else "")
        console.print(grid)
        rows = [row["validated"] for row in table["figures"] if row["validated"] is not None]
        shared.print_lines(
            console,
            f"{sum(rows)} of {len(rows)} within {table['close']:.0%} of the published figure; a miss is off by more.",
            f"{table['command']}: {table['date']}, commit {table['commit']}, {table['hardware']}"
            + ("; the smallest run, no evidence." if table["quick"] else "."),
            "",
        )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"
