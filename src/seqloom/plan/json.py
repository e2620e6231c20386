"""A plan as JSON, and its hash.

    {"format": "seqloom.plan", "version": 1, "planner": "flex", "limits": {...},
     "sharding": "full", "reduce": "round", "documents": [5120, 512, ...],
     "pipelines": [{"stages": [{"ranks": [0, 1], "layers": [0, 32], "tensor": 1}],
                    "rounds": [[{"checkpoint": "full", "attention": null, "linear": null, "remap": "attention",
                                 "groups": [{"ranks": [0, 1], "ulysses": 2, "ring": 1, "method": "ring",
                                             "route": null, "spans": [[0, 0, 5120]]}]}]],
                    "actions": ["0F0 0B0 0REDUCE"]}]}

A round whose activations are offloaded to CPU memory has `"offload": true` beside its checkpoint. `actions` has one
row per pipeline rank: the distinct `ranks` of the stages, in the order in which these name them. Reading is strict, see
`seqloom.reader`.
"""

from __future__ import annotations

import hashlib
import json
import operator
from typing import Any

import numpy as np

from seqloom.errors import PlanError, SeqloomError
from seqloom.layout.layout import Layout, Span
from seqloom.layout.route import Route
from seqloom.plan.action import Action
from seqloom.plan.limits import Limits, Reduce, Sharding
from seqloom.plan.pipeline import Pipeline, Stage
from seqloom.plan.plan import Plan
from seqloom.plan.round import Checkpoint, Group, Method, Remap, Round, StageMicroBatch
from seqloom.reader import (
    parse_json,
    read_bool,
    read_choice,
    read_integer,
    read_integers,
    read_list,
    read_object,
    read_string,
    refuse,
)

FORMAT = "seqloom.plan"
VERSION = 1
KEYS_OF_LIMITS = {"pad_multiple": "granule"}
"""Attributes of `Limits` that have another name in files."""


def to_json(plan: Plan) -> str:
    """Write canonical JSON: one line, sorted keys, no blanks."""
    return _dump({"format": FORMAT, "version": VERSION, "planner": plan.planner, **_content(plan)})


def content_hash(plan: Plan) -> str:
    """Hash the canonical JSON without the planner's name."""
    return hashlib.sha256(_dump({"format": FORMAT, "version": VERSION, **_content(plan)}).encode()).hexdigest()


def _dump(value: dict[str, Any]) -> str:
    # operator.index: numpy integers are written as integers; anything else that is no JSON value fails.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=operator.index, ensure_ascii=False)


def _content(plan: Plan) -> dict[str, Any]:
    limits = plan.limits
    return {
        "limits": {KEYS_OF_LIMITS.get(name, name): getattr(limits, name) for name in limits.__slots__},
        "sharding": plan.sharding,
        "reduce": plan.reduce,
        "documents": plan.documents,
        "pipelines": [_pipeline(pipeline) for pipeline in plan.pipelines],
    }


def _pipeline(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "stages": [{"ranks": s.ranks, "layers": s.layers, "tensor": s.tensor} for s in pipeline.stages],
        "rounds": [[_work(work) for work in current.by_stage] for current in pipeline.rounds],
        "actions": [" ".join(map(str, row)) for row in pipeline.actions],
    }


def _work(work: StageMicroBatch) -> dict[str, Any]:
    fields = {
        "checkpoint": work.checkpoint,
        "groups": [_group(group) for group in work.groups],
        "attention": _layout(work.attention),
        "linear": _layout(work.linear),
        "remap": work.remap,
    }
    return fields | {"offload": True} if work.offload else fields


def _group(group: Group) -> dict[str, Any]:
    route = group.route
    return {
        "ranks": group.ranks,
        "ulysses": group.ulysses,
        "ring": group.ring,
        "method": group.method,
        "route": None if route is None else {"proxies": route.proxies, "slices": route.slices},
        "spans": group.spans,
    }


