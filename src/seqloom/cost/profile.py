"""Profiles: measured or published constants of one kind of GPU and cluster, as data files, parsed strictly.

A file of kind ``estimate`` says how far a GPU differs from one that has a profile, and becomes an analytic profile:

    {"kind": "estimate", "name": "l4", "devices": ["L4"], "like": "l40s", "compute": 0.25, "memory": 0.35,
     "sources": {"matmul_tflops": "estimate: 0.4 of the data sheet's 121 TFLOP/s; not measured"}}
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from seqloom.errors import SeqloomError, unknown_name
from seqloom.reader import parse_json, read_list, read_object, read_string, refuse

HOST_GB_S = 20.0
"""GB/s of a GPU to and from pinned host memory, in one direction, where a profile has no figure of its own: 16 lanes of
PCIe 4 carry 25 to 28 when nothing else uses them, and the GPUs of a node share its memory."""


HOST_MEMORY_GB_S = 200.0
"""GB/s at which the CPUs of a node stream through its memory, where a profile has no figure of its own: a third of what
two sockets with eight channels of DDR5 each are specified for."""


EXPERT_IMBALANCE = 1.2
"""Tokens at the busiest rank of an EP group over the mean of its ranks, where a profile has no figure of its own. An
estimate: routers that are trained to balance leave single experts far from the mean, but a rank has several of them,
and the tokens of a whole round."""


class Profile:
    """Constants of one kind of GPU and cluster. Two kinds: ``AdditiveProfile`` and ``AnalyticProfile``."""

    __slots__ = ()

    @property
    def known_devices(self) -> tuple[str, ...]:
        """What the names of the devices that these constants are of begin with."""
        raise NotImplementedError

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
    def knows(device: str) -> bool:
        """Whether a shipped analytic profile lists this device."""
        try:
            Profile.for_device(device)
        except SeqloomError:
            return False
        return True

    @staticmethod
    def for_device(device: str) -> AnalyticProfile:
        """The analytic profile that lists this device; compared by prefix, the longest match wins."""
        analytic = [p for p in map(Profile.load, Profile.names()) if isinstance(p, AnalyticProfile)]
        listed = ((known, profile) for profile in analytic for known in profile.devices)
        found = [(known, profile) for known, profile in listed if is_of(device, known)]
        if not found:
            raise SeqloomError(
                f"no profile knows the device {device!r}; name one of {', '.join(Profile.names())} "
                "or give the path of a profile file"
            )
        return max(found, key=lambda entry: (len(entry[0]), entry[1].name))[1]


def is_of(device: str, known: str) -> bool:
    """Whether a device's name begins with a known one: A100-40G is an A100, but an H200 is no H20."""
    name, start = device.lower(), known.lower()
    return name.startswith(start) and not (start[-1:].isdigit() and name[len(start) : len(start) + 1].isdigit())


