"""A plan as JSON, and its hash.

    {"format": "seqloom.plan", "version": 1, "planner": "flex", "limits": {...},
     "sharding": "full", "reduce": "round", "documents": [5120, 512, ...],
     "pipelines": [{"stages": [{"ranks": [0, 1], "layers": [0, 32], "tensor": 1}],
                    "rounds": [[{"checkpoint": "full", "attention": null, "linear": null, "remap": "attention",
                                 "groups": [{"ranks": [0, 1], "ulysses": 2, "ring": 1, "method": "ring",
                                             "route": null, "spans": [[0, 0, 5120]]}]}]],
                    "actions": ["0F0 0B0 0REDUCE"]}]}

A round whose first layers offload their activations has `"offloaded_layers": 12` beside its checkpoint, and one whose
last layers recompute less has `"lighter_layers": 5`. `"offload": true`, in files of earlier versions, means all layers.
A group in which latents travel has `"latent": true`, one in which states of scans do `"states": true`; a stage whose
experts are divided over 4 ranks has `"expert": 4`. `"made_for"` has what the plan was made for, with the content of
cluster, model and profile, see `seqloom.cost.made_for`. `actions` has one row per pipeline rank: the distinct `ranks`
of the stages, in the order in which these name them. Reading is strict, see `seqloom.reader`.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
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

OPTIONAL: dict[type[Any], dict[str, object]] = {
    StageMicroBatch: {"offloaded_layers": 0, "lighter_layers": 0},
    Group: {"latent": False, "states": False},
    Limits: {"offload_capacity": ()},
    Stage: {"expert": 1},
}
"""Attributes that files leave out where they have these values."""

_CONTENT = ("limits", "sharding", "reduce", "documents", "pipelines")
_OBJECTS = (Group, StageMicroBatch, Route, Stage, Pipeline, Limits)


def to_json(plan: Plan) -> str:
    """Write canonical JSON: one line, sorted keys, no blanks."""
    return _dump(plan, "planner", *_CONTENT, *(["made_for"] if plan.made_for is not None else []))


def content_hash(plan: Plan) -> str:
    """Hash the canonical JSON without the planner's name and what the plan was made for."""
    return hashlib.sha256(_dump(plan, *_CONTENT).encode()).hexdigest()


