"""``seqloom doctor``: what is installed, and what would be chosen and why."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata
from typing import Any, NamedTuple

from seqloom.cli.shared import AsJson, ClusterName, print_json
from seqloom.errors import SeqloomError
from seqloom.version import __version__


class Extra(NamedTuple):
    """An optional dependency: the extra that brings it, its package, and what it is for."""

    extra: str
    package: str
    purpose: str


EXTRAS = (
    Extra("fast", "numba", "compiled planner loops"),
    Extra("exact", "highspy", "planners exact and flexsp"),
    Extra("data", "pyarrow", "token stores, lengths from .parquet"),
    Extra("train", "torch", "running plans"),
    Extra("gpu", "cudnn", "fastest attention on Hopper and later"),
    Extra("hf", "transformers", "Hugging Face models"),
)


class Finding(NamedTuple):
    """What a probe for one package found: a version, or the reason why there is none."""

    version: str | None
    problem: str | None

    @property
    def available(self) -> bool:
        """Whether the package can be used."""
        return self.version is not None


def doctor(cluster: ClusterName = "8x8xH100", json: AsJson = False) -> None:
    """Say what is installed, and what would be chosen and why.

    \b
    Example:
        seqloom doctor --cluster 8x8xH200
    """
    report = examine(cluster)
    if json:
        print_json(report)
    else:
        _print_report(report)


def examine(cluster: str) -> dict[str, Any]:
    """Collect the report: versions, extras, GPUs, choices."""
    found = {extra.package: probe(extra.package) for extra in EXTRAS}
    return {
        "versions": {
            "seqloom": __version__,
            "python": platform.python_version(),
            "numpy": metadata.version("numpy"),
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "extras": {
            extra.extra: {
                "package": extra.package,
                "purpose": extra.purpose,
                "version": found[extra.package].version,
                "problem": found[extra.package].problem,
            }
            for extra in EXTRAS
        },
        "gpus": _gpus() if found["torch"].available else [],
        "choices": {
            "planner loops": _planner_loops(found["numba"]),
            "exact solver": _exact_solver(found["highspy"]),
            "profile": _profile(cluster),
            "torch operators": _torch_operators(found["torch"]),
            "attention": _attention(found["torch"]),
            "GPU allocator": _allocator(),
        },
    }


def probe(package: str) -> Finding:
    """Import a package and return its version, or what went wrong; a broken install counts as absent."""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = error.name or package
        return Finding(None, "not installed" if missing == package else f"broken: needs {missing}")
    except Exception as error:  # whatever a broken binary raises at import must not stop the report
        return Finding(None, f"broken: {type(error).__name__}: {error}")
    try:
        return Finding(metadata.version(package), None)
    except metadata.PackageNotFoundError:
        return Finding(str(getattr(module, "__version__", "unknown")), None)


def _gpus() -> list[dict[str, Any]]:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)} for device in devices]


def _choice(choice: str | None, why: str) -> dict[str, str | None]:
    return {"choice": choice, "why": why}


def _install(extra: str) -> str:
    return f"pip install 'seqloom[{extra}]'"


def _planner_loops(numba: Finding) -> dict[str, str | None]:
    if numba.available:
        return _choice("compiled", f"numba {numba.version} is here; same plans as the plain loops")
    return _choice("plain", f"numba {numba.problem}; same plans, slower: {_install('fast')}")


def _exact_solver(highspy: Finding) -> dict[str, str | None]:
    if highspy.available:
        return _choice("highs", f"highspy {highspy.version} is here")
    return _choice(None, f"highspy {highspy.problem}; planners exact and flexsp need {_install('exact')}")


def _torch_operators(torch: Finding) -> dict[str, str | None]:
    if not torch.available:
        return _choice(None, f"torch {torch.problem}; running plans needs {_install('train')}")
    from seqloom.compat import check_operators

    try:
        check_operators()
    except SeqloomError as error:
        return _choice(None, str(error))
    return _choice("as expected", f"torch {torch.version} has the private operators that kernels call")


def _attention(torch: Finding) -> dict[str, str | None]:
    if not torch.available:
        return _choice(None, f"torch {torch.problem}; running plans needs {_install('train')}")
    from torch import cuda, device

    from seqloom.attention.kernels.dispatch import available_kernels, unavailable_kernels

    place = device("cuda", 0) if cuda.is_available() else device("cpu")
    names = [kernel.capabilities.name for kernel in available_kernels(place)]
    absent = "; ".join(f"{name}: {why}" for name, why in unavailable_kernels(place).items())
    return _choice(
        ", ".join(names), f"kernels for {place.type}, in order of preference" + (f"; {absent}" if absent else "")
    )


def _allocator() -> dict[str, str | None]:
    from seqloom.train.launch import ALLOCATOR_SETTING, ALLOCATOR_VARIABLES, user_allocator_setting

    own = user_allocator_setting()
    if own is not None:
        return _choice(own, "set by the environment; left as it is")
    why = f"given to the processes that seqloom train starts; under torchrun set {ALLOCATOR_VARIABLES[0]} yourself"
    return _choice(ALLOCATOR_SETTING, why)


def _profile(cluster: str) -> dict[str, str | None]:
    from seqloom.cost import Profile
    from seqloom.describe import Cluster

    device = Cluster.parse(cluster).device.name
    try:
        profile = Profile.for_device(device)
    except SeqloomError as error:
        return _choice(None, str(error))
    return _choice(profile.name, f"lists the device {device} of {cluster}; --profile NAME overrides it")


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print("  ".join(f"{name} {value}" for name, value in report["versions"].items()))
    extras = Table("extra", "package", "version", "for", title="Extras", title_justify="left", box=None)
    for name, row in report["extras"].items():
        version = row["version"] or f"- ({row['problem']})"
        extras.add_row(*map(escape, (name, row["package"], version, row["purpose"])))
    choices = Table("what", "choice", "why", title="Choices", title_justify="left", box=None)
    for name, row in report["choices"].items():
        choices.add_row(*map(escape, (name, row["choice"] or "-", row["why"])))
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in report["gpus"])
    console.print()
    console.print(extras)
    console.print()
    console.print(choices)
    console.print()
    console.print(f"GPUs: {gpus or 'none seen; planning, simulating and viewing need none'}")
