"""Strict reading of profile files: unknown keys, missing keys and odd values are refused with the way out."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from seqloom.cost.profile import AdditiveModel, AdditiveProfile, AnalyticProfile, Curve, LinkRate, Links
from seqloom.errors import SeqloomError, unknown

KINDS = {"additive": AdditiveProfile, "analytic": AnalyticProfile}
MAY_BE_ZERO = ("_us", "_ms", "workspace_gib", "overlap")  # costs that may be absent; rates and sizes may not


def parse_profile(text: str, where: str) -> AdditiveProfile | AnalyticProfile:
    """Decode one profile; ``where`` names it in messages."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise SeqloomError(f"profile {where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SeqloomError(f"{where}: a profile is a JSON object, not {type(data).__name__}")
    kind = data.pop("kind", None)
    if kind not in KINDS:
        raise SeqloomError(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    return _build(KINDS[kind], data, where)


def _build(cls: type, data: Any, where: str) -> Any:
    """Build a dataclass from a mapping with exactly its keys."""
    if not isinstance(data, Mapping):
        raise SeqloomError(f"{where}: expected an object with keys {', '.join(f.name for f in fields(cls))}")
    names = {field.name: field for field in fields(cls)}
    for key in data:
        if key not in names:
            raise unknown(f"key in {where}:", str(key), names)
    missing = [name for name, field in names.items() if name not in data and field.default is MISSING]
    if missing:
        raise SeqloomError(f"{where}: missing {', '.join(missing)}")
    built = cls(**{key: _value(str(names[key].type), value, f"{where}.{key}") for key, value in data.items()})
    if isinstance(built, Curve):
        _check_curve(built, where)
    for share in ("overlap", "alone") if isinstance(built, AnalyticProfile) else ():
        if getattr(built, share) > 1:
            raise SeqloomError(f"{where}.{share} is {getattr(built, share)}; it is a share, from 0 to 1")
    return built


_NESTED = {"Curve": Curve, "Links": Links, "LinkRate": LinkRate}


def _value(kind: str, value: Any, where: str) -> Any:
    """Check one value against its annotation (a string, because annotations are deferred)."""
    if kind in _NESTED:
        return _build(_NESTED[kind], value, where)
    if kind == "str":
        return _expect(value, str, where)
    if kind in ("int", "float"):
        return _number(value, where, whole=kind == "int", zero=where.endswith(MAY_BE_ZERO))
    if kind.startswith("tuple[tuple[int, float]"):
        return tuple((_number(a, where, whole=True), _number(b, where)) for a, b in _pairs(value, where))
    if kind.startswith("tuple["):
        items = _expect(value, list, where)
        inner = kind.removeprefix("tuple[").split(",")[0]
        return tuple(_value(inner, item, f"{where}[{i}]") for i, item in enumerate(items))
    table = _expect(value, dict, where)
    if kind == "dict[int, float]":
        return {_number(_integer(k, where), where, whole=True): _number(v, f"{where}.{k}") for k, v in table.items()}
    if kind == "dict[str, AdditiveModel]":
        return {key: _build(AdditiveModel, entry, f"{where}.{key}") for key, entry in table.items()}
    return {key: _expect(entry, str, f"{where}.{key}") for key, entry in table.items()}


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise SeqloomError(f"{where} is {value!r}; expected a JSON {kind.__name__}")
    return value


def _integer(key: str, where: str) -> int:
    if not key.isdigit():
        raise SeqloomError(f"{where}: {key!r} is not a whole number")
    return int(key)


def _number(value: Any, where: str, *, whole: bool = False, zero: bool = False) -> Any:
    """A finite number above zero, or not below it."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero) or (whole and value != int(value)):
        kind, least = "whole" if whole else "finite", "0 or more" if zero else "above 0"
        raise SeqloomError(f"{where} is {value!r}; expected a {kind} number, {least}")
    return int(value) if whole else float(value)


def _pairs(value: Any, where: str) -> list[tuple[Any, Any]]:
    items = _expect(value, list, where)
    if not all(isinstance(item, list) and len(item) == 2 for item in items) or len(items) < 2:
        raise SeqloomError(f"{where}: expected at least two [context, parameters] pairs")
    return [(item[0], item[1]) for item in items]


def _check_curve(curve: Curve, where: str) -> None:
    """Knots ascend, throughput is positive, and a longer document never takes less time."""
    if not (len(curve.lengths) == len(curve.forward) == len(curve.backward) >= 1):
        raise SeqloomError(f"{where}: lengths, forward and backward must be equally long and not empty")
    if any(a >= b for a, b in itertools.pairwise(curve.lengths)) or curve.lengths[0] < 1:
        raise SeqloomError(f"{where}.lengths must ascend from 1 or more: {list(curve.lengths)}")
    for label in ("forward", "backward"):
        rates = getattr(curve, label)
        if min(rates) <= 0:
            raise SeqloomError(f"{where}.{label} must be above 0 TFLOP/s")
        points = [(length, length / rate) for length, rate in zip(curve.lengths, rates, strict=True)]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if y1 + (y1 - y0) / (x1 - x0) * x1 <= 0:  # slope of the time L * y(L) at the end of the segment
                raise SeqloomError(f"{where}.{label}: {x1} tokens would take less time than {x0}; lower its TFLOP/s")