def require_analytic(profile: AdditiveProfile | AnalyticProfile) -> AnalyticProfile:
    """The profile, if measurements can change its constants."""
    if not isinstance(profile, AnalyticProfile):
        raise SeqloomError(f"profile {profile.name} holds published constants; start from an analytic one, such as cpu")
    return profile


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
    pad_multiple: int  # lengths are rounded up to a multiple of this
    budget_gib: float
    state_bytes_per_parameter: float
    exchange_bytes: float  # all-to-all bytes per token, per layer and per unit of hidden width
    bandwidth_mib_per_ms: dict[int, float]  # effective all-to-all bandwidth by degree
    models: dict[str, AdditiveModel]
    sources: dict[str, str]

    @property
    def known_devices(self) -> tuple[str, ...]:
        """What the names of the devices that these constants are of begin with."""
        return (self.device,)


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
    piece_us: float = 0.0  # per piece that has a prefix, and layer: one more kernel call each way, and merging
    prefix_us: float = 0.0  # per MiB of float32 keys and values in front of a piece in a layer: adding up gradients
    split_us: float = 0.0  # per micro-batch and layer whose backward is split in halves (I, W)
    handover_us: float = 0.0  # from stage to stage, beyond a message's bytes and latency: until the next one notices it
    step_us: float = 0.0  # host time of a step beyond its rounds
    solo_time_ratio: float = 1.0  # a rank's time while all others wait, over its time while all are busy
    overlap: float = 1.0  # share of ring messages and parameter traffic that hides behind computing
    float8_speedup: float = 1.0  # products of linear layers in float8, scaling included, over bfloat16; 1: no float8
    host_gb_s: float = HOST_GB_S  # a GPU to and from pinned host memory, in one direction, while all of its node copy
    expert_imbalance: float = EXPERT_IMBALANCE  # tokens at the busiest rank of an EP group over the mean; 1 or more
    host_memory_gb_s: float = HOST_MEMORY_GB_S  # read and written by the CPUs of a node that update optimiser state

    @property
    def known_devices(self) -> tuple[str, ...]:
        """What the names of the devices that these constants are of begin with."""
        return self.devices

    def save(self, path: str | Path) -> None:
        """Write the profile to a .json file, which ``Profile.load`` reads back."""
        text = json.dumps(profile_content(self), indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


# -- strict reading: unknown keys, missing keys and odd values are refused with the way out

MOST = 1e12
"""No constant is larger."""
KINDS = {"additive": AdditiveProfile, "analytic": AnalyticProfile}
JSON_KEYS = {"solo_time_ratio": "alone", "pad_multiple": "granule"}  # fields whose key in a file has another name
SHARES = ("overlap", "alone")  # at most 1
MAY_BE_ZERO = ("_us", "_ms", "workspace_gib", "overlap")  # costs that may be absent; rates and sizes may not


def parse_profile(text: str, where: str) -> AdditiveProfile | AnalyticProfile:
    """Decode one profile; ``where`` names it in messages."""
    return read_profile(parse_json(text, where), where)


def profile_content(profile: AdditiveProfile | AnalyticProfile) -> dict[str, Any]:
    """Return what the file of a profile holds."""
    [kind] = [name for name, each in KINDS.items() if isinstance(profile, each)]
    return {"kind": kind} | {JSON_KEYS.get(name, name): value for name, value in asdict(profile).items()}


def read_profile(content: Any, where: str) -> AdditiveProfile | AnalyticProfile:
    """Read what the file of a profile holds."""
    data = dict(content) if isinstance(content, dict) else refuse(content, where, "a JSON object")
    kind = data.pop("kind", None)
    if kind == "estimate":
        kind, data = "analytic", _estimated(data, where)
    if not isinstance(kind, str) or kind not in KINDS:
        raise SeqloomError(f"{where}: kind is {kind!r}; it must be one of {', '.join(KINDS)}, estimate")
    return _read(KINDS[kind], data, where)


def _estimated(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the analytic profile of a GPU that is so many times as fast as another; keys that are given stay.

    `compute` scales the TFLOP/s of products and attention, `memory` the bandwidth of the device's memory.
    """
    own_keys = ("name", "devices", "like", "compute", "memory", "sources")
    optional = [JSON_KEYS.get(each.name, each.name) for each in fields(AnalyticProfile) if each.name not in own_keys]
    own = read_object(data, where, own_keys, optional)
    name, compute, memory = own.pop("like"), own.pop("compute"), own.pop("memory")
    compute, memory = _number(float, compute, f"{where}.compute"), _number(float, memory, f"{where}.memory")
    base = profile_content(require_analytic(Profile.load(read_string(name, f"{where}.like"))))
    for curve in (base["attention"], base["tile"]):
        curve |= {way: [rate * compute for rate in curve[way]] for way in ("forward", "backward")}
    base |= {"matmul_tflops": base["matmul_tflops"] * compute, "prefix_us": base["prefix_us"] / memory}
    scaled = {"matmul_tflops": f"{compute:g} times ", "attention": f"{compute:g} times ", "tile": f"{compute:g} times "}
    scaled["prefix_us"] = f"1/{memory:g} times "
    said = {key: f"estimate: {scaled.get(key, '')}that of {name}" for key in base["sources"] if key not in own}
    given = own["sources"] if isinstance(own["sources"], dict) else refuse(own["sources"], where, "a JSON object")
    content = json.loads(json.dumps(base | own | {"sources": said | given}))  # as a file has it
    del content["kind"]
    return content


def _read(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        kinds = itertools.repeat(inner[0]) if inner[-1] is Ellipsis else iter(inner)
        if inner[-1] is not Ellipsis and (not isinstance(value, list) or len(value) != len(inner)):
            refuse(value, where, f"{len(inner)} values")
        return read_list(value, where, lambda item, place: _read(next(kinds), item, place))
    if origin is dict:
        table = value if isinstance(value, dict) else refuse(value, where, "a JSON object")
        return {_key(inner[0], key, where): _read(inner[1], entry, f"{where}.{key}") for key, entry in table.items()}
    return read_string(value, where) if kind is str else _number(kind, value, where)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    by_key = {JSON_KEYS.get(field.name, field.name): field for field in fields(kind)}
    needed = [key for key, field in by_key.items() if field.default is MISSING]
    data = read_object(value, where, needed, [key for key in by_key if key not in needed])
    types = _type_hints(kind)
    values = {key: _read(types[by_key[key].name], entry, f"{where}.{key}") for key, entry in data.items()}
    for share in SHARES:
        if values.get(share, 0) > 1:
            raise SeqloomError(f"{where}.{share} is {values[share]}; it is a share, from 0 to 1")
    if values.get("expert_imbalance", 1) < 1:
        raise SeqloomError(
            f"{where}.expert_imbalance is {values['expert_imbalance']}; the busiest rank has no less than the mean: "
            "give 1 or more"
        )
    built = kind(**{by_key[key].name: value for key, value in values.items()})
    if isinstance(built, Curve):
        _check_curve(built, where)
    if isinstance(built, AdditiveModel) and len(built.parameters_gi) < 2:
        raise SeqloomError(f"{where}.parameters_gi: expected at least two [context, parameters] pairs")
    return built


_type_hints = cache(get_type_hints)


def _key(kind: type, key: str, where: str) -> Any:
    if kind is int and not key.isdigit():
        raise SeqloomError(f"{where}: {key!r} is not a whole number")
    return kind(key)


def _number(kind: type, value: Any, where: str) -> Any:
    """A finite number above zero, or not below it."""
    whole, zero = kind is int, where.endswith(MAY_BE_ZERO)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero) or (whole and value != int(value)) or value > MOST:
        name, least = "whole" if whole else "finite", "0 or more" if zero else "above 0"
        raise SeqloomError(f"{where} is {value!r}; expected a {name} number, {least}, at most {MOST:.0e}")
    return kind(value)


def _check_curve(curve: Curve, where: str) -> None:
    """Knots ascend, throughput is positive, and a longer document never takes less time."""
    if not (len(curve.lengths) == len(curve.forward) == len(curve.backward) >= 1):
        raise SeqloomError(f"{where}: lengths, forward and backward must be equally long and not empty")
    if any(a >= b for a, b in itertools.pairwise(curve.lengths)):
        raise SeqloomError(f"{where}.lengths must ascend from 1 or more: {list(curve.lengths)}")
    for label in ("forward", "backward"):
        points = [(x, x / rate) for x, rate in zip(curve.lengths, getattr(curve, label), strict=True)]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if y1 + (y1 - y0) / (x1 - x0) * x1 <= 0:  # slope of the time L * y(L) at the end of the segment
                raise SeqloomError(f"{where}.{label}: {x1} tokens would take less time than {x0}; lower its TFLOP/s")
