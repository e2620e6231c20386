"""``seqloom list``: the names that other verbs take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from seqloom.cli import shared
from seqloom.errors import unknown_name

if TYPE_CHECKING:
    from rich.console import Console

Rows = dict[str, dict[str, Any]]
"""Name -> what there is to say about it, by JSON keys."""
WIDE = 150
"""Columns of a terminal that has room for sources beside figures."""


def list_presets(
    kind: Annotated[str | None, Argument(help="models, clusters, devices, samplers, profiles or planners.")] = None,
    json: shared.AsJson = False,
) -> None:
    """List models, clusters, devices, samplers, profiles, planners.

    Files take the place of names: see the options of ``seqloom plan``.

    \b
    Example:
        seqloom list models
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of names", kind, KINDS)
    found = {name: KINDS[name]() for name in (KINDS if kind is None else (kind,))}
    shared.report(json, lambda: found, lambda console: _draw(console, found))


def _models() -> Rows:
    from seqloom.describe import MODELS

    return {
        name: {
            "parameters_b": round(model.parameters() / 1e9, 2),
            "active_b": round(model.active_parameters / 1e9, 2),
            "layers": model.layers,
            "heads": f"{model.heads}/{model.kv_heads}",
        }
        for name, model in MODELS.items()
    }


def _clusters() -> Rows:
    from seqloom.describe import CLUSTERS

    return {name: {"spelling": cluster.spelling, "gpus": cluster.ranks} for name, cluster in CLUSTERS.items()}


def _devices() -> Rows:
    from seqloom.describe import DEVICES

    return {
        name: {
            "memory_gib": preset.device.memory_gib,
            "peak_tflops": preset.device.peak_tflops,
            "hbm_gb_s": preset.device.hbm_gb_s,
            "inside_a_node": f"{preset.intra.name}, {preset.intra.gb_s:g} GB/s",
            "between_nodes": preset.nic.name,
            "gpus_per_nic": preset.gpus_per_nic,
            "source": preset.source,
        }
        for name, preset in DEVICES.items()
    }


def _samplers() -> Rows:
    from seqloom.describe import SAMPLERS

    return {name: {"origin": sampler.note} for name, sampler in SAMPLERS.items()}


def _profiles() -> Rows:
    from seqloom.cost import Profile

    profiles = {name: Profile.load(name) for name in Profile.names()}
    return {
        name: {"devices": ", ".join(profile.known_devices), "source": profile.sources.get("matmul_tflops", "published")}
        for name, profile in profiles.items()
    }


def _planners() -> Rows:
    from seqloom.planners.registry import PLANNERS

    kinds = {True: "published, to compare with", False: ""}
    return {
        name: {"option": f"{name}:N sets {spec.option}" if spec.option else "", "kind": kinds[spec.rival]}
        for name, spec in PLANNERS.items()
    }


KINDS: dict[str, Callable[[], Rows]] = {
    "models": _models,
    "clusters": _clusters,
    "devices": _devices,
    "samplers": _samplers,
    "profiles": _profiles,
    "planners": _planners,
}


def _draw(console: Console, found: dict[str, Rows]) -> None:
    """Draw a table per kind; sources have a column where there is room, else lines below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for kind, rows in found.items():
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(kind, no_wrap=True)
        columns = next(iter(rows.values()))
        below = "source" in columns and console.width < WIDE
        shown = {name: value for name, value in columns.items() if not (below and name == "source")}
        for column, value in shown.items():
            justify = "left" if isinstance(value, str) else "right"
            table.add_column(column.replace("_", " "), justify=justify, overflow="fold")
        for name, row in rows.items():
            table.add_row(name, *(Text(str(row[column])) for column in shown))
        console.print(table)
        if below:
            shared.print_lines(console, "Sources:", *(f"  {name}: {row['source']}" for name, row in rows.items()))
