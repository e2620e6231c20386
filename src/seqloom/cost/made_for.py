"""What a plan was made for: cluster, model, profile and limits, as plan files carry them (``made_for``).

Each is there with its content, in the form of its own kind of file, so that a plan file alone can be simulated,
whatever later presets of the same names say.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from seqloom.cost.memory import GIB
from seqloom.cost.profile import AdditiveProfile, AnalyticProfile, profile_content, read_profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.reader import build, read_bool, read_integer, read_object, refuse

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel
    from seqloom.plan import Plan

_KEYS = ("cluster", "model", "profile")


@dataclass(frozen=True, slots=True)
class MadeFor:
    """Cluster, model and profile of a plan, and the options of `seqloom.cost_model` that differ from their defaults."""

    cluster: Cluster
    model: ModelSpec
    profile: AdditiveProfile | AnalyticProfile
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cost: CostModel) -> MadeFor:
        """What plans of this cost model are made for."""
        whole = cost.cluster_cost
        options = {
            "budget_gib": whole.budget_bytes / GIB,
            "max_length": None if whole.max_length is None else int(whole.max_length),
            "float8": whole.float8 or None,
            "offload_optimiser": whole.offload_optimiser or None,
            "host_gib": None if whole.host_bytes is None else whole.host_bytes / GIB,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return cls(whole.cluster, whole.model, whole.profile, given)

    @classmethod
    def read(cls, plan: Plan) -> MadeFor | None:
        """What a plan says of itself; None: nothing, as in files of earlier versions."""
        if plan.made_for is None:
            return None
        where = "made_for of the plan"
        content = read_object(plan.made_for, where, _KEYS, tuple(_OPTIONS))
        cluster, model = content["cluster"], content["model"]
        return cls(
            build(Cluster, _mapping(cluster, f"{where}.cluster"), f"{where}.cluster"),
            build(ModelSpec, _mapping(model, f"{where}.model"), f"{where}.model"),
            read_profile(content["profile"], f"{where}.profile"),
            {name: read(content[name], f"{where}.{name}") for name, read in _OPTIONS.items() if name in content},
        )

    def on(self, plan: Plan) -> Plan:
        """The plan, with this in its files. Its hash stays: it is that of the content."""
        content = {"cluster": _short(self.cluster), "model": _short(self.model)}
        content |= {"profile": profile_content(self.profile)} | self.options
        return replace(plan, made_for=json.loads(json.dumps(content)))  # as a file has it: lists, keys that are strings

    def differences(self, cost: CostModel) -> list[str]:
        """Say in what a cost model is not that of the plan, one line per part."""
        other, lines = MadeFor.of(cost), []
        for part in _KEYS:
            mine, its = getattr(self, part), getattr(other, part)
            if mine != its:
                name = f"another {part} of this name" if mine.name == its.name else f"{part} {its.name}"
                lines.append(f"made for {part} {mine.name}, here it is {name}")
        for option in _OPTIONS:
            mine, its = self.options.get(option), other.options.get(option)
            if mine != its:
                lines.append(f"made with {option} {mine or 'not given'}, here it is {its or 'not given'}")
        return lines

    def elsewhere(self, cluster: Cluster) -> dict[str, Any]:
        """Options that hold on another cluster, too: those of the model and the run, not of memory."""
        same = cluster == self.cluster
        return {name: value for name, value in self.options.items() if same or name not in ("budget_gib", "host_gib")}


def _short(value: Cluster | ModelSpec) -> dict[str, Any]:
    """Return the fields that differ from their defaults, by name."""
    content = asdict(value)
    usual = {each.name: each.default for each in fields(value) if each.default is not MISSING}
    return {name: each for name, each in content.items() if name not in usual or getattr(value, name) != usual[name]}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else refuse(value, where, "a JSON object")


def _gib(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SeqloomError(f"{where} is {value!r}; give a number of GiB above 0")
    return value


_OPTIONS = {
    "budget_gib": _gib,
    "max_length": read_integer,
    "float8": read_bool,
    "offload_optimiser": read_bool,
    "host_gib": _gib,
}
