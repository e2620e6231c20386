"""A result as a JSON file: the figures, and where, when and with what they were measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Check, source_name


def write(
    out: Path | None,
    script: str,
    arguments: argparse.Namespace,
    figures: dict[str, Any],
    checks: Sequence[Check],
    *,
    gpu: bool = True,
    lengths: str | None = None,
) -> None:
    """Write the figures with what is needed to judge and repeat them.

    Args:
        gpu: whether a GPU was used, if there is one.
        lengths: what was drawn from; None: what the option `--lengths` says.
    """
    if out is None:
        return
    result = {
        "benchmark": Path(script).parent.name if Path(script).stem == "run" else Path(script).stem,
        "command": _command(script, arguments),
        "lengths": lengths or source_name(arguments.lengths),
        "quick": getattr(arguments, "quick", False),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": getattr(arguments, "commit", None) or commit(),
        "hardware": hardware(gpu),
        "libraries": libraries(),
        "install": "fast" if libraries()["numba"] else "base",
        "targets": [asdict(check) | {"passed": check.passed} for check in checks],
        "figures": figures,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, default=float) + "\n")
    part.replace(out)


def _command(script: str, arguments: argparse.Namespace) -> str:
    """The command line without folders of this machine."""
    words = ["python", Path(script).resolve().relative_to(Path(__file__).resolve().parents[1]).as_posix()]
    for name, value in vars(arguments).items():
        if value is None or value is False or name == "commit":
            continue
        for each in value if isinstance(value, list) else [value]:
            words.append("--" + name.replace("_", "-"))
            if name == "out":
                words.append(f"benchmarks/results/{each.name}")
            elif each is not True:
                words.append(Path(each).name if name == "lengths" else str(each))
    return shlex.join(words)


def hardware(gpu: bool = True) -> str:
    """The GPU's name; without one, or where it was not used, cores, kind of processor and memory, in words."""
    try:
        model = Path("/proc/cpuinfo").read_text()
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        model, memory = platform.processor(), ""
    if gpu and has_gpu():
        import torch

        return torch.cuda.get_device_name()
    server = "server " if any(name in model for name in ("EPYC", "Xeon", "Neoverse")) else ""
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} {server}CPU{memory}"


@cache
def has_gpu() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def require_gpu() -> None:
    """Exit with a message unless torch sees a CUDA device."""
    if not has_gpu():
        raise SystemExit("this benchmark needs torch and a CUDA device")


@cache
def commit() -> str:
    """The commit at the first call; says so if the library's sources differ from it."""
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--", "src"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (", with changes in src" if changed else "")


def libraries() -> dict[str, str | None]:
    """Versions of what plans are made with; None where a library is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("numpy", "numba", "highspy", *(("torch", "triton", "flash-attn-4") if has_gpu() else ())):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
