"""A plan as JSON, and its hash.

    {"format": "seqloom.plan", "version": 1, "planner": "flex", "limits": {...},
     "sharding": "full", "reduce": "round", "documents": [5120, 512, ...],
     "pipelines": [{"stages": [{"ranks": [0, 1], "layers": [0, 32], "tensor": 1}],
                    "rounds": [[{"checkpoint": "full", "attention": null, "linear": null, "remap": "attention",
                                 "groups": [{"ranks": [0, 1], "ulysses": 2, "ring": 1, "method": "ring",
                                             "route": null, "spans": [[0, 0, 5120]]}]}]],
                    "actions": ["0F0 0B0 0REDUCE"]}]}

A round whose activations lie in host memory has `"offload": true` beside its checkpoint.
`actions` has one row per host: the distinct `ranks` of the stages, in the order in which these name them.
Reading is strict: an unknown, missing or repeated key and a value of the wrong type are refused, with its
place.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import numpy as np

from seqloom.errors import PlanError, unknown_name
from seqloom.layout.layout import Layout, Span
from seqloom.layout.route import Route
from seqloom.plan.action import Action
from seqloom.plan.group import Group, Method
from seqloom.plan.limits import Limits, Reduce, Sharding
from seqloom.plan.pipeline import Pipeline, Stage
from seqloom.plan.plan import Plan
from seqloom.plan.round import Checkpoint, Remap, Round, StageMicroBatch

FORMAT = "seqloom.plan"
VERSION = 1
KEYS_OF_LIMITS = {"pad_multiple": "granule"}
"""Attributes of `Limits` that have another name in files."""
_LARGEST = 2**53  # every JSON reader keeps integers up to here exactly


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


# Reading. Every reader takes a value and its place in the file, such as "pipelines[0].rounds[3]".

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def from_json(text: str) -> Plan:
    """Read what `to_json` wrote."""
    try:
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constants)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        _refuse("the file", f"is not JSON ({error})", "write it with Plan.save")
    keys = ("format", "version", "planner", "limits", "sharding", "reduce", "documents", "pipelines")
    fields = _object(value, "the file", keys)
    if fields["format"] != FORMAT:
        _refuse("format", f"is {fields['format']!r}", f"a plan file has {FORMAT!r}")
    if fields["version"] != VERSION or type(fields["version"]) is not int:
        _refuse("version", f"is {fields['version']!r}", f"this release reads version {VERSION}")
    return Plan(
        limits=_read_limits(fields["limits"], "limits"),
        sharding=_enum(fields["sharding"], "sharding", Sharding),
        reduce=_enum(fields["reduce"], "reduce", Reduce),
        documents=_integers(fields["documents"], "documents"),
        pipelines=_list(fields["pipelines"], "pipelines", _read_pipeline),
        planner=_string(fields["planner"], "planner"),
    )


def _read_limits(value: Any, where: str) -> Limits:
    keys = {KEYS_OF_LIMITS.get(name, name): name for name in Limits.__slots__}
    fields = _object(value, where, tuple(keys))
    capacity = _list(fields.pop("capacity"), f"{where}.capacity", _read_capacity)
    numbers = {keys[key]: _integer(number, f"{where}.{key}") for key, number in fields.items()}
    return Limits(capacity=capacity, **numbers)


def _read_capacity(value: Any, where: str) -> tuple[Checkpoint, int]:
    if not isinstance(value, list) or len(value) != 2:
        _refuse(where, f"is {_short(value)}", "give [checkpoint, tokens]")
    return _enum(value[0], where, Checkpoint), _integer(value[1], where)


def _read_pipeline(value: Any, where: str) -> Pipeline:
    fields = _object(value, where, ("stages", "rounds", "actions"))
    return Pipeline(
        stages=_list(fields["stages"], f"{where}.stages", _read_stage),
        rounds=_list(fields["rounds"], f"{where}.rounds", _read_round),
        actions=_list(fields["actions"], f"{where}.actions", _read_row),
    )


def _read_stage(value: Any, where: str) -> Stage:
    fields = _object(value, where, ("ranks", "layers", "tensor"))
    layers = _integers(fields["layers"], f"{where}.layers")
    if len(layers) != 2:
        _refuse(f"{where}.layers", f"is {_short(fields['layers'])}", "give [first, one past the last]")
    tensor = _integer(fields["tensor"], f"{where}.tensor")
    return Stage(_integers(fields["ranks"], f"{where}.ranks"), (layers[0], layers[1]), tensor)


def _read_row(value: Any, where: str) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in _string(value, where).split())
    except PlanError as error:
        raise PlanError(f"plan file, {where}: {error}", rule="format") from None


def _read_round(value: Any, where: str) -> Round:
    return Round(_list(value, where, _read_work))


def _read_work(value: Any, where: str) -> StageMicroBatch:
    given = {"offload": False, **value} if isinstance(value, dict) else value
    fields = _object(given, where, ("checkpoint", "groups", "attention", "linear", "remap", "offload"))
    if type(fields["offload"]) is not bool:
        _refuse(f"{where}.offload", f"is {_short(fields['offload'])}", "give true or false")
    return StageMicroBatch(
        groups=_list(fields["groups"], f"{where}.groups", _read_group),
        checkpoint=_enum(fields["checkpoint"], f"{where}.checkpoint", Checkpoint),
        attention=_read_layout(fields["attention"], f"{where}.attention"),
        linear=_read_layout(fields["linear"], f"{where}.linear"),
        remap=_enum(fields["remap"], f"{where}.remap", Remap),
        offload=fields["offload"],
    )


def _read_group(value: Any, where: str) -> Group:
    fields = _object(value, where, ("ranks", "ulysses", "ring", "method", "route", "spans"))
    return Group(
        ranks=_integers(fields["ranks"], f"{where}.ranks"),
        ulysses=_integer(fields["ulysses"], f"{where}.ulysses"),
        ring=_integer(fields["ring"], f"{where}.ring"),
        spans=_list(fields["spans"], f"{where}.spans", _read_span),
        method=_enum(fields["method"], f"{where}.method", Method),
        route=_read_route(fields["route"], f"{where}.route"),
    )


def _read_route(value: Any, where: str) -> Route | None:
    if value is None:
        return None
    fields = _object(value, where, ("proxies", "slices"))
    return Route(_integers(fields["proxies"], f"{where}.proxies"), _integer(fields["slices"], f"{where}.slices"))


def _read_span(value: Any, where: str) -> Span:
    numbers = _integers(value, where)
    if len(numbers) != 3:
        _refuse(where, f"is {_short(value)}", "a span is [document, start, stop]")
    return Span(*numbers)


def _read_layout(value: Any, where: str) -> Layout | None:
    if value is None:
        return None
    two = isinstance(value, dict) and ("start2" in value or "stop2" in value)
    names = Layout.__slots__ if two else Layout.__slots__[:4]
    fields = _object(value, where, names)
    try:
        columns = [np.array(_integers(fields[name], f"{where}.{name}"), dtype=np.int64) for name in names]
        return Layout(*columns)
    except PlanError as error:
        if error.rule == "format":
            raise
        raise PlanError(f"plan file, {where}: {error}", rule="format") from None


def _object(value: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(where, f"is {_short(value)}", f"give an object with the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise PlanError(f"plan file, {where}: {unknown_name('key', key, keys)}", rule="format")
    missing = [key for key in keys if key not in value]
    if missing:
        _refuse(where, f"lacks the key {missing[0]!r}", f"its keys are {', '.join(keys)}")
    return dict(value)


def _list(value: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        _refuse(where, f"is {_short(value)}", "give a list")
    return tuple([read(entry, f"{where}[{k}]") for k, entry in enumerate(value)])


def _integers(value: Any, where: str) -> tuple[int, ...]:
    if type(value) is list and set(map(type, value)) <= {int} and max(map(abs, value), default=0) <= _LARGEST:
        return tuple(value)
    return _list(value, where, _integer)


def _integer(value: Any, where: str) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        _refuse(where, f"is {_short(value)}", f"give a whole number within {_LARGEST}")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        _refuse(where, f"is {_short(value)}", "give a string")
    return value


def _enum(value: Any, where: str, kind: type[E]) -> E:
    try:
        return kind(value)
    except ValueError:
        hint = unknown_name(kind.__name__.lower(), str(value), [member.value for member in kind])
        raise PlanError(f"plan file, {where}: {hint}", rule="format") from None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        _refuse("the file", f"has the key {twice!r} twice in one object", "keep one of them")
    return fields


def _no_constants(name: str) -> NoReturn:
    _refuse("the file", f"contains {name}", "all numbers of a plan are whole numbers")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _refuse(where: str, what: str, way_out: str) -> NoReturn:
    raise PlanError(f"plan file: {where} {what}; {way_out}", rule="format")
