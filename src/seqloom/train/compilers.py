"""What torch.compile needs on a machine, looked for before a run starts. Nothing here needs torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from seqloom.errors import SeqloomError

CPP = {"darwin": "clang++", "win32": "cl"}
"""The C++ compiler that torch calls on a platform; g++ on others. The variable CXX names another."""


def check_compilers(device: str) -> None:
    """Refuse `model.compile` on a machine where torch.compile would fail in the first step.

    Args:
        device: "cpu", where torch writes C++, or "cuda", where it writes Triton, which builds its launchers in C.
    """
    missing = _missing_for_gpu() if device == "cuda" else _missing_for_cpu()
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python.h (the development files of this Python)")
    if missing:
        raise SeqloomError(
            f"model.compile = true, and torch.compile needs what is not here: {', '.join(missing)}; install it, or "
            "set model.compile = false"
        )


def _missing_for_cpu() -> list[str]:
    name = os.environ.get("CXX", CPP.get(sys.platform, "g++"))
    return [] if shutil.which(name) else [f"the C++ compiler {name!r}"]


def _missing_for_gpu() -> list[str]:
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    compiler = [] if any(map(shutil.which, names)) else [f"a C compiler ({' or '.join(map(repr, names))})"]
    return compiler if find_spec("triton") else ["triton", *compiler]
