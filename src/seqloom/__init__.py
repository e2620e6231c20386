"""Seqloom: lengths + cluster + model -> Plan -> simulate, view, run.

    import seqloom as sl

    plan = sl.plan(lengths, cluster="8x8xH200", model="llama3-8b")
    plan.validate()
    simulation = sl.simulate(plan)

Public names are loaded when they are first used, so ``import seqloom`` costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seqloom.version import __version__

if TYPE_CHECKING:  # what a type checker and an editor see
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

_NAMES = {
    "api": ("Evaluation", "cost_model", "evaluate", "lower_bound", "plan", "simulate"),
    "cost": ("CostModel", "Profile"),
    "describe": ("Batch", "Cluster", "ModelSpec", "drop_longer", "lengths_from"),
    "errors": ("PlanError", "SeqloomError"),
    "plan": ("Plan",),
    "simulate": ("Simulation",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"seqloom.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """List public names."""
    return sorted(__all__)


class _Package(ModuleType):
    """This package, whose functions `plan` and `simulate` keep their names when packages of these names are loaded.

    Importing a package sets it as an attribute of its parent; ``from seqloom.plan import ...`` does not need that.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _MODULE_OF.get(name) == "api"):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
