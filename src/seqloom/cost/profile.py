"""Profiles: measured or published constants as data files, parsed strictly."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from seqloom.errors import SeqloomError, unknown_name


class Profile:
    """Constants of one kind of GPU and cluster. Two kinds: ``AdditiveProfile`` and ``AnalyticProfile``."""

    __slots__ = ()

    @staticmethod
    def names() -> tuple[str, ...]:
        """Names of the profiles that ship with the package."""
        folder = resources.files("seqloom.cost") / "profiles"
        return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))

    @staticmethod
    def load(source: str | Path) -> AdditiveProfile | AnalyticProfile:
        """Read a shipped profile by name, or a profile file by its path (ending in ``.json``)."""

        if isinstance(source, Path) or str(source).endswith(".json"):
            path = Path(source)
            if not path.is_file():
                raise SeqloomError(f"profile file {path} does not exist; shipped: {', '.join(Profile.names())}")
            return parse_profile(path.read_text(encoding="utf-8"), str(path))
        if source not in Profile.names():
            raise unknown_name("profile", str(source), Profile.names())
        file = resources.files("seqloom.cost") / "profiles" / f"{source}.json"
        return parse_profile(file.read_text(encoding="utf-8"), str(source))

    @staticmethod
    def resolve(
        source: AdditiveProfile | AnalyticProfile | str | Path | None, device: str
    ) -> AdditiveProfile | AnalyticProfile:
        """A profile as it is, read by name or path, or by default the one of this device."""
        if source is None:
            return Profile.for_device(device)
        return source if isinstance(source, Profile) else Profile.load(source)

    @staticmethod
    def for_device(device: str) -> AnalyticProfile:
        """The analytic profile that lists this device; compared by prefix, the longest match wins."""
        found: list[tuple[int, str]] = []
        for name in Profile.names():
            profile = Profile.load(name)
            if isinstance(profile, AnalyticProfile):
                found += [(len(d), name) for d in profile.devices if device.lower().startswith(d.lower())]
        if not found:
            raise SeqloomError(
                f"no profile knows the device {device!r}; name one of {', '.join(Profile.names())} "
                "or give the path of a profile file"
            )
        return Profile.load(max(found)[1])  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class AdditiveModel:
    """Published constants of one model: ``T = (a1 s^2 + a2 s) / d + b1``, and its sizes."""

    layers: int
    hidden: int
    heads: int
    quadratic_ms: float  # a1, per token squared
    linear_ms: float  # a2, per token
    fixed_ms: float  # b1, per micro-batch
    mib_per_token: float  # activations per token on one device
    parameters_gi: tuple[tuple[int, float], ...]  # (context, multiples of 2^30): positions are learned


@dataclass(frozen=True, slots=True)
class AdditiveProfile(Profile):
    """A model of sums: compute plus all-to-all, nothing overlaps, Ulysses only."""

    name: str
    node_size: int
    device: str  # the devices these constants hold for start with this name
    granule: int  # lengths are rounded up to a multiple of this
    budget_gib: float
    state_bytes_per_parameter: float
    exchange_bytes: float  # all-to-all bytes per token, per layer and per unit of hidden width
    bandwidth_mib_per_ms: dict[int, float]  # effective all-to-all bandwidth by degree
    models: dict[str, AdditiveModel]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class Curve:
    """Kernel throughput by document length: TFLOP/s forward and backward at each of ``lengths`` tokens."""

    lengths: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Alpha-beta of one kind of traffic on one class of link; the spec bandwidth is the cluster's."""

    efficiency: float  # achieved share of the link's spec bandwidth
    call_us: float  # per call, beyond the link's own latency
    hop_us: float  # per further participant (collectives) or per doubling of them (all-to-all)


@dataclass(frozen=True, slots=True)
class Links:
    """The three kinds of traffic on one class of link."""

    all_to_all: LinkRate
    p2p: LinkRate
    collective: LinkRate


@dataclass(frozen=True, slots=True)
class AnalyticProfile(Profile):
    """Kernels and links of one kind of GPU, from which the time of any model is composed."""

    name: str
    devices: tuple[str, ...]  # device names this profile is picked for
    matmul_tflops: float  # achieved on a training step's matrix products
    memory_efficiency: float  # achieved share of the device's spec memory bandwidth
    attention: Curve  # causal, one document
    tile: Curve  # not causal: the full tile of a ring step
    intra: Links
    network: Links
    layer_us: float  # host and launch time per layer and round that tokens do not hide
    round_us: float  # the same per round
    ring_step_us: float  # launch and merge of one ring step's kernel, forward or backward
    workspace_gib: float  # CUDA context, communicator buffers, fragmentation
    head_chunk: int  # tokens of logits alive at once
    sources: dict[str, str]
    document_us: float = 0.0  # per document, layer and kernel call: kernels that take one document at a time
    gathered_us: float = 0.0  # per MiB of float32 keys and values gathered in a layer: sorting, adding up gradients
    piece_us: float = (
        0.0  # per piece that has a prefix and layer: a kernel call more, forward and backward, and merging
    )
    prefix_us: float = 0.0  # per MiB of float32 keys and values in front of a piece in a layer: adding up gradients
    split_us: float = 0.0  # per unit and layer whose backward is split in halves, beyond what a whole one takes
    handover_us: float = 0.0  # from stage to stage, beyond a message's bytes and latency: until the next one notices it
    step_us: float = 0.0  # host time of a step beyond its rounds
    alone: float = 1.0  # a rank's time while all others wait, of that while all are busy: they share memory and clock
    overlap: float = 1.0  # share of ring messages and parameter traffic that hides behind computing

    def save(self, path: str | Path) -> None:
        """Write the profile to a .json file, which ``Profile.load`` reads back."""
        text = json.dumps({"kind": "analytic", **asdict(self)}, indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


# ---- merged: cost.parsing
# Strict reading of profile files: unknown keys, missing keys and odd values are refused with the way out.


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
            raise unknown_name(f"key in {where}:", str(key), names)
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
