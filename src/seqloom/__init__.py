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

    from seqloom.api import cost_model, lower_bound, plan, simulate
    from seqloom.cost import CostModel, Profile
    from seqloom.describe import Batch, Cluster, ModelSpec, drop_longer, lengths_from
    from seqloom.errors import PlanError, SeqloomError
    from seqloom.plan import Plan
    from seqloom.simulate import Simulation

__all__ = [
    "Batch",
    "Cluster",
    "CostModel",
    "ModelSpec",
    "Plan",
    "PlanError",
    "Profile",
    "SeqloomError",
    "Simulation",
    "__version__",
    "cost_model",
    "drop_longer",
    "lengths_from",
    "lower_bound",
    "plan",
    "simulate",
]

_HOMES = {
    "seqloom.api": ("cost_model", "lower_bound"),
    "seqloom.cost": ("CostModel", "Profile"),
    "seqloom.describe": ("Batch", "Cluster", "ModelSpec", "drop_longer", "lengths_from"),
    "seqloom.errors": ("PlanError", "SeqloomError"),
    "seqloom.plan": ("Plan",),
    "seqloom.simulate": ("Simulation",),
}
_VERBS = ("plan", "simulate")


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives."""
    if name in _VERBS:
        return import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names and what is loaded already."""
    return sorted({*globals(), *__all__})


class _Verb(ModuleType):
    """A subpackage that can be called: ``seqloom.plan`` holds the types, ``seqloom.plan(...)`` makes one."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(import_module("seqloom.api"), self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: it hears of its subpackages being loaded, and makes the verbs among them callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