def _dump(plan: Plan, *names: str) -> str:
    value = {"format": FORMAT, "version": VERSION, **{name: getattr(plan, name) for name in names}}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return what the file has for a part of a plan. A numpy integer is an integer; anything else fails."""
    if isinstance(value, Round):
        return value.by_stage
    if isinstance(value, Layout):
        return {name: column.tolist() for name, column in zip(value.__slots__, value.columns(), strict=False)}
    if not isinstance(value, _OBJECTS):
        return operator.index(value)
    fields = {KEYS_OF_LIMITS.get(name, name): getattr(value, name) for name in value.__slots__}
    if isinstance(value, Pipeline):
        fields["actions"] = [" ".join(map(str, row)) for row in value.actions]
    usual = OPTIONAL.get(type(value), {})
    return {name: each for name, each in fields.items() if name not in usual or each != usual[name]}


# -- reading: every kind of object with a reader for each of its keys ------------------------------------------------

Reader = Callable[[Any, str], Any]


def from_json(text: str) -> Plan:
    """Read what `to_json` wrote."""
    try:
        return _read_plan(parse_json(text, "the file"))
    except SeqloomError as error:
        raise PlanError(f"plan file: {error}", rule="format") from None


def _read_plan(value: Any) -> Plan:
    fields = read_object(value, "the file", ("format", "version", *_PLAN), ("made_for",))
    if fields["format"] != FORMAT:
        raise SeqloomError(f"format is {fields['format']!r}; a plan file has {FORMAT!r}")
    if fields["version"] != VERSION or type(fields["version"]) is not int:
        raise SeqloomError(f"version is {fields['version']!r}; this release reads version {VERSION}")
    made_for = read_made_for(fields.get("made_for"), "made_for")
    return Plan(**{key: read(fields[key], key) for key, read in _PLAN.items()}, made_for=made_for)


def read_made_for(value: Any, where: str) -> dict[str, Any] | None:
    """Read what a plan was made for, if its file says so. Its parts are read where they are needed."""
    return value if value is None or isinstance(value, dict) else refuse(value, where, "a JSON object")


def _object(kind: type[Any], **readers: Reader) -> Reader:
    optional = OPTIONAL.get(kind, {})
    keys = [key for key in readers if key not in optional]

    def read(value: Any, where: str) -> Any:
        fields = read_object(value, where, keys, [*optional])
        return kind(**{key: readers[key](fields[key], f"{where}.{key}") for key in readers if key in fields})

    return read


def _choice(kind: type[Any]) -> Reader:
    return lambda value, where: read_choice(value, where, kind)


def _list(read: Reader) -> Reader:
    return lambda value, where: read_list(value, where, read)


def _or_null(read: Reader) -> Reader:
    return lambda value, where: None if value is None else read(value, where)


def _read_limits(value: Any, where: str) -> Limits:
    keys = {KEYS_OF_LIMITS.get(name, name): name for name in Limits.__slots__}
    optional = [*OPTIONAL[Limits]]
    fields = read_object(value, where, [key for key in keys if key not in optional], optional)
    capacity, offload_capacity = (
        read_list(fields.pop(key, []), f"{where}.{key}", _read_capacity) for key in ("capacity", *optional)
    )
    numbers: dict[str, Any] = {keys[key]: read_integer(number, f"{where}.{key}") for key, number in fields.items()}
    return Limits(capacity=capacity, offload_capacity=offload_capacity, **numbers)


def _read_capacity(value: Any, where: str) -> tuple[Checkpoint, int]:
    if not isinstance(value, list) or len(value) != 2:
        refuse(value, where, "[checkpoint, tokens]")
    return read_choice(value[0], where, Checkpoint), read_integer(value[1], where)


def _read_layers(value: Any, where: str) -> tuple[int, ...]:
    layers = read_integers(value, where)
    return layers if len(layers) == 2 else refuse(value, where, "[first, one past the last]")


def _read_span(value: Any, where: str) -> Span:
    numbers = read_integers(value, where)
    return Span(*numbers) if len(numbers) == 3 else refuse(value, where, "[document, start, stop]")


def _read_row(value: Any, where: str) -> tuple[Action, ...]:
    words = read_string(value, where).split()
    try:
        return tuple(map(Action.parse, words))
    except PlanError as error:
        raise SeqloomError(f"{where}: {error}") from None


def _read_layout(value: Any, where: str) -> Layout:
    two_axes = isinstance(value, dict) and ("start2" in value or "stop2" in value)
    names = Layout.__slots__ if two_axes else Layout.__slots__[:4]
    fields = read_object(value, where, names)
    columns = [np.array(read_integers(fields[name], f"{where}.{name}"), dtype=np.int64) for name in names]
    try:
        return Layout(*columns)
    except PlanError as error:
        raise SeqloomError(f"{where}: {error}") from None


_STAGE = _object(Stage, ranks=read_integers, layers=_read_layers, tensor=read_integer, expert=read_integer)
_GROUP = _object(
    Group,
    ranks=read_integers,
    ulysses=read_integer,
    ring=read_integer,
    method=_choice(Method),
    route=_or_null(_object(Route, proxies=read_integers, slices=read_integer)),
    spans=_list(_read_span),
    latent=read_bool,
    states=read_bool,
)
_WORK = _object(
    StageMicroBatch,
    checkpoint=_choice(Checkpoint),
    groups=_list(_GROUP),
    attention=_or_null(_read_layout),
    linear=_or_null(_read_layout),
    remap=_choice(Remap),
    offloaded_layers=read_integer,
    lighter_layers=read_integer,
)


def _read_pipeline(value: Any, where: str) -> Pipeline:
    fields = read_object(value, where, ("stages", "rounds", "actions"))
    stages = read_list(fields["stages"], f"{where}.stages", _STAGE)
    layers = [stage.layer_count for stage in stages]

    def read_round(value: Any, where: str) -> Round:
        counts = iter(layers)
        return Round(read_list(value, where, lambda work, place: _read_work(work, place, next(counts, 0))))

    rounds = read_list(fields["rounds"], f"{where}.rounds", read_round)
    return Pipeline(stages, rounds, read_list(fields["actions"], f"{where}.actions", _read_row))


def _read_work(value: Any, where: str, layers: int) -> StageMicroBatch:
    """Read one stage's share of a round; `layers` are those of the stage, for files of earlier versions."""
    if isinstance(value, dict) and "offload" in value:
        everything = read_bool(value["offload"], f"{where}.offload")
        value = {key: each for key, each in value.items() if key != "offload"}
        value |= {"offloaded_layers": layers} if everything else {}
    return _WORK(value, where)


_PLAN: dict[str, Reader] = {
    "planner": read_string,
    "limits": _read_limits,
    "sharding": _choice(Sharding),
    "reduce": _choice(Reduce),
    "documents": read_integers,
    "pipelines": _list(_read_pipeline),
}
