"""Seqloom: lengths + cluster + model -> Plan -> simulate, view, run.

    import seqloom as sl

    plan = sl.plan(lengths, cluster="8x8xH200", model="llama3-8b")
    plan.validate()
    simulation = sl.simulate(plan, cluster="8x8xH200", model="llama3-8b")

Public names are loaded when they are first used, so ``import seqloom`` costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seqloom.version import __version__

if TYPE_CHECKING:  # what a type checker and an editor see
    from inspect import Signature

    from seqloom.api import Evaluation, cost_model, evaluate, lower_bound, plan, simulate
    from seqloom.cost import CostModel, Profile
    from seqloom.describe import Batch, Cluster, ModelSpec, drop_longer, lengths_from
    from seqloom.errors import PlanError, SeqloomError
    from seqloom.plan import Plan
    from seqloom.simulate import Simulation

__all__ = [
    "Batch",
    "Cluster",
    "CostModel",
    "Evaluation",
    "ModelSpec",
    "Plan",
    "PlanError",
    "Profile",
    "SeqloomError",
    "Simulation",
    "__version__",
    "cost_model",
    "drop_longer",
    "evaluate",
    "lengths_from",
    "lower_bound",
    "plan",
    "simulate",
]

_MODULES = ("errors", "describe", "plan", "cost", "simulate", "api")
_CALLABLE = ("plan", "simulate")


def __getattr__(name: str) -> Any:
    """Import a public name from the first module that has it."""
    if name in _CALLABLE:
        return import_module(f"seqloom.{name}")
    for module in map(import_module, (f"seqloom.{each}" for each in _MODULES)) if name in __all__ else ():
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List public names."""
    return sorted(__all__)


class _CallableModule(ModuleType):
    """A subpackage that can be called: ``seqloom.plan`` holds the types, ``seqloom.plan(...)`` makes a plan."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    @property
    def __doc__(self) -> str:  # what `help` begins with  # pyrefly: ignore[bad-override]
        from inspect import getdoc

        call = f"{self.__name__}{self.__signature__}"
        return f"{getdoc(self._function)}\n\n{call}\n\nThe package of this name: {self.__dict__['__doc__']}"

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(import_module("seqloom.api"), self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: makes some of its subpackages callable when they are loaded."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