def _layout(layout: Layout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {name: column.tolist() for name, column in zip(layout.__slots__, layout.columns(), strict=False)}


def from_json(text: str) -> Plan:
    """Read what `to_json` wrote."""
    try:
        return _read_plan(parse_json(text, "the file"))
    except SeqloomError as error:
        raise PlanError(f"plan file: {error}", rule="format") from None


def _read_plan(value: Any) -> Plan:
    keys = ("format", "version", "planner", "limits", "sharding", "reduce", "documents", "pipelines")
    fields = read_object(value, "the file", keys)
    if fields["format"] != FORMAT:
        raise SeqloomError(f"format is {fields['format']!r}; a plan file has {FORMAT!r}")
    if fields["version"] != VERSION or type(fields["version"]) is not int:
        raise SeqloomError(f"version is {fields['version']!r}; this release reads version {VERSION}")
    return Plan(
        limits=_read_limits(fields["limits"], "limits"),
        sharding=read_choice(fields["sharding"], "sharding", Sharding),
        reduce=read_choice(fields["reduce"], "reduce", Reduce),
        documents=read_integers(fields["documents"], "documents"),
        pipelines=read_list(fields["pipelines"], "pipelines", _read_pipeline),
        planner=read_string(fields["planner"], "planner"),
    )


def _read_limits(value: Any, where: str) -> Limits:
    keys = {KEYS_OF_LIMITS.get(name, name): name for name in Limits.__slots__}
    fields = read_object(value, where, keys)
    capacity = read_list(fields.pop("capacity"), f"{where}.capacity", _read_capacity)
    numbers = {keys[key]: read_integer(number, f"{where}.{key}") for key, number in fields.items()}
    return Limits(capacity=capacity, **numbers)


def _read_capacity(value: Any, where: str) -> tuple[Checkpoint, int]:
    if not isinstance(value, list) or len(value) != 2:
        refuse(value, where, "[checkpoint, tokens]")
    return read_choice(value[0], where, Checkpoint), read_integer(value[1], where)


def _read_pipeline(value: Any, where: str) -> Pipeline:
    fields = read_object(value, where, ("stages", "rounds", "actions"))
    return Pipeline(
        stages=read_list(fields["stages"], f"{where}.stages", _read_stage),
        rounds=read_list(fields["rounds"], f"{where}.rounds", _read_round),
        actions=read_list(fields["actions"], f"{where}.actions", _read_row),
    )


def _read_stage(value: Any, where: str) -> Stage:
    fields = read_object(value, where, ("ranks", "layers", "tensor"))
    layers = read_integers(fields["layers"], f"{where}.layers")
    if len(layers) != 2:
        refuse(fields["layers"], f"{where}.layers", "[first, one past the last]")
    tensor = read_integer(fields["tensor"], f"{where}.tensor")
    return Stage(read_integers(fields["ranks"], f"{where}.ranks"), (layers[0], layers[1]), tensor)


def _read_row(value: Any, where: str) -> tuple[Action, ...]:
    words = read_string(value, where).split()
    try:
        return tuple(map(Action.parse, words))
    except PlanError as error:
        raise SeqloomError(f"{where}: {error}") from None


def _read_round(value: Any, where: str) -> Round:
    return Round(read_list(value, where, _read_work))


def _read_work(value: Any, where: str) -> StageMicroBatch:
    fields = read_object(value, where, ("checkpoint", "groups", "attention", "linear", "remap"), ("offload",))
    return StageMicroBatch(
        groups=read_list(fields["groups"], f"{where}.groups", _read_group),
        checkpoint=read_choice(fields["checkpoint"], f"{where}.checkpoint", Checkpoint),
        attention=_read_layout(fields["attention"], f"{where}.attention"),
        linear=_read_layout(fields["linear"], f"{where}.linear"),
        remap=read_choice(fields["remap"], f"{where}.remap", Remap),
        offload=read_bool(fields.get("offload", False), f"{where}.offload"),
    )


def _read_group(value: Any, where: str) -> Group:
    fields = read_object(value, where, ("ranks", "ulysses", "ring", "method", "route", "spans"))
    route = None
    if fields["route"] is not None:
        routed = read_object(fields["route"], f"{where}.route", ("proxies", "slices"))
        proxies = read_integers(routed["proxies"], f"{where}.route.proxies")
        route = Route(proxies, read_integer(routed["slices"], f"{where}.route.slices"))
    return Group(
        ranks=read_integers(fields["ranks"], f"{where}.ranks"),
        ulysses=read_integer(fields["ulysses"], f"{where}.ulysses"),
        ring=read_integer(fields["ring"], f"{where}.ring"),
        spans=read_list(fields["spans"], f"{where}.spans", _read_span),
        method=read_choice(fields["method"], f"{where}.method", Method),
        route=route,
    )


def _read_span(value: Any, where: str) -> Span:
    numbers = read_integers(value, where)
    return Span(*numbers) if len(numbers) == 3 else refuse(value, where, "[document, start, stop]")


def _read_layout(value: Any, where: str) -> Layout | None:
    if value is None:
        return None
    two_axes = isinstance(value, dict) and ("start2" in value or "stop2" in value)
    names = Layout.__slots__ if two_axes else Layout.__slots__[:4]
    fields = read_object(value, where, names)
    columns = [np.array(read_integers(fields[name], f"{where}.{name}"), dtype=np.int64) for name in names]
    try:
        return Layout(*columns)
    except PlanError as error:
        raise SeqloomError(f"{where}: {error}") from None
