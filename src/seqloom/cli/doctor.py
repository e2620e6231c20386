"""``seqloom doctor``: what is installed, and what Seqloom would choose here and why."""

from __future__ import annotations

import importlib
import platform
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from seqloom.cli import shared
from seqloom.errors import SeqloomError
from seqloom.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


class Extra(NamedTuple):
    """An optional dependency."""

    extra: str  # that brings it
    package: str
    purpose: str
    module: str = ""  # that is imported, where it is not named as the package


EXTRAS = (
    Extra("exact", "highspy", "planners exact and flexsp"),
    Extra("data", "pyarrow", "token stores, lengths from .parquet"),
    Extra("train", "torch", "running plans"),
    Extra("gpu", "flash-attn-4", "fastest attention on Hopper and later", "flash_attn.cute"),
    Extra("hf", "transformers", "Hugging Face models"),
)


class Package(NamedTuple):
    """Version of an installed package, or the reason why it cannot be used."""

    version: str | None
    problem: str | None


Choice = tuple[str | None, str]
"""What is chosen (None: nothing can be) and why."""


def doctor(cluster: shared.Cluster = "8x8xH100", json: shared.AsJson = False) -> None:
    """Say what is installed, and what would be chosen and why.

    \b
    Example:
        seqloom doctor --cluster 8x8xH200
    """
    report = examine(cluster)
    shared.report(json, lambda: report, lambda console: _draw(console, report))


def examine(cluster: str) -> dict[str, Any]:
    """Return versions, extras, GPUs and choices, by JSON keys."""
    packages = {extra.package: probe(extra.package, extra.module) for extra in EXTRAS} | {"numba": probe("numba")}
    return {
        "versions": {
            "seqloom": __version__,
            "python": platform.python_version(),
            "numpy": metadata.version("numpy"),
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "extras": {
            extra.extra: {"package": extra.package, "purpose": extra.purpose, **packages[extra.package]._asdict()}
            for extra in EXTRAS
        },
        "gpus": _gpus() if packages["torch"].version else [],
        "choices": {what: {"choice": choice, "why": why} for what, (choice, why) in _choices(packages, cluster)},
    }


def probe(package: str, name: str = "") -> Package:
    """Import a package, or its module `name`; return its version, or what went wrong: a broken one counts as absent."""
    name = name or package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries have to say about each other
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = error.name is None or name == error.name or name.startswith(f"{error.name}.")
        return Package(None, "not installed" if absent else f"broken: needs {error.name}")
    except Exception as error:  # whatever a broken binary raises at import must not stop the report
        return Package(None, f"broken: {type(error).__name__}: {error}")
    try:
        return Package(metadata.version(package), None)
    except metadata.PackageNotFoundError:
        return Package(str(getattr(module, "__version__", "unknown")), None)


def _gpus() -> list[dict[str, Any]]:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)} for device in devices]


def _choices(packages: dict[str, Package], cluster: str) -> Iterator[tuple[str, Choice]]:
    numba, highspy, torch = packages["numba"], packages["highspy"], packages["torch"]
    compiled = "compiled", f"numba {numba.version} is here; same plans as the plain loops"
    plain = "plain", f"numba {numba.problem}; same plans, many times slower: pip install numba"
    yield "planner loops", compiled if numba.version else plain
    no_solver = None, f"highspy {highspy.problem}; planners exact and flexsp need pip install 'seqloom[exact]'"
    yield "exact solver", ("highs", f"highspy {highspy.version} is here") if highspy.version else no_solver
    yield "profile", _profile(cluster)
    no_torch = None, f"torch {torch.problem}; running plans needs pip install 'seqloom[train]'"
    yield "torch operators", _torch_operators(torch.version) if torch.version else no_torch
    yield "attention", _attention_kernels() if torch.version else no_torch
    yield "GPU allocator", _allocator()


def _torch_operators(version: str) -> Choice:
    from seqloom.compat import check_operators

    try:
        check_operators()
    except SeqloomError as error:
        return None, str(error)
    return "as expected", f"torch {version} has the private operators that kernels call"


def _attention_kernels() -> Choice:
    from torch import cuda, device

    from seqloom.attention.kernels.dispatch import available_kernels, unavailable_kernels

    place = device("cuda", 0) if cuda.is_available() else device("cpu")
    names = ", ".join(kernel.capabilities.name for kernel in available_kernels(place))
    absent = "".join(f"; {name}: {why}" for name, why in unavailable_kernels(place).items())
    return names, f"kernels for {place.type}, in order of preference{absent}"


def _allocator() -> Choice:
    from seqloom.train.fork_server import ALLOCATOR_SETTING, ALLOCATOR_VARIABLES, user_allocator_setting

    environment = user_allocator_setting()
    if environment is not None:
        return environment, "set by the environment; left as it is"
    why = f"given to the processes that seqloom train starts; under torchrun set {ALLOCATOR_VARIABLES[0]} yourself"
    return ALLOCATOR_SETTING, why


def _profile(cluster: str) -> Choice:
    from seqloom.cost import Profile
    from seqloom.describe import Cluster

    device = Cluster.parse(cluster).device.name
    try:
        profile = Profile.for_device(device)
    except SeqloomError as error:
        return None, str(error)
    return profile.name, f"lists the device {device} of {cluster}; --profile NAME overrides it"


def _draw(console: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    extras = Table("extra", "package", "version", "for", title="Extras", title_justify="left", box=None)
    for name, row in report["extras"].items():
        version = row["version"] or f"- ({row['problem']})"
        extras.add_row(*map(escape, (name, row["package"], version, row["purpose"])))
    choices = Table("what", "choice", "why", title="Choices", title_justify="left", box=None)
    for name, row in report["choices"].items():
        choices.add_row(*map(escape, (name, row["choice"] or "-", row["why"])))
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in report["gpus"])
    versions = "  ".join(f"{name} {value}" for name, value in report["versions"].items())
    last = f"GPUs: {gpus or 'none seen; planning, simulating and viewing need none'}"
    for part in (versions, "", extras, "", choices, "", last):
        console.print(part)
